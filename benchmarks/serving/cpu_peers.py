"""SmolLM2 on a CPU, greedy: Encore beside transformers and llama.cpp, in turns.

    python -m benchmarks serving.cpu_peers --llama-python /path/to/venv/bin/python --json FILE

Each engine lives in a separate process and loads the same GGUF file once; in each round all take their turn, in
changing order, so that a slow minute slows all of them. --llama-python names a Python that has llama-cpp-python;
without it llama.cpp is listed as not installed. "encore" has OpenMP's threads wait as the command `encore` has them,
"encore, default spin" as the library does by itself, which is also how the peers run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import harness
from benchmarks.serving.peer_workers import Worker
from benchmarks.shapes import write_shape
from engine.checkpoint.source import resolve_model
from engine.config import DEFAULT_MODEL
from engine.text.tokenizer import Tokenizer

NEEDS = "CPU"
TEXT = (
    "The sun is a star at the centre of the solar system. It is a massive, nearly perfect sphere of hot plasma, heated "
    "by nuclear fusion in its core. Light from the sun takes about eight minutes and twenty seconds to reach us. "
    "Plants use this light to turn water and carbon dioxide into sugar and oxygen, and almost all life depends on it. "
)
ASKED = {1: 2.5, 8: 1.3}  # batch size -> times transformers' better dtype
ASKED_OF_LLAMA = 0.8  # times llama.cpp's better thread count
ASKED_REPLAY, ASKED_REPLAY_TINY = 1.1, 1.4
PAUSE_SECONDS = 0.2  # between turns, for the last engine's threads to come to rest


@dataclass
class Peer:
    """An engine under comparison: its worker, and each round's figures by batch size."""

    name: str
    kind: str
    settings: dict[str, Any]
    python: str = sys.executable
    worker: Worker | None = None
    missing: str | None = None
    seconds: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    tokens: dict[int, list[list[int]]] = field(default_factory=dict)
    replays: list[dict[str, Any]] = field(default_factory=list)

    def rates(self, batch: int, what: str) -> list[float]:
        """Tokens per second by round: "overall" with the prefill, "decode" from the difference of two runs."""
        return [turn[what] for turn in self.seconds.get(batch, [])]


def peers_of(args: argparse.Namespace, gguf: str, tiny: str) -> list[Peer]:
    """Return all engines, not yet started. llama.cpp is marked missing where --llama-python was not given."""
    two = args.threads
    found = [
        Peer("encore", "encore", {"model": DEFAULT_MODEL, "threads": two}),
        Peer("transformers fp32", "transformers", {"model": gguf, "threads": two, "dtype": "float32"}),
        Peer("transformers bf16", "transformers", {"model": gguf, "threads": two, "dtype": "bfloat16"}),
        Peer("llama.cpp", "llama.cpp", {"model": gguf, "threads": two}, args.llama_python),
        Peer("llama.cpp 1 thread", "llama.cpp", {"model": gguf, "threads": 1}, args.llama_python),
        Peer("encore 1 thread", "encore", {"model": DEFAULT_MODEL, "threads": 1}),
        Peer("encore, default spin", "encore", {"model": DEFAULT_MODEL, "threads": two, "spin": "default"}),
        *(
            Peer(f"encore, spin {spin}", "encore", {"model": DEFAULT_MODEL, "threads": two, "spin": spin})
            for spin in args.spins
        ),
        Peer("encore tiny", "encore", {"model": tiny, "threads": two, "load_format": "dummy"}),
        Peer("encore tiny 1 thread", "encore", {"model": tiny, "threads": 1, "load_format": "dummy"}),
    ]
    for peer in found:
        if not peer.python:
            peer.missing = "not installed (--llama-python names a Python that has llama-cpp-python)"
    return found


def start(peers: list[Peer]) -> None:
    """Start the engines one after another. One that fails is marked missing, with the reason."""
    for peer in peers:
        if peer.missing is None:
            try:
                peer.worker = Worker(peer.kind, peer.settings, peer.python)
            except (OSError, RuntimeError) as error:
                peer.missing = str(error)
        print(f"  {peer.name:22} {peer.missing or json.dumps(peer.worker.about)}", flush=True)


def take_turn(peer: Peer, batch: int, prompts: list[list[int]], tokens: int) -> None:
    """Run one round of one peer at one batch size: a short and a long run, whose difference is decoding alone."""
    short = tokens // 4
    _, brief = peer.worker.call("generate", prompts=prompts[:batch], tokens=short)
    peer.tokens[batch], whole = peer.worker.call("generate", prompts=prompts[:batch], tokens=tokens)
    if any(len(row) != tokens for row in peer.tokens[batch]):
        raise SystemExit(f"{peer.name} gave {[len(row) for row in peer.tokens[batch]]} of {tokens} tokens")
    peer.seconds.setdefault(batch, []).append(
        {
            "overall": batch * tokens / whole,
            "decode": batch * (tokens - short) / max(whole - brief, 1e-9),
        }
    )


def run_rounds(peers: list[Peer], args: argparse.Namespace, prompts: list[list[int]]) -> None:
    """Run the alternating rounds, after an untimed turn of each engine that compiles kernels and captures graphs."""
    alive = [peer for peer in peers if peer.worker is not None]
    speakers = [peer for peer in alive if "tiny" not in peer.name]
    for peer in alive:
        for batch in args.batches if peer in speakers else ():
            peer.worker.call("generate", prompts=prompts[:batch], tokens=8)
        if peer.kind == "encore":
            # its smallest batch captures the graph that the comparison with eager replays
            peer.worker.call("generate", prompts=[[5] * args.prompt_tokens], tokens=2)
    for number in range(args.rounds):
        turn = speakers if number % 2 == 0 else speakers[::-1]
        for batch in args.batches:
            for peer in turn:
                time.sleep(PAUSE_SECONDS)
                take_turn(peer, batch, prompts, args.tokens)
        for peer in alive:
            if peer.kind == "encore":
                time.sleep(PAUSE_SECONDS)
                peer.replays.append(peer.worker.call("replay", batch=1, context=args.prompt_tokens, repeats=15)[0])
        print(f"  round {number + 1} of {args.rounds} done", flush=True)


def idle_share(peers: list[Peer], seconds: float = 1.0) -> float:
    """Return the processor time of all waiting workers as a share of one processor: above 0 where threads spin."""
    workers = [peer.worker for peer in peers if peer.worker is not None]
    time.sleep(PAUSE_SECONDS)
    before = [worker.cpu_seconds() for worker in workers]
    time.sleep(seconds)
    return sum(worker.cpu_seconds() - was for worker, was in zip(workers, before, strict=True)) / seconds


def compare(peers: dict[str, Peer], batches: list[int], threads: int) -> list[dict[str, Any]]:
    """Return rows of ratios with their targets; a ratio is the median over rounds of the ratio within a round."""
    rows = []
    for ours in (peer for peer in peers.values() if peer.kind == "encore" and peer.settings["threads"] == threads):
        for batch in batches:
            if ours.rates(batch, "overall"):
                rows += _against(ours, batch, peers, ("transformers fp32", "transformers bf16"), ASKED.get(batch))
                rows += _against(ours, batch, peers, ("llama.cpp", "llama.cpp 1 thread"), ASKED_OF_LLAMA)
    for name, peer in peers.items():
        if peer.replays:
            asked = ASKED_REPLAY_TINY if "tiny" in name else ASKED_REPLAY
            rows.append(_row(f"replay / eager, {name}", asked, [one["speedup"] for one in peer.replays]))
    return rows


def _against(ours: Peer, batch: int, peers: dict[str, Peer], names: tuple[str, ...], asked: float | None) -> list[dict]:
    """Two rows, overall and decode only, against the faster of the named peers."""
    rows = []
    for what in ("overall", "decode"):
        there = {name: statistics.median(rates) for name in names if (rates := peers[name].rates(batch, what))}
        label = f"batch {batch}, {what}: {ours.name} / "
        if there:
            best = max(there, key=there.__getitem__)
            pairs = zip(ours.rates(batch, what), peers[best].rates(batch, what), strict=True)
            rows.append(_row(label + best, asked, [mine / its for mine, its in pairs]))
        else:
            rows.append({"what": label + names[0].split()[0], "asked": asked, "measured": None, "range": None})
    return rows


def _row(what: str, asked: float | None, ratios: list[float]) -> dict[str, Any]:
    return {
        "what": what,
        "asked": asked,
        "measured": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def agreement(peers: dict[str, Peer], batch: int) -> dict[str, str]:
    """Count the rows whose tokens all equal transformers' tokens in float32, and the mean length of equal tokens."""
    reference = peers["transformers fp32"].tokens.get(batch)
    found = {}
    for name, peer in peers.items():
        if reference and peer.tokens.get(batch):
            same = [
                next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(y))
                for x, y in zip(peer.tokens[batch], reference, strict=True)
            ]
            whole = sum(length == len(reference[0]) for length in same)
            found[name] = f"{whole} of {batch} rows, {statistics.mean(same):.0f} tokens"
    return found


def summary(peers: list[Peer], batches: list[int]) -> list[dict[str, Any]]:
    """Each peer's medians and rounds, as a row."""
    found = []
    for peer in peers:
        entry: dict[str, Any] = {"engine": peer.name, "threads": peer.settings["threads"], "missing": peer.missing}
        if peer.worker is not None:
            entry["about"] = peer.worker.about
        for batch in batches:
            for what in ("overall", "decode"):
                if rates := peer.rates(batch, what):
                    entry[f"batch_{batch}_{what}_tokens_per_second"] = round(statistics.median(rates), 2)
                    entry[f"batch_{batch}_{what}_rounds"] = [round(rate, 2) for rate in rates]
        if peer.replays:
            entry["replay_ms"] = round(statistics.median(one["replay_ms"] for one in peer.replays), 3)
            entry["eager_ms"] = round(statistics.median(one["eager_ms"] for one in peer.replays), 3)
        found.append(entry)
    return found


def print_ratios(report: dict[str, Any]) -> None:
    """Print the ratios beside what was asked, then agreement and idle load."""
    rows = [
        row | {"verdict": "BELOW" if row["asked"] and row["measured"] and row["measured"] < row["asked"] else ""}
        for row in report["ratios"]
    ]
    print(f"\n{harness.table(rows, ('what', 'asked', 'measured', 'verdict'))}")
    print(f"\nsame tokens as transformers fp32: {json.dumps(report['same_tokens'])}")
    print(f"idle workers took {100 * report['idle_share']:.1f}% of a processor")


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--rounds", type=harness.count, default=5)
    parser.add_argument("--threads", type=harness.count, default=2)
    parser.add_argument("--batches", type=harness.counts, default=[1, 8])
    parser.add_argument("--prompt-tokens", type=harness.count, default=32)
    parser.add_argument("--tokens", type=harness.count, default=64,
                        help="generated in the long run; a quarter in the short one")  # fmt: skip
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--spins", type=lambda text: text.split(","), default=[], metavar="N,N",
                        help="also run encore with these values of GOMP_SPINCOUNT")  # fmt: skip
    parser.add_argument("--only", help="peers to run, by the beginning of their names, comma-separated (default: all)")
    args = parser.parse_args(argv)
    if args.tokens < 4:
        parser.error(f"--tokens: at least 4 are needed, {args.tokens} were given")
    report = harness.Report(__spec__.name, args, argv)
    gguf = resolve_model(DEFAULT_MODEL)
    ids = Tokenizer.load(gguf).encode(TEXT * (1 + args.prompt_tokens // 64))
    prompts = [ids[3 * row : 3 * row + args.prompt_tokens] for row in range(max(args.batches))]
    with tempfile.TemporaryDirectory() as folder:
        peers = peers_of(args, gguf.path, write_shape("tiny", folder))
        if args.only:
            names = tuple(args.only.split(","))
            for peer in peers:
                peer.missing = peer.missing or (None if peer.name.startswith(names) else "left out by --only")
        try:
            start(peers)
            run_rounds(peers, args, prompts)
            by_name = {peer.name: peer for peer in peers}
            found = {
                "model": DEFAULT_MODEL,
                "idle_share": round(idle_share(peers), 4),
                "ratios": compare(by_name, args.batches, args.threads),
                "same_tokens": agreement(by_name, max(args.batches)),
                "decode_steps": {
                    peer.name: peer.worker.call("steps")[0]
                    for peer in peers
                    if peer.worker is not None and peer.kind == "encore"
                },
            }
            for row in summary(peers, args.batches):
                report.add(row)
        finally:
            for peer in peers:
                if peer.worker is not None:
                    peer.worker.close()
    rates = [f"batch_{batch}_{what}_tokens_per_second" for batch in args.batches for what in ("overall", "decode")]
    print_ratios(found)
    report.finish(("engine", *rates, "replay_ms", "eager_ms", "missing"), **found)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

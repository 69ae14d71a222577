"""SmolLM2 on a CPU, greedy: Encore, transformers and llama.cpp in turns within one run, beside what was asked.

    python benchmarks/cpu_peers.py --llama-python /path/to/venv/bin/python --out benchmarks/results/cpu-smollm2.json

Each engine lives in a process of its own, loads the same GGUF file once and runs when told to; in each round all take
their turn, in changing order, so that a slow minute slows all of them. --llama-python names a Python that has
llama-cpp-python; without it llama.cpp is listed as not installed. "encore" has OpenMP's threads wait as the command
`encore` has them, "encore, default spin" as the library does by itself, which is also how the peers run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.peer_workers import Worker  # noqa: E402
from benchmarks.shapes import write_shape  # noqa: E402
from engine.bench.measure import circumstances  # noqa: E402
from engine.checkpoint.source import resolve_model  # noqa: E402
from engine.config import DEFAULT_MODEL  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402

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
    """All that are asked for, not yet started; the one without a Python of its own is marked missing."""
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
    """Start and load one after another; one that can't is marked missing with its reason."""
    for peer in peers:
        if peer.missing is None:
            try:
                peer.worker = Worker(peer.kind, peer.settings, peer.python)
            except (OSError, RuntimeError) as error:
                peer.missing = str(error)
        print(f"  {peer.name:22} {peer.missing or json.dumps(peer.worker.about)}", flush=True)


def take_turn(peer: Peer, batch: int, prompts: list[list[int]], tokens: int) -> None:
    """One round of one peer at one batch size: a short and a long run, and what they say."""
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
    """The alternating part. An untimed turn of everybody comes first: lazily made kernels and graphs, cold caches."""
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
    """Processor time that all waiting workers take together, as a share of one processor: about 0, or they spin."""
    workers = [peer.worker for peer in peers if peer.worker is not None]
    time.sleep(PAUSE_SECONDS)
    before = [worker.cpu_seconds() for worker in workers]
    time.sleep(seconds)
    return sum(worker.cpu_seconds() - was for worker, was in zip(workers, before, strict=True)) / seconds


def compare(peers: dict[str, Peer], batches: list[int], threads: int) -> list[dict[str, Any]]:
    """What was asked beside what was measured: the median over rounds of the ratio within a round."""
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
    """Rows whose tokens equal those of transformers in float32 throughout, and the mean length before they part."""
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


def summary(peers: list[Peer], batches: list[int]) -> dict[str, Any]:
    """Each peer's medians and rounds, as plain values."""
    found: dict[str, Any] = {}
    for peer in peers:
        entry: dict[str, Any] = {"threads": peer.settings["threads"], "missing": peer.missing}
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
        found[peer.name] = entry
    return found


def print_tables(report: dict[str, Any], batches: list[int]) -> None:
    """Tokens per second by engine, then the ratios beside what was asked."""
    heads = [f"batch {batch} {what}" for batch in batches for what in ("overall", "decode")]
    print(f"\n{'tokens/s, medians':24}{''.join(f'{head:>18}' for head in heads)}{'replay ms':>12}{'eager ms':>12}")
    for name, entry in report["peers"].items():
        if entry["missing"]:
            print(f"{name:24}{entry['missing']}")
            continue
        cells = [
            entry.get(f"batch_{batch}_{what}_tokens_per_second") for batch in batches for what in ("overall", "decode")
        ]
        line = "".join(f"{'-' if cell is None else f'{cell:.1f}':>18}" for cell in cells)
        print(f"{name:24}{line}{entry.get('replay_ms', '-'):>12}{entry.get('eager_ms', '-'):>12}")
    print(f"\n{'ratio':58}{'asked':>8}{'measured':>10}   range")
    for row in report["ratios"]:
        asked = "-" if row["asked"] is None else f"{row['asked']:.1f}"
        verdict = (
            ""
            if row["asked"] is None or row["measured"] is None
            else ("" if row["measured"] >= row["asked"] else "  BELOW")
        )
        measured = "none" if row["measured"] is None else f"{row['measured']:.2f}"
        print(f"{row['what']:58}{asked:>8}{measured:>10}   {row['range'] or ''}{verdict}")
    print(f"\nsame tokens as transformers fp32: {json.dumps(report['same_tokens'])}")
    print(f"idle workers took {100 * report['idle_share']:.1f}% of a processor; load before {report['load_before']}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=lambda text: [int(one) for one in text.split(",")], default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="generated in the long run; a quarter in the short one")
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument(
        "--spins",
        type=lambda text: text.split(","),
        default=[],
        metavar="N,N",
        help="also run encore with these values of GOMP_SPINCOUNT",
    )
    parser.add_argument("--only", help="peers to run, by the beginning of their names, comma-separated (default: all)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if min(args.rounds, args.threads, args.prompt_tokens, *args.batches) < 1 or args.tokens < 4:
        parser.error("rounds, threads, batches and prompt tokens start at 1, tokens at 4")
    return args


def main() -> None:
    args = parse()
    report = circumstances(sys.argv)
    report["threads"] = args.threads
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
            report |= {
                "settings": {
                    "model": DEFAULT_MODEL,
                    "rounds": args.rounds,
                    "prompt_tokens": args.prompt_tokens,
                    "tokens": args.tokens,
                    "batches": args.batches,
                    "greedy": True,
                },
                "idle_share": round(idle_share(peers), 4),
                "peers": summary(peers, args.batches),
                "ratios": compare(by_name, args.batches, args.threads),
                "same_tokens": agreement(by_name, max(args.batches)),
                "decode_steps": {
                    peer.name: peer.worker.call("steps")[0]
                    for peer in peers
                    if peer.worker is not None and peer.kind == "encore"
                },
            }
        finally:
            for peer in peers:
                if peer.worker is not None:
                    peer.worker.close()
    print_tables(report, args.batches)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

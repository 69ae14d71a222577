"""SmolLM2 on a CPU beside llama.cpp, cell by cell: decode at each batch size, prefill at each prompt length.

    python -m benchmarks serving.cpu_cells --llama-python /path/to/venv/bin/python --json FILE

Both engines read the same GGUF file, live in separate processes and take turns, in reverse order every second round. A
decode is the difference of a long run and a short one, so it holds no prefill; a prefill ends with its first token.
`wall` and `cpu` are the peer's time over Encore's, median over the rounds: above 1, Encore is faster. CPU time is that
of all threads; other processes disturb it less. --old names another source tree of Encore, which then takes turns too:
its `old` ratios are its time over this tree's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import harness
from benchmarks.serving.peer_workers import Worker
from engine.checkpoint.source import resolve_model
from engine.config import DEFAULT_MODEL
from engine.text.tokenizer import Tokenizer

NEEDS = "CPU"
COLUMNS = ("cell", "tokens_per_second", "wall", "cpu", "old_wall", "old_cpu")
TEXT = "The sun is a star at the centre of the solar system, and light from it takes about eight minutes to reach us. "
PAUSE_SECONDS = 0.1  # between turns, for the last engine's threads to come to rest


class Spent(NamedTuple):
    """Seconds of one cell in one round."""

    wall: float
    cpu: float


class Cell(NamedTuple):
    """What one row of the table times: `measure` runs it once on an engine; `tokens` are computed in that time."""

    name: str
    tokens: int
    measure: Callable[[Worker], Spent]


def decode_cell(prompts: list[list[int]], tokens: int) -> Cell:
    """Decode `tokens` tokens a row: a run of as many and one more, less a run of the first token."""

    def measure(worker: Worker) -> Spent:
        _, brief, brief_cpu = worker.measure("generate", prompts=prompts, tokens=1)
        _, whole, whole_cpu = worker.measure("generate", prompts=prompts, tokens=1 + tokens)
        return Spent(max(whole - brief, 1e-9), max(whole_cpu - brief_cpu, 1e-9))

    return Cell(f"decode {len(prompts)}", tokens * len(prompts), measure)


def prefill_cell(prompt: list[int]) -> Cell:
    """Prefill one prompt, up to its first token."""

    def measure(worker: Worker) -> Spent:
        _, wall, cpu = worker.measure("generate", prompts=[prompt], tokens=1)
        return Spent(wall, cpu)

    return Cell(f"prefill {len(prompt)}", len(prompt), measure)


def cells_of(args: argparse.Namespace, ids: list[int]) -> list[Cell]:
    """Return the cells that the arguments ask for, with prompts out of `ids`."""
    prompts = [ids[3 * row : 3 * row + args.context] for row in range(max(args.batches, default=0))]
    decodes = [decode_cell(prompts[:batch], max(8, args.tokens // (1 + batch // 4))) for batch in args.batches]
    return decodes + [prefill_cell(ids[:length]) for length in args.prompts]


def ratio(peer: list[Spent], ours: list[Spent], what: str) -> float:
    """Return the median over rounds of the peer's time over ours."""
    pairs = zip(peer, ours, strict=True)
    return round(statistics.median(getattr(a, what) / getattr(b, what) for a, b in pairs), 3)


def row_of(cell: Cell, found: dict[str, list[Spent]]) -> dict:
    """Return the table's row of a cell, with the single rounds."""
    ours = found["encore"]
    row = {"cell": cell.name, "tokens_per_second": round(cell.tokens / statistics.median(one.wall for one in ours), 1)}
    for peer, prefix in (("llama.cpp", ""), ("old", "old_")):
        if peer in found:
            row |= {f"{prefix}{what}": ratio(found[peer], ours, what) for what in Spent._fields}
    return row | {"rounds": {name: [[round(x, 5) for x in one] for one in spent] for name, spent in found.items()}}


def start(args: argparse.Namespace, gguf: str) -> dict[str, Worker]:
    """Start the engines, each with its model loaded."""
    rows = max([1, *args.batches])
    settings = {"model": args.model, "threads": args.threads, "max_num_seqs": rows}
    workers = {"encore": Worker("encore", settings)}
    if args.old:
        workers["old"] = Worker("encore", settings, root=args.old)
    if args.llama_python:
        workers["llama.cpp"] = Worker("llama.cpp", {"model": gguf, "threads": args.threads}, args.llama_python)
    return workers


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--old", type=Path, help="the root of another source tree of Encore")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file, or its name")
    parser.add_argument("--threads", type=harness.count, default=2)
    parser.add_argument("--batches", type=harness.counts_from_zero, default=[1, 2, 4, 8, 16, 32], help="0: none")
    parser.add_argument("--prompts", type=harness.counts_from_zero, default=[512, 2000], help="0: none")
    parser.add_argument("--context", type=harness.count, default=32, help="prompt tokens of a decode")
    parser.add_argument("--tokens", type=harness.count, default=96, help="of a decode at batch 1; fewer at larger ones")
    parser.add_argument("--rounds", type=harness.count, default=7)
    args = parser.parse_args(argv)
    args.batches, args.prompts = ([one for one in numbers if one] for numbers in (args.batches, args.prompts))
    if not args.batches + args.prompts:
        parser.error("--batches and --prompts: at least one must not be 0")
    report = harness.Report(__spec__.name, args, argv)
    source = resolve_model(args.model)
    longest = max([args.context + 3 * max(args.batches, default=0), *args.prompts])
    ids = Tokenizer.load(source).encode(TEXT * (1 + longest // 20))
    cells = cells_of(args, ids)
    workers = start(args, source.path)
    try:
        for cell in cells:
            for worker in workers.values():  # compiles kernels and captures graphs, untimed
                cell.measure(worker)
        found: dict[str, dict[str, list[Spent]]] = {cell.name: {name: [] for name in workers} for cell in cells}
        for number in range(args.rounds):
            for cell in cells:
                for name in list(workers) if number % 2 == 0 else reversed(workers):
                    time.sleep(PAUSE_SECONDS)
                    found[cell.name][name].append(cell.measure(workers[name]))
        for cell in cells:
            report.add(row_of(cell, found[cell.name]))
    finally:
        for worker in workers.values():
            worker.close()
    report.finish(COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

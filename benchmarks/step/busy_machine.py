"""Decodes beside busy processes: the engine's choice of CPU threads, one thread, and PyTorch's number.

    python -m benchmarks step.busy_machine --json FILE
    python -m benchmarks step.busy_machine --busy 0,2 --training

Ways take turns in each round. `of_the_better`: speed of the engine's choice over the better fixed number's of the same
round, median; asked are 0.8 beside busy processes. The choice carries over from round to round, and --settle tokens are
generated with it before the first. --training times the steps of a small GPT with attached layers instead. Needs
OMP_NUM_THREADS and MKL_NUM_THREADS unset, and Linux.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from engine.utils.openmp import limit_openmp_spinning

NEEDS = "CPU"
COLUMNS = ("busy", "load", "tuned", "one", "all", "of_the_better", "threads")
PROMPT = "The capital of France is"
WIDTH, LAYERS, SEQUENCE = 256, 4, 128  # of the model in training


def decodes(args: argparse.Namespace) -> tuple[dict[str, Callable[[], float]], Callable[[], int]]:
    """Return each way's run, which gives tokens per second, and the number of threads that the engine chose."""
    import torch

    from engine import Engine, EngineConfig, SamplingParams

    engine = Engine(EngineConfig(model=args.model, device="cpu", warmup="lazy", progress=False))
    worker, default = engine.loop.executor.worker, torch.get_num_threads()
    tuner = worker.threads
    if tuner is None:
        raise SystemExit("the number of threads is set: unset OMP_NUM_THREADS and MKL_NUM_THREADS")

    def run(tokens: int, threads: int | None) -> float:
        worker.threads = tuner if threads is None else None
        torch.set_num_threads(threads or default)
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        started = time.perf_counter()
        engine.generate([PROMPT] * args.batch, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        torch.set_num_threads(default)
        return args.batch * tokens / seconds

    run(args.settle, None)
    ways = {"tuned": None, "one": 1, "all": default}
    return {name: lambda threads=threads: run(args.tokens, threads) for name, threads in ways.items()}, (
        lambda: tuner.count
    )


def training(args: argparse.Namespace) -> tuple[dict[str, Callable[[], float]], Callable[[], int]]:
    """As `decodes`, with steps per second of models whose layers are attached, one model for each way."""
    import torch

    default = torch.get_num_threads()
    trainers = {name: Trainer(threads) for name, threads in {"tuned": None, "one": 1, "all": default}.items()}

    def run(trainer: Trainer) -> float:
        torch.set_num_threads(trainer.threads)
        started = time.perf_counter()
        for _ in range(args.tokens):
            trainer.step()
        seconds = time.perf_counter() - started
        trainer.threads = torch.get_num_threads()  # for its next run: others use other numbers meanwhile
        torch.set_num_threads(default)
        return args.tokens / seconds

    ways = {name: lambda trainer=trainer: run(trainer) for name, trainer in trainers.items()}
    return ways, lambda: trainers["tuned"].threads


class Trainer:
    """A small GPT with attached layers. `threads`: PyTorch's number when its last run ended."""

    def __init__(self, threads: int | None):
        import torch
        from torch import nn

        from engine import Engine, EngineConfig

        layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(LAYERS)]
        self.model, self.x = nn.Sequential(*layers), torch.randn(4, SEQUENCE, WIDTH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        before = torch.get_num_threads()
        self.engine = Engine(EngineConfig(mode="training", num_threads=threads))
        self.engine.attach(self.model, modules=[str(index) for index in range(LAYERS)])
        self.threads = torch.get_num_threads()
        torch.set_num_threads(before)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--busy", type=harness.counts_from_zero, default=[0, 1, 2])
    parser.add_argument("--batch", type=harness.count, default=1)
    parser.add_argument("--tokens", type=harness.count, default=64, help="or training steps, of a run")
    parser.add_argument("--settle", type=harness.count, default=64, help="tokens before the first round")
    parser.add_argument("--rounds", type=harness.count, default=5)
    parser.add_argument("--training", action="store_true")
    args = parser.parse_args(argv)
    limit_openmp_spinning()
    report = harness.Report(__spec__.name, args, argv)
    ways, threads = (training if args.training else decodes)(args)
    for busy in args.busy:
        with harness.busy_processes(busy):
            ways["tuned"]()
            found: dict[str, list[float]] = harness.alternate(ways, args.rounds)
            ratios = [
                tuned / max(fixed) for tuned, *fixed in zip(found["tuned"], found["one"], found["all"], strict=True)
            ]
            row: dict[str, Any] = {"busy": busy, "load": float(Path("/proc/loadavg").read_text().split()[0])}
            row |= {name: round(statistics.median(values), 1) for name, values in found.items()}
            row |= {"of_the_better": round(statistics.median(ratios), 3), "ratios": [round(one, 2) for one in ratios]}
            report.add(row | {"threads": threads()})
    report.finish(COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Sampling of tokens from a batch of logits by our kernels, and with --torch by PyTorch's operations, in turns.

    python -m benchmarks kernels.sampling --vocab 32000,151936 --logits equal,peaked --json FILE
    python -m benchmarks kernels.sampling --params temperature=1 temperature=0.7,top_p=0.9,min_p=0.05
    TRITON_INTERPRET=1 python -m benchmarks kernels.sampling --device cpu --vocab 3000 --rows 1,4 --repeats 2

bf16 logits. kernels_ms, torch_ms: the time of one replay of the CUDA graph of a sampling step, between events around
10 replays; without a GPU, of one call. over_first_us: what that takes longer than with the first --params, in
microseconds. same_tokens: the share of tokens that are those of PyTorch's operations. The third command tries it
without a GPU, where Triton is installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch

from benchmarks import harness
from engine.protocol.request import SamplingParams
from engine.sampling.sampler import Sampler

NEEDS = "1 GPU"

LOGITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "equal": torch.zeros_like,
    "narrow": lambda x: x * 0.3,
    "normal": lambda x: x,
    "wide": lambda x: x * 3,
    "ties": lambda x: (x * 4).round() / 4,
    "peaked": lambda x: x * 3 + 15 * (torch.arange(x.shape[1], device=x.device) < min(100, x.shape[1] // 2)),
}
"""Distributions of logits by name, of standard normal numbers. 100 tokens of "peaked" lie 15 above the others."""

PARAMS = [
    "temperature=0.7",
    "temperature=0.7,top_p=0.9",
    "top_p=0.95,min_p=0.05",
    "top_k=5000,top_p=0.95",
    "top_k=50,top_p=0.9",
]
_REPLAYS = 10


def sampling_params(text: str) -> str:
    """Check an argument such as temperature=0.7,top_p=0.9."""
    try:
        _parsed(text)
    except Exception as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    return text


def _parsed(text: str) -> SamplingParams:
    pairs = (pair.split("=") for pair in text.split(","))
    return SamplingParams(**{name: int(value) if name == "top_k" else float(value) for name, value in pairs})


class Step:
    """A sampling step over static buffers; `timed`: one graph on a GPU."""

    def __init__(self, params: str, logits: torch.Tensor, *, fused: bool, timed: bool = True):
        rows, device = len(logits), logits.device
        sampler = Sampler(rows, logits.shape[1], device, fused=fused)
        for slot in range(rows):
            sampler.set_slot(slot, _parsed(params), slot, [1], [])
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        slots = torch.arange(1, rows + 1, device=device)
        last_tokens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        run, variant = sampler.slot_sampling(), sampler.variant(range(rows)) or {}
        self.run: Callable[[], object] = lambda: run(logits, slots, self.positions, self.tokens, last_tokens, **variant)
        if timed and logits.is_cuda:
            self.run()  # compiles the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.run()
            self.eager, self.run = self.run, graph.replay  # keeps the memory that the graph reads

    def sampled(self, position: int) -> torch.Tensor:
        """Return a token int64 [rows] for every slot at this position."""
        self.positions.fill_(position)
        self.run()
        return self.tokens.clone()

    def milliseconds(self) -> float:
        """Return the time of one run."""
        if not self.tokens.is_cuda:
            started = time.perf_counter()
            self.run()
            return (time.perf_counter() - started) * 1e3
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(_REPLAYS):
            self.run()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / _REPLAYS


@torch.inference_mode()
def measure(args: argparse.Namespace, report: harness.Report, vocab: int, rows: int) -> None:
    """Add the rows of the report for one shape."""
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=args.device)
    kernels = {params: Step(params, logits, fused=True) for params in args.params}
    by_torch = {params: Step(params, logits, fused=False, timed=args.torch) for params in args.params}
    generator = torch.Generator(args.device).manual_seed(0)
    noise = torch.randn(rows, vocab, device=args.device, generator=generator)
    for name in args.logits:
        logits.copy_(LOGITS[name](noise))
        ways = {f"kernels {params}": step.milliseconds for params, step in kernels.items()}
        if args.torch:
            ways |= {f"torch {params}": step.milliseconds for params, step in by_torch.items()}
        taken = {way: statistics.median(found) for way, found in harness.alternate(ways, args.repeats).items()}
        for params, step in kernels.items():
            same = [step.sampled(position) == by_torch[params].sampled(position) for position in range(2)]
            row: dict[str, object] = {"vocab": vocab, "rows": rows, "logits": name, "params": params}
            row["same_tokens"] = torch.stack(same).double().mean().item()
            row["kernels_ms"] = round(taken[f"kernels {params}"], 4)
            row["over_first_us"] = round(1e3 * (taken[f"kernels {params}"] - taken[f"kernels {args.params[0]}"]), 1)
            if args.torch:
                row["torch_ms"] = round(taken[f"torch {params}"], 4)
            report.add(row)


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--vocab", type=harness.counts, default=[32000, 128256, 151936, 262144])
    parser.add_argument("--rows", type=harness.counts, default=[1, 8, 32, 96, 256])
    parser.add_argument("--logits", type=harness.names(LOGITS), default=["narrow", "peaked"])
    parser.add_argument("--params", type=sampling_params, nargs="+", default=PARAMS, metavar="NAME=VALUE,…")
    parser.add_argument("--torch", action="store_true", help="also time PyTorch's operations")
    parser.add_argument("--repeats", type=harness.count, default=7)
    args = parser.parse_args(argv)
    if args.device == "cuda":
        harness.require_gpus(parser)
    if not find_spec("triton"):
        parser.error("needs Triton, which is not installed: it comes with PyTorch for CUDA")
    report = harness.Report(__spec__.name, args, argv)
    for vocab in args.vocab:
        for rows in args.rows:
            measure(args, report, vocab, rows)
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

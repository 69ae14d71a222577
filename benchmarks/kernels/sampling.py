"""Sampling of tokens from a batch of logits: our kernels beside PyTorch's operations, in turns.

    python -m benchmarks kernels.sampling --top-k 20 --top-p 0.95 --json FILE
    TRITON_INTERPRET=1 python -m benchmarks kernels.sampling --device cpu --vocab 3000 --rows 1,4 --repeats 2

bf16 logits of 151,936 tokens. device_ms: between events around a call that was enqueued behind a sleeping kernel, so
that no gap of the host's is in it. call_ms: until `sample` returns. wall_ms: until its tokens are there. With
--confident 100 tokens lie 15 above the others, which makes a nucleus small. The second command tries it without a GPU,
where Triton is installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec

import torch

from benchmarks import harness
from engine.protocol.request import SamplingParams
from engine.sampling.sampler import Sampler

NEEDS = "1 GPU"


def sampler(args: argparse.Namespace, rows: int, fused: bool) -> Sampler:
    """Return a state whose slots all draw with our kernels, or all with PyTorch's operations."""
    made = Sampler(rows, args.vocab, args.device, fused=fused)
    params = SamplingParams(temperature=args.temperature, min_p=args.min_p, top_k=args.top_k, top_p=args.top_p)
    for slot in range(rows):
        made.set_slot(slot, params, slot, [1], [])
    return made


def sample(state: Sampler, logits: torch.Tensor, position: int) -> torch.Tensor:
    """Sample a token int64 [rows] for every slot at this position."""
    rows, device = len(logits), logits.device
    token_ids, last_tokens = logits.argmax(1), torch.zeros(rows + 1, dtype=torch.int64, device=device)
    slots = torch.arange(1, rows + 1, device=device)
    variant = state.variant(range(rows))
    if variant is not None:
        positions = torch.full((rows,), position, device=device)
        state.slot_sampling()(logits, slots, positions, token_ids, last_tokens, **variant)
    return token_ids


def times(state: Sampler, logits: torch.Tensor, position: int) -> tuple[float, float, float]:
    """device_ms (0 without a GPU), call_ms and wall_ms of one call."""
    device = 0.0
    if logits.is_cuda:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # some 10 ms, in which the host enqueues all of the call
        first.record()
        sample(state, logits, position)
        last.record()
        torch.cuda.synchronize()
        device = first.elapsed_time(last)
    started = time.perf_counter()
    found = sample(state, logits, position)
    called = time.perf_counter()
    found.cpu()
    return device, (called - started) * 1e3, (time.perf_counter() - started) * 1e3


@torch.inference_mode()
def measured(args: argparse.Namespace, rows: int) -> dict[str, object]:
    """Medians of both ways, and the share of tokens that are the same."""
    logits = torch.randn(rows, args.vocab, device=args.device) * 3
    if args.confident:
        logits[:, : min(100, args.vocab // 2)] += 15
    logits = logits.to(torch.bfloat16)
    states = {"torch": sampler(args, rows, False), "kernels": sampler(args, rows, True)}
    tokens = [torch.stack([sample(state, logits, position) for position in range(5)]) for state in states.values()]
    positions = {name: iter(range(args.repeats)) for name in states}
    taken = harness.alternate(
        {name: lambda name=name, state=state: times(state, logits, next(positions[name]))
         for name, state in states.items()},
        args.repeats,
    )  # fmt: skip
    row: dict[str, object] = {"rows": rows, "same_tokens": (tokens[0] == tokens[1]).double().mean().item()}
    for name, found in taken.items():
        medians = (round(statistics.median(column), 4) for column in zip(*found, strict=True))
        row[name] = dict(zip(("device_ms", "call_ms", "wall_ms"), medians, strict=True))
    return row


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--vocab", type=harness.count, default=151936)
    parser.add_argument("--rows", type=harness.counts, default=[1, 32, 256])
    parser.add_argument("--repeats", type=harness.count, default=40)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--confident", action="store_true")
    args = parser.parse_args(argv)
    if args.device == "cuda":
        harness.require_gpus(parser)
    if not find_spec("triton"):
        parser.error("needs Triton, which is not installed: it comes with PyTorch for CUDA")
    report = harness.Report(__spec__.name, args, argv)
    for rows in args.rows:
        report.add(measured(args, rows))
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

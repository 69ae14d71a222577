"""One decode step as a CUDA graph, without the engine's host side: ms a replay and memory bandwidth.

    python -m benchmarks step.decode_step --shape qwen3-0.6b --batches 1,8,32,128,256 --json FILE

Random weights, every row at --context tokens; rows advance as they do in service. gb_per_s is the bytes that a step
moves (weights, keys and values) over its time; share_of_copy is that over the bandwidth of a copy on the same GPU,
measured first unless --bandwidth gives it, and floor_ms the time that those bytes take at it. --profile adds each
kernel's share of one step. --ablate adds what a step takes less without attention, or without one of a layer's linear
layers: launches overlap, so what a part costs in a step differs from what it takes alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks import harness
from benchmarks.shapes import shape, write_shape
from benchmarks.timing import capture, copy_bandwidth, replay_ms
from engine.attention.kv_cache import KVCache
from engine.attention.metadata import DecodeMetadata
from engine.models import config_from_folder
from engine.models.decoder import Decoder
from engine.models.interface import ForwardContext
from engine.sampling.greedy import GreedySampler
from engine.worker.input_buffers import Layout

if find_spec("triton"):  # PyTorch for CPUs comes without it, and --help works there
    from engine.attention import triton as triton_attention
    from engine.attention.triton import TritonBackend
    from engine.models import fused_decoder
    from engine.models.fused_decoder import FusedDecoder

NEEDS = "1 GPU"
PAGE = 16
PRODUCTS = ("qkv", "o", "gate_up", "down")


def build(shape: str, rows: int, context: int) -> tuple[Decoder, FusedDecoder, KVCache, Any]:
    """Build a model with random weights, pages for `rows` sequences of `context` + 512 tokens, and their state."""
    config = config_from_folder(write_shape(shape, tempfile.mkdtemp()))
    model = Decoder(config, torch.bfloat16, "cuda", max_len=4096)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
        if parameter.dim() == 1:
            parameter.data.add_(1)
    pages_each = -(-(context + 512) // PAGE)
    kv = KVCache(config.cache_specs(), rows * pages_each + 1, PAGE, torch.bfloat16, "cuda")
    for pages in (*kv.k, *kv.v):
        pages.normal_()
    layout = Layout(rows, 4096 // PAGE)
    state = layout.views(torch.zeros(layout.size, dtype=torch.int64, device="cuda"))
    order = torch.randperm(rows * pages_each, device="cuda") + 1
    state.page_tables[0, 1:, :pages_each] = order.view(rows, pages_each)
    return model, model.fused(rows, rows), kv, state


def measure(
    model: Decoder,
    fused: FusedDecoder,
    kv: KVCache,
    state: Any,
    rows: int,
    bandwidth: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Time the step of `rows` rows; `bandwidth` is a copy's in GB/s."""
    context, slots, positions = args.context, state.slots[:rows], state.positions[:rows]
    attention, sampler = TritonBackend(kv, rows), GreedySampler(rows, model.config.vocab_size, model.device)
    logits = torch.empty(rows, model.config.vocab_size, dtype=torch.bfloat16, device="cuda")
    chosen = torch.empty(rows, dtype=torch.int64, device="cuda")

    def rewind() -> None:
        state.slots[:rows] = torch.arange(1, rows + 1, device="cuda")
        state.positions[:rows] = context - 1

    def step() -> None:
        shared = ForwardContext((), attention.decode(DecodeMetadata(state.page_tables, slots, positions)))
        hidden = fused.embed(state.last_tokens, slots)
        for index in range(model.config.num_layers):
            hidden = fused.layer(index, hidden, shared)
        maxima = fused.head(hidden, logits, after_layer=True)
        sampler(logits, maxima, slots, positions, state.last_tokens, chosen)

    with torch.inference_mode():
        graph, times = timed(step, rewind, args.repeats)
        weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values()) - (
            0 if model.config.tie_word_embeddings else model.embedding.weight.nbytes
        )
        cache = rows * context * kv.nbytes / (kv.num_pages * PAGE)
        ms, moved = statistics.median(times), weights + cache
        found = {
            "batch": rows,
            "ms": round(ms, 4),
            "least_ms": round(min(times), 4),
            "floor_ms": round(moved / bandwidth / 1e6, 3),
            "moved_bytes": round(moved),
            "gb_per_s": round(moved / ms / 1e6, 1),
            "share_of_copy": round(moved / ms / 1e6 / bandwidth, 3),
        }
        if args.profile:
            found["kernels"] = kernels(graph, rewind)
        if args.ablate:
            found["layer_us"] = {}
            for part in ("attention", *PRODUCTS):
                with left_out(fused, part):
                    less = statistics.median(timed(step, rewind, args.repeats)[1])
                found["layer_us"][part] = round((ms - less) / model.config.num_layers * 1e3, 2)
    return found


def timed(
    step: Callable[[], None], rewind: Callable[[], None], repeats: int
) -> tuple[torch.cuda.CUDAGraph, list[float]]:
    """Return the step as a graph, and ms of a replay, each the mean of 20 from the rows' first positions."""
    rewind()
    graph = capture(step)
    return graph, replay_ms(graph, repeats, 20, before=rewind)


@contextmanager
def left_out(fused: FusedDecoder, part: str) -> Iterator[None]:
    """Leave the launches of this part out of steps within the block; their results are meaningless."""
    layers = [fused.tensors.layer(index) for index in range(fused.depth)]
    without = {getattr(layer, part).data_ptr() for layer in layers} if part in PRODUCTS else set()
    linear, attend = fused_decoder.linear, triton_attention.paged_decode
    fused_decoder.linear = lambda x, weight, *rest, **more: (
        0 if weight.data_ptr() in without else linear(x, weight, *rest, **more)
    )
    if part == "attention":
        triton_attention.paged_decode = lambda *rest, **more: None
    try:
        yield
    finally:
        fused_decoder.linear, triton_attention.paged_decode = linear, attend


def kernels(graph: torch.cuda.CUDAGraph, rewind: Any) -> list[tuple[str, int, float]]:
    """(kernel, launches, ms) of one replay; under overlap the sum exceeds the step."""
    rewind()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        graph.replay()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name[:48]
            times[name] += event.device_time
            counts[name] += 1
    return [(name, counts[name], round(us / 1e3, 4)) for name, us in times.most_common(12)]


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--shape", type=shape, default="qwen3-0.6b")
    parser.add_argument("--batches", type=harness.counts, default=[1, 8, 32, 128, 256])
    parser.add_argument("--context", type=harness.count, default=608)
    parser.add_argument("--repeats", type=harness.count, default=9)
    parser.add_argument("--bandwidth", type=float, metavar="GB/s", help="to compare with (default: a copy's, measured)")
    parser.add_argument("--profile", action="store_true", help="each kernel's share")
    parser.add_argument("--ablate", action="store_true", help="what the step takes less without each part")
    args = parser.parse_args(argv)
    harness.require_gpus(parser)
    report = harness.Report(__spec__.name, args, argv)
    bandwidth = args.bandwidth or copy_bandwidth()
    model, fused, kv, state = build(args.shape, max(args.batches), args.context)
    for batch in args.batches:
        report.add({"shape": args.shape} | measure(model, fused, kv, state, batch, bandwidth, args))
    print(f"bandwidth of a copy: {bandwidth:,.0f} GB/s" + (" (given)" if args.bandwidth else " (measured)"))
    report.finish(bandwidth_gb_per_s=round(bandwidth, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

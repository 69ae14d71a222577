"""One decode step on a GPU as a graph: ms a replay, what its kernels take, and the floor that memory sets.

`python -m benchmarks.decode_step --shape qwen3-0.6b --batches 1,8,32,128,256 --out results.json`. Random weights, every
row at --context tokens; rows advance as they do in service. The floor is the bytes of weights and of keys and values at
--bandwidth. `--profile` adds each kernel's share of one step; `--ablate` what a step takes without attention, or
without one of a layer's products: launches overlap, so what a part costs where it stands is not what it takes alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import SHAPES, write_shape
from engine.attention.kv_cache import KVCache
from engine.models import config_from_folder, fused_dense
from engine.models.dense import DenseModel
from engine.models.fused_dense import FusedDense
from engine.worker.input_buffers import Layout

PAGE = 16
PRODUCTS = ("qkv", "o", "gate_up", "down")


def build(shape: str, rows: int, context: int) -> tuple[FusedDense, Any, Layout]:
    """A model with random weights, pages for `rows` sequences of `context` and a few tokens more, and their state."""
    config = config_from_folder(write_shape(shape, tempfile.mkdtemp()))
    model = DenseModel(config, torch.bfloat16, "cuda", max_len=4096)
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.02)
        if parameter.dim() == 1:
            parameter.data.add_(1)
    pages_each = -(-(context + 512) // PAGE)
    kv = KVCache(
        config.num_layers, rows * pages_each + 1, PAGE, config.num_kv_heads, config.head_dim, torch.bfloat16, "cuda"
    )
    for pages in (*kv.k, *kv.v):
        pages.normal_()
    layout = Layout(rows, 4096 // PAGE)
    state = layout.views(torch.zeros(layout.size, dtype=torch.int64, device="cuda"))
    order = torch.randperm(rows * pages_each, device="cuda") + 1
    state.page_table[1:, :pages_each] = order.view(rows, pages_each)
    return FusedDense(model, kv, rows, rows), state, layout


def measure(fused: FusedDense, state: Any, rows: int, context: int, args: argparse.Namespace) -> dict[str, Any]:
    model, kv = fused.model, fused.kv
    hidden = torch.empty(rows, model.config.hidden_size, dtype=torch.bfloat16, device="cuda")
    logits = torch.empty(rows, model.config.vocab_size, dtype=torch.bfloat16, device="cuda")
    chosen = torch.empty(rows, dtype=torch.int64, device="cuda")

    def rewind() -> None:
        state.slots[:rows] = torch.arange(1, rows + 1, device="cuda")
        state.positions[:rows] = context - 1

    def step() -> None:
        fused.embed_rows(state, hidden)
        for index in range(model.config.num_layers):
            fused.layer(index, hidden, fused.decode_attention(state, rows))
        fused.sample_greedy(state.slots, state.positions, state.last_tokens, hidden, logits, chosen, after_layer=True)

    with torch.inference_mode():
        graph, times = timed(step, rewind, args.repeats)
        weights = sum(p.nbytes for p in {id(p): p for p in model.parameters()}.values()) - (
            0 if model.config.tie_word_embeddings else model.embed.weight.nbytes
        )
        cache = rows * context * kv.nbytes / (kv.num_pages * PAGE)
        found = {
            "batch": rows,
            "ms": round(statistics.median(times), 4),
            "least_ms": round(min(times), 4),
            "floor_ms": round((weights + cache) / 4.3e12 * 1e3, 3),
        }
        if args.profile:
            found["kernels"] = kernels(graph, rewind)
        if args.ablate:
            found["us_a_layer"] = {}
            for part in ("attention", *PRODUCTS):
                with left_out(fused, part):
                    less = statistics.median(timed(step, rewind, args.repeats)[1])
                found["us_a_layer"][part] = round((statistics.median(times) - less) / model.config.num_layers * 1e3, 2)
    return found


def timed(
    step: Callable[[], None], rewind: Callable[[], None], repeats: int
) -> tuple[torch.cuda.CUDAGraph, list[float]]:
    """The step as a graph, and ms of a replay, each of 20."""
    rewind()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(repeats):
        rewind()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(20):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 20)
    return graph, times


@contextmanager
def left_out(fused: FusedDense, part: str) -> Iterator[None]:
    """Steps within the block lack the launches of this part; what they compute is nothing."""
    layers = [fused.tensors.layer(index) for index in range(fused.depth)]
    without = {getattr(layer, part).data_ptr() for layer in layers} if part in PRODUCTS else set()
    linear, attend = fused_dense.linear, fused_dense.paged_decode
    fused_dense.linear = lambda x, weight, *rest, **more: (
        0 if weight.data_ptr() in without else linear(x, weight, *rest, **more)
    )
    if part == "attention":
        fused_dense.paged_decode = lambda *rest, **more: None
    try:
        yield
    finally:
        fused_dense.linear, fused_dense.paged_decode = linear, attend


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--batches", default="1,8,32,128,256")
    parser.add_argument("--context", type=int, default=608)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--profile", action="store_true", help="each kernel's share")
    parser.add_argument("--ablate", action="store_true", help="what the step takes without each part")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    batches = [int(size) for size in args.batches.split(",")]
    fused, state, _ = build(args.shape, max(batches), args.context)
    rows = []
    for batch in batches:
        rows.append(measure(fused, state, batch, args.context, args))
        print(args.shape, json.dumps(rows[-1]), flush=True)
    if args.out:
        args.out.write_text(
            json.dumps(
                {
                    "shape": args.shape,
                    "context": args.context,
                    "torch": torch.__version__,
                    "device": torch.cuda.get_device_name(),
                    "rows": rows,
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()

"""One decode step as a CUDA graph, without the engine's host side: ms a replay and memory bandwidth.

    python -m benchmarks step.decode_step --shape qwen3-0.6b --batches 1,8,32,128,256 --json FILE

Random weights, every row at --context tokens; rows advance as they do in service. gb_per_s is the bytes that a step
moves (weights, keys and values; of experts those that the rows choose) over its time; share_of_copy is that over
the bandwidth of a copy on the same GPU, measured first unless --bandwidth gives it, and floor_ms the time that those
bytes take at it. --profile adds each kernel's share of one step, and the timeline of a layer: launches overlap, so a
launch is given the time from the end of the launch before it to its own end, the median over the layers. --ablate adds
what a step takes less without attention, or without one of a layer's linear layers. --quantization adds steps of the
same shape with quantised weights; the graphs of all formats are replayed in turn. --kv-cache-dtype adds steps of the
plain weights with a cache in fp8. --own-layers adds the steps of the model's own layers, PyTorch operations in a graph.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.shapes import shape, write_shape
from benchmarks.timing import capture, copy_bandwidth, replay_ms
from engine.attention.cache_spec import group_layers, paged_layers
from engine.attention.kv_cache import FP8_DTYPES, KVCache
from engine.attention.metadata import DecodeMetadata
from engine.checkpoint.quantization import Quantization, WeightScheme
from engine.layers.moe import MoE
from engine.loader.quantized import weight_methods
from engine.models import config_from_folder
from engine.models.decoder import Decoder
from engine.models.interface import ForwardContext
from engine.sampling.greedy import GreedySampler
from engine.worker.input_buffers import Layout

if find_spec("triton"):  # PyTorch for CPUs comes without it, and --help works there
    from engine.attention import triton as triton_attention
    from engine.attention.triton import TritonBackend
    from engine.kernels.compile_ahead import compile_ahead
    from engine.models import fused_decoder
    from engine.models.fused_decoder import FusedDecoder

NEEDS = "1 GPU"
PAGE = 16
PRODUCTS = ("qkv", "o", "gate_up", "down")


FORMATS: dict[str, tuple[str, tuple[int | None, int | None], bool]] = {
    "fp8": ("fp8", (1, None), True),
    "fp8-block": ("fp8", (128, 128), True),
    "int8": ("int8", (1, None), True),
    "int4": ("int4", (1, 128), True),
}
"""Formats of --quantization: the codes, the rows and columns that share a scale, and whether there are no zeros."""


class Step(NamedTuple):
    """A captured step. `rewind` sets the rows' first positions; moved: the bytes of weights and of the cache."""

    graph: torch.cuda.CUDAGraph
    step: Callable[[], None]
    rewind: Callable[[], None]
    moved: float


def build(
    shape: str, rows: int, context: int, form: str = "plain", kv: KVCache | None = None
) -> tuple[Decoder, FusedDecoder, KVCache, Any]:
    """Build a model with random weights, pages for `rows` sequences of `context` + 512 tokens, and their state.

    `kv`: the pages that another build made for the same arguments, to use them again.
    """
    config = config_from_folder(write_shape(shape, tempfile.mkdtemp()))
    if form != "plain":
        element, block, symmetric = FORMATS[form]
        scheme = WeightScheme(layout="online", element=element, block=block, symmetric=symmetric)
        config = replace(config, quantization=Quantization(method="online", schemes=((("Linear",), scheme),)))
    max_len = max(4096, (context // PAGE + 33) * PAGE)
    model = Decoder(config, torch.bfloat16, "cuda", max_len=max_len, methods=weight_methods(config))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0, 0.02)
        if "norm" in name:
            parameter.data.add_(1)
    for module in model.modules():
        if hasattr(module, "codes"):
            module.codes.view(torch.uint8).random_(0, 120)
            module.scale.fill_(1e-3)
    pages_each = -(-(context + 512) // PAGE)
    kv = make_cache(model, rows, context) if kv is None else kv
    layout = Layout(rows, max_len // PAGE, groups=len(kv.groups))
    state = layout.views(torch.zeros(layout.size, dtype=torch.int64, device="cuda"))
    state.last_tokens.random_(config.vocab_size)
    order = torch.randperm(len(kv.groups) * rows * pages_each, device="cuda") + 1
    state.page_tables[:, 1:, :pages_each] = order.view(-1, rows, pages_each)
    return model, model.fused(rows, rows), kv, state


def make_cache(model: Decoder, rows: int, context: int, stored: torch.dtype | None = None) -> KVCache:
    """Return random pages for `rows` sequences of `context` + 512 tokens; `stored`: their dtype, if not the model's."""
    specs = model.config.cache_specs()
    count = len(group_layers(specs)) * rows * -(-(context + 512) // PAGE) + 1
    kv = KVCache(specs, count, PAGE, torch.bfloat16, "cuda", stored)
    for pages in (*kv.k, *kv.v):
        if stored is None:
            pages.normal_()
        else:
            pages.copy_(torch.randn(pages.shape, device="cuda", dtype=torch.bfloat16).to(stored).view(torch.uint8))
    return kv


def prepare(model: Decoder, fused: Decoder | FusedDecoder, kv: KVCache, state: Any, rows: int, context: int) -> Step:
    """Capture the step of `rows` rows."""
    slots, positions = state.slots[:rows], state.positions[:rows]
    attention, sampler = TritonBackend(kv, rows), GreedySampler(rows, model.config.vocab_size, model.device)
    logits = torch.empty(rows, model.config.vocab_size, dtype=torch.bfloat16, device="cuda")
    chosen = torch.empty(rows, dtype=torch.int64, device="cuda")

    def rewind() -> None:
        state.slots[:rows] = torch.arange(1, rows + 1, device="cuda")
        state.positions[:rows] = context - 1

    def step() -> None:
        shared = ForwardContext(
            fused.rope(positions), attention.decode(DecodeMetadata(state.page_tables, slots, positions))
        )
        hidden = fused.embed(state.last_tokens, slots)
        for index in range(model.config.num_layers):
            hidden = fused.layer(index, hidden, shared)
        maxima = fused.head(hidden, logits, after_layer=True)
        sampler(logits, maxima, slots, positions, state.last_tokens, chosen)

    compile_ahead(step, torch.device("cuda", torch.cuda.current_device()))
    rewind()
    moved = weight_bytes(model, chosen_experts(model, step, rows)) + rows * cache_bytes(model, context, kv)
    return Step(capture(step), step, rewind, moved)


def weight_bytes(model: Decoder, chosen: dict[MoE, Tensor]) -> float:
    """Return the bytes of weights that a step reads: of experts those in `chosen`, the ids of a layer's rows."""
    moved = float(sum(one.nbytes for one in distinct(model)))
    if not model.config.tie_word_embeddings:
        moved -= model.embedding.weight.nbytes
    for layer, experts in chosen.items():
        unread = 1 - len(experts.unique()) / layer.experts.count
        moved -= unread * sum(one.nbytes for one in distinct(layer.experts))
    return moved


def chosen_experts(model: Decoder, step: Callable[[], None], rows: int) -> dict[MoE, Tensor]:
    """Run a step and return the experts [rows, k] that each layer's router chose."""
    layers = [layer for layer in model.modules() if isinstance(layer, MoE)]
    for layer in layers:
        layer.recorded = torch.zeros(rows, layer.router.top_k, dtype=torch.int64, device=model.device)
    step()
    chosen = {layer: layer.recorded for layer in layers if layer.recorded is not None}
    for layer in layers:
        layer.recorded = None
    return chosen


def distinct(module: nn.Module) -> list[Tensor]:
    """Return the parameters and the quantised weights of a module, each once."""
    quantized = [buffer for one in module.modules() if hasattr(one, "codes") for buffer in one.buffers()]
    return list({id(one): one for one in (*module.parameters(), *quantized)}.values())


def cache_bytes(model: Decoder, context: int, kv: KVCache) -> int:
    """Return the bytes of keys and values that a row of `context` tokens reads; windows bound them."""
    each = kv.k[0].element_size()
    specs = paged_layers(model.config.cache_specs()).values()
    elements = ((spec.window or context, sum(map(math.prod, spec.token_shapes))) for spec in specs)
    return sum(each * min(context, window) * count for window, count in elements)


def measure(
    builds: dict[str, tuple[Decoder, Decoder | FusedDecoder, KVCache, Any]],
    rows: int,
    bandwidth: float,
    args: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Time the steps of `rows` rows of all formats, in turn; `bandwidth` is a copy's in GB/s."""
    with torch.inference_mode():
        steps = {form: prepare(*built, rows, args.context) for form, built in builds.items()}
        times: dict[str, list[float]] = {form: [] for form in steps}
        for _ in range(args.repeats):
            for form, one in steps.items():
                times[form] += replay_ms(one.graph, 1, 20, before=one.rewind)
        for form, one in steps.items():
            model, fused = builds[form][:2]
            ms, moved = statistics.median(times[form]), one.moved
            found = {
                "batch": rows,
                "format": form,
                "ms": round(ms, 4),
                "least_ms": round(min(times[form]), 4),
                "floor_ms": round(moved / bandwidth / 1e6, 3),
                "moved_bytes": round(moved),
                "gb_per_s": round(moved / ms / 1e6, 1),
                "share_of_copy": round(moved / ms / 1e6 / bandwidth, 3),
            }
            if form != "plain":
                found["times_plain"] = round(statistics.median(times["plain"]) / ms, 3)
            if args.profile:
                found["kernels"] = kernels(one.graph, one.rewind)
                found["layer"] = timeline(launches(one.graph, one.rewind))
            if args.ablate:
                found["layer_us"] = {}
                for part in ("attention", *PRODUCTS):
                    with left_out(fused, part):
                        less = statistics.median(timed(one.step, one.rewind, args.repeats)[1])
                    found["layer_us"][part] = round((ms - less) / model.config.num_layers * 1e3, 2)
            yield found


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
    without = {getattr(layer, part).weight.data_ptr() for layer in layers} if part in PRODUCTS else set()
    linear, attend = fused_decoder.linear, triton_attention.paged_decode
    fused_decoder.linear = lambda x, weight, *rest, **more: (
        0 if weight.weight.data_ptr() in without else linear(x, weight, *rest, **more)
    )
    if part == "attention":
        triton_attention.paged_decode = lambda *rest, **more: None
    try:
        yield
    finally:
        fused_decoder.linear, triton_attention.paged_decode = linear, attend


def kernels(graph: torch.cuda.CUDAGraph, rewind: Callable[[], None]) -> list[tuple[str, int, float]]:
    """(kernel, launches, ms) of one replay; under overlap the sum exceeds the step."""
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for name, start, end in launches(graph, rewind):
        times[name] += end - start
        counts[name] += 1
    return [(name, counts[name], round(us / 1e3, 4)) for name, us in times.most_common(12)]


def launches(graph: torch.cuda.CUDAGraph, rewind: Callable[[], None]) -> list[tuple[str, float, float]]:
    """Return (kernel, start, end) of the launches of one replay in µs, by their ends."""
    rewind()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        graph.replay()
        torch.cuda.synchronize()
    events = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    found = [(event.name[:48], event.time_range.start, event.time_range.end) for event in events]
    return sorted(found, key=lambda launch: launch[2])


def timeline(found: Sequence[tuple[str, float, float]]) -> list[tuple[str, float]]:
    """Return (kernel, µs) of the launches of a layer, from one attention to the next, and of what follows the last.

    found: (kernel, start, end) of a step's launches by their ends. µs: from the end of the launch before to the end of
    this one, the median over layers of the most frequent length.
    """
    taken = [(name, end - before) for (name, _, end), (_, _, before) in zip(found[1:], found, strict=False)]
    starts = [index for index, (name, _) in enumerate(taken) if name.startswith("decode_kernel")]
    layers = [taken[start:end] for start, end in zip(starts, starts[1:], strict=False)]
    if not layers:
        return []
    length = statistics.mode(map(len, layers))
    layers = [layer for layer in layers if len(layer) == length]
    medians = [
        (launch[0][0], round(statistics.median(us for _, us in launch), 2)) for launch in zip(*layers, strict=True)
    ]
    return [*medians, *((f"after the layers: {name}", round(us, 2)) for name, us in taken[starts[-1] + length - 1 :])]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of ms, times as fast as plain weights, and floors: a line for each number of rows and format."""
    lines = ["| rows | weights | ms | times plain | floor by bytes, ms |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['batch']} | {row['format']} | {row['ms']:.2f} | {row.get('times_plain', 1):.2f} "
            f"| {row['floor_ms']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--shape", type=shape, default="qwen3-0.6b")
    parser.add_argument("--batches", type=harness.counts, default=[1, 8, 32, 128, 256])
    parser.add_argument("--context", type=harness.count, default=608)
    parser.add_argument("--repeats", type=harness.count, default=9)
    parser.add_argument("--bandwidth", type=float, metavar="GB/s", help="to compare with (default: a copy's, measured)")
    parser.add_argument("--quantization", type=harness.names(FORMATS), default=[], help="formats beside plain weights")
    parser.add_argument("--kv-cache-dtype", choices=FP8_DTYPES, help="a cache in fp8 beside one in 16 bits")
    parser.add_argument("--own-layers", action="store_true", help="the model's own layers beside the fused ones")
    parser.add_argument("--profile", action="store_true", help="each kernel's share, and a layer's timeline")
    parser.add_argument("--ablate", action="store_true", help="what the step takes less without each part")
    parser.add_argument("--markdown", type=harness.output_file, metavar="FILE", help="write a table")
    args = parser.parse_args(argv)
    harness.require_gpus(parser)
    report = harness.Report(__spec__.name, args, argv)
    bandwidth = args.bandwidth or copy_bandwidth()
    model, fused, kv, state = build(args.shape, max(args.batches), args.context)
    builds: dict[str, tuple[Decoder, Decoder | FusedDecoder, KVCache, Any]] = {"plain": (model, fused, kv, state)}
    if args.own_layers:
        builds["own layers"] = model, model, kv, state
    if args.kv_cache_dtype:
        stored = make_cache(model, max(args.batches), args.context, FP8_DTYPES[args.kv_cache_dtype])
        builds[f"{args.kv_cache_dtype} cache"] = model, fused, stored, state
    for form in args.quantization:
        builds[form] = build(args.shape, max(args.batches), args.context, form, kv)
    for batch in args.batches:
        for row in measure(builds, batch, bandwidth, args):
            report.add({"shape": args.shape} | row)
    if args.markdown is not None:
        args.markdown.write_text(markdown(report.rows))
    print(f"bandwidth of a copy: {bandwidth:,.0f} GB/s" + (" (given)" if args.bandwidth else " (measured)"))
    report.finish(bandwidth_gb_per_s=round(bandwidth, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

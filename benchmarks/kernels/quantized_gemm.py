"""Linear layers with quantised weights beside cuBLAS with bf16 weights: µs a layer, alternating in one process.

    python -m benchmarks kernels.quantized_gemm --rows 1,8,32,128 --json FILE

Each figure is the median of CUDA graphs of several layers with separate weights (more than the L2 cache holds), so
weights come from memory as they do in a model; the graphs of all formats are replayed in turn. gb_per_s is the bytes of
the weight and its scales over the time, and share_of_copy is that over the bandwidth of a copy, measured first.
--sweep measures other tiles too, until --seconds have passed. --markdown writes a table of the engine's choices: µs,
and the floor, which is the time to read the weights at the bandwidth of a copy.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks import harness
from benchmarks.timing import capture, copy_bandwidth, replay_ms
from engine.checkpoint.quantization import WeightScheme
from engine.layers.formats import build_method
from engine.layers.linear import Linear

if find_spec("triton"):  # PyTorch for CPUs comes without it, and --help works there
    from engine.kernels.compile_ahead import compile_ahead
    from engine.kernels.linear_weight import LinearWeight
    from engine.kernels.quantized_gemm import (
        MAX_ROWS,
        LaunchConfig,
        RingConfig,
        StreamConfig,
        choose_config,
        fill_ring,
        gluon_config,
        layout_of,
        ring_config,
        stream_config,
    )
    from engine.kernels.small_batch_gemm import Scratch
    from engine.kernels.step_linear import linear

NEEDS = "1 GPU"
LEAST_BYTES = 160 << 20  # of weights per graph: three times the L2 cache

SCHEMES: dict[str, tuple[str, tuple[int | None, int | None], bool]] = {
    "fp8-row": ("fp8", (1, None), True),
    "fp8-block": ("fp8", (128, 128), True),
    "int8-row": ("int8", (1, None), True),
    "int4-128": ("int4", (1, 128), True),
    "int4-128-zeros": ("int4", (1, 128), False),
    "mxfp4": ("mxfp4", (1, 32), True),
    "fp8-row-dynamic": ("fp8", (1, None), True),
    "fp8-block-dynamic": ("fp8", (128, 128), True),
}
"""The codes of a format, the rows and columns that share a scale, and whether there are no zeros. With many rows,
"dynamic" ones quantise activations to fp8."""


class Case(NamedTuple):
    """One product of an 8B model: y [M, n] = x [M, k] Wᵀ, with the gate if it is fused."""

    name: str
    n: int
    k: int
    gated: bool = False


CASES = [
    Case("qkv", 6144, 4096),
    Case("o", 4096, 4096),
    Case("gate_up", 14336, 4096, gated=True),
    Case("down", 4096, 14336),
]


def make_weights(case: Case, form: str) -> list[LinearWeight]:
    """Return enough separate random weights of a format, or of "bf16", to exceed the L2 cache."""
    rows, device = case.n * (2 if case.gated else 1), torch.device("cuda")
    found: list[LinearWeight] = []
    while sum(nbytes(one) for one in found) < LEAST_BYTES or len(found) < 4:
        if form == "bf16":
            weight = torch.empty(rows, case.k, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
            found.append(LinearWeight.plain(weight))
            continue
        element, block, symmetric = SCHEMES[form]
        scheme = WeightScheme(
            layout="online",
            element=element,
            block=block,
            symmetric=symmetric,
            dynamic_activations=form.endswith("dynamic"),
        )
        parts = {"gate": case.n, "up": case.n} if case.gated else {"all": rows}
        layer = Linear(
            parts, case.k, bias=False, dtype=torch.bfloat16, device=device, method=build_method(scheme, parts)
        )
        layer.codes.view(torch.uint8).random_(0, 120)
        layer.scale.fill_(120) if layer.scale.dtype == torch.uint8 else layer.scale.normal_(0.01, 0.001)
        if layer.zero is not None:
            layer.zero.random_(-4, 4)
        found.append(layer.linear_weight)
    return found


def nbytes(weight: LinearWeight) -> int:
    return sum(tensor.nbytes for _, tensor in weight.named_tensors("w"))


def library(case: Case, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    y = F.linear(x, weight.weight)
    return F.silu(y[:, : case.n]) * y[:, case.n :] if case.gated else y


def candidates(case: Case, rows: int, weight: LinearWeight) -> list[LaunchConfig | StreamConfig | RingConfig]:
    """Tiles worth trying, the engine's choice first."""
    layout = layout_of(weight, case.k)
    chosen = choose_config(rows, case.n, case.k, case.gated, layout)
    found: list[LaunchConfig | StreamConfig | RingConfig] = [
        gluon_config(rows, weight, case.k, case.gated) or chosen,
        *ring_candidates(case, rows, weight),
        chosen,
    ]
    stream = stream_config(rows, weight, case.k, case.gated)
    if stream is not None:
        found += [stream._replace(tile_outputs=n, warps=w) for n, w in itertools.product((16, 32), (2, 4, 8))]
        return list(dict.fromkeys(found))
    full = max(16, min(128, 1 << (rows - 1).bit_length()))
    tiles = [full] if full <= 64 else [64, 128]
    for tile_rows, outputs, splits, warps, stages in itertools.product(tiles, (64, 128), (1, 2, 4), (4, 8), (4, 6)):
        step, gates = layout.step_bytes, 2 if case.gated else 1
        shared = (outputs * gates * step + tile_rows * step * layout.per_byte * 2) * (stages + 1)
        programs = -(-case.n // outputs) * splits * -(-rows // tile_rows)
        if shared > 200_000 or not 64 <= programs <= 1200 or (warps == 8) != (outputs == 128):
            continue
        if case.k // layout.per_byte % (step * splits) or outputs * tile_rows * gates > 128 * 32 * warps:
            continue
        found.append(LaunchConfig(tile_rows, outputs, step, splits, warps, stages))
    return list(dict.fromkeys(found))


def ring_candidates(case: Case, rows: int, weight: LinearWeight) -> list[RingConfig]:
    """Return tiles of quantized_ring_kernels.py that fill the SMs about once."""
    start, layout = ring_config(rows, weight, case.k, case.gated), layout_of(weight, case.k)
    found = []
    for share, outputs, step, splits, per_sm in itertools.product(
        ("gate",) if case.gated else ("outputs", "inputs"), (64, 128), (64, 128), (1, 2, 4), (1, 2)
    ):
        if start is None or (outputs == 128 and per_sm == 2):
            continue
        pick = start._replace(tile_outputs=outputs, step_bytes=step, share=share, per_sm=per_sm)
        pick = fill_ring(pick, case.n, case.k, layout, splits)
        programs = -(-case.n // (outputs * (2 if share == "outputs" else 1))) * splits
        if pick is not None and 60 * per_sm <= programs <= 300 * per_sm:
            found.append(pick)
    return found


def measure(case: Case, rows: int, forms: Sequence[str], bandwidth: float, sweep: bool, end: float) -> list[Any]:
    """Return a row of results per format, all replayed in turn."""
    x = torch.randn(rows, case.k, device="cuda", dtype=torch.bfloat16)
    out = torch.zeros(rows, case.n, device="cuda", dtype=torch.bfloat16)
    widest = case.n * (2 if case.gated else 1)
    scratch = Scratch(max(rows, 128), rows, max(case.k, case.n), widest, 64, torch.bfloat16, torch.device("cuda"))
    graphs: dict[tuple[str, Any], tuple[torch.cuda.CUDAGraph, int]] = {}
    sizes, kept = {}, []  # a graph doesn't keep the weights that it reads
    for form in ("bf16", *forms):
        weights = make_weights(case, form)
        kept.append(weights)
        sizes[form] = nbytes(weights[0])
        if form == "bf16":
            graphs[form, "cuBLAS"] = capture(*[partial(library, case, x, w) for w in weights]), len(weights)
        picks: list[Any] = [None]
        if form != "bf16" and rows <= MAX_ROWS:
            picks = [None, *(candidates(case, rows, weights[0]) if sweep else ())]

        def run(weights: Any = weights, picks: Any = picks, form: str = form) -> None:
            for pick in picks:
                extra = {"pick": pick} if form != "bf16" else {}
                linear(x, weights[0], out, scratch, gated=case.gated, **extra)

        compile_ahead(run, torch.device("cuda", torch.cuda.current_device()))
        for pick in picks:
            if graphs and time.monotonic() > end:
                break
            extra = {"pick": pick} if pick else {}
            try:
                calls = [partial(linear, x, w, out, scratch, gated=case.gated, **extra) for w in weights]
                graphs[form, pick] = capture(*calls), len(weights)
            except Exception as problem:  # too much shared memory, say
                print(case.name, rows, form, pick, f"{type(problem).__name__}: {problem}"[:120], flush=True)
                scratch.arrivals.zero_()
    times: dict[Any, list[float]] = {key: [] for key in graphs}
    for _ in range(7):
        for key, (graph, count) in graphs.items():
            times[key] += [1e3 * ms / count for ms in replay_ms(graph, 1, 2)]
    base = statistics.median(times["bf16", "cuBLAS"])
    found = []
    for (form, pick), values in times.items():
        us = statistics.median(values)
        rate = sizes[form] / us / 1e3
        found.append(
            {
                "case": case.name,
                "rows": rows,
                "format": form,
                "tile": pick if isinstance(pick, str) else str(tuple(pick or ())),
                "us": round(us, 2),
                "times_bf16": round(base / us, 2),
                "gb_per_s": round(rate),
                "share_of_copy": round(rate / bandwidth, 3),
            }
        )
    return found


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of µs and floors of the engine's tiles; bf16 is the faster of the engine's and cuBLAS."""
    forms = [form for form in dict.fromkeys(row["format"] for row in rows) if form != "bf16"]
    lines = ["| product | rows | bf16 | " + " | ".join(f"{form} | floor" for form in forms) + " |"]
    lines.append("|---|---|---|" + "---|---|" * len(forms))
    for case, count in dict.fromkeys((row["case"], row["rows"]) for row in rows):
        found = [row for row in rows if (row["case"], row["rows"]) == (case, count)]
        cells = [f"{min(row['us'] for row in found if row['format'] == 'bf16'):.1f}"]
        for form in forms:
            own = next((row for row in found if row["format"] == form and row["tile"] == "()"), None)
            cells += ["–", "–"] if own is None else [f"{own['us']:.1f}", f"{own['us'] * own['share_of_copy']:.1f}"]
        lines.append(f"| {case} | {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    parser.add_argument("--rows", type=harness.counts, default=[1, 8, 32, 128])
    parser.add_argument("--cases", type=harness.names({case.name: case for case in CASES}))
    parser.add_argument("--formats", type=harness.names(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--sweep", action="store_true", help="measure other tiles too")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of --sweep")
    parser.add_argument("--markdown", type=harness.output_file, metavar="FILE", help="write a table")
    args = parser.parse_args(argv)
    harness.require_gpus(parser)
    report = harness.Report(__spec__.name, args, argv)
    end, bandwidth = time.monotonic() + args.seconds, copy_bandwidth()
    for rows, case in itertools.product(args.rows, CASES):
        if (args.cases and case.name not in args.cases) or time.monotonic() > end:
            continue
        for row in measure(case, rows, args.formats, bandwidth, args.sweep, end):
            report.add(row)
    if args.markdown is not None:
        args.markdown.write_text(markdown(report.rows))
    columns = ("case", "rows", "format", "tile", "us", "times_bf16", "gb_per_s", "share_of_copy")
    report.finish(columns, bandwidth_gb_per_s=round(bandwidth, 1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Experts of a decode step: the fused launches beside the layer's own module and the memory floor, µs a layer.

    python -m benchmarks kernels.experts --experts 128x8x2048x768,32x4x2880x2880 --rows 1,8,32 --json FILE
    python -m benchmarks kernels.experts --rows 4,16 --tiles

--experts: number of experts, how many a token uses, hidden size and width of an expert. Each figure is one CUDA graph
of LAYERS layers with separate weights, and random rows for each layer. The floor is the bytes of the router and of the
experts that the rows choose, over the bandwidth of a copy that was measured in the same run. --tiles tries other tiles
for 2 to 16 rows.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import harness
from benchmarks.timing import copy_bandwidth, graph_us

if find_spec("triton"):  # PyTorch for CPUs comes without it, and --help works there
    from engine.kernels.expert_step import FEW_ROWS, ExpertScratch, ExpertTensors, Tile, add_experts, choose_tile
    from engine.kernels.linear_weight import LinearWeight
    from engine.kernels.moe import run_experts

NEEDS = "1 GPU"
LAYERS = 6
EPS = 1e-6


def shape(text: str) -> tuple[int, ...]:
    """Convert an argument such as 128x8x2048x768."""
    found = tuple(harness.count(part) for part in text.split("x"))
    if len(found) != 4:
        raise ValueError(f"{text!r} has {len(found)} numbers; give experts, experts per token, hidden size and width")
    return found


def shapes(text: str) -> list[tuple[int, ...]]:
    return [shape(part) for part in text.split(",")]


def make(experts: int, top_k: int, hidden: int, width: int) -> ExpertTensors:
    """Return random experts; the router's logits differ enough that rows choose different ones."""
    random = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16) * 0.05  # noqa: E731
    return ExpertTensors(
        random(experts, hidden), None, top_k, True, LinearWeight.plain(random(experts, 2 * width, hidden)), None,
        LinearWeight.plain(random(experts, hidden, width)), None, None, 1.0,
    )  # fmt: skip


def own_module(hidden: torch.Tensor, experts: ExpertTensors, norm: torch.Tensor) -> None:
    """Compute a layer as its own module does."""
    x = F.rms_norm(hidden, (hidden.shape[1],), norm, EPS)
    weights, chosen = F.linear(x, experts.router).softmax(-1, dtype=torch.float32).topk(experts.top_k, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    hidden.add_(run_experts(x, weights, chosen, experts.gate_up.weight, experts.down.weight))


def measure(
    sizes: tuple[int, ...], layers: list[ExpertTensors], rows: int, tiles: bool, speed: float
) -> dict[str, Any]:
    count, top_k, width, middle = sizes
    scratch = ExpertScratch(max(rows, FEW_ROWS), layers[0], torch.bfloat16, torch.device("cuda"))
    norm = torch.ones(width, device="cuda", dtype=torch.bfloat16)
    inputs = [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in layers]
    used = []
    for x, layer in zip(inputs, layers, strict=True):
        add_experts(x.clone(), layer, scratch, norm=norm, eps=EPS)
        used.append(len(scratch.chosen[:rows].unique()))
    distinct = sum(used) / len(used)
    floor = (distinct * 3 * middle * width + count * width) * 2 / speed / 1e3

    def fused(pick: Any = None) -> float:
        return graph_us(
            [
                lambda x=x, layer=layer: add_experts(x, layer, scratch, norm=norm, eps=EPS, tiles=pick)
                for x, layer in zip(inputs, layers, strict=True)
            ],
            repeats=9,
        )

    module = graph_us(
        [lambda x=x, layer=layer: own_module(x, layer, norm) for x, layer in zip(inputs, layers, strict=True)],
        repeats=9,
    )
    mine = fused()
    row: dict[str, Any] = {
        "experts": "x".join(map(str, sizes)), "rows": rows, "distinct": round(distinct, 1), "floor_us": round(floor, 1),
        "module_us": round(module, 1), "fused_us": round(mine, 1), "of_floor": round(floor / mine, 2),
    }  # fmt: skip
    if tiles and 1 < rows <= FEW_ROWS:
        tried = []
        for first, second in candidates():
            try:
                tried.append([round(fused((first, second)), 1), tuple(first), tuple(second)])
            except Exception as problem:  # too much shared memory, say
                tried.append([float("inf"), tuple(first), f"{tuple(second)}: {type(problem).__name__}"])
        tried.sort(key=lambda one: one[0])
        row["best"] = str(tried[0])
        row["tried"] = tried
    return row


def candidates() -> list[tuple[Tile, Tile]]:
    """Return pairs of tiles, one of which is the engine's."""
    gated = [Tile(*one) for one in itertools.product((16, 32, 64), (64, 128, 256), (4, 8), (3, 4))]
    down = [Tile(*one) for one in itertools.product((32, 64, 128), (64, 128, 256), (4, 8), (3, 4))]
    return [(tile, choose_tile(False)) for tile in gated] + [(choose_tile(True), tile) for tile in down]


def main(argv: Sequence[str]) -> int:
    parser = harness.parser(__spec__.name, __doc__)
    default = "128x8x2048x768,8x2x4096x14336,32x4x2880x2880,60x4x2048x1408"
    parser.add_argument(
        "--experts", type=shapes, default=shapes(default), metavar="ExKxHxI,…", help=f"default: {default}"
    )
    parser.add_argument("--rows", type=harness.counts, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--tiles", action="store_true", help="try other tiles")
    args = parser.parse_args(argv)
    harness.require_gpus(parser)
    report = harness.Report(__spec__.name, args, argv)
    bandwidth = copy_bandwidth()
    for sizes in args.experts:
        torch.manual_seed(0)
        layers = [make(*sizes) for _ in range(LAYERS)]
        for rows in args.rows:
            report.add(measure(sizes, layers, rows, args.tiles, bandwidth))
    report.finish(
        ("experts", "rows", "distinct", "floor_us", "module_us", "fused_us", "of_floor", "best"),
        bandwidth_gb_per_s=round(bandwidth, 1),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

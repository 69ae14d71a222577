"""Experts of a decode step on CUDA: norm, router, experts and residual in three to five launches.

1. norm + router + choice of experts
2. gate and up + activation; with more than FEW_ROWS rows, a launch sorts them by expert before
3. down
4. weighted sum + residual; a single row does this in its third launch

Grids depend only on shapes, and the experts stay on the device: safe to capture. All calls that use one `ExpertScratch`
must stay on one stream. Device code: expert_step_kernels.py and moe_kernels.py. Imports triton: import this module only
on CUDA (or under TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.expert_step_kernels import (
    add_outputs_kernel,
    few_rows_kernel,
    one_row_down_kernel,
    one_row_gate_up_kernel,
    one_row_route_kernel,
    route_kernel,
)
from engine.kernels.launch import cdiv, launch_options, next_power_of_2, overlaps
from engine.kernels.linear_weight import PLAIN_FORMATS, LinearWeight
from engine.kernels.moe import expert_gemm, sort_by_expert

MAX_ROWS = 256
"""Rows of a decode step whose experts these kernels compute; more go to the layer's own module, as a prefill does."""

FEW_ROWS = 16
FORMATS = tuple(PLAIN_FORMATS[dtype] for dtype in (torch.bfloat16, torch.float16))
_ROUTER_TILE, _ONE_ROW_ROUTER_TILE = 16, 4  # experts per program


class ExpertTensors(NamedTuple):
    """The parameters of a layer's router and experts, E of width I, of which each token uses `top_k`.

    - router [E, h], router_bias [E]: the logits of the experts. `normalize`: scale the k weights to a sum of 1.
    - gate_up [E, 2I, h], gate first, and gate_up_bias [E, 2I]; down [E, h, I] and down_bias [E, h].
    - limit, alpha: of the experts' GatedActivation.
    """

    router: Tensor
    router_bias: Tensor | None
    top_k: int
    normalize: bool
    gate_up: LinearWeight
    gate_up_bias: Tensor | None
    down: LinearWeight
    down_bias: Tensor | None
    limit: float | None
    alpha: float


class Tile(NamedTuple):
    """Tile of a GEMM of few rows: outputs (of gate and of up, if gated), depth per iteration, warps, stages."""

    outputs: int
    depth: int
    warps: int
    stages: int


def choose_tile(gated: bool) -> Tile:
    """Return the tile of `few_rows_kernel`."""
    return Tile(32, 256, 4, 3) if gated else Tile(64, 128, 4, 4)


def one_row_tile(inputs: int, gated: bool) -> Tile:
    """Return the tile of the kernels of one row: 16 KB of weights per iteration, and few columns of padding."""
    depth = min(2048, next_power_of_2(inputs))
    while depth > 512 and inputs % depth and cdiv(inputs, depth) * depth - inputs >= depth // 2:
        depth //= 2
    return Tile(max(2, 8192 // depth // (2 if gated else 1)), depth, 4, 1)


class ExpertScratch:
    """Scratch of `add_experts` for up to `rows` rows. Every launch resets the arrival counts to zero."""

    def __init__(self, rows: int, experts: ExpertTensors, dtype: torch.dtype, device: torch.device):
        count, hidden = experts.router.shape
        width, entries = experts.down.weight.shape[-1], rows * experts.top_k
        self.normed = torch.empty(rows, hidden, dtype=dtype, device=device)
        self.logits = torch.empty(rows, count, dtype=torch.float32, device=device)
        self.arrivals = torch.zeros(cdiv(rows, FEW_ROWS), dtype=torch.int32, device=device)
        self.weights = torch.empty(rows, experts.top_k, dtype=torch.float32, device=device)
        self.chosen = torch.empty(rows, experts.top_k, dtype=torch.int32, device=device)
        self.order = torch.empty(entries, dtype=torch.int32, device=device)
        self.starts = torch.empty(count + 1, dtype=torch.int32, device=device)
        self.gated = torch.empty(entries, width, dtype=dtype, device=device)
        self.outputs = torch.empty(entries, hidden, dtype=dtype, device=device)


def add_experts(
    hidden: Tensor,
    experts: ExpertTensors,
    scratch: ExpertScratch,
    *,
    norm: Tensor,
    eps: float,
    valid: Tensor | None = None,
    out: Tensor | None = None,
    tiles: tuple[Tile, Tile] | None = None,
) -> Tensor:
    """Add the experts' outputs for rms_norm(hidden) to hidden [T, h], contiguous, and return the normed rows [T, h].

    `norm` [h], `eps`: of the RMSNorm. `valid` bool [T]: rows that are not valid use no expert. T is at most MAX_ROWS.
    `out` [T, h]: what they are added to in place of hidden.
    `tiles`: for the gated GEMM of few rows and for the one of down, instead of `choose_tile`'s.
    """
    rows, out = len(hidden), hidden if out is None else out
    route(hidden, experts, scratch, norm=norm, eps=eps, valid=valid)
    (_, outputs, width), top_k = experts.down.weight.shape, experts.top_k
    normed, weights, chosen = scratch.normed[:rows], scratch.weights[:rows], scratch.chosen[:rows]
    gated, pdl = scratch.gated[: rows * top_k], overlaps(hidden)
    activation = {"LIMIT": experts.limit or 0.0, "ALPHA": experts.alpha}
    if rows == 1:
        tile = one_row_tile(outputs, True)
        one_row_gate_up_kernel[(cdiv(width, tile.outputs), top_k)](
            normed, experts.gate_up.weight, _or(experts.gate_up_bias, normed), gated, chosen,
            N=width, K=outputs, BN=tile.outputs, BK=tile.depth, BIAS=experts.gate_up_bias is not None, **activation,
            PDL=pdl, num_warps=tile.warps, **launch_options(pdl),
        )  # fmt: skip
        tile = one_row_tile(width, False)
        one_row_down_kernel[(cdiv(outputs, tile.outputs),)](
            gated, experts.down.weight, _or(experts.down_bias, normed), out, weights, chosen,
            TOP_K=top_k, N=outputs, K=width, BN=tile.outputs, BK=tile.depth, BIAS=experts.down_bias is not None,
            PDL=pdl, num_warps=tile.warps, **launch_options(pdl),
        )  # fmt: skip
        return normed
    partial = scratch.outputs[: rows * top_k]
    if rows <= FEW_ROWS:
        both = tiles or (choose_tile(True), choose_tile(False))
        _few_rows(normed, experts.gate_up.weight, experts.gate_up_bias, gated, chosen, rows, both[0], activation)
        _few_rows(gated, experts.down.weight, experts.down_bias, partial, chosen, rows, both[1], None)
    else:
        order, starts = scratch.order[: rows * top_k], scratch.starts
        sort_by_expert(chosen, order, starts)
        limits = experts.limit or 0.0, experts.alpha
        expert_gemm(normed, experts.gate_up.weight, experts.gate_up_bias, gated, order, starts, top_k, limits)
        expert_gemm(gated, experts.down.weight, experts.down_bias, partial, order, starts, top_k, None)
    block = min(1024, next_power_of_2(outputs))
    add_outputs_kernel[(rows, cdiv(outputs, block))](
        partial, weights, chosen, out, TOP_K=top_k, H=outputs, BLOCK=block, PDL=pdl, **launch_options(pdl)
    )
    return normed


def route(
    hidden: Tensor, experts: ExpertTensors, scratch: ExpertScratch, *, norm: Tensor, eps: float, valid: Tensor | None
) -> None:
    """Write the normed rows of hidden [T, h], and their experts and weights, to the scratch."""
    (rows, width), count, pdl = hidden.shape, len(experts.router), overlaps(hidden)
    tensors = (
        hidden, norm, experts.router, _or(experts.router_bias, norm), _or(valid, norm), scratch.normed, scratch.logits,
        scratch.arrivals, scratch.weights, scratch.chosen,
    )  # fmt: skip
    options = {
        "H": width, "E": count, "E_PAD": next_power_of_2(count), "TOP_K": experts.top_k,
        "K_PAD": next_power_of_2(experts.top_k), "NORMALIZE": experts.normalize,
        "BIAS": experts.router_bias is not None, "VALID": valid is not None, "PDL": pdl, **launch_options(pdl),
    }  # fmt: skip
    if rows == 1:
        depth = min(4096, next_power_of_2(width))
        one_row_route_kernel[(cdiv(count, _ONE_ROW_ROUTER_TILE),)](
            *tensors, eps, BE=_ONE_ROW_ROUTER_TILE, BK=depth, num_warps=8 if depth > 2048 else 4, **options
        )
        return
    route_kernel[(cdiv(count, _ROUTER_TILE), cdiv(rows, FEW_ROWS))](
        *tensors, rows, eps, BM=FEW_ROWS, BE=_ROUTER_TILE, BK=256, WIDE=min(512, next_power_of_2(width)), num_warps=4,
        **options,
    )  # fmt: skip


def _few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    chosen: Tensor,
    rows: int,
    tile: Tile,
    activation: dict[str, float] | None,
) -> None:
    (entries, outputs), top_k, pdl = out.shape, chosen.shape[1], overlaps(x)
    few_rows_kernel[(cdiv(outputs, tile.outputs), entries)](
        x, weight, _or(bias, x), out, chosen, rows,
        TOP_K=top_k, K_PAD=next_power_of_2(top_k), N=outputs, K=weight.shape[2], BM=FEW_ROWS, BN=tile.outputs,
        BK=tile.depth, STAGES=tile.stages, GATED=activation is not None, BIAS=bias is not None,
        **(activation or {"LIMIT": 0.0, "ALPHA": 1.0}), PDL=pdl, num_warps=tile.warps, **launch_options(pdl),
    )  # fmt: skip


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return the tensor, or one for a pointer that the kernel does not read."""
    return other if tensor is None else tensor

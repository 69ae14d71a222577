"""Experts of a mixture-of-experts layer on CUDA: sort by expert, two grouped GEMMs, weighted sum.

Four launches, whose grids depend only on shapes; the rows per expert stay on the device. Device code: moe_kernels.py.
Imports triton: import this module only on CUDA (or under TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.launch import cdiv, next_power_of_2
from engine.kernels.moe_kernels import combine_kernel, expert_gemm_kernel, sort_kernel

MAX_SORT_BLOCK = 4096


class GemmTile(NamedTuple):
    """Tile of a grouped GEMM: rows, columns (of gate and of up, if gated), depth per iteration, warps, stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def choose_tile(entries: int, experts: int, gated: bool, dtype: torch.dtype) -> GemmTile:
    """Return the tile for `entries` rows over `experts` experts. Depends only on shapes, so one graph has one tile.

    The rows of a tile follow the mean number of rows per expert: a decode step reads each expert's weights for a few
    rows, so small tiles waste least; a prefill is bound by math. float32 is multiplied without tensor cores, where
    large tiles spill registers.
    """
    mean = cdiv(entries, experts)
    if dtype == torch.float32:
        return GemmTile(16, 32, 32, 4, 2) if mean <= 16 else GemmTile(32, 32, 32, 4, 2)
    if mean <= 16:
        return GemmTile(16, 32 if gated else 64, 128, 4, 4)
    if mean <= 64:
        return GemmTile(32 if mean <= 32 else 64, 64, 64, 4, 4)
    return GemmTile(128, 64 if gated else 128, 64, 8, 3)


def max_tiles(entries: int, experts: int, rows: int) -> int:
    """Return the most tiles of `rows` rows that `entries` entries fill in any routing: each expert rounds up once."""
    used = min(entries, experts)
    return used + (entries - used) // rows


def run_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    tile: GemmTile | None = None,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """Return each row's sum of its experts' outputs times their weights: x [T, h] -> [T, h].

    weights float32 [T, k]; experts int64 [T, k], -1 in rows without expert, which get 0; gate_up [E, 2I, h] with gate
    first, down [E, h, I]; biases [E, 2I] and [E, h]; all contiguous. `limit` and `alpha`: as in the experts'
    GatedActivation. Accumulates in float32. `tile` overrides `choose_tile`. No host reads: safe to capture.
    """
    (tokens, top_k), (num_experts, hidden, width) = experts.shape, down.shape
    entries = tokens * top_k
    order = torch.empty(entries, dtype=torch.int32, device=x.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
    sort_by_expert(experts, order, starts)
    gated = torch.empty(entries, width, dtype=x.dtype, device=x.device)
    activation = (limit or 0.0, alpha)
    expert_gemm(x, gate_up, gate_up_bias, gated, order, starts, top_k, activation, tile)
    outputs = torch.empty(entries, hidden, dtype=x.dtype, device=x.device)
    expert_gemm(gated, down, down_bias, outputs, order, starts, top_k, None, tile)
    total = torch.empty_like(x)
    block = min(1024, next_power_of_2(hidden))
    combine_kernel[(tokens, cdiv(hidden, block))](outputs, weights, experts, total, TOP_K=top_k, H=hidden, BLOCK=block)
    return total


def sort_by_expert(experts: Tensor, order: Tensor, starts: Tensor) -> None:
    """Write the entries of experts [T, k] that have an expert to order [T * k], by expert, and where each one starts.

    order and starts [E + 1] are int32: expert e's entries are order[starts[e]:starts[e + 1]].
    """
    entries, count = experts.numel(), len(starts) - 1
    block = min(MAX_SORT_BLOCK, max(128, next_power_of_2(entries)))
    sort_kernel[(count,)](experts, order, starts, entries, E=count, BLOCK=block, num_warps=max(1, block // 512))


def expert_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    order: Tensor,
    starts: Tensor,
    top_k: int,
    activation: tuple[float, float] | None,
    tile: GemmTile | None = None,
) -> None:
    """Launch one GEMM over all experts; `activation`: limit and alpha of a gated one, None: it is not gated."""
    gated, (limit, alpha) = activation is not None, activation or (0.0, 1.0)
    entries, outputs = out.shape
    num_experts, _, inputs = weight.shape
    tile = tile or choose_tile(entries, num_experts, gated, x.dtype)
    expert_gemm_kernel[(max_tiles(entries, num_experts, tile.rows), cdiv(outputs, tile.columns))](
        x,
        weight,
        weight if bias is None else bias,
        out,
        order,
        starts,
        E=num_experts,
        E_PAD=next_power_of_2(num_experts),
        TOP_K=top_k,
        N=outputs,
        K=inputs,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        GATED=gated,
        BIAS=bias is not None,
        LIMIT=limit,
        ALPHA=alpha,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )

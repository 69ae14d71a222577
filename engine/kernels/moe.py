"""Experts of a mixture-of-experts layer on CUDA: sort by expert, two grouped GEMMs, weighted sum.

Four launches, whose grids depend only on shapes; the rows per expert stay on the device. Device code: moe_kernels.py.
Imports triton: import this module only on CUDA (or under TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.launch import SHARED_BYTES, cdiv, next_power_of_2, overlaps
from engine.kernels.linear_weight import LinearWeight
from engine.kernels.moe_kernels import combine_kernel, expert_gemm_kernel, quantized_expert_kernel, sort_kernel
from engine.kernels.quantized_gemm import FORMATS, Layout, constants_of, layout_of

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
    gate_up: Tensor | LinearWeight,
    down: Tensor | LinearWeight,
    tile: GemmTile | None = None,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """Return each row's sum of its experts' outputs times their weights: x [T, h] -> [T, h].

    weights float32 [T, k]; experts int64 [T, k], -1 in rows without expert, which get 0; gate_up [E, 2I, h] with gate
    first, down [E, h, I], plain or of a format that `reads`; biases [E, 2I] and [E, h]; all contiguous. `limit` and
    `alpha`: as in the experts' GatedActivation. Accumulates in float32. `tile` overrides `choose_tile` of plain
    weights. No host reads: safe to capture.
    """
    (tokens, top_k), hidden = experts.shape, x.shape[1]
    num_experts, rows = _stored(gate_up).shape[:2]
    entries, width = tokens * top_k, rows // 2
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


def reads(weight: LinearWeight, dtype: torch.dtype) -> bool:
    """Return whether `run_experts` with x of `dtype` takes this quantised weight [E, outputs, inputs] as stored."""
    return weight.format in FORMATS and weight.group_of is None and dtype in (torch.bfloat16, torch.float16)


def choose_quantized_tile(entries: int, experts: int, gated: bool, layout: Layout) -> GemmTile:
    """Return the tile of a GEMM with quantised weights; `depth` is bytes of codes. Depends only on shapes."""
    mean = cdiv(entries, experts)
    rows = 16 if mean <= 16 else 32 if mean <= 32 else 64
    stage_bytes = (64 * (2 if gated else 1) + 2 * rows * layout.per_byte) * layout.step_bytes
    stages = 2 if layout.mode == "weight" else min(4, SHARED_BYTES // 2 // stage_bytes - 1)
    return GemmTile(rows, 64, layout.step_bytes, 4, max(2, stages))


def _stored(weight: Tensor | LinearWeight) -> Tensor:
    return weight.weight if isinstance(weight, LinearWeight) else weight


def expert_gemm(
    x: Tensor,
    weight: Tensor | LinearWeight,
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
    (entries, outputs), inputs = out.shape, x.shape[1]
    if isinstance(weight, LinearWeight):
        return _quantized_gemm(x, weight, bias, out, order, starts, top_k, gated, (limit, alpha))
    num_experts = len(weight)
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


def _quantized_gemm(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    out: Tensor,
    order: Tensor,
    starts: Tensor,
    top_k: int,
    gated: bool,
    activation: tuple[float, float],
) -> None:
    """Launch one GEMM over all experts, whose weights are quantised."""
    (entries, outputs), inputs, num_experts = out.shape, x.shape[1], len(weight.weight)
    assert weight.scale is not None
    layout = layout_of(weight, inputs)
    tile = choose_quantized_tile(entries, num_experts, gated, layout)
    constants = {name: value for name, value in constants_of(weight, layout).items() if name != "ACT_ORDER"}
    quantized_expert_kernel[(max_tiles(entries, num_experts, tile.rows), cdiv(outputs, tile.columns))](
        x,
        weight.weight.view(torch.uint8),
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        x if bias is None else bias,
        out,
        order,
        starts,
        outputs,
        E=num_experts,
        E_PAD=next_power_of_2(num_experts),
        TOP_K=top_k,
        N=outputs,
        K=inputs,
        **constants,
        MODE=layout.mode,
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        STAGES=tile.stages,
        GATED=gated,
        BIAS=bias is not None,
        LIMIT=activation[0],
        ALPHA=activation[1],
        ASM=overlaps(x),
        num_warps=tile.warps,
    )

"""Linear layers for a decode step's few rows on CUDA: the launches, and which kernel with which tile a shape takes.

Owns the scratch that split products share. Device code: skinny_kernels.py. All calls of one scratch must stay on one
stream. Imports triton: import it only where the device is CUDA (or under TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from engine.kernels.launch import SHARED_BYTES, launch_options, overlaps
from engine.kernels.small_batch_gemm_kernels import matrix_kernel, vector_kernel
from engine.kernels.step_kernels import best_kernel, gate_kernel, norm_kernel

TILE_OUTPUTS = 64
MAX_SPLITS = 4
MAX_SPLIT_ROWS = 256
"""Above it products are cuBLAS's."""

NUM_SMS = 132
"""Of the device that tiles were measured on."""

WIDE = 32768
"""Outputs from which a product's tiles alone fill any device: a vocabulary."""


class LaunchConfig(NamedTuple):
    """A launch: rows per tile (0: all rows by the vector kernel), outputs per tile, columns per step, and the rest."""

    tile_rows: int
    tile_outputs: int
    columns: int
    splits: int
    warps: int
    stages: int


def suits_library(rows: int, outputs: int, inputs: int, gated: bool) -> bool:
    """Whether cuBLAS, and launches of their own around it, are faster: where arithmetic counts more than launches."""
    if rows > 128:
        return rows > MAX_SPLIT_ROWS or not gated or inputs > 2048
    return rows > 64 and not gated and outputs < WIDE and outputs * inputs >= 2**24


def choose_config(rows: int, outputs: int, inputs: int, gated: bool) -> LaunchConfig:
    """The tile for y [rows, outputs] = x [rows, inputs] Wᵀ; a function of shapes alone, measured on an H200.

    Benchmark: benchmarks/skinny_linear.py.
    """
    if rows == 1:
        return _vector_config(outputs, inputs, gated)
    tile_rows = max(16, min(64, triton.next_power_of_2(rows)))
    output_tiles = triton.cdiv(outputs, TILE_OUTPUTS)
    if rows > 64 and output_tiles * triton.cdiv(rows, 128) >= 96:
        tile_rows = 128
    if outputs >= WIDE:
        return LaunchConfig(tile_rows, TILE_OUTPUTS, 64, 1, 4, 5)
    tiles = output_tiles * triton.cdiv(rows, tile_rows)
    splits = _splits(tiles, rows, inputs)
    split_inputs = inputs // splits
    columns = 128 if tile_rows <= 64 else 64
    if tile_rows <= 32 and split_inputs % 256 == 0 and split_inputs <= (256 if gated else 768):
        columns = 256
    # two programs to a multiprocessor where there are more than one each: the rest would wait for a second turn
    two_per_sm = rows <= 64 and tiles * splits > NUM_SMS and (splits > 1 or rows > 32)
    if two_per_sm and rows > 32:
        columns = 64
    stage_bytes = (TILE_OUTPUTS * (2 if gated else 1) + tile_rows) * columns * 2
    shared_bytes = SHARED_BYTES // 2 if two_per_sm else SHARED_BYTES
    # the first tile of weights takes room beside the stages
    stages = min(5, triton.cdiv(split_inputs, columns), shared_bytes // stage_bytes - 1)
    return LaunchConfig(tile_rows, TILE_OUTPUTS, columns, splits, 4, max(2, stages))


def _splits(tiles: int, rows: int, inputs: int) -> int:
    """Into how many parts of its columns a product goes.

    Few tiles leave multiprocessors without work; parts of under 256 columns cost more to add up than they gain.
    """
    if tiles > 64 or tiles == 64 and rows <= 64 and inputs < 2048:
        splits = 1
    elif tiles <= 32 or tiles < 64 and rows <= 16:
        splits = 4
    else:
        splits = 2
    while splits > 1 and (inputs < 256 * splits or inputs % (128 * splits)):
        splits //= 2
    return splits


def half_normed(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> int:
    """In how many sums of squares a row `linear` with a `next_norm` leaves half of that norm; 0: it leaves nothing."""
    if rows == 1 or dtype == torch.float16:  # weighted before they are divided, outliers may exceed float16's 65504
        return 0
    return 0 if suits_library(rows, outputs, inputs, False) else triton.cdiv(outputs, TILE_OUTPUTS)


def _vector_config(outputs: int, inputs: int, gated: bool) -> LaunchConfig:
    if outputs >= WIDE:
        return LaunchConfig(0, 16, 1024, 1, 4, 1)
    columns = min(4096, triton.next_power_of_2(inputs))
    if inputs % columns:
        columns = max(1024, columns // 2)
    tile = (16384 if columns >= 4096 else 8192) // columns // (2 if gated else 1)
    return LaunchConfig(0, max(2, tile), columns, 1, 8 if columns >= 4096 else 4, 1)


class Scratch:
    """What products leave for their own later programs: partial sums, arrival counts, normed rows, best outputs.

    For products of up to max_tokens rows, and a vocabulary's of up to max_rows. Every launch leaves the counts at zero.
    """

    def __init__(
        self,
        max_tokens: int,
        max_rows: int,
        hidden: int,
        widest: int,
        vocab: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.normed = torch.empty(max_tokens * hidden, dtype=dtype, device=device)
        self.gate_up = torch.empty(max_tokens * widest, dtype=dtype, device=device)
        split_rows = min(max(128, triton.next_power_of_2(max_tokens)), MAX_SPLIT_ROWS)
        max_tiles = triton.cdiv(max(hidden, widest), TILE_OUTPUTS) * triton.cdiv(split_rows, 16)
        self.partials = torch.empty(
            MAX_SPLITS * split_rows * (max(hidden, widest) + 128), dtype=torch.float32, device=device
        )
        self.arrivals = torch.zeros(max_tiles, dtype=torch.int32, device=device)
        # one row's tiles are narrower than those of more rows: a few rows of wide tiles may need less than it
        single_row_tiles = triton.cdiv(vocab, _vector_config(vocab, hidden, False).tile_outputs)
        best_count = max(single_row_tiles, max_rows * triton.cdiv(vocab, TILE_OUTPUTS))
        self.best = torch.empty(best_count, dtype=torch.float32, device=device)
        self.best_at = torch.empty_like(self.best, dtype=torch.int32)
        self.squares = torch.empty(split_rows * triton.cdiv(hidden, TILE_OUTPUTS), dtype=torch.float32, device=device)


def _as_matrix(buffer: Tensor, rows: int, width: int) -> Tensor:
    """The beginning of a flat scratch tensor as [rows, width]."""
    return buffer[: rows * width].view(rows, width)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """out [M, h] = x / sqrt(mean(x²) + eps) * weight, computed in float32."""
    rows, width = x.shape
    pdl = overlaps(x)
    norm_kernel[(rows,)](
        x,
        weight,
        out,
        eps,
        H=width,
        HP=triton.next_power_of_2(width),
        PDL=pdl,
        num_warps=8 if width > 2048 else 4,
        **launch_options(pdl),
    )
    return out


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    scratch: Scratch,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    add: bool = False,
    best: bool = False,
    next_norm: Tensor | None = None,
    squares: int = 0,
    late: bool = False,
    pick: LaunchConfig | None = None,
) -> int:
    """Write y = rms_norm(x) Wᵀ + bias into `out` [M, n], x [M, k] and W [n, k] contiguous; returns the tiles of n.

    `norm` is the RMSNorm's weight (None: x as it is). `gated`: W is [2n, k], the gate's rows first, and y is
    silu(gate) * up. `add`: y is added to what `out` holds. `best`: each tile's best output and its index go to
    `scratch.best` and `scratch.best_at`, [M, tiles]. `next_norm`: the weight with which `out` will be normed next;
    where `half_normed` says so, half of that norm is done here, and the call that norms `out` is given its answer as
    `squares`. `late`: what is launched next has many small programs and little to fetch ahead; it is not let in early.
    One to three launches; grids depend on shapes alone, no host read: safe to capture.
    """
    rows, inputs = x.shape
    outputs = out.shape[1]
    if pick is None and suits_library(rows, outputs, inputs, gated):
        return _linear_cublas(x, weight, out, scratch, norm, eps, bias, gated, add, best)
    pick = pick or choose_config(rows, outputs, inputs, gated)
    tiles = triton.cdiv(outputs, pick.tile_outputs)
    pdl = overlaps(x)
    options = {
        "GATED": gated,
        "ADD": add,
        "BIAS": bias is not None,
        "TILE_ARGMAX": best,
        "PDL": pdl,
        "TRIGGER_AFTER_MATH": late,
        "num_warps": pick.warps,
        **launch_options(pdl),
    }
    if pick.tile_rows == 0:
        vector_kernel[(tiles,)](
            x,
            weight,
            x if norm is None else norm,
            x if bias is None else bias,
            out,
            scratch.best,
            scratch.best_at,
            outputs,
            eps,
            M=rows,
            M_PAD=triton.next_power_of_2(rows),
            K=inputs,
            BN=pick.tile_outputs,
            BK=pick.columns,
            NORM=norm is not None,
            **options,
        )
        return tiles
    if squares:
        x = _as_matrix(scratch.normed, rows, inputs)
    elif norm is not None:
        x = rms_norm(x, norm, eps, _as_matrix(scratch.normed, rows, inputs))
    half_norm = next_norm is not None and half_normed(rows, outputs, inputs, out.dtype) > 0
    matrix_kernel[(tiles, pick.splits, triton.cdiv(rows, pick.tile_rows))](
        x,
        weight,
        x if bias is None else bias,
        out,
        scratch.best,
        scratch.best_at,
        next_norm if half_norm else x,
        scratch.normed,
        scratch.squares,
        scratch.partials,
        scratch.arrivals,
        rows,
        outputs,
        eps,
        K=inputs,
        BM=pick.tile_rows,
        BN=pick.tile_outputs,
        BK=pick.columns,
        SPLITS=pick.splits,
        STAGES=pick.stages,
        HALF_NORM=half_norm,
        NUM_SQUARES=squares,
        SQUARES_PAD=triton.next_power_of_2(max(1, squares)),
        **options,
    )
    return tiles


def _linear_cublas(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    scratch: Scratch,
    norm: Tensor | None,
    eps: float,
    bias: Tensor | None,
    gated: bool,
    add: bool,
    best: bool,
) -> int:
    """What `linear` says, by cuBLAS."""
    (rows, inputs), pdl = x.shape, overlaps(x)
    if norm is not None:
        x = rms_norm(x, norm, eps, _as_matrix(scratch.normed, rows, inputs))
    product = _as_matrix(scratch.gate_up, rows, len(weight)) if gated else out
    if add:
        out.addmm_(x, weight.T)
        if bias is not None:
            out.add_(bias)
    elif bias is not None:
        torch.addmm(bias, x, weight.T, out=product)
    else:
        torch.mm(x, weight.T, out=product)
    width = out.shape[1]
    if gated:
        gate_kernel[(rows, triton.cdiv(width, 1024))](product, out, W=width, BLOCK=1024, PDL=pdl, **launch_options(pdl))
    return best_of_tiles(out, scratch) if best else 0


def best_of_tiles(x: Tensor, scratch: Scratch) -> int:
    """What `linear` leaves with `best`, of an x [M, n] that is there already; returns the tiles of n."""
    rows, width = x.shape
    tiles, pdl = triton.cdiv(width, 4096), overlaps(x)
    best_kernel[(tiles, rows)](
        x, scratch.best, scratch.best_at, N=width, BLOCK=4096, PDL=pdl, num_warps=8, **launch_options(pdl)
    )
    return tiles

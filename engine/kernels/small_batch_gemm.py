"""Small-batch GEMM: linear layers for the few rows of a decode step on CUDA, with fused norm and epilogue.

Chooses kernel and tile by shape, and holds the scratch of split-K GEMMs. Device code: small_batch_gemm_kernels.py. All
calls that use one `Scratch` must stay on one stream. Imports triton: import this module only on CUDA (or under
TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.greedy import tile_maxima
from engine.kernels.launch import SHARED_BYTES, cdiv, launch_options, next_power_of_2, overlaps
from engine.kernels.linear_weight import PLAIN_FORMATS, LinearWeight
from engine.kernels.row_kernels import logits_kernel
from engine.kernels.small_batch_gemm_kernels import matrix_kernel, vector_kernel
from engine.kernels.step_kernels import gate_kernel, norm_kernel

FORMATS = tuple(PLAIN_FORMATS.values())
"""Weight formats that `linear` supports."""

TILE_OUTPUTS = 64
MAX_SPLITS = 4
MAX_SPLIT_ROWS = 256
"""GEMMs of more rows go to cuBLAS."""

NUM_SMS = 132
"""SMs of the device on which the tiles were measured."""

WIDE = 32768
"""From this many outputs (a vocabulary) the tiles of a GEMM alone fill any device."""


class LaunchConfig(NamedTuple):
    """Launch configuration.

    Rows per tile (0: the vector kernel, all rows), outputs per tile, columns per iteration, split-K, warps, stages.
    """

    tile_rows: int
    tile_outputs: int
    columns: int
    splits: int
    warps: int
    stages: int


def suits_library(rows: int, outputs: int, inputs: int, gated: bool) -> bool:
    """Return whether cuBLAS with separate norm and gate launches is faster: math outweighs launch overhead."""
    if rows > 128:
        return rows > MAX_SPLIT_ROWS or not gated or inputs > 2048
    return rows > 64 and not gated and outputs < WIDE and outputs * inputs >= 2**24


def choose_config(rows: int, outputs: int, inputs: int, gated: bool) -> LaunchConfig:
    """Return the tile for y [rows, outputs] = x [rows, inputs] Wᵀ. Depends only on shapes.

    Measured on an H200 with benchmarks/kernels/small_gemm.py.
    """
    if rows == 1:
        return _vector_config(outputs, inputs, gated)
    tile_rows = max(16, min(64, next_power_of_2(rows)))
    output_tiles = cdiv(outputs, TILE_OUTPUTS)
    if rows > 64 and output_tiles * cdiv(rows, 128) >= 96:
        tile_rows = 128
    if outputs >= WIDE:
        return LaunchConfig(tile_rows, TILE_OUTPUTS, 64, 1, 4, 5)
    tiles = output_tiles * cdiv(rows, tile_rows)
    splits = _splits(tiles, rows, inputs)
    split_inputs = inputs // splits
    columns = 128 if tile_rows <= 64 else 64
    if tile_rows <= 32 and split_inputs % 256 == 0 and split_inputs <= (256 if gated else 768):
        columns = 256
    # With more programs than SMs, fit two per SM: otherwise the rest wait for a second wave.
    two_per_sm = rows <= 64 and tiles * splits > NUM_SMS and (splits > 1 or rows > 32)
    if two_per_sm and rows > 32:
        columns = 64
    stage_bytes = (TILE_OUTPUTS * (2 if gated else 1) + tile_rows) * columns * 2
    shared_bytes = SHARED_BYTES // 2 if two_per_sm else SHARED_BYTES
    # the first tile of weights takes shared memory besides the stages
    stages = min(5, cdiv(split_inputs, columns), shared_bytes // stage_bytes - 1)
    return LaunchConfig(tile_rows, TILE_OUTPUTS, columns, splits, 4, max(2, stages))


def _splits(tiles: int, rows: int, inputs: int) -> int:
    """Return the number of split-K programs per tile.

    Few tiles leave SMs idle; splits of fewer than 256 columns cost more to reduce than they gain.
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
    """Return the sums of squares per row that `linear` writes with `next_norm`; 0 if it does not start that norm."""
    if rows == 1 or dtype == torch.float16:  # weights apply before the division: outliers may exceed float16's 65504
        return 0
    return 0 if suits_library(rows, outputs, inputs, False) else cdiv(outputs, TILE_OUTPUTS)


def _vector_config(outputs: int, inputs: int, gated: bool) -> LaunchConfig:
    if outputs >= WIDE:
        return LaunchConfig(0, 16, 1024, 1, 4, 1)
    columns = min(4096, next_power_of_2(inputs))
    if inputs % columns:
        columns = max(1024, columns // 2)
    tile = (16384 if columns >= 4096 else 8192) // columns // (2 if gated else 1)
    return LaunchConfig(0, max(2, tile), columns, 1, 8 if columns >= 4096 else 4, 1)


class Scratch:
    """Scratch of `linear`: partial sums, arrival counts, normed rows, and the best output of each tile.

    Serves GEMMs of up to max_tokens rows, and of up to max_rows rows for the vocabulary. Every launch resets the
    arrival counts to zero.
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
        split_rows = min(max(128, next_power_of_2(max_tokens)), MAX_SPLIT_ROWS)
        max_tiles = cdiv(max(hidden, widest), TILE_OUTPUTS) * cdiv(split_rows, 16)
        self.partials = torch.empty(
            MAX_SPLITS * split_rows * (max(hidden, widest) + 128), dtype=torch.float32, device=device
        )
        self.arrivals = torch.zeros(max_tiles, dtype=torch.int32, device=device)
        # a single row uses narrower tiles, so it may need more entries than a few rows with wide tiles
        single_row_tiles = cdiv(vocab, _vector_config(vocab, hidden, False).tile_outputs)
        best_count = max(single_row_tiles, max_rows * cdiv(vocab, TILE_OUTPUTS))
        self.best = torch.empty(best_count, dtype=torch.float32, device=device)
        self.best_at = torch.empty_like(self.best, dtype=torch.int32)
        self.squares = torch.empty(split_rows * cdiv(hidden, TILE_OUTPUTS), dtype=torch.float32, device=device)

    def maxima(self, rows: int, tiles: int) -> tuple[Tensor, Tensor]:
        """Return what the last `linear` with `best` wrote: the largest outputs and their indices, [rows, tiles]."""
        return _as_matrix(self.best, rows, tiles), _as_matrix(self.best_at, rows, tiles)


def _as_matrix(buffer: Tensor, rows: int, width: int) -> Tensor:
    """Return the beginning of a flat scratch tensor as [rows, width]."""
    return buffer[: rows * width].view(rows, width)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """Write x / sqrt(mean(x²) + eps) * weight, computed in float32, to out [M, h], and return it."""
    rows, width = x.shape
    pdl = overlaps(x)
    norm_kernel[(rows,)](
        x,
        weight,
        out,
        eps,
        H=width,
        HP=next_power_of_2(width),
        PDL=pdl,
        num_warps=8 if width > 2048 else 4,
        **launch_options(pdl),
    )
    return out


def gate(x: Tensor, out: Tensor, activation: str | None = None) -> None:
    """Write act(gate) * up of x [M, 2n], whose rows are a gate and an up, to out [M, n]; None: SiLU."""
    (rows, width), pdl = out.shape, overlaps(x)
    gate_kernel[(rows, cdiv(width, 1024))](
        x, out, W=width, BLOCK=1024, PDL=pdl, ACT=activation or "silu", **launch_options(pdl)
    )


def activate_rows(x: Tensor, activation: str) -> None:
    """Replace x [M, n] by its activation."""
    (rows, width), pdl = x.shape, overlaps(x)
    gate_kernel[(rows, cdiv(width, 1024))](
        x, x, W=width, BLOCK=1024, PDL=pdl, ACT=activation, GATED=False, **launch_options(pdl)
    )


def finish_activation(product: Tensor, out: Tensor, gated: bool, activation: str | None) -> None:
    """Complete a GEMM without epilogue: `product` has gates and ups if `gated`, and is `out` [M, n] otherwise."""
    if gated:
        gate(product, out, activation)
    elif activation is not None:
        activate_rows(out, activation)


def finish_logits(logits: Tensor, scale: float, softcap: float | None) -> None:
    """Scale logits [M, n] in place, then bound them by `softcap`; None: unbounded."""
    if scale == 1.0 and softcap is None:
        return
    (rows, width), pdl = logits.shape, overlaps(logits)
    logits_kernel[(rows, cdiv(width, 2048))](
        logits, N=width, BLOCK=2048, SCALE=scale, SOFTCAP=softcap or 0.0, PDL=pdl, **launch_options(pdl)
    )


def linear(
    x: Tensor,
    weight: LinearWeight,
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
    activation: str | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    pick: LaunchConfig | None = None,
) -> int:
    """Write y = rms_norm(x) Wᵀ + bias to `out` [M, n] and return the number of tiles along n.

    x [M, k] and W [n, k] are contiguous. `out` has their dtype, or is float32 to keep the sums as accumulated, without
    `bias`, `gated` and `add`. Raises ModelError if the weight's format is not one of FORMATS.

    - `norm`: weight of the RMSNorm; None uses x directly.
    - `gated`: W is [2n, k] with the rows of the gate first, and y is silu(gate) * up.
    - `activation`: its name in engine/layers/activation.py: of the gate (None: SiLU), or without a gate of y.
    - `scale`, `softcap`: y is multiplied by scale, then softcap * tanh(y / softcap); not with `add`.
    - `add`: add y to the contents of `out`.
    - `best`: write each tile's largest output and its index to `scratch.best` and `scratch.best_at`, [M, tiles].
    - `next_norm`: weight of the RMSNorm that follows `out`. If `half_normed` is above 0 for this call, its first half
      (the weight and the sums of squares) is computed here; pass that number as `squares` to the call that norms `out`.
    - `late`: trigger the dependent launch (PDL) only after this GEMM's math. For a next kernel with many small
      programs and little to prefetch.

    One to three launches. Grids depend only on shapes and there is no host read: safe to capture.
    """
    rows, inputs = x.shape
    outputs = out.shape[1]
    matrix = weight.weight
    weight.require(FORMATS, f"the linear layer of {list(matrix.shape)}")
    if pick is None and suits_library(rows, outputs, inputs, gated):
        return _linear_cublas(x, matrix, out, scratch, norm, eps, bias, gated, add, best, activation, scale, softcap)
    pick = pick or choose_config(rows, outputs, inputs, gated)
    tiles = cdiv(outputs, pick.tile_outputs)
    pdl = overlaps(x)
    options = {
        "GATED": gated,
        "ADD": add,
        "BIAS": bias is not None,
        "TILE_ARGMAX": best,
        "PDL": pdl,
        "TRIGGER_AFTER_MATH": late,
        "ACT": activation or "",
        "SCALE": scale,
        "SOFTCAP": softcap or 0.0,
        "num_warps": pick.warps,
        **launch_options(pdl),
    }
    if pick.tile_rows == 0:
        vector_kernel[(tiles,)](
            x,
            matrix,
            x if norm is None else norm,
            x if bias is None else bias,
            out,
            scratch.best,
            scratch.best_at,
            outputs,
            eps,
            M=rows,
            M_PAD=next_power_of_2(rows),
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
    matrix_kernel[(tiles, pick.splits, cdiv(rows, pick.tile_rows))](
        x,
        matrix,
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
        SQUARES_PAD=next_power_of_2(max(1, squares)),
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
    activation: str | None,
    scale: float,
    softcap: float | None,
) -> int:
    """Compute `linear` with cuBLAS."""
    rows, inputs = x.shape
    if norm is not None:
        x = rms_norm(x, norm, eps, _as_matrix(scratch.normed, rows, inputs))
    product = _as_matrix(scratch.gate_up, rows, len(weight)) if gated else out
    if add:
        out.addmm_(x, weight.T)
        if bias is not None:
            out.add_(bias)
    elif bias is not None:
        torch.addmm(bias, x, weight.T, out=product)
    elif product.dtype == x.dtype:
        torch.mm(x, weight.T, out=product)
    else:
        torch.mm(x, weight.T, out_dtype=product.dtype, out=product)
    finish_activation(product, out, gated, activation)
    finish_logits(out, scale, softcap)
    return tile_maxima(out, scratch.best, scratch.best_at) if best else 0

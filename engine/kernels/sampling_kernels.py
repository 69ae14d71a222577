"""Device code of the draw from a whole distribution: draw.py's rule over tiles of the vocabulary, for fused_draw.py.

A weight is the integer floor(2**40 exp((x - best) / T)), and sums of integers are exact: a token depends neither on the
tiles nor on the batch. A row of temperature 0 isn't drawn here: its programs end at once. Rows of logits lie `stride`
apart, their numbers `step`. Imports triton at the top: for CUDA (or Triton's interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from engine.kernels.sampling_constants import ONE

_ONE = tl.constexpr(float(ONE))
# tl.exp is off by more than the last bit, which would move more draws away from the ones that torch makes.
_HAS_LIBDEVICE = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def peak_kernel(logits_ptr, temperature_ptr, peak_ptr, stride, step, V: tl.constexpr, TILE: tl.constexpr):
    """peak float32 [rows, tiles]: the best logit of each tile; a NaN counts as infinite."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if tl.load(temperature_ptr + row * step) > 0:
        x = logits_tile(logits_ptr + row * stride, tile, V, TILE)
        best = tl.max(tl.where(x == x, x, float("inf")), 0)
        tl.store(peak_ptr + row * tl.num_programs(0) + tile, best)


@triton.jit
def weigh_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, peak_ptr, sum_ptr, stride, step,
    V: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """sum int64 [rows, TILES]: of each tile's weights; unwritten where the row has no finite best."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * step)
    if temperature > 0:
        x = logits_tile(logits_ptr + row * stride, tile, V, TILE)
        best = row_best(peak_ptr + row * TILES, TILES, WIDTH)
        if tl.abs(best) < float("inf"):
            weights = _weights(x, best, temperature, tl.load(min_p_ptr + row * step))
            tl.store(sum_ptr + row * TILES + tile, tl.sum(weights, 0))


@triton.jit
def pick_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, u_ptr, peak_ptr, sum_ptr, out_ptr, stride, step,
    V: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out int64 [rows]: the first token whose cumulative weight exceeds floor(u * total), -1 without a finite best."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * step)
    if temperature > 0:
        best = row_best(peak_ptr + row * TILES, TILES, WIDTH)
        if tl.abs(best) < float("inf"):
            tiles = tl.arange(0, WIDTH)
            sums = tl.load(sum_ptr + row * TILES + tiles, mask=tiles < TILES, other=0)
            # As in draw.py: u <= 1 - 2**-53, so the product stays below the total, and a tile and a column exceed it.
            target = (tl.load(u_ptr + row * step) * tl.sum(sums, 0).to(tl.float64)).to(tl.int64)
            tile = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
            target -= tl.sum(tl.where(tiles < tile, sums, 0), 0)
            x = logits_tile(logits_ptr + row * stride, tile, V, TILE)
            weights = _weights(x, best, temperature, tl.load(min_p_ptr + row * step))
            column = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
            tl.store(out_ptr + row, (tile * TILE + column).to(tl.int64))
        else:
            tl.store(out_ptr + row, tl.full((), -1, tl.int64))


@triton.jit
def logits_tile(row_ptr, tile, V: tl.constexpr, TILE: tl.constexpr):
    """Logits of one tile as float32 [TILE]; -inf, which weighs nothing, beyond the vocabulary."""
    cols = tile * TILE + tl.arange(0, TILE)
    return tl.load(row_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)


@triton.jit
def row_best(peak_ptr, TILES: tl.constexpr, WIDTH: tl.constexpr):
    """The best logit of a row, from its tiles' best ones."""
    tiles = tl.arange(0, WIDTH)
    return tl.max(tl.load(peak_ptr + tiles, mask=tiles < TILES, other=float("-inf")), 0)


@triton.jit
def scaled(x, best, temperature):
    """z float32 <= 0 of logits x float32 <= best."""
    z = x - best
    if temperature != 1.0:  # the default, and a rounded division takes more instructions than exp
        z = tl.div_rn(z, temperature.to(tl.float32))
    return z


@triton.jit
def weights_of(z):
    """Integer weights int64 of z float32 <= 0."""
    if _HAS_LIBDEVICE:
        shares = libdevice.exp(z)
    else:
        shares = tl.exp(z)
    return (shares * _ONE).to(tl.int64)


@triton.jit
def least_weight(min_p):
    """The integer weight below which min-p float64 drops a token."""
    return tl.ceil(min_p * _ONE).to(tl.int64)


@triton.jit
def _weights(x, best, temperature, min_p):
    """Integer weights int64 of logits x float32 <= best, and 0 for those below min_p times the best's."""
    weights = weights_of(scaled(x, best, temperature))
    return tl.where(weights < least_weight(min_p), 0, weights)

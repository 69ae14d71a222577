"""Device code of sampling from the full distribution: `sample_full` of engine/sampling/ops.py over vocabulary tiles.

A weight is the integer floor(2**40 exp((x - max) / T)). Integer sums are exact, so a token depends neither on the tile
size nor on the batch. Programs of a row with temperature 0 return at once. Logits have row stride `logits_stride`,
per-row parameters `param_stride`. Launched by fused_sampling.py. Imports triton at the top: for CUDA (or Triton's
interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from engine.kernels.sampling_constants import ONE

_ONE = tl.constexpr(float(ONE))
# tl.exp differs from torch by more than the last bit, which would change more sampled tokens.
_HAS_LIBDEVICE = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def tile_max_kernel(
    logits_ptr, temperature_ptr, tile_max_ptr, group_max_ptr, logits_stride, param_stride,
    V: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Write the maximum logit of each tile to tile_max float32 [rows, tiles]; a NaN counts as +inf.

    With GROUPS above 0, also write the maxima of the tile's groups to group_max float32 [rows, tiles * GROUPS]. A group
    is every GROUPS-th token of the tile, since likely tokens often have neighbouring ids.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if tl.load(temperature_ptr + row * param_stride) > 0:
        x = logits_tile(logits_ptr + row * logits_stride, tile, V, TILE)
        store_maxima(x, tile_max_ptr, group_max_ptr, row * tl.num_programs(0) + tile, TILE, GROUPS)


@triton.jit
def store_maxima(x, tile_max_ptr, group_max_ptr, at, TILE: tl.constexpr, GROUPS: tl.constexpr):
    """Store what tile_max_kernel writes for the logits x float32 [TILE] of tile number `at` of all rows."""
    x = tl.where(x == x, x, float("inf"))
    if GROUPS:
        group_max = tl.max(tl.reshape(x, [TILE // GROUPS, GROUPS]), 0)
        tl.store(group_max_ptr + at * GROUPS + tl.arange(0, GROUPS), group_max)
        tl.store(tile_max_ptr + at, tl.max(group_max, 0))
    else:
        tl.store(tile_max_ptr + at, tl.max(x, 0))


@triton.jit
def tile_sum_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, tile_max_ptr, tile_sum_ptr, logits_stride, param_stride,
    V: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr,
):  # fmt: skip
    """Write each tile's sum of weights to tile_sum int64 [rows, NUM_TILES]; skip rows without a finite maximum."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * param_stride)
    if temperature > 0:
        x = logits_tile(logits_ptr + row * logits_stride, tile, V, TILE)
        max_logit = row_max(tile_max_ptr + row * NUM_TILES, NUM_TILES, TILES_PAD)
        if tl.abs(max_logit) < float("inf"):
            weights = _weights(x, max_logit, temperature, tl.load(min_p_ptr + row * param_stride))
            tl.store(tile_sum_ptr + row * NUM_TILES + tile, tl.sum(weights, 0))


@triton.jit
def sample_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, u_ptr, tile_max_ptr, tile_sum_ptr, out_ptr, logits_stride, param_stride,
    V: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr,
):  # fmt: skip
    """Write to out int64 [rows] the first token whose cumulative weight exceeds floor(u * total).

    Writes -1 for a row without a finite maximum.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * param_stride)
    if temperature > 0:
        max_logit = row_max(tile_max_ptr + row * NUM_TILES, NUM_TILES, TILES_PAD)
        if tl.abs(max_logit) < float("inf"):
            tiles = tl.arange(0, TILES_PAD)
            sums = tl.load(tile_sum_ptr + row * NUM_TILES + tiles, mask=tiles < NUM_TILES, other=0)
            # As in ops.py: u <= 1 - 2**-53, so the product stays below the total and some tile and column exceed it.
            target = (tl.load(u_ptr + row * param_stride) * tl.sum(sums, 0).to(tl.float64)).to(tl.int64)
            tile = tl.sum((tl.cumsum(sums, 0) <= target).to(tl.int32), 0)
            target -= tl.sum(tl.where(tiles < tile, sums, 0), 0)
            x = logits_tile(logits_ptr + row * logits_stride, tile, V, TILE)
            weights = _weights(x, max_logit, temperature, tl.load(min_p_ptr + row * param_stride))
            column = tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
            tl.store(out_ptr + row, (tile * TILE + column).to(tl.int64))
        else:
            tl.store(out_ptr + row, tl.full((), -1, tl.int64))


@triton.jit
def logits_tile(row_ptr, tile, V: tl.constexpr, TILE: tl.constexpr):
    """Return the logits of one tile as float32 [TILE]; -inf (weight 0) beyond the vocabulary."""
    cols = tile * TILE + tl.arange(0, TILE)
    return tl.load(row_ptr + cols, mask=cols < V, other=float("-inf")).to(tl.float32)


@triton.jit
def row_max(tile_max_ptr, NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr):
    """Return the maximum logit of a row from the maxima of its tiles."""
    tiles = tl.arange(0, TILES_PAD)
    return tl.max(tl.load(tile_max_ptr + tiles, mask=tiles < NUM_TILES, other=float("-inf")), 0)


@triton.jit
def scaled(x, max_logit, temperature):
    """Return z = (x - max_logit) / temperature, float32 <= 0, of logits x float32 <= max_logit."""
    z = x - max_logit
    if temperature != 1.0:  # skip the default: a correctly rounded division takes more instructions than exp
        z = tl.div_rn(z, temperature.to(tl.float32))
    return z


@triton.jit
def weights_of(z):
    """Return the integer weights int64 of z float32 <= 0."""
    return relative_weights(z).to(tl.int64)


@triton.jit
def relative_weights(z):
    """Return the weights float32 of z float32 <= 0 before they are rounded down to an integer."""
    if _HAS_LIBDEVICE:
        return libdevice.exp(z) * _ONE
    else:
        return tl.exp(z) * _ONE


@triton.jit
def min_p_weight(min_p):
    """Return the integer weight below which min-p (float64) drops a token."""
    return tl.ceil(min_p * _ONE).to(tl.int64)


@triton.jit
def _weights(x, max_logit, temperature, min_p):
    """Return the integer weights int64 of logits x float32 <= max_logit; 0 below min_p times the maximum weight."""
    weights = weights_of(scaled(x, max_logit, temperature))
    return tl.where(weights < min_p_weight(min_p), 0, weights)

"""Device code of sampling from slots: each row's parameters and random number, logits adjustments, and results.

Programs of a row that argmax is enough for return at once. `values` and `floats` are the columns of slot_columns.py, as
int64 and as float64; a row's slot is its index there, 0 for padding. Launched by fused_sampling.py. Imports triton at
the top: for CUDA (or Triton's interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels import slot_columns
from engine.kernels.sampling_kernels import logits_tile, row_max, store_maxima

# Columns of the rows' parameters, float64. ACTIVE is above 0 for rows to sample or to take the argmax of.
ACTIVE, FULL, TRUNCATED, ARGMAX, TOP_K, TOP_P, MIN_P, UNIFORM = range(8)
NUM_ROW_COLUMNS = 8

_ACTIVE, _FULL, _TRUNCATED, _ARGMAX = (tl.constexpr(c) for c in (ACTIVE, FULL, TRUNCATED, ARGMAX))
_TOP_K, _TOP_P, _MIN_P, _UNIFORM = (tl.constexpr(c) for c in (TOP_K, TOP_P, MIN_P, UNIFORM))
_ROW_COLUMNS = tl.constexpr(NUM_ROW_COLUMNS)
_COLUMNS = tl.constexpr(slot_columns.NUM_COLUMNS)
_FULL_TEMPERATURE = tl.constexpr(slot_columns.FULL_TEMPERATURE)
_TRUNCATED_TEMPERATURE = tl.constexpr(slot_columns.TRUNCATED_TEMPERATURE)
_SLOT_TOP_K, _SLOT_TOP_P = tl.constexpr(slot_columns.TOP_K), tl.constexpr(slot_columns.TOP_P)
_SLOT_MIN_P, _KEY = tl.constexpr(slot_columns.MIN_P), tl.constexpr(slot_columns.KEY)
_REPETITION, _FREQUENCY = tl.constexpr(slot_columns.REPETITION), tl.constexpr(slot_columns.FREQUENCY)
_PRESENCE, _PENALISED = tl.constexpr(slot_columns.PRESENCE), tl.constexpr(slot_columns.PENALISED)
_ADJUSTED_ARGMAX = tl.constexpr(slot_columns.ADJUSTED_ARGMAX)
_NUM_BIASED, _NUM_BANNED = tl.constexpr(slot_columns.NUM_BIASED), tl.constexpr(slot_columns.NUM_BANNED)
_BANNED_UNTIL, _CONSTRAINED = tl.constexpr(slot_columns.BANNED_UNTIL), tl.constexpr(slot_columns.CONSTRAINED)
_MASK_BITS = tl.constexpr(slot_columns.MASK_BITS)


@triton.jit
def row_params_kernel(
    values_ptr, floats_ptr, slots_ptr, positions_ptr, out_ptr,
    GOLDEN: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr, PROCESSORS: tl.constexpr,
):  # fmt: skip
    """Write the parameters of row `program_id` to out float64 [rows, NUM_ROW_COLUMNS].

    The random number is `uniform` of engine/sampling/ops.py, whose constants are given as int64.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    floats = floats_ptr + slot * _COLUMNS
    values = values_ptr + slot * _COLUMNS
    out = out_ptr + row * _ROW_COLUMNS
    full = tl.load(floats + _FULL_TEMPERATURE)
    truncated = tl.load(floats + _TRUNCATED_TEMPERATURE)
    active = tl.maximum(full, truncated)
    if PROCESSORS:
        argmax = tl.load(values + _ADJUSTED_ARGMAX).to(tl.float64)
        tl.store(out + _ARGMAX, argmax)
        active = tl.maximum(active, argmax)
    tl.store(out + _ACTIVE, active)
    tl.store(out + _FULL, full)
    tl.store(out + _TRUNCATED, truncated)
    tl.store(out + _TOP_K, tl.load(floats + _SLOT_TOP_K))
    tl.store(out + _TOP_P, tl.load(floats + _SLOT_TOP_P))
    tl.store(out + _MIN_P, tl.load(floats + _SLOT_MIN_P))
    # A block of one element: int64 multiplication wraps there under the interpreter too.
    one = tl.zeros([1], tl.int64)
    x = one + tl.load(values + _KEY) + (one + tl.load(positions_ptr + row) + 1) * GOLDEN
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    x = x ^ _shift_right(x, 31)
    u = _shift_right(x, 11).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
    tl.store(out + _UNIFORM + tl.arange(0, 1), u)


@triton.jit
def _shift_right(x, BITS: tl.constexpr):
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)  # `>>` of an int64 is arithmetic; a hash needs a logical shift


@triton.jit
def adjust_kernel(
    logits_ptr, row_params_ptr, values_ptr, floats_ptr, slots_ptr, positions_ptr, counts_ptr, masks_ptr,
    bias_ids_ptr, bias_ptr, banned_ids_ptr, out_ptr, tile_max_ptr, group_max_ptr, logits_stride,
    V: tl.constexpr, TILE: tl.constexpr, GROUPS: tl.constexpr, BIAS_WIDTH: tl.constexpr, BAN_WIDTH: tl.constexpr,
):  # fmt: skip
    """Write a tile of an active row to out float32 [rows, V], after its slot's adjustments, and the tile's maxima.

    Adjustments, in order: penalties by counts int32 [slots, V] (see TokenCounts); the mask, of masks int32 [slots + 1,
    ceil(V / 32)]; logit bias [slots + 1, BIAS_WIDTH]; before position BANNED_UNTIL, bans [slots + 1, BAN_WIDTH]. Tokens
    that are not allowed become -inf. Maxima: see tile_max_kernel. Launch without fused multiply-add, which rounds
    differently from torch.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if tl.load(row_params_ptr + row * _ROW_COLUMNS + _ACTIVE) > 0:
        slot = tl.load(slots_ptr + row)
        values = values_ptr + slot * _COLUMNS
        x = logits_tile(logits_ptr + row * logits_stride, tile, V, TILE)
        cols = tile * TILE + tl.arange(0, TILE)
        if tl.load(values + _PENALISED) > 0:
            floats = floats_ptr + slot * _COLUMNS
            repetition = tl.load(floats + _REPETITION).to(tl.float32)
            counts = tl.load(counts_ptr + (slot - 1) * V + cols, mask=cols < V, other=0)
            repeated = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros([TILE], tl.float32)), x * repetition)
            occurrences = (counts >> 1).to(tl.float32)
            x = tl.where(counts > 0, repeated, x)
            x -= tl.load(floats + _FREQUENCY).to(tl.float32) * occurrences
            x -= tl.where(occurrences > 0, tl.load(floats + _PRESENCE).to(tl.float32), 0.0)
        if tl.load(values + _CONSTRAINED) > 0:
            mask_ptr = masks_ptr + slot * ((V + _MASK_BITS - 1) // _MASK_BITS)
            words = tl.load(mask_ptr + cols // _MASK_BITS, mask=cols < V, other=0)
            x = tl.where((words >> (cols % _MASK_BITS)) & 1 != 0, x, float("-inf"))
        for index in range(tl.load(values + _NUM_BIASED)):
            token = tl.load(bias_ids_ptr + slot * BIAS_WIDTH + index)
            if token // TILE == tile:
                x = tl.where(cols == token, x + tl.load(bias_ptr + slot * BIAS_WIDTH + index), x)
        if tl.load(positions_ptr + row) < tl.load(values + _BANNED_UNTIL):
            for index in range(tl.load(values + _NUM_BANNED)):
                token = tl.load(banned_ids_ptr + slot * BAN_WIDTH + index)
                if token // TILE == tile:
                    x = tl.where(cols == token, float("-inf"), x)
        tl.store(out_ptr + row * V + cols, x, mask=cols < V)
        store_maxima(x, tile_max_ptr, group_max_ptr, row * tl.num_programs(0) + tile, TILE, GROUPS)


@triton.jit
def argmax_kernel(
    x_ptr, row_params_ptr, tile_max_ptr, out_ptr,
    V: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr,
):  # fmt: skip
    """Write the first maximum of a row flagged ARGMAX to out int64 [rows]; -1 without a finite maximum."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(row_params_ptr + row * _ROW_COLUMNS + _ARGMAX) > 0:
        tiles_ptr = tile_max_ptr + row * NUM_TILES
        max_logit = row_max(tiles_ptr, NUM_TILES, TILES_PAD)
        token = tl.full((), -1, tl.int64)
        if tl.abs(max_logit) < float("inf"):
            tiles = tl.arange(0, TILES_PAD)
            maxima = tl.load(tiles_ptr + tiles, mask=tiles < NUM_TILES, other=float("-inf"))
            tile = tl.min(tl.where(maxima == max_logit, tiles, TILES_PAD), 0)
            cols = tile * TILE + tl.arange(0, TILE)
            x = logits_tile(x_ptr + row * V, tile, V, TILE)
            token = tl.min(tl.where(x == max_logit, cols, V), 0).to(tl.int64)
        tl.store(out_ptr + row, token)


@triton.jit
def finish_kernel(
    row_params_ptr, values_ptr, slots_ptr, next_tokens_ptr, last_tokens_ptr, counts_ptr, kept_ptr, slot_kept_ptr,
    V: tl.constexpr, PROCESSORS: tl.constexpr, TRUNCATION: tl.constexpr,
):  # fmt: skip
    """Write the token of active row `program_id` to its slot's last token, 0 for -1; count it if penalties need it.

    With TRUNCATION, also write what a truncated row's distribution keeps, int64 [rows, 2], to its slot.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(row_params_ptr + row * _ROW_COLUMNS + _ACTIVE) > 0:
        slot = tl.load(slots_ptr + row)
        token = tl.load(next_tokens_ptr + row)
        tl.store(last_tokens_ptr + slot, tl.maximum(token, 0))
        if TRUNCATION:
            if tl.load(row_params_ptr + row * _ROW_COLUMNS + _TRUNCATED) > 0:
                columns = tl.arange(0, 2)
                tl.store(slot_kept_ptr + 2 * slot + columns, tl.load(kept_ptr + 2 * row + columns))
        if PROCESSORS:
            if (token >= 0) & (tl.load(values_ptr + slot * _COLUMNS + _PENALISED) > 0):
                count_ptr = counts_ptr + (slot - 1) * V + token
                tl.store(count_ptr, tl.load(count_ptr) + 2)

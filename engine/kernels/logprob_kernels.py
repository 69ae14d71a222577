"""Device code of log-probabilities: `DeviceLogprobs.of` of engine/sampling/logprobs.py over vocabulary tiles.

z = (x - max) / T and the integer weights are computed as in sampling_kernels.py, so sums are exact and ranks follow the
values that torch compares. Alternatives are ordered by the sort keys of top_k_top_p_kernels.py: ties by id.

`values` and `floats` are the columns of slot_columns.py, as int64 and as float64; a row's slot is its index there, 0
for padding. Programs of a row whose TOP_COUNT is 0 return at once. RAW: temperature 1 and no min-p for all rows.
Launched by fused_logprobs.py. Imports triton at the top: for CUDA (or Triton's interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from engine.kernels import logprob_layout, slot_columns
from engine.kernels.sampling_constants import ONE
from engine.kernels.sampling_kernels import logits_tile, min_p_weight, row_max, scaled, store_maxima, weights_of
from engine.kernels.top_k_top_p_kernels import sort_keys, z_of_keys

_COLUMNS = tl.constexpr(slot_columns.NUM_COLUMNS)
_FULL_TEMPERATURE, _MIN_P = tl.constexpr(slot_columns.FULL_TEMPERATURE), tl.constexpr(slot_columns.MIN_P)
_TRUNCATED_TEMPERATURE, _TOP_K = tl.constexpr(slot_columns.TRUNCATED_TEMPERATURE), tl.constexpr(slot_columns.TOP_K)
_TOP_COUNT, _NUM_NAMED = tl.constexpr(slot_columns.TOP_COUNT), tl.constexpr(slot_columns.NUM_NAMED)
_TOKEN, _LOGPROB = tl.constexpr(logprob_layout.TOKEN), tl.constexpr(logprob_layout.LOGPROB)
_RANK, _TOP, _NAMED = (tl.constexpr(c) for c in (logprob_layout.RANK, logprob_layout.TOP, logprob_layout.NAMED))
_MAX_TOP = tl.constexpr(logprob_layout.MAX_TOP)
_TOP_PAD = tl.constexpr(triton.next_power_of_2(logprob_layout.MAX_TOP))

_ONE = tl.constexpr(float(ONE))
_NO_TOKEN = tl.constexpr(2**62)  # sort key of no token: greater than all keys
_BLOCK = tl.constexpr(128)  # candidates whose places are found at once
_PAIRS = tl.constexpr(32)  # candidates that each one is compared with at a time
_HAS_LIBDEVICE = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def scored_max_kernel(
    logits_ptr, values_ptr, slots_ptr, tile_max_ptr, found_ptr, logits_stride, V: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write the maximum logit of each tile to tile_max float32 [rows, tiles] (a NaN counts as +inf), and 0 to found."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if tl.load(values_ptr + tl.load(slots_ptr + row) * _COLUMNS + _TOP_COUNT) > 0:
        x = logits_tile(logits_ptr + row * logits_stride, tile, V, TILE)
        store_maxima(x, tile_max_ptr, tile_max_ptr, row * tl.num_programs(0) + tile, TILE, 0)
        if tile == 0:
            tl.store(found_ptr + row, 0)


@triton.jit
def scored_tile_kernel(
    logits_ptr, values_ptr, floats_ptr, slots_ptr, tokens_ptr, tile_max_ptr, tile_sum_ptr, tile_above_ptr, found_ptr,
    key_ptr, logits_stride,
    V: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr, ID_BITS: tl.constexpr,
    RAW: tl.constexpr,
):  # fmt: skip
    """Write what a tile contributes to its row; nothing for a row without a token or a finite maximum.

    - tile_sum int64 [rows, NUM_TILES]: the sum of weights.
    - tile_above int32 [rows, NUM_TILES]: how many tokens are more likely than the chosen one, of tokens int64 [rows].
    - key int64 [rows, NUM_TILES * MAX_TOP]: sort keys of the tile's candidates for the alternatives, from the place on
      that found int32 [rows] gives. The order of the tiles in it is random.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    top_count = tl.load(values_ptr + slot * _COLUMNS + _TOP_COUNT) - 1
    if top_count >= 0:
        token = tl.load(tokens_ptr + row)
        tiles_ptr = tile_max_ptr + row * NUM_TILES
        max_logit = row_max(tiles_ptr, NUM_TILES, TILES_PAD)
        if (token >= 0) & (tl.abs(max_logit) < float("inf")):
            temperature, min_weight = _distribution(floats_ptr + slot * _COLUMNS, RAW)
            row_ptr = logits_ptr + row * logits_stride
            z = scaled(logits_tile(row_ptr, tile, V, TILE), max_logit, temperature)
            weights = weights_of(z)
            tl.store(tile_sum_ptr + row * NUM_TILES + tile, tl.sum(tl.where(weights < min_weight, 0, weights), 0))
            chosen = scaled(tl.load(row_ptr + token).to(tl.float32), max_logit, temperature)
            tl.store(tile_above_ptr + row * NUM_TILES + tile, tl.sum((z > chosen).to(tl.int32), 0))
            if top_count > 0:
                least = scaled(_kth_maximum(tiles_ptr, top_count, NUM_TILES, TILES_PAD), max_logit, temperature)
                if scaled(tl.load(tiles_ptr + tile), max_logit, temperature) >= least:
                    is_candidate = (z >= least) & (z > float("-inf"))
                    count = tl.minimum(tl.sum(is_candidate.to(tl.int32), 0), top_count.to(tl.int32))
                    keys = tl.where(is_candidate, sort_keys(z, tile * TILE + tl.arange(0, TILE), ID_BITS), _NO_TOKEN)
                    at = row * (NUM_TILES * _MAX_TOP) + tl.atomic_add(found_ptr + row, count, sem="relaxed")
                    last = tl.full((), -1, tl.int64)
                    for index in range(count):
                        last = tl.min(tl.where(keys > last, keys, _NO_TOKEN), 0)
                        tl.store(key_ptr + at + index, last)


@triton.jit
def scored_row_kernel(
    logits_ptr, values_ptr, floats_ptr, slots_ptr, tokens_ptr, named_ids_ptr, kept_ptr, tile_max_ptr, tile_sum_ptr,
    tile_above_ptr, found_ptr, key_ptr, out_ptr, out_floats_ptr, logits_stride,
    NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr, ID_BITS: tl.constexpr, NAMED_WIDTH: tl.constexpr,
    RAW: tl.constexpr,
):  # fmt: skip
    """Write the scores of row `program_id` to out int64 [columns, rows], whose bits as float64 are out_floats.

    Without a finite maximum, log-probabilities are NaN and no alternative is given.
    """
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    slot = tl.load(slots_ptr + row)
    top_count = tl.load(values_ptr + slot * _COLUMNS + _TOP_COUNT) - 1
    if top_count >= 0:
        out_ptr += row
        out_floats_ptr += row
        token = tl.load(tokens_ptr + row)
        tl.store(out_ptr + _TOKEN * rows, token)
        max_logit = row_max(tile_max_ptr + row * NUM_TILES, NUM_TILES, TILES_PAD)
        places = tl.arange(0, _TOP_PAD)
        names = tl.arange(0, NAMED_WIDTH)
        is_named = names < tl.load(values_ptr + slot * _COLUMNS + _NUM_NAMED)
        if (token >= 0) & (tl.abs(max_logit) < float("inf")):
            temperature, min_weight = _distribution(floats_ptr + slot * _COLUMNS, RAW)
            row_ptr = logits_ptr + row * logits_stride
            tiles = tl.arange(0, TILES_PAD)
            sums = tl.load(tile_sum_ptr + row * NUM_TILES + tiles, mask=tiles < NUM_TILES, other=0)
            above = tl.load(tile_above_ptr + row * NUM_TILES + tiles, mask=tiles < NUM_TILES, other=0)
            total = tl.sum(sums, 0)
            last_key = tl.full((), _NO_TOKEN, tl.int64)
            max_place = tl.full((), float("inf"), tl.float64)
            if not RAW:
                floats = floats_ptr + slot * _COLUMNS
                if tl.load(floats + _TRUNCATED_TEMPERATURE) > 0:
                    last_key, total = tl.load(kept_ptr + 2 * slot), tl.load(kept_ptr + 2 * slot + 1)
                    top_k = tl.load(floats + _TOP_K)
                    max_place = tl.where(top_k > 0, top_k, max_place)
            log_total = _log(total.to(tl.float64) / _ONE)
            z = scaled(tl.load(row_ptr + token).to(tl.float32), max_logit, temperature)
            tl.store(out_floats_ptr + _LOGPROB * rows, z.to(tl.float64) - log_total)
            tl.store(out_ptr + _RANK * rows, tl.sum(above, 0).to(tl.int64) + 1)
            if top_count > 0:
                found = tl.load(found_ptr + row)
                at = out_floats_ptr + (_TOP + 2 * places) * rows
                tl.store(at, float("-inf"), mask=(places >= found) & (places < top_count))
                key_ptr += row * (NUM_TILES * _MAX_TOP)
                for start in range(0, found, _BLOCK):
                    ours = start + tl.arange(0, _BLOCK)
                    keys = tl.load(key_ptr + ours, mask=ours < found, other=_NO_TOKEN)
                    place = tl.zeros([_BLOCK], tl.int32)  # number of more likely candidates
                    for other_start in range(0, found, _PAIRS):
                        others = other_start + tl.arange(0, _PAIRS)
                        other_keys = tl.load(key_ptr + others, mask=others < found, other=_NO_TOKEN)
                        place += tl.sum((other_keys[None, :] < keys[:, None]).to(tl.int32), 1)
                    is_listed = (ours < found) & (place < top_count)
                    logprobs = _logprobs(z_of_keys(keys, ID_BITS), log_total, min_weight)
                    logprobs = tl.where((keys <= last_key) & (place < max_place), logprobs, float("-inf"))
                    columns = _TOP + 2 * place
                    tl.store(out_floats_ptr + columns * rows, logprobs, mask=is_listed)
                    tl.store(out_ptr + (columns + 1) * rows, keys & ((1 << ID_BITS) - 1), mask=is_listed)
            ids = tl.load(named_ids_ptr + slot * NAMED_WIDTH + names, mask=is_named, other=0)
            z = scaled(tl.load(row_ptr + ids, mask=is_named, other=0).to(tl.float32), max_logit, temperature)
            is_kept = sort_keys(z, ids, ID_BITS) <= last_key
            logprobs = tl.where(is_kept, _logprobs(z, log_total, min_weight), float("-inf"))
            tl.store(out_floats_ptr + (_NAMED + names) * rows, logprobs, mask=is_named)
        else:
            tl.store(out_floats_ptr + _LOGPROB * rows, float("nan"))
            tl.store(out_ptr + _RANK * rows, tl.full((), 1, tl.int64))
            tl.store(out_floats_ptr + (_TOP + 2 * places) * rows, float("-inf"), mask=places < top_count)
            tl.store(out_floats_ptr + (_NAMED + names) * rows, float("nan"), mask=is_named)


@triton.jit
def _distribution(floats_ptr, RAW: tl.constexpr):
    """Return temperature float64 and the integer weight below which min-p drops a token, of a slot's parameters."""
    temperature = tl.full((), 1.0, tl.float64)
    min_weight = tl.full((), 0, tl.int64)
    if not RAW:
        given = tl.load(floats_ptr + _FULL_TEMPERATURE) + tl.load(floats_ptr + _TRUNCATED_TEMPERATURE)
        if given > 0:
            temperature = given
            min_weight = min_p_weight(tl.load(floats_ptr + _MIN_P))
    return temperature, min_weight


@triton.jit
def _kth_maximum(tile_max_ptr, k, NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr):
    """Return the k-th largest maximum of a row's tiles, which k tokens reach; -inf if there are fewer tiles."""
    tiles = tl.arange(0, TILES_PAD)
    maxima = tl.load(tile_max_ptr + tiles, mask=tiles < NUM_TILES, other=float("-inf"))
    larger = tl.sum((maxima[None, :] > maxima[:, None]).to(tl.int32), 1)
    kth = tl.min(tl.where((larger < k) & (tiles < NUM_TILES), maxima, float("inf")), 0)
    return tl.where(k <= NUM_TILES, kth, float("-inf"))


@triton.jit
def _logprobs(z, log_total, min_weight):
    """Return the log-probabilities float64 of z float32; -inf for tokens that min-p drops."""
    return tl.where(weights_of(z) < min_weight, float("-inf"), z.to(tl.float64) - log_total)


@triton.jit
def _log(x):
    if _HAS_LIBDEVICE:
        return libdevice.log(x)
    else:
        return tl.log(x)

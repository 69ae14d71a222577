"""Device code of sampling after top-k, top-p and min-p: `sample_truncated` of engine/sampling/ops.py without a sort.

A token's sort key is the integer (bits of -z, id). Ascending keys are the order of `sample_truncated`. A limit is a
place in this order: of few candidates (the most likely tokens), each one's place is found by comparing all pairs; of
more, the limit's key is found digit by digit. All sums are of integers, so they are exact, and a token depends neither
on the batch nor on the order in which atomics gather the candidates. If the kept tokens may reach beyond a row's
candidates, a second pass scans the row's logits instead.

The candidates are the tokens in a row's leading bins of z. With a small top-k, the bins come from maxima of groups of
tokens: bins that hold the maxima of k groups hold at least k tokens. Otherwise all of the row's tokens are counted.

Launched by fused_sampling.py. Imports triton at the top: for CUDA (or Triton's interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.sampling_kernels import logits_tile, min_p_weight, row_max, scaled, weights_of

BINS = 256
"""Bins of a row's coarse histogram of z, each an eighth of a unit wide; the last bin holds all the rest."""

_BINS = tl.constexpr(BINS)
_BIN_WIDTH = tl.constexpr(0.125)
_NONZERO_BINS = tl.constexpr(224)  # bins that can hold a weight above 0: exp(-28) < 2**-40
_UNDECIDED = tl.constexpr(-2)  # token of a row whose candidates do not suffice
_NO_TOKEN = tl.constexpr(2**62)  # sort key of no token: greater than all keys
_INF_BITS = tl.constexpr(0x7F800000)  # float bits of +inf: -z of z = -inf
_GROUPS_PER_TOP_K = tl.constexpr(4)  # fewer groups than this per token of top-k would give too many candidates
# Numbers of candidates whose places are found by comparing all pairs: as many as most rows have, and at most.
_FEW, _SOME = tl.constexpr(128), tl.constexpr(512)
_PAIRS = tl.constexpr(16)  # candidates that each one is compared with at a time
_DIGIT_BITS = tl.constexpr(3)  # bits of a sort key found by one pass over the tokens
_RADIX = tl.constexpr(8)  # values of one digit


@triton.jit
def histogram_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, tile_max_ptr, group_max_ptr, tile_sum_ptr, bin_count_ptr,
    logits_stride, param_stride,
    V: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr,
):  # fmt: skip
    """Count the groups' maxima, or the tokens, of each bin in bin_count int32 [rows, BINS + 1], which holds zeros.

    Where top_k is 0, also write the tiles' sums of weights to tile_sum int64 [rows, NUM_TILES].
    """
    first_tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * param_stride)
    if temperature > 0:
        max_logit = row_max(tile_max_ptr + row * NUM_TILES, NUM_TILES, TILES_PAD)
        if tl.abs(max_logit) < float("inf"):
            top_k = tl.load(top_k_ptr + row * param_stride)
            counts_ptr = bin_count_ptr + row * (_BINS + 1) + tl.arange(0, _BINS)
            if (top_k > 0) & (top_k <= NUM_GROUPS // _GROUPS_PER_TOP_K):
                if first_tile == 0:
                    groups = tl.arange(0, GROUPS_PAD)
                    group_max_ptr += row * NUM_GROUPS
                    maxima = tl.load(group_max_ptr + groups, mask=groups < NUM_GROUPS, other=float("-inf"))
                    tl.store(counts_ptr, tl.histogram(_bin(scaled(maxima, max_logit, temperature)), _BINS))
            else:
                counts = tl.zeros([_BINS], tl.int32)
                for tile in range(first_tile, NUM_TILES, tl.num_programs(0)):
                    z = scaled(logits_tile(logits_ptr + row * logits_stride, tile, V, TILE), max_logit, temperature)
                    counts += tl.histogram(_bin(z), _BINS)
                    if top_k == 0:
                        tl.store(tile_sum_ptr + row * NUM_TILES + tile, tl.sum(weights_of(z), 0))
                tl.atomic_add(counts_ptr, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def gather_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, tile_max_ptr, bin_count_ptr, key_ptr, logits_stride, param_stride,
    V: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """Gather the candidates' sort keys, in any order, into key int64 [rows, MAX_CANDIDATES].

    The last column of bin_count counts the candidates, also those that did not fit.
    """
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * param_stride)
    if temperature > 0:
        max_logit = row_max(tile_max_ptr + row * NUM_TILES, NUM_TILES, TILES_PAD)
        if tl.abs(max_logit) < float("inf"):
            counts_ptr = bin_count_ptr + row * (_BINS + 1)
            bins = _leading_bins(counts_ptr, tl.load(top_k_ptr + row * param_stride), MAX_CANDIDATES)
            for tile in range(tl.program_id(0), NUM_TILES, tl.num_programs(0)):
                # Many tiles have no candidate; their maximum shows it without reading the tile again.
                if _bin(scaled(tl.load(tile_max_ptr + row * NUM_TILES + tile), max_logit, temperature)) < bins:
                    z = scaled(logits_tile(logits_ptr + row * logits_stride, tile, V, TILE), max_logit, temperature)
                    is_candidate = _bin(z) < bins
                    count_ptrs = counts_ptr + _BINS + tl.zeros([TILE], tl.int32)
                    at = tl.atomic_add(count_ptrs, 1, mask=is_candidate, sem="relaxed")
                    tl.store(
                        key_ptr + row * MAX_CANDIDATES + at,
                        sort_keys(z, tile * TILE + tl.arange(0, TILE), ID_BITS),
                        mask=is_candidate & (at < MAX_CANDIDATES),
                    )


@triton.jit
def sample_truncated_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, u_ptr,
    tile_max_ptr, tile_sum_ptr, bin_count_ptr, key_ptr, out_ptr, logits_stride, param_stride,
    V: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr, ID_BITS: tl.constexpr, ALL_LOGITS: tl.constexpr,
):  # fmt: skip
    """Write the sampled token to out int64 [rows]; -1 without a finite maximum.

    The first pass samples from the candidates; the second (ALL_LOGITS) handles rows that the first left undecided.
    TILE is the number of tokens per iteration, NUM_TILES the number of tile maxima and sums per row.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * param_stride)
    if temperature > 0:
        max_logit = row_max(tile_max_ptr + row * NUM_TILES, NUM_TILES, TILES_PAD)
        if tl.abs(max_logit) == float("inf"):
            tl.store(out_ptr + row, tl.full((), -1, tl.int64))
        else:
            top_k = tl.load(top_k_ptr + row * param_stride).to(tl.int64)
            top_p = tl.load(top_p_ptr + row * param_stride)
            min_weight = min_p_weight(tl.load(min_p_ptr + row * param_stride))
            u = tl.load(u_ptr + row * param_stride)
            sums_ptr = tile_sum_ptr + row * NUM_TILES
            if ALL_LOGITS:
                if tl.load(out_ptr + row) == _UNDECIDED:
                    token, _ = _sample(
                        logits_ptr + row * logits_stride, V, max_logit, temperature, sums_ptr, top_k, top_p, min_weight,
                        u, V, TILE, NUM_TILES, TILES_PAD, ID_BITS, True,
                    )  # fmt: skip
                    tl.store(out_ptr + row, token)
            else:
                counts_ptr = bin_count_ptr + row * (_BINS + 1)
                bins = _leading_bins(counts_ptr, top_k, MAX_CANDIDATES)
                found = tl.load(counts_ptr + _BINS)
                count = tl.minimum(found, MAX_CANDIDATES)
                if count <= _FEW:
                    token, complete = _sample_by_pairs(
                        key_ptr + row * MAX_CANDIDATES, count, sums_ptr, top_k, top_p, min_weight, u,
                        NUM_TILES, TILES_PAD, ID_BITS, _FEW,
                    )  # fmt: skip
                elif count <= _SOME:
                    token, complete = _sample_by_pairs(
                        key_ptr + row * MAX_CANDIDATES, count, sums_ptr, top_k, top_p, min_weight, u,
                        NUM_TILES, TILES_PAD, ID_BITS, _SOME,
                    )  # fmt: skip
                else:
                    token, complete = _sample(
                        key_ptr + row * MAX_CANDIDATES, count, max_logit, temperature, sums_ptr, top_k, top_p,
                        min_weight, u, V, TILE, NUM_TILES, TILES_PAD, ID_BITS, False,
                    )  # fmt: skip
                # All tokens beyond the candidates have weight 0, or min-p drops all of them.
                complete |= bins == _NONZERO_BINS
                complete |= (top_k == 0) & (min_weight > weights_of(bins * -_BIN_WIDTH))
                complete &= found <= MAX_CANDIDATES
                tl.store(out_ptr + row, tl.where(complete, token, _UNDECIDED))


@triton.jit
def _sample(
    source_ptr, count, max_logit, temperature, sums_ptr, top_k, top_p, min_weight, u,
    V: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr,
    ID_BITS: tl.constexpr, ALL_LOGITS: tl.constexpr,
):  # fmt: skip
    """Return the token sampled from `count` tokens of a row, and whether top-k or top-p is known to keep no others."""
    last_key = tl.full((), _NO_TOKEN, tl.int64)  # sort key of the last kept token
    if top_k > 0:
        last_key = _find_key(
            top_k.to(tl.int64), source_ptr, count, max_logit, temperature, True, V, TILE, ID_BITS, ALL_LOGITS
        )
        mass = _sum_kept(last_key, 0, source_ptr, count, max_logit, temperature, V, TILE, ID_BITS, ALL_LOGITS)
    else:
        mass = _mass(sums_ptr, NUM_TILES, TILES_PAD)
    if top_p < 1:
        goal = _top_p_goal(top_p, mass)
        last_key = _find_key(goal, source_ptr, count, max_logit, temperature, False, V, TILE, ID_BITS, ALL_LOGITS)
    total = _sum_kept(last_key, min_weight, source_ptr, count, max_logit, temperature, V, TILE, ID_BITS, ALL_LOGITS)
    goal = _target(u, total) + 1
    key = _find_key(goal, source_ptr, count, max_logit, temperature, False, V, TILE, ID_BITS, ALL_LOGITS)
    return key & ((1 << ID_BITS) - 1), (top_k <= count) & ((last_key >> ID_BITS) <= _INF_BITS)


@triton.jit
def _sample_by_pairs(
    key_ptr, count, sums_ptr, top_k, top_p, min_weight, u,
    NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr, ID_BITS: tl.constexpr, MAX_COUNT: tl.constexpr,
):  # fmt: skip
    """Return what `_sample` returns, for at most MAX_COUNT candidates."""
    at = tl.arange(0, MAX_COUNT)
    keys = tl.load(key_ptr + at, mask=at < count, other=_NO_TOKEN)
    weights = _weights_of_keys(keys, ID_BITS)
    place = tl.zeros([MAX_COUNT], tl.int32)  # number of more likely candidates
    mass_before = tl.zeros([MAX_COUNT], tl.int64)  # their sum of weights
    for start in range(0, count, _PAIRS):
        other_at = start + tl.arange(0, _PAIRS)
        others = tl.load(key_ptr + other_at, mask=other_at < count, other=_NO_TOKEN)
        is_before = others[None, :] < keys[:, None]
        place += tl.sum(is_before.to(tl.int32), 1)
        mass_before += tl.sum(tl.where(is_before, _weights_of_keys(others, ID_BITS)[None, :], 0), 1)
    is_kept = (top_k == 0) | (place < top_k)
    complete = (top_k > 0) & (top_k <= count)
    if top_p < 1:
        if top_k > 0:
            mass = tl.sum(tl.where(is_kept, weights, 0), 0)
        else:
            mass = _mass(sums_ptr, NUM_TILES, TILES_PAD)
        goal = _top_p_goal(top_p, mass)
        is_kept &= mass_before < goal
        complete = (top_k <= count) & (tl.sum(weights, 0) >= goal)
    target = _target(u, tl.sum(tl.where(is_kept & (weights >= min_weight), weights, 0), 0))
    is_sampled = (mass_before <= target) & (mass_before + weights > target)
    return tl.sum(tl.where(is_sampled, keys & ((1 << ID_BITS) - 1), 0), 0), complete


@triton.jit
def _mass(sums_ptr, NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr):
    """Return the sum of all weights of a row."""
    tiles = tl.arange(0, TILES_PAD)
    return tl.sum(tl.load(sums_ptr + tiles, mask=tiles < NUM_TILES, other=0), 0)


@triton.jit
def _top_p_goal(top_p, mass):
    """Return the sum of weights that top-p keeps at least."""
    return tl.minimum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), mass)


@triton.jit
def _target(u, total):
    """Return floor(u * total): the first token whose cumulative weight exceeds it is sampled.

    As in ops.py: u <= 1 - 2**-53, so the product stays below the total and some token exceeds the target.
    """
    return (u * total.to(tl.float64)).to(tl.int64)


@triton.jit
def _find_key(
    goal, source_ptr, count, max_logit, temperature,
    COUNT_TOKENS: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, ID_BITS: tl.constexpr, ALL_LOGITS: tl.constexpr,
):  # fmt: skip
    """Return the first sort key up to which the weights (COUNT_TOKENS: the tokens) sum to `goal` > 0.

    That is the greatest key before which the sum falls short of the goal; all bits are 1 if no key reaches it. Finds
    the digits from the highest down.
    """
    STEPS: tl.constexpr = (31 + ID_BITS + _DIGIT_BITS - 1) // _DIGIT_BITS
    digits = tl.arange(0, _RADIX).to(tl.int64)
    key = tl.full((), 0, tl.int64)
    for digit_index in range(STEPS):
        shift = (STEPS - 1 - digit_index) * _DIGIT_BITS
        bounds = key + (digits << shift)
        sums = tl.zeros([_RADIX, TILE], tl.int64)
        for start in range(0, count, TILE):
            keys, weights = _tokens(source_ptr, start, count, max_logit, temperature, V, TILE, ID_BITS, ALL_LOGITS)
            amounts = tl.full([TILE], 1, tl.int64) if COUNT_TOKENS else weights
            sums += tl.where(keys[None, :] < bounds[:, None], amounts[None, :], 0)
        below = (tl.sum(sums, 1) < goal).to(tl.int64)  # always true for the first bound, the key found so far
        key += (tl.sum(below, 0) - 1) << shift
    return key


@triton.jit
def _sum_kept(
    last_key, min_weight, source_ptr, count, max_logit, temperature,
    V: tl.constexpr, TILE: tl.constexpr, ID_BITS: tl.constexpr, ALL_LOGITS: tl.constexpr,
):  # fmt: skip
    """Return the sum of the weights of at least `min_weight`, up to the sort key `last_key`."""
    total = tl.zeros([TILE], tl.int64)
    for start in range(0, count, TILE):
        keys, weights = _tokens(source_ptr, start, count, max_logit, temperature, V, TILE, ID_BITS, ALL_LOGITS)
        total += tl.where((keys <= last_key) & (weights >= min_weight), weights, 0)
    return tl.sum(total, 0)


@triton.jit
def _tokens(
    source_ptr, start, count, max_logit, temperature,
    V: tl.constexpr, TILE: tl.constexpr, ID_BITS: tl.constexpr, ALL_LOGITS: tl.constexpr,
):  # fmt: skip
    """Return sort keys and weights int64 [TILE] of tokens from `start` on: of all logits or of the candidates."""
    at = start + tl.arange(0, TILE)
    if ALL_LOGITS:
        z = scaled(logits_tile(source_ptr, start // TILE, V, TILE), max_logit, temperature)
        keys = tl.where(at < count, sort_keys(z, at, ID_BITS), _NO_TOKEN)
    else:
        keys = tl.load(source_ptr + at, mask=at < count, other=_NO_TOKEN)
        z = z_of_keys(keys, ID_BITS)
    return keys, weights_of(z)


@triton.jit
def _weights_of_keys(keys, ID_BITS: tl.constexpr):
    return weights_of(z_of_keys(keys, ID_BITS))


@triton.jit
def z_of_keys(keys, ID_BITS: tl.constexpr):
    """Return z of sort keys; -inf (weight 0) of _NO_TOKEN."""
    z_bits = tl.minimum(keys >> ID_BITS, _INF_BITS).to(tl.int32)
    return -z_bits.to(tl.float32, bitcast=True)


@triton.jit
def sort_keys(z, ids, ID_BITS: tl.constexpr):
    """Return sort keys int64 of tokens: z descending, then id ascending."""
    z_bits = z.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # bits of -z >= 0, which order like the number
    return (z_bits.to(tl.int64) << ID_BITS) | ids


@triton.jit
def _bin(z):
    return tl.minimum(z / -_BIN_WIDTH, _BINS - 1.0).to(tl.int32)


@triton.jit
def _leading_bins(counts_ptr, top_k, MAX_CANDIDATES: tl.constexpr):
    """Return how many leading bins hold a row's candidates: all bins that fit, or as many as top-k needs."""
    bins = tl.arange(0, _BINS)
    counts = tl.load(counts_ptr + bins)
    cumulative = tl.cumsum(counts, 0)
    needed = tl.where(top_k > 0, top_k, float("inf"))
    is_leading = (cumulative <= MAX_CANDIDATES) & (bins < _NONZERO_BINS) & (cumulative - counts < needed)
    return tl.sum(is_leading.to(tl.int32), 0)

"""Device code of sampling after top-k, top-p and min-p: `sample_truncated` of engine/sampling/ops.py without a sort.

A token's sort key is the integer (bits of -z, id). Ascending keys are the order of `sample_truncated`. All sums are of
integers, so they are exact, and a token depends neither on the batch nor on the order in which atomics gather tokens.

Most rows keep few tokens, and their candidates suffice: the tokens in a row's leading bins of z. With a small top-k,
the bins come from maxima of groups of tokens: bins that hold the maxima of k groups hold at least k tokens. Otherwise
all of the row's tokens are counted.

Other rows are undecided. There, top-k, top-p and the sampled token are each a search for the first sort key up to which
the tokens, or their weights, sum to a goal. Quantiles of a sample of the row, the edges, split its keys into buckets of
about equal numbers of tokens for any distribution: equal logits are told apart by their ids. One launch sums the
buckets, another gathers the tokens of the few buckets in which the searches end, and one program per row searches them.
So the time does not depend on the distribution.

Launched by fused_sampling.py. Imports triton at the top: for CUDA (or Triton's interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.sampling_kernels import logits_tile, min_p_weight, relative_weights, row_max, scaled, weights_of

BINS = 256
"""Bins of a row's coarse histogram of z, each an eighth of a unit wide; the last bin holds all the rest."""

WINDOWS = 3
"""Searches of an undecided row: top-k, top-p and the sampled token. The window of a search is a range of buckets."""

NUM_TOTALS = WINDOWS + 2
"""Columns of a row's totals after the cumulative sums of its buckets, of weights and then of tokens.

The number of gathered tokens of each window; the sum of the weights that min-p keeps; the number of edges.
"""

SUMMED = 16
"""Buckets that one program sums."""

_SUMMED = tl.constexpr(SUMMED)
_BINS, _WINDOWS, _NUM_TOTALS = tl.constexpr(BINS), tl.constexpr(WINDOWS), tl.constexpr(NUM_TOTALS)
_MIN_P_SUM, _NUM_EDGES = tl.constexpr(WINDOWS), tl.constexpr(WINDOWS + 1)

_BIN_WIDTH = tl.constexpr(0.125)
_NONZERO_BINS = tl.constexpr(224)  # bins that can hold a weight above 0: exp(-28) < 2**-40
_END_BITS = tl.constexpr(0x41E00000)  # float bits of 28: tokens with sort keys from there on have weight 0
_UNDECIDED = tl.constexpr(-2)  # token of a row whose candidates do not suffice
_NO_TOKEN = tl.constexpr(2**62)  # sort key of no token: greater than all keys
_INF_BITS = tl.constexpr(0x7F800000)  # float bits of +inf: -z of z = -inf
_GROUPS_PER_TOP_K = tl.constexpr(4)  # fewer groups than this per token of top-k would give too many candidates
_FEW = tl.constexpr(128)  # candidates whose places are found by comparing all pairs; more are sorted
_PAIRS = tl.constexpr(16)  # candidates that each one is compared with at a time
_PARTS = tl.constexpr(16)  # parts into which one pass over the tokens of a search splits them
_TOKEN = tl.constexpr(2.0**-7)  # what a token adds to a sum of weights, float64, beside its weight: counts 64 exactly
_MAX_COUNT = tl.constexpr(64)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


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
                    keys = sort_keys(z, tile * TILE + tl.arange(0, TILE), ID_BITS)
                    _append(keys, _bin(z) < bins, key_ptr + row * MAX_CANDIDATES, counts_ptr + _BINS, MAX_CANDIDATES)


@triton.jit
def _append(keys, is_member, list_ptr, count_ptr, capacity):
    """Append members of keys int64 [TILE] to a list of at most `capacity` keys; `count` also counts those beyond it.

    One atomic per program and list: one per token would take as long as there are tokens.
    """
    places = tl.cumsum(is_member.to(tl.int32), 0)
    found = tl.max(places, 0)
    if found > 0:
        at = tl.atomic_add(count_ptr, found.to(count_ptr.dtype.element_ty), sem="relaxed") + places - 1
        tl.store(list_ptr + at, keys, mask=is_member & (at < capacity))


@triton.jit
def sample_candidates_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, u_ptr,
    tile_max_ptr, tile_sum_ptr, bin_count_ptr, key_ptr, edge_ptr, totals_ptr, out_ptr, kept_ptr,
    logits_stride, param_stride,
    V: tl.constexpr, NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
    SAMPLES: tl.constexpr, SPAN: tl.constexpr, BUCKETS: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """Write the token sampled from a row's candidates to out int64 [rows]; -1 without a finite maximum.

    Also write what is kept to kept int64 [rows, 2], for log-probabilities: the sort key of the last token that top-k
    and top-p keep, and the sum of weights after min-p. The key is greater than all keys if all tokens of any weight are
    kept.

    Where the candidates do not suffice, the token is _UNDECIDED. Such a row gets edges int64 [rows, SAMPLES + 1]: 0,
    ascending quantiles of the tokens that may have a weight, and from there on the sort key at which weights end. Its
    totals int64 [rows, 2 * BUCKETS + NUM_TOTALS] become 0.
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
            mass = _mass(tile_sum_ptr + row * NUM_TILES, NUM_TILES, TILES_PAD)  # undefined with a top-k
            counts_ptr = bin_count_ptr + row * (_BINS + 1)
            bins = _leading_bins(counts_ptr, top_k, MAX_CANDIDATES)
            found = tl.load(counts_ptr + _BINS)
            places = tl.arange(0, SAMPLES)
            key_ptr += row * MAX_CANDIDATES
            keys = tl.load(key_ptr + places, mask=places < tl.minimum(found, MAX_CANDIDATES), other=_NO_TOKEN)
            if top_k > 0:
                complete = top_k <= found
            else:
                complete = (top_p < 1) & (tl.sum(_weights_of_keys(keys, ID_BITS), 0) >= _top_p_goal(top_p, mass))
                # Min-p drops all tokens beyond the candidates.
                complete |= min_weight > weights_of(bins * -_BIN_WIDTH)
            complete |= bins == _NONZERO_BINS  # all tokens beyond the candidates have weight 0
            complete &= found <= MAX_CANDIDATES
            if complete & (found <= _FEW):
                token, last_key, total = _sample_by_pairs(key_ptr, found, mass, top_k, top_p, min_weight, u, ID_BITS)
                tl.store(out_ptr + row, token)
                _store_kept(kept_ptr, row, last_key, total)
            else:
                end = tl.full((), _END_BITS, tl.int64) << ID_BITS
                if not complete:
                    row_ptr = logits_ptr + row * logits_stride
                    keys = tl.minimum(_keys_of_sample(row_ptr, max_logit, temperature, V, SAMPLES, ID_BITS), end)
                keys = _sorted(keys, SAMPLES)
                if complete:
                    weights = _weights_of_keys(keys, ID_BITS)
                    token, last_key, total = _sample_places(
                        keys, places, tl.cumsum(weights, 0) - weights, found, mass, top_k, top_p, min_weight, u, ID_BITS
                    )
                    tl.store(out_ptr + row, token)
                    _store_kept(kept_ptr, row, last_key, total)
                else:
                    tl.store(out_ptr + row, tl.full((), _UNDECIDED, tl.int64))
                    edge_ptr += row * (SAMPLES + 1)
                    tl.store(edge_ptr + places, tl.where(places == 0, 0, keys))
                    tl.store(edge_ptr + SAMPLES, end)
                    totals_ptr += row * (2 * BUCKETS + _NUM_TOTALS)
                    tl.store(totals_ptr + tl.arange(0, 2 * BUCKETS), tl.zeros([2 * BUCKETS], tl.int64))
                    for column in tl.static_range(_NUM_EDGES):
                        tl.store(totals_ptr + 2 * BUCKETS + column, tl.full((), 0, tl.int64))
                    num_edges = tl.maximum(tl.sum((keys < end).to(tl.int64), 0), 1)
                    tl.store(totals_ptr + 2 * BUCKETS + _NUM_EDGES, num_edges)


@triton.jit
def _sample_by_pairs(key_ptr, count, mass, top_k, top_p, min_weight, u, ID_BITS: tl.constexpr):
    """Return what `_sample_places` returns, for at most _FEW candidates."""
    at = tl.arange(0, _FEW)
    keys = tl.load(key_ptr + at, mask=at < count, other=_NO_TOKEN)
    place = tl.zeros([_FEW], tl.int32)  # number of more likely candidates
    mass_before = tl.zeros([_FEW], tl.int64)  # their sum of weights
    for start in range(0, count, _PAIRS):
        other_at = start + tl.arange(0, _PAIRS)
        others = tl.load(key_ptr + other_at, mask=other_at < count, other=_NO_TOKEN)
        is_before = others[None, :] < keys[:, None]
        place += tl.sum(is_before.to(tl.int32), 1)
        mass_before += tl.sum(tl.where(is_before, _weights_of_keys(others, ID_BITS)[None, :], 0), 1)
    return _sample_places(keys, place, mass_before, count, mass, top_k, top_p, min_weight, u, ID_BITS)


@triton.jit
def _sample_places(
    keys, place, mass_before, count, mass, top_k, top_p, min_weight, u, ID_BITS: tl.constexpr
):  # fmt: skip
    """Return the token sampled from a row's `count` candidates, the last key that is kept, and the sum of weights.

    The candidates hold all tokens that are kept and have a weight. `mass` is the sum of a row's weights without top-k.
    """
    weights = _weights_of_keys(keys, ID_BITS)
    is_kept = (keys < _NO_TOKEN) & ((top_k == 0) | (place < top_k))
    last_key = tl.full((), _NO_TOKEN, tl.int64)
    if (top_p < 1) | ((top_k > 0) & (top_k <= count)):
        if top_k > 0:
            mass = tl.sum(tl.where(is_kept, weights, 0), 0)
        if top_p < 1:
            is_kept &= mass_before < _top_p_goal(top_p, mass)
        last_key = tl.max(tl.where(is_kept, keys, 0), 0)
    total = tl.sum(tl.where(is_kept & (weights >= min_weight), weights, 0), 0)
    target = _target(u, total)
    is_sampled = (mass_before <= target) & (mass_before + weights > target)
    return tl.sum(tl.where(is_sampled, keys & ((1 << ID_BITS) - 1), 0), 0), last_key, total


@triton.jit
def _store_kept(kept_ptr, row, last_key, total):
    tl.store(kept_ptr + 2 * row, last_key)
    tl.store(kept_ptr + 2 * row + 1, total)


@triton.jit
def _keys_of_sample(
    row_ptr, max_logit, temperature, V: tl.constexpr, SAMPLES: tl.constexpr, ID_BITS: tl.constexpr
):  # fmt: skip
    """Return sort keys int64 [SAMPLES]: a token of each of SAMPLES equal parts of the vocabulary, without a pattern."""
    index = tl.arange(0, SAMPLES)
    first, last = _part(index, V, SAMPLES), _part(index + 1, V, SAMPLES)
    fraction = ((index.to(tl.int64) * 2654435761) >> 16) & 0xFFFF
    ids = tl.minimum(first + (((last - first) * fraction) >> 16), V - 1)
    z = scaled(tl.load(row_ptr + ids).to(tl.float32), max_logit, temperature)
    return sort_keys(z, ids, ID_BITS)


@triton.jit
def _part(index, V: tl.constexpr, SAMPLES: tl.constexpr):
    return (index.to(tl.int64) * V) // SAMPLES


@triton.jit
def bucket_sums_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, tile_max_ptr, edge_ptr, totals_ptr, out_ptr, logits_stride, param_stride,
    V: tl.constexpr, SPAN: tl.constexpr, CHUNK: tl.constexpr, NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr,
    SAMPLES: tl.constexpr, BUCKETS: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """Add a span's share to the totals of an undecided row: cumulative sums of its buckets, and the sum of min-p.

    A program handles SPAN logits, CHUNK per iteration, 4 per thread, and _SUMMED buckets. Sums are of float64, which
    holds them exactly: on data-centre GPUs its addition takes one instruction, in another pipe than the comparison.
    """
    start = tl.program_id(0) * SPAN
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * param_stride)
    if _is_undecided(temperature, out_ptr + row):
        tl.static_assert(SPAN // CHUNK * 4 <= _MAX_COUNT)
        max_logit = row_max(tile_max_ptr + row * NUM_TILES, NUM_TILES, TILES_PAD)
        totals_ptr += row * (2 * BUCKETS + _NUM_TOTALS)
        min_weight = min_p_weight(tl.load(min_p_ptr + row * param_stride)).to(tl.float64)
        row_ptr = logits_ptr + row * logits_stride
        buckets = tl.program_id(2) * _SUMMED + tl.arange(0, _SUMMED)
        ends = _edge_of(edge_ptr + row * (SAMPLES + 1), totals_ptr, buckets + 1, SPAN, BUCKETS, ID_BITS)
        least = _threshold(ends, start, ID_BITS)
        sums = tl.zeros([_SUMMED, CHUNK // 4], tl.float64)
        kept = tl.zeros([CHUNK // 4], tl.float64)
        for first in range(start, start + SPAN, CHUNK):
            at = first + tl.arange(0, CHUNK)
            x = tl.load(row_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
            z = scaled(x, max_logit, temperature)
            weights = tl.floor(relative_weights(z)).to(tl.float64)
            z_0, z_1 = _halves(z)
            weights_0, weights_1 = _halves(weights)
            sums, kept = _add_pairs(sums, kept, z_0, weights_0, least, min_weight)
            sums, kept = _add_pairs(sums, kept, z_1, weights_1, least, min_weight)
        masses = tl.floor(sums)
        counts = tl.sum(((sums - masses) / _TOKEN).to(tl.int32), 1)
        tl.atomic_add(totals_ptr + buckets, tl.sum(masses.to(tl.int64), 1), sem="relaxed")
        tl.atomic_add(totals_ptr + BUCKETS + buckets, counts.to(tl.int64), sem="relaxed")
        if tl.program_id(2) == 0:
            tl.atomic_add(totals_ptr + 2 * BUCKETS + _MIN_P_SUM, tl.sum(kept.to(tl.int64), 0), sem="relaxed")


@triton.jit
def _halves(x):
    """Return the even and the odd elements of x [2 * n], which for neighbours in one thread moves no data."""
    return tl.split(tl.reshape(x, [x.shape[0] // 2, 2]))


@triton.jit
def _add_pairs(sums, kept, z, weights, least, min_weight):
    """Return sums and kept of bucket_sums_kernel after two tokens per thread: z and weights are [2 * threads]."""
    z_0, z_1 = _halves(z)
    weights_0, weights_1 = _halves(weights)
    kept += tl.where(weights_0 >= min_weight, weights_0, 0)
    kept += tl.where(weights_1 >= min_weight, weights_1, 0)
    sums = _add_above(sums, z_0[None, :], least[:, None], (weights_0 + _TOKEN)[None, :])
    return _add_above(sums, z_1[None, :], least[:, None], (weights_1 + _TOKEN)[None, :]), kept


@triton.jit
def _add_above(sums, z, least, amounts):
    """Return sums float64 plus the amounts where z > least, in two instructions."""
    if _INTERPRETED:
        return sums + tl.where(z > least, amounts, 0.0)
    else:
        # The bits of 1.0 as the upper half of a float64 are 2**-7.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero, one; .reg .b64 step; mov.b32 zero, 0; set.gt.f32.f32 one, $2, $3;"
            " mov.b64 step, {zero, one}; fma.rn.f64 $0, step, $4, $1; }",
            "=d,d,f,f,d", [sums, z, least, amounts * 128], dtype=tl.float64, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def gather_buckets_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, u_ptr, tile_max_ptr, edge_ptr, totals_ptr, key_ptr, out_ptr,
    logits_stride, param_stride,
    V: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr,
    SAMPLES: tl.constexpr, BUCKETS: tl.constexpr, CAPACITY: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """Gather the sort keys of the windows' tokens of an undecided row, in any order, into key int64 [rows, CAPACITY].

    The lists of the windows follow each other. Nothing is gathered if they don't fit. tile_max is of tiles of TILE.
    """
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * param_stride)
    if _is_undecided(temperature, out_ptr + row):
        totals_ptr += row * (2 * BUCKETS + _NUM_TOTALS)
        edge_ptr += row * (SAMPLES + 1)
        top_k = tl.load(top_k_ptr + row * param_stride).to(tl.int64)
        top_p, u = tl.load(top_p_ptr + row * param_stride), tl.load(u_ptr + row * param_stride)
        firsts, lasts, sizes = _windows(totals_ptr, edge_ptr, top_k, top_p, u, SPAN, BUCKETS, ID_BITS)
        if tl.sum(sizes, 0) <= CAPACITY:
            starts = tl.cumsum(sizes, 0) - sizes
            lows = _edge_of(edge_ptr, totals_ptr, tl.maximum(firsts, 0), SPAN, BUCKETS, ID_BITS)
            highs = _edge_of(edge_ptr, totals_ptr, tl.minimum(lasts + 1, BUCKETS), SPAN, BUCKETS, ID_BITS)
            max_logit = row_max(tile_max_ptr + row * NUM_TILES, NUM_TILES, TILES_PAD)
            row_ptr = logits_ptr + row * logits_stride
            for start in range(tl.program_id(0) * SPAN, V, tl.num_programs(0) * SPAN):
                greatest, least = _threshold(lows, start, ID_BITS), _threshold(highs, start, ID_BITS)
                is_needed = True
                if TILE >= SPAN:  # many tiles hold no token of a window
                    tile_max = tl.load(tile_max_ptr + row * NUM_TILES + start // TILE)
                    is_needed = scaled(tile_max, max_logit, temperature) > tl.min(least, 0)
                if is_needed:
                    z = scaled(logits_tile(row_ptr, start // SPAN, V, SPAN), max_logit, temperature)
                    keys = sort_keys(z, start + tl.arange(0, SPAN), ID_BITS)
                    for window in range(_WINDOWS):
                        size = _item(sizes, window)
                        if size > 0:
                            is_member = (z > _item(least, window)) & (z <= _item(greatest, window))
                            list_ptr = key_ptr + row * CAPACITY + _item(starts, window)
                            _append(keys, is_member, list_ptr, totals_ptr + 2 * BUCKETS + window, size)


@triton.jit
def search_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, u_ptr, tile_max_ptr, edge_ptr, totals_ptr, key_ptr, sorted_ptr,
    out_ptr, kept_ptr, logits_stride, param_stride,
    V: tl.constexpr, TILE: tl.constexpr, SPAN: tl.constexpr, NUM_TILES: tl.constexpr, TILES_PAD: tl.constexpr,
    SAMPLES: tl.constexpr, BUCKETS: tl.constexpr, CAPACITY: tl.constexpr, SORTED: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """Write what sample_candidates_kernel does, for undecided rows.

    TILE is the number of tokens per iteration. A search ends with a sort of at most SORTED tokens; sorted int64
    [rows, SORTED] is scratch. If the windows' tokens don't fit, the searches read all of the row's logits.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * param_stride)
    if _is_undecided(temperature, out_ptr + row):
        max_logit = row_max(tile_max_ptr + row * NUM_TILES, NUM_TILES, TILES_PAD)
        totals_ptr += row * (2 * BUCKETS + _NUM_TOTALS)
        edge_ptr += row * (SAMPLES + 1)
        top_k = tl.load(top_k_ptr + row * param_stride).to(tl.int64)
        top_p, u = tl.load(top_p_ptr + row * param_stride), tl.load(u_ptr + row * param_stride)
        firsts, lasts, sizes = _windows(totals_ptr, edge_ptr, top_k, top_p, u, SPAN, BUCKETS, ID_BITS)
        starts = tl.cumsum(sizes, 0) - sizes
        buckets = tl.arange(0, BUCKETS)
        weight_sums, counts = tl.load(totals_ptr + buckets), tl.load(totals_ptr + BUCKETS + buckets)
        min_p_sum = tl.load(totals_ptr + 2 * BUCKETS + _MIN_P_SUM)
        num_edges = tl.load(totals_ptr + 2 * BUCKETS + _NUM_EDGES).to(tl.int32)
        mass = tl.max(weight_sums, 0)  # of the tokens kept so far
        total = mass
        key = tl.full((), _NO_TOKEN, tl.int64)
        last_key = key
        for search in range(_WINDOWS):
            by_count = search == 0
            if (search == 2) | (_item(lasts, search) >= 0):
                total = tl.minimum(mass, min_p_sum)
                goal = tl.where(search == 1, _top_p_goal(top_p, mass), _target(u, total) + 1)
                goal = tl.where(by_count, top_k, goal)
                amounts = tl.where(by_count, counts, weight_sums)
                bucket = tl.sum((amounts < goal).to(tl.int32), 0)
                inside = _before(counts, bucket + 1) - _before(counts, bucket)
                window = tl.where(_item(sizes, search) == 0, 1, search)  # see _windows
                in_window = (bucket >= _item(firsts, window)) & (bucket <= _item(lasts, window))
                is_listed = in_window & (tl.sum(sizes, 0) <= CAPACITY)
                key, mass = _search(
                    key_ptr + row * CAPACITY + _item(starts, window), logits_ptr + row * logits_stride, is_listed,
                    tl.where(is_listed, _item(sizes, window), V), inside.to(tl.int32), edge_ptr,
                    sorted_ptr + row * SORTED, max_logit, temperature,
                    (bucket * num_edges) // BUCKETS, ((bucket + 1) * num_edges) // BUCKETS,
                    _edge_of(edge_ptr, totals_ptr, bucket, SPAN, BUCKETS, ID_BITS),
                    _edge_of(edge_ptr, totals_ptr, bucket + 1, SPAN, BUCKETS, ID_BITS),
                    _before(amounts, bucket), _before(weight_sums, bucket), goal, by_count,
                    V, TILE, SORTED, ID_BITS,
                )  # fmt: skip
                last_key = tl.where(search < 2, key, last_key)
        tl.store(out_ptr + row, key & ((1 << ID_BITS) - 1))
        _store_kept(kept_ptr, row, last_key, total)


@triton.jit
def _is_undecided(temperature, out_ptr):
    return (temperature > 0) & (tl.load(out_ptr) == _UNDECIDED)


@triton.jit
def _item(values, index):
    """Return values[index] of values [4]."""
    return tl.sum(tl.where(tl.arange(0, 4) == index, values, 0), 0)


@triton.jit
def _before(sums, bucket):
    """Return the sum of all buckets before `bucket` from cumulative sums [BUCKETS]."""
    return tl.max(tl.where(tl.arange(0, sums.shape[0]) < bucket, sums, 0), 0)


@triton.jit
def _edge_of(edge_ptr, totals_ptr, bucket, SPAN: tl.constexpr, BUCKETS: tl.constexpr, ID_BITS: tl.constexpr):
    """Return the sort key at which a bucket of a row begins; BUCKETS: at which the last one ends.

    Its id is rounded down to the start of a span, so that within a span it is a threshold of z: see _threshold.
    """
    edge = tl.load(edge_ptr + (bucket * tl.load(totals_ptr + 2 * BUCKETS + _NUM_EDGES)) // BUCKETS)
    return edge & ~((SPAN - 1) & ((1 << ID_BITS) - 1))


@triton.jit
def _threshold(edge, start, ID_BITS: tl.constexpr):
    """Return the z above which tokens of the span from `start` on are before an edge of `_edge_of`."""
    bits = (edge >> ID_BITS).to(tl.int32) + (start < (edge & ((1 << ID_BITS) - 1))).to(tl.int32)
    return -bits.to(tl.float32, bitcast=True)


@triton.jit
def _windows(
    totals_ptr, edge_ptr, top_k, top_p, u, SPAN: tl.constexpr, BUCKETS: tl.constexpr, ID_BITS: tl.constexpr
):  # fmt: skip
    """Return the first and last buckets in which the searches of a row can end, and their tokens, int32 [4] each.

    A search knows the result of the one before it only to within a bucket. Searches that are not needed have the last
    bucket -1 and no tokens. A window inside that of top-p has no tokens: it shares the list.
    """
    buckets = tl.arange(0, BUCKETS)
    weight_sums, counts = tl.load(totals_ptr + buckets), tl.load(totals_ptr + BUCKETS + buckets)
    min_p_sum = tl.load(totals_ptr + 2 * BUCKETS + _MIN_P_SUM)
    least = tl.max(weight_sums, 0)  # bounds of the sum of weights that is kept
    most = least
    k, p_first, p_last = tl.full((), -1, tl.int32), tl.full((), -1, tl.int32), tl.full((), -1, tl.int32)
    if (top_k > 0) & (top_k < tl.max(counts, 0)):
        k = tl.sum((counts < top_k).to(tl.int32), 0)
        least, most = _before(weight_sums, k), _before(weight_sums, k + 1)
    if top_p < 1:
        least, goal = _top_p_goal(top_p, least), _top_p_goal(top_p, most)
        p_first = tl.sum((weight_sums < least).to(tl.int32), 0)
        p_last = tl.sum((weight_sums < goal).to(tl.int32), 0)
        # Top-p exceeds the goal by less than a token, and no token from p_first on weighs more than its first key.
        first_key = _edge_of(edge_ptr, totals_ptr, p_first, SPAN, BUCKETS, ID_BITS)
        most = tl.minimum(goal + _weights_of_keys(first_key, ID_BITS), _before(weight_sums, p_last + 1))
    first = tl.sum((weight_sums <= _target(u, tl.minimum(least, min_p_sum))).to(tl.int32), 0)
    last = tl.sum((weight_sums <= _target(u, tl.minimum(most, min_p_sum))).to(tl.int32), 0)
    at = tl.arange(0, 4)
    firsts = tl.where(at == 0, k, tl.where(at == 1, p_first, tl.where(at == 2, first, 0)))
    lasts = tl.where(at == 0, k, tl.where(at == 1, p_last, tl.where(at == 2, last, -1)))
    is_inside = (counts[None, :] > 0) & (buckets[None, :] <= lasts[:, None])
    is_before = buckets[None, :] < firsts[:, None]
    ends = tl.max(tl.where(is_inside, counts[None, :], 0), 1)
    begins = tl.max(tl.where(is_inside & is_before, counts[None, :], 0), 1)
    is_shared = (at != 1) & (firsts >= p_first) & (lasts <= p_last)
    return firsts, lasts, tl.where(is_shared, 0, ends - begins).to(tl.int32)


@triton.jit
def _search(
    list_ptr, row_ptr, is_listed, count, inside, edge_ptr, sorted_ptr, max_logit, temperature,
    first_edge, last_edge, low, high, before, weight_before, goal, by_count,
    V: tl.constexpr, TILE: tl.constexpr, SORTED: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """Return the first sort key up to which the weights (by_count: the tokens) sum to `goal`, and the sum of weights.

    The key is from `low` on and below `high`, as are `inside` of the `count` tokens of the list, or else of the row.
    The sums before `low` are `before` and, of weights, `weight_before`. Each pass over the tokens splits the range at
    edges in it, or evenly when there are none left.
    """
    parts = tl.arange(0, _PARTS)
    while inside > SORTED:
        has_edges = last_edge - first_edge > 1
        edges = first_edge + ((last_edge - first_edge) * (parts + 1)) // _PARTS
        even = low + ((high - low) // _PARTS) * (parts + 1)
        ends = tl.load(edge_ptr + edges, mask=has_edges & (parts < _PARTS - 1), other=0)
        ends = tl.where(parts == _PARTS - 1, high, tl.minimum(tl.where(has_edges, ends, even), high))
        sums = tl.zeros([_PARTS, TILE], tl.int64)
        numbers = tl.zeros([_PARTS, TILE], tl.int32)
        for start in range(0, count, TILE):
            keys = _keys(list_ptr, row_ptr, is_listed, start, count, max_logit, temperature, V, TILE, ID_BITS)
            is_before = (keys[None, :] < ends[:, None]) & (keys >= low)[None, :]
            sums += tl.where(is_before, _weights_of_keys(keys, ID_BITS)[None, :], 0)
            numbers += is_before.to(tl.int32)
        part_weights, part_counts = tl.sum(sums, 1), tl.sum(numbers, 1)
        amounts = tl.where(by_count, part_counts.to(tl.int64), part_weights)
        is_passed = before + amounts < goal
        passed = tl.max(tl.where(is_passed, part_counts, 0), 0)
        inside = tl.min(tl.where(is_passed, inside, part_counts), 0) - passed
        before += tl.max(tl.where(is_passed, amounts, 0), 0)
        weight_before += tl.max(tl.where(is_passed, part_weights, 0), 0)
        low = tl.maximum(low, tl.max(tl.where(is_passed, ends, 0), 0))
        high = tl.min(tl.where(is_passed, high, ends), 0)
        next_edge = tl.min(tl.where(is_passed, last_edge, edges), 0)
        first_edge = tl.maximum(first_edge, tl.max(tl.where(is_passed, edges, 0), 0))
        last_edge = next_edge
    stored = inside * 0
    for start in range(0, count, TILE):
        keys = _keys(list_ptr, row_ptr, is_listed, start, count, max_logit, temperature, V, TILE, ID_BITS)
        is_inside = (keys >= low) & (keys < high)
        places = stored + tl.cumsum(is_inside.to(tl.int32), 0)
        tl.store(sorted_ptr + places - 1, keys, mask=is_inside & (places <= SORTED))
        stored = tl.maximum(stored, tl.max(places, 0))
    tl.debug_barrier()  # until the keys of all threads are stored
    at = tl.arange(0, SORTED)
    keys = _sorted(tl.load(sorted_ptr + at, mask=at < stored, other=_NO_TOKEN), SORTED)
    tl.debug_barrier()  # until all are read, before the next search stores its keys
    sums = tl.cumsum(_weights_of_keys(keys, ID_BITS), 0)
    amounts = tl.where(by_count, (at + 1).to(tl.int64), sums)
    is_found = at == tl.sum((before + amounts < goal).to(tl.int32), 0)
    return tl.sum(tl.where(is_found, keys, 0), 0), weight_before + tl.sum(tl.where(is_found, sums, 0), 0)


@triton.jit
def _keys(
    list_ptr, row_ptr, is_listed, start, count, max_logit, temperature,
    V: tl.constexpr, TILE: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """Return the sort keys int64 [TILE] of tokens from `start` on, of a list of `count` keys or else of a row."""
    at = start + tl.arange(0, TILE)
    if is_listed:
        keys = tl.load(list_ptr + at, mask=at < count, other=_NO_TOKEN)
    else:
        x = tl.load(row_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
        keys = sort_keys(scaled(x, max_logit, temperature), at, ID_BITS)
    return keys


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
def _sorted(keys, COUNT: tl.constexpr):
    """Return keys int64 [COUNT] in ascending order."""
    if _INTERPRETED:  # tl.sort would take a second there
        at = tl.arange(0, COUNT)
        is_before = (keys[None, :] < keys[:, None]) | ((keys[None, :] == keys[:, None]) & (at[None, :] < at[:, None]))
        place = tl.sum(is_before.to(tl.int32), 1)
        return tl.sum(tl.where(place[None, :] == at[:, None], keys[None, :], 0), 1)
    else:
        return tl.sort(keys)


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

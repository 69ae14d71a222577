"""Device code of the draw from what top-k, top-p and min-p leave: draw.py's rule without a sort, for fused_draw.py.

A token's place is the integer (bits of -z, id): ascending places are the rule's order, and every limit is a place,
found by bisection over integers whose sums are exact. So a token depends neither on the batch nor on the order in which
atomics put the likely tokens, the candidates, together. Where what is kept may reach beyond a row's candidates, the
same program goes through its logits instead. Imports triton at the top: for CUDA (or Triton's interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.sampling_kernels import least_weight, logits_tile, row_best, scaled, weights_of

BINS = 64
"""Bins of a row's coarse histogram of z, half a unit each; the last one holds all the rest."""

_BINS = tl.constexpr(BINS)
_WEIGHTY = tl.constexpr(56)  # bins that can hold a weight above 0: exp(-28) is less than 2**-40
_UNDECIDED = tl.constexpr(-2)  # a row's token while its candidates are too few
_NOWHERE = tl.constexpr(2**62)  # the place of what is no token: behind all
_ENDLESS = tl.constexpr(0x7F800000)  # the key of z = -inf
_DIGIT = tl.constexpr(3)  # bits of a place that one pass over the tokens finds
_DIGITS = tl.constexpr(8)  # and their values


@triton.jit
def count_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, peak_ptr, sum_ptr, count_ptr, stride, step,
    V: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add each bin's tokens to count int32 [rows, BINS + 1]; sum int64 [rows, TILES] of weights where top_k is 0."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * step)
    if temperature > 0:
        best = row_best(peak_ptr + row * TILES, TILES, WIDTH)
        if tl.abs(best) < float("inf"):
            z = scaled(logits_tile(logits_ptr + row * stride, tile, V, TILE), best, temperature)
            counts = tl.histogram(_bin(z), _BINS)
            tl.atomic_add(count_ptr + row * (_BINS + 1) + tl.arange(0, _BINS), counts, mask=counts > 0, sem="relaxed")
            if tl.load(top_k_ptr + row * step) == 0:
                tl.store(sum_ptr + row * TILES + tile, tl.sum(weights_of(z), 0))


@triton.jit
def gather_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, peak_ptr, count_ptr, place_ptr, stride, step,
    V: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
    CAP: tl.constexpr, ID_BITS: tl.constexpr,
):  # fmt: skip
    """The candidates' places, in any order, into place int64 [rows, CAP]; count's last column is how many are there."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * step)
    if temperature > 0:
        best = row_best(peak_ptr + row * TILES, TILES, WIDTH)
        if tl.abs(best) < float("inf"):
            counts_ptr = count_ptr + row * (_BINS + 1)
            bins, _ = _candidates(counts_ptr, tl.load(top_k_ptr + row * step), CAP)
            # Most tiles of a row have no candidate, and need not be read again to know it.
            if _bin(scaled(tl.load(peak_ptr + row * TILES + tile), best, temperature)) < bins:
                z = scaled(logits_tile(logits_ptr + row * stride, tile, V, TILE), best, temperature)
                inside = (_bin(z) < bins).to(tl.int32)
                start = tl.atomic_add(counts_ptr + _BINS, tl.sum(inside, 0), sem="relaxed")
                at = place_ptr + row * CAP + start + tl.cumsum(inside, 0) - 1
                tl.store(at, _places(z, tile * TILE + tl.arange(0, TILE), ID_BITS), mask=inside > 0)


@triton.jit
def choose_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, u_ptr,
    peak_ptr, sum_ptr, count_ptr, place_ptr, out_ptr, stride, step,
    V: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
    CAP: tl.constexpr, ID_BITS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """out int64 [rows]: the token drawn, -1 without a finite best. First from candidates; then ALL, for the undecided.

    TILE tokens are looked at together; TILES is how many peaks and sums a row has.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * step)
    if temperature > 0:
        best = row_best(peak_ptr + row * TILES, TILES, WIDTH)
        if tl.abs(best) == float("inf"):
            tl.store(out_ptr + row, tl.full((), -1, tl.int64))
        else:
            top_k = tl.load(top_k_ptr + row * step)
            top_p = tl.load(top_p_ptr + row * step)
            least = least_weight(tl.load(min_p_ptr + row * step))
            u = tl.load(u_ptr + row * step)
            sums_ptr = sum_ptr + row * TILES
            if ALL:
                if tl.load(out_ptr + row) == _UNDECIDED:
                    token, _ = _draw(
                        logits_ptr + row * stride, V, best, temperature, sums_ptr, top_k, top_p, least, u,
                        V, TILE, TILES, WIDTH, ID_BITS, True,
                    )  # fmt: skip
                    tl.store(out_ptr + row, token)
            else:
                bins, count = _candidates(count_ptr + row * (_BINS + 1), top_k, CAP)
                token, within = _draw(
                    place_ptr + row * CAP, count, best, temperature, sums_ptr, top_k, top_p, least, u,
                    V, TILE, TILES, WIDTH, ID_BITS, False,
                )  # fmt: skip
                # Nothing beyond the candidates weighs anything, or min-p keeps nothing of it.
                within |= bins == _WEIGHTY
                within |= (top_k == 0) & (least > weights_of(bins * -0.5))
                tl.store(out_ptr + row, tl.where(within, token, _UNDECIDED))


@triton.jit
def _draw(
    source_ptr, count, best, temperature, sums_ptr, top_k, top_p, least, u,
    V: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
    ID_BITS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The token drawn from `count` tokens of a row; and whether top-k or top-p is known to keep no others."""
    last = tl.full((), _NOWHERE, tl.int64)  # the place of the last that is kept
    if top_k > 0:
        last = _reach(top_k.to(tl.int64), source_ptr, count, best, temperature, True, V, TILE, ID_BITS, ALL)
        mass = _kept(last, 0, source_ptr, count, best, temperature, V, TILE, ID_BITS, ALL)
    else:
        tiles = tl.arange(0, WIDTH)
        mass = tl.sum(tl.load(sums_ptr + tiles, mask=tiles < TILES, other=0), 0)
    if top_p < 1:
        goal = tl.minimum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), mass)
        last = _reach(goal, source_ptr, count, best, temperature, False, V, TILE, ID_BITS, ALL)
    total = _kept(last, least, source_ptr, count, best, temperature, V, TILE, ID_BITS, ALL)
    # As in draw.py: u <= 1 - 2**-53, so the product stays below the total, and some token reaches the target.
    target = (u * total.to(tl.float64)).to(tl.int64)
    place = _reach(target + 1, source_ptr, count, best, temperature, False, V, TILE, ID_BITS, ALL)
    return place & ((1 << ID_BITS) - 1), (top_k <= count) & ((last >> ID_BITS) <= _ENDLESS)


@triton.jit
def _reach(
    goal, source_ptr, count, best, temperature,
    COUNTED: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr, ID_BITS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The first place up to which the weights (COUNTED: the tokens) sum up to `goal` > 0; all bits 1 if none is.

    That is the greatest place before which the sum falls short of the goal. Its bits are found from the highest down.
    """
    STEPS: tl.constexpr = (31 + ID_BITS + _DIGIT - 1) // _DIGIT
    digits = tl.arange(0, _DIGITS).to(tl.int64)
    found = tl.full((), 0, tl.int64)
    for step in range(STEPS):
        shift = (STEPS - 1 - step) * _DIGIT
        bounds = found + (digits << shift)
        before = tl.zeros([_DIGITS, TILE], tl.int64)
        for start in range(0, count, TILE):
            places, weights = _tokens(source_ptr, start, count, best, temperature, V, TILE, ID_BITS, ALL)
            amounts = tl.full([TILE], 1, tl.int64) if COUNTED else weights
            before += tl.where(places[None, :] < bounds[:, None], amounts[None, :], 0)
        short = (tl.sum(before, 1) < goal).to(tl.int64)  # of the first bound always: it is what was found before
        found += (tl.sum(short, 0) - 1) << shift
    return found


@triton.jit
def _kept(
    last, least, source_ptr, count, best, temperature,
    V: tl.constexpr, TILE: tl.constexpr, ID_BITS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The sum of those weights that are at least `least`, up to the place `last`."""
    total = tl.zeros([TILE], tl.int64)
    for start in range(0, count, TILE):
        places, weights = _tokens(source_ptr, start, count, best, temperature, V, TILE, ID_BITS, ALL)
        total += tl.where((places <= last) & (weights >= least), weights, 0)
    return tl.sum(total, 0)


@triton.jit
def _tokens(
    source_ptr, start, count, best, temperature,
    V: tl.constexpr, TILE: tl.constexpr, ID_BITS: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Places and weights int64 [TILE] of tokens from `start` on: of a row's logits (ALL), or of its candidates."""
    at = start + tl.arange(0, TILE)
    if ALL:
        z = scaled(logits_tile(source_ptr, start // TILE, V, TILE), best, temperature)
        places = tl.where(at < count, _places(z, at, ID_BITS), _NOWHERE)
    else:
        places = tl.load(source_ptr + at, mask=at < count, other=_NOWHERE)
        key = tl.minimum(places >> ID_BITS, _ENDLESS).to(tl.int32)
        z = -key.to(tl.float32, bitcast=True)
    return places, weights_of(z)


@triton.jit
def _places(z, ids, ID_BITS: tl.constexpr):
    """Places int64 of tokens in the order (z descending, id ascending)."""
    key = z.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # of -z >= 0: as an integer it ascends with the number
    return (key.to(tl.int64) << ID_BITS) | ids


@triton.jit
def _bin(z):
    return tl.minimum(z * -2.0, _BINS - 1.0).to(tl.int32)


@triton.jit
def _candidates(counts_ptr, top_k, CAP: tl.constexpr):
    """How many leading bins are a row's candidates, and how many tokens: as many as fit, or as top-k needs."""
    bins = tl.arange(0, _BINS)
    counts = tl.load(counts_ptr + bins)
    up_to = tl.cumsum(counts, 0)
    wanted = tl.where(top_k > 0, top_k, float("inf"))
    taken = (up_to <= CAP) & (bins < _WEIGHTY) & (up_to - counts < wanted)
    return tl.sum(taken.to(tl.int32), 0), tl.sum(tl.where(taken, counts, 0), 0)

"""Device code of the mixture-of-experts kernels; moe.py launches it.

An entry is a pair of token and routing choice: entry t * top_k + j is the j-th expert of token t.
"""

import triton
import triton.language as tl

from engine.kernels.quantized_gemm_kernels import accumulate


@triton.jit
def sort_kernel(experts, order, starts, entries, E: tl.constexpr, BLOCK: tl.constexpr):
    """Sort entries by expert, stable: one program per expert finds and fills its range of `order`.

    experts [entries]: -1 for an entry without expert, which gets no place. Writes order [entries] int32 and
    starts [E + 1] int32: expert e's entries are order[starts[e]:starts[e + 1]].
    """
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    smaller = tl.zeros([BLOCK], tl.int32)
    for first in range(0, entries, BLOCK):
        ids = tl.load(experts + first + lanes, mask=first + lanes < entries, other=-1)
        smaller += ((ids >= 0) & (ids < expert)).to(tl.int32)
    place = tl.sum(smaller, 0)
    tl.store(starts + expert, place)
    for first in range(0, entries, BLOCK):
        ids = tl.load(experts + first + lanes, mask=first + lanes < entries, other=-1)
        own = (ids == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(own, 0) - own, first + lanes, mask=ids == expert)
        place += tl.sum(own, 0)
    if expert == E - 1:
        tl.store(starts + E, place)


@triton.jit
def locate_tile(tile, starts, E: tl.constexpr, E_PAD: tl.constexpr, BM: tl.constexpr):
    """Return the expert (E: none) and the first place of a tile of BM places, of tiles that are counted by expert."""
    ids = tl.arange(0, E_PAD)
    begins = tl.load(starts + ids, mask=ids < E, other=0)
    tiles = (tl.load(starts + ids + 1, mask=ids < E, other=0) - begins + BM - 1) // BM
    expert = tl.sum(((tl.cumsum(tiles, 0) <= tile) & (ids < E)).to(tl.int32), 0)
    tile_in_expert = tile - tl.sum(tl.where(ids < expert, tiles, 0), 0)
    return expert, tl.load(starts + expert) + tile_in_expert * BM


@triton.jit
def locate_rows(order, starts, expert, first_place, TOP_K: tl.constexpr, GATED: tl.constexpr, BM: tl.constexpr):
    """Return, of each of BM places from `first_place`: whether it is the expert's, its row of x, and its row of out.

    GATED reads tokens and writes places; the product after it reads places and writes entries.
    """
    places = first_place + tl.arange(0, BM)
    is_row = places < tl.load(starts + expert + 1)
    entries = tl.load(order + places, mask=is_row, other=0)
    if GATED:
        return is_row, entries // TOP_K, places
    else:
        return is_row, places, entries


@triton.jit
def activate(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Compute GatedActivation with this limit (0: None) and alpha, in float32."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
    return gate * tl.sigmoid(ALPHA * gate) * up


@triton.jit
def expert_gemm_kernel(
    x,
    weight,
    bias,
    out,
    order,
    starts,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply each expert's entries by its matrix, with float32 accumulation.

    - GATED: out[place] = activation(x[token] W_gateᵀ, x[token] W_upᵀ), with W [E, 2N, K] and x [tokens, K]; `place` is
      the entry's place in `order`. The activation is GatedActivation with this limit (0: None) and alpha.
    - else: out[entry] = x[place] Wᵀ, with W [E, N, K].

    With BIAS, an expert's bias [2N] or [N] is added to the product, before the activation.

    Axis 0 counts tiles of BM places, expert by expert; its programs beyond the last tile exit. Axis 1: tiles of BN
    columns.
    """
    expert, first_place = locate_tile(tl.program_id(0), starts, E, E_PAD, BM)
    if expert == E:
        return
    is_row, sources, targets = locate_rows(order, starts, expert, first_place, TOP_K, GATED, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    x_rows = x + sources.to(tl.int64)[:, None] * K
    rows_per_expert = 2 * N if GATED else N
    w_rows = weight + (expert.to(tl.int64) * rows_per_expert + columns)[None, :] * K
    total = tl.zeros([BM, BN], tl.float32)
    total_up = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + depth
        a = tl.load(x_rows + k[None, :], mask=is_row[:, None] & (k < K)[None, :], other=0.0)
        in_weight = (columns < N)[None, :] & (k < K)[:, None]
        b = tl.load(w_rows + k[:, None], mask=in_weight, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        if GATED:
            b_up = tl.load(w_rows + N * K + k[:, None], mask=in_weight, other=0.0)
            total_up = tl.dot(a, b_up, total_up, input_precision=PRECISION)
    if BIAS:
        own_bias = bias + expert * rows_per_expert + columns
        total += tl.load(own_bias, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            total_up += tl.load(own_bias + N, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = activate(total, total_up, LIMIT, ALPHA)
    at = out + targets.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & (columns < N)[None, :])


@triton.jit
def quantized_expert_kernel(
    x, codes, scale, zero, bias, out, order, starts, n_count,
    E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    ELEMENT: tl.constexpr, PER_BYTE: tl.constexpr, MODE: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Compute `expert_gemm_kernel` with codes [E, rows, K / PER_BYTE], of which a step reads BK bytes per row.

    Scales and zeros are [E, rows / SCALE_ROWS, GROUPS], where rows are 2N if GATED, else N. n_count is N.
    """
    expert, first_place = locate_tile(tl.program_id(0), starts, E, E_PAD, BM)
    if expert == E:
        return
    is_row, sources, targets = locate_rows(order, starts, expert, first_place, TOP_K, GATED, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    rows_per_expert = 2 * N if GATED else N
    blocks = expert.to(tl.int64) * (rows_per_expert // SCALE_ROWS * GROUPS)
    total, total_up = accumulate(
        x + sources.to(tl.int64)[None, :] * K, is_row[None, :],
        codes + expert.to(tl.int64) * rows_per_expert * (K // PER_BYTE), scale + blocks, zero + blocks, order, order,
        columns, n_count, 0, K, ELEMENT, PER_BYTE, MODE, SCALE_ROWS, SCALE_COLUMNS, GROUPS, ZERO, False, BM, BN, BK, 1,
        STAGES, GATED, False, ASM, 0,
    )  # fmt: skip
    in_columns = columns < N
    if BIAS:
        own_bias = bias + expert * rows_per_expert + columns
        total += tl.load(own_bias, mask=in_columns, other=0.0).to(tl.float32)[:, None]
        if GATED:
            total_up += tl.load(own_bias + N, mask=in_columns, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = activate(total, total_up, LIMIT, ALPHA)
    at = out + targets.to(tl.int64)[None, :] * N + columns[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row[None, :] & in_columns[:, None])


@triton.jit
def combine_kernel(x, weights, experts, out, TOP_K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    """Sum each token's entries times their weights, in float32 and routing order: x [tokens * TOP_K, H] -> out.

    Entries without expert are not read; they count as 0.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        entry = token * TOP_K + choice
        has_expert = tl.load(experts + entry) >= 0
        row = tl.load(x + entry * H + columns, mask=columns < tl.where(has_expert, H, 0), other=0.0)
        weight = tl.where(has_expert, tl.load(weights + entry), 0.0)
        total += weight * row.to(tl.float32)
    tl.store(out + token * H + columns, total.to(out.dtype.element_ty), mask=columns < H)

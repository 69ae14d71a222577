"""Device code of varlen prefill attention over pages: each chunk attends to its pages and to itself.

paged_prefill.py holds shapes, grids and checks. Kernels read from device memory which tokens belong to which chunk, so
that a captured graph serves any layout. Imports triton at the top: for CUDA (or Triton's interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.paged_decode_kernels import LOG2_E, _norm_rope, to_stored
from engine.kernels.row_kernels import bound

LOWEST = tl.constexpr(-1e30)
"""Stands for the maximum of no scores: finite, and below any score of finite queries and keys."""


@triton.jit
def norm_rope_kernel(
    q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, table_ptr, slots_ptr, positions_ptr, q_norm_ptr, k_norm_ptr, cos_ptr,
    sin_ptr, eps, token_stride, q_group, q_head, kv_head, cache_page, cache_slot, cache_head, table_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, Q_HEADS_PAD: tl.constexpr, KV_HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Norm and rotate one token's queries in place, and append its normed and rotated keys and its values to its page.

    q [T, KV_HEADS, GROUP, DIM], k and v [T, KV_HEADS, DIM], each with token stride `token_stride`. slots [T] are rows
    of the page table; a padding token (slot 0) writes no page.
    """
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    dims = tl.arange(0, DIM_PAD)
    heads = tl.arange(0, Q_HEADS_PAD)[:, None]
    mask = (heads < KV_HEADS * GROUP) & (dims[None, :] < DIM)
    q_ptrs = q_ptr + token * token_stride + (heads // GROUP) * q_group + (heads % GROUP) * q_head
    q = _norm_rope(
        q_ptrs, mask, q_norm_ptr, cos_ptr, sin_ptr, position, eps, DIM, DIM_PAD, NORM, ROPE, INTERLEAVED=INTERLEAVED
    )
    kv_heads = tl.arange(0, KV_HEADS_PAD)[:, None]
    kv_mask = (kv_heads < KV_HEADS) & (dims[None, :] < DIM)
    kv_offsets = token * token_stride + kv_heads * kv_head
    k = _norm_rope(
        k_ptr + kv_offsets, kv_mask, k_norm_ptr, cos_ptr, sin_ptr, position, eps, DIM, DIM_PAD, NORM, ROPE,
        INTERLEAVED=INTERLEAVED,
    )  # fmt: skip
    v = tl.load(v_ptr + kv_offsets + dims[None, :], mask=kv_mask, other=0.0)
    tl.debug_barrier()  # queries were loaded twice, by other threads than those that store them
    tl.store(q_ptrs + dims[None, :], q.to(q_ptr.dtype.element_ty), mask=mask)
    if slot > 0:
        page = tl.load(table_ptr + slot * table_row + position // PAGE).to(tl.int64)
        start = page * cache_page + kv_heads * cache_head + dims[None, :]
        target = start + (position % PAGE) * cache_slot
        tl.store(k_cache_ptr + target, to_stored(k, k_cache_ptr), mask=kv_mask)
        tl.store(v_cache_ptr + target, to_stored(v, v_cache_ptr), mask=kv_mask)
        _zero_rest(v_cache_ptr + start, kv_mask, slots_ptr, token, slot, position, cache_slot, PAGE)


@triton.jit
def _zero_rest(v_ptrs, mask, rows_ptr, token, row, position, cache_slot, PAGE: tl.constexpr):
    """Zero the values that follow a chunk's last token in its page; v_ptrs [heads, dims] point to the first slot.

    A kernel that reads whole pages gives these slots a weight of 0, and 0 * NaN would poison the sum.
    """
    is_last = token + 1 == tl.num_programs(0)
    if not is_last:
        is_last = tl.load(rows_ptr + token + 1) != row
    if is_last:
        for slot in range(position % PAGE + 1, PAGE):
            zero = tl.zeros(v_ptrs.shape, tl.float32).to(v_ptrs.dtype.element_ty)
            tl.store(v_ptrs + slot * cache_slot, zero, mask=mask)


@triton.jit
def append_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, table_ptr, rows_ptr, positions_ptr,
    k_token, k_head, v_token, v_head, cache_page, cache_slot, cache_head, table_row,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Write one token's keys and values [HEADS, DIM] to its page; a padding token (row 0) writes nothing."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + token)
    if row > 0:
        position = tl.load(positions_ptr + token)
        heads, dims = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, DIM_PAD)[None, :]
        mask = (heads < HEADS) & (dims < DIM)
        k = tl.load(k_ptr + token * k_token + heads * k_head + dims, mask=mask)
        v = tl.load(v_ptr + token * v_token + heads * v_head + dims, mask=mask)
        page = tl.load(table_ptr + row * table_row + position // PAGE).to(tl.int64)
        start = page * cache_page + heads * cache_head + dims
        target = start + (position % PAGE) * cache_slot
        tl.store(k_cache_ptr + target, to_stored(k, k_cache_ptr), mask=mask)
        tl.store(v_cache_ptr + target, to_stored(v, v_cache_ptr), mask=mask)
        _zero_rest(v_cache_ptr + start, mask, rows_ptr, token, row, position, cache_slot, PAGE)


@triton.jit
def _attend(
    acc, row_sum, row_max, q, k_base, v_base, table, positions, first, last, begin, end, scale_log2, cache_page,
    cache_slot, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add keys first..last to a running softmax; last - first is a multiple of BLOCK unless MASKED.

    MASKED blocks mask per query the keys after it and, if WINDOW > 0, those that its window has left. `begin` is the
    first key that any query of the tile sees, `end` follows the last one.

    Page numbers of a block are loaded one iteration ahead: otherwise the pipeline could not prefetch the keys, whose
    addresses depend on them.
    """
    dims = tl.arange(0, DIM_PAD)[None, :]
    keys = tl.arange(0, BLOCK)
    page = tl.load(table + (first + keys) // PAGE, mask=first + keys < end, other=0)
    for start in range(first, last, BLOCK):
        key_positions = start + keys
        offsets = (page.to(tl.int64) * cache_page + (key_positions % PAGE) * cache_slot)[:, None] + dims
        next_positions = key_positions + BLOCK
        page = tl.load(table + next_positions // PAGE, mask=next_positions < end, other=0)
        mask = dims < DIM
        if MASKED:  # a stale slot may hold NaN, and 0 * NaN would poison the sum
            mask = (key_positions < end)[:, None] & mask
            if WINDOW > 0:
                mask = (key_positions >= begin)[:, None] & mask
        if MASKED or DIM < DIM_PAD:
            k = tl.load(k_base + offsets, mask=mask, other=0.0)
            v = tl.load(v_base + offsets, mask=mask, other=0.0)
        else:
            k = tl.load(k_base + offsets)
            v = tl.load(v_base + offsets)
        k, v = k.to(q.dtype), v.to(q.dtype)  # of fp8 pages, exact
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        if SOFTCAP > 0:
            scores = bound(scores, SOFTCAP)
        if MASKED:
            seen = key_positions[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen &= key_positions[None, :] > positions[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        if MASKED and WINDOW > 0:  # a query that sees no key yet has -inf here, and -inf - -inf is NaN
            new_max = tl.maximum(new_max, LOWEST)
        weights = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=["chunks"])
def prefill_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, table_ptr, ends_ptr, starts_ptr, slots_ptr, out_ptr, sinks_ptr, chunks, scale_log2,
    q_row, q_group, q_head, cache_page, cache_slot, cache_head, table_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PACKED_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr, CHUNKS_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attention of ROWS / PACKED_HEADS tokens of one chunk, each with PACKED_HEADS heads that share a KV head.

    Tokens of chunk c end before ends[c]; starts[c] tokens of its sequence precede them. With WINDOW > 0 a query sees
    the WINDOW keys up to its own position, and blocks that no query of the tile sees are skipped. SOFTCAP: the bound of
    scores, base 2; 0: unbounded.
    """
    chunk_ids = tl.arange(0, CHUNKS_PAD)
    chunk_ends = tl.load(ends_ptr + chunk_ids, mask=chunk_ids < chunks, other=0).to(tl.int32)
    chunk_begins = tl.load(ends_ptr + chunk_ids - 1, mask=(chunk_ids > 0) & (chunk_ids < chunks), other=0).to(tl.int32)
    chunk_lengths = tl.where(chunk_ids < chunks, chunk_ends - chunk_begins, 0)
    QUERIES: tl.constexpr = ROWS // PACKED_HEADS
    tiles = tl.cdiv(chunk_lengths, QUERIES)
    tile_ends = tl.cumsum(tiles, 0)
    tile = tl.program_id(1)
    chunk = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    if chunk >= chunks:
        return
    is_chunk = chunk_ids == chunk
    first_token = tl.sum(tl.where(is_chunk, chunk_begins, 0), 0)
    chunk_length = tl.sum(tl.where(is_chunk, chunk_lengths, 0), 0)
    first_query = (tile - tl.sum(tl.where(is_chunk, tile_ends - tiles, 0), 0)) * QUERIES
    num_past = tl.load(starts_ptr + chunk).to(tl.int32)
    dims, rows = tl.arange(0, DIM_PAD), tl.arange(0, ROWS)
    kv_head = tl.program_id(0) * PACKED_HEADS // GROUP
    head = tl.program_id(0) * PACKED_HEADS + rows % PACKED_HEADS
    query_index = first_query + rows // PACKED_HEADS  # index of each query in its chunk
    token = (first_token + query_index).to(tl.int64)
    mask = (query_index < chunk_length)[:, None] & (dims < DIM)[None, :]
    q_ptrs = q_ptr + token * q_row + kv_head * q_group + (head % GROUP) * q_head
    q = tl.load(q_ptrs[:, None] + dims[None, :], mask=mask, other=0.0)
    table = table_ptr + tl.load(slots_ptr + chunk) * table_row
    k_base = k_cache_ptr + kv_head * cache_head
    v_base = v_cache_ptr + kv_head * cache_head
    positions = num_past + query_index  # position of each query in its sequence
    unmasked_end = (num_past + first_query + 1) // BLOCK * BLOCK  # all queries of the tile see these keys
    key_end = num_past + tl.minimum(first_query + QUERIES, chunk_length)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    if SINKS:  # the softmax begins with the sink, whose value is 0
        row_max = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        row_sum += 1.0
    if WINDOW > 0:
        positions = tl.minimum(positions, key_end - 1)  # rows past the chunk see a key too: no 0 / 0
        key_begin = tl.maximum(num_past + first_query + 1 - WINDOW, 0)
        first_block = key_begin // BLOCK * BLOCK
        # before this key, some query's window has passed the block
        unmasked_begin = tl.minimum(tl.cdiv(tl.maximum(key_end - WINDOW, 0), BLOCK) * BLOCK, unmasked_end)
        acc, row_sum, row_max = _attend(
            acc, row_sum, row_max, q, k_base, v_base, table, positions, first_block, unmasked_begin, key_begin, key_end,
            scale_log2, cache_page, cache_slot, DIM, DIM_PAD, PAGE, BLOCK, True, WINDOW, PRECISION,
            SOFTCAP,
        )  # fmt: skip
    else:
        key_begin = 0
        unmasked_begin = 0
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, q, k_base, v_base, table, positions, unmasked_begin, unmasked_end, key_begin, key_end,
        scale_log2, cache_page, cache_slot, DIM, DIM_PAD, PAGE, BLOCK, False, WINDOW, PRECISION,
        SOFTCAP,
    )  # fmt: skip
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, q, k_base, v_base, table, positions, unmasked_end, key_end, key_begin, key_end,
        scale_log2, cache_page, cache_slot, DIM, DIM_PAD, PAGE, BLOCK, True, WINDOW, PRECISION,
            SOFTCAP,
    )  # fmt: skip
    out = out_ptr + (token * HEADS + head)[:, None] * DIM + dims[None, :]
    tl.store(out, (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty), mask=mask)

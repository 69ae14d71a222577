"""Device code of prefill attention over pages: packed chunks of prompts, each after what its pages hold already.

Owns what runs on the device; triton_prefill.py owns shapes, grids and checks. Which tokens belong to which chunk is
read from device memory, so that a captured graph serves any packing. Imports triton at the top: for CUDA (or Triton's
interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.paged_decode_kernels import _norm_rope


@triton.jit
def norm_rope_kernel(
    q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, table_ptr, slots_ptr, positions_ptr, q_norm_ptr, k_norm_ptr, cos_ptr,
    sin_ptr, eps, row, q_group, q_head, kv_head, cache_page, cache_slot, cache_head, table_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QP: tl.constexpr, KP: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One token: norm and rotate its queries in place, and its keys into their page, with its values.

    q [T, KV_HEADS, GROUP, DIM], k and v [T, KV_HEADS, DIM] with rows `row` apart; slots [T] are rows of the page table,
    0 for padding, which writes no page.
    """
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)
    dims = tl.arange(0, DIM_PAD)
    heads = tl.arange(0, QP)[:, None]
    mask = (heads < KV_HEADS * GROUP) & (dims[None, :] < DIM)
    q_at = q_ptr + token * row + (heads // GROUP) * q_group + (heads % GROUP) * q_head
    q = _norm_rope(q_at, mask, q_norm_ptr, cos_ptr, sin_ptr, position, eps, DIM, DIM_PAD, NORM, True)
    kv_heads = tl.arange(0, KP)[:, None]
    kv_mask = (kv_heads < KV_HEADS) & (dims[None, :] < DIM)
    kv_at = token * row + kv_heads * kv_head
    k = _norm_rope(k_ptr + kv_at, kv_mask, k_norm_ptr, cos_ptr, sin_ptr, position, eps, DIM, DIM_PAD, NORM, True)
    v = tl.load(v_ptr + kv_at + dims[None, :], mask=kv_mask, other=0.0)
    tl.debug_barrier()  # queries were read twice, by other threads than those that write them
    tl.store(q_at + dims[None, :], q.to(q_ptr.dtype.element_ty), mask=mask)
    if slot > 0:
        page = tl.load(table_ptr + slot * table_row + position // PAGE).to(tl.int64)
        target = page * cache_page + (position % PAGE) * cache_slot + kv_heads * cache_head + dims[None, :]
        tl.store(k_cache_ptr + target, k.to(k_cache_ptr.dtype.element_ty), mask=kv_mask)
        tl.store(v_cache_ptr + target, v.to(v_cache_ptr.dtype.element_ty), mask=kv_mask)


@triton.jit
def _attend(
    acc, total, top, q, k_base, v_base, table, rows, first, last, end, scale_log2, cache_page, cache_slot,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys first..last (a multiple of BLOCK apart, except where MASKED) added to a running softmax.

    The pages of each block are looked up in the turn before it: keys at an address that the same turn looks up could
    not be asked for ahead.
    """
    dims = tl.arange(0, DIM_PAD)[None, :]
    keys = tl.arange(0, BLOCK)
    page = tl.load(table + (first + keys) // PAGE, mask=first + keys < end, other=0)
    for start in range(first, last, BLOCK):
        place = start + keys
        at = (page.to(tl.int64) * cache_page + (place % PAGE) * cache_slot)[:, None] + dims
        following = place + BLOCK
        page = tl.load(table + following // PAGE, mask=following < end, other=0)
        ok = dims < DIM
        if MASKED:  # a stale slot may hold NaN, and 0 * NaN would reach the sum
            ok = (place < end)[:, None] & ok
        if MASKED or DIM < DIM_PAD:
            k = tl.load(k_base + at, mask=ok, other=0.0)
            v = tl.load(v_base + at, mask=ok, other=0.0)
        else:
            k = tl.load(k_base + at)
            v = tl.load(v_base + at)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        if MASKED:
            scores = tl.where(place[None, :] <= rows[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    return acc, total, top


@triton.jit
def prefill_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, table_ptr, ends_ptr, starts_ptr, slots_ptr, out_ptr, chunks, scale_log2,
    q_row, q_group, q_head, cache_page, cache_slot, cache_head, table_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr, CHUNKS_PAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS / PACK queries of one chunk, each with PACK heads that share a KV head.

    Chunk c's tokens end before ends[c]; starts[c] tokens of its sequence come before them.
    """
    which = tl.arange(0, CHUNKS_PAD)
    end = tl.load(ends_ptr + which, mask=which < chunks, other=0).to(tl.int32)
    begin = tl.load(ends_ptr + which - 1, mask=(which > 0) & (which < chunks), other=0).to(tl.int32)
    length = tl.where(which < chunks, end - begin, 0)
    QUERIES: tl.constexpr = ROWS // PACK
    tiles = tl.cdiv(length, QUERIES)
    upto = tl.cumsum(tiles, 0)
    tile = tl.program_id(1)
    chunk = tl.sum((upto <= tile).to(tl.int32), 0)
    if chunk >= chunks:
        return
    mine = which == chunk
    first_token = tl.sum(tl.where(mine, begin, 0), 0)
    count = tl.sum(tl.where(mine, length, 0), 0)
    local = (tile - tl.sum(tl.where(mine, upto - tiles, 0), 0)) * QUERIES
    past = tl.load(starts_ptr + chunk).to(tl.int32)
    dims, rows = tl.arange(0, DIM_PAD), tl.arange(0, ROWS)
    group = tl.program_id(0) * PACK // GROUP
    head = tl.program_id(0) * PACK + rows % PACK
    place = local + rows // PACK  # of each query in its chunk
    token = (first_token + place).to(tl.int64)
    ok = (place < count)[:, None] & (dims < DIM)[None, :]
    q_at = q_ptr + token * q_row + group * q_group + (head % GROUP) * q_head
    q = tl.load(q_at[:, None] + dims[None, :], mask=ok, other=0.0)
    table = table_ptr + tl.load(slots_ptr + chunk) * table_row
    k_base = k_cache_ptr + group * cache_head
    v_base = v_cache_ptr + group * cache_head
    at = past + place  # where each query is in its sequence
    everyone = (past + local + 1) // BLOCK * BLOCK  # keys that every query here sees
    stop = past + tl.minimum(local + QUERIES, count)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    acc, total, top = _attend(acc, total, top, q, k_base, v_base, table, at, 0, everyone, stop, scale_log2,
                              cache_page, cache_slot, DIM, DIM_PAD, PAGE, BLOCK, False)  # fmt: skip
    acc, total, top = _attend(acc, total, top, q, k_base, v_base, table, at, everyone, stop, stop, scale_log2,
                              cache_page, cache_slot, DIM, DIM_PAD, PAGE, BLOCK, True)  # fmt: skip
    out = out_ptr + (token * HEADS + head)[:, None] * DIM + dims[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=ok)

"""Device code of paged decode attention: items of work are splits of a row's keys for one KV head.

Programs find their items from the lengths on the device, so that any mix of lengths fills it. The splits of a row
follow from its own length alone. Partial results are merged by the last split to arrive, or by `merge_kernel`.

With shared prefixes, `prefix_kernel` runs first: one program per KV head, group of rows and split of the keys that they
share, which it reads once for all of them (cascade attention). `decode_kernel` then reads each row's other keys and
merges both results.

paged_decode.py holds shapes, grids and checks. Everything that changes between replays (positions, page numbers,
groups) is read from device memory. Scores and accumulators are float32; the dot products run on the tensor cores with
the group of query heads padded to 16 rows. Imports triton at the top: for CUDA (or Triton's interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.row_kernels import bound

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _merge(
    acc_ptr, lse_ptr, out_ptr, own, of_prefix, max_splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    PREFIX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of GROUP heads and write them to out; pointers start at the first head.

    `own` splits of the row's own keys follow PREFIX_SPLITS places. The first `of_prefix` of these places hold the
    splits of its prefix. Each iteration reads TILE splits of HEADS heads, in order: the sum never depends on timing.
    """
    dims = tl.arange(0, DIM_PAD)
    count = of_prefix + own
    for first_head in range(0, GROUP, HEADS):
        head = tl.minimum(first_head + tl.arange(0, HEADS), GROUP - 1)  # rows past the group repeat its last head
        best = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        merged = tl.zeros([HEADS, DIM_PAD], tl.float32)
        for start in range(0, count, TILE):
            part = start + tl.arange(0, TILE)
            split = tl.where(part < of_prefix, part, part - of_prefix + PREFIX_SPLITS)
            place = head[None, :] * max_splits + split[:, None]
            present = (part < count)[:, None] & (head >= 0)[None, :]
            # .cg: other SMs wrote these, so an L1 line from an earlier launch would be stale
            lse = tl.load(lse_ptr + place, mask=present, other=float("-inf"), cache_modifier=".cg")
            partial = tl.load(
                acc_ptr + place[:, :, None] * DIM + dims[None, None, :],
                mask=present[:, :, None] & (dims < DIM)[None, None, :], other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            new_best = tl.maximum(best, tl.max(lse, 0))
            rescale = tl.exp2(best - new_best)
            weights = tl.exp2(lse - new_best[None, :])
            total = total * rescale + tl.sum(weights, 0)
            merged = merged * rescale[:, None] + tl.sum(partial * weights[:, :, None], 0)
            best = new_best
        merged /= total[:, None]
        mask = (first_head + tl.arange(0, HEADS) < GROUP)[:, None] & (dims < DIM)[None, :]
        tl.store(out_ptr + head[:, None] * DIM + dims[None, :], merged.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_rope(
    x_ptr, mask, norm_ptr, cos_ptr, sin_ptr, position, eps,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, BY_ROW: tl.constexpr = False,
    INTERLEAVED: tl.constexpr = False,
):  # fmt: skip
    """Return heads [rows, DIM_PAD], normed and rotated, float32. x_ptr [rows, 1]: address of each row's first element.

    NORM and ROPE: see NormRope.norm_mode and NormRope.rotated. `position`: of all rows, or with BY_ROW of each,
    [rows, 1]. Loads each head a second time with its pairs swapped, which avoids a shuffle between threads. The sine of
    a pair's first element is negated.
    """
    dims = tl.arange(0, DIM_PAD)
    if INTERLEAVED:
        other_half = dims ^ 1
    else:
        other_half = tl.where(dims < ROPE // 2, dims + ROPE // 2, dims - ROPE // 2)
    x = tl.load(x_ptr + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROPE:
        x_other = tl.load(x_ptr + other_half[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        rstd = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
        weight = tl.load(norm_ptr + dims, mask=dims < DIM, other=0.0).to(tl.float32)
        if NORM == 2:
            weight += 1.0
        x *= rstd * weight[None, :]
        if ROPE:
            weight = tl.load(norm_ptr + other_half, mask=dims < DIM, other=0.0).to(tl.float32)
            if NORM == 2:
                weight += 1.0
            x_other *= rstd * weight[None, :]
    if ROPE:
        if BY_ROW:
            rotated = mask & (dims < ROPE)[None, :]
            cos = tl.load(cos_ptr + position * ROPE + dims[None, :], mask=rotated, other=1.0).to(tl.float32)
            sin = tl.load(sin_ptr + position * ROPE + dims[None, :], mask=rotated, other=0.0).to(tl.float32)
            x = x * cos + x_other * sin
        else:
            cos = tl.load(cos_ptr + position * ROPE + dims, mask=dims < ROPE, other=1.0).to(tl.float32)
            sin = tl.load(sin_ptr + position * ROPE + dims, mask=dims < ROPE, other=0.0).to(tl.float32)
            x = x * cos[None, :] + x_other * sin[None, :]
    return x


@triton.jit
def to_stored(x, pages):
    """Return x in the dtype that `pages` point to. fp8 saturates at its largest number; infinity becomes NaN."""
    if pages.dtype.element_ty.primitive_bitwidth == 8:
        limit = 448.0 if pages.dtype.element_ty == tl.float8e4nv else 57344.0
        x = x.to(tl.float32)
        x = tl.minimum(tl.maximum(x, -limit), limit) + (x - x)
    return x.to(pages.dtype.element_ty)


@triton.jit
def _append_kv(
    k_ptr, v_ptr, k_base, v_base, table, position, cache_page, cache_slot, norm_ptr, cos_ptr, sin_ptr, eps,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Write one head's new key and value at `position`; k_base and v_base point to this head of the caches."""
    dims = tl.arange(0, DIM_PAD)
    page = tl.load(table + position // PAGE).to(tl.int64)
    target = page * cache_page + (position % PAGE) * cache_slot + dims
    zero = tl.arange(0, 1)[:, None]
    k = _norm_rope(
        k_ptr + zero, dims[None, :] < DIM, norm_ptr, cos_ptr, sin_ptr, position, eps, DIM, DIM_PAD, NORM, ROPE,
        INTERLEAVED=INTERLEAVED,
    )  # fmt: skip
    k = tl.sum(k, 0)
    v = tl.load(v_ptr + dims, mask=dims < DIM)
    tl.store(k_base + target, to_stored(k, k_base), mask=dims < DIM)
    tl.store(v_base + target, to_stored(v, v_base), mask=dims < DIM)


@triton.jit
def _store_result(
    acc, lse, out_ptr, acc_ptr, lse_ptr, arrivals_ptr, row_head, split, splits, of_prefix, max_splits,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, PREFIX_SPLITS: tl.constexpr, MERGES: tl.constexpr,
):  # fmt: skip
    """Store a split's result: to `out` if it is the only one, else to scratch.

    With MERGES, the last of the row's splits to arrive merges all of them; else `merge_kernel` does.
    """
    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    mask = (group < GROUP)[:, None] & (dims < DIM)[None, :]
    out = out_ptr + row_head * GROUP * DIM
    if splits + of_prefix == 1:
        tl.store(out + group[:, None] * DIM + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        first_split = row_head * GROUP * max_splits
        own_rows = first_split + group * max_splits + PREFIX_SPLITS + split
        tl.store(acc_ptr + own_rows[:, None] * DIM + dims[None, :], acc, mask=mask)
        tl.store(lse_ptr + own_rows, lse, mask=group < GROUP)
        if MERGES:
            # all warps store before the arrival, which releases these stores and acquires the other splits' stores
            tl.debug_barrier()
            arrival = arrivals_ptr + row_head
            if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == splits - 1:
                _merge(acc_ptr + first_split * DIM, lse_ptr + first_split, out, splits, of_prefix, max_splits,
                       GROUP, DIM, DIM_PAD, HEADS, TILE, PREFIX_SPLITS)  # fmt: skip
                tl.store(arrival, 0)


@triton.jit
def _attend(
    q, table, page, k_base, v_base, start, end, first_key, scale_log2, cache_page, cache_slot,
    ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, SKIPS: tl.constexpr, row_max, row_sum, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Return the attention of q [ROWS, DIM_PAD] over keys start..end and its log-sum-exp, base 2.

    With SKIPS, keys before `first_key` are left out. `page` holds the page numbers of the first BLOCK keys. The softmax
    begins with scores of maximum row_max [ROWS], whose weights sum to row_sum [ROWS] and whose values are 0. SOFTCAP:
    the bound of scores, base 2; 0: unbounded.
    """
    dims = tl.arange(0, DIM_PAD)
    keys = tl.arange(0, BLOCK)
    dim_ok = dims < DIM
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for block_start in range(start, end, BLOCK):
        key_index = block_start + keys
        in_range = key_index < end
        if SKIPS:
            in_range &= key_index >= first_key
        kv_offsets = (page.to(tl.int64) * cache_page + (key_index % PAGE) * cache_slot)[:, None] + dims[None, :]
        page = tl.load(table + (key_index + BLOCK) // PAGE, mask=key_index + BLOCK < end, other=0)
        if DIM == DIM_PAD:
            k = tl.load(k_base + kv_offsets)
        else:
            k = tl.load(k_base + kv_offsets, mask=dim_ok[None, :], other=0.0)
        # a stale slot may hold NaN and 0 * NaN would poison the sum, so values out of range are read as zero
        v = tl.load(v_base + kv_offsets, mask=in_range[:, None] & dim_ok[None, :], other=0.0)
        k, v = k.to(q.dtype), v.to(q.dtype)  # of fp8 pages, exact
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        if SOFTCAP > 0:
            scores = bound(scores, SOFTCAP)
        scores = tl.where(in_range[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        rescale = tl.exp2(row_max - new_max)
        weights = tl.exp2(scores - new_max[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
    return acc / row_sum[:, None], row_max + tl.log2(row_sum)


@triton.jit
def _prefix_blocks_each(keys, groups, programs, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr):
    """Return how many blocks of a prefix each split reads, so that all groups have about `programs` programs."""
    splits = tl.minimum(tl.maximum(programs // (KV_HEADS * tl.maximum(groups, 1)), 1), SPLITS)
    return tl.cdiv(tl.cdiv(keys, BLOCK), splits)


@triton.jit(do_not_specialize=["max_splits", "programs"])
def prefix_kernel(
    q_ptr, k_cache_ptr, v_cache_ptr, table_ptr, slots_ptr, positions_ptr, shared_ptr, members_ptr, num_groups_ptr,
    acc_ptr, lse_ptr, q_norm_ptr, cos_ptr, sin_ptr, scale_log2, eps, max_splits, programs,
    q_row, q_group, q_head, cache_page, cache_slot, cache_head, table_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, MEMBERS: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, BY_SLOT: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, PDL: tl.constexpr, PREFIX_SPLITS: tl.constexpr,
    INTERLEAVED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of a group's rows to the keys that all of them share, for one KV head and split.

    Rows of the tile: GROUP_PAD heads of the first member, then GROUP_PAD heads of the second, and so on.
    """
    if PDL:
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    members = members_ptr + tl.program_id(1) * MEMBERS
    split = tl.program_id(2)
    first = tl.load(members) - 1
    keys = tl.load(shared_ptr + first, mask=first >= 0, other=0).to(tl.int32)
    each = BLOCK * _prefix_blocks_each(
        keys, tl.load(num_groups_ptr).to(tl.int32), programs, KV_HEADS, BLOCK, PREFIX_SPLITS
    )
    start = split * each
    end = tl.minimum(start + each, keys)
    first = tl.maximum(first, 0)
    table = table_ptr + (tl.load(slots_ptr + first) if BY_SLOT else first) * table_row
    key_index = start + tl.arange(0, BLOCK)
    page = tl.load(table + key_index // PAGE, mask=key_index < end, other=0)
    tile = tl.arange(0, MEMBERS * GROUP_PAD)
    head = tile % GROUP_PAD
    row = tl.load(members + tile // GROUP_PAD) - 1
    is_row = (row >= 0) & (head < GROUP)
    row = tl.maximum(row, 0)
    dims = tl.arange(0, DIM_PAD)
    if PDL:
        gdc_wait()  # programs without work too: `decode_kernel` waits only for this kernel, and needs the one before
    if start >= keys:
        return
    mask = is_row[:, None] & (dims < DIM)[None, :]
    heads = (q_ptr + row * q_row + kv_head * q_group + head * q_head)[:, None]
    position = tl.load(positions_ptr + row)[:, None]
    q = _norm_rope(
        heads, mask, q_norm_ptr, cos_ptr, sin_ptr, position, eps, DIM, DIM_PAD, NORM, ROPE, BY_ROW=True,
        INTERLEAVED=INTERLEAVED,
    )  # fmt: skip
    acc, lse = _attend(
        q.to(q_ptr.dtype.element_ty), table, page, k_cache_ptr + kv_head * cache_head,
        v_cache_ptr + kv_head * cache_head, start, end, 0, scale_log2, cache_page, cache_slot,
        MEMBERS * GROUP_PAD, DIM, DIM_PAD, PAGE, BLOCK, PRECISION, False,
        tl.full([MEMBERS * GROUP_PAD], float("-inf"), tl.float32), tl.zeros([MEMBERS * GROUP_PAD], tl.float32),
        SOFTCAP,
    )  # fmt: skip
    place = ((row * KV_HEADS + kv_head) * GROUP + head) * max_splits + split
    tl.store(acc_ptr + place[:, None] * DIM + dims[None, :], acc, mask=mask)
    tl.store(lse_ptr + place, lse, mask=is_row)


@triton.jit
def _blocks_of(length, first_key, BLOCK: tl.constexpr):
    """Return how many blocks hold a key of first_key..length."""
    return tl.cdiv(length, BLOCK) - first_key // BLOCK


@triton.jit
def _blocks_each(blocks, target_splits, max_blocks, limit):
    """Return how many blocks each split of a row has, from its own number of blocks alone.

    So a row's result does not depend on the lengths of other rows.
    """
    splits = tl.cdiv(blocks, max_blocks)
    splits = tl.where(2 * splits >= 3 * target_splits, splits, tl.minimum(target_splits, blocks))
    return tl.cdiv(blocks, tl.maximum(tl.minimum(splits, limit), 1))


# splits differ between buckets; without specialisation all buckets of a model share one compiled kernel
@triton.jit(do_not_specialize=["batch", "max_splits", "target_splits", "max_blocks", "programs"])
def decode_kernel(
    q_ptr, k_new_ptr, v_new_ptr, k_cache_ptr, v_cache_ptr, table_ptr, slots_ptr, positions_ptr, shared_ptr,
    num_groups_ptr, out_ptr, acc_ptr, lse_ptr, arrivals_ptr, q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, sinks_ptr,
    scale_log2, eps, max_splits, batch, target_splits, max_blocks, programs,
    q_row, q_group, q_head, k_row, k_head, v_row, v_head, cache_page, cache_slot, cache_head, table_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, APPEND: tl.constexpr,
    PRECISION: tl.constexpr, BY_SLOT: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, PDL: tl.constexpr,
    WINDOW: tl.constexpr, PREFIX_SPLITS: tl.constexpr, PREFIX_BLOCK: tl.constexpr, SINKS: tl.constexpr,
    ROWS_PAD: tl.constexpr, MERGES: tl.constexpr, INTERLEAVED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Attend to a row's keys, with PREFIX_SPLITS above 0 to those after its shared prefix, for one KV head and split.

    Items of work are (row, split, KV head), in this order. Where there are more items than programs, these take turns.
    PREFIX_SPLITS and PREFIX_BLOCK: as in the launch of `prefix_kernel`, which ran before.
    """
    if PDL:
        gdc_launch_dependents()
    SKIPS: tl.constexpr = WINDOW > 0 or PREFIX_SPLITS > 0
    limit = max_splits - PREFIX_SPLITS
    all_rows = tl.arange(0, ROWS_PAD)
    lengths = tl.load(positions_ptr + all_rows, mask=all_rows < batch, other=-1).to(tl.int32) + 1
    first_keys = tl.zeros([ROWS_PAD], tl.int32)
    if WINDOW > 0:
        first_keys = tl.maximum(lengths - WINDOW, 0)
    if PREFIX_SPLITS > 0:
        first_keys = tl.load(shared_ptr + all_rows, mask=all_rows < batch, other=0).to(tl.int32)
    all_blocks = _blocks_of(lengths, first_keys, BLOCK)
    counts = tl.cdiv(all_blocks, tl.maximum(_blocks_each(all_blocks, target_splits, max_blocks, limit), 1))
    ends = tl.cumsum(counts, 0)
    num_items = tl.sum(counts, 0) * KV_HEADS
    if tl.program_id(0) >= num_items:
        return

    group = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, DIM_PAD)
    keys = tl.arange(0, BLOCK)
    dim_ok = dims < DIM
    group_mask = (group < GROUP)[:, None] & dim_ok[None, :]

    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        # KV head fastest: adjacent programs read adjacent 256-byte rows
        kv_head = item % KV_HEADS
        unit = item // KV_HEADS
        index = tl.sum((ends <= unit).to(tl.int32), 0)
        split = unit - tl.sum(tl.where(all_rows < index, counts, 0), 0)
        row = index.to(tl.int64)
        length = tl.load(positions_ptr + row).to(tl.int32) + 1
        first_key = 0
        of_prefix = 0
        if WINDOW > 0:
            first_key = tl.maximum(length - WINDOW, 0)
        if PREFIX_SPLITS > 0:
            first_key = tl.load(shared_ptr + row).to(tl.int32)
            groups = tl.load(num_groups_ptr).to(tl.int32)
            prefix_each = _prefix_blocks_each(first_key, groups, programs, KV_HEADS, PREFIX_BLOCK, PREFIX_SPLITS)
            of_prefix = tl.cdiv(first_key, PREFIX_BLOCK * tl.maximum(prefix_each, 1))
        blocks = _blocks_of(length, first_key, BLOCK)
        each = _blocks_each(blocks, target_splits, max_blocks, limit)
        start = (first_key // BLOCK + split * each) * BLOCK
        end = tl.minimum(start + each * BLOCK, length)

        table_index = tl.load(slots_ptr + row) if BY_SLOT else row
        table = table_ptr + table_index * table_row
        k_base = k_cache_ptr + kv_head * cache_head
        v_base = v_cache_ptr + kv_head * cache_head

        # Keys past the end read the scratch page: a valid address, and their scores are masked below. Page numbers are
        # loaded one iteration ahead, so that loads of keys and values never wait for them.
        page = tl.load(table + (start + keys) // PAGE, mask=start + keys < end, other=0)

        if PDL:
            # Positions, page tables and older keys come from earlier steps, which have completed: a graph end or the
            # copy of their tokens to the host lies in between. Only q and the newest key are written by this step.
            gdc_wait()
        position = length.to(tl.int64) - 1
        heads = q_ptr + row * q_row + kv_head * q_group + group[:, None] * q_head
        q = _norm_rope(
            heads, group_mask, q_norm_ptr, cos_ptr, sin_ptr, position, eps, DIM, DIM_PAD, NORM, ROPE,
            INTERLEAVED=INTERLEAVED,
        )  # fmt: skip
        q = q.to(q_ptr.dtype.element_ty)
        if APPEND:
            if end == length:  # exactly one program of this row and head holds the newest key
                _append_kv(
                    k_new_ptr + row * k_row + kv_head * k_head, v_new_ptr + row * v_row + kv_head * v_head,
                    k_base, v_base, table, position, cache_page, cache_slot, k_norm_ptr, cos_ptr, sin_ptr, eps,
                    DIM, DIM_PAD, PAGE, NORM, ROPE, INTERLEAVED,
                )  # fmt: skip
            tl.debug_barrier()  # other threads of this program read that row in the loop below

        row_max = tl.full([GROUP_PAD], float("-inf"), tl.float32)
        row_sum = tl.zeros([GROUP_PAD], tl.float32)
        if SINKS:
            if split == 0:  # always active: one split counts the sink
                sinks = tl.load(sinks_ptr + kv_head * GROUP + group, mask=group < GROUP, other=0.0)
                row_max = sinks.to(tl.float32) * LOG2_E
                row_sum += 1.0
        acc, lse = _attend(
            q, table, page, k_base, v_base, start, end, first_key, scale_log2, cache_page, cache_slot,
            GROUP_PAD, DIM, DIM_PAD, PAGE, BLOCK, PRECISION, SKIPS, row_max, row_sum, SOFTCAP,
        )  # fmt: skip
        _store_result(
            acc, lse, out_ptr, acc_ptr, lse_ptr, arrivals_ptr, row * KV_HEADS + kv_head, split,
            tl.cdiv(blocks, each), of_prefix, max_splits,
            GROUP, GROUP_PAD, DIM, DIM_PAD, HEADS, TILE, PREFIX_SPLITS, MERGES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["max_splits", "target_splits", "max_blocks", "programs"])
def merge_kernel(
    positions_ptr, shared_ptr, num_groups_ptr, out_ptr, acc_ptr, lse_ptr,
    max_splits, target_splits, max_blocks, programs,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr, WINDOW: tl.constexpr, PREFIX_SPLITS: tl.constexpr,
    PREFIX_BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the partial results of one query head of one row, after `decode_kernel` without MERGES."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(positions_ptr + row).to(tl.int32) + 1
    first_key = 0
    of_prefix = 0
    if WINDOW > 0:
        first_key = tl.maximum(length - WINDOW, 0)
    if PREFIX_SPLITS > 0:
        first_key = tl.load(shared_ptr + row).to(tl.int32)
        groups = tl.load(num_groups_ptr).to(tl.int32)
        prefix_each = _prefix_blocks_each(first_key, groups, programs, KV_HEADS, PREFIX_BLOCK, PREFIX_SPLITS)
        of_prefix = tl.cdiv(first_key, PREFIX_BLOCK * tl.maximum(prefix_each, 1))
    blocks = _blocks_of(length, first_key, BLOCK)
    splits = tl.cdiv(blocks, _blocks_each(blocks, target_splits, max_blocks, max_splits - PREFIX_SPLITS))
    if PDL:
        gdc_wait()
    if splits + of_prefix == 1:  # `decode_kernel` wrote `out`
        return
    first = row * KV_HEADS * GROUP + head
    _merge(acc_ptr + first * max_splits * DIM, lse_ptr + first * max_splits, out_ptr + first * DIM, splits, of_prefix,
           max_splits, 1, DIM, DIM_PAD, 1, TILE, PREFIX_SPLITS)  # fmt: skip

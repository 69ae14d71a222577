"""Device code of prefill attention for Hopper GPUs, in Gluon: TMA loads, asynchronous WGMMA, specialised warps.

hopper_prefill.py holds shapes, the launch and its checks. Warps of a program have these roles:

    2 x 4 warps   attention of 64 rows of queries each, with the same keys
    1 warp        loads queries, and blocks of keys, a page at a time, by TMA
    1 warp        loads blocks of values

Programs are persistent: each takes every n-th tile of a list that `tile_list_kernel` makes once per step. Imports
triton at the top: for CUDA only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

ROWS = 64
"""Rows of queries of one consumer: what one WGMMA instruction computes."""

BLOCK = 128
"""Keys of one iteration."""

LOG2_E = gl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["chunks", "max_tiles"])  # else it compiles again for multiples of 16
def tile_list_kernel(
    ends_ptr, starts_ptr, rows_ptr, tiles_ptr, chunks, max_tiles,
    TOKENS: tl.constexpr, CHUNKS_PAD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the tiles of all chunks, those with the most keys first, to tiles [max_tiles, 4]; STEP tiles a program.

    A tile is (page-table row, first token, position of the first token, number of tokens). Unused ones come last and
    have no tokens. tiles_ptr[4 * max_tiles] is the number of tiles.
    """
    chunk = tl.arange(0, CHUNKS_PAD)
    used = chunk < chunks
    stop = tl.load(ends_ptr + chunk, mask=used, other=0).to(tl.int32)
    begin = tl.load(ends_ptr + chunk - 1, mask=used & (chunk > 0), other=0).to(tl.int32)
    past = tl.load(starts_ptr + chunk, mask=used, other=0).to(tl.int32)
    count = tl.where(used, (stop - begin + TOKENS - 1) // TOKENS, 0)
    last = tl.cumsum(count, 0)
    total = tl.sum(count, 0)
    tile = tl.program_id(0) * STEP + tl.arange(0, STEP)
    inside = tile < total
    index = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), 1)
    end = tl.load(ends_ptr + index, mask=inside, other=0).to(tl.int32)
    start = tl.load(ends_ptr + index - 1, mask=inside & (index > 0), other=0).to(tl.int32)
    before = tl.sum(tl.where(chunk[None, :] < index[:, None], count[None, :], 0), 1)
    token = start + (tile - before) * TOKENS
    length = tl.where(inside, tl.minimum(end - token, TOKENS), 0)
    position = tl.load(starts_ptr + index, mask=inside, other=0).to(tl.int32) + token - start
    row = tl.load(rows_ptr + index, mask=inside, other=0).to(tl.int32)

    # tiles ahead of this one: tiles with more keys, and tiles of earlier chunks with as many. Tile i of a chunk ends
    # at key `past + (i + 1) * TOKENS`, but the last one at the chunk's end
    keys = (position + length)[:, None] - (chunk[None, :] < index[:, None]).to(tl.int32)
    full = count - 1
    not_ahead = tl.maximum(keys - past[None, :], 0) // TOKENS
    ahead = tl.maximum(full[None, :] - not_ahead, 0) + ((past + stop - begin)[None, :] > keys).to(tl.int32)
    place = tl.sum(tl.where(count[None, :] > 0, ahead, 0), 1)
    place = tl.where(inside, place, tile)
    target, mask = tiles_ptr + 4 * place, tile < max_tiles
    tl.store(target, row, mask=mask)
    tl.store(target + 1, token, mask=mask)
    tl.store(target + 2, position, mask=mask)
    tl.store(target + 3, length, mask=mask)
    if tl.program_id(0) == 0:
        tl.store(tiles_ptr + 4 * max_tiles, total)


@gluon.jit
def _first_key(position, window, WINDOWED: gl.constexpr):
    """Return the first key that a query at `position` sees, or any query after it."""
    if WINDOWED:
        return gl.maximum(position + 1 - window, 0)
    else:
        return 0


@gluon.jit
def _load_blocks(
    desc, smem, ready, free, table, first_key, keys, column, index,
    DIM: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Load all blocks with keys or values first_key..keys, the last block first.

    `table` is their sequence's row of the page table. In place of pages before `first_key`, which may be freed, and
    after the last key, the first and the last page are loaded again. `index` counts the blocks of all items; returns
    it.
    """
    BLOCK: gl.constexpr = smem.type.shape[1]
    HALVES: gl.constexpr = DIM // 64
    PAGES: gl.constexpr = BLOCK // PAGE
    first_page = first_key // PAGE
    last_page = (keys - 1) // PAGE
    for block in range((keys - 1) // BLOCK, first_key // BLOCK - 1, -1):
        slots = ()  # read before the wait, which hides their latency
        for page in gl.static_range(PAGES):
            place = gl.minimum(block * PAGES + page, last_page)
            if WINDOWED:
                place = gl.maximum(place, first_page)
            slots = slots + (gl.load(table + place).to(gl.int32) * PAGE,)  # type: ignore[assignment]
        stage = index % STAGES
        buffer = smem.index(stage)._reinterpret(smem.dtype, [HALVES * PAGES, PAGE, 64], desc.layout)  # noqa: SLF001
        mbarrier.wait(free.index(stage), (index // STAGES) & 1 ^ 1)
        mbarrier.expect(ready.index(stage), BLOCK * DIM * 2)
        for page in gl.static_range(PAGES):
            for half in gl.static_range(HALVES):
                tma.async_copy_global_to_shared(
                    desc, [slots[page], column + half * 64], ready.index(stage), buffer.index(half * PAGES + page)
                )
        index += 1
    return index


@gluon.jit
def _load_keys(
    q_desc, k_desc, q_smem, k_smem, q_ready, q_free, k_ready, k_free, tiles_ptr, table_ptr, table_row, q_head,
    num_items, window, GROUPS: gl.constexpr, PER_HEAD: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, PACK: gl.constexpr, WINDOWED: gl.constexpr,
):  # fmt: skip
    """Load the queries and keys of all items."""
    HALVES: gl.constexpr = DIM // 64
    ROWS: gl.constexpr = q_smem.type.shape[1]
    buffers = q_smem._reinterpret(q_smem.dtype, [4 * HALVES, ROWS // PACK, PACK, 64], q_desc.layout)  # noqa: SLF001
    index = 0
    turn = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = tiles_ptr + item // GROUPS * 4
        group = item % GROUPS
        row, token, position = gl.load(tile), gl.load(tile + 1), gl.load(tile + 2)
        keys = position + gl.load(tile + 3)
        head = group // PER_HEAD * q_head + group % PER_HEAD * PACK
        buffer = turn % 2
        mbarrier.wait(q_free.index(buffer), (turn // 2) & 1 ^ 1)
        mbarrier.expect(q_ready.index(buffer), 2 * ROWS * DIM * 2)
        for part in gl.static_range(2):
            for half in gl.static_range(HALVES):
                tma.async_copy_global_to_shared(
                    q_desc, [token + part * (ROWS // PACK), head, half * 64], q_ready.index(buffer),
                    buffers.index((2 * buffer + part) * HALVES + half)
                )  # fmt: skip
        turn += 1
        index = _load_blocks(
            k_desc, k_smem, k_ready, k_free, table_ptr + row.to(gl.int64) * table_row,
            _first_key(position, window, WINDOWED), keys, group // PER_HEAD * DIM, index, DIM, PAGE, STAGES,
            WINDOWED,
        )  # fmt: skip


@gluon.jit
def _load_values(
    v_desc, v_smem, v_ready, v_free, tiles_ptr, table_ptr, table_row, num_items, window,
    GROUPS: gl.constexpr, PER_HEAD: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """Load the values of all items."""
    index = 0
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile = tiles_ptr + item // GROUPS * 4
        row, position = gl.load(tile), gl.load(tile + 2)
        keys = position + gl.load(tile + 3)
        index = _load_blocks(
            v_desc, v_smem, v_ready, v_free, table_ptr + row.to(gl.int64) * table_row,
            _first_key(position, window, WINDOWED), keys, item % GROUPS // PER_HEAD * DIM, index, DIM, PAGE, STAGES,
            WINDOWED,
        )  # fmt: skip


@gluon.jit
def _blocks(
    acc, row_sum, row_max, exponentials, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free, positions, index,
    first, last, scale, window, P_LAYOUT: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    WINDOWED: gl.constexpr,
):  # fmt: skip
    """Continue a softmax with blocks first, first - 1, .. last + 1.

    `exponentials` belong to the block before, whose product with the values runs while the softmax of this one is
    computed. `index` counts blocks over all items.
    """
    ROWS: gl.constexpr = acc.shape[0]
    BLOCK: gl.constexpr = k_smem.type.shape[1]
    S_LAYOUT: gl.constexpr = exponentials.type.layout
    for block in range(first, last, -1):
        stage, next_stage = index % STAGES, (index + 1) % STAGES
        mbarrier.wait(k_ready.index(next_stage), ((index + 1) // STAGES) & 1)
        weights = gl.convert_layout(exponentials.to(k_smem.dtype), P_LAYOUT)
        zero = gl.zeros([ROWS, BLOCK], gl.float32, S_LAYOUT)
        keys = k_smem.index(next_stage).permute((1, 0))
        scores_token = warpgroup_mma(q_smem, keys, zero, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(stage), (index // STAGES) & 1)
        acc_token = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
        if MASKED:  # positions pass through the wait, so that comparisons are not scheduled before it
            scores, positions = warpgroup_mma_wait(1, deps=(scores_token, positions))
            scores = _mask(scores, positions - block * BLOCK, window, WINDOWED)
        else:
            scores = warpgroup_mma_wait(1, deps=(scores_token,))
        mbarrier.arrive(k_free.index(next_stage))
        new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
        rescale = gl.exp2(row_max - new_max)
        exponentials = gl.exp2(scores * scale - new_max[:, None])
        row_sum = row_sum * rescale + gl.sum(exponentials, 1)
        row_max = new_max
        # ptxas would move the wait for the product before the exponentials; it moves nothing across this one, which the
        # barrier has passed already
        mbarrier.wait(v_ready.index(stage), (index // STAGES) & 1)
        acc, weights, exponentials = warpgroup_mma_wait(0, deps=(acc_token, weights, exponentials))
        mbarrier.arrive(v_free.index(stage))
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
        index += 1
    return acc, row_sum, row_max, exponentials, index


@gluon.jit
def _mask(scores, last_key, window, WINDOWED: gl.constexpr):
    """Set scores [ROWS, BLOCK] to -inf but for keys up to `last_key` [ROWS] of the block: all, or the last `window`."""
    keys = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
    seen = keys[None, :] <= last_key[:, None]
    if WINDOWED:
        seen = seen & (keys[None, :] > last_key[:, None] - window)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _begin(scores, sinks_ptr, first_head, scale, PACK: gl.constexpr, SINKS: gl.constexpr):
    """Return (exponentials, row_sum, row_max) of a softmax that begins with masked scores, and perhaps with a sink.

    Row i is of head first_head + i % PACK. A row may see no key of the block: a finite maximum keeps exponentials 0.
    """
    row_max = gl.maximum(gl.max(scores, 1) * scale, -1e30)
    if SINKS:  # one more score, whose value is 0
        rows = gl.arange(0, scores.shape[0], gl.SliceLayout(1, scores.type.layout))
        sinks = gl.load(sinks_ptr + first_head + rows % PACK).to(gl.float32) * LOG2_E
        row_max = gl.maximum(row_max, sinks)
        exponentials = gl.exp2(scores * scale - row_max[:, None])
        return exponentials, gl.sum(exponentials, 1) + gl.exp2(sinks - row_max), row_max
    else:
        exponentials = gl.exp2(scores * scale - row_max[:, None])
        return exponentials, gl.sum(exponentials, 1), row_max


@gluon.jit
def _attend(
    out_ptr, q_buffers, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, tiles_ptr, num_items, scale,
    sinks_ptr, window,
    GROUPS: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, PACK: gl.constexpr,
    WINDOWED: gl.constexpr, SINKS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Compute attention of rows WHICH * ROWS .. of all items.

    The first block of an item is begun before the last product of the item before it, so that tensor cores do not wait
    between items.
    """
    ROWS: gl.constexpr = q_buffers.type.shape[1]
    BLOCK: gl.constexpr = k_smem.type.shape[1]
    dtype: gl.constexpr = k_smem.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    step = gl.num_programs(0)
    token_of_row = (WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))) // PACK
    ROW_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    rows = WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, ROW_LAYOUT))
    dims = gl.arange(0, DIM, gl.SliceLayout(0, ROW_LAYOUT))

    tile = tiles_ptr + gl.maximum(gl.minimum(gl.program_id(0), num_items - 1), 0) // GROUPS * 4
    token, position, length = gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3)
    positions = position + gl.minimum(token_of_row, length - 1)
    has_item = gl.program_id(0) < num_items
    mbarrier.wait(q_ready.index(0), 0, pred=has_item)
    mbarrier.wait(k_ready.index(0), 0, pred=has_item)
    zero = gl.zeros([ROWS, BLOCK], gl.float32, S_LAYOUT)
    scores_token = warpgroup_mma(
        q_buffers.index(WHICH), k_smem.index(0).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=(scores_token,))
    mbarrier.arrive(k_free.index(0), pred=has_item)
    scores = _mask(scores, positions - (position + length - 1) // BLOCK * BLOCK, window, WINDOWED)
    exponentials, row_sum, row_max = _begin(
        scores, sinks_ptr, gl.program_id(0) % GROUPS * PACK, scale, PACK, SINKS
    )  # fmt: skip

    index = 0
    turn = 0
    for item in range(gl.program_id(0), num_items, step):
        has_next = item + step < num_items
        tile = tiles_ptr + gl.minimum(item + step, num_items - 1) // GROUPS * 4
        next_token, next_position, next_length = gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3)
        q_smem = q_buffers.index(turn % 2 * 2 + WHICH)
        last_block = (position + length - 1) // BLOCK
        # All rows see the blocks before `unmasked`. The masked loop runs at least once before the other one: ptxas sets
        # registers of matrix descriptors in the first loop only, and the second one reads them.
        first_block = _first_key(position, window, WINDOWED) // BLOCK
        unmasked = gl.minimum((position + 1) // BLOCK, gl.maximum(last_block - 1, first_block))
        low = first_block
        if WINDOWED:  # the window of some row begins after the first key of blocks before `low`
            low = gl.maximum((position + length - window + BLOCK - 1) // BLOCK, first_block)
            low = gl.minimum(low, unmasked)
        acc = gl.zeros([ROWS, DIM], gl.float32, O_LAYOUT)
        acc, row_sum, row_max, exponentials, index = _blocks(
            acc, row_sum, row_max, exponentials, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free, positions,
            index, last_block - 1, unmasked - 1, scale, window, P_LAYOUT, STAGES, True, WINDOWED,
        )  # fmt: skip
        acc, row_sum, row_max, exponentials, index = _blocks(
            acc, row_sum, row_max, exponentials, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free, positions,
            index, unmasked - 1, low - 1, scale, window, P_LAYOUT, STAGES, False, WINDOWED,
        )  # fmt: skip
        if WINDOWED:
            acc, row_sum, row_max, exponentials, index = _blocks(
                acc, row_sum, row_max, exponentials, q_smem, k_smem, v_smem, k_ready, k_free, v_ready, v_free,
                positions, index, low - 1, first_block - 1, scale, window, P_LAYOUT, STAGES, True, WINDOWED,
            )  # fmt: skip
        turn += 1

        stage, next_stage = index % STAGES, (index + 1) % STAGES
        positions = next_position + gl.minimum(token_of_row, next_length - 1)
        mbarrier.wait(q_ready.index(turn % 2), (turn // 2) & 1, pred=has_next)
        mbarrier.wait(k_ready.index(next_stage), ((index + 1) // STAGES) & 1, pred=has_next)
        weights = gl.convert_layout(exponentials.to(dtype), P_LAYOUT)
        zero = gl.zeros([ROWS, BLOCK], gl.float32, S_LAYOUT)
        keys = k_smem.index(next_stage).permute((1, 0))
        scores_token = warpgroup_mma(q_buffers.index(turn % 2 * 2 + WHICH), keys, zero, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(stage), (index // STAGES) & 1)
        acc_token = warpgroup_mma(weights, v_smem.index(stage), acc, is_async=True)
        scores, positions = warpgroup_mma_wait(1, deps=(scores_token, positions))
        mbarrier.arrive(k_free.index(next_stage), pred=has_next)
        scores = _mask(scores, positions - (next_position + next_length - 1) // BLOCK * BLOCK, window, WINDOWED)
        divisor = gl.convert_layout(row_sum, gl.SliceLayout(1, O_LAYOUT))
        exponentials, row_sum, row_max = _begin(
            scores, sinks_ptr, gl.minimum(item + step, num_items - 1) % GROUPS * PACK, scale, PACK, SINKS
        )  # fmt: skip
        mbarrier.wait(v_ready.index(stage), (index // STAGES) & 1)  # see `_blocks`
        acc, weights, exponentials = warpgroup_mma_wait(0, deps=(acc_token, weights, exponentials))
        mbarrier.arrive(v_free.index(stage))
        index += 1

        # by way of the item's queries in shared memory, so that whole rows are written
        q_smem.store((acc * (1 / divisor)[:, None]).to(dtype))
        offsets = ((token + rows // PACK).to(gl.int64) * HEADS + item % GROUPS * PACK + rows % PACK) * DIM
        mask = (rows // PACK < length)[:, None]
        gl.store(out_ptr + offsets[:, None] + dims[None, :], q_smem.load(ROW_LAYOUT), mask=mask)
        fence_async_shared()
        mbarrier.arrive(q_free.index((turn - 1) % 2))
        token, position, length = next_token, next_position, next_length


@gluon.jit(do_not_specialize=["max_tiles", "table_row", "q_head", "window"])  # its code would be the same
def hopper_prefill_kernel(
    q_desc, k_desc, v_desc, out_ptr, table_ptr, tiles_ptr, sinks_ptr, max_tiles, table_row, q_head, window, scale,
    GROUPS: gl.constexpr, PER_HEAD: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr,
    PACK: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, WINDOWED: gl.constexpr,
    SINKS: gl.constexpr,
):  # fmt: skip
    """Write causal attention of the queries over pages to out [T, HEADS * DIM].

    WINDOWED: a query sees the last `window` keys up to its own; blocks that no query of a tile sees are skipped. SINKS:
    one more score per head, of sinks [HEADS], with a value of 0.

    Items of work are pairs of a tile and a group of PACK heads. `k_desc` and `v_desc` describe the caches as
    [pages * PAGE, KV * DIM] in boxes of [PAGE, 64]; `q_desc` the queries as [T, heads, DIM] in boxes of
    [ROWS / PACK, PACK, 64]. The queries of KV head i begin at head `i * q_head`. `scale` includes log2(e).
    """
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, DIM], dtype)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [4, ROWS, DIM], q_layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, DIM], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK, DIM], layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(q_ready.index(buffer), count=1)
        mbarrier.init(q_free.index(buffer), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    num_items = gl.load(tiles_ptr + 4 * max_tiles) * GROUPS
    gl.warp_specialize(
        [
            (_attend, (
                out_ptr, q_smem, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, tiles_ptr,
                num_items, scale, sinks_ptr, window, GROUPS, HEADS, DIM, STAGES, PACK, WINDOWED, SINKS, 0,
            )),
            (_attend, (
                out_ptr, q_smem, k_smem, v_smem, q_ready, q_free, k_ready, k_free, v_ready, v_free, tiles_ptr,
                num_items, scale, sinks_ptr, window, GROUPS, HEADS, DIM, STAGES, PACK, WINDOWED, SINKS, 1,
            )),
            (_load_keys, (
                q_desc, k_desc, q_smem, k_smem, q_ready, q_free, k_ready, k_free, tiles_ptr, table_ptr, table_row,
                q_head, num_items, window, GROUPS, PER_HEAD, DIM, PAGE, STAGES, PACK, WINDOWED,
            )),
            (_load_values, (
                v_desc, v_smem, v_ready, v_free, tiles_ptr, table_ptr, table_row, num_items, window, GROUPS, PER_HEAD,
                DIM, PAGE, STAGES, WINDOWED,
            )),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip

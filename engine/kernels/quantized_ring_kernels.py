"""Device code of GEMMs with quantised weights on Hopper GPUs, y = x Wᵀ, for up to 128 rows. In Gluon.

One warp fills a ring of tiles of W and x in shared memory by TMA, from before the previous kernel has ended. Two
warpgroups convert codes in registers, where they are the left operand of WGMMA instructions: a code is read and
converted once for all rows. SHARE says what the warpgroups divide between them:

    "outputs"   the outputs of the program, with the same x
    "gate"      one computes gates, the other ups
    "inputs"    the columns of W and x; their sums meet once, in the end

Launched with PDL as in small_batch_gemm_kernels.py. Imports triton at the top: for CUDA only.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.quantized_epilogue_kernels import norm_factors, store_outputs
from engine.kernels.quantized_gemm_kernels import (
    FP8_TO_BF16,
    FP8_TO_FP16,
    INT4_TO_BF16,
    INT4_TO_FP16,
    INT8_TO_BF16,
    INT8_TO_FP16,
)


@gluon.jit
def _convert_bytes(codes, zero, ELEMENT: gl.constexpr, DTYPE: gl.constexpr):
    """Return code - zero in DTYPE, exact, of 8-bit codes [WN, BK]; zero float32 [WN, 1], of integers."""
    if ELEMENT == "fp8":
        fp8: gl.constexpr = FP8_TO_BF16 if DTYPE == gl.bfloat16 else FP8_TO_FP16
        return gl.inline_asm_elementwise(fp8, "=r,h", [codes], DTYPE.value, is_pure=True, pack=2)
    elif DTYPE == gl.bfloat16:
        base = zero + 8388736.0 + gl.zeros_like(codes).to(gl.float32)  # 2^23 + 128
        return gl.inline_asm_elementwise(INT8_TO_BF16, "=r,h,r,r", [codes, base], DTYPE.value, is_pure=True, pack=2)
    else:
        base = (zero + 1152.0 + gl.zeros_like(codes).to(gl.float32)).to(DTYPE)  # 2^10 + 128
        return gl.inline_asm_elementwise(INT8_TO_FP16, "=r,h,r", [codes, base], DTYPE.value, is_pure=True, pack=2)


@gluon.jit
def _convert_halves(codes, zero, high_zero, DTYPE: gl.constexpr):
    """Return code - zero in DTYPE, exact, of the int4 codes in the low and in the high halves of bytes [WN, BK]."""
    offset: gl.constexpr = 136.0 if DTYPE == gl.bfloat16 else 1032.0  # 2^7 or 2^10, and 8
    asm: gl.constexpr = INT4_TO_BF16 if DTYPE == gl.bfloat16 else INT4_TO_FP16
    like = gl.zeros_like(codes).to(gl.float32)
    bases = [codes, (zero + offset + like).to(DTYPE), (high_zero + offset + like).to(DTYPE)]
    return gl.inline_asm_elementwise(asm, "=r,=r,h,r,r", bases, (DTYPE.value, DTYPE.value), is_pure=True, pack=2)


@gluon.jit
def _low_column(offset, PER_BYTE: gl.constexpr):
    """Return the column of the code in this byte of a row; for 4 bits, of the code in its low half."""
    if PER_BYTE == 1:
        return offset
    else:
        return offset // 128 * 256 + offset % 128  # PACKED_COLUMNS


@gluon.jit
def _scales_of(
    pointer, rows, mask, column, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr, GROUPS: gl.constexpr
):
    """Return float32 [WN]: the scales, or zeros, of rows at a column; 0 beyond the last group."""
    group = column // SCALE_COLUMNS
    at = rows // SCALE_ROWS * GROUPS + group
    return gl.load(pointer + at, mask=mask & (group < GROUPS), other=0).to(gl.float32)


@gluon.jit
def _first_row(tile, which, n_count, WN: gl.constexpr, SHARE: gl.constexpr):
    """Return the first row of W of a warpgroup."""
    if SHARE == "outputs":
        return (2 * tile + which) * WN
    elif SHARE == "gate":
        return tile * WN + which * n_count
    else:
        return tile * WN


@gluon.jit
def _load_codes(w_desc, w_smem, ready, step, stage, tile, n_count, WN: gl.constexpr, SHARE: gl.constexpr):
    BYTES: gl.constexpr = w_desc.block_type.shape[1]
    for which in gl.static_range(2):
        part = 2 * step + which if SHARE == "inputs" else step
        row = _first_row(tile, which, n_count, WN, SHARE)
        tma.async_copy_global_to_shared(w_desc, [row, part * BYTES], ready, w_smem.index(2 * stage + which))


@gluon.jit
def _load_x(x_desc, x_smem, ready, step, stage, PER_BYTE: gl.constexpr, SHARE: gl.constexpr):
    COLUMNS: gl.constexpr = x_desc.block_type.shape[1]
    PARTS: gl.constexpr = 2 if SHARE == "inputs" else 1
    for part in gl.static_range(PARTS):
        column = _low_column((PARTS * step + part) * COLUMNS, PER_BYTE)
        for half in gl.static_range(PER_BYTE):
            buffer = x_smem.index((stage * PARTS + part) * PER_BYTE + half)
            tma.async_copy_global_to_shared(x_desc, [0, column + half * 128], ready, buffer)


@gluon.jit
def _fill(
    w_desc, x_desc, w_smem, x_smem, ready, free, tile, split, n_count,
    STEPS: gl.constexpr, STAGES: gl.constexpr, PER_BYTE: gl.constexpr, WN: gl.constexpr, BM: gl.constexpr,
    SHARE: gl.constexpr,
):  # fmt: skip
    """Load the tiles of all steps of a split. The first tiles of W are loaded before `gdc_wait`."""
    BYTES: gl.constexpr = w_desc.block_type.shape[1]
    X_TILES: gl.constexpr = PER_BYTE * (2 if SHARE == "inputs" else 1)
    STAGE_BYTES: gl.constexpr = 2 * WN * BYTES + X_TILES * BM * BYTES * 2
    AHEAD: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    first = split * STEPS
    for step in gl.static_range(AHEAD):
        mbarrier.expect(ready.index(step), STAGE_BYTES)
        _load_codes(w_desc, w_smem, ready.index(step), first + step, step, tile, n_count, WN, SHARE)
    gdc_wait()
    for step in gl.static_range(AHEAD):
        _load_x(x_desc, x_smem, ready.index(step), first + step, step, PER_BYTE, SHARE)
    for step in range(AHEAD, STEPS):
        stage = step % STAGES
        mbarrier.wait(free.index(stage), (step // STAGES) & 1 ^ 1)
        mbarrier.expect(ready.index(stage), STAGE_BYTES)
        _load_codes(w_desc, w_smem, ready.index(stage), first + step, stage, tile, n_count, WN, SHARE)
        _load_x(x_desc, x_smem, ready.index(stage), first + step, stage, PER_BYTE, SHARE)


@gluon.jit
def _multiply(
    w_smem, x_smem, ready, free, scale_ptr, zero_ptr, tile, split, n_count, row_count, MMA: gl.constexpr,
    ELEMENT: gl.constexpr, PER_BYTE: gl.constexpr, SCALE_ROWS: gl.constexpr, SCALE_COLUMNS: gl.constexpr,
    GROUPS: gl.constexpr, ZERO: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, SHARE: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Return W xᵀ, float32 [WN, BM], of a warpgroup's rows of W and of the columns of a split; scales are applied."""
    WN: gl.constexpr = w_smem.type.shape[1]
    BYTES: gl.constexpr = w_smem.type.shape[2]
    BM: gl.constexpr = x_smem.type.shape[1]
    DTYPE: gl.constexpr = x_smem.dtype
    PARTS: gl.constexpr = 2 if SHARE == "inputs" else 1
    PART: gl.constexpr = WHICH if SHARE == "inputs" else 0
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    GROUPED: gl.constexpr = GROUPS > 1
    row = _first_row(tile, WHICH, n_count, WN, SHARE)
    rows = row + gl.arange(0, WN, gl.SliceLayout(1, MMA))
    mask = rows < row_count
    z_rows = row + gl.arange(0, WN, gl.SliceLayout(1, LEFT))
    z_mask = z_rows < row_count
    first = split * STEPS
    column = _low_column((PARTS * first + PART) * BYTES, PER_BYTE)
    scale = gl.full([WN], 1.0, gl.float32, gl.SliceLayout(1, MMA))
    high_scale = scale
    zero = gl.zeros([WN], gl.float32, gl.SliceLayout(1, LEFT))
    high_zero = zero
    if GROUPED or GROUPS == 1:
        scale = _scales_of(scale_ptr, rows, mask, column, SCALE_ROWS, SCALE_COLUMNS, GROUPS)
    if GROUPED and PER_BYTE == 2:
        high_scale = _scales_of(scale_ptr, rows, mask, column + 128, SCALE_ROWS, SCALE_COLUMNS, GROUPS)
    if ZERO:
        zero = _scales_of(zero_ptr, z_rows, z_mask, column, SCALE_ROWS, SCALE_COLUMNS, GROUPS)
        high_zero = zero
        if GROUPED and PER_BYTE == 2:
            high_zero = _scales_of(zero_ptr, z_rows, z_mask, column + 128, SCALE_ROWS, SCALE_COLUMNS, GROUPS)
    acc = gl.zeros([WN, BM], gl.float32, MMA)
    for step in range(STEPS):
        stage = step % STAGES
        next_scale, next_high_scale, next_zero, next_high_zero = scale, high_scale, zero, high_zero
        if GROUPED:  # of the next step, while this one is computed
            column = _low_column((PARTS * (first + step + 1) + PART) * BYTES, PER_BYTE)
            next_scale = _scales_of(scale_ptr, rows, mask, column, SCALE_ROWS, SCALE_COLUMNS, GROUPS)
            if PER_BYTE == 2:
                next_high_scale = _scales_of(scale_ptr, rows, mask, column + 128, SCALE_ROWS, SCALE_COLUMNS, GROUPS)
            if ZERO:
                next_zero = _scales_of(zero_ptr, z_rows, z_mask, column, SCALE_ROWS, SCALE_COLUMNS, GROUPS)
                if PER_BYTE == 2:
                    next_high_zero = _scales_of(
                        zero_ptr, z_rows, z_mask, column + 128, SCALE_ROWS, SCALE_COLUMNS, GROUPS
                    )
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        codes = w_smem.index(2 * stage + WHICH).load(LEFT)
        x = x_smem.index((stage * PARTS + PART) * PER_BYTE).permute((1, 0))
        if PER_BYTE == 1:
            w = _convert_bytes(codes, zero[:, None], ELEMENT, DTYPE)
            if GROUPED:
                acc += warpgroup_mma(w, x, gl.zeros_like(acc), use_acc=False) * scale[:, None]
            else:
                acc = warpgroup_mma(w, x, acc)
        else:
            high_x = x_smem.index((stage * PARTS + PART) * PER_BYTE + 1).permute((1, 0))
            w, high_w = _convert_halves(codes, zero[:, None], high_zero[:, None], DTYPE)
            if GROUPED:
                acc += warpgroup_mma(w, x, gl.zeros_like(acc), use_acc=False) * scale[:, None]
                acc += warpgroup_mma(high_w, high_x, gl.zeros_like(acc), use_acc=False) * high_scale[:, None]
            else:
                acc = warpgroup_mma(high_w, high_x, warpgroup_mma(w, x, acc))
        gl.thread_barrier()  # all warps have read the tile
        mbarrier.arrive(free.index(stage))
        scale, high_scale, zero, high_zero = next_scale, next_high_scale, next_zero, next_high_zero
    if not GROUPED:
        acc *= scale[:, None]
    return acc


@gluon.jit
def _offsets(ROWS: gl.constexpr, COLUMNS: gl.constexpr, STRIDE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return int32 [ROWS, COLUMNS]: the offsets of a matrix whose rows are STRIDE apart."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return rows[:, None] * STRIDE + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _finish(
    y, gate, n_first, unit, split, bias_ptr, out_ptr, next_norm_ptr, normed_ptr, squares_ptr, partial_ptr,
    arrivals_ptr, m_count, n_count,
    SPLITS: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, HALF_NORM: gl.constexpr,
    UNITS: gl.constexpr,
):  # fmt: skip
    """Add the sums of the splits, in order, and apply the epilogue; the last program to arrive does. As `finish`."""
    if SPLITS == 1:
        store_outputs(
            y, gate, n_first, 0, unit, UNITS, bias_ptr, out_ptr, next_norm_ptr, normed_ptr, squares_ptr, m_count,
            n_count, GATED, ADD, BIAS, HALF_NORM,
        )  # fmt: skip
    else:
        WN: gl.constexpr = y.shape[0]
        BM: gl.constexpr = y.shape[1]
        SUMS: gl.constexpr = 2 if GATED else 1
        partial_ptr += unit * (SPLITS * SUMS * WN * BM)
        LAYOUT: gl.constexpr = y.type.layout
        offsets = _offsets(WN, BM, BM, LAYOUT)
        gl.store(partial_ptr + split * (SUMS * WN * BM) + offsets, y)
        if GATED:
            gl.store(partial_ptr + (split * SUMS + 1) * (WN * BM) + offsets, gate)
        gl.thread_barrier()  # all warps store before the arrival, which releases these stores
        if gl.atomic_add(arrivals_ptr + unit, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            COLUMNS: gl.constexpr = 32 if BM > 32 else BM  # at once: more of them would need too many registers
            MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
            some = _offsets(WN, COLUMNS, BM, MMA)
            for first in range(0, BM, COLUMNS):
                total = gl.zeros([WN, COLUMNS], gl.float32, MMA)
                total_gate = gl.zeros([WN, COLUMNS], gl.float32, MMA)
                for other in range(SPLITS):
                    sums_ptr = partial_ptr + other * (SUMS * WN * BM) + first
                    total += gl.load(sums_ptr + some, cache_modifier=".cg")
                    if GATED:
                        total_gate += gl.load(sums_ptr + WN * BM + some, cache_modifier=".cg")
                store_outputs(
                    total, total_gate, n_first, first, unit, UNITS, bias_ptr, out_ptr, next_norm_ptr, normed_ptr,
                    squares_ptr, m_count, n_count, GATED, ADD, BIAS, HALF_NORM,
                )  # fmt: skip
            gl.store(arrivals_ptr + unit, 0)


@gluon.jit
def _first_group(
    w_smem, x_smem, sums, ready, free, summed, scale_ptr, zero_ptr, bias_ptr, out_ptr, next_norm_ptr, normed_ptr,
    squares_ptr, partial_ptr, arrivals_ptr, tile, split, m_count, n_count, row_count, eps, UNITS: gl.constexpr,
    MMA: gl.constexpr, K: gl.constexpr, ELEMENT: gl.constexpr, PER_BYTE: gl.constexpr, SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr, GROUPS: gl.constexpr, ZERO: gl.constexpr, STEPS: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, SHARE: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, HALF_NORM: gl.constexpr,
    NUM_SQUARES: gl.constexpr, SQUARES_PAD: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """Compute a part, add or gate the other warpgroup's, and apply the epilogue."""
    WN: gl.constexpr = w_smem.type.shape[1]
    gdc_wait()
    factor = norm_factors(squares_ptr, m_count, eps, K, x_smem.type.shape[1], MMA, 4, NUM_SQUARES, SQUARES_PAD)
    acc = _multiply(
        w_smem, x_smem, ready, free, scale_ptr, zero_ptr, tile, split, n_count, row_count, MMA, ELEMENT, PER_BYTE,
        SCALE_ROWS, SCALE_COLUMNS, GROUPS, ZERO, STEPS, STAGES, SHARE, 0,
    )  # fmt: skip
    if LATE:
        gdc_launch_dependents()
    acc *= factor[None, :]
    other = acc
    if SHARE != "outputs":
        mbarrier.wait(summed.index(0), 0)
        other = sums.load(MMA) * factor[None, :]
    y = acc
    if SHARE == "gate":
        y = other
    elif SHARE == "inputs":
        y = acc + other
    unit = 2 * tile if SHARE == "outputs" else tile
    _finish(
        y, acc, unit * WN, unit, split, bias_ptr, out_ptr, next_norm_ptr, normed_ptr, squares_ptr, partial_ptr,
        arrivals_ptr, m_count, n_count, SPLITS, SHARE == "gate", ADD, BIAS, HALF_NORM, UNITS,
    )  # fmt: skip


@gluon.jit
def _second_group(
    w_smem, x_smem, sums, ready, free, summed, scale_ptr, zero_ptr, bias_ptr, out_ptr, next_norm_ptr, normed_ptr,
    squares_ptr, partial_ptr, arrivals_ptr, tile, split, m_count, n_count, row_count, eps, UNITS: gl.constexpr,
    MMA: gl.constexpr, K: gl.constexpr, ELEMENT: gl.constexpr, PER_BYTE: gl.constexpr, SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr, GROUPS: gl.constexpr, ZERO: gl.constexpr, STEPS: gl.constexpr, SPLITS: gl.constexpr,
    STAGES: gl.constexpr, SHARE: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, HALF_NORM: gl.constexpr,
    NUM_SQUARES: gl.constexpr, SQUARES_PAD: gl.constexpr,
):  # fmt: skip
    """Compute the other part: with its epilogue if the outputs are shared, else for the first warpgroup."""
    WN: gl.constexpr = w_smem.type.shape[1]
    if SHARE == "outputs":
        gdc_wait()
        factor = norm_factors(squares_ptr, m_count, eps, K, x_smem.type.shape[1], MMA, 4, NUM_SQUARES, SQUARES_PAD)
    acc = _multiply(
        w_smem, x_smem, ready, free, scale_ptr, zero_ptr, tile, split, n_count, row_count, MMA, ELEMENT, PER_BYTE,
        SCALE_ROWS, SCALE_COLUMNS, GROUPS, ZERO, STEPS, STAGES, SHARE, 1,
    )  # fmt: skip
    if SHARE == "outputs":
        acc *= factor[None, :]
        unit = 2 * tile + 1
        _finish(
            acc, acc, unit * WN, unit, split, bias_ptr, out_ptr, next_norm_ptr, normed_ptr, squares_ptr, partial_ptr,
            arrivals_ptr, m_count, n_count, SPLITS, False, ADD, BIAS, HALF_NORM, UNITS,
        )  # fmt: skip
    else:
        sums.store(acc)
        gl.thread_barrier()
        mbarrier.arrive(summed.index(0))


@gluon.jit(do_not_specialize=["m_count"])
def quantized_ring_kernel(
    x_desc, w_desc, scale_ptr, zero_ptr, bias_ptr, out_ptr, next_norm_ptr, normed_ptr, squares_ptr, partial_ptr,
    arrivals_ptr, m_count, n_count, eps,
    K: gl.constexpr, ELEMENT: gl.constexpr, PER_BYTE: gl.constexpr, SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr, GROUPS: gl.constexpr, ZERO: gl.constexpr, SHARE: gl.constexpr, STEPS: gl.constexpr,
    SPLITS: gl.constexpr, STAGES: gl.constexpr, UNITS: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr,
    HALF_NORM: gl.constexpr, NUM_SQUARES: gl.constexpr, SQUARES_PAD: gl.constexpr, LATE: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Product of M <= BM rows of x [M, K] with codes [N, K / PER_BYTE]. Program (i, s): outputs of tile i, split s.

    A row has one scale, or its scales are for whole 128 columns. Squares and epilogue: as in `matrix_kernel`, with
    sums of squares of UNITS units of WN outputs.
    """
    if not LATE:
        gdc_launch_dependents()
    WN: gl.constexpr = w_desc.block_type.shape[0]
    BYTES: gl.constexpr = w_desc.block_type.shape[1]
    BM: gl.constexpr = x_desc.block_type.shape[0]
    X_TILES: gl.constexpr = PER_BYTE * (2 if SHARE == "inputs" else 1)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES, WN, BYTES], w_desc.layout)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [X_TILES * STAGES, BM, BYTES], x_desc.layout)
    SUMS: gl.constexpr = [1, 1] if SHARE == "outputs" else [WN, BM]
    sums = gl.allocate_shared_memory(gl.float32, SUMS, gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    mbarrier.init(summed.index(0), count=1)
    tile, split = gl.program_id(0), gl.program_id(1)
    row_count = 2 * n_count if SHARE == "gate" else n_count
    gl.warp_specialize(
        [
            (_first_group, (
                w_smem, x_smem, sums, ready, free, summed, scale_ptr, zero_ptr, bias_ptr, out_ptr, next_norm_ptr,
                normed_ptr, squares_ptr, partial_ptr, arrivals_ptr, tile, split, m_count, n_count, row_count, eps,
                UNITS, MMA, K, ELEMENT, PER_BYTE, SCALE_ROWS, SCALE_COLUMNS, GROUPS, ZERO, STEPS, SPLITS, STAGES, SHARE,
                ADD, BIAS, HALF_NORM, NUM_SQUARES, SQUARES_PAD, LATE,
            )),
            (_second_group, (
                w_smem, x_smem, sums, ready, free, summed, scale_ptr, zero_ptr, bias_ptr, out_ptr, next_norm_ptr,
                normed_ptr, squares_ptr, partial_ptr, arrivals_ptr, tile, split, m_count, n_count, row_count, eps,
                UNITS, MMA, K, ELEMENT, PER_BYTE, SCALE_ROWS, SCALE_COLUMNS, GROUPS, ZERO, STEPS, SPLITS, STAGES, SHARE,
                ADD, BIAS, HALF_NORM, NUM_SQUARES, SQUARES_PAD,
            )),
            (_fill, (
                w_desc, x_desc, w_smem, x_smem, ready, free, tile, split, n_count, STEPS, STAGES, PER_BYTE, WN, BM,
                SHARE,
            )),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip

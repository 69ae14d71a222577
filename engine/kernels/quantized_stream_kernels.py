"""Device code of products of few rows with quantised weights, y = x Wᵀ, bound by reading W. In Gluon.

A thread loads 16 bytes of codes of a row at once, in the registers where an MMA instruction (version 2, whose left
operand is W) expects them after the conversion: no shared memory, no shuffles. The order of columns within 128 is that
of the registers, the same for W and x. The warps of a program share its outputs and split K; their sums meet once, in
the end. Launched with PDL as in small_batch_gemm_kernels.py. Imports triton at the top: for CUDA only.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.quantized_epilogue_kernels import norm_factors, store_outputs

# The conversions of four bytes, a 32-bit operand, to 16-bit numbers; see quantized_gemm_kernels.py.
FP8_TO_BF16 = gl.constexpr(
    """{
    .reg .b32 a, b, c, d, m, n;
    mov.b32 m, 0x7b807b80;
    mov.b32 n, 0x80008000;
    prmt.b32 a, $4, 0, 0x1404;
    prmt.b32 b, $4, 0, 0x3424;
    and.b32 c, a, 0x80008000;
    and.b32 d, b, 0x80008000;
    shr.u32 a, a, 4;
    shr.u32 b, b, 4;
    lop3.b32 a, a, 0x07f007f0, c, 0xea;
    lop3.b32 b, b, 0x07f007f0, d, 0xea;
    fma.rn.bf16x2 a, a, m, n;
    fma.rn.bf16x2 b, b, m, n;
    mov.b32 {$0, $1}, a;
    mov.b32 {$2, $3}, b;
    }"""
)
FP8_TO_FP16 = gl.constexpr(
    """{
    .reg .b16 a, b;
    .reg .b32 c, d;
    mov.b32 {a, b}, $4;
    cvt.rn.f16x2.e4m3x2 c, a;
    cvt.rn.f16x2.e4m3x2 d, b;
    mov.b32 {$0, $1}, c;
    mov.b32 {$2, $3}, d;
    }"""
)
INT8_TO_BF16 = gl.constexpr(
    """{
    .reg .b32 a, b, c, d, e;
    xor.b32 a, $4, 0x80808080;
    prmt.b32 b, a, 0x4b000000, 0x7540;
    prmt.b32 c, a, 0x4b000000, 0x7541;
    prmt.b32 d, a, 0x4b000000, 0x7542;
    prmt.b32 e, a, 0x4b000000, 0x7543;
    sub.f32 b, b, $5;
    sub.f32 c, c, $5;
    sub.f32 d, d, $5;
    sub.f32 e, e, $5;
    cvt.rn.bf16x2.f32 b, c, b;
    cvt.rn.bf16x2.f32 d, e, d;
    mov.b32 {$0, $1}, b;
    mov.b32 {$2, $3}, d;
    }"""
)
INT8_TO_FP16 = gl.constexpr(
    """{
    .reg .b32 a, b, c;
    mov.b32 c, {$5, $5};
    xor.b32 a, $4, 0x80808080;
    prmt.b32 b, a, 0x64646464, 0x4140;
    prmt.b32 a, a, 0x64646464, 0x4342;
    sub.rn.f16x2 b, b, c;
    sub.rn.f16x2 a, a, c;
    mov.b32 {$0, $1}, b;
    mov.b32 {$2, $3}, a;
    }"""
)
INT4_TO_BF16 = gl.constexpr(
    """{
    .reg .b32 a, b, c, d, e, f;
    mov.b32 e, {$9, $9};
    mov.b32 f, {$10, $10};
    prmt.b32 a, $8, 0, 0x4140;
    prmt.b32 b, $8, 0, 0x4342;
    lop3.b32 c, a, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 d, b, 0x000f000f, 0x43004300, 0xea;
    sub.rn.bf16x2 c, c, e;
    sub.rn.bf16x2 d, d, e;
    mov.b32 {$0, $1}, c;
    mov.b32 {$2, $3}, d;
    shr.u32 a, a, 4;
    shr.u32 b, b, 4;
    lop3.b32 c, a, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 d, b, 0x000f000f, 0x43004300, 0xea;
    sub.rn.bf16x2 c, c, f;
    sub.rn.bf16x2 d, d, f;
    mov.b32 {$4, $5}, c;
    mov.b32 {$6, $7}, d;
    }"""
)
INT4_TO_FP16 = gl.constexpr(INT4_TO_BF16.value.replace("0x43004300", "0x64006400").replace("bf16x2", "f16x2"))


@gluon.jit
def _interleave(a, b, c, d):
    """Return [W, BN, 128]: element i of each of four [W, BN, 32], then element i + 1."""
    pairs = gl.join(gl.join(a, c), gl.join(b, d))  # [W, BN, 32, pair, element of a pair]
    return gl.reshape(pairs, [a.shape[0], a.shape[1], 4 * a.shape[2]])


@gluon.jit
def _convert_bytes(codes, zero, ELEMENT: gl.constexpr, DTYPE: gl.constexpr):
    """Return code - zero in DTYPE, exact, [W, BN, 128] of 8-bit codes, four in an int32 of [W, BN, 32].

    zero float32 [W, BN, 32], of integers.
    """
    FOUR: gl.constexpr = (DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value)
    if ELEMENT == "fp8":
        fp8: gl.constexpr = FP8_TO_BF16 if DTYPE == gl.bfloat16 else FP8_TO_FP16
        a, b, c, d = gl.inline_asm_elementwise(fp8, "=h,=h,=h,=h,r", [codes], FOUR, is_pure=True, pack=1)
    elif DTYPE == gl.bfloat16:
        base = zero + 8388736.0  # 2^23 + 128
        a, b, c, d = gl.inline_asm_elementwise(
            INT8_TO_BF16, "=h,=h,=h,=h,r,r", [codes, base], FOUR, is_pure=True, pack=1
        )
    else:
        base = (zero + 1152.0).to(DTYPE)  # 2^10 + 128
        a, b, c, d = gl.inline_asm_elementwise(
            INT8_TO_FP16, "=h,=h,=h,=h,r,h", [codes, base], FOUR, is_pure=True, pack=1
        )
    return _interleave(a, b, c, d)


@gluon.jit
def _convert_halves(codes, zero, high_zero, DTYPE: gl.constexpr):
    """Return code - zero in DTYPE, exact, of the int4 codes in the low and in the high halves of bytes.

    Shapes as in `_convert_bytes`.
    """
    FOUR: gl.constexpr = (DTYPE.value, DTYPE.value, DTYPE.value, DTYPE.value)
    EIGHT: gl.constexpr = FOUR + FOUR
    offset: gl.constexpr = 136.0 if DTYPE == gl.bfloat16 else 1032.0  # 2^7 or 2^10, and 8
    asm: gl.constexpr = INT4_TO_BF16 if DTYPE == gl.bfloat16 else INT4_TO_FP16
    bases = [codes, (zero + offset).to(DTYPE), (high_zero + offset).to(DTYPE)]
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        asm, "=h,=h,=h,=h,=h,=h,=h,=h,r,h,h", bases, EIGHT, is_pure=True, pack=1
    )
    return _interleave(a, b, c, d), _interleave(e, f, g, h)


@gluon.jit
def _low_columns(offsets, PER_BYTE: gl.constexpr):
    """Return the columns of the codes in these bytes of a row; for 4 bits, of the codes in their low halves."""
    if PER_BYTE == 1:
        return offsets
    else:
        return offsets // 128 * 256 + offsets % 128  # PACKED_COLUMNS


@gluon.jit
def _to_high(offsets, K: gl.constexpr):
    """Return what to add to the columns of the low halves to get the columns of the high halves."""
    TAIL: gl.constexpr = K % 256  # PACKED_COLUMNS
    if TAIL == 0:
        return 128
    else:
        return gl.where(offsets < (K - TAIL) // 2, 128, TAIL // 2)


@gluon.jit
def _load_scale(pointers, mask):
    """Load scales, or zeros, as float32."""
    return gl.load(pointers, mask=mask, other=0).to(gl.float32)


@gluon.jit
def _both_of(pointer, rows, mask, starts, K: gl.constexpr, PER_BYTE: gl.constexpr, SCALE_ROWS: gl.constexpr,
             SCALE_COLUMNS: gl.constexpr, GROUPS: gl.constexpr):  # fmt: skip
    """Return float32 [W, BN, 1]: the scales, or zeros, of rows at each warp's first byte, and of the high halves.

    0 beyond the last group.
    """
    column = _low_columns(starts, PER_BYTE)
    group = column // SCALE_COLUMNS
    found = _load_scale(pointer + (rows // SCALE_ROWS * GROUPS + group), mask & (group < GROUPS))
    high = found
    if PER_BYTE == 2:
        group = (column + _to_high(starts, K)) // SCALE_COLUMNS
        high = _load_scale(pointer + (rows // SCALE_ROWS * GROUPS + group), mask & (group < GROUPS))
    return found, high


@gluon.jit
def _product(
    acc, codes, x, high_x, zero, high_zero, scale, high_scale,
    ELEMENT: gl.constexpr, PER_BYTE: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Add W xᵀ of codes int32 [W, BN, 32] to acc [W, BN, BM]; scales [W, BN, 1] apply here if there are groups."""
    DTYPE: gl.constexpr = x.dtype
    LEFT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 16)
    zero = zero + gl.zeros_like(codes).to(gl.float32)
    if PER_BYTE == 1:
        w = gl.convert_layout(_convert_bytes(codes, zero, ELEMENT, DTYPE), LEFT, assert_trivial=True)
        if GROUPS == 1:
            acc = mma_v2(w, x, acc)
        else:
            acc += mma_v2(w, x, gl.zeros_like(acc)) * scale
    else:
        high_zero = high_zero + gl.zeros_like(codes).to(gl.float32)
        w, high_w = _convert_halves(codes, zero, high_zero, DTYPE)
        w = gl.convert_layout(w, LEFT, assert_trivial=True)
        high_w = gl.convert_layout(high_w, LEFT, assert_trivial=True)
        if GROUPS == 1:
            acc = mma_v2(high_w, high_x, mma_v2(w, x, acc))
        else:
            acc += mma_v2(w, x, gl.zeros_like(acc)) * scale
            acc += mma_v2(high_w, high_x, gl.zeros_like(acc)) * high_scale
    return acc


@gluon.jit(do_not_specialize=["m_count"])
def quantized_stream_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, next_norm_ptr, normed_ptr, squares_ptr, m_count, n_count,
    eps,
    K: gl.constexpr, ELEMENT: gl.constexpr, PER_BYTE: gl.constexpr, SCALE_ROWS: gl.constexpr,
    SCALE_COLUMNS: gl.constexpr, GROUPS: gl.constexpr, ZERO: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    GATED: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, HALF_NORM: gl.constexpr, NUM_SQUARES: gl.constexpr,
    SQUARES_PAD: gl.constexpr, TRIGGER_AFTER_MATH: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Product of M <= BM rows of x [M, K] with codes [N, K / PER_BYTE].

    Program i has outputs from i * BN. In a step, each warp reads 128 bytes of each of BN rows of codes. A row has one
    scale, or its scales are for whole 128 columns. GATED, squares and epilogue: as in `matrix_kernel`.
    """
    if not TRIGGER_AFTER_MATH:
        gdc_launch_dependents()
    W: gl.constexpr = num_warps
    BYTES: gl.constexpr = K // PER_BYTE
    WORDS: gl.constexpr = BYTES // 4
    STEPS: gl.constexpr = (BYTES + 128 * W - 1) // (128 * W)
    WHOLE: gl.constexpr = STEPS * 128 * W == BYTES
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1, 1], instr_shape=[1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 16)
    tile = gl.program_id(0)

    # rows and words of codes [W, BN, 32], rows of scales [W, BN, 1], columns and rows of x [W, 128, BM]
    a_warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, A)))[:, None][:, :, None]
    a_n = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :][:, :, None]
    a_k = a_warp * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, :][:, None, :]
    a_mask = a_n < n_count
    s_warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None][:, :, None]
    s_n = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :][:, :, None]
    s_mask = s_n < n_count
    b_warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None][:, :, None]
    b_k = b_warp * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :][:, :, None]
    b_m = gl.arange(0, BM, layout=gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, :][:, None, :]
    b_mask = b_m < m_count

    w_ptrs = w_ptr + a_n.to(gl.int64) * WORDS + a_k
    up_ptrs = w_ptrs + n_count.to(gl.int64) * WORDS
    x_ptrs = x_ptr + b_m.to(gl.int64) * K
    no_zero = gl.zeros([W, BN, 1], gl.float32, layout=A)
    no_scale = gl.zeros([W, BN, 1], gl.float32, layout=MMA)

    mask = a_mask if WHOLE else a_mask & (a_k < WORDS)
    codes = gl.load(w_ptrs, mask=mask, other=0)
    up_codes = gl.load(up_ptrs, mask=mask, other=0) if GATED else codes
    mask = a_mask & (a_k + 32 * W < WORDS)
    codes_1 = gl.load(w_ptrs + 32 * W, mask=mask, other=0)
    up_codes_1 = gl.load(up_ptrs + 32 * W, mask=mask, other=0) if GATED else codes_1
    acc = gl.zeros([W, BN, BM], gl.float32, layout=MMA)
    acc_up = gl.zeros([W, BN, BM], gl.float32, layout=MMA)
    gdc_wait()
    for step in range(STEPS):
        first = step * (128 * W)
        mask = a_mask & (a_k + (step + 2) * (32 * W) < WORDS)
        codes_2 = gl.load(w_ptrs + (step + 2) * (32 * W), mask=mask, other=0)
        up_codes_2 = gl.load(up_ptrs + (step + 2) * (32 * W), mask=mask, other=0) if GATED else codes_2
        offsets = b_k + first
        columns = _low_columns(offsets, PER_BYTE)
        inside = b_mask if WHOLE else b_mask & (offsets < BYTES)
        x = gl.load(x_ptrs + columns, mask=inside, other=0.0)
        high_x = x
        if PER_BYTE == 2:
            high_x = gl.load(x_ptrs + (columns + _to_high(offsets, K)), mask=inside, other=0.0)
        scale, high_scale, up_scale, up_high_scale = no_scale, no_scale, no_scale, no_scale
        zero, high_zero, up_zero, up_high_zero = no_zero, no_zero, no_zero, no_zero
        if GROUPS > 1:
            starts = s_warp * 128 + first
            scale, high_scale = _both_of(scale_ptr, s_n, s_mask, starts, K, PER_BYTE, SCALE_ROWS, SCALE_COLUMNS, GROUPS)
            if GATED:
                up_scale, up_high_scale = _both_of(
                    scale_ptr, s_n + n_count, s_mask, starts, K, PER_BYTE, SCALE_ROWS, SCALE_COLUMNS, GROUPS
                )
        if ZERO:
            starts = a_warp * 128 + first
            zero, high_zero = _both_of(zero_ptr, a_n, a_mask, starts, K, PER_BYTE, SCALE_ROWS, SCALE_COLUMNS, GROUPS)
            if GATED:
                up_zero, up_high_zero = _both_of(
                    zero_ptr, a_n + n_count, a_mask, starts, K, PER_BYTE, SCALE_ROWS, SCALE_COLUMNS, GROUPS
                )
        acc = _product(acc, codes, x, high_x, zero, high_zero, scale, high_scale, ELEMENT, PER_BYTE, GROUPS)
        if GATED:
            acc_up = _product(
                acc_up, up_codes, x, high_x, up_zero, up_high_zero, up_scale, up_high_scale, ELEMENT, PER_BYTE, GROUPS
            )
        codes, codes_1 = codes_1, codes_2
        up_codes, up_codes_1 = up_codes_1, up_codes_2
    if TRIGGER_AFTER_MATH:
        gdc_launch_dependents()

    # epilogue, [BN, BM]
    y = gl.sum(acc, 0)
    FLAT: gl.constexpr = gl.SliceLayout(0, MMA)
    offs_n = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, FLAT))
    mask_n = offs_n < n_count
    factor = norm_factors(squares_ptr, m_count, eps, K, BM, FLAT, W, NUM_SQUARES, SQUARES_PAD)[None, :]
    if GROUPS == 1:
        y *= _load_scale(scale_ptr + offs_n // SCALE_ROWS, mask_n)[:, None]
    y *= factor
    gate = y
    if GATED:
        y = gl.sum(acc_up, 0) * factor
        if GROUPS == 1:
            y *= _load_scale(scale_ptr + (offs_n + n_count) // SCALE_ROWS, mask_n)[:, None]
    store_outputs(
        y, gate, tile * BN, 0, tile, gl.num_programs(0), bias_ptr, out_ptr, next_norm_ptr, normed_ptr, squares_ptr,
        m_count, n_count, GATED, ADD, BIAS, HALF_NORM,
    )  # fmt: skip

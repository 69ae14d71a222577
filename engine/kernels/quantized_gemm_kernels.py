"""Device code of GEMMs with quantised weights: y = x Wᵀ with W = (code - zero) * scale.

Codes become numbers of x's dtype without rounding, since each has at most 8 significant bits, and scales apply in
float32. MODE says where: "row": one scale for all codes of a row multiplies their sum; "step": one scale for the codes
that a step reads of a row multiplies their product; "weight": each weight is computed in float32 and rounded once, like
`ScaledWeight.dense`.

Codes of 4 bits are in the layout of `PACKED_COLUMNS`, so the low and the high halves of a tile of bytes are tiles of
consecutive columns: no shuffles between threads. Launched with PDL as in small_batch_gemm_kernels.py. Imports triton at
the top: for CUDA (or Triton's interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.small_batch_gemm_kernels import finish

# The conversions of two bytes, a 16-bit operand, to two 16-bit numbers per register. Sign, exponent and mantissa of a
# small float move to their places in the wide one, and a product with a power of two corrects the exponent's bias,
# which is exact for subnormal numbers too. An integer becomes the mantissa of a large number, whose rest is subtracted.
FP8_TO_BF16 = tl.constexpr(
    """{
    .reg .b32 a, b, c;
    cvt.u32.u16 a, $1;
    prmt.b32 a, a, 0, 0x1404;
    and.b32 b, a, 0x80008000;
    shr.u32 a, a, 4;
    lop3.b32 a, a, 0x07f007f0, b, 0xea;
    mov.b32 b, 0x7b807b80;
    mov.b32 c, 0x80008000;
    fma.rn.bf16x2 $0, a, b, c;
    }"""
)
FP8_TO_FP16 = tl.constexpr("cvt.rn.f16x2.e4m3x2 $0, $1;")
INT8_TO_BF16 = tl.constexpr(
    """{
    .reg .b32 a, b;
    cvt.u32.u16 a, $1;
    xor.b32 a, a, 0x8080;
    prmt.b32 b, a, 0x4b000000, 0x7541;
    prmt.b32 a, a, 0x4b000000, 0x7540;
    sub.f32 a, a, $2;
    sub.f32 b, b, $3;
    cvt.rn.bf16x2.f32 $0, b, a;
    }"""
)
INT8_TO_FP16 = tl.constexpr(
    """{
    .reg .b32 a;
    cvt.u32.u16 a, $1;
    xor.b32 a, a, 0x8080;
    prmt.b32 a, a, 0x64646464, 0x4140;
    sub.rn.f16x2 $0, a, $2;
    }"""
)
INT4_TO_BF16 = tl.constexpr(
    """{
    .reg .b32 a, b;
    cvt.u32.u16 a, $2;
    prmt.b32 a, a, 0, 0x4140;
    shr.u32 b, a, 4;
    lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
    sub.rn.bf16x2 $0, a, $3;
    sub.rn.bf16x2 $1, b, $4;
    }"""
)
INT4_TO_FP16 = tl.constexpr(
    """{
    .reg .b32 a, b;
    cvt.u32.u16 a, $2;
    prmt.b32 a, a, 0, 0x4140;
    shr.u32 b, a, 4;
    lop3.b32 a, a, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 b, b, 0x000f000f, 0x64006400, 0xea;
    sub.rn.f16x2 $0, a, $3;
    sub.rn.f16x2 $1, b, $4;
    }"""
)
MXFP4_TO_BF16 = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, e;
    cvt.u32.u16 a, $2;
    prmt.b32 a, a, 0, 0x4140;
    mov.b32 d, 0x7e807e80;
    mov.b32 e, 0x80008000;
    shl.b32 b, a, 12;
    shl.b32 c, a, 6;
    and.b32 b, b, 0x80008000;
    lop3.b32 c, c, 0x01c001c0, b, 0xea;
    fma.rn.bf16x2 $0, c, d, e;
    shl.b32 b, a, 8;
    shl.b32 c, a, 2;
    and.b32 b, b, 0x80008000;
    lop3.b32 c, c, 0x01c001c0, b, 0xea;
    fma.rn.bf16x2 $1, c, d, e;
    }"""
)
MXFP4_TO_FP16 = tl.constexpr(
    """{
    .reg .b32 a, b, c, d, e;
    cvt.u32.u16 a, $2;
    prmt.b32 a, a, 0, 0x4140;
    mov.b32 d, 0x74007400;
    mov.b32 e, 0x80008000;
    shl.b32 b, a, 12;
    shl.b32 c, a, 9;
    and.b32 b, b, 0x80008000;
    lop3.b32 c, c, 0x0e000e00, b, 0xea;
    fma.rn.f16x2 $0, c, d, e;
    shl.b32 b, a, 8;
    shl.b32 c, a, 5;
    and.b32 b, b, 0x80008000;
    lop3.b32 c, c, 0x0e000e00, b, 0xea;
    fma.rn.f16x2 $1, c, d, e;
    }"""
)


@triton.jit
def convert_bytes(codes, zero, ELEMENT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return code - zero in DTYPE, exact, of 8-bit codes [BN, BK]; zero float32 [BN, 1], of integers.

    ASM: use instructions of CUDA devices of compute capability 9.0 and newer.
    """
    if ASM:
        if ELEMENT == "fp8":
            if DTYPE == tl.bfloat16:
                return tl.inline_asm_elementwise(FP8_TO_BF16, "=r,h", [codes], DTYPE.value, is_pure=True, pack=2)
            else:
                return tl.inline_asm_elementwise(FP8_TO_FP16, "=r,h", [codes], DTYPE.value, is_pure=True, pack=2)
        elif DTYPE == tl.bfloat16:
            base = tl.broadcast_to(zero + 8388736.0, codes.shape)  # 2^23 + 128
            return tl.inline_asm_elementwise(INT8_TO_BF16, "=r,h,r,r", [codes, base], DTYPE.value, is_pure=True, pack=2)
        else:
            base = tl.broadcast_to((zero + 1152.0).to(DTYPE), codes.shape)
            return tl.inline_asm_elementwise(INT8_TO_FP16, "=r,h,r", [codes, base], DTYPE.value, is_pure=True, pack=2)
    elif ELEMENT == "fp8":
        bits = codes.to(tl.uint32)
        moved = ((bits & 128) << 24) | ((bits & 127) << 20)
        return (moved.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)  # 2^120
    else:
        return (codes.to(tl.int8, bitcast=True).to(tl.float32) - zero).to(DTYPE)


@triton.jit
def convert_halves(codes, zero, high_zero, ELEMENT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return code - zero in DTYPE, exact, of the 4-bit codes in the low and in the high halves of bytes [BN, BK].

    The zeros of both are float32 [BN, 1], of integers; MXFP4 has none. ASM: as in `convert_bytes`.
    """
    if ASM:
        if ELEMENT == "int4":
            bias: tl.constexpr = 136.0 if DTYPE == tl.bfloat16 else 1032.0  # 2^7 or 2^10, and 8
            base = tl.broadcast_to((zero + bias).to(DTYPE), codes.shape)
            high_base = tl.broadcast_to((high_zero + bias).to(DTYPE), codes.shape)
            int4: tl.constexpr = INT4_TO_BF16 if DTYPE == tl.bfloat16 else INT4_TO_FP16
            return tl.inline_asm_elementwise(
                int4, "=r,=r,h,r,r", [codes, base, high_base], (DTYPE.value, DTYPE.value), is_pure=True, pack=2
            )
        else:
            fp4: tl.constexpr = MXFP4_TO_BF16 if DTYPE == tl.bfloat16 else MXFP4_TO_FP16
            return tl.inline_asm_elementwise(fp4, "=r,=r,h", [codes], (DTYPE.value, DTYPE.value), is_pure=True, pack=2)
    elif ELEMENT == "int4":
        low = (codes & 15).to(tl.float32) - 8.0 - zero
        high = (codes >> 4).to(tl.float32) - 8.0 - high_zero
        return low.to(DTYPE), high.to(DTYPE)
    else:
        return _small_float(codes & 15).to(DTYPE), _small_float(codes >> 4).to(DTYPE)


@triton.jit
def _small_float(codes):
    """Return the values of E2M1 codes 0..15 in float32: 0 to 7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    size = (codes & 7).to(tl.float32)
    value = 0.5 * size + 0.5 * tl.maximum(size - 4.0, 0.0) + tl.maximum(size - 6.0, 0.0)
    return tl.where(codes > 7, -value, value)


@triton.jit
def low_columns(offsets, PER_BYTE: tl.constexpr):
    """Return the columns of the codes in these bytes of a row; for 4 bits, of the codes in their low halves."""
    if PER_BYTE == 1:
        return offsets
    else:
        return offsets // 128 * 256 + offsets % 128  # PACKED_COLUMNS


@triton.jit
def to_high(offsets, K: tl.constexpr):
    """Return what to add to the columns of the low halves to get the columns of the high halves."""
    TAIL: tl.constexpr = K % 256  # PACKED_COLUMNS
    if TAIL == 0:
        return 128
    else:
        return tl.where(offsets < (K - TAIL) // 2, 128, TAIL // 2)


@triton.jit
def load_scale(pointers, mask):
    """Load scales as float32; a byte is the exponent of a power of two, plus 127."""
    found = tl.load(pointers, mask=mask, other=0)
    if found.dtype == tl.uint8:
        bits = tl.maximum(found.to(tl.int32) << 23, 1 << 22)  # 0 stands for 2^-127, a subnormal number
        return bits.to(tl.float32, bitcast=True)
    else:
        return found.to(tl.float32)


@triton.jit
def scaled_weights(
    values, columns, rows, mask, scale_ptr, zero_ptr, group_ptr, part_ptr,
    K: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, GROUPS: tl.constexpr,
    ZERO: tl.constexpr, ACT_ORDER: tl.constexpr,
):  # fmt: skip
    """Return weights in float32 of codes [BN, BK] as numbers, whose scales and zeros are loaded one by one.

    rows [BN, 1] and columns [1, BK]. ACT_ORDER: the columns name their groups.
    """
    if ACT_ORDER:
        part = tl.load(part_ptr + rows, mask=mask, other=0)
        group = tl.load(group_ptr + part * K + columns, mask=mask, other=0)
    else:
        group = columns // SCALE_COLUMNS
    at = rows // SCALE_ROWS * GROUPS + group
    values = values.to(tl.float32)
    if ZERO:
        values -= tl.load(zero_ptr + at, mask=mask, other=0).to(tl.float32)
    return values * load_scale(scale_ptr + at, mask)


@triton.jit
def _step_scales(
    scale_ptr, zero_ptr, rows, mask, column, high_column,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, GROUPS: tl.constexpr, PER_BYTE: tl.constexpr,
    ZERO: tl.constexpr,
):  # fmt: skip
    """Return float32 [BN]: scale and zero of the tile that begins in `column`, then both of the high halves.

    Of columns beyond the last group they are 0.
    """
    at = rows // SCALE_ROWS * GROUPS + column // SCALE_COLUMNS
    inside = mask & (column // SCALE_COLUMNS < GROUPS)
    scale = load_scale(scale_ptr + at, inside)
    zero = tl.zeros_like(scale)
    if ZERO:
        zero = tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)
    high_scale = scale
    high_zero = zero
    if PER_BYTE == 2:
        at = rows // SCALE_ROWS * GROUPS + high_column // SCALE_COLUMNS
        inside = mask & (high_column // SCALE_COLUMNS < GROUPS)
        high_scale = load_scale(scale_ptr + at, inside)
        if ZERO:
            high_zero = tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)
    return scale, zero, high_scale, high_zero


@triton.jit
def _add_product(
    acc, codes, x, high_x, scale, zero, high_scale, high_zero, rows, mask_n, columns, high_columns, scale_ptr, zero_ptr,
    group_ptr, part_ptr,
    K: tl.constexpr, ELEMENT: tl.constexpr, PER_BYTE: tl.constexpr, MODE: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr, ACT_ORDER: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add W xᵀ of the weights of codes [BN, BK] to acc float32 [BN, BM]."""
    DTYPE: tl.constexpr = x.dtype
    if MODE == "weight":
        none = tl.zeros([1, 1], tl.float32)
        mask = mask_n[:, None] & (columns < K)[None, :]
        if PER_BYTE == 1:
            values = convert_bytes(codes, none, ELEMENT, DTYPE, False)
        else:
            values, high_values = convert_halves(codes, none, none, ELEMENT, DTYPE, False)
        w = scaled_weights(
            values, columns[None, :], rows[:, None], mask, scale_ptr, zero_ptr, group_ptr, part_ptr, K, SCALE_ROWS,
            SCALE_COLUMNS, GROUPS, ZERO, ACT_ORDER,
        )  # fmt: skip
        acc = tl.dot(w.to(DTYPE), x, acc)
        if PER_BYTE == 2:
            mask = mask_n[:, None] & (high_columns < K)[None, :]
            w = scaled_weights(
                high_values, high_columns[None, :], rows[:, None], mask, scale_ptr, zero_ptr, group_ptr, part_ptr, K,
                SCALE_ROWS, SCALE_COLUMNS, GROUPS, ZERO, ACT_ORDER,
            )  # fmt: skip
            acc = tl.dot(w.to(DTYPE), high_x, acc)
    elif PER_BYTE == 1:
        w = convert_bytes(codes, zero[:, None], ELEMENT, DTYPE, ASM)
        if MODE == "row":
            acc = tl.dot(w, x, acc)
        else:
            acc += tl.dot(w, x) * scale[:, None]
    else:
        w, high_w = convert_halves(codes, zero[:, None], high_zero[:, None], ELEMENT, DTYPE, ASM)
        if MODE == "row":
            acc = tl.dot(high_w, high_x, tl.dot(w, x, acc))
        else:
            acc += tl.dot(w, x) * scale[:, None]
            acc += tl.dot(high_w, high_x) * high_scale[:, None]
    return acc


@triton.jit
def prefetch(w_ptr, rows, mask_n, first, end, BYTES: tl.constexpr, LINES: tl.constexpr):
    """Load up to LINES lines of 128 bytes of each row of codes, within bytes [first, end), to the L2 cache."""
    offsets = first + tl.arange(0, LINES) * 128
    mask = mask_n[:, None] & (offsets < tl.minimum(end, BYTES))[None, :]
    addresses = (w_ptr + tl.where(mask, rows.to(tl.int64)[:, None] * BYTES + offsets[None, :], 0)).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def accumulate(
    x_rows, mask_m, w_ptr, scale_ptr, zero_ptr, group_ptr, part_ptr, offs_n, n_count, split,
    K: tl.constexpr, ELEMENT: tl.constexpr, PER_BYTE: tl.constexpr, MODE: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr, ACT_ORDER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Return W xᵀ, float32 [BN, BM], of rows offs_n of W and this split's part of K; then that of rows n_count below.

    x_rows are pointers to the first column of each row of x, and mask_m masks them, both [1, BM]. The first tile of
    codes is loaded before `gdc_wait`. Without GATED, both results are the same.
    """
    BYTES: tl.constexpr = K // PER_BYTE
    STEPS: tl.constexpr = (BYTES + BK * SPLITS - 1) // (BK * SPLITS)
    WHOLE: tl.constexpr = STEPS * BK * SPLITS == BYTES
    mask_n = offs_n < n_count
    up_rows = offs_n + n_count
    first = split * (STEPS * BK)
    offs_k = first + tl.arange(0, BK)
    w_ptrs = w_ptr + offs_n.to(tl.int64)[:, None] * BYTES + offs_k[None, :]
    up_ptrs = w_ptrs + n_count.to(tl.int64) * BYTES
    mask_w = mask_n[:, None]
    if not WHOLE:
        mask_w = mask_w & (offs_k < BYTES)[None, :]
    codes = tl.load(w_ptrs, mask=mask_w, other=0)
    up_codes = codes
    if GATED:
        up_codes = tl.load(up_ptrs, mask=mask_w, other=0)
    none = tl.zeros([BN], tl.float32)
    scale, zero, high_scale, high_zero = none, none, none, none
    up_scale, up_zero, up_high_scale, up_high_zero = none, none, none, none
    if MODE != "weight":
        column = low_columns(first, PER_BYTE)
        high_column = column + to_high(first, K)
        scale, zero, high_scale, high_zero = _step_scales(
            scale_ptr, zero_ptr, offs_n, mask_n, column, high_column, SCALE_ROWS, SCALE_COLUMNS, GROUPS, PER_BYTE, ZERO
        )
        if GATED:
            up_scale, up_zero, up_high_scale, up_high_zero = _step_scales(
                scale_ptr, zero_ptr, up_rows, mask_n, column, high_column, SCALE_ROWS, SCALE_COLUMNS, GROUPS, PER_BYTE,
                ZERO,
            )  # fmt: skip
    if PDL and LINES > 0:
        prefetch(w_ptr, offs_n, mask_n, first + BK, (split + 1) * (STEPS * BK), BYTES, LINES)
        if GATED:
            prefetch(w_ptr, up_rows, mask_n, first + BK, (split + 1) * (STEPS * BK), BYTES, LINES)
    if PDL:
        gdc_wait()
    columns = low_columns(offs_k, PER_BYTE)
    high_columns = columns + to_high(offs_k, K)
    mask_x = mask_m
    if not WHOLE:
        mask_x = mask_x & (offs_k < BYTES)[:, None]
    x = tl.load(x_rows + columns[:, None], mask=mask_x, other=0.0)
    high_x = x
    if PER_BYTE == 2:
        high_x = tl.load(x_rows + high_columns[:, None], mask=mask_x, other=0.0)
    acc = _add_product(
        tl.zeros([BN, BM], tl.float32), codes, x, high_x, scale, zero, high_scale, high_zero, offs_n, mask_n, columns,
        high_columns, scale_ptr, zero_ptr, group_ptr, part_ptr, K, ELEMENT, PER_BYTE, MODE, SCALE_ROWS, SCALE_COLUMNS,
        GROUPS, ZERO, ACT_ORDER, ASM,
    )  # fmt: skip
    acc_up = acc
    if GATED:
        acc_up = _add_product(
            tl.zeros([BN, BM], tl.float32), up_codes, x, high_x, up_scale, up_zero, up_high_scale, up_high_zero,
            up_rows, mask_n, columns, high_columns, scale_ptr, zero_ptr, group_ptr, part_ptr, K, ELEMENT, PER_BYTE,
            MODE, SCALE_ROWS, SCALE_COLUMNS, GROUPS, ZERO, ACT_ORDER, ASM,
        )  # fmt: skip
    for step in tl.range(1, STEPS, num_stages=STAGES):
        offsets = offs_k + step * BK
        mask_w = mask_n[:, None]
        mask_x = mask_m
        if not WHOLE:
            mask_w = mask_w & (offsets < BYTES)[None, :]
            mask_x = mask_x & (offsets < BYTES)[:, None]
        if MODE == "step":
            column = low_columns(first + step * BK, PER_BYTE)
            high_column = column + to_high(first + step * BK, K)
            scale, zero, high_scale, high_zero = _step_scales(
                scale_ptr, zero_ptr, offs_n, mask_n, column, high_column, SCALE_ROWS, SCALE_COLUMNS, GROUPS, PER_BYTE,
                ZERO,
            )  # fmt: skip
            if GATED:
                up_scale, up_zero, up_high_scale, up_high_zero = _step_scales(
                    scale_ptr, zero_ptr, up_rows, mask_n, column, high_column, SCALE_ROWS, SCALE_COLUMNS, GROUPS,
                    PER_BYTE, ZERO,
                )  # fmt: skip
        codes = tl.load(w_ptrs + step * BK, mask=mask_w, other=0)
        columns = low_columns(offsets, PER_BYTE)
        high_columns = columns + to_high(offsets, K)
        x = tl.load(x_rows + columns[:, None], mask=mask_x, other=0.0)
        high_x = x
        if PER_BYTE == 2:
            high_x = tl.load(x_rows + high_columns[:, None], mask=mask_x, other=0.0)
        acc = _add_product(
            acc, codes, x, high_x, scale, zero, high_scale, high_zero, offs_n, mask_n, columns, high_columns,
            scale_ptr, zero_ptr, group_ptr, part_ptr, K, ELEMENT, PER_BYTE, MODE, SCALE_ROWS, SCALE_COLUMNS, GROUPS,
            ZERO, ACT_ORDER, ASM,
        )  # fmt: skip
        if GATED:
            up_codes = tl.load(up_ptrs + step * BK, mask=mask_w, other=0)
            acc_up = _add_product(
                acc_up, up_codes, x, high_x, up_scale, up_zero, up_high_scale, up_high_zero, up_rows, mask_n, columns,
                high_columns, scale_ptr, zero_ptr, group_ptr, part_ptr, K, ELEMENT, PER_BYTE, MODE, SCALE_ROWS,
                SCALE_COLUMNS, GROUPS, ZERO, ACT_ORDER, ASM,
            )  # fmt: skip
    if MODE == "row":
        acc *= scale[:, None]
        if GATED:
            acc_up *= up_scale[:, None]
    return acc, acc_up


@triton.jit(do_not_specialize=["m_count"])
def quantized_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, group_ptr, part_ptr, bias_ptr, out_ptr, next_norm_ptr, normed_ptr, squares_ptr,
    partial_ptr, arrivals_ptr, m_count, n_count, eps,
    K: tl.constexpr, ELEMENT: tl.constexpr, PER_BYTE: tl.constexpr, MODE: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr, ACT_ORDER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, HALF_NORM: tl.constexpr, NUM_SQUARES: tl.constexpr,
    SQUARES_PAD: tl.constexpr, PDL: tl.constexpr, TRIGGER_AFTER_MATH: tl.constexpr, ASM: tl.constexpr,
    LINES: tl.constexpr, ACT: tl.constexpr = "",
):  # fmt: skip
    """GEMM of BM rows of x [M, K] with codes [N, K / PER_BYTE]; a step reads BK bytes of each of BN rows of codes.

    Grid, splits of K, GATED, squares and epilogue: as in `matrix_kernel`. Scales and zeros are
    [N / SCALE_ROWS, GROUPS].
    """
    if PDL and not TRIGGER_AFTER_MATH:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    offs_n = tile * BN + tl.arange(0, BN)
    offs_m = tl.program_id(2) * BM + tl.arange(0, BM)
    acc, acc_up = accumulate(
        x_ptr + offs_m.to(tl.int64)[None, :] * K, (offs_m < m_count)[None, :], w_ptr, scale_ptr, zero_ptr, group_ptr,
        part_ptr, offs_n, n_count, split, K, ELEMENT, PER_BYTE, MODE, SCALE_ROWS, SCALE_COLUMNS, GROUPS, ZERO,
        ACT_ORDER, BM, BN, BK, SPLITS, STAGES, GATED, PDL, ASM, LINES,
    )  # fmt: skip
    if PDL and TRIGGER_AFTER_MATH:
        gdc_launch_dependents()
    finish(
        acc, acc_up, offs_n, offs_m, out_ptr, out_ptr, out_ptr, bias_ptr, next_norm_ptr, normed_ptr, squares_ptr,
        partial_ptr, arrivals_ptr, tile, split, m_count, n_count, eps, K, BM, BN, SPLITS, GATED, ADD, BIAS, False,
        HALF_NORM, NUM_SQUARES, SQUARES_PAD, ACT,
    )  # fmt: skip


@triton.jit
def dequantize_kernel(
    w_ptr, scale_ptr, zero_ptr, group_ptr, part_ptr, out_ptr, first, n_count,
    K: tl.constexpr, ELEMENT: tl.constexpr, PER_BYTE: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr, ACT_ORDER: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write rows [first, first + n_count) of W to out [n_count, K], computed in float32 and rounded once."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    BYTES: tl.constexpr = K // PER_BYTE
    offs_n = tl.program_id(0) * BN + tl.arange(0, BN)
    offs_k = tl.program_id(1) * BK + tl.arange(0, BK)
    mask = (offs_n < n_count)[:, None] & (offs_k < BYTES)[None, :]
    rows = (first + offs_n)[:, None]
    codes = tl.load(w_ptr + rows.to(tl.int64) * BYTES + offs_k[None, :], mask=mask, other=0)
    none = tl.zeros([1, 1], tl.float32)
    columns = low_columns(offs_k, PER_BYTE)[None, :]
    targets = out_ptr + offs_n.to(tl.int64)[:, None] * K
    if PER_BYTE == 1:
        values = convert_bytes(codes, none, ELEMENT, tl.float32, False)
    else:
        values, high_values = convert_halves(codes, none, none, ELEMENT, tl.float32, False)
        high_columns = columns + to_high(offs_k, K)
        w = scaled_weights(
            high_values, high_columns, rows, mask, scale_ptr, zero_ptr, group_ptr, part_ptr, K, SCALE_ROWS,
            SCALE_COLUMNS, GROUPS, ZERO, ACT_ORDER,
        )  # fmt: skip
        tl.store(targets + high_columns, w.to(out_ptr.dtype.element_ty), mask=mask)
    w = scaled_weights(
        values, columns, rows, mask, scale_ptr, zero_ptr, group_ptr, part_ptr, K, SCALE_ROWS, SCALE_COLUMNS, GROUPS,
        ZERO, ACT_ORDER,
    )  # fmt: skip
    tl.store(targets + columns, w.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def quantize_rows_kernel(x_ptr, out_ptr, scale_ptr, K: tl.constexpr, K_PAD: tl.constexpr, PDL: tl.constexpr):
    """Quantise a row of x [M, K] to fp8, with scale [M] = largest magnitude / 448."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, K_PAD)
    mask = offsets < K
    x = tl.load(x_ptr + row * K + offsets, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-12) / 448.0
    tl.store(out_ptr + row * K + offsets, (x / scale).to(tl.float8e4nv), mask=mask)
    tl.store(scale_ptr + row, scale)


@triton.jit(do_not_specialize=["m_count"])
def fp8_kernel(
    x_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, out_ptr, m_count, n_count, out_stride,
    K: tl.constexpr, SCALE_ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GEMM of fp8 rows x [M, K] with fp8 weights [N, K]: out = x Wᵀ + bias, plus `out` if ADD.

    Scales of x are [M], scales of W [N / SCALE_ROWS]. The tensor cores sum fp8 products in fewer bits than float32 has,
    so each step's sum of BK products is added in float32.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    # neighbouring programs share tiles of W, which stay in the L2 cache
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(m_count, BM)
    tiles_n = tl.cdiv(n_count, BN)
    per_group = 8 * tiles_n
    first_m = tile // per_group * 8
    rows_in_group = tl.minimum(tiles_m - first_m, 8)
    offs_m = (first_m + tile % per_group % rows_in_group) * BM + tl.arange(0, BM)
    offs_n = tile % per_group // rows_in_group * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    mask_m, mask_n = offs_m < m_count, offs_n < n_count
    x_ptrs = x_ptr + offs_m.to(tl.int64)[:, None] * K + offs_k[None, :]
    w_ptrs = w_ptr + offs_n.to(tl.int64)[None, :] * K + offs_k[:, None]
    scale_ptrs = scale_ptr + offs_n // SCALE_ROWS
    acc = tl.zeros([BM, BN], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        mask_k = offs_k < K - start
        x = tl.load(x_ptrs + start, mask=mask_m[:, None] & mask_k[None, :], other=0.0)
        w = tl.load(w_ptrs + start, mask=mask_n[None, :] & mask_k[:, None], other=0.0)
        acc = tl.dot(x, w, acc, max_num_imprecise_acc=BK)
    x_scale = tl.load(x_scale_ptr + offs_m, mask=mask_m, other=0.0)
    acc *= x_scale[:, None] * tl.load(scale_ptrs, mask=mask_n, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    target = out_ptr + offs_m.to(tl.int64)[:, None] * out_stride + offs_n[None, :]
    mask = mask_m[:, None] & mask_n[None, :]
    if ADD:
        acc += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, acc.to(out_ptr.dtype.element_ty), mask=mask)

"""Device code that the kernels of quantized_stream_kernels.py and quantized_ring_kernels.py share: norm and epilogue.

In Gluon, as in small_batch_gemm_kernels.py. Imports triton at the top: for CUDA only.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def norm_factors(
    squares_ptr, m_count, eps, K: gl.constexpr, BM: gl.constexpr, LAYOUT: gl.constexpr, WARPS: gl.constexpr,
    NUM_SQUARES: gl.constexpr, SQUARES_PAD: gl.constexpr,
):  # fmt: skip
    """Return float32 [BM]: the factors that complete the norm of x, for the columns of a tensor in LAYOUT.

    WARPS: how many warps compute it. 1 without sums of squares.
    """
    if NUM_SQUARES == 0:
        return gl.full([BM], 1.0, gl.float32, gl.SliceLayout(0, LAYOUT))
    else:
        SQUARES: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [WARPS, 1], [1, 0])
        at_m = gl.arange(0, BM, gl.SliceLayout(1, SQUARES))[:, None]
        at = gl.arange(0, SQUARES_PAD, gl.SliceLayout(0, SQUARES))[None, :]
        squares = gl.load(squares_ptr + at_m * NUM_SQUARES + at, mask=(at_m < m_count) & (at < NUM_SQUARES), other=0.0)
        return gl.convert_layout(gl.rsqrt(gl.sum(squares, 1) / K + eps), gl.SliceLayout(0, LAYOUT))


@gluon.jit
def store_outputs(
    y, gate, n_first, m_first, unit, units, bias_ptr, out_ptr, next_norm_ptr, normed_ptr, squares_ptr, m_count, n_count,
    GATED: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, HALF_NORM: gl.constexpr,
):  # fmt: skip
    """Apply bias, gate and residual to y float32 [BN, BM], store it as out[m, n], and begin the next norm.

    y begins at output n_first and row m_first. Its sums of squares are column `unit` of squares [M, units].
    """
    LAYOUT: gl.constexpr = y.type.layout
    n = n_first + gl.arange(0, y.shape[0], gl.SliceLayout(1, LAYOUT))
    m = m_first + gl.arange(0, y.shape[1], gl.SliceLayout(0, LAYOUT))
    mask_n, mask_m = n < n_count, m < m_count
    if BIAS:
        up = n_count if GATED else 0
        y += gl.load(bias_ptr + up + n, mask=mask_n, other=0.0).to(gl.float32)[:, None]
        if GATED:
            gate += gl.load(bias_ptr + n, mask=mask_n, other=0.0).to(gl.float32)[:, None]
    if GATED:
        y = gate / (1.0 + gl.exp(-gate)) * y
    mask = mask_n[:, None] & mask_m[None, :]
    at = m[None, :] * n_count + n[:, None]
    if ADD:
        y += gl.load(out_ptr + at, mask=mask, other=0.0).to(gl.float32)
    rounded = y.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + at, rounded, mask=mask)
    if HALF_NORM:
        value = gl.where(mask, rounded.to(gl.float32), 0.0)
        weight = gl.load(next_norm_ptr + n, mask=mask_n, other=0.0).to(gl.float32)[:, None]
        gl.store(normed_ptr + at, (value * weight).to(normed_ptr.dtype.element_ty), mask=mask)
        gl.store(squares_ptr + m * units + unit, gl.sum(value * value, 0), mask=mask_m & (unit < units))

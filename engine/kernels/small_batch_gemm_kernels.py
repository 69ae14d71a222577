"""Device code of the small-batch GEMM y = x Wᵀ, which is bound by reading W.

The vector kernel (for a single row; it supports a few) runs on the CUDA cores. The matrix kernel uses the tensor cores,
with rows padded to a multiple of 16. The norm before the GEMM and the epilogue (gate, residual, tile argmax) are part
of the launch, since at these sizes a launch costs as much as the memory traffic. Weights are prefetched while the
previous kernel still runs (programmatic dependent launch): above `gdc_wait`, read nothing that an earlier kernel wrote,
and write nothing. TRIGGER_AFTER_MATH triggers the dependent launch only after this GEMM's math: otherwise the many
small programs of the next kernel crowd the free SMs while the programs that work here get few. Imports triton at the
top: for CUDA (or Triton's interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.row_kernels import activate, bound


@triton.jit
def _epilogue(
    y, gate, offs_n, offs_m, out_ptr, best_ptr, best_at_ptr, bias_ptr, next_norm_ptr, normed_ptr, squares_ptr,
    tile, tiles, m_count, n_count,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, TILE_ARGMAX: tl.constexpr, HALF_NORM: tl.constexpr,
    ACT: tl.constexpr = "", SCALE: tl.constexpr = 1.0, SOFTCAP: tl.constexpr = 0.0,
):  # fmt: skip
    """Apply bias, gate and residual to y float32 [BN, BM], store it as out[m, n], and write the fused extras.

    ACT: the activation of the gate ("": SiLU), or without a gate of y ("": none). SCALE is a factor of y, and SOFTCAP
    its bound; 0: unbounded.
    """
    mask_n = offs_n < n_count
    mask = mask_n[:, None] & (offs_m < m_count)[None, :]
    if BIAS:
        first = n_count if GATED else 0  # the bias of y follows that of the gate
        y += tl.load(bias_ptr + first + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            gate += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
        y = activate(gate, ACT if ACT != "" else "silu") * y
    elif ACT != "":
        y = activate(y, ACT)
    if SCALE != 1.0:
        y *= SCALE
    if SOFTCAP > 0:
        y = bound(y, SOFTCAP)
    target = out_ptr + offs_m[None, :].to(tl.int64) * n_count + offs_n[:, None]
    if ADD:
        y += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    rounded = y.to(out_ptr.dtype.element_ty)
    tl.store(target, rounded, mask=mask)
    if HALF_NORM:
        # First half of the next norm: apply its weight and store the tile's sum of squares; the reader adds them up.
        value = tl.where(mask, rounded.to(tl.float32), 0.0)
        weight = tl.load(next_norm_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
        normed_ptrs = normed_ptr + offs_m[None, :].to(tl.int64) * n_count + offs_n[:, None]
        tl.store(normed_ptrs, (value * weight).to(normed_ptr.dtype.element_ty), mask=mask)
        tl.store(squares_ptr + offs_m.to(tl.int64) * tiles + tile, tl.sum(value * value, 0), mask=offs_m < m_count)
    if TILE_ARGMAX:
        # Use the rounded values, so that the argmax equals that of the stored logits; a NaN counts as +inf.
        value = rounded.to(tl.float32)
        value = tl.where(value == value, value, float("inf"))
        value = tl.where(mask_n[:, None], value, float("-inf"))
        best, best_row = tl.max(value, 0, return_indices=True)
        offsets = offs_m.to(tl.int64) * tiles + tile
        tl.store(best_ptr + offsets, best, mask=offs_m < m_count)
        tl.store(best_at_ptr + offsets, tl.min(offs_n, 0) + best_row, mask=offs_m < m_count)


@triton.jit
def vector_kernel(
    x_ptr, w_ptr, norm_ptr, bias_ptr, out_ptr, best_ptr, best_at_ptr, n_count, eps,
    M: tl.constexpr, M_PAD: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, TILE_ARGMAX: tl.constexpr,
    PDL: tl.constexpr, TRIGGER_AFTER_MATH: tl.constexpr, ACT: tl.constexpr, SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """GEMM of M rows of x [M, K] on the CUDA cores; M_PAD is the next power of two. Program i has outputs from i * BN.

    GATED: W is [2 * n_count, K], the rows of the gate first.
    """
    if PDL and not TRIGGER_AFTER_MATH:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    offs_n = tile * BN + tl.arange(0, BN)
    offs_m = tl.arange(0, M_PAD)
    mask_n = offs_n < n_count
    cols = tl.arange(0, BK)
    w_ptrs = w_ptr + offs_n.to(tl.int64)[:, None] * K + cols[None, :]
    up_ptrs = w_ptrs + n_count.to(tl.int64) * K
    mask = mask_n[:, None] & (cols < K)[None, :]
    w = tl.load(w_ptrs, mask=mask, other=0.0)
    up = w
    if GATED:
        up = tl.load(up_ptrs, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
    acc = tl.zeros([BN, M_PAD], tl.float32)
    acc_up = tl.zeros([BN, M_PAD], tl.float32)
    squares = tl.zeros([M_PAD], tl.float32)
    for start in tl.static_range(0, K, BK):
        mask_k = start + cols < K
        w_f32 = w.to(tl.float32)
        up_f32 = up.to(tl.float32)
        scale = tl.full([BK], 1.0, tl.float32)
        if NORM:
            scale = tl.load(norm_ptr + start + cols, mask=mask_k, other=0.0).to(tl.float32)
        for row in tl.static_range(M):
            is_row = (offs_m == row).to(tl.float32)
            x = tl.load(x_ptr + row * K + start + cols, mask=mask_k, other=0.0).to(tl.float32)
            if NORM:
                squares += is_row * tl.sum(x * x, 0)
                x *= scale
            acc += is_row[None, :] * tl.sum(w_f32 * x[None, :], 1)[:, None]
            if GATED:
                acc_up += is_row[None, :] * tl.sum(up_f32 * x[None, :], 1)[:, None]
        if start + BK < K:
            next_mask = mask_n[:, None] & (start + BK + cols < K)[None, :]
            w = tl.load(w_ptrs + start + BK, mask=next_mask, other=0.0)
            if GATED:
                up = tl.load(up_ptrs + start + BK, mask=next_mask, other=0.0)
    if PDL and TRIGGER_AFTER_MATH:
        gdc_launch_dependents()
    if NORM:
        rstd = tl.rsqrt(squares / K + eps)[None, :]
        acc *= rstd
        acc_up *= rstd
    y = acc_up if GATED else acc
    _epilogue(
        y, acc, offs_n, offs_m, out_ptr, best_ptr, best_at_ptr, bias_ptr, norm_ptr, out_ptr, best_ptr, tile,
        tl.num_programs(0), M, n_count, GATED, ADD, BIAS, TILE_ARGMAX, False, ACT, SCALE, SOFTCAP,
    )  # fmt: skip


@triton.jit
def finish(
    acc, acc_up, offs_n, offs_m, out_ptr, best_ptr, best_at_ptr, bias_ptr, next_norm_ptr, normed_ptr, squares_ptr,
    partial_ptr, arrivals_ptr, tile, split, m_count, n_count, eps,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    BIAS: tl.constexpr, TILE_ARGMAX: tl.constexpr, HALF_NORM: tl.constexpr, NUM_SQUARES: tl.constexpr,
    SQUARES_PAD: tl.constexpr, ACT: tl.constexpr = "", SCALE: tl.constexpr = 1.0, SOFTCAP: tl.constexpr = 0.0,
):  # fmt: skip
    """Complete the norm of x, add the sums of the SPLITS programs of a tile, and apply the epilogue.

    acc and acc_up float32 [BN, BM]: the program's sums, and the sums of the up projection if GATED.
    """
    if NUM_SQUARES > 0:
        indices = tl.arange(0, SQUARES_PAD)
        squares_ptrs = squares_ptr + offs_m.to(tl.int64)[:, None] * NUM_SQUARES + indices[None, :]
        squares = tl.load(squares_ptrs, mask=(offs_m < m_count)[:, None] & (indices < NUM_SQUARES)[None, :], other=0.0)
        rstd = tl.rsqrt(tl.sum(squares, 1) / K + eps)[None, :]
        acc *= rstd
        acc_up *= rstd
    if SPLITS == 1:
        _epilogue(
            acc_up if GATED else acc, acc, offs_n, offs_m, out_ptr, best_ptr, best_at_ptr, bias_ptr, next_norm_ptr,
            normed_ptr, squares_ptr, tile, tl.num_programs(0), m_count, n_count, GATED, ADD, BIAS, TILE_ARGMAX,
            HALF_NORM, ACT, SCALE, SOFTCAP,
        )  # fmt: skip
    else:
        NUM_ACCS: tl.constexpr = 2 if GATED else 1
        tile_index = tl.program_id(2) * tl.num_programs(0) + tile
        offsets = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        partial_ptrs = partial_ptr + tile_index * SPLITS * NUM_ACCS * BN * BM + offsets
        tl.store(partial_ptrs + split * NUM_ACCS * BN * BM, acc)
        if GATED:
            tl.store(partial_ptrs + (split * NUM_ACCS + 1) * BN * BM, acc_up)
        # all warps store before the arrival, which releases these stores and acquires the other splits' stores
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + tile_index, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            total = tl.zeros([BN, BM], tl.float32)
            total_up = tl.zeros([BN, BM], tl.float32)
            for other_split in tl.static_range(SPLITS):
                # .cg: other SMs wrote these, so an L1 line from an earlier launch would be stale
                total += tl.load(partial_ptrs + other_split * NUM_ACCS * BN * BM, cache_modifier=".cg")
                if GATED:
                    total_up += tl.load(partial_ptrs + (other_split * NUM_ACCS + 1) * BN * BM, cache_modifier=".cg")
            _epilogue(
                total_up if GATED else total, total, offs_n, offs_m, out_ptr, best_ptr, best_at_ptr, bias_ptr,
                next_norm_ptr, normed_ptr, squares_ptr, tile, tl.num_programs(0), m_count, n_count, GATED, ADD, BIAS,
                TILE_ARGMAX, HALF_NORM, ACT, SCALE, SOFTCAP,
            )  # fmt: skip
            tl.store(arrivals_ptr + tile_index, 0)


@triton.jit
def matrix_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, best_ptr, best_at_ptr, next_norm_ptr, normed_ptr, squares_ptr, partial_ptr,
    arrivals_ptr, m_count, n_count, eps,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, TILE_ARGMAX: tl.constexpr, HALF_NORM: tl.constexpr,
    NUM_SQUARES: tl.constexpr, SQUARES_PAD: tl.constexpr, PDL: tl.constexpr,
    TRIGGER_AFTER_MATH: tl.constexpr, ACT: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """GEMM of BM rows of x [M, K] on the tensor cores, with W's rows as the left operand; SPLITS programs share K.

    With SPLITS > 1 every program stores a partial sum and the last to arrive adds them in order, so the result does not
    depend on the arrival order. NUM_SQUARES > 0: x already has the norm's weight applied, and this many sums of squares
    per row complete the norm.
    """
    if PDL and not TRIGGER_AFTER_MATH:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    offs_n = tile * BN + tl.arange(0, BN)
    offs_m = tl.program_id(2) * BM + tl.arange(0, BM)
    STEPS: tl.constexpr = (K + BK * SPLITS - 1) // (BK * SPLITS)
    cols = split * STEPS * BK + tl.arange(0, BK)
    w_ptrs = w_ptr + offs_n.to(tl.int64)[:, None] * K + cols[None, :]
    up_ptrs = w_ptrs + n_count.to(tl.int64) * K
    x_ptrs = x_ptr + offs_m.to(tl.int64)[None, :] * K + cols[:, None]
    mask_n = (offs_n < n_count)[:, None]
    mask_m = (offs_m < m_count)[None, :]
    w = tl.load(w_ptrs, mask=mask_n & (cols < K)[None, :], other=0.0)
    up = w
    if GATED:
        up = tl.load(up_ptrs, mask=mask_n & (cols < K)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptrs, mask=mask_m & (cols < K)[:, None], other=0.0)
    acc = tl.dot(w, x)
    acc_up = acc
    if GATED:
        acc_up = tl.dot(up, x)
    for step in tl.range(1, STEPS, num_stages=STAGES):
        mask_k = cols + step * BK < K
        w = tl.load(w_ptrs + step * BK, mask=mask_n & mask_k[None, :], other=0.0)
        x = tl.load(x_ptrs + step * BK, mask=mask_m & mask_k[:, None], other=0.0)
        acc = tl.dot(w, x, acc)
        if GATED:
            up = tl.load(up_ptrs + step * BK, mask=mask_n & mask_k[None, :], other=0.0)
            acc_up = tl.dot(up, x, acc_up)
    if PDL and TRIGGER_AFTER_MATH:
        gdc_launch_dependents()
    finish(
        acc, acc_up, offs_n, offs_m, out_ptr, best_ptr, best_at_ptr, bias_ptr, next_norm_ptr, normed_ptr, squares_ptr,
        partial_ptr, arrivals_ptr, tile, split, m_count, n_count, eps, K, BM, BN, SPLITS, GATED, ADD, BIAS, TILE_ARGMAX,
        HALF_NORM, NUM_SQUARES, SQUARES_PAD, ACT, SCALE, SOFTCAP,
    )  # fmt: skip

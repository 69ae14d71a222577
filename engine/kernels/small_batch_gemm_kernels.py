"""Device code of linear layers for few rows: y = x Wᵀ where reading W is all that takes time.

Up to 8 rows are multiplied and added by ordinary arithmetic, more go through the tensor cores, their count padded to a
multiple of 16. The norm before the product and what follows it (gate, residual, the best token of a tile) are part of
the launch, since at these sizes a launch costs as much as the bytes. Weights are asked for before the previous kernel
has ended (programmatic dependent launch): nothing that a kernel before wrote may be read, and nothing written, above
`gdc_wait`. With LATE the next launch may begin only once these programs have multiplied: many small programs would
otherwise crowd the multiprocessors that are free, while those that work here get few. Imports triton at the top: for
CUDA (or Triton's interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _finish(
    y, gate, rows_n, rows_m, out_ptr, best_ptr, where_ptr, bias_ptr, scale_ptr, scaled_ptr, squares_ptr,
    tile, tiles, m_count, n_count,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, BEST: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Store y float32 [BN, MP] as out[m, n], after what belongs to the same launch."""
    inside_n = rows_n < n_count
    mask = inside_n[:, None] & (rows_m < m_count)[None, :]
    if BIAS:
        first = n_count if GATED else 0  # where the bias of y begins: the gate's comes before
        y += tl.load(bias_ptr + first + rows_n, mask=inside_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIAS:
            gate += tl.load(bias_ptr + rows_n, mask=inside_n, other=0.0).to(tl.float32)[:, None]
        y = gate * tl.sigmoid(gate) * y
    target = out_ptr + rows_m[None, :].to(tl.int64) * n_count + rows_n[:, None]
    if ADD:
        y += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    rounded = y.to(out_ptr.dtype.element_ty)
    tl.store(target, rounded, mask=mask)
    if SCALE:
        # half of the next norm: its weight is applied, and the tile's squares are left to be summed up by the reader
        value = tl.where(mask, rounded.to(tl.float32), 0.0)
        weight = tl.load(scale_ptr + rows_n, mask=inside_n, other=0.0).to(tl.float32)[:, None]
        scaled = scaled_ptr + rows_m[None, :].to(tl.int64) * n_count + rows_n[:, None]
        tl.store(scaled, (value * weight).to(scaled_ptr.dtype.element_ty), mask=mask)
        tl.store(squares_ptr + rows_m.to(tl.int64) * tiles + tile, tl.sum(value * value, 0), mask=rows_m < m_count)
    if BEST:
        # of the rounded values, so that it is the choice that the stored logits give; a NaN counts as infinite
        value = rounded.to(tl.float32)
        value = tl.where(value == value, value, float("inf"))
        value = tl.where(inside_n[:, None], value, float("-inf"))
        best, place = tl.max(value, 0, return_indices=True)
        at = rows_m.to(tl.int64) * tiles + tile
        tl.store(best_ptr + at, best, mask=rows_m < m_count)
        tl.store(where_ptr + at, tl.min(rows_n, 0) + place, mask=rows_m < m_count)


@triton.jit
def vector_kernel(
    x_ptr, w_ptr, norm_ptr, bias_ptr, out_ptr, best_ptr, where_ptr, n_count, eps,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, BEST: tl.constexpr,
    PDL: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """M rows of x [M, K], MP the next power of two. Program i owns outputs from i * BN.

    GATED: W is [2 * n_count, K], the gate's rows before those of what it gates.
    """
    if PDL and not LATE:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    rows_n = tile * BN + tl.arange(0, BN)
    rows_m = tl.arange(0, MP)
    inside = rows_n < n_count
    cols = tl.arange(0, BK)
    w_at = w_ptr + rows_n.to(tl.int64)[:, None] * K + cols[None, :]
    up_at = w_at + n_count.to(tl.int64) * K
    mask = inside[:, None] & (cols < K)[None, :]
    w = tl.load(w_at, mask=mask, other=0.0)
    up = w
    if GATED:
        up = tl.load(up_at, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
    acc = tl.zeros([BN, MP], tl.float32)
    acc_up = tl.zeros([BN, MP], tl.float32)
    squares = tl.zeros([MP], tl.float32)
    for start in tl.static_range(0, K, BK):
        ok = start + cols < K
        wide = w.to(tl.float32)
        wide_up = up.to(tl.float32)
        scale = tl.full([BK], 1.0, tl.float32)
        if NORM:
            scale = tl.load(norm_ptr + start + cols, mask=ok, other=0.0).to(tl.float32)
        for row in tl.static_range(M):
            mine = (rows_m == row).to(tl.float32)
            x = tl.load(x_ptr + row * K + start + cols, mask=ok, other=0.0).to(tl.float32)
            if NORM:
                squares += mine * tl.sum(x * x, 0)
                x *= scale
            acc += mine[None, :] * tl.sum(wide * x[None, :], 1)[:, None]
            if GATED:
                acc_up += mine[None, :] * tl.sum(wide_up * x[None, :], 1)[:, None]
        if start + BK < K:
            more = inside[:, None] & (start + BK + cols < K)[None, :]
            w = tl.load(w_at + start + BK, mask=more, other=0.0)
            if GATED:
                up = tl.load(up_at + start + BK, mask=more, other=0.0)
    if PDL and LATE:
        gdc_launch_dependents()
    if NORM:
        root = tl.rsqrt(squares / K + eps)[None, :]
        acc *= root
        acc_up *= root
    y = acc_up if GATED else acc
    _finish(y, acc, rows_n, rows_m, out_ptr, best_ptr, where_ptr, bias_ptr, norm_ptr, out_ptr, best_ptr, tile,
            tl.num_programs(0), M, n_count, GATED, ADD, BIAS, BEST, False)  # fmt: skip


@triton.jit
def matrix_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, best_ptr, where_ptr, scale_ptr, scaled_ptr, squares_ptr, part_ptr, arrivals_ptr,
    m_count, n_count, eps,
    K: tl.constexpr, MP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr, BEST: tl.constexpr, SCALE: tl.constexpr,
    SQUARES: tl.constexpr, SQUARES_PAD: tl.constexpr, PDL: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """MP rows of x [M, K] on the tensor cores, W's rows as the left operand; SPLITS programs share a tile's K.

    With SPLITS > 1 every program leaves a partial sum and the last to arrive adds them in order: the result doesn't
    depend on who that was. SQUARES > 0: x is scaled already, and that many sums of squares a row complete its norm.
    """
    if PDL and not LATE:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rows_n = tile * BN + tl.arange(0, BN)
    rows_m = tl.program_id(2) * MP + tl.arange(0, MP)
    STEPS: tl.constexpr = (K + BK * SPLITS - 1) // (BK * SPLITS)
    cols = split * STEPS * BK + tl.arange(0, BK)
    w_at = w_ptr + rows_n.to(tl.int64)[:, None] * K + cols[None, :]
    up_at = w_at + n_count.to(tl.int64) * K
    x_at = x_ptr + rows_m.to(tl.int64)[None, :] * K + cols[:, None]
    ok_n = (rows_n < n_count)[:, None]
    ok_m = (rows_m < m_count)[None, :]
    w = tl.load(w_at, mask=ok_n & (cols < K)[None, :], other=0.0)
    up = w
    if GATED:
        up = tl.load(up_at, mask=ok_n & (cols < K)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    x = tl.load(x_at, mask=ok_m & (cols < K)[:, None], other=0.0)
    acc = tl.dot(w, x)
    acc_up = acc
    if GATED:
        acc_up = tl.dot(up, x)
    for step in tl.range(1, STEPS, num_stages=STAGES):
        ok_k = cols + step * BK < K
        w = tl.load(w_at + step * BK, mask=ok_n & ok_k[None, :], other=0.0)
        x = tl.load(x_at + step * BK, mask=ok_m & ok_k[:, None], other=0.0)
        acc = tl.dot(w, x, acc)
        if GATED:
            up = tl.load(up_at + step * BK, mask=ok_n & ok_k[None, :], other=0.0)
            acc_up = tl.dot(up, x, acc_up)
    if PDL and LATE:
        gdc_launch_dependents()
    if SQUARES > 0:
        which = tl.arange(0, SQUARES_PAD)
        at = squares_ptr + rows_m.to(tl.int64)[:, None] * SQUARES + which[None, :]
        squares = tl.load(at, mask=(rows_m < m_count)[:, None] & (which < SQUARES)[None, :], other=0.0)
        root = tl.rsqrt(tl.sum(squares, 1) / K + eps)[None, :]
        acc *= root
        acc_up *= root
    if SPLITS == 1:
        _finish(acc_up if GATED else acc, acc, rows_n, rows_m, out_ptr, best_ptr, where_ptr, bias_ptr, scale_ptr,
                scaled_ptr, squares_ptr, tile, tl.num_programs(0), m_count, n_count, GATED, ADD, BIAS, BEST,
                SCALE)  # fmt: skip
    else:
        KINDS: tl.constexpr = 2 if GATED else 1
        cell = tl.program_id(2) * tl.num_programs(0) + tile
        places = tl.arange(0, BN)[:, None] * MP + tl.arange(0, MP)[None, :]
        part = part_ptr + cell * SPLITS * KINDS * BN * MP + places
        tl.store(part + split * KINDS * BN * MP, acc)
        if GATED:
            tl.store(part + (split * KINDS + 1) * BN * MP, acc_up)
        # every warp's stores come before the arrival; the arrival releases them and acquires the other parts'
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + cell, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            total = tl.zeros([BN, MP], tl.float32)
            total_up = tl.zeros([BN, MP], tl.float32)
            for other in tl.static_range(SPLITS):
                # .cg: other multiprocessors wrote these; an L1 line from an earlier launch would be stale
                total += tl.load(part + other * KINDS * BN * MP, cache_modifier=".cg")
                if GATED:
                    total_up += tl.load(part + (other * KINDS + 1) * BN * MP, cache_modifier=".cg")
            _finish(total_up if GATED else total, total, rows_n, rows_m, out_ptr, best_ptr, where_ptr, bias_ptr,
                    scale_ptr, scaled_ptr, squares_ptr, tile, tl.num_programs(0), m_count, n_count, GATED, ADD, BIAS,
                    BEST, SCALE)  # fmt: skip
            tl.store(arrivals_ptr + cell, 0)

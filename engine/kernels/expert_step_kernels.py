"""Device code of experts in a decode step; expert_step.py launches it.

An entry is a pair of token and choice: entry t * TOP_K + j is the j-th expert of token t. Kernels of one row run on the
CUDA cores, others on the tensor cores with the weight as the left operand, as in small_batch_gemm_kernels.py. Imports
triton at the top: for CUDA (or Triton's interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.moe_kernels import activate


@triton.jit
def route_kernel(
    hidden_ptr, norm_ptr, router_ptr, bias_ptr, valid_ptr, normed_ptr, logits_ptr, arrivals_ptr, weights_ptr,
    experts_ptr, rows, eps,
    H: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr, BM: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr, NORMALIZE: tl.constexpr, BIAS: tl.constexpr,
    VALID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm BM rows of hidden [rows, H], and choose TOP_K of E experts for each by the softmax of its logits.

    Writes normed [rows, H], weights float32 and experts int32 [rows, TOP_K], the largest weight first, -1 for the
    experts of rows that are not valid. Axis 0 splits the experts; the last program of its rows to arrive chooses.
    """
    if PDL:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    row_tile = tl.program_id(1)
    offs_m = row_tile * BM + tl.arange(0, BM)
    offs_e = tile * BE + tl.arange(0, BE)
    is_row = offs_m < rows
    cols = tl.arange(0, BK)
    x_ptrs = hidden_ptr + offs_m.to(tl.int64)[None, :] * H + cols[:, None]
    normed_ptrs = normed_ptr + offs_m.to(tl.int64)[None, :] * H + cols[:, None]
    w_ptrs = router_ptr + offs_e[:, None] * H + cols[None, :]
    if PDL:
        gdc_wait()
    squares = tl.zeros([BM], tl.float32)
    wide = tl.arange(0, WIDE)
    for start in tl.static_range(0, H, WIDE):
        at = offs_m.to(tl.int64)[None, :] * H + (start + wide)[:, None]
        part = tl.load(hidden_ptr + at, mask=is_row[None, :] & (start + wide < H)[:, None], other=0.0).to(tl.float32)
        squares += tl.sum(part * part, 0)
    rstd = tl.rsqrt(squares / H + eps)[None, :]
    logits = tl.zeros([BE, BM], tl.float32)
    for start in range(0, H, BK):
        in_row = start + cols < H
        mask = is_row[None, :] & in_row[:, None]
        x = tl.load(x_ptrs + start, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(norm_ptr + start + cols, mask=in_row, other=0.0).to(tl.float32)
        normed = (x * rstd * scale[:, None]).to(normed_ptr.dtype.element_ty)
        w = tl.load(w_ptrs + start, mask=(offs_e < E)[:, None] & in_row[None, :], other=0.0)
        logits = tl.dot(w, normed, logits)
        if tile == 0:
            tl.store(normed_ptrs + start, normed, mask=mask)
    if BIAS:
        logits += tl.load(bias_ptr + offs_e, mask=offs_e < E, other=0.0).to(tl.float32)[:, None]
    logits_ptrs = logits_ptr + offs_m.to(tl.int64)[None, :] * E + offs_e[:, None]
    tl.store(logits_ptrs, logits, mask=is_row[None, :] & (offs_e < E)[:, None])
    _choose_last(
        logits_ptr, valid_ptr, weights_ptr, experts_ptr, arrivals_ptr + row_tile, offs_m, is_row, E, E_PAD, TOP_K,
        K_PAD, BM, NORMALIZE, VALID,
    )  # fmt: skip


@triton.jit
def one_row_route_kernel(
    hidden_ptr, norm_ptr, router_ptr, bias_ptr, valid_ptr, normed_ptr, logits_ptr, arrivals_ptr, weights_ptr,
    experts_ptr, eps,
    H: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr, BE: tl.constexpr,
    BK: tl.constexpr, NORMALIZE: tl.constexpr, BIAS: tl.constexpr, VALID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Do what `route_kernel` does, for one row."""
    if PDL:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    offs_e = tile * BE + tl.arange(0, BE)
    cols = tl.arange(0, BK)
    w_ptrs = router_ptr + offs_e[:, None] * H + cols[None, :]
    w = tl.load(w_ptrs, mask=(offs_e < E)[:, None] & (cols < H)[None, :], other=0.0)
    scale = tl.load(norm_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    squares = tl.zeros([BK], tl.float32)
    for start in tl.static_range(0, H, BK):
        x = tl.load(hidden_ptr + start + cols, mask=start + cols < H, other=0.0).to(tl.float32)
        squares += x * x
    rstd = tl.rsqrt(tl.sum(squares, 0) / H + eps)
    logits = tl.zeros([BE], tl.float32)
    for start in tl.static_range(0, H, BK):
        in_row = start + cols < H
        x = tl.load(hidden_ptr + start + cols, mask=in_row, other=0.0).to(tl.float32)
        normed = (x * rstd * scale).to(normed_ptr.dtype.element_ty)
        logits += tl.sum(w.to(tl.float32) * normed.to(tl.float32)[None, :], 1)
        if tile == 0:
            tl.store(normed_ptr + start + cols, normed, mask=in_row)
        if start + BK < H:
            in_row = start + BK + cols < H
            w = tl.load(w_ptrs + start + BK, mask=(offs_e < E)[:, None] & in_row[None, :], other=0.0)
            scale = tl.load(norm_ptr + start + BK + cols, mask=in_row, other=0.0).to(tl.float32)
    if BIAS:
        logits += tl.load(bias_ptr + offs_e, mask=offs_e < E, other=0.0).to(tl.float32)
    tl.store(logits_ptr + offs_e, logits, mask=offs_e < E)
    offs_m = tl.arange(0, 1)
    _choose_last(
        logits_ptr, valid_ptr, weights_ptr, experts_ptr, arrivals_ptr, offs_m, offs_m < 1, E, E_PAD, TOP_K, K_PAD, 1,
        NORMALIZE, VALID,
    )  # fmt: skip


@triton.jit
def _choose_last(
    logits_ptr, valid_ptr, weights_ptr, experts_ptr, arrival_ptr, offs_m, is_row,
    E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr, BM: tl.constexpr,
    NORMALIZE: tl.constexpr, VALID: tl.constexpr,
):  # fmt: skip
    """Choose the experts of rows offs_m [BM], in the last program of axis 0 to store its logits."""
    # all warps store before the arrival, which releases these stores and acquires the other programs' stores
    tl.debug_barrier()
    if tl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        experts = tl.arange(0, E_PAD)
        is_score = is_row[:, None] & (experts < E)[None, :]
        # .cg: other SMs wrote these, so an L1 line from an earlier launch would be stale
        scores = tl.load(
            logits_ptr + offs_m.to(tl.int64)[:, None] * E + experts[None, :],
            mask=is_score, other=float("-inf"), cache_modifier=".cg",
        )  # fmt: skip
        scores = tl.where(is_row[:, None], scores, 0.0)  # no -inf - -inf
        left = tl.exp(scores - tl.max(scores, 1)[:, None])
        left = tl.where((experts < E)[None, :], left / tl.sum(left, 1)[:, None], -1.0)
        choices = tl.arange(0, K_PAD)
        weights = tl.zeros([BM, K_PAD], tl.float32)
        chosen = tl.zeros([BM, K_PAD], tl.int32)
        for choice in tl.static_range(TOP_K):
            best, index = tl.max(left, 1, return_indices=True)
            index = tl.minimum(index, E - 1)  # of NaN scores it may be any
            is_choice = (choices == choice)[None, :]
            weights = tl.where(is_choice, best[:, None], weights)
            chosen = tl.where(is_choice, index[:, None].to(tl.int32), chosen)
            left = tl.where(experts[None, :] == index[:, None], -1.0, left)
        if NORMALIZE:
            weights /= tl.sum(weights, 1)[:, None]
        if VALID:
            valid = tl.load(valid_ptr + offs_m, mask=is_row, other=0) != 0
            chosen = tl.where(valid[:, None], chosen, -1)
        entries = offs_m[:, None] * TOP_K + choices[None, :]
        is_entry = is_row[:, None] & (choices < TOP_K)[None, :]
        tl.store(weights_ptr + entries, weights, mask=is_entry)
        tl.store(experts_ptr + entries, chosen, mask=is_entry)
        tl.store(arrival_ptr, 0)


@triton.jit
def one_row_gate_up_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, experts_ptr,
    N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute activation(W_gate x, W_up x) of one row x [K] for each chosen expert: out [TOP_K, N].

    weight is [E, 2 N, K], the gate first. Axis 0: BN columns; axis 1: choices.
    """
    if PDL:
        gdc_launch_dependents()
    offs_n = tl.program_id(0) * BN + tl.arange(0, BN)
    choice = tl.program_id(1)
    is_column = offs_n < N
    cols = tl.arange(0, BK)
    if PDL:
        gdc_wait()
    expert = tl.load(experts_ptr + choice).to(tl.int64)
    if expert < 0:
        return
    w_ptrs = weight_ptr + (expert * 2 * N + offs_n)[:, None] * K + cols[None, :]
    mask = is_column[:, None] & (cols < K)[None, :]
    gate = tl.load(w_ptrs, mask=mask, other=0.0)
    up = tl.load(w_ptrs + N * K, mask=mask, other=0.0)
    total = tl.zeros([BN], tl.float32)
    total_up = tl.zeros([BN], tl.float32)
    for start in tl.static_range(0, K, BK):
        x = tl.load(x_ptr + start + cols, mask=start + cols < K, other=0.0).to(tl.float32)[None, :]
        total += tl.sum(gate.to(tl.float32) * x, 1)
        total_up += tl.sum(up.to(tl.float32) * x, 1)
        if start + BK < K:
            mask = is_column[:, None] & (start + BK + cols < K)[None, :]
            gate = tl.load(w_ptrs + start + BK, mask=mask, other=0.0)
            up = tl.load(w_ptrs + N * K + start + BK, mask=mask, other=0.0)
    if BIAS:
        own_bias = bias_ptr + expert * 2 * N + offs_n
        total += tl.load(own_bias, mask=is_column, other=0.0).to(tl.float32)
        total_up += tl.load(own_bias + N, mask=is_column, other=0.0).to(tl.float32)
    gated = activate(total, total_up, LIMIT, ALPHA)
    tl.store(out_ptr + choice * N + offs_n, gated.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def one_row_down_kernel(
    x_ptr, weight_ptr, bias_ptr, hidden_ptr, weights_ptr, experts_ptr,
    TOP_K: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add the chosen experts' outputs W x times their weights to hidden [N]; x [TOP_K, K], weight [E, N, K]."""
    if PDL:
        gdc_launch_dependents()
    offs_n = tl.program_id(0) * BN + tl.arange(0, BN)
    is_column = offs_n < N
    cols = tl.arange(0, BK)
    if PDL:
        gdc_wait()
    if tl.load(experts_ptr) < 0:  # a row without experts
        return
    STEPS: tl.constexpr = (K + BK - 1) // BK
    expert = tl.load(experts_ptr).to(tl.int64)
    mask = is_column[:, None] & (cols < K)[None, :]
    w = tl.load(weight_ptr + (expert * N + offs_n)[:, None] * K + cols[None, :], mask=mask, other=0.0)
    out = tl.zeros([BN], tl.float32)
    total = tl.zeros([BN], tl.float32)
    for step in tl.static_range(TOP_K * STEPS):
        choice = step // STEPS
        start = step % STEPS * BK
        x = tl.load(x_ptr + choice * K + start + cols, mask=start + cols < K, other=0.0).to(tl.float32)[None, :]
        total += tl.sum(w.to(tl.float32) * x, 1)
        if step % STEPS == STEPS - 1:
            if BIAS:
                total += tl.load(bias_ptr + expert * N + offs_n, mask=is_column, other=0.0).to(tl.float32)
            out += tl.load(weights_ptr + choice) * total
            total = tl.zeros([BN], tl.float32)
        if step + 1 < TOP_K * STEPS:
            expert = tl.load(experts_ptr + (step + 1) // STEPS).to(tl.int64)
            k = (step + 1) % STEPS * BK + cols
            mask = is_column[:, None] & (k < K)[None, :]
            w = tl.load(weight_ptr + (expert * N + offs_n)[:, None] * K + k[None, :], mask=mask, other=0.0)
    target = hidden_ptr + offs_n
    out += tl.load(target, mask=is_column, other=0.0).to(tl.float32)
    tl.store(target, out.to(hidden_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def few_rows_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, experts_ptr, rows,
    TOP_K: tl.constexpr, K_PAD: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply up to BM rows by the matrices of their experts: out[entry] = W x.

    GATED: x is [rows, K], weight [E, 2 N, K] with the gate first, and the activation follows; else x is
    [rows * TOP_K, K] and weight [E, N, K]. Axis 1 counts entries: the first entry of an expert computes all of them.
    """
    if PDL:
        gdc_launch_dependents()
    entry = tl.program_id(1)
    offs_n = tl.program_id(0) * BN + tl.arange(0, BN)
    offs_m = tl.arange(0, BM)
    choices = tl.arange(0, K_PAD)
    if PDL:
        gdc_wait()
    expert = tl.load(experts_ptr + entry)
    if expert < 0:
        return
    index = offs_m[:, None] * TOP_K + choices[None, :]
    is_entry = (offs_m < rows)[:, None] & (choices < TOP_K)[None, :]
    own = (tl.load(experts_ptr + index, mask=is_entry, other=-1) == expert).to(tl.int32)
    if tl.sum(tl.sum(own * (index < entry).to(tl.int32), 1), 0) > 0:
        return
    is_row = tl.sum(own, 1) > 0
    entries = offs_m * TOP_K + tl.sum(own * choices[None, :], 1)
    cols = tl.arange(0, BK)
    is_column = (offs_n < N)[:, None]
    outputs = 2 * N if GATED else N
    w_ptrs = weight_ptr + (expert.to(tl.int64) * outputs + offs_n)[:, None] * K + cols[None, :]
    sources = offs_m if GATED else entries
    x_ptrs = x_ptr + sources.to(tl.int64)[None, :] * K + cols[:, None]
    total = tl.zeros([BN, BM], tl.float32)
    total_up = tl.zeros([BN, BM], tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        in_row = start + cols < K
        w = tl.load(w_ptrs + start, mask=is_column & in_row[None, :], other=0.0)
        x = tl.load(x_ptrs + start, mask=is_row[None, :] & in_row[:, None], other=0.0)
        total = tl.dot(w, x, total)
        if GATED:
            up = tl.load(w_ptrs + N * K + start, mask=is_column & in_row[None, :], other=0.0)
            total_up = tl.dot(up, x, total_up)
    if BIAS:
        own_bias = bias_ptr + expert * outputs + offs_n
        total += tl.load(own_bias, mask=offs_n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            total_up += tl.load(own_bias + N, mask=offs_n < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = activate(total, total_up, LIMIT, ALPHA)
    at = out_ptr + entries.to(tl.int64)[None, :] * N + offs_n[:, None]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & is_column)


@triton.jit
def add_outputs_kernel(
    x_ptr, weights_ptr, experts_ptr, hidden_ptr, TOP_K: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add each token's entries of x [tokens * TOP_K, H] times their weights to hidden [tokens, H].

    In float32 and in the order of choice. Entries without expert are not read; they count as 0.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(hidden_ptr + token * H + columns, mask=columns < H, other=0.0).to(tl.float32)
    for choice in range(TOP_K):
        entry = token * TOP_K + choice
        has_expert = tl.load(experts_ptr + entry) >= 0
        row = tl.load(x_ptr + entry * H + columns, mask=columns < tl.where(has_expert, H, 0), other=0.0)
        total += tl.where(has_expert, tl.load(weights_ptr + entry), 0.0) * row.to(tl.float32)
    tl.store(hidden_ptr + token * H + columns, total.to(hidden_ptr.dtype.element_ty), mask=columns < H)

"""Device code of a decode step around its layers: embedding, norms, greedy sampling and the next step's inputs.

Each kernel is one launch over the rows of the batch, with programmatic dependent launch as in
small_batch_gemm_kernels.py. A row's slot indexes its token, position and page table; slot 0 is padding. Imports triton
at the top: for CUDA (or Triton's interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.row_kernels import activate


@triton.jit
def embed_kernel(
    slots_ptr, last_tokens_ptr, table_ptr, out_ptr, first_token, num_tokens,
    H: tl.constexpr, HP: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr, SCALE: tl.constexpr = 1.0,
):  # fmt: skip
    """Look up each row's newest token in the embedding table [num_tokens, H]; HP is the next power of two of H.

    SCALE: a factor of the embeddings.

    SPLIT: the table holds the tokens from `first_token` on; any other token gives a row of zeros.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, HP)
    token = tl.load(last_tokens_ptr + tl.load(slots_ptr + row))
    mask = cols < H
    if SPLIT:
        token -= first_token
        mask = mask & (token >= 0) & (token < num_tokens)
    values = tl.load(table_ptr + token * H + cols, mask=mask, other=0.0)
    if SCALE != 1.0:
        values = (values.to(tl.float32) * SCALE).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * H + cols, values, mask=cols < H)


@triton.jit
def norm_kernel(x_ptr, norm_ptr, out_ptr, eps, H: tl.constexpr, HP: tl.constexpr, PDL: tl.constexpr):
    """RMSNorm of row `program_id` of x [M, H]; HP is the next power of two of H."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, HP)
    weight = tl.load(norm_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + row * H + cols, mask=cols < H, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    tl.store(out_ptr + row * H + cols, (x * rstd * weight).to(out_ptr.dtype.element_ty), mask=cols < H)


@triton.jit
def gate_kernel(
    x_ptr, out_ptr, W: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, ACT: tl.constexpr = "silu",
    GATED: tl.constexpr = True,
):  # fmt: skip
    """Compute act(gate) * up of rows [gate | up]: x [M, 2 W] -> out [M, W]; not GATED: act(x) of x [M, W]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    NUM_PARTS: tl.constexpr = 2 if GATED else 1
    y = activate(tl.load(x_ptr + row * NUM_PARTS * W + cols, mask=cols < W, other=0.0).to(tl.float32), ACT)
    if GATED:
        y *= tl.load(x_ptr + row * 2 * W + W + cols, mask=cols < W, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * W + cols, y.to(out_ptr.dtype.element_ty), mask=cols < W)


@triton.jit
def best_kernel(x_ptr, best_ptr, best_at_ptr, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Find the maximum of each BLOCK columns of x [M, N] and its column, for choose_kernel; a NaN counts as +inf."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    cols = tile * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x_ptr + row * N + cols, mask=cols < N, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("inf"))
    best, index = tl.max(value, 0, return_indices=True)
    tl.store(best_ptr + row * tl.num_programs(0) + tile, best)
    tl.store(best_at_ptr + row * tl.num_programs(0) + tile, tile * BLOCK + index)


@triton.jit
def choose_kernel(
    best_ptr, best_at_ptr, slots_ptr, positions_ptr, last_tokens_ptr, next_ptr, tiles,
    BLOCK: tl.constexpr, ADVANCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the greedy token of each row from its tiles' maxima, and write the row's inputs of the next step.

    best float32 and best_at int32 are [M, tiles]; ties go to the first. next int64 [M] is -1 if the maximum is not
    finite; last_tokens then gets 0, a token that the next step can embed. Padding rows (slot 0) do not advance.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    best = float("-inf")
    best_tile = 0
    for start in range(0, tiles, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        values = tl.load(best_ptr + row * tiles + cols, mask=cols < tiles, other=float("-inf"))
        value, index = tl.max(values, 0, return_indices=True)
        best_tile = tl.where(value > best, start + index, best_tile)
        best = tl.maximum(best, value)
    token = tl.load(best_at_ptr + row * tiles + best_tile).to(tl.int64)
    finite = (best < float("inf")) & (best > float("-inf"))
    tl.store(next_ptr + row, tl.where(finite, token, -1))
    slot = tl.load(slots_ptr + row)
    if slot > 0:
        tl.store(last_tokens_ptr + slot, tl.where(finite, token, 0))
        if ADVANCE:
            tl.store(positions_ptr + row, tl.load(positions_ptr + row) + 1)

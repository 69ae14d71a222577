"""Device code of kernels over rows between the GEMMs of a layer: residual additions, norms, and norms of q and k.

Launched with PDL as in small_batch_gemm_kernels.py. Imports triton at the top: for CUDA (or Triton's interpreter) only.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def activate(x, ACT: tl.constexpr):
    """Return the activation of x float32, by its name in engine/layers/activation.py."""
    if ACT == "silu":
        return x * tl.sigmoid(x)
    elif ACT == "gelu_pytorch_tanh":  # 1 + tanh(u) is 2 sigmoid(2 u)
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "relu":
        return tl.where(x < 0.0, 0.0, x)
    else:
        tl.static_assert(ACT == "relu2")
        positive = tl.where(x < 0.0, 0.0, x)
        return positive * positive


@triton.jit
def bound(x, SOFTCAP: tl.constexpr):
    """Return SOFTCAP * tanh(x / SOFTCAP) of x float32."""
    return SOFTCAP * (2.0 * tl.sigmoid(x * (2.0 / SOFTCAP)) - 1.0)


@triton.jit
def _norm(
    x, mask, weight, bias, eps,
    H: tl.constexpr, CENTRED: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Return the RMSNorm, or if CENTRED the LayerNorm, of a row x float32 of H elements; masked elements are 0.

    OFFSET is added to the weight.
    """
    if CENTRED:
        x = tl.where(mask, x - tl.sum(x, 0) / H, 0.0)
    return x * tl.rsqrt(tl.sum(x * x, 0) / H + eps) * (weight + OFFSET) + bias


@triton.jit
def add_norm_kernel(
    x_ptr, hidden_ptr, out_weight_ptr, out_bias_ptr, weight_ptr, bias_ptr, normed_ptr, scale, eps,
    H: tl.constexpr, HP: tl.constexpr, ADD: tl.constexpr, OUT_NORM: tl.constexpr, NORM: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, CENTRED: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Row `program_id`: hidden += scale * norm(x), then normed = norm(hidden); each [M, H]. HP: next power of 2 of H.

    ADD: x is added. OUT_NORM: with a norm. NORM: the second norm is written. The norms are RMSNorms, or LayerNorms if
    CENTRED, with weights if WEIGHT, to which OFFSET is added, and biases if BIAS.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, HP)
    mask = cols < H
    weight = 1.0
    out_weight = 1.0
    bias = 0.0
    out_bias = 0.0
    if WEIGHT and NORM:
        weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if WEIGHT and OUT_NORM:
        out_weight = tl.load(out_weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if BIAS and NORM:
        bias = tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if BIAS and OUT_NORM:
        out_bias = tl.load(out_bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    hidden = tl.load(hidden_ptr + row * H + cols, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x = tl.load(x_ptr + row * H + cols, mask=mask, other=0.0).to(tl.float32)
        if OUT_NORM:
            x = _norm(x, mask, out_weight, out_bias, eps, H, CENTRED, OFFSET)
        rounded = (hidden + scale * x).to(hidden_ptr.dtype.element_ty)
        tl.store(hidden_ptr + row * H + cols, rounded, mask=mask)
        hidden = tl.where(mask, rounded.to(tl.float32), 0.0)
    if NORM:
        normed = _norm(hidden, mask, weight, bias, eps, H, CENTRED, OFFSET)
        tl.store(normed_ptr + row * H + cols, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _change_heads(
    rows, heads, weight_ptr, eps,
    COUNT: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
    CLIP: tl.constexpr,
):  # fmt: skip
    """Norm and clamp COUNT heads in place; `rows` [heads, 1]: the address of each head's first element."""
    dims = tl.arange(0, DIM_PAD)[None, :]
    mask = (heads < COUNT) & (dims < DIM)
    x = tl.load(rows + dims, mask=mask, other=0.0).to(tl.float32)
    if KIND == "all_heads":
        weight = tl.load(weight_ptr + heads * DIM + dims, mask=mask, other=0.0).to(tl.float32)
        x *= tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) / (COUNT * DIM) + eps) * weight
    elif KIND == "layer":
        weight = tl.load(weight_ptr + heads * DIM + dims, mask=mask, other=0.0).to(tl.float32)
        x = tl.where(mask, x - tl.sum(x, 1)[:, None] / DIM, 0.0)
        x *= tl.rsqrt(tl.sum(x * x, 1)[:, None] / DIM + eps) * weight
    elif KIND == "head":
        weight = tl.load(weight_ptr + dims, mask=dims < DIM, other=0.0).to(tl.float32) + OFFSET
        x *= tl.rsqrt(tl.sum(x * x, 1)[:, None] / DIM + eps) * weight
    if CLIP > 0:  # NaN stays NaN
        x = tl.where(x > CLIP, CLIP, tl.where(x < -CLIP, -CLIP, x))
    tl.store(rows + dims, x.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def qkv_kernel(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, eps, token_stride, q_group, q_head, kv_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, Q_HEADS_PAD: tl.constexpr, KV_HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, CLIP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Norm the heads of q or k of a token in place, and clamp q, k or v to ±CLIP; 0: no clamp.

    q [T, KV_HEADS, GROUP, DIM], k and v [T, KV_HEADS, DIM], each with token stride `token_stride`. KIND: "head",
    "all_heads", "layer" (see ModelConfig.qk_norm_kind) or "none".
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64) * token_stride
    part = tl.program_id(1)
    if part == 0:
        heads = tl.arange(0, Q_HEADS_PAD)[:, None]
        q_rows = q_ptr + token + (heads // GROUP) * q_group + (heads % GROUP) * q_head
        _change_heads(q_rows, heads, q_weight_ptr, eps, KV_HEADS * GROUP, DIM, DIM_PAD, KIND, OFFSET, CLIP)
    else:
        kv_heads = tl.arange(0, KV_HEADS_PAD)[:, None]
        if part == 1:
            k_rows = k_ptr + token + kv_heads * kv_head
            _change_heads(k_rows, kv_heads, k_weight_ptr, eps, KV_HEADS, DIM, DIM_PAD, KIND, OFFSET, CLIP)
        else:
            v_rows = v_ptr + token + kv_heads * kv_head
            _change_heads(v_rows, kv_heads, v_ptr, eps, KV_HEADS, DIM, DIM_PAD, "none", OFFSET, CLIP)


@triton.jit
def logits_kernel(
    x_ptr, N: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Scale logits x [M, N] in place by SCALE, then bound them by SOFTCAP; 0: unbounded."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = x_ptr + tl.program_id(0).to(tl.int64) * N + cols
    x = tl.load(target, mask=cols < N, other=0.0).to(tl.float32) * SCALE
    if SOFTCAP > 0:
        x = bound(x, SOFTCAP)
    tl.store(target, x.to(x_ptr.dtype.element_ty), mask=cols < N)

"""Launches over rows between the GEMMs of a layer: residual additions with norms, and norms of q and k.

For layers whose norms, factors or order of parts no GEMM fuses. Device code: row_kernels.py. Grids depend only on
shapes and there is no host read: safe to capture. Imports triton: import this module only on CUDA (or under
TRITON_INTERPRET=1).
"""

from __future__ import annotations

from torch import Tensor

from engine.kernels.launch import launch_options, next_power_of_2, overlaps
from engine.kernels.norm_weights import NormKind, NormWeights
from engine.kernels.row_kernels import add_norm_kernel, qkv_kernel


def add_norm(
    hidden: Tensor,
    kind: NormKind,
    *,
    x: Tensor | None = None,
    out_norm: NormWeights | None = None,
    scale: float = 1.0,
    norm: NormWeights | None = None,
    normed: Tensor | None = None,
) -> None:
    """Compute hidden += scale * out_norm(x), then write norm(hidden) to `normed`; all contiguous [T, h]. One launch.

    x None: hidden stays as it is. out_norm None: x is added without a norm. norm None: `normed` is not written.
    Computes in float32 and rounds hidden before its norm.
    """
    (rows, width), pdl = hidden.shape, overlaps(hidden)
    norms = [one for one in (out_norm, norm) if one is not None]

    def pointer(one: NormWeights | None, name: str) -> Tensor:
        tensor = None if one is None else getattr(one, name)
        return hidden if tensor is None else tensor

    add_norm_kernel[(rows,)](
        hidden if x is None else x,
        hidden,
        pointer(out_norm, "weight"),
        pointer(out_norm, "bias"),
        pointer(norm, "weight"),
        pointer(norm, "bias"),
        hidden if normed is None else normed,
        scale,
        kind.eps,
        H=width,
        HP=next_power_of_2(width),
        ADD=x is not None,
        OUT_NORM=out_norm is not None,
        NORM=norm is not None,
        WEIGHT=any(one.weight is not None for one in norms),
        BIAS=any(one.bias is not None for one in norms),
        CENTRED=kind.centred,
        OFFSET=kind.offset,
        PDL=pdl,
        num_warps=4 if width <= 2048 else 8 if width <= 8192 else 16,
        **launch_options(pdl),
    )


def change_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kind: str = "none",
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    clip: float | None = None,
) -> None:
    """Norm the heads of q [T, KV, H/KV, D] and k [T, KV, D] in place, then clamp q, k and v [T, KV, D]. One launch.

    q, k and v are views of one projection. `kind`: of the norm, see ModelConfig.qk_norm_kind; "none": no norm. q_norm
    and k_norm are its weights, [D] or one row per head; `offset` is added to weights [D]. `clip` None: no clamp.
    """
    (tokens, kv_heads, group, dim), pdl = q.shape, overlaps(q)
    qkv_kernel[(tokens, 2 if clip is None else 3)](
        q,
        k,
        v,
        q if q_norm is None else q_norm,
        k if k_norm is None else k_norm,
        eps,
        *q.stride()[:3],
        k.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        Q_HEADS_PAD=next_power_of_2(kv_heads * group),
        KV_HEADS_PAD=next_power_of_2(kv_heads),
        DIM=dim,
        DIM_PAD=next_power_of_2(dim),
        KIND=kind,
        OFFSET=offset,
        CLIP=clip or 0.0,
        PDL=pdl,
        num_warps=4 if kv_heads * group * dim <= 4096 else 8,
        **launch_options(pdl),
    )

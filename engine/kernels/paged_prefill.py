"""Varlen prefill attention over a paged KV cache on CUDA, written in Triton.

Holds the launches and their checks. Device code: paged_prefill_kernels.py. Kernels read the varlen layout, lengths and
page tables from device memory and grids depend only on shapes, so a captured graph serves any layout of its size.
Imports triton: import this module only on CUDA (or under TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.launch import cdiv, next_power_of_2
from engine.kernels.paged_decode import _LOG2_E, FP8_PAGES, NormRope, by_kv_head, check_sinks, check_window
from engine.kernels.paged_prefill_kernels import append_kernel, norm_rope_kernel, prefill_kernel

FULL_DEVICE_PROGRAMS = 256
"""With this many programs any device is full, so each may use the large tile."""


class Tile(NamedTuple):
    """Queries of one program: `rows` in total; each token contributes `pack` query heads that share a KV head.

    `block_keys` is the number of keys per loop iteration.
    """

    rows: int
    pack: int
    warps: int
    stages: int
    block_keys: int = 64


def choose_tile(tokens: int, heads: int, group: int, dim: int, itemsize: int = 2) -> Tile:
    """Return the tile for elements of `itemsize` bytes; depends only on shapes.

    Packed heads load their keys once, and a tile of fewer tokens wastes less work above the diagonal. Tiles of large
    heads have fewer keys, so that accumulators stay in registers. Float32 has no exact tensor core instruction: small
    tiles keep its unrolled multiplications in registers. All tiles fit `SHARED_BYTES` with heads of up to 256.
    """
    pack = min(group & -group, 4)
    if itemsize > 2:
        return Tile(32, pack, 8, 2, 16)
    stages, block_keys = (3, 64) if dim <= 128 else (2, 32)
    large = heads // pack * cdiv(tokens, 128 // pack) >= FULL_DEVICE_PROGRAMS
    return Tile(128, pack, 8, stages, block_keys) if large else Tile(64, pack, 4, stages, block_keys)


class VarlenLayout(NamedTuple):
    """Layout of T tokens in C chunks. All tensors are int64 on the device.

    - positions [T]: each token's position in its sequence.
    - token_slots [T]: the page-table row of each token's sequence; 0 for padding tokens.
    - ends [C]: cumulative token count up to the end of each chunk. An empty chunk has no tokens.
    - starts [C]: number of tokens of the sequence before each chunk.
    - slots [C]: the page-table row of each chunk.
    """

    positions: Tensor
    token_slots: Tensor
    ends: Tensor
    starts: Tensor
    slots: Tensor


def norm_rope_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    layout: VarlenLayout,
    norm_rope: NormRope,
) -> None:
    """Norm and rotate raw queries q [T, KV, H/KV, D] in place, and append keys and values [T, KV, D] to their pages.

    Keys are normed and rotated on the way to the cache; `k` itself is not modified. q, k and v are views of one
    projection. Caches are [pages, page_size, KV, D]. One launch, no host read.
    """
    _, page_size, kv_heads, dim = k_cache.shape
    tokens, group = len(q), q.shape[2]
    if q.shape != (tokens, kv_heads, group, dim) or k.shape != (tokens, kv_heads, dim) or v.shape != k.shape:
        raise ValueError(
            f"q must be [T, {kv_heads}, H/{kv_heads}, {dim}], k and v must be [T, {kv_heads}, {dim}]; "
            f"found {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not q.stride(0) == k.stride(0) == v.stride(0) or k.stride() != v.stride() or q.stride(-1) != 1:
        raise ValueError(
            "q, k and v must be views of one projection with a dense last dimension; found strides "
            f"{q.stride()}, {k.stride()} and {v.stride()}"
        )
    norm_rope_kernel[(tokens,)](
        q, k, v, k_cache, v_cache, page_table, layout.token_slots, layout.positions,
        q if norm_rope.q_norm is None else norm_rope.q_norm, k if norm_rope.k_norm is None else norm_rope.k_norm,
        q if norm_rope.cos is None else norm_rope.cos, q if norm_rope.sin is None else norm_rope.sin, norm_rope.eps,
        *q.stride()[:3], k.stride(1), *k_cache.stride()[:3], page_table.stride(0),
        KV_HEADS=kv_heads, GROUP=group, Q_HEADS_PAD=next_power_of_2(kv_heads * group),
        KV_HEADS_PAD=next_power_of_2(kv_heads), DIM=dim, DIM_PAD=next_power_of_2(dim), PAGE=page_size,
        NORM=norm_rope.norm_mode, ROPE=norm_rope.rotated, INTERLEAVED=norm_rope.interleaved, num_warps=4,
    )  # fmt: skip


def append_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, rows: Tensor, positions: Tensor
) -> None:
    """Write keys and values k, v [T, KV, D] to their pages: token t to `positions[t]` of page-table row `rows[t]`.

    k and v are as attention reads them, normed and rotated; their rows may be strided. Caches are
    [pages, page_size, KV, D], page_table [rows, P], rows and positions [T]. Row 0 marks padding tokens, which write
    nothing. One launch, no host read. Raises ValueError if shapes do not match.
    """
    tokens, (_, page_size, kv_heads, dim) = len(k), k_cache.shape
    if k.shape != (tokens, kv_heads, dim) or v.shape != k.shape or not k.stride(-1) == v.stride(-1) == 1:
        raise ValueError(
            f"k and v must be [T, {kv_heads}, {dim}] with a dense last dimension, found {tuple(k.shape)} and "
            f"{tuple(v.shape)} with strides {k.stride()} and {v.stride()}"
        )
    if v_cache.shape != k_cache.shape or v_cache.stride() != k_cache.stride() or k_cache.stride(-1) != 1:
        raise ValueError(
            f"v_cache must match k_cache in shape and strides, found {tuple(v_cache.shape)} and {tuple(k_cache.shape)}"
        )
    if rows.shape != (tokens,) or positions.shape != (tokens,):
        raise ValueError(
            f"rows and positions must be [{tokens}], found {tuple(rows.shape)} and {tuple(positions.shape)}"
        )
    append_kernel[(tokens,)](
        k, v, k_cache, v_cache, page_table, rows, positions, *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3],
        page_table.stride(0),
        HEADS=kv_heads, HEADS_PAD=next_power_of_2(kv_heads), DIM=dim, DIM_PAD=next_power_of_2(dim),
        PAGE=page_size, num_warps=4,
    )  # fmt: skip


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    layout: VarlenLayout,
    scale: float,
    out: Tensor,
    tile: Tile | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Write causal attention of rotated queries q [T, H, D] over their sequences' pages to out [T, H * D].

    q may also be [T, KV, H/KV, D], if the query groups are strided; its dtype is that of the caches, or they are in
    fp8. Float32 is computed in float32, without TF32.

    A query at position p reads keys 0..p from the pages, which must already hold its chunk's own keys. With a
    `window` it reads keys p - window + 1..p: earlier pages are not read, their page-table entries may be 0.

    `sinks`: contiguous [H], one more score per query head in the softmax, with a value of 0. `softcap`: scores are
    softcap * tanh(scores / softcap); None: unbounded.

    Rows of padding tokens are not written. Returns `out`. One launch with a grid fixed by T and C; no host read.
    Raises ValueError if shapes, dtypes or the window are not as described.
    """
    _, page_size, kv_heads, dim = k_cache.shape
    q = by_kv_head(q, kv_heads)
    tokens, group = len(q), q.shape[2]
    heads = kv_heads * group
    check_window(window)
    check_sinks(sinks, heads)
    if k_cache.dtype not in (q.dtype, *FP8_PAGES) or v_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"q and the caches must have one dtype, or the caches be fp8; found {q.dtype}, {k_cache.dtype} and "
            f"{v_cache.dtype}"
        )
    if out.shape != (tokens, heads * dim) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous [{tokens}, {heads * dim}], found {tuple(out.shape)}")
    chunks = len(layout.ends)
    tile = tile or choose_tile(tokens, heads, group, dim, q.element_size())
    # the last tile of a chunk may be partial: at most one extra tile per chunk
    tiles = cdiv(tokens, tile.rows // tile.pack) + chunks
    prefill_kernel[(heads // tile.pack, tiles)](
        q, k_cache, v_cache, page_table, layout.ends, layout.starts, layout.slots, out, q if sinks is None else sinks,
        chunks, scale * _LOG2_E,
        *q.stride()[:3], *k_cache.stride()[:3], page_table.stride(0),
        HEADS=heads, GROUP=group, PACKED_HEADS=tile.pack, DIM=dim, DIM_PAD=max(16, next_power_of_2(dim)),
        PAGE=page_size, CHUNKS_PAD=next_power_of_2(chunks), ROWS=tile.rows, BLOCK=tile.block_keys,
        WINDOW=window or 0, SINKS=sinks is not None, SOFTCAP=(softcap or 0.0) * _LOG2_E,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",  # 16-bit products ignore it
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out

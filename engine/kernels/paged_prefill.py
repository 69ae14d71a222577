"""Prefill attention over pages on CUDA, in Triton: chunks of prompts packed one after the other.

Owns the launches and their checks; device code: triton_prefill_kernels.py. Packing, lengths and page tables are read
from device memory and grids depend on shapes alone, so a captured graph serves any packing of its size. Imports
triton: import it only where the device is CUDA (or under TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from engine.kernels.paged_decode import _LOG2_E, NormRope
from engine.kernels.paged_prefill_kernels import norm_rope_kernel, prefill_kernel

BLOCK_KEYS = 64
"""Keys of one step of a program."""

FULL_DEVICE_PROGRAMS = 256
"""Programs from which any device is full, so that each may be large."""


class Tile(NamedTuple):
    """The queries of one program: `rows` in all, in groups of `pack` heads of one token that share a KV head."""

    rows: int
    pack: int
    warps: int
    stages: int


def choose_tile(tokens: int, heads: int, group: int, dim: int) -> Tile:
    """By shapes alone. Packed heads read their keys once, and a tile of fewer tokens has less above the diagonal."""
    pack = min(group & -group, 4)
    stages = 3 if dim <= 128 else 2
    large = heads // pack * triton.cdiv(tokens, 128 // pack) >= FULL_DEVICE_PROGRAMS
    return Tile(128, pack, 8, stages) if large else Tile(64, pack, 4, stages)


class VarlenLayout(NamedTuple):
    """How T tokens make C chunks; all int64 on the device. Padding tokens have slot 0, empty chunks no tokens.

    positions, token_slots [T]: each token's place in its sequence, and the row of the page table that is its
    sequence's. ends [C]: the count of tokens up to the end of each chunk. starts [C]: how many tokens of its sequence
    come before each chunk. slots [C]: the page-table row of each chunk.
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
    """Norm and rotate raw queries q [T, KV, H/KV, D] in place; keys k [T, KV, D], so treated, and values v go to their
    pages.

    All three are views of one projection. Caches are [pages, page_size, KV, D]. `k` stays raw. One launch, no host
    read.
    """
    _, page_size, kv_heads, dim = k_cache.shape
    tokens, group = len(q), q.shape[2]
    if q.shape != (tokens, kv_heads, group, dim) or k.shape != (tokens, kv_heads, dim) or v.shape != k.shape:
        raise ValueError(
            f"q, k and v must be [T, {kv_heads}, H/{kv_heads}, {dim}] and twice [T, {kv_heads}, {dim}], "
            f"found {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if not q.stride(0) == k.stride(0) == v.stride(0) or k.stride() != v.stride() or q.stride(-1) != 1:
        raise ValueError(
            "q, k and v must be views of one projection, their last dimension dense; found strides "
            f"{q.stride()}, {k.stride()} and {v.stride()}"
        )
    norm_rope_kernel[(tokens,)](
        q, k, v, k_cache, v_cache, page_table, layout.token_slots, layout.positions,
        q if norm_rope.q_norm is None else norm_rope.q_norm, k if norm_rope.k_norm is None else norm_rope.k_norm,
        norm_rope.cos, norm_rope.sin, norm_rope.eps, *q.stride()[:3], k.stride(1), *k_cache.stride()[:3],
        page_table.stride(0),
        KV_HEADS=kv_heads, GROUP=group, Q_HEADS_PAD=triton.next_power_of_2(kv_heads * group),
        KV_HEADS_PAD=triton.next_power_of_2(kv_heads), DIM=dim, DIM_PAD=triton.next_power_of_2(dim), PAGE=page_size,
        NORM=norm_rope.q_norm is not None, num_warps=4,
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
) -> Tensor:
    """out [T, H * D] = causal attention of the (rotated) queries q [T, KV, H/KV, D] over their sequences' pages.

    A query at position p of its sequence reads keys 0..p from the pages, its own chunk's included, which must be there.
    Rows of padding tokens are not written. One launch, its grid fixed by T and C; no host read.
    """
    _, page_size, kv_heads, dim = k_cache.shape
    tokens, group = len(q), q.shape[2]
    heads = kv_heads * group
    if out.shape != (tokens, heads * dim) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous [{tokens}, {heads * dim}], found {tuple(out.shape)}")
    chunks = len(layout.ends)
    tile = tile or choose_tile(tokens, heads, group, dim)
    # a chunk ends in a part of a tile: one more tile each at most
    tiles = triton.cdiv(tokens, tile.rows // tile.pack) + chunks
    prefill_kernel[(heads // tile.pack, tiles)](
        q, k_cache, v_cache, page_table, layout.ends, layout.starts, layout.slots, out, chunks, scale * _LOG2_E,
        *q.stride()[:3], *k_cache.stride()[:3], page_table.stride(0),
        HEADS=heads, GROUP=group, PACKED_HEADS=tile.pack, DIM=dim, DIM_PAD=max(16, triton.next_power_of_2(dim)),
        PAGE=page_size, CHUNKS_PAD=triton.next_power_of_2(chunks), ROWS=tile.rows, BLOCK=BLOCK_KEYS,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out

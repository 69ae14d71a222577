"""Prefill attention for Hopper GPUs: the launches of hopper_prefill_kernels.py and their checks.

Two launches: a list of tiles once per step, and attention once per layer. Both read the varlen layout from device
memory and their grids depend only on shapes, so a captured graph serves any layout of its size. Imports triton: import
this module only on CUDA.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.kernels.hopper_prefill_kernels import BLOCK, ROWS, hopper_prefill_kernel, tile_list_kernel
from engine.kernels.launch import cdiv, next_power_of_2
from engine.kernels.paged_decode import _LOG2_E, by_kv_head, check_sinks, check_window
from engine.kernels.paged_prefill import VarlenLayout

BOX = 64
"""Elements of a row of a TMA box: 128 bytes, the widest swizzle."""

STAGES = 2
"""Blocks of keys, and of values, in shared memory."""

LIST_STEP = 16
"""Tiles that one program adds to the list."""

MIN_CHUNKS = 256
"""Chunks that the smallest specialisation of tile_list_kernel has room for: nearly all steps share it."""


def pack_of(group: int) -> int:
    """Return how many heads of a group of `group` query heads share a tile."""
    return min(group & -group, 4)


def tile_list(layout: VarlenLayout, tokens: int, group: int) -> Tensor:
    """Return the tiles of a step of `tokens` tokens as int32, for `hopper_prefill` with `group` heads per KV head."""
    chunks, tokens_each = len(layout.ends), 2 * ROWS // pack_of(group)
    max_tiles = cdiv(tokens, tokens_each) + chunks
    tiles = torch.empty(4 * max_tiles + 1, dtype=torch.int32, device=layout.ends.device)
    tile_list_kernel[(cdiv(max_tiles, LIST_STEP),)](
        layout.ends, layout.starts, layout.slots, tiles, chunks, max_tiles,
        TOKENS=tokens_each, CHUNKS_PAD=next_power_of_2(max(chunks, MIN_CHUNKS)), STEP=LIST_STEP, num_warps=4,
    )  # fmt: skip
    return tiles


def hopper_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    tiles: Tensor,
    scale: float,
    out: Tensor,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write causal attention of rotated queries q [T, H, D] over their sequences' pages to out [T, H * D].

    As `paged_prefill` without a soft-cap, for the chunks of `tiles`, see `tile_list`. Caches are contiguous
    [pages, page_size, KV, D]. They must be finite from the first page that a query sees to the end of each sequence's
    last page: append_kv and norm_rope_append zero what follows the newest token.
    """
    check_window(window)
    pages, page_size, kv_heads, dim = k_cache.shape
    q = by_kv_head(q, kv_heads)
    tokens, group = len(q), q.shape[2]
    heads, pack = kv_heads * group, pack_of(group)
    if q.dtype != k_cache.dtype or v_cache.dtype != k_cache.dtype:
        raise ValueError(f"q and the caches must have one dtype, found {q.dtype}, {k_cache.dtype} and {v_cache.dtype}")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and q.stride(-1) == 1):
        raise ValueError("the caches must be contiguous, and q dense in its last dimension")
    if out.shape != (tokens, heads * dim) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous [{tokens}, {heads * dim}], found {tuple(out.shape)}")
    head_stride = q.stride(2) if group > 1 else q.stride(1)
    if q.stride(1) % head_stride or q.stride(0) * q.element_size() % 16 or q.data_ptr() % 16:
        raise ValueError(f"q's strides must be multiples of its head stride and of 16 bytes, found {q.stride()}")
    check_sinks(sinks, heads)
    max_tiles = (len(tiles) - 1) // 4
    groups = heads // pack
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    hopper_prefill_kernel[(min(programs, max_tiles * groups),)](
        _query_boxes(q, pack, head_stride), _boxes(k_cache), _boxes(v_cache), out, page_table, tiles,
        out if sinks is None else sinks, max_tiles, page_table.stride(0), q.stride(1) // head_stride, window or 0,
        scale * _LOG2_E,
        GROUPS=groups, PER_HEAD=group // pack, HEADS=heads, DIM=dim, PAGE=page_size, PACK=pack, ROWS=ROWS, BLOCK=BLOCK,
        STAGES=STAGES, WINDOWED=window is not None, SINKS=sinks is not None, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return out


def _boxes(cache: Tensor) -> Any:
    """Return a TMA descriptor of a cache as [pages * page_size, KV * D], in boxes of one page and BOX elements."""
    pages, page_size, kv_heads, dim = cache.shape
    layout = gl.NVMMASharedLayout.get_default_for([page_size, BOX], getattr(gl, str(cache.dtype).split(".")[1]))
    return TensorDescriptor(cache, [pages * page_size, kv_heads * dim], [kv_heads * dim, 1], [page_size, BOX], layout)


def _query_boxes(q: Tensor, pack: int, head_stride: int) -> Any:
    """Return a TMA descriptor of q [T, KV, H/KV, D] as [T, heads, D], in boxes of ROWS / pack tokens and pack heads.

    Between the query heads of two KV heads there may be heads of keys and values.
    """
    tokens, kv_heads, group, dim = q.shape
    heads = (kv_heads - 1) * (q.stride(1) // head_stride) + group
    block = [ROWS // pack, pack, BOX]
    layout = gl.NVMMASharedLayout.get_default_for(block, getattr(gl, str(q.dtype).split(".")[1]))
    return TensorDescriptor(q, [tokens, heads, dim], [q.stride(0), head_stride, 1], block, layout)


def error_beside_torch(
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    sinks: bool = False,
) -> float:
    """Compute a small step on the current GPU and return its relative error, the norm beside float64 attention.

    The chunks have tiles of every kind: full and partial, with one and several blocks, that mask one block and several.
    A correct result has an error of about 2e-3 in bfloat16.
    """
    chunks = [(0, 40), (128, 24), (300, 200), (77, 150), (1, 1), (500, 300)]
    pages_each = -(-max(start + length for start, length in chunks) // page_size)
    generator = torch.Generator("cuda").manual_seed(0)
    draw = partial(torch.randn, generator=generator, device="cuda", dtype=dtype)
    shape = (len(chunks) * pages_each + 1, page_size, kv_heads, dim)
    k_cache, v_cache = draw(shape), draw(shape)
    table = torch.zeros(len(chunks) + 1, pages_each, dtype=torch.int64, device="cuda")
    order = torch.randperm(len(chunks) * pages_each, generator=generator, device="cuda")
    table[1:] = 1 + order.view(len(chunks), pages_each)
    ends = torch.tensor([length for _, length in chunks]).cumsum(0)
    starts, rows = torch.tensor([start for start, _ in chunks]), torch.arange(1, len(chunks) + 1)
    tokens = int(ends[-1])
    unused = torch.empty(0)
    layout = VarlenLayout(unused, unused, ends.cuda(), starts.cuda(), rows.cuda())
    q, out = draw(tokens, heads, dim), torch.empty(tokens, heads * dim, device="cuda", dtype=dtype)
    sink_scores = draw(heads) if sinks else None
    tiles = tile_list(layout, tokens, heads // kv_heads)
    hopper_prefill(q, k_cache, v_cache, table, tiles, dim**-0.5, out, window=window, sinks=sink_scores)
    wanted = []
    for row, ((start, length), part) in enumerate(
        zip(chunks, q.split([length for _, length in chunks]), strict=True), 1
    ):
        k, v = (cache[table[row]].flatten(0, 1)[: start + length].double() for cache in (k_cache, v_cache))
        k, v = (part.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for part in (k, v))
        scores = part.transpose(0, 1).double() @ k.transpose(1, 2) * dim**-0.5
        hidden = torch.full_like(scores, float("-inf"))
        scores += hidden.triu(start + 1)
        if window is not None:
            scores += hidden.tril(start - window)
        if sink_scores is not None:
            scores = torch.cat([scores, sink_scores.double()[:, None, None].expand(-1, length, 1)], 2)
            v = torch.cat([v, torch.zeros_like(v[:, :1])], 1)
        wanted.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    expected = torch.cat(wanted)
    return float((out.double() - expected).norm() / expected.norm())

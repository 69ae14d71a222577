"""Attention over the paged KV cache: one decode step, or one step of prefill chunks.

Computes from page numbers where each token's keys and values are written. Page 0 is the scratch page: padded rows (page
table 0, position 0) read and write only this page. Page numbers come from the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.attention import sdpa
from engine.attention.kv_cache import KVCache
from engine.errors import ConfigError

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer index, q [T, H, D], k [T, KV, D], v [T, KV, D]) -> [T, H * D]; writes k and v into the cache first."""

DECODE_IMPLS = ("sdpa", "triton")


class DecodeAttention:
    """Attention for one token per sequence: row b of q is at `positions[b]` and attends to positions 0..positions[b].

    page_table int64 [b, P] and positions int64 [b] are on the cache's device. P * page_size must exceed every position.
    SDPA always reads this full width, so slice the table to the context bucket. The constructor computes what all
    layers share with tensor operations only (no host reads), so a step that constructs and calls this object can be
    captured. `impl` is one of DECODE_IMPLS.
    """

    def __init__(self, kv: KVCache, page_table: Tensor, positions: Tensor, impl: str = "sdpa"):
        if impl not in DECODE_IMPLS:
            raise ConfigError(f"decode attention impl={impl!r} is not one of {', '.join(DECODE_IMPLS)}")
        self.kv = kv
        if impl == "triton":
            from engine.attention.triton import TritonDecodeAttention  # triton is installed only with CUDA

            self._attend: Attention = TritonDecodeAttention(kv, page_table, positions)
            return
        page = page_table.gather(1, (positions // kv.page_size).unsqueeze(1)).squeeze(1)
        self.slots = torch.add(positions % kv.page_size, page, alpha=kv.page_size)
        self.flat_table = page_table.reshape(-1)
        self.mask = sdpa.decode_mask(positions, page_table.shape[1] * kv.page_size, kv.dtype)
        self.scale = kv.head_dim**-0.5
        self._attend = self._sdpa

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attend(layer, q, k, v)

    def _sdpa(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = self.kv
        kv.write(layer, self.slots, k, v)
        return sdpa.decode(q, kv.k[layer], kv.v[layer], self.flat_table, self.mask, self.scale)


class PrefillAttention:
    """Attention for flattened prompt chunks: tokens of chunk c follow those of chunk c-1 in q, k and v.

    chunks: (start, length) per sequence; its pages already hold positions 0..start-1. page_tables: the page numbers
    (ints) of each sequence in order, enough for start + length tokens. Runs eagerly: the loop over chunks is Python.
    """

    def __init__(self, kv: KVCache, chunks: Sequence[tuple[int, int]], page_tables: Sequence[Sequence[int]]):
        if len(chunks) != len(page_tables):
            raise ConfigError(f"found {len(chunks)} chunks and {len(page_tables)} page tables; give one each")
        self.kv, self.chunks = kv, list(chunks)
        self.scale = kv.head_dim**-0.5
        slots = []
        self._tables: list[Tensor | None] = []
        self._masks: list[Tensor | None] = []
        for (start, length), pages in zip(chunks, page_tables, strict=True):
            used = -(-(start + length) // kv.page_size)
            if length < 1 or start < 0 or used > len(pages):
                raise ConfigError(f"{length} tokens at position {start} need {used} pages; found {len(pages)}")
            table = torch.tensor(pages[:used], dtype=torch.int64)
            positions = torch.arange(start, start + length)
            slots.append(table[positions // kv.page_size] * kv.page_size + positions % kv.page_size)
            # a chunk that starts at 0 needs no gather: all its keys are in k
            self._tables.append(table.to(kv.device) if start else None)
            self._masks.append(sdpa.prefill_mask(start, length, kv.dtype, kv.device) if start else None)
        self.slots = torch.cat(slots).to(kv.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kv.write(layer, self.slots, k, v)
        outs, first = [], 0
        for (start, length), table, mask in zip(self.chunks, self._tables, self._masks, strict=True):
            rows = slice(first, first + length)
            first += length
            keys, values = k[rows], v[rows]
            if table is not None:
                keys = sdpa.gather_pages(self.kv.k[layer], table)[: start + length]
                values = sdpa.gather_pages(self.kv.v[layer], table)[: start + length]
            outs.append(sdpa.prefill(q[rows], keys, values, mask, self.scale))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

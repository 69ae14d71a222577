"""Attention of one step over a KV cache, from Python lists, for tests of models and backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.interface import Attention, AttentionBackend
from engine.attention.kv_cache import KVCache
from engine.attention.metadata import DecodeMetadata, PrefillMetadata
from engine.attention.sdpa import SdpaBackend


def backend_for(kv: KVCache, name: str = "sdpa", max_rows: int = 64) -> AttentionBackend:
    """Create the backend called `name`: sdpa or triton."""
    if name == "sdpa":
        return SdpaBackend(kv, max_rows)
    from engine.attention.triton import TritonBackend

    return TritonBackend(kv, max_rows)


def decode_attention(kv: KVCache, table: Tensor, positions: Tensor, name: str = "sdpa") -> Attention:
    """Attend with row i at positions[i] to the pages table[i]; the table [b, P] serves every cache group."""
    rows = torch.arange(len(table), device=table.device)
    tables = table.expand(len(kv.groups), *table.shape)
    return backend_for(kv, name).decode(DecodeMetadata(tables, rows, positions))


def prefill_metadata(
    kv: KVCache, chunks: Sequence[tuple[int, int]], pages: Sequence[Sequence[int]], padding: int = 0
) -> PrefillMetadata:
    """Describe chunks (start, length) of sequences with these pages, and `padding` tokens after them."""
    width = max(map(len, pages))
    table = torch.zeros(len(pages) + 1, width, dtype=torch.int64)
    positions, rows, ends = [], [], []
    for index, ((start, length), own) in enumerate(zip(chunks, pages, strict=True), 1):
        table[index, : len(own)] = torch.tensor(own)
        positions += range(start, start + length)
        rows += [index] * length
        ends.append(len(rows))
    parts = (
        positions + [0] * padding, rows + [0] * padding, ends, [start for start, _ in chunks],
        list(range(1, len(pages) + 1)),
    )  # fmt: skip
    tensors = [torch.tensor(part, dtype=torch.int64, device=kv.device) for part in parts]
    return PrefillMetadata(table.to(kv.device).expand(len(kv.groups), *table.shape), *tensors, list(chunks))


def prefill_attention(
    kv: KVCache, chunks: Sequence[tuple[int, int]], pages: Sequence[Sequence[int]], name: str = "sdpa"
) -> Attention:
    """Attend with chunks (start, length) of sequences with these pages, packed one after the other."""
    return backend_for(kv, name).prefill(prefill_metadata(kv, chunks, pages))

"""Decode attention with the paged Triton kernel: one launch per layer appends keys and values, and attends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.kernels.paged_decode import DecodeWorkspace, decode_workspace, paged_decode

if TYPE_CHECKING:
    from engine.attention.kv_cache import KVCache


class TritonDecodeAttention:
    """Decode attention of one step: append each layer's keys and values, then attend, in one launch per layer.

    Takes the same arguments as the SDPA backend. Every launch reads `page_table` [b, P] and `positions` [b] from the
    device, so a captured graph follows their contents. The first call allocates the scratch, which all layers share:
    calls must stay on one stream.
    """

    def __init__(self, kv: KVCache, page_table: torch.Tensor, positions: torch.Tensor) -> None:
        self._kv = kv
        self._page_table = page_table
        self._positions = positions
        self._workspace: DecodeWorkspace | None = None

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write k and v [b, KV, D] to the layer's pages, then return attention of q [b, H, D] over them: [b, H * D]."""
        k_cache, v_cache = self._kv.k[layer], self._kv.v[layer]
        if self._workspace is None:
            self._workspace = decode_workspace(q, k_cache, self._page_table)
        out = paged_decode(
            q, k_cache, v_cache, self._page_table, self._positions, q.shape[-1] ** -0.5, new_kv=(k, v),
            workspace=self._workspace,
        )  # fmt: skip
        return out.flatten(1)

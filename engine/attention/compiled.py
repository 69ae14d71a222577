"""Paged attention on a CPU by the compiled kernel of kernels/cpu_library.py, in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from engine.attention.cache_spec import FullAttentionSpec, PagedSpec, SlidingWindowSpec
from engine.attention.interface import Attention, Support
from engine.attention.kv_cache import KVCache
from engine.attention.metadata import DecodeMetadata
from engine.attention.sdpa import SdpaBackend
from engine.kernels.cpu_library import cpu_kernels_loaded, paged_decode

HEAD_MULTIPLE = 16


@dataclass(frozen=True, kw_only=True)
class CompiledSupport(Support):
    """What the kernel supports, on machines that can compile it."""

    def missing(
        self,
        specs: Sequence[PagedSpec],
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype | None = None,
    ) -> str | None:
        lacking = super().missing(specs, dtype, device, stored)
        if lacking is not None:
            return lacking
        if odd := [spec.head_dim for spec in specs if spec.head_dim % HEAD_MULTIPLE]:
            return f"head size {odd[0]} (a multiple of {HEAD_MULTIPLE})"
        return None if cpu_kernels_loaded() else "this machine, where its kernel isn't compiled"


class CompiledBackend(SdpaBackend):
    """Attention by one call per layer in a decode step, which reads only the keys that a row has.

    Prefill is that of SdpaBackend.
    """

    name: ClassVar[str] = "compiled"
    support: ClassVar[Support] = CompiledSupport(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.bfloat16}),
        specs=frozenset({FullAttentionSpec, SlidingWindowSpec}),
        stored_dtypes=frozenset(),
        max_head_dim=1024,
        softcap=False,
        sinks=False,
        dynamic_lengths=True,
        captures_prefill=False,
        fuses_rotary=False,
    )

    def decode(self, metadata: DecodeMetadata) -> Attention:
        return CompiledDecode(self._kv, metadata)


class CompiledDecode:
    """Attention of a decode step."""

    def __init__(self, kv: KVCache, metadata: DecodeMetadata):
        self._kv, self._metadata = kv, metadata

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        kv, metadata, group = self._kv, self._metadata, self._kv.group_of[layer]
        assert v is not None and sinks is None  # CompiledSupport has neither latent layers nor sinks
        where = (metadata.page_tables[group], metadata.rows, metadata.positions)
        scale, window = kv.spec(layer).softmax_scale, kv.groups[group].window
        return paged_decode(q, k, v, kv.k[layer], kv.v[layer], *where, scale, window)

"""Paged attention with Triton kernels: the CUDA backend, for decode and packed prefill."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from engine.attention.cache_spec import FullAttentionSpec, SlidingWindowSpec, paged_layers
from engine.attention.interface import FusedAttention, Support
from engine.attention.kv_cache import FP8_DTYPES, KVCache
from engine.attention.metadata import DecodeMetadata, PrefillMetadata
from engine.kernels.launch import fits, has_hopper_kernels
from engine.kernels.paged_decode import (
    DecodeScratch,
    DecodeWorkspace,
    NormRope,
    by_kv_head,
    paged_decode,
    prefix_members,
)
from engine.kernels.paged_prefill import VarlenLayout, append_kv, norm_rope_append, paged_prefill

logger = logging.getLogger(__name__)

MAX_ERROR = 1e-2
"""Relative error of correct attention in 16 bits is below 5e-3."""

CHECKED_WINDOW = 150
"""The window with which kernels are compared with PyTorch: of several pages, and shorter than some chunks."""


class TritonBackend:
    """Attention by one launch per layer in a decode step, or two if few rows are split, and two in a prefill step.

    Kernels read positions, lengths and page tables from the device, so a captured graph follows their contents.
    """

    name: ClassVar[str] = "triton"
    support: ClassVar[Support] = Support(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        specs=frozenset({FullAttentionSpec, SlidingWindowSpec}),
        stored_dtypes=frozenset(FP8_DTYPES.values()),
        stored_capability=(8, 9),
        max_head_dim=256,
        softcap=True,
        sinks=True,
        dynamic_lengths=True,
        captures_prefill=True,
        fuses_rotary=True,
    )

    def __init__(self, kv: KVCache, max_rows: int):
        self._kv, self._max_rows = kv, max_rows
        self._scratch: dict[bool, DecodeScratch] = {}
        self.hopper = _hopper_kernels(kv)

    def short_chunk_reads(self, group: int) -> int:
        return 0 if self.hopper is None else group // self.hopper.pack_of(group)

    def prefix_members(self, group: int) -> int:
        # In float32, the tile of a group spills registers and takes more shared memory than some GPUs have.
        is_16_bit = self._kv.dtype in (torch.bfloat16, torch.float16)
        return prefix_members(group) if is_16_bit and fits(self._kv.device) else 0

    def verify(self, group: int) -> bool:
        if self.hopper is None:
            return True
        kv = self._kv
        kinds = {(spec.window is not None, spec.sinks) for spec in paged_layers(kv.specs).values() if not spec.softcap}
        shape = kv.kv_heads * group, kv.kv_heads, kv.head_dim, kv.page_size, kv.dtype
        with torch.cuda.device(kv.device):
            errors = [
                self.hopper.error_beside_torch(*shape, window=CHECKED_WINDOW if has_window else None, sinks=sinks)
                for has_window, sinks in sorted(kinds)
            ]
        if not all(error < MAX_ERROR for error in errors):  # also if one is NaN
            logger.warning("kernels for Hopper GPUs have relative errors of %s here: using others", errors)
            self.hopper = None
        return self.hopper is not None

    def decode(self, metadata: DecodeMetadata) -> FusedAttention:
        return TritonDecode(self._kv, metadata, self)

    def prefill(self, metadata: PrefillMetadata) -> FusedAttention:
        return TritonPrefill(self._kv, metadata, self.hopper)

    def workspace(self, q: Tensor, page_table: Tensor, shared: bool) -> DecodeWorkspace:
        """Return decode scratch for queries [b, KV, H/KV, D]; `shared`: of rows that share prefixes.

        Allocated in the first warm-up run: in a capture, it would belong to that graph's memory pool alone.
        """
        if shared not in self._scratch:
            self._scratch[shared] = DecodeScratch(self._max_rows, q, self._kv.storage[0][0], page_table, shared)
        return self._scratch[shared].of(len(q))


class TritonDecode:
    """Attention of a decode step: append keys and values, and attend, in one launch per layer.

    If rows share prefixes, a launch before it reads these. A launch after it merges the splits of few rows.
    """

    def __init__(self, kv: KVCache, metadata: DecodeMetadata, backend: TritonBackend):
        self._kv, self._metadata, self._backend = kv, metadata, backend

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        assert v is not None  # Support refuses latent layers
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._launch(layer, by_kv_head(q, self._kv.kv_heads), k, v, None, out, sinks)
        return out.flatten(1)

    def attend_raw(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norm_rope: NormRope,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        self._launch(layer, q, k, v, norm_rope, out.view(len(q), -1, q.shape[-1]), sinks)

    def _launch(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norm_rope: NormRope | None,
        out: Tensor,
        sinks: Tensor | None,
    ) -> None:
        kv, metadata = self._kv, self._metadata
        spec, group = kv.spec(layer), kv.group_of[layer]
        page_table = metadata.page_tables[group]
        shared = metadata.shared if metadata.prefix_group == group else None
        paged_decode(
            q,
            *kv.pages(layer),
            page_table,
            metadata.positions,
            spec.softmax_scale,
            new_kv=(k, v),
            slots=metadata.rows,
            rotation=norm_rope,
            window=spec.window,
            sinks=sinks,
            softcap=spec.softcap,
            shared=shared,
            out=out,
            workspace=self._backend.workspace(q, page_table, shared is not None),
        )


class TritonPrefill:
    """Attention of packed prompt chunks: append their keys and values, then attend.

    `hopper`: the module of the kernels for layers without a soft-cap, if the GPU has them.
    """

    def __init__(self, kv: KVCache, metadata: PrefillMetadata, hopper: ModuleType | None):
        self._kv, self._metadata, self._hopper = kv, metadata, hopper
        self._tiles: Tensor | None = None  # of the step, for all layers
        self._layout = VarlenLayout(
            metadata.positions, metadata.token_rows, metadata.ends, metadata.starts, metadata.rows
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        assert v is not None  # Support refuses latent layers
        kv, metadata = self._kv, self._metadata
        table = metadata.page_tables[kv.group_of[layer]]
        append_kv(k, v, *kv.pages(layer), table, metadata.token_rows, metadata.positions)
        out = torch.zeros(len(q), q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)  # padding rows stay 0
        self._attend(layer, by_kv_head(q, kv.kv_heads), out, sinks)
        return out

    def attend_raw(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norm_rope: NormRope,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        kv, table = self._kv, self._metadata.page_tables[self._kv.group_of[layer]]
        norm_rope_append(q, k, v, *kv.pages(layer), table, self._layout, norm_rope)
        self._attend(layer, q, out, sinks)

    def _attend(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        kv = self._kv
        spec, table = kv.spec(layer), self._metadata.page_tables[kv.group_of[layer]]
        (k, v), scale = kv.pages(layer), spec.softmax_scale
        if self._hopper is None or spec.softcap is not None:
            paged_prefill(
                q, k, v, table, self._layout, scale, out, window=spec.window, sinks=sinks, softcap=spec.softcap
            )
            return
        if self._tiles is None:
            self._tiles = self._hopper.tile_list(self._layout, len(q), q.shape[2])
        self._hopper.hopper_prefill(q, k, v, table, self._tiles, scale, out, window=spec.window, sinks=sinks)


def _hopper_kernels(kv: KVCache) -> ModuleType | None:
    """Return the module of the kernels for Hopper GPUs, if they support this cache."""
    if not kv.paged or kv.stored is not None or not has_hopper_kernels(kv.device, kv.dtype, kv.head_dim, kv.page_size):
        return None
    from engine.kernels import hopper_prefill  # other versions of Triton may not have what it imports

    return hopper_prefill

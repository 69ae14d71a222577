"""The interface of attention backends, and what a backend declares to support.

A backend attends over the paged KV cache of one model. The worker asks it for the attention of a step, `decode` or
`prefill`, and passes the result to the model's layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from engine.attention.cache_spec import PagedSpec
from engine.attention.kv_cache import KVCache
from engine.attention.metadata import DecodeMetadata, PrefillMetadata

if TYPE_CHECKING:
    from engine.kernels.paged_decode import NormRope  # imports triton, which is installed only with CUDA


class Attention(Protocol):
    """The attention of a step, for all layers."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None = None) -> Tensor:
        """Write k and v into the cache, and attend: q [T, H, D], k and v [T, KV, D] -> [T, H * D].

        A layer with a LatentSpec gives its latent vectors as k [T, 1, width] and None as v, with q [T, H, width], and
        gets [T, H * value_width]. `sinks` [H]: one more score per query head, in layers whose spec has sinks.
        """


class FusedAttention(Attention, Protocol):
    """An Attention that can also take a layer's raw projections, for backends with `Support.fuses_rotary`."""

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
        """Apply head norms and rotary embedding, append the keys and values, and write attention to `out` [T, H * D].

        q [T, KV, H/KV, D], k and v [T, KV, D] are views of one projection; q may be overwritten. `sinks` as in
        Attention.
        """


@dataclass(frozen=True, kw_only=True)
class Support:
    """What a backend supports.

    - devices, dtypes: types of device and of the KV cache.
    - specs: types of cache specs.
    - stored_dtypes: dtypes in which the KV cache may store keys and values beside its own.
    - stored_capability: the compute capability that a CUDA device needs for `stored_dtypes`.
    - max_head_dim: largest head size.
    - softcap: attention scores can be bounded.
    - sinks: layers may have attention sinks.
    - dynamic_lengths: decode reads lengths from device memory, so that one graph serves any context. Otherwise each
      context bucket is a graph variant.
    - captures_prefill: prefill needs no host values, so it can be captured. Decode always can.
    - fuses_rotary: attention can apply head norms and rotary embedding itself (see `FusedAttention`).
    """

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    specs: frozenset[type[PagedSpec]]
    stored_dtypes: frozenset[torch.dtype]
    max_head_dim: int
    softcap: bool
    sinks: bool
    dynamic_lengths: bool
    captures_prefill: bool
    fuses_rotary: bool
    stored_capability: tuple[int, int] = (0, 0)

    def missing(
        self,
        specs: Sequence[PagedSpec],
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype | None = None,
    ) -> str | None:
        """Return what these layers need and the backend doesn't support; None if nothing."""
        if device.type not in self.devices:
            return f"device {device.type}"
        if dtype not in self.dtypes:
            return f"dtype {str(dtype).removeprefix('torch.')}"
        if stored is not None and stored not in self.stored_dtypes:
            return f"a KV cache in {str(stored).removeprefix('torch.')}"
        if stored is not None and not _has_capability(device, self.stored_capability):
            major, minor = self.stored_capability
            return f"a KV cache in {str(stored).removeprefix('torch.')} below compute capability {major}.{minor}"
        if unknown := sorted({type(spec).__name__ for spec in specs if type(spec) not in self.specs}):
            return f"layers with {', '.join(unknown)}"
        if (head_dim := max((spec.head_dim for spec in specs), default=0)) > self.max_head_dim:
            return f"head size {head_dim} (at most {self.max_head_dim})"
        if not self.softcap and any(spec.softcap is not None for spec in specs):
            return "soft-caps of attention scores"
        if not self.sinks and any(spec.sinks for spec in specs):
            return "attention sinks"
        if any(spec.sinks and spec.softcap is not None for spec in specs):
            return "attention sinks beside soft-caps"
        return None


def _has_capability(device: torch.device, needed: tuple[int, int]) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= needed


class AttentionBackend(Protocol):
    """Attention over one KV cache. Calls stay on one stream: steps share scratch memory."""

    name: ClassVar[str]
    support: ClassVar[Support]

    def __init__(self, kv: KVCache, max_rows: int) -> None:
        """Attend over `kv`, in decode steps of up to `max_rows` rows."""

    def short_chunk_reads(self, group: int) -> int:
        """Return how often `prefill` reads the keys of a chunk of one token, for `group` query heads per KV head.

        1: about as fast as `decode`, so that decodes can join it. 0: they can't.
        """
        ...

    def prefix_members(self, group: int) -> int:
        """Return how many rows `decode` reads a shared prefix for at once, for `group` query heads per KV head.

        0: it reads each row's keys for that row alone.
        """
        ...

    def verify(self, group: int) -> bool:
        """Compare kernels with PyTorch on this device, for `group` query heads per KV head, and drop those that differ.

        Returns whether none differed. Called once, before steps are captured.
        """

    def decode(self, metadata: DecodeMetadata) -> Attention:
        """Return the attention of a decode step. Uses tensor operations only, so that a step can be captured."""
        ...

    def prefill(self, metadata: PrefillMetadata) -> Attention:
        """Return the attention of a step of prompt chunks."""
        ...

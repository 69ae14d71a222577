"""The paged KV cache: the memory of all pages, and the write of keys and values to their slots.

Page 0 is the scratch page: padded rows (page table 0, position 0) read and write only this page. Page numbers come from
the scheduler's page pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention import host_memory
from engine.attention.cache_spec import CacheSpec, LatentSpec, PagedSpec, group_layers, paged_layers
from engine.errors import ConfigError, ModelError

FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""The dtypes of keys and values in fp8, by the names of `kv_cache_dtype`."""


class KVCache:
    """Keys and values of all layers in pages: `.k[i]`, `.v[i]` are tensors [num_pages, page_size, kv_heads, head_dim].

    A layer with a LatentSpec has only `.k[i]` [num_pages, page_size, 1, width]; `.v[i]` is a view of its values. A
    layer with recurrent state has no pages: both are empty.

    `groups` are the layers that share a page table, and `.group_of[i]` is the group of layer i. A page belongs to one
    group, so layers of different groups share storage. Pages start zeroed. Storage has a fixed address; resizing needs
    a new object.

    `stored`: the dtype of what is stored, one of FP8_DTYPES, or None for `dtype`, that of keys and values in a step.
    fp8 pages are bytes, uint8 tensors, which `encode` makes and `decode` reads.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        stored: torch.dtype | None = None,
    ):
        self.stored = stored
        self.specs, self.groups = tuple(specs), group_layers(specs)
        self.num_layers, self.num_pages, self.page_size = len(specs), num_pages, page_size
        self.paged = paged_layers(specs)
        shapes = next((spec.token_shapes for spec in self.paged.values()), ())
        self.kv_heads, self.head_dim = shapes[0] if shapes else (0, 0)
        self.dtype, self.device = dtype, torch.device(device)
        depth = max((len(group.layers) for group in self.groups), default=0)
        page_dtype = dtype if stored is None else torch.uint8
        each = (
            [_zeros((num_pages, page_size, *shape), page_dtype, self.device) for _ in range(depth)] for shape in shapes
        )
        self.storage = list(zip(*each, strict=True))
        place = {
            layer: (number, index)
            for number, group in enumerate(self.groups)
            for index, layer in enumerate(group.layers)
        }
        empty = torch.empty((0, page_size, self.kv_heads, self.head_dim), dtype=page_dtype, device=device)
        self.group_of = [place[layer][0] if layer in place else -1 for layer in range(self.num_layers)]
        self.k = [self.storage[place[layer][1]][0] if layer in place else empty for layer in range(self.num_layers)]
        self.v = [self._values(layer, place[layer][1]) if layer in place else empty for layer in range(self.num_layers)]
        self.k_slots = [pages.flatten(0, 1) for pages in self.k]
        self.v_slots = [pages.flatten(0, 1) for pages in self.v]

    def _values(self, layer: int, index: int) -> Tensor:
        spec = self.paged[layer]
        if isinstance(spec, LatentSpec):
            return self.storage[index][0][..., : spec.value_width]
        return self.storage[index][1]

    def spec(self, layer: int) -> PagedSpec:
        """Return what a layer stores. Raises ModelError for a layer with recurrent state, which has no attention."""
        spec = self.paged.get(layer)
        if spec is None:
            raise ModelError(f"layer {layer} called attention, but its cache spec is {self.specs[layer]}")
        return spec

    @property
    def nbytes(self) -> int:
        """Bytes of all pages in all layers."""
        return sum(pages.nbytes for tensors in self.storage for pages in tensors)

    def clear(self) -> None:
        """Zero all pages in place.

        Needed after weights that produced NaN: masked slots are multiplied by a weight of 0, and 0 * NaN is NaN.
        """
        for tensors in self.storage:
            for pages in tensors:
                pages.zero_()

    def zero_pages(self, pages: Tensor) -> None:
        """Zero the pages with these numbers, int64 [n] on the cache's device."""
        for tensors in self.storage:
            for storage in tensors:
                storage.index_fill_(0, pages, 0)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Store k, v [T, KV, D] at slots int64 [T] (page * page_size + offset); a repeated slot keeps any one.

        v is None for a layer with a LatentSpec.
        """
        self.k_slots[layer].index_copy_(0, slots, self.encode(k))
        if v is not None:
            self.v_slots[layer].index_copy_(0, slots, self.encode(v))

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return `.k[layer]` and `.v[layer]` in the dtype of what is stored."""
        k, v = self.k[layer], self.v[layer]
        return (k, v) if self.stored is None else (k.view(self.stored), v.view(self.stored))

    def encode(self, x: Tensor) -> Tensor:
        """Return keys or values as pages store them. fp8 saturates at its largest number; infinity becomes NaN."""
        if self.stored is None:
            return x
        limit = torch.finfo(self.stored).max
        return (x.clamp(-limit, limit) + (x - x)).to(self.stored).view(torch.uint8)

    def decode(self, pages: Tensor) -> Tensor:
        """Return stored keys or values in the cache's dtype."""
        return pages if self.stored is None else pages.view(self.stored).to(self.dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        return host_memory.zeros(shape, dtype)
    except OSError as error:
        raise ConfigError(
            f"num_pages={shape[0]}: the system has no memory for the KV cache: {error.strerror}"
        ) from error

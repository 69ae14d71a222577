"""The paged KV cache: the memory of all pages, and the write of keys and values to their slots.

Page 0 is the scratch page: padded rows (page table 0, position 0) read and write only this page. Page numbers come from
the scheduler's page pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.cache_spec import CacheSpec, group_layers


class KVCache:
    """Keys and values of all layers in pages: `.k[i]`, `.v[i]` are tensors [num_pages, page_size, kv_heads, head_dim].

    `groups` are the layers that share a page table, and `.group_of[i]` is the group of layer i. A page belongs to one
    group, so layers of different groups share storage. Pages start zeroed. Storage has a fixed address; resizing needs
    a new object.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.specs, self.groups = tuple(specs), group_layers(specs)
        self.num_layers, self.num_pages, self.page_size = len(specs), num_pages, page_size
        self.kv_heads, self.head_dim = specs[0].kv_heads, specs[0].head_dim
        self.dtype, self.device = dtype, torch.device(device)
        shape = (num_pages, page_size, self.kv_heads, self.head_dim)
        depth = max(len(group.layers) for group in self.groups)
        keys, values = ([torch.zeros(shape, dtype=dtype, device=device) for _ in range(depth)] for _ in range(2))
        self.storage = list(zip(keys, values, strict=True))
        place = {
            layer: (number, index)
            for number, group in enumerate(self.groups)
            for index, layer in enumerate(group.layers)
        }
        self.group_of = [place[layer][0] for layer in range(self.num_layers)]
        self.k = [self.storage[place[layer][1]][0] for layer in range(self.num_layers)]
        self.v = [self.storage[place[layer][1]][1] for layer in range(self.num_layers)]
        self.k_slots = [pages.view(-1, self.kv_heads, self.head_dim) for pages in self.k]
        self.v_slots = [pages.view(-1, self.kv_heads, self.head_dim) for pages in self.v]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages in all layers."""
        return sum(pages.nbytes for pair in self.storage for pages in pair)

    def clear(self) -> None:
        """Zero all pages in place.

        Needed after weights that produced NaN: masked slots are multiplied by a weight of 0, and 0 * NaN is NaN.
        """
        for pair in self.storage:
            for pages in pair:
                pages.zero_()

    def zero_pages(self, pages: Tensor) -> None:
        """Zero the pages with these numbers, int64 [n] on the cache's device."""
        for pair in self.storage:
            for storage in pair:
                storage.index_fill_(0, pages, 0)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, KV, D] at slots int64 [T] (page * page_size + offset); a repeated slot keeps any one."""
        self.k_slots[layer].index_copy_(0, slots, k)
        self.v_slots[layer].index_copy_(0, slots, v)

"""The paged KV cache: the memory of all pages, and the write of keys and values to their slots.

Page 0 is the scratch page: padded rows (page table 0, position 0) read and write only this page. Page numbers come from
the scheduler's page pool.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of all layers in pages: `.k[i]`, `.v[i]` are tensors [num_pages, page_size, kv_heads, head_dim].

    Pages start zeroed. Each layer's K and V have separate storage at a fixed address; resizing needs a new object. The
    memory is 2 * num_layers * num_pages * page_size * kv_heads * head_dim elements.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        shape = (num_pages, page_size, kv_heads, head_dim)
        self.num_layers, self.num_pages, self.page_size = num_layers, num_pages, page_size
        self.kv_heads, self.head_dim, self.dtype, self.device = kv_heads, head_dim, dtype, torch.device(device)
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.k_slots = [pages.view(-1, kv_heads, head_dim) for pages in self.k]
        self.v_slots = [pages.view(-1, kv_heads, head_dim) for pages in self.v]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages in all layers."""
        return sum(pages.nbytes for pages in (*self.k, *self.v))

    def clear(self) -> None:
        """Zero all pages in place.

        Needed after weights that produced NaN: masked slots are multiplied by a weight of 0, and 0 * NaN is NaN.
        """
        for pages in (*self.k, *self.v):
            pages.zero_()

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [T, KV, D] at slots int64 [T] (page * page_size + offset); a repeated slot keeps any one."""
        self.k_slots[layer].index_copy_(0, slots, k)
        self.v_slots[layer].index_copy_(0, slots, v)

"""Where one checkpoint tensor lives inside the model's fused storage.

Owns the write of a tensor into its place. Knows no file and no model: layers hand slots out, weights.py fills them.
"""

from __future__ import annotations

import torch
from torch import Tensor


class WeightSlot:
    """The home of one checkpoint tensor: a view of a parameter (or of a row range of a fused one).

    A layer with another storage form offers an object with the same `shape`, `dtype`, `write` and `read`.
    """

    def __init__(self, storage: Tensor, start: int = 0, rows: int | None = None):
        self.target = storage.data if rows is None else storage.data.narrow(0, start, rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """The checkpoint tensor's shape."""
        return tuple(self.target.shape)

    @property
    def dtype(self) -> torch.dtype:
        """What the tensor is converted to when written."""
        return self.target.dtype

    def write(self, tensor: Tensor) -> None:
        """Copy `tensor` (same shape, any floating dtype, any device) in place; the storage's address stays."""
        with torch.no_grad():
            self.target.copy_(tensor)

    def part_of(self, tensor: Tensor) -> Tensor:
        """What of such a tensor is stored here: all of it."""
        return tensor

    def read(self) -> Tensor:
        """The stored tensor: an alias, which the next write changes."""
        return self.target

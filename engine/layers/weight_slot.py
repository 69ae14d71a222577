"""Map checkpoint tensors to views of the model's fused storage.

Layers create the slots; loader/weights.py writes to them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Slot(Protocol):
    """The storage of one checkpoint tensor, as in `weight_slots`; WeightSlot is the usual implementation."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def write(self, tensor: Tensor) -> None: ...

    def part_of(self, tensor: Tensor) -> Tensor: ...

    def read(self) -> Tensor: ...


class WeightSlot:
    """The storage of one checkpoint tensor: a view of a parameter, or of a row range of a fused one.

    Layers with another storage format use another class with the interface of Slot.
    """

    def __init__(self, storage: Tensor, start: int = 0, rows: int | None = None):
        self.target = storage.data if rows is None else storage.data.narrow(0, start, rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """The checkpoint tensor's shape."""
        return tuple(self.target.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The storage dtype, to which `write` converts."""
        return self.target.dtype

    def write(self, tensor: Tensor) -> None:
        """Copy `tensor` (same shape, any floating dtype, any device) into the storage; its address doesn't change."""
        with torch.no_grad():
            self.target.copy_(tensor)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the part of a whole checkpoint tensor that is stored here: all of it."""
        return tensor

    def read(self) -> Tensor:
        """Return the stored tensor; it aliases the storage, so the next write changes it."""
        return self.target

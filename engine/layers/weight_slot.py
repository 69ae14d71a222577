"""Map checkpoint tensors to views of the model's fused storage.

Layers create the slots; loader/weights.py writes to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


class Slot(Protocol):
    """The storage of one checkpoint tensor, or of this rank's part of it; WeightSlot is the usual implementation."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def write(self, tensor: Tensor) -> None: ...

    def part_of(self, tensor: Tensor) -> Tensor: ...

    def read(self) -> Tensor: ...


@runtime_checkable
class MatrixSlot(Slot, Protocol):
    """The slot of a tensor that describes a matrix [outputs, inputs], in a format that splits it by itself."""

    def split(self, dim: int, rank: int, size: int) -> Slot:
        """Return the slot of a rank of `size` that split the matrix along its outputs (0) or inputs (1)."""


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


class PartSlot:
    """The storage of this rank's part of a checkpoint tensor.

    `target` is a view of a parameter, which may have another shape than the part. `shape` is that of the whole tensor;
    the part begins at index `start` of dimension `dim`. `write` takes the whole tensor, `read` returns the part.
    """

    def __init__(self, target: Tensor, shape: tuple[int, ...], dim: int, start: int):
        self.target, self.shape, self.dim, self.start = target, shape, dim, start
        others = prod(shape[:dim] + shape[dim + 1 :])
        self.part = (*shape[:dim], target.numel() // others, *shape[dim + 1 :])

    @property
    def dtype(self) -> torch.dtype:
        """The storage dtype, to which `write` converts."""
        return self.target.dtype

    def write(self, tensor: Tensor) -> None:
        """Copy this rank's part of the whole `tensor` (any floating dtype, any device) in place.

        Reads only that part: of a tensor that maps a file, the other pages stay on disk.
        """
        with torch.no_grad():
            self.target.copy_(self.part_of(tensor).reshape(self.target.shape))

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the part of the whole `tensor` that is stored here, as a view."""
        return tensor.narrow(self.dim, self.start, self.part[self.dim])

    def read(self) -> Tensor:
        """Return this rank's part: an alias if its rows are contiguous, a copy if they are interleaved with others."""
        return self.target.reshape(self.part)


class JoinedSlot:
    """The slot of a checkpoint tensor whose rows are the rows of several tensors, such as q, k and v, in order.

    `parts` are the slots of those tensors, which ranks split each by itself.
    """

    def __init__(self, parts: Sequence[Slot]):
        self.parts = parts
        self.rows = [part.shape[0] for part in parts]
        self.shape = (sum(self.rows), *parts[0].shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which `write` converts."""
        return self.parts[0].dtype

    def write(self, tensor: Tensor) -> None:
        """Store this rank's rows of the whole `tensor` (any floating dtype, any device) in place."""
        for part, rows in zip(self.parts, tensor.split(self.rows), strict=True):
            part.write(rows)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of the rows of the whole `tensor` that are stored here."""
        return torch.cat([part.part_of(rows) for part, rows in zip(self.parts, tensor.split(self.rows), strict=True)])

    def read(self) -> Tensor:
        """Return a copy of this rank's rows."""
        return torch.cat([part.read() for part in self.parts])


class SplitSlot:
    """The slot of a whole checkpoint tensor, of which `part` stores this rank's: for formats that convert on writing.

    `shape` is that of the whole tensor; the part begins at index `start` of dimension `dim`.
    """

    def __init__(self, part: Slot, shape: tuple[int, ...], dim: int, start: int):
        self.part, self.shape, self.dim, self.start = part, shape, dim, start

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to which `write` converts."""
        return self.part.dtype

    def write(self, tensor: Tensor) -> None:
        """Store this rank's part of the whole `tensor` (any floating dtype, any device) in place."""
        self.part.write(self.part_of(tensor))

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the part of the whole `tensor` that is stored here, as a view."""
        return tensor.narrow(self.dim, self.start, self.part.shape[self.dim])

    def read(self) -> Tensor:
        """Return this rank's part."""
        return self.part.read()


def overwritten(slot: Slot) -> list[Tensor]:
    """Return the contiguous tensors, all of whose values `slot.write` replaces; none if the format doesn't tell."""
    if type(slot) is JoinedSlot:
        return [tensor for part in slot.parts for tensor in overwritten(part)]
    if type(slot) is WeightSlot or type(slot) is PartSlot:
        return [slot.target] if slot.target.is_contiguous() else []
    return []

"""Slots of quantised matrices: one per checkpoint tensor, and one that takes the plain matrix instead."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from engine.layers.formats.region import CheckpointTensor, Region
from engine.layers.weight_slot import Slot

PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of plain weights."""

PLAIN_NAME = "weight"
"""The last part of the name of a plain matrix."""


class MatrixFormat(Protocol):
    """What slots need of a weight method."""

    def checkpoint_tensors(self, region: Region) -> dict[str, CheckpointTensor]: ...

    def store_plain(self, region: Region, weight: Tensor) -> None: ...

    def load_plain(self, region: Region) -> Tensor: ...


class PlainSlot:
    """The slot of a plain matrix in quantised storage: `write` quantises (lossy) in place.

    `shape` is that of the whole matrix, of which this rank stores a part.
    """

    def __init__(self, method: MatrixFormat, region: Region):
        self._method, self._region = method, region

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._region.outputs, self._region.inputs)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the layer's activations."""
        return self._region.layer.weight_dtype

    def split(self, dim: int, rank: int, size: int) -> PlainSlot:
        """Return the slot of a rank of `size` that split the matrix along its outputs (0) or inputs (1)."""
        return PlainSlot(self._method, self._region.split(dim, rank, size))

    def write(self, tensor: Tensor) -> None:
        """Quantise this rank's part of the whole `tensor` in place; addresses don't change."""
        with torch.no_grad():
            self._method.store_plain(self._region, tensor)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the part of the whole `tensor` that is stored here, as a view."""
        return self._region.narrow(tensor)

    def read(self) -> Tensor:
        """Return a dequantised copy of this rank's part."""
        return self._method.load_plain(self._region)


class CheckpointSlot:
    """The slot of one checkpoint tensor of a quantised matrix. `shape` is that of the whole tensor.

    - plain: the slot that takes the plain matrix instead of all of its checkpoint tensors.
    - matrix: equal for the tensors of one matrix.
    - required: whether every checkpoint has this tensor.
    """

    def __init__(self, method: MatrixFormat, region: Region, name: str):
        self._method, self._region, self._name = method, region, name
        self.plain = PlainSlot(method, region)
        self.matrix: Hashable = (id(region.layer), region.expert, region.start)

    @property
    def _tensor(self) -> CheckpointTensor:
        return self._method.checkpoint_tensors(self._region)[self._name]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._tensor.shapes[0]

    @property
    def dtype(self) -> torch.dtype:
        """The usual dtype of the checkpoint's tensor."""
        return self._tensor.dtypes[0]

    @property
    def required(self) -> bool:
        return self._tensor.required

    @property
    def others(self) -> tuple[str, ...]:
        """The last parts of other names of this tensor."""
        return self._tensor.others

    @property
    def is_kept(self) -> bool:
        """Whether `read` returns the tensor: False for one that is only checked."""
        return self._tensor.load is not None

    @property
    def num_parameters(self) -> int:
        """The number of weights of the matrix, of its first tensor; 0 of the others."""
        is_first = next(iter(self._method.checkpoint_tensors(self._region))) == self._name
        return self._region.outputs * self._region.inputs if is_first else 0

    def split(self, dim: int, rank: int, size: int) -> CheckpointSlot:
        """Return the slot of a rank of `size` that split the matrix along its outputs (0) or inputs (1)."""
        return CheckpointSlot(self._method, self._region.split(dim, rank, size), self._name)

    def problem(self, tensor: Tensor) -> str | None:
        """Return what is wrong with `tensor`, such as "has shape …", or None."""
        expected = self._tensor
        if tensor.dtype not in expected.dtypes:
            return f"has dtype {tensor.dtype}, expected {' or '.join(map(str, expected.dtypes))}"
        if tuple(tensor.shape) not in expected.shapes:
            shapes = " or ".join(str(list(shape)) for shape in expected.shapes)
            return f"has shape {list(tensor.shape)}, expected {shapes}"
        if tensor.is_meta or tensor.layout is not torch.strided:
            return f"has no dense data (device {tensor.device}, layout {tensor.layout})"
        return expected.check(tensor)

    def write(self, tensor: Tensor) -> None:
        """Store this rank's part of the whole `tensor` in place; addresses don't change."""
        with torch.no_grad():
            self._tensor.store(tensor)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return all of `tensor`: `read` returns what is stored of it."""
        return tensor

    def read(self) -> Tensor:
        """Return the checkpoint tensor of this rank's part of the matrix, without rounding."""
        load = self._tensor.load
        if load is None:
            raise RuntimeError(f"{self._name} is not kept: see is_kept")
        return load()


def plain_slots(slots: Mapping[str, Slot]) -> dict[str, PlainSlot]:
    """Map the names of the plain matrices that quantised slots take instead of their tensors."""
    return {
        f"{name.rpartition('.')[0]}.{PLAIN_NAME}": slot.plain
        for name, slot in slots.items()
        if isinstance(slot, CheckpointSlot)
    }

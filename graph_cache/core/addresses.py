"""Watch the tensors that graphs read, so that a moved or reshaped tensor is detected before a replay.

A graph reads parameters and caches by address, with the shape, strides and dtype that they had at capture. Replacing
such a tensor (a reload, `.data = …`, `.to()`, a swapped submodule) raises no error: the graph keeps reading freed
memory, memory that no longer belongs to the model, or the right memory in the wrong order (`p.data = p.data.t()` keeps
the address). An AddressBook records addresses and geometry at capture and compares them later.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter, getitem
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

_GUARDED = (torch.Tensor, torch.nn.Parameter)  # guards know no other classes
_address = torch.Tensor.data_ptr
_GEOMETRY = (torch.Tensor.size, torch.Tensor.stride, attrgetter("dtype"))
_TRAINED = attrgetter("requires_grad")
PARTS = 4  # slices of a partial check
GEOMETRY_PARTS = 32  # slices of the geometry in a check of all addresses


@dataclass(frozen=True, slots=True)
class Moved:
    """A watched tensor or submodule that changed: addresses in bytes (`id` for a module), None if it was removed.

    `geometry` describes a tensor that kept its address but changed its shape, strides, dtype or requires_grad.
    """

    name: str
    before: int
    now: int | None
    geometry: str = ""

    def __str__(self) -> str:
        if self.geometry:
            return f"{self.name}: {self.geometry}"
        return f"{self.name}: {self.before:#x} -> {'gone' if self.now is None else hex(self.now)}"


class _WatchedValues:
    """Named values of mappings, looked up at each check. `identity` maps a value to the number compared."""

    def __init__(self, identity: Callable[[Any], int]):
        self._identity = identity
        self._names: list[str] = []
        self._owners: list[Mapping[str, Any]] = []
        self._keys: list[str] = []
        self._expected: list[int] = []

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, owner: Mapping[str, Any], prefix: str, without: Container[tuple[int, Any]] = ()) -> list[Any]:
        """Watch the values of a mapping, and return them."""
        found = {
            name: value
            for name, value in owner.items()
            if value is not None and (not without or (id(owner), name) not in without)
        }
        for name, value in found.items():
            self._names.append(prefix + name)
            self._owners.append(owner)
            self._keys.append(name)
            self._expected.append(self._identity(value))
        return list(found.values())

    def unchanged(self, part: int | None) -> bool:
        if not self._owners:
            return True
        selected = slice(None) if part is None else slice(part, None, PARTS)
        try:
            current = list(map(self._identity, map(getitem, self._owners[selected], self._keys[selected])))
            return current == self._expected[selected]
        except (KeyError, TypeError):  # removed or set to None; `moved()` reports its name
            return False

    def moved(self) -> Iterator[Moved]:
        for label, owner, key, expected in zip(self._names, self._owners, self._keys, self._expected, strict=True):
            value = owner.get(key)
            now = None if value is None else self._identity(value)
            if now != expected:
                yield Moved(label, expected, now)

    def values(self) -> list[Any]:
        """Return the watched values that still exist."""
        current = (owner.get(key) for owner, key in zip(self._owners, self._keys, strict=True))
        return [value for value in current if value is not None]

    def accept(self) -> None:
        remaining = [
            (label, owner, key)
            for label, owner, key in zip(self._names, self._owners, self._keys, strict=True)
            if owner.get(key) is not None
        ]
        self._names = [label for label, _, _ in remaining]
        self._owners = [owner for _, owner, _ in remaining]
        self._keys = [key for _, _, key in remaining]
        self._expected = list(map(self._identity, self.values()))


class _WatchedTensors(_WatchedValues):
    """Named tensors, known by address and geometry, and with `trained` by whether they require a gradient."""

    def __init__(self, trained: bool = False) -> None:
        super().__init__(_address)
        self._read = (*_GEOMETRY, _TRAINED) if trained else _GEOMETRY
        self._geometry: list[tuple[Any, ...]] = []
        self._guards: dict[tuple[Any, Any], TensorGuards] = {}  # by slice; see `same_geometry`

    def _geometry_of(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return tuple(read(tensor) for read in self._read)

    def add(self, owner: Mapping[str, Any], prefix: str, without: Container[tuple[int, Any]] = ()) -> list[Any]:
        added = super().add(owner, prefix, without)
        self._guards.clear()
        self._geometry += map(self._geometry_of, added)
        return added

    def same_geometry(self, selected: slice) -> bool:
        """Return whether shapes, strides, dtypes and flags of the selected tensors are those recorded.

        PyTorch's guards compare them in 50 ns a tensor instead of 300. They are stricter: they refuse a tensor that
        occurs twice, and another autocast state than when they were made. So if they refuse, this compares again.
        """
        if not self._owners:
            return True
        which = (selected.start, selected.step)
        try:
            tensors = list(map(getitem, self._owners[selected], self._keys[selected]))
            if which in self._guards and self._guards[which].check(*tensors):
                return True
            current = list(zip(*(map(read, tensors) for read in self._read), strict=True))
        except (KeyError, TypeError):
            return False
        if current != self._geometry[selected]:
            return False
        if which not in self._guards and all(type(tensor) in _GUARDED for tensor in tensors):
            sizes: list[Any] = [list(tensor.size()) for tensor in tensors]
            strides: list[Any] = [list(tensor.stride()) for tensor in tensors]
            self._guards[which] = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        return True

    def moved(self) -> Iterator[Moved]:
        for index, (label, owner, key) in enumerate(zip(self._names, self._owners, self._keys, strict=True)):
            value, expected = owner.get(key), self._expected[index]
            now = None if value is None else self._identity(value)
            if now != expected:
                yield Moved(label, expected, now)
            elif value is not None and (found := self._geometry_of(value)) != self._geometry[index]:
                yield Moved(label, expected, now, f"{_describe(self._geometry[index])} -> {_describe(found)}")

    def accept(self) -> None:
        super().accept()
        self._guards.clear()
        self._geometry = list(map(self._geometry_of, self.values()))


def _describe(geometry: tuple[Any, ...]) -> str:
    size, stride, dtype, *trained = geometry
    found = f"{str(dtype).removeprefix('torch.')} {list(size)} with strides {list(stride)}"
    return f"{found}, requires_grad={trained[0]}" if trained else found


class AddressBook:
    """Addresses and geometry of named tensors, looked up through their owners to detect a replaced object too.

    `unchanged()` costs about 350 ns per tensor, a quarter of it for the address, and less per submodule. Tensors and
    submodules added after `watch` are not covered: code that adds them must call `invalidate`.
    """

    def __init__(self) -> None:
        self._tensors, self._trained = _WatchedTensors(), _WatchedTensors(trained=True)
        self._modules = _WatchedValues(id)
        self._live_modules: list[torch.nn.Module] = []  # strong references, so that no `id` is reused

    def __len__(self) -> int:
        return len(self._tensors) + len(self._trained)

    def watch(
        self,
        source: torch.nn.Module | Mapping[str, torch.Tensor],
        prefix: str = "",
        *,
        trained: bool = False,
        selects_code: bool = False,
        without: Container[tuple[int, Any]] = (),
    ) -> None:
        """Add a module's parameters and buffers, or the tensors of a mapping, which is read again at each check.

        With `trained`, a tensor other than a parameter has also changed if it begins or ceases to require a gradient.
        With `selects_code`, so has a parameter: recurrent and attention modules of PyTorch select their kernels by it,
        also in inference mode.
        Buffers in `without`, each (id of the dictionary of buffers, name), are left out.
        """
        others = self._trained if trained else self._tensors
        if isinstance(source, torch.nn.Module):
            for path, module in source.named_modules():
                inside = prefix + (f"{path}." if path else "")
                (self._trained if selects_code else self._tensors).add(module._parameters, inside)
                others.add(module._buffers, inside, without)
                self._modules.add(module._modules, inside)
            self._live_modules = self._modules.values()
        else:
            others.add(source, prefix)

    def unchanged(self, part: int | None = None, *, geometry_part: int | None = None) -> bool:
        """Return whether no tensor moved or changed its geometry, and no submodule was replaced.

        With `part`, check only that slice of PARTS. With `geometry_part`, check all addresses but only that slice of
        GEOMETRY_PARTS of the geometry. Loops in C, because it runs at step boundaries.
        """
        geometry = slice(None)
        if part is not None:
            geometry = slice(part, None, PARTS)
        elif geometry_part is not None:
            geometry = slice(geometry_part, None, GEOMETRY_PARTS)
        return (
            self._tensors.unchanged(part)
            and self._trained.unchanged(part)
            and self._modules.unchanged(part)
            and self._tensors.same_geometry(geometry)
            and self._trained.same_geometry(geometry)
        )

    def has_its_modules(self) -> bool:
        """Return whether every submodule is still present and the same object."""
        return self._modules.unchanged(None)

    def moved(self) -> list[Moved]:
        """Return every tensor that moved, changed its geometry or was removed, and every replaced submodule."""
        return [*self._tensors.moved(), *self._trained.moved(), *self._modules.moved()]

    def accept(self) -> None:
        """Record the current addresses and geometry as expected, after dropping the graphs that read the old ones."""
        self._tensors.accept()
        self._trained.accept()
        self._modules.accept()
        self._live_modules = self._modules.values()

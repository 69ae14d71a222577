"""The addresses that graphs read from, watched so that a moved tensor is caught instead of replayed.

A graph reads parameters and caches by address. Whatever replaces such a tensor (a reload, `.data = …`, `.to()`, another
submodule in the place of one) leaves the graph reading what is freed, or no longer the model's, without any error. An
AddressBook remembers the addresses at capture and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch

_address = torch.Tensor.data_ptr
PARTS = 4


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor or submodule that is not the one graphs expect: addresses in bytes (a module's `id`), None if gone."""

    name: str
    before: int
    now: int | None

    def __str__(self) -> str:
        return f"{self.name}: {self.before:#x} -> {'gone' if self.now is None else hex(self.now)}"


class _WatchedValues:
    """Named values of mappings that are read again; `mark` gives the number by which one is known."""

    def __init__(self, identity: Callable[[Any], int]):
        self._identity = identity
        self._names: list[str] = []
        self._owners: list[Mapping[str, Any]] = []
        self._keys: list[str] = []
        self._expected: list[int] = []

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, owner: Mapping[str, Any], prefix: str) -> None:
        for name, value in owner.items():
            if value is not None:
                self._names.append(prefix + name)
                self._owners.append(owner)
                self._keys.append(name)
                self._expected.append(self._identity(value))

    def unchanged(self, part: int | None) -> bool:
        selected = slice(None) if part is None else slice(part, None, PARTS)
        try:
            current = list(map(self._identity, map(getitem, self._owners[selected], self._keys[selected])))
            return current == self._expected[selected]
        except (KeyError, TypeError):  # removed, or set to None: `moved()` names it
            return False

    def moved(self) -> Iterator[Moved]:
        for label, owner, key, expected in zip(self._names, self._owners, self._keys, self._expected, strict=True):
            value = owner.get(key)
            now = None if value is None else self._identity(value)
            if now != expected:
                yield Moved(label, expected, now)

    def values(self) -> list[Any]:
        """Those that are there."""
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


class AddressBook:
    """Addresses of named tensors, looked up through their owners so that a replaced object is seen too.

    `unchanged()` costs about 100 ns a tensor, and less a submodule. What appears later is not in the book: whoever adds
    a tensor or a submodule calls `invalidate`.
    """

    def __init__(self) -> None:
        self._tensors, self._modules = _WatchedValues(_address), _WatchedValues(id)
        self._live_modules: list[torch.nn.Module] = []  # those modules: an `id` may come again

    def __len__(self) -> int:
        return len(self._tensors)

    def watch(self, source: torch.nn.Module | Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Add a module's parameters and buffers, or a mapping's tensors. The mapping is kept and read again."""
        if isinstance(source, torch.nn.Module):
            for path, module in source.named_modules():
                inside = prefix + (f"{path}." if path else "")
                for owner in (module._parameters, module._buffers):
                    self._tensors.add(owner, inside)
                self._modules.add(module._modules, inside)
            self._live_modules = self._modules.values()
        else:
            self._tensors.add(source, prefix)

    def unchanged(self, part: int | None = None) -> bool:
        """True when every tensor and submodule (of one of PARTS parts) is where it was. In C loops: steps ask it."""
        return self._tensors.unchanged(part) and self._modules.unchanged(part)

    def has_its_modules(self) -> bool:
        """Whether no submodule is gone, or another."""
        return self._modules.unchanged(None)

    def moved(self) -> list[Moved]:
        """Every tensor that moved or is gone, and every submodule that is another, all at once."""
        return [*self._tensors.moved(), *self._modules.moved()]

    def accept(self) -> None:
        """Take the present addresses as the expected ones, after graphs that read the old ones were dropped."""
        self._tensors.accept()
        self._modules.accept()
        self._live_modules = self._modules.values()

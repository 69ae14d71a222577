"""The addresses that graphs read from, watched so that a moved tensor is caught instead of replayed.

A graph reads parameters and caches by address. Whatever replaces such a tensor (a reload, `.data = …`, `.to()`) leaves
the graph reading freed memory without any error. An AddressBook remembers the addresses at capture and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import getitem

import torch

_address = torch.Tensor.data_ptr
PARTS = 4


@dataclass(frozen=True, slots=True)
class Moved:
    """One tensor that is not where graphs expect it: addresses in bytes, None for a tensor that is gone."""

    name: str
    before: int
    now: int | None

    def __str__(self) -> str:
        return f"{self.name}: {self.before:#x} -> {'gone' if self.now is None else hex(self.now)}"


class AddressBook:
    """Addresses of named tensors, looked up through their owners so that a replaced object is seen too.

    `unchanged()` costs about 100 ns a tensor. Tensors that appear later, and those of a submodule put in the place of
    another, are not in the book: whoever does that calls `invalidate`.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._owners: list[Mapping[str, torch.Tensor]] = []
        self._keys: list[str] = []
        self._expected: list[int] = []

    def __len__(self) -> int:
        return len(self._owners)

    def watch(self, source: torch.nn.Module | Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Add a module's parameters and buffers, or a mapping's tensors. The mapping is kept and read again."""
        if isinstance(source, torch.nn.Module):
            for path, module in source.named_modules():
                for owner in (module._parameters, module._buffers):
                    self._add(owner, prefix + (f"{path}." if path else ""))
        else:
            self._add(source, prefix)

    def _add(self, owner: Mapping[str, torch.Tensor], prefix: str) -> None:
        for name, tensor in owner.items():
            if tensor is not None:
                self._names.append(prefix + name)
                self._owners.append(owner)
                self._keys.append(name)
                self._expected.append(tensor.data_ptr())

    def unchanged(self, part: int | None = None) -> bool:
        """True when every tensor (of one of PARTS parts) is where it was. In C loops: it is asked at every step."""
        chosen = slice(None) if part is None else slice(part, None, PARTS)
        try:
            found = list(map(_address, map(getitem, self._owners[chosen], self._keys[chosen])))
            return found == self._expected[chosen]
        except (KeyError, TypeError):  # removed, or set to None: `moved()` names it
            return False

    def moved(self) -> list[Moved]:
        """Every tensor that moved or is gone, all at once."""
        found = []
        for label, owner, key, expected in zip(self._names, self._owners, self._keys, self._expected, strict=True):
            tensor = owner.get(key)
            now = None if tensor is None else tensor.data_ptr()
            if now != expected:
                found.append(Moved(label, expected, now))
        return found

    def accept(self) -> None:
        """Take the present addresses as the expected ones, after graphs that read the old ones were dropped."""
        kept = [(label, owner, key) for label, owner, key in zip(self._names, self._owners, self._keys, strict=True)
                if owner.get(key) is not None]
        self._names = [label for label, _, _ in kept]
        self._owners = [owner for _, owner, _ in kept]
        self._keys = [key for _, _, key in kept]
        self._expected = [owner[key].data_ptr() for _, owner, key in kept]

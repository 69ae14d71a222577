"""The addresses that graphs read from, watched so that a moved tensor is caught instead of replayed.

A graph reads parameters and caches by address. Whatever replaces such a tensor (a reload, `.data = …`, `.to()`, another
submodule in the place of one) leaves the graph reading what is freed, or no longer the model's, without any error. An
AddressBook remembers the addresses at capture and compares.
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
    """A tensor or submodule that is not the one graphs expect: addresses in bytes (a module's `id`), None if gone."""

    name: str
    before: int
    now: int | None

    def __str__(self) -> str:
        return f"{self.name}: {self.before:#x} -> {'gone' if self.now is None else hex(self.now)}"


class AddressBook:
    """Addresses of named tensors, looked up through their owners so that a replaced object is seen too.

    `unchanged()` costs about 100 ns a tensor, and less a submodule. What appears later is not in the book: whoever adds
    a tensor or a submodule calls `invalidate`.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._owners: list[Mapping[str, torch.Tensor]] = []
        self._keys: list[str] = []
        self._expected: list[int] = []
        self._places: list[str] = []  # of submodules, in words
        self._parents: list[Mapping[str, torch.nn.Module | None]] = []
        self._children: list[str] = []
        self._modules: list[torch.nn.Module] = []  # themselves: an `id` may come again

    def __len__(self) -> int:
        return len(self._owners)

    def watch(self, source: torch.nn.Module | Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Add a module's parameters and buffers, or a mapping's tensors. The mapping is kept and read again."""
        if isinstance(source, torch.nn.Module):
            for path, module in source.named_modules():
                inside = prefix + (f"{path}." if path else "")
                for owner in (module._parameters, module._buffers):
                    self._add(owner, inside)
                self._add_children(module._modules, inside)
        else:
            self._add(source, prefix)

    def _add(self, owner: Mapping[str, torch.Tensor], prefix: str) -> None:
        for name, tensor in owner.items():
            if tensor is not None:
                self._names.append(prefix + name)
                self._owners.append(owner)
                self._keys.append(name)
                self._expected.append(tensor.data_ptr())

    def _add_children(self, parent: Mapping[str, torch.nn.Module | None], prefix: str) -> None:
        for name, child in parent.items():
            if child is not None:
                self._places.append(prefix + name)
                self._parents.append(parent)
                self._children.append(name)
                self._modules.append(child)

    def unchanged(self, part: int | None = None) -> bool:
        """True when every tensor and submodule (of one of PARTS parts) is where it was. In C loops: steps ask it."""
        chosen = slice(None) if part is None else slice(part, None, PARTS)
        try:
            found = list(map(_address, map(getitem, self._owners[chosen], self._keys[chosen])))
            return found == self._expected[chosen] and self.has_its_modules(part)
        except (KeyError, TypeError):  # removed, or set to None: `moved()` names it
            return False

    def has_its_modules(self, part: int | None = None) -> bool:
        """Whether no submodule (of one of PARTS parts) is gone, or another."""
        chosen = slice(None) if part is None else slice(part, None, PARTS)
        try:
            return list(map(getitem, self._parents[chosen], self._children[chosen])) == self._modules[chosen]
        except KeyError:
            return False

    def moved(self) -> list[Moved]:
        """Every tensor that moved or is gone, and every submodule that is another, all at once."""
        found = []
        for label, owner, key, expected in zip(self._names, self._owners, self._keys, self._expected, strict=True):
            tensor = owner.get(key)
            now = None if tensor is None else tensor.data_ptr()
            if now != expected:
                found.append(Moved(label, expected, now))
        for label, parent, child, module in zip(self._places, self._parents, self._children, self._modules,
                                                strict=True):
            if parent.get(child) is not module:
                other = parent.get(child)
                found.append(Moved(label, id(module), None if other is None else id(other)))
        return found

    def accept(self) -> None:
        """Take the present addresses as the expected ones, after graphs that read the old ones were dropped."""
        kept = [(label, owner, key) for label, owner, key in zip(self._names, self._owners, self._keys, strict=True)
                if owner.get(key) is not None]
        self._names = [label for label, _, _ in kept]
        self._owners = [owner for _, owner, _ in kept]
        self._keys = [key for _, _, key in kept]
        self._expected = [owner[key].data_ptr() for _, owner, key in kept]
        present = [(label, parent, child) for label, parent, child in
                   zip(self._places, self._parents, self._children, strict=True) if parent.get(child) is not None]
        self._places = [label for label, _, _ in present]
        self._parents = [parent for _, parent, _ in present]
        self._children = [child for _, _, child in present]
        self._modules = [parent[child] for _, parent, child in present]

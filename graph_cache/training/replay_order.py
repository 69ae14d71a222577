"""The graphed calls of one chain, and which of them may serve a call now.

Calls are captured in the order in which a recorded step made them, forwards first, then backwards. A forward's
temporaries may lie in memory that later calls save into, so a call is served only by a pair behind every pair whose
backward is still to come. Knows neither modules nor autograd.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Pair = TypeVar("Pair")


class ReplayOrder(Generic[Pair]):
    """Pairs by what they serve, in capture order; each is free or awaits its backward."""

    def __init__(self) -> None:
        self._signatures: list[Hashable] = []
        self._indices: dict[Hashable, list[int]] = {}
        self._awaiting: list[bool] = []
        self._last = -1  # the last place that awaits its backward
        self.pairs: list[Pair | None] = []

    def __len__(self) -> int:
        return len(self._signatures)

    @property
    def awaiting(self) -> int:
        """How many pairs await their backward."""
        return sum(self._awaiting)

    def knows(self, signature: Hashable) -> bool:
        """Whether any pair serves this kind of call."""
        return signature in self._indices

    def signatures(self) -> set[Hashable]:
        """What its pairs serve."""
        return set(self._indices)

    def signature(self, index: int) -> Hashable:
        """What the pair at this place serves."""
        return self._signatures[index]

    def next_index(self) -> int:
        """The place behind the last that awaits its backward, which a step repeated as recorded asks for; 0 if none."""
        return self._last + 1

    def find(self, signature: Hashable, after: int = -1) -> int | None:
        """The first place that may serve a call of this kind now, and lies behind the given one."""
        first = max(self._last, after)
        return next((index for index in self._indices.get(signature, ()) if index > first), None)

    def add(self, signature: Hashable) -> int:
        """A new last place for calls of this kind."""
        index = len(self._signatures)
        self._signatures.append(signature)
        self._indices.setdefault(signature, []).append(index)
        self._awaiting.append(False)
        self.pairs.append(None)
        return index

    def serves(self, index: int) -> bool:
        """Whether this place may serve calls, that is, was not removed."""
        return index in self._indices.get(self._signatures[index], ())

    def remove(self, index: int) -> None:
        """This place serves nothing any more: its capture failed."""
        indices = self._indices[self._signatures[index]]
        indices.remove(index)
        if not indices:
            del self._indices[self._signatures[index]]  # what it served is unknown again

    def await_backward(self, index: int) -> None:
        """The pair at this place, behind all that await theirs, was used by a forward."""
        self._awaiting[index] = True
        self._last = index

    def release(self, index: int) -> None:
        """Its backward is done, or will never come."""
        self._awaiting[index] = False
        while self._last >= 0 and not self._awaiting[self._last]:
            self._last -= 1

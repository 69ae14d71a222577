"""The graphed calls of one kind of step, and which of them may serve a call now.

Calls are captured in the order in which a recorded step made them, forwards first, then backwards. A forward's
temporaries may lie in memory that later calls save into, so a call is served only by a pair behind every pair whose
backward is still to come. Knows neither modules nor autograd.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Pair = TypeVar("Pair")


class InstanceOrder(Generic[Pair]):
    """Pairs by what they serve, in capture order; each is free or awaits its backward.

    While recording, `take` makes room for a new pair where none fits; while replaying it returns None.
    """

    def __init__(self) -> None:
        self._kinds: list[Hashable] = []
        self._places: dict[Hashable, list[int]] = {}
        self._awaiting: set[int] = set()
        self.pairs: list[Pair | None] = []

    def __len__(self) -> int:
        return len(self._kinds)

    @property
    def awaiting(self) -> int:
        """How many pairs await their backward."""
        return len(self._awaiting)

    def knows(self, kind: Hashable) -> bool:
        """Whether any pair serves this kind of call."""
        return kind in self._places

    def kind(self, place: int) -> Hashable:
        """What the pair at this place serves."""
        return self._kinds[place]

    def find(self, kind: Hashable) -> int | None:
        """The first place that may serve a call of this kind now."""
        behind = max(self._awaiting, default=-1)
        return next((place for place in self._places.get(kind, ()) if place > behind), None)

    def add(self, kind: Hashable) -> int:
        """A new last place for calls of this kind."""
        place = len(self._kinds)
        self._kinds.append(kind)
        self._places.setdefault(kind, []).append(place)
        self.pairs.append(None)
        return place

    def remove(self, place: int) -> None:
        """This place serves nothing any more: its capture failed."""
        self._places[self._kinds[place]].remove(place)

    def await_backward(self, place: int) -> None:
        """The pair at this place was used by a forward."""
        self._awaiting.add(place)

    def release(self, place: int) -> None:
        """Its backward is done, or will never come."""
        self._awaiting.discard(place)

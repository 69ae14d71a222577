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
        self._kinds: list[Hashable] = []
        self._places: dict[Hashable, list[int]] = {}
        self._awaits: list[bool] = []
        self._last = -1  # the last place that awaits its backward
        self.pairs: list[Pair | None] = []

    def __len__(self) -> int:
        return len(self._kinds)

    @property
    def awaiting(self) -> int:
        """How many pairs await their backward."""
        return sum(self._awaits)

    def knows(self, kind: Hashable) -> bool:
        """Whether any pair serves this kind of call."""
        return kind in self._places

    def kinds(self) -> set[Hashable]:
        """What its pairs serve."""
        return set(self._places)

    def kind(self, place: int) -> Hashable:
        """What the pair at this place serves."""
        return self._kinds[place]

    def following(self) -> int:
        """The place behind the last that awaits its backward, which a step repeated as recorded asks for; 0 if none."""
        return self._last + 1

    def find(self, kind: Hashable, behind: int = -1) -> int | None:
        """The first place that may serve a call of this kind now, and lies behind the given one."""
        first = max(self._last, behind)
        return next((place for place in self._places.get(kind, ()) if place > first), None)

    def add(self, kind: Hashable) -> int:
        """A new last place for calls of this kind."""
        place = len(self._kinds)
        self._kinds.append(kind)
        self._places.setdefault(kind, []).append(place)
        self._awaits.append(False)
        self.pairs.append(None)
        return place

    def serves(self, place: int) -> bool:
        """Whether this place may serve calls, that is, was not removed."""
        return place in self._places.get(self._kinds[place], ())

    def remove(self, place: int) -> None:
        """This place serves nothing any more: its capture failed."""
        places = self._places[self._kinds[place]]
        places.remove(place)
        if not places:
            del self._places[self._kinds[place]]  # what it served is unknown again

    def await_backward(self, place: int) -> None:
        """The pair at this place, behind all that await theirs, was used by a forward."""
        self._awaits[place] = True
        self._last = place

    def release(self, place: int) -> None:
        """Its backward is done, or will never come."""
        self._awaits[place] = False
        while self._last >= 0 and not self._awaits[self._last]:
            self._last -= 1

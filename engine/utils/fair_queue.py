"""A queue for places to work in, in which one client's many tasks make way for other clients' tasks."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Ticket(NamedTuple):
    """A task's claim to a place: whose it is, its rank among the client's tasks, and a number in order of arrival."""

    client: str  # "": unknown, and no other task is the same client's
    rank: int
    number: int


class FairQueue(Generic[T]):
    """Decides which waiting task runs next in one of `places`. Not thread-safe.

    - The client with the fewest running tasks comes first; of several, the one that has waited longest for a place.
    - A client's tasks run by rank, lowest first, and in order within a rank.
    - Tasks beyond the first of each client, and tasks of a rank above 0, run in at most half of the places, rounded
      down, but in one at least. So a place is left for a client that comes later.
    """

    def __init__(self, places: int):
        self._places = places
        self._max_further = max(1, places // 2)
        self._waiting: dict[Ticket, T] = {}
        self._running: set[Ticket] = set()
        self._served: dict[str, int] = {}  # when a client with tasks last got a place
        self._numbers, self._turns = itertools.count(), itertools.count(1)

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, item: T, client: str = "", rank: int = 0) -> Ticket:
        """Add a waiting task and return its ticket."""
        ticket = Ticket(client, rank, next(self._numbers))
        self._waiting[ticket] = item
        return ticket

    def take(self) -> tuple[Ticket, T] | None:
        """Return the next task, which takes a place until `done`; None if none may run now."""
        if len(self._running) >= self._places:
            return None
        running = Counter(one.client for one in self._running if one.client)
        is_full = self._further(self._running) >= self._max_further
        allowed = [one for one in self._waiting if not (is_full and self._adds_further(one, running))]
        if not allowed:
            return None
        ticket = min(allowed, key=lambda one: (running[one.client], self._served.get(one.client, 0), *one[1:]))
        self._running.add(ticket)
        if ticket.client:
            self._served[ticket.client] = next(self._turns)
        return ticket, self._waiting.pop(ticket)

    def done(self, ticket: Ticket) -> None:
        """Give the place of a task back."""
        self._running.remove(ticket)
        self._forget(ticket.client)

    def remove(self, ticket: Ticket) -> bool:
        """Remove a task that waits. Returns whether it did."""
        if ticket not in self._waiting:
            return False
        del self._waiting[ticket]
        self._forget(ticket.client)
        return True

    def clear(self) -> list[T]:
        """Remove and return all tasks that wait."""
        items = list(self._waiting.values())
        self._waiting.clear()
        return items

    def _adds_further(self, ticket: Ticket, running: Counter[str]) -> bool:
        is_further = ticket.rank > 0 or running[ticket.client] > 0
        return is_further and self._further({*self._running, ticket}) > self._further(self._running)

    def _further(self, tasks: set[Ticket]) -> int:
        """Return how many tasks are beyond the first of their client, or of a rank above 0."""
        count, ranked = Counter(one.client for one in tasks), Counter(one.client for one in tasks if one.rank)
        return sum(max(count[one] - 1 if one else 0, ranked[one]) for one in count)

    def _forget(self, client: str) -> None:
        if client in self._served and not any(one.client == client for one in (*self._waiting, *self._running)):
            del self._served[client]

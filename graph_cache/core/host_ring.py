"""Asynchronous copies of results to the host, through a ring of pinned slots.

Each copy is ordered after the work that produced its result, so a step can be enqueued before the previous one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graph_cache.backends.base import Backend
from graph_cache.errors import GraphError


class Ticket:
    """One result in flight. `read()` waits for it; read it before its slot is needed again."""

    def __init__(self, ring: HostRing, slot: int, rows: int, wait: Callable[[], None]):
        self.slot = slot
        self.rows = rows
        self.wait = wait
        self._ring = ring

    def read(self) -> torch.Tensor:
        """Wait for the result and return it, [rows, …] on the host: a copy that the caller owns.

        Frees the slot. Raises GraphError if it was read before.
        """
        return self._ring.read(self)


class HostRing:
    """`depth` slots of [max_rows, *shape] each. Use from one thread."""

    def __init__(self, backend: Backend, max_rows: int, dtype: torch.dtype, shape: Sequence[int] = (), depth: int = 2):
        self._backend = backend
        self._slots = [backend.host_tensor((max_rows, *shape), dtype) for _ in range(depth)]
        self._tickets: list[Ticket | None] = [None] * depth
        self._next = 0

    def push(self, source: torch.Tensor) -> Ticket:
        """Enqueue a copy of `source`, [rows, …], after the work enqueued so far, and return without waiting.

        Raises GraphError if the slot's previous result was not read, rather than dropping it.
        """
        slot = self._next
        if self._tickets[slot] is not None:
            raise GraphError(f"all {len(self._slots)} slots hold results that were not read: read the oldest first")
        rows = source.shape[0]
        wait = self._backend.copy_to_host(self._slots[slot][:rows], source)
        ticket = self._tickets[slot] = Ticket(self, slot, rows, wait)
        self._next = (slot + 1) % len(self._slots)
        return ticket

    def read(self, ticket: Ticket) -> torch.Tensor:
        """Wait for a ticket's result; the same as `Ticket.read`."""
        if self._tickets[ticket.slot] is not ticket:
            raise GraphError("this result was already read; a ticket is read once")
        ticket.wait()
        value = self._slots[ticket.slot][: ticket.rows].clone()
        self._tickets[ticket.slot] = None
        return value

    def clear(self) -> None:
        """Discard every result in flight, after a step that failed before reading its results."""
        self._tickets = [None] * len(self._slots)

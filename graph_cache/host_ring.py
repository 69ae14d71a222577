"""Results on their way to the host: a ring of pinned slots, filled by copies ordered after the work that made them.

With it a step may be enqueued before the last one was read. Knows shapes and slots, not what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graph_cache.backends.base import Backend
from graph_cache.errors import GraphError


class Ticket:
    """One result under way. `read()` waits for it; it must be read before its slot comes round again."""

    def __init__(self, ring: HostRing, slot: int, rows: int, wait: Callable[[], None]):
        self._ring = ring
        self._slot = slot
        self._rows = rows
        self._wait = wait

    def read(self) -> torch.Tensor:
        """The result, [rows, …] on the host: a copy that the caller owns. Frees the slot. Raises if read twice."""
        if self._ring._tickets[self._slot] is not self:
            raise GraphError("this result was read before; a ticket is read once")
        self._wait()
        value = self._ring._slots[self._slot][: self._rows].clone()
        self._ring._tickets[self._slot] = None
        return value


class HostRing:
    """`depth` slots of [max_rows, *shape] each. One thread pushes and reads."""

    def __init__(self, backend: Backend, max_rows: int, dtype: torch.dtype, shape: Sequence[int] = (), depth: int = 2):
        self._backend = backend
        self._slots = [backend.host_tensor((max_rows, *shape), dtype) for _ in range(depth)]
        self._tickets: list[Ticket | None] = [None] * depth
        self._next = 0

    def push(self, source: torch.Tensor) -> Ticket:
        """Enqueue a copy of `source`, [rows, …], after the work enqueued so far, and return without waiting.

        Raises GraphError when the slot's last result was never read: results are not dropped silently.
        """
        slot = self._next
        if self._tickets[slot] is not None:
            raise GraphError(f"all {len(self._slots)} slots hold results that were not read; read the oldest first")
        rows = source.shape[0]
        wait = self._backend.copy_to_host(self._slots[slot][:rows], source)
        ticket = self._tickets[slot] = Ticket(self, slot, rows, wait)
        self._next = (slot + 1) % len(self._slots)
        return ticket

    def clear(self) -> None:
        """Let go of every result under way, after a step that broke off before reading its own."""
        self._tickets = [None] * len(self._slots)

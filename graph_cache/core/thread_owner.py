"""Refuse a second thread where results and inputs are static memory, which calls of another thread would overwrite."""

from __future__ import annotations

import threading

from graph_cache.errors import GraphError


class ThreadOwner:
    """The thread that uses one piece of static memory, until it ends.

    A thread takes over from another that has ended, or with `takes_over`: it has waited for its turn.
    """

    def __init__(self, what: str):
        self._what = what
        self._owner: threading.Thread | None = None

    def check(self, takes_over: bool = False) -> None:
        """Raise GraphError if another thread that is alive is the owner."""
        owner = self._owner
        if owner is None or takes_over or owner.ident == threading.get_ident() or not owner.is_alive():
            return
        raise GraphError(
            f"{self._what} are used by the thread {owner.name!r}, and {threading.current_thread().name!r} would "
            "overwrite its inputs and results: use them from one thread, or load, run and copy the results within "
            "`with cache.pool.turn():` in every thread. Functions of GraphCache.graphed may be called from any thread"
        )

    def claim(self, takes_over: bool = False) -> None:
        """Make the calling thread the owner. Raises GraphError if another one is."""
        if self._owner is None or self._owner.ident != threading.get_ident():
            self.check(takes_over)
            self._owner = threading.current_thread()

"""One observed run: what is compared before and after it, what observes it, and what is restored.

The sequence of every guard: take the state, observe the run, compare, give reasons, restore.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from graph_cache.guards.audit import StorageAudit
from graph_cache.guards.changes import HostState
from graph_cache.guards.code import Reads
from graph_cache.guards.namespaces import Namespace
from graph_cache.guards.refusals import refused_reads, unknown_closures, unwatched_reads
from graph_cache.guards.search import reachable


class Observation:
    """Context manager around a run and the conclusions from it. Restores the state at its end, unless it is `kept`.

    Args:
        state: The Python state before the run.
        reads: Where the run's code is recorded. None: its code is not observed.
        audit: Where the run's operations are recorded, and the memory that they overwrite. None: they are not.
        generators: Generators to restore.
    """

    def __init__(
        self,
        state: HostState,
        *,
        reads: Reads | None = None,
        audit: StorageAudit | None = None,
        generators: Sequence[torch.Generator] = (),
    ):
        self.state, self.reads, self.audit = state, reads, audit
        self.kept = False
        self._generators = [(one, one.get_state()) for one in {id(one): one for one in generators}.values()]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.kept:
            self.restore()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Observe the block, which is the run."""
        profiled = nullcontext() if self.reads is None else self.reads.observing()
        with profiled, nullcontext() if self.audit is None else self.audit.observing():
            yield

    def changes(self, was_read: Callable[[Tensor], bool] = lambda tensor: True) -> list[str]:
        """Return descriptions of the Python state that the run changed; see `HostState.changes`."""
        return self.state.changes(was_read)

    def refusals(self, ran: Reads | None, device: torch.device, earlier: StorageAudit | None = None) -> list[str]:
        """Return why a graph on `device` can't repeat what the code `ran` reads and the run's operations use."""
        used = [] if self.audit is None else self.audit.refusals(device, earlier)
        return refused_reads(ran, device) + used

    def restore(self) -> None:
        """Restore Python state, memory and generators to their state before the run."""
        self.state.restore()
        if self.audit is not None:
            self.audit.undo()
        for generator, before in self._generators:
            generator.set_state(before)


def read_by(
    roots: Sequence[tuple[str, object]],
    ran: Reads,
    ignored: Sequence[object] = (),
    without: tuple[type, ...] = (),
) -> tuple[Sequence[Namespace], list[str]]:
    """Return the state that code may read, and why it can't all be compared at every call."""
    found = reachable(roots, without=without, ignored=ignored, ran=ran, names=ran.names_to_follow)
    has_hooks = any(isinstance(one, dict) and one and all(map(callable, one.values())) for one in ignored)
    closures = [] if has_hooks else unknown_closures(found, ran)  # hooks that are not followed may call any
    return found, [*unwatched_reads(found), *closures]

"""What was recorded of a kind of step: chains of calls, one for each microbatch that is outstanding at a time.

Owns which chain serves a call, and the addresses that all of them read. Knows neither rounds nor what runs eager.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from graph_cache.addresses import AddressBook
from graph_cache.training.chain import Chain, Entry, Kind
from graph_cache.training.compiled import without_compiling
from graph_cache.training.job import Job
from graph_cache.training.stand_ins import MainGrads

logger = logging.getLogger(__name__)


class Program:
    """The chains recorded together. `current` is the one whose forward came last."""

    def __init__(self, job: Job):
        self.chains: list[Chain] = []
        self.current: Chain | None = None
        self.addresses = AddressBook()
        self._holds: list[Callable[[], bool]] = []
        self._job = job

    @property
    def awaiting(self) -> int:
        """How many calls await their backward."""
        return sum(chain.order.awaiting for chain in self.chains)

    def moved(self) -> list[str]:
        """What the graphs read that isn't where it was, in words."""
        found = [] if self.addresses.unchanged() else list(map(str, self.addresses.moved()))
        if not all(holds() for holds in self._holds):
            found.append("what surrounds calls, such as scales and cached weights of a precision")
        return found

    def knows(self, kind: Kind) -> bool:
        """Whether any chain serves such calls, free or not."""
        return any(chain.order.knows(kind) for chain in self.chains)

    def kinds(self) -> set[Kind]:
        """The calls that any chain serves."""
        return set().union(*(chain.order.kinds() for chain in self.chains))

    def entries(self) -> list[Entry]:
        """What was captured, chain by chain."""
        return [entry for chain in self.chains for entry in chain.entries()]

    def find(self, kind: Kind, tensors: Sequence[Tensor]) -> tuple[Chain, int, Entry] | None:
        """Where a call with these tensors may be served now."""
        for chain in self._in_turn():
            place = chain.find(kind)
            if place is not None and chain.order.pairs[place].finds(tensors):
                return chain, place, chain.order.pairs[place]
        return None

    def _in_turn(self) -> Iterator[Chain]:
        """The microbatch that is under way, then the others from the first, most of whose gradients need no copy."""
        if self.current is not None and self.current.order.awaiting:
            yield self.current
        yield from self.chains

    # ---- recording -------------------------------------------------------------------------------------------------

    def record(self, kind: Kind, tensors: Sequence[Tensor], args: tuple, kwargs: dict[str, Any]) -> tuple[Chain, int]:
        """A place for a call, which runs eager now: one that it would find in a replay, or a new one.

        A call with another's output belongs to the same microbatch. Of the rest, one that the microbatch under way has
        made already, or one of another model chunk, begins another.
        """
        connected = next((chain for chain in self._in_turn() if any(chain.sources(tensors))), None)
        if connected is None:
            for chain in self._in_turn():
                place = chain.find_recorded(kind, tensors)
                if place is not None:
                    self.current = chain
                    return chain, place
        chain, chunk = connected or self.current, kind[0].chunk
        if chain is None or (connected is None and (chain.chunk != chunk or chain.order.knows(kind))):
            chain = Chain(self._job, chunk)
            self.chains.append(chain)
        self.current = chain
        place = chain.find_recorded(kind, tensors)
        return chain, chain.record(kind, tensors, args, kwargs) if place is None else place

    # ---- capture ---------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture all chains. A call whose capture fails has no pair, and is refused from then on."""
        started = time.perf_counter()
        for chain in self.chains:
            chain.forget_outputs()
        owners = {kind[0].name: kind[0] for chain in self.chains for kind in chain.order.kinds()}.values()
        for owner in owners:
            owner.refresh()  # its mode may be another than when a call of it was last looked at
        self._job.pool.trim()  # what the eager steps left cached is of no use to the graphs' own memory
        with self._job.pool.session(), without_compiling(self._job.pool.backend), ExitStack() as hooks:
            for owner in owners:
                hooks.enter_context(owner.hooks_put_aside())
            for chain in self.chains:
                chain.capture()
        entries = self.entries()
        for owner in {entry.owner.name: entry.owner for entry in entries}.values():
            self.addresses.watch(owner.scope, prefix=f"{owner.name}.")
            self.addresses.watch(MainGrads(owner.scope), prefix=f"{owner.name}.main_grad of ")
            if owner.surroundings is not None:
                self._holds.append(owner.surroundings.watch(owner.submodules))
        self.addresses.watch(self._job.state)
        logger.info("captured %d forward and backward graphs in %.2f s", len(entries), time.perf_counter() - started)

    def retire(self) -> None:
        """Serve no more forwards; each chain's graphs go once its outstanding backwards are done."""
        for chain in self.chains:
            chain.retire()

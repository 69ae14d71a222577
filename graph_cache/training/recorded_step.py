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
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.compiled import without_compiling
from graph_cache.training.microbatch_graphs import CallSignature, CapturedCall, MicrobatchGraphs
from graph_cache.training.parameter_aliases import MainGrads

logger = logging.getLogger(__name__)


class RecordedStep:
    """The chains recorded together. `current` is the one whose forward came last."""

    def __init__(self, context: CaptureContext):
        self.graphs_of_microbatches: list[MicrobatchGraphs] = []
        self.current: MicrobatchGraphs | None = None
        self.addresses = AddressBook()
        self._ambient_checks: list[Callable[[], bool]] = []
        self._context = context

    @property
    def awaiting(self) -> int:
        """How many calls await their backward."""
        return sum(graphs.order.awaiting for graphs in self.graphs_of_microbatches)

    def moved(self) -> list[str]:
        """What the graphs read that isn't where it was, in words."""
        found = [] if self.addresses.unchanged() else list(map(str, self.addresses.moved()))
        if not all(check() for check in self._ambient_checks):
            found.append("what surrounds calls, such as scales and cached weights of a precision")
        return found

    def knows(self, signature: CallSignature) -> bool:
        """Whether any chain serves such calls, free or not."""
        return any(graphs.order.knows(signature) for graphs in self.graphs_of_microbatches)

    def signatures(self) -> set[CallSignature]:
        """The calls that any chain serves."""
        return set().union(*(graphs.order.signatures() for graphs in self.graphs_of_microbatches))

    def entries(self) -> list[CapturedCall]:
        """What was captured, chain by chain."""
        return [entry for graphs in self.graphs_of_microbatches for entry in graphs.entries()]

    def find(
        self, signature: CallSignature, tensors: Sequence[Tensor]
    ) -> tuple[MicrobatchGraphs, int, CapturedCall] | None:
        """Where a call with these tensors may be served now."""
        for graphs in self._by_priority():
            index = graphs.find(signature)
            if index is not None and graphs.order.pairs[index].accepts(tensors):
                return graphs, index, graphs.order.pairs[index]
        return None

    def _by_priority(self) -> Iterator[MicrobatchGraphs]:
        """The microbatch that is under way, then the others from the first, most of whose gradients need no copy."""
        if self.current is not None and self.current.order.awaiting:
            yield self.current
        yield from self.graphs_of_microbatches

    # ---- recording -------------------------------------------------------------------------------------------------

    def record(
        self, signature: CallSignature, tensors: Sequence[Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[MicrobatchGraphs, int]:
        """A place for a call, which runs eager now: one that it would find in a replay, or a new one.

        A call with another's output belongs to the same microbatch. Of the rest, one that the microbatch under way has
        made already, or one of another model chunk, begins another.
        """
        connected = next((graphs for graphs in self._by_priority() if any(graphs.sources(tensors))), None)
        if connected is None:
            for graphs in self._by_priority():
                index = graphs.find_recorded(signature, tensors)
                if index is not None:
                    self.current = graphs
                    return graphs, index
        graphs, chunk = connected or self.current, signature[0].chunk
        if graphs is None or (connected is None and (graphs.chunk != chunk or graphs.order.knows(signature))):
            graphs = MicrobatchGraphs(self._context, chunk)
            self.graphs_of_microbatches.append(graphs)
        self.current = graphs
        index = graphs.find_recorded(signature, tensors)
        return graphs, graphs.record(signature, tensors, args, kwargs) if index is None else index

    # ---- capture ---------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture all chains. A call whose capture fails has no pair, and is refused from then on."""
        started = time.perf_counter()
        for graphs in self.graphs_of_microbatches:
            graphs.forget_outputs()
        owners = {
            signature[0].name: signature[0]
            for graphs in self.graphs_of_microbatches
            for signature in graphs.order.signatures()
        }.values()
        for owner in owners:
            owner.refresh()  # its mode may be another than when a call of it was last looked at
        self._context.pool.trim()  # what the eager steps left cached is of no use to the graphs' own memory
        with self._context.pool.session(), without_compiling(self._context.pool.backend), ExitStack() as hooks:
            for owner in owners:
                hooks.enter_context(owner.hooks_put_aside())
            for graphs in self.graphs_of_microbatches:
                graphs.capture()
        entries = self.entries()
        for owner in {entry.owner.name: entry.owner for entry in entries}.values():
            self.addresses.watch(owner.scope, prefix=f"{owner.name}.")
            self.addresses.watch(MainGrads(owner.scope), prefix=f"{owner.name}.main_grad of ")
            if owner.surroundings is not None:
                self._ambient_checks.append(owner.surroundings.watch(owner.submodules))
        self.addresses.watch(self._context.state)
        logger.info("captured %d forward and backward graphs in %.2f s", len(entries), time.perf_counter() - started)

    def retire(self) -> None:
        """Serve no more forwards; each chain's graphs go once its outstanding backwards are done."""
        for graphs in self.graphs_of_microbatches:
            graphs.retire()

"""A recorded step: one MicrobatchGraphs for each microbatch that is outstanding at the same time.

Selects the graphs that serve a call, and watches the addresses that graphs read. When a step begins, and which calls
run eager, is decided in `modules.py`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from graph_cache.core.addresses import AddressBook
from graph_cache.core.capture_state import CaptureState
from graph_cache.guards.watch import Place, ReadTensors
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.compiled import without_compiling
from graph_cache.training.microbatch_graphs import CallEntry, CallSignature, MicrobatchGraphs
from graph_cache.training.parameter_aliases import MainGrads

logger = logging.getLogger(__name__)


class RecordedStep:
    """Graphs of the microbatches of one step. `current` belongs to the microbatch of the latest forward.

    `states` holds the state of each recorded signature's capture, in which failures are recorded.
    """

    def __init__(self, context: CaptureContext, states: Mapping[CallSignature, CaptureState]):
        self.graphs_of_microbatches: list[MicrobatchGraphs] = []
        self.current: MicrobatchGraphs | None = None
        self.addresses = AddressBook()
        self._ambient_checks: list[Callable[[], bool]] = []
        self._context, self._states = context, states

    @property
    def awaiting(self) -> int:
        """Number of calls that await their backward."""
        return sum(graphs.order.awaiting for graphs in self.graphs_of_microbatches)

    def moved(self) -> list[str]:
        """Return descriptions of state that the graphs read and that has moved."""
        found = [] if self.addresses.unchanged() else list(map(str, self.addresses.moved()))
        if not all(check() for check in self._ambient_checks):
            found.append("ambient state of calls, such as scales and cached weights of a precision")
        return found

    def knows(self, signature: CallSignature) -> bool:
        """Whether any graphs serve this signature, free or not."""
        return any(graphs.order.knows(signature) for graphs in self.graphs_of_microbatches)

    def captured_states(self) -> dict[CallSignature, CaptureState]:
        """Return the states of the captures by signature, without captures of which an entry failed."""
        return {signature: entry.capture for signature, entry in self.captured() if not entry.capture.failed}

    def captured(self) -> list[tuple[CallSignature, CallEntry]]:
        """Return the captured calls with their signatures, by microbatch."""
        return [one for graphs in self.graphs_of_microbatches for one in graphs.captured()]

    def entries(self) -> list[CallEntry]:
        """Return the captured calls, by microbatch."""
        return [entry for graphs in self.graphs_of_microbatches for entry in graphs.entries()]

    def find(
        self, signature: CallSignature, tensors: Sequence[Tensor]
    ) -> tuple[MicrobatchGraphs, int, CallEntry] | None:
        """Return the graphs, index and entry that may serve a call with these tensors now, or None."""
        for graphs in self._by_priority():
            index = graphs.find(signature)
            entry = None if index is None else graphs.order.entries[index]
            if index is not None and entry is not None and entry.accepts(tensors):
                return graphs, index, entry
        return None

    def _by_priority(self) -> Iterator[MicrobatchGraphs]:
        """Yield the microbatch in progress, then all from the first, which has most of the uncopied gradients."""
        if self.current is not None and self.current.order.awaiting:
            yield self.current
        yield from self.graphs_of_microbatches

    # ---- recording -------------------------------------------------------------------------------------------------

    def record(
        self, signature: CallSignature, tensors: Sequence[Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> tuple[MicrobatchGraphs, int]:
        """Record a call, which runs eager now, and return its graphs and index.

        Reuses the index that the call would find in a replay, if any. A call that takes another's output belongs to the
        same microbatch. Otherwise, a signature that the current microbatch already has, or another model chunk, begins
        a new microbatch.
        """
        connected = next((graphs for graphs in self._by_priority() if any(graphs.sources(tensors))), None)
        if connected is None:
            for graphs in self._by_priority():
                index = graphs.find_recorded(signature, tensors)
                if index is not None:
                    self.current = graphs
                    return graphs, index
        target, chunk = connected or self.current, signature[0].chunk
        if target is None or (connected is None and (target.chunk != chunk or target.order.knows(signature))):
            target = MicrobatchGraphs(self._context, chunk, self._states)
            self.graphs_of_microbatches.append(target)
        self.current = target
        index = target.find_recorded(signature, tensors)
        return target, target.record(signature, tensors, args, kwargs) if index is None else index

    # ---- capture ---------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture all microbatches. If the capture of a call fails, it gets no entry and runs eager from then on."""
        started = time.perf_counter()
        for graphs in self.graphs_of_microbatches:
            graphs.forget_outputs()
        owners = {
            signature[0].name: signature[0]
            for graphs in self.graphs_of_microbatches
            for signature in graphs.order.signatures()
        }.values()
        for owner in owners:
            owner.refresh()  # modes may have changed since its last call
        calls = Counter(
            graphs.order.signature(index)[0]
            for graphs in self.graphs_of_microbatches
            for index in range(len(graphs.order))
        )
        self._context.pool.trim()  # graphs can't use memory cached by eager steps
        with self._context.pool.session(), without_compiling(self._context.pool.backend), ExitStack() as hooks:
            for owner in owners:
                hooks.enter_context(owner.hooks_put_aside())
            for graphs in self.graphs_of_microbatches:
                graphs.capture({owner for owner, count in calls.items() if count > 1})
        entries = self.entries()
        for owner in {entry.owner.name: entry.owner for entry in entries}.values():
            captured = [entry.graphs for entry in entries if entry.owner is owner]
            stored = {(id(namespace.container), key) for one in captured for namespace, key, _ in one.stored}
            self.addresses.watch(owner.scope, prefix=f"{owner.name}.", trained=True, without=stored)
            self.addresses.watch(MainGrads(owner.scope), prefix=f"{owner.name}.main_grad of ")
            used = {address for one in captured for address in one.used}
            namespaces = [namespace for one in captured for namespace in one.namespaces]
            known = stored | set(_places_in(owner.scope))
            self.addresses.watch(ReadTensors(namespaces, used, registries=True, without=known), trained=True)
            for one in captured:
                one.namespaces = []
                owner.observed_backward(one.backward_reads)
            if owner.ambient is not None:
                self._ambient_checks.append(owner.ambient.watch(owner.submodules))
        self.addresses.watch(self._context.state)
        logger.info("captured %d forward and backward graphs in %.2f s", len(entries), time.perf_counter() - started)

    def retire(self) -> None:
        """Serve no more forwards, and destroy each microbatch's graphs once its backwards are done."""
        for graphs in self.graphs_of_microbatches:
            graphs.retire()


def _places_in(scope: nn.Module) -> Iterator[Place]:
    """Yield the places of the parameters and buffers of a module."""
    for module in scope.modules():
        for registry in (module._parameters, module._buffers):
            yield from ((id(registry), name) for name in registry)

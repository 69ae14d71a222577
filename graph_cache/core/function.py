"""Python state that a function captured by `GraphCache.graphed` reads and changes.

The first call of each bucket runs eager and is observed. A function that changes Python state is refused. What it reads
is watched, and a change makes calls run eager.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graph_cache.core.addresses import AddressBook
from graph_cache.guards.audit import StorageAudit, storage_of
from graph_cache.guards.changes import HostState
from graph_cache.guards.code import Reads
from graph_cache.guards.library_state import is_of_transformer_engine, precision_autocast
from graph_cache.guards.namespaces import Namespace
from graph_cache.guards.observation import Observation, read_by
from graph_cache.guards.parametrizations import caches, is_cached
from graph_cache.guards.quantizers import Quantizers
from graph_cache.guards.refusals import gradients_read, iterators_read
from graph_cache.guards.search import ANY_CODE
from graph_cache.guards.torch_settings import autocast_state, settings
from graph_cache.guards.watch import ReadTensors, ValueVersions, hooks_of


class FunctionState:
    """State that a capture of a function would bake in.

    Args:
        function: The function.
        watched: The module, or tensors by name, that it is known to read.
        addresses: Where tensors are watched that an observed call has read.
        generators: Generators that replays advance.
        device: Where graphs run.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        watched: nn.Module | Mapping[str, Tensor] | None,
        addresses: AddressBook,
        generators: Sequence[torch.Generator],
        device: torch.device,
    ):
        self._device = device
        self._roots: list[tuple[str, Any]] = [("function", function)]
        if isinstance(watched, nn.Module):
            self._roots.append((type(watched).__name__, watched))
        self._modules = list(watched.modules()) if isinstance(watched, nn.Module) else []
        self._addresses = addresses
        self._generators = tuple(generators)
        self._ran: Reads | None = None
        self._versions = ValueVersions(self._modules)
        self._outside: dict[int, torch.UntypedStorage] = {}  # memory that graphs read, kept alive
        self._quantized = list(filter(is_of_transformer_engine, self._modules))
        self._quantizers: list[Quantizers] = []  # what graphs read of these
        self._places = {  # of tensors in `addresses`
            (id(registry), name)
            for module in self._modules
            for registry in (module._parameters, module._buffers)
            for name in registry
        }

    def current(self) -> Hashable:
        """Return the modes of the process and the values that a capture bakes in now."""
        modes = [module.training for module in self._modules]
        kinds = map(type, self._modules)
        process = autocast_state(), settings(), precision_autocast(), caches()
        return *process, *modes, *kinds, hooks_of(self._modules), self._versions.current()

    def captured(self) -> None:
        """Remember the quantizers that a graph, captured just now, reads."""
        if self._quantized:
            self._quantizers.append(Quantizers(self._quantized))

    def reads_current_quantizers(self) -> bool:
        """Whether no quantizer of a graph was replaced, as it is by a call with another recipe."""
        return all(quantizers.are_current() for quantizers in self._quantizers)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the watched module."""
        return [parameter for module in self._modules for parameter in module.parameters(recurse=False)]

    def observe(self, run: Callable[[], Any], inputs: Mapping[str, Tensor], *, keeps: bool) -> tuple[bool, Any, str]:
        """Run, and return whether its effects were kept, its result, and why it can't be captured (empty if it can).

        All memory, generators and Python state are as before afterwards, except if Python state changed and `keeps`.
        `inputs` are the tensors, by name, that the run reads and must not write.
        """
        audit, reads = StorageAudit(saves=True), Reads()
        seen = Observation(
            self._state(ANY_CODE if self._ran is None else self._ran),
            reads=reads,
            audit=audit,
            generators=(torch.default_generator, *self._generators),
        )
        seen.kept = keeps  # this is the call itself, also if it raises
        with seen, self._versions.extended() as versions:
            with seen.running():
                result = run()
            self._ran = ran = (self._ran or Reads()).merged(reads)
            changed = seen.changes()
            namespaces, unwatched = read_by(self._roots, ran, ignored=self._generators)
            iterators = iterators_read(namespaces, ran.names)
            seen.kept = keeps and bool(changed or iterators or unwatched)  # another run would change these again
            reasons = [f"changes {', '.join(changed)}"] if changed else []
            reasons += [f"may read the iterator {', '.join(iterators)}"] if iterators else []
            if is_cached([*self._modules, *reads.modules.values()]):
                reasons.append("reads weights of parametrize.cached(): make its first call outside")
            reasons += unwatched + seen.refusals(ran, self._device) + gradients_read(namespaces, audit.outside)
            reasons += [f"writes to its input {name}: return the result" for name in _written(inputs, audit)]
            versions.exclude(seen.state.changed, made=False)
            versions.add(namespaces, ran)
        if reasons:
            return seen.kept, result, f"{'; '.join(reasons)}: a replay would not repeat this"
        self._versions.equate()  # libraries set attributes at their first call that no result depends on
        self._watch_tensors(namespaces, audit)
        return seen.kept, result, ""

    def refused_changes(self, run: Callable[[], None]) -> str:
        """Run a capture, and return what it changes of Python state, which is restored."""
        with Observation(self._state(self._ran)) as seen:
            run()
            found = seen.changes()
        return f"changes {', '.join(found)}: a replay would not repeat this" if found else ""

    def _state(self, ran: Any) -> HostState:
        return HostState(self._roots, ignored=self._generators, gradients=True, ran=ran, process=True)

    def _watch_tensors(self, namespaces: Sequence[Namespace], audit: StorageAudit) -> None:
        self._outside |= audit.outside
        found = ReadTensors(namespaces, audit.outside, registries=True, without=self._places)
        self._places |= found.places
        self._addresses.watch(found)


def _written(inputs: Mapping[str, Tensor], audit: StorageAudit) -> list[str]:
    found = {name: storage_of(tensor) for name, tensor in inputs.items()}
    return [name for name, storage in found.items() if storage is not None and storage._cdata in audit.written]

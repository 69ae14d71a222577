"""The graph of an iteration's call signature: its capture, its replay, and their comparison with eager."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graph_cache.backends.base import Backend, Memory
from graph_cache.core.addresses import AddressBook
from graph_cache.core.capture_state import CaptureState, CaptureStatus
from graph_cache.core.pool import GraphPool
from graph_cache.core.runner import GraphRunner
from graph_cache.core.shadow import UNCHECKED, Bytes
from graph_cache.errors import CaptureError, CaptureRefused
from graph_cache.guards.audit import storages_of
from graph_cache.guards.namespaces import Namespace
from graph_cache.guards.observation import Observation
from graph_cache.guards.quantizers import Quantizers, refuse_new_quantizers
from graph_cache.guards.search import objects_with_tensors
from graph_cache.training.call import CallKey, Result, as_kind, lacks_memory, load, modes_as, unflatten_call
from graph_cache.training.compiled import without_compiling
from graph_cache.training.initial_grads import InitialGrads
from graph_cache.training.observed_call import ObservedCall, describe_changes
from graph_cache.training.optimizers import OptimizerState
from graph_cache.training.parameter_aliases import MainGrads
from graph_cache.training.shadow_checks import Finding, compared
from graph_cache.training.side_effects import TensorHooks, made_objects
from graph_cache.training.step_state import StepState
from graph_cache.utils.layout import copy_into, copy_of, distinct


class IterationGraph:
    """Graph of one call signature: static arguments, results, and gradients before and after the step.

    Observe the step first: `seen` is what the last observed call showed.
    """

    def __init__(
        self,
        name: str,
        step: StepState,
        seen: ObservedCall,
        key: CallKey,
        tensors: Sequence[Tensor],
        state: CaptureState,
    ):
        self._name, self.step, self._seen = name, step, seen
        self.key = key
        self.state = state
        with torch.inference_mode(False):  # a replay can't write to inference tensors
            self.inputs = _copies_of(key, tensors)
        self.addresses = AddressBook()
        self.outside_addresses = AddressBook()  # of tensors outside modules
        self.quantizers = Quantizers([])  # of modules of Transformer Engine
        self.extra_state: set[str] = set()  # names of tensors outside modules
        self.result: Result | None = None
        self.outputs: list[Tensor] = []
        self.outside: list[torch.UntypedStorage] = []  # other memory that the graph may read, kept alive
        # Places in Python state in which the step stores results without history.
        self.stored: list[tuple[Namespace, Any, Tensor]] = []
        self.last_call = 0
        self.grads_before: list[tuple[Tensor, Tensor]] = []
        self.grads_after: list[tuple[Tensor, Tensor | None]] = []
        self.runner: GraphRunner | None = None
        self.argument_grads: list[tuple[int, Tensor]] = []  # gradients of arguments, by index
        self.checked = False  # the first replay was compared with eager

    # ---- capture ---------------------------------------------------------------------------------------------------

    def capture(self, pool: GraphPool, memory: Memory, generators: Sequence[torch.Generator]) -> None:
        """Capture the step. Raises CaptureError, with the gradients of parameters as before."""
        parameters = self.step.parameters()
        with torch.inference_mode(False):  # a replay can't write to inference tensors
            before = InitialGrads(parameters, pool.backend)
        runner = GraphRunner(
            self._run, pool, statics=list, generators=generators, memory=memory, grad=True, checked=False
        )
        try:
            with torch.inference_mode(False), without_compiling(pool.backend):
                runner.capture()
        except CaptureError:
            before.restore()
            raise
        self.runner = runner
        self.argument_grads = [
            (index, static.grad) for index, static in enumerate(self.inputs) if static.grad is not None
        ]
        known = {id(parameter): parameter for parameter in (*parameters, *self.step.parameters())}
        self.grads_after = [(parameter, parameter.grad) for parameter in known.values()]
        self.grads_before = before.read()

    def _run(self) -> None:
        """Run the step on the static inputs. Raises CaptureRefused for what a replay would not repeat."""
        self._refuse(self._seen.refusals)
        args, kwargs = unflatten_call(self.key, self.inputs)
        hooks = TensorHooks(self.inputs)
        with Observation(self.step.host_state()) as seen:
            with (
                torch.set_grad_enabled(self.key.grad),
                modes_as(self.key.autocast, self.key.settings),
                refuse_new_quantizers(self.step.quantized_modules()),
            ):
                self.result, self.outputs = Result.of(self.step.function(*args, **kwargs))
            if hooks.have_changed():
                self._refuse([TensorHooks.REFUSAL])
            if made := made_objects(self.result.leaves, (seen.state, args, kwargs)):
                self._refuse([f"returns a new {', '.join(made)}, and replays would return the same one"])
            if kinds := objects_with_tensors(self.result.leaves):
                self._refuse([f"returns tensors inside {', '.join(kinds)}: register the type with pytree"])
            self._refuse(describe_changes(seen.changes(lambda tensor: False)))
        self.stored = seen.state.results
        self._refuse(self._shared_memory())

    def _shared_memory(self) -> list[str]:
        """Return what is kept in memory that is kept elsewhere too: replays store copies, and lose that."""
        gradients = storages_of(self.step.gradients()).keys()
        kept = [(namespace.name_of(name), storages_of([tensor]).keys()) for namespace, name, tensor in self.stored]
        users = Counter(address for _, addresses in kept for address in addresses)
        reasons = [f"keeps a gradient in {name}: store a clone" for name, addresses in kept if addresses & gradients]
        if shared := [name for name, addresses in kept if any(users[address] > 1 for address in addresses)]:
            reasons.append(f"keeps one result in {' and '.join(shared)}: store clones")
        return reasons

    def _refuse(self, reasons: Sequence[str]) -> None:
        if reasons:
            raise CaptureRefused(f"{self._name} {'; '.join(reasons)}. A replay would not repeat this")

    def watch(self) -> None:
        """Watch the memory that the graph reads. The addresses are compared before each replay."""
        step, stored = self.step, {(id(namespace.container), name) for namespace, name, _ in self.stored}
        for root in step.roots:
            self.addresses.watch(root, prefix=f"{type(root).__name__}.", trained=True, without=stored)
            self.addresses.watch(MainGrads(root), prefix=f"{type(root).__name__}.main_grad of ")
        for optimizer in step.optimizers.values():
            self.addresses.watch(OptimizerState(optimizer), prefix=f"{type(optimizer).__name__}.")
        self.addresses.watch(step.extra_state)
        self.quantizers = Quantizers(step.quantized_modules())
        self.outside_addresses.watch(_Leaves(step.leaves), prefix="trained ")
        self.outside_addresses.watch(self._seen.read_tensors, trained=True)
        self.extra_state = set(step.extra_state)
        self.outside = self._seen.outside

    def moved(self) -> list[Any]:
        """Return what the graph reads and is no longer in place."""
        has_quantizers = self.quantizers.are_current()
        if self.addresses.unchanged() and self.outside_addresses.unchanged() and has_quantizers:
            return []
        found = [*self.addresses.moved(), *self.outside_addresses.moved()]
        return found if has_quantizers else [*found, "quantizers of Transformer Engine"]

    def must_warm_up_again(self) -> bool:
        """Whether eager calls must register modules and trained tensors, or recreate lost state, after a move."""
        return (
            not self.addresses.has_its_modules()
            or set(self.step.extra_state) != self.extra_state
            or bool(self.outside_addresses.moved())
            or not self.quantizers.are_current()
        )

    def drop(self, cause: CaptureStatus) -> None:
        """Destroy the graph. Parameters keep copies of gradients in its memory."""
        self.state.drop(cause)
        for parameter, grad in self.grads_after:
            if grad is not None and parameter.grad is grad:
                parameter.grad = grad.clone()
        self.runner.close()

    def row(self) -> dict[str, Any]:
        """Return the graph's state and sizes as plain values."""
        return self.state.row(
            engine=self.runner.engine,
            nbytes=self.runner.nbytes,
            capture_seconds=self.runner.capture_seconds,
            digest=self.runner.digest,
        )

    # ---- replay ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def replay(self, tensors: Sequence[Tensor]) -> Any:
        """Replay on the tensors of a call, and return its results."""
        self._load(tensors)
        self.runner.replay()
        self.state.replays += 1
        for parameter, grad in self.grads_after:
            parameter.grad = grad
        return self.results(tensors)

    def _load(self, tensors: Sequence[Tensor]) -> None:
        load(self.inputs, tensors)
        grads: list[Any] = [parameter.grad for parameter, _ in self.grads_before]  # none is None, by the signature
        load([static for _, static in self.grads_before], grads)

    def results(self, tensors: Sequence[Tensor]) -> Any:
        """Return copies of the results of the last run, with its effects on the arguments and on Python state."""
        self.pass_gradients(tensors)
        self.store_results()
        return self.result.build([output.detach().clone() for output in self.outputs])

    def pass_gradients(self, tensors: Sequence[Tensor]) -> None:
        """Give the arguments of a call copies of their gradients, as its backward does in eager."""
        for index, grad in self.argument_grads:
            tensors[index].requires_grad_()
            tensors[index].grad = copy_of(grad)
        for tensor, static in zip(tensors, self.inputs, strict=True):
            if static.requires_grad != tensor.requires_grad:
                tensor.requires_grad_(static.requires_grad)

    def store_results(self) -> None:
        """Store copies of results where the step stores them."""
        for namespace, key, tensor in self.stored:
            namespace.set(key, copy_of(tensor))

    # ---- shadow check ----------------------------------------------------------------------------------------------

    def compared_with_eager(
        self, tensors: Sequence[Tensor], generators: Sequence[torch.Generator], backend: Backend
    ) -> Finding:
        """Run the graph and the step on copies of parameters, gradients and optimizer state, and compare.

        Not checked are steps whose memory is not known as a whole (compiled code, Transformer Engine), steps whose
        counters the caller handles, and steps of several processes, whose reducers keep state beside memory.
        """
        has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self.step.compiled or not self.step.checks_attributes or self.step.quantized_modules() or has_ranks:
            return Finding(UNCHECKED, [])
        step, key = self.step, self.key
        parameters = [parameter for parameter, _ in self.grads_after]
        grads = [parameter.grad for parameter in parameters]
        kept = {id(grad): grad for grad in grads if grad is not None}
        if any(map(lacks_memory, (*step.all_parameters(), *kept.values()))):
            return Finding(UNCHECKED, [])
        contents = {address: copy_of(grad) for address, grad in kept.items()}
        # Eager adds to the gradients, of which it gets copies, and a graph writes separate memory.
        gradients = {grad.untyped_storage()._cdata for grad in kept.values()}
        storages = {storage._cdata: storage for storage in self.outside} | step.declared()
        regions = [
            Bytes(f"memory {index}", storage)
            for index, (address, storage) in enumerate(storages.items())
            if address not in gradients
        ]

        def replay() -> list[Tensor | None]:
            self._load(tensors)
            self.runner.replay()
            left: list[Tensor | None] = [
                *[grad for _, grad in self.grads_after],
                *[grad for _, grad in self.argument_grads],
            ]
            found = [None if one is None else copy_of(one) for one in (*self.outputs, *left)]
            for address, grad in kept.items():  # which may be memory of the graph
                copy_into(distinct(grad), distinct(contents[address]))
            return found

        def eager() -> list[Tensor | None]:
            inputs = _copies_of(key, tensors)
            args, kwargs = unflatten_call(key, inputs)
            copies = {address: copy_of(grad) for address, grad in contents.items()}
            try:
                for parameter, grad in zip(parameters, grads, strict=True):
                    parameter.grad = None if grad is None else copies[id(grad)]
                with (
                    Observation(step.host_state()),
                    backend.on_capture_stream(),
                    torch.set_grad_enabled(key.grad),
                ):
                    _, outputs = Result.of(step.function(*args, **kwargs))
                left = [parameter.grad for parameter in parameters]
                left += [inputs[index].grad for index, _ in self.argument_grads]
                return [None if one is None else copy_of(one) for one in (*outputs, *left)]
            finally:
                for parameter, grad in zip(parameters, grads, strict=True):
                    parameter.grad = grad

        registered = list(dict.fromkeys((backend.default_generator, *generators)))
        with torch.inference_mode(False):
            return compared(replay, eager, regions, registered, backend.device)


def _copies_of(key: CallKey, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the tensors of a call, as the step sees them."""
    found = [
        (tensor.detach().clone() if lacks_memory(tensor) else copy_of(tensor)).requires_grad_(tensor.requires_grad)
        for tensor in tensors
    ]
    return list(map(as_kind, found, key.kinds)) if key.kinds else found


class _Leaves(Mapping[str, Tensor]):
    """Trained tensors that no module has, by number, looked up on each access. They are held weakly."""

    def __init__(self, leaves: Mapping[int, Tensor]):
        self._references = {
            f"tensor {index}": weakref.ref(leaf) for index, leaf in enumerate(leaves.values()) if not lacks_memory(leaf)
        }

    def __getitem__(self, name: str) -> Tensor:
        leaf = self._references[name]()
        if leaf is None:
            raise KeyError(name)
        return leaf

    def __iter__(self) -> Iterator[str]:
        return iter(self._references)

    def __len__(self) -> int:
        return len(self._references)

"""A whole training iteration as one graph: forward, backward and all other device work of the step function.

Holds static copies of the step's arguments and the gradients that it leaves. A graph never serves a call that differs
from its capture.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from graph_cache.backends.base import Backend
from graph_cache.core.addresses import AddressBook
from graph_cache.core.capture_state import CaptureState, CaptureStatus
from graph_cache.core.keys import CAPTURE_FAILED, STALE
from graph_cache.core.pool import GraphPool
from graph_cache.core.runner import GraphRunner
from graph_cache.core.shadow import DIFFERS, NOT_DETERMINISTIC, UNCHECKED, Bytes, listed
from graph_cache.core.stats import CacheStats
from graph_cache.errors import CaptureError, CaptureRefused
from graph_cache.guards.audit import StorageAudit, storage_of
from graph_cache.guards.changes import HostState, ProcessState
from graph_cache.guards.code import Reads
from graph_cache.guards.library_state import is_of_transformer_engine, precision_autocast
from graph_cache.guards.namespaces import Namespace
from graph_cache.guards.observation import Observation, read_by
from graph_cache.guards.parametrizations import is_cached
from graph_cache.guards.quantizers import Quantizers, refuse_new_quantizers
from graph_cache.guards.refusals import iterators_read, refused_reads
from graph_cache.guards.search import ANY_CODE, objects_with_tensors
from graph_cache.guards.torch_settings import modes_active
from graph_cache.guards.watch import ReadTensors, Watch, gradient_hooks_of, hooks_of
from graph_cache.training.call import (
    CallKey,
    Result,
    any_on_other_device,
    as_kind,
    flatten_call,
    is_lazy,
    is_sparse,
    lacks_memory,
    load,
    modes_as,
    objects_of,
    unflatten_call,
)
from graph_cache.training.changing_values import ChangingValues
from graph_cache.training.compiled import at_compile_time, is_compiled, reached_from, without_compiling
from graph_cache.training.gradients import storage_users
from graph_cache.training.optimizers import OptimizerState, observe_steps, settings_of
from graph_cache.training.parameter_aliases import MainGrads
from graph_cache.training.reasons import (
    ARGUMENT_GRADIENT,
    CACHED_PARAMETRIZATION,
    COMPILED,
    ELSEWHERE,
    NO_MEMORY,
    OBJECT,
    PRECISION_AUTOCAST,
    TRANSFORM,
)
from graph_cache.training.shadow_checks import Finding, compared, describe
from graph_cache.training.side_effects import TensorHooks, made_objects
from graph_cache.training.threads import one_at_a_time
from graph_cache.utils.cpu_threads import ThreadTuner
from graph_cache.utils.layout import copy_into, copy_of, distinct, overlaps

logger = logging.getLogger(__name__)

SCOPE = "full_iteration"
MAX_SETTINGS = 4  # graphs that differ only in optimizer settings
MAX_GRAPHS = 64  # graphs of one iteration; the least recently used is dropped for another
MAX_WARMING = 64  # signatures without a graph at a time; each holds its arguments' values


@dataclass
class _Observation:
    """What the last observed eager call of one key showed.

    - `refusals`: why it can't be replayed.
    - `outside`: memory that it used besides that of modules and arguments.
    - `read_tensors`: tensors in Python state with such memory.
    """

    refusals: list[str] = field(default_factory=list)
    outside: list[torch.UntypedStorage] = field(default_factory=list)
    read_tensors: Mapping[str, Tensor] = field(default_factory=dict)


class _IterationGraph:
    """Graph of one call signature: static arguments, results, and gradients before and after the step."""

    def __init__(self, key: CallKey, tensors: Sequence[Tensor], state: CaptureState):
        self.key = key
        self.state = state
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


def _copies_of(key: CallKey, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the tensors of a call, as the step sees them."""
    found = [
        (tensor.detach().clone() if lacks_memory(tensor) else copy_of(tensor)).requires_grad_(tensor.requires_grad)
        for tensor in tensors
    ]
    return list(map(as_kind, found, key.kinds)) if key.kinds else found


IterationSignature = tuple[CallKey, tuple[Any, ...]]  # (key of the call, model state)


class CapturedIteration:
    """Run `step(*args, **kwargs)` from a graph, one per call signature.

    The signature consists of:

    - the structure of the arguments, shapes and dtypes of tensors, and every other value;
    - whether gradients are enabled;
    - train/eval mode of each module that the step runs or takes as an argument;
    - Python state that the step reads: attributes, closures and globals;
    - which trainable tensors require a gradient, and which already have one;
    - settings of optimizers that step inside.

    Each signature runs eager `warmup_steps` times (at least once), then is captured. Graphs are dropped when
    parameters, buffers or main_grads move, or tensors of `state`, which the step reads or writes besides them. Returned
    tensors have no history and are copies after a replay. `.grad` is left as the step leaves it.

    `threads` chooses the number of threads of each step on a CPU; None if it stays.

    A step that changes Python state is refused. Without `checks_attributes`, only replaced buffers count, for a
    framework whose counters the caller handles.

    With `checks`, the second call of a signature's graph is compared with eager, on copies of all state. See
    `shadow_checks.py`.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        pool: GraphPool,
        stats: CacheStats,
        *,
        name: str = "iteration",
        warmup_steps: int = 3,
        generators: Sequence[torch.Generator] = (),
        state: Mapping[str, Tensor] | None = None,
        checks_attributes: bool = True,
        threads: ThreadTuner | None = None,
        checks: bool = True,
    ):
        self.name = name
        self._threads, self._checks = threads, checks
        self._checks_attributes = checks_attributes
        self._step = step
        self._extra_state = {} if state is None else state
        self._pool = pool
        self._stats = stats
        self._warmup_steps = max(1, warmup_steps)
        self._generators = tuple(generators)
        self._memory = pool.new_memory()
        self._states: dict[IterationSignature, CaptureState] = {}
        self._captured: dict[IterationSignature, _IterationGraph] = {}
        # Weak: a step may create new modules at every call.
        self._modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        # Leaf tensors that the step trains and that no module has.
        self._leaves: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._owned: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # when last observed
        self._watch = Watch()
        self._changing = ChangingValues(stats)
        self._ran: Reads | None = None  # code that observed calls executed
        self._observations: dict[CallKey, _Observation] = {}
        self._calls = 0
        # Optimizers that step inside, in order of their first step.
        self._optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._count_compiled = at_compile_time(self._compiled_around)
        self._inspected = self._compiled = self._warned = self._ran_eager = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one iteration. Threads run theirs one after another."""
        if torch.compiler.is_dynamo_compiling():  # code around this is compiled: it contains the step
            self._count_compiled()
            result = self._step(*args, **kwargs)
            return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)
        return self._run(args, kwargs)

    @one_at_a_time
    def _run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if modes_active():
            self._stats.fallbacks[self.name, SCOPE, TRANSFORM] += 1
            return self._eager(args, kwargs)
        if precision_autocast() is not None:
            self._stats.fallbacks[self.name, SCOPE, PRECISION_AUTOCAST] += 1
            return self._eager(args, kwargs)
        if is_cached(self._known_modules()):
            self._stats.fallbacks[self.name, SCOPE, CACHED_PARAMETRIZATION] += 1
            return self._eager(args, kwargs)
        key, tensors = flatten_call(args, kwargs, training=True)
        if self._threads is not None:
            self._threads.begin((self.name, tuple([tensor.shape for tensor in tensors]), len(self._captured)))
        if any(is_sparse(one) or one.is_quantized or is_lazy(one) or overlaps(one) for one in tensors):
            self._stats.fallbacks[self.name, SCOPE, NO_MEMORY] += 1
            return self._eager(args, kwargs)
        if any_on_other_device(tensors, self._pool.backend.device):
            self._stats.fallbacks[self.name, SCOPE, ELSEWHERE] += 1
            return self._eager(args, kwargs)
        if any(map(_has_gradient_of_its_own, tensors)):
            self._stats.fallbacks[self.name, SCOPE, ARGUMENT_GRADIENT] += 1
            return self._eager(args, kwargs)
        self._discover_modules([value for value in key.values if isinstance(value, nn.Module)])
        signature = (key, self._state())
        captured = self._captured.get(signature)
        self._calls += 1
        if captured is not None and self._addresses_unchanged(captured):
            captured.last_call = self._calls
            if self._checks and not captured.checked and self._is_unequal(signature, captured, tensors):
                self._stats.fallbacks[self.name, SCOPE, CAPTURE_FAILED] += 1
                return self._eager(args, kwargs)
            return self._replay(captured, tensors)
        objects = [value for value in objects_of(key) if not isinstance(value, (nn.Module, Optimizer))]
        if objects_with_tensors(objects, without=(nn.Module, Optimizer)):
            self._stats.fallbacks[self.name, SCOPE, OBJECT] += 1
            return self._eager(args, kwargs)
        self._warn_of_settings(signature)
        self._changing.observe(self.name, key, signature[1][-1], is_new=signature not in self._states)
        state = self._states.get(signature) or self._add_state(signature)
        if not state.may_capture:
            self._stats.fallbacks[self.name, SCOPE, state.fallback_reason] += 1
            state.count_warmup()
            result = self._eager(args, kwargs, None if state.failed else key, tensors, objects)
            self._watch_more(signature)
            return result
        return self._capture(signature, state, key, tensors, args, kwargs)

    def _compiled_around(self) -> None:
        self._stats.fallbacks[self.name, SCOPE, COMPILED] += 1

    def clear(self) -> None:
        """Drop all graphs and release their memory.

        Known signatures, those with a failed capture included, are captured again at their next call.
        """
        self._drop_all(CaptureStatus.EVICTED)
        for state in self._states.values():
            if state.failed:
                state.drop(CaptureStatus.EVICTED)

    def _drop_all(self, cause: CaptureStatus) -> None:
        for signature in list(self._captured):
            self._drop(signature, cause)
        self._pool.trim()

    def _drop(self, signature: IterationSignature, cause: CaptureStatus) -> None:
        captured = self._captured.pop(signature)
        captured.state.drop(cause)
        for parameter, grad in captured.grads_after:
            if grad is not None and parameter.grad is grad:
                parameter.grad = grad.clone()
        captured.runner.close()

    def table(self) -> list[dict[str, Any]]:
        """Return a row of plain values for every graph."""
        return [
            {"module": self.name, "instance": index}
            | captured.state.row(
                engine=captured.runner.engine,
                nbytes=captured.runner.nbytes,
                capture_seconds=captured.runner.capture_seconds,
                digest=captured.runner.digest,
            )
            for index, captured in enumerate(self._captured.values())
        ]

    def _state(self) -> tuple[Any, ...]:
        """Return the model state that a graph bakes in.

        Modes and classes of modules, requires_grad, which parameters have a gradient or share one, Python state that
        the step reads, and optimizer settings.
        """
        parameters, ids = self._all_parameters(), {id(None): 0}
        grads = [ids.setdefault(id(parameter.grad), len(ids)) for parameter in parameters]
        known = self._known_modules()
        return (
            tuple(zip([module.training for module in known], map(type, known), strict=True)),
            tuple([parameter.requires_grad for parameter in parameters]),
            tuple(grads),
            (self._watch.signature(), hooks_of(known), gradient_hooks_of(parameters)),
            tuple(map(settings_of, self._optimizers.values())),
        )

    def _watch_more(self, signature: IterationSignature) -> None:
        """Count the warm-up of a signature for the same one with the Python state that its eager call has revealed."""
        key, state = signature
        now = (*state[:3], (self._watch.signature(), *state[3][1:]), *state[4:])
        counts = len(self._known_modules()), len(self._all_parameters()), len(now[3][0]), len(self._optimizers)
        if signature in self._states and now != state and counts == _known_counts(now):
            self._states.setdefault((key, now), self._states.pop(signature))

    def _warn_of_settings(self, signature: IterationSignature) -> None:
        """Warn once if this signature differs from a captured one only in optimizer settings."""
        if not self._warned and any(
            key == signature[0] and state[:-1] == signature[1][:-1] for key, state in self._captured
        ):
            self._warned = True
            logger.warning(
                "%s: settings of an optimizer inside the step changed; they are constants of a graph, so each value "
                "gets its own graph. A learning rate that changes belongs in a tensor (lr=torch.tensor(…), "
                "capturable=True), which a scheduler fills and every replay reads",
                self.name,
            )

    def _discover_modules(self, modules: Sequence[nn.Module]) -> None:
        """Register the modules among the arguments, and detect compiled code.

        Observed eager calls find the other modules. Compiled code can't be observed, so with compiled code, modules
        reachable from the step function are registered instead.
        """
        new = [module for module in modules if id(module) not in self._modules]
        if not self._inspected:
            self._inspected = True
            reached = reached_from(self._step)
            self._compiled = any(map(is_compiled, reached))
            if self._compiled:
                new += [value for value in reached if isinstance(value, nn.Module)]
        for module in new:
            self._register_module(module)
            self._compiled |= any(map(is_compiled, module.modules()))

    def _register_module(self, module: nn.Module) -> None:
        if id(module) not in self._modules:
            self._roots.add(module)
            for inner in module.modules():
                self._modules[id(inner)] = inner

    def _register_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.setdefault(id(optimizer), optimizer)

    def _superseded_by(self, signature: IterationSignature) -> list[IterationSignature]:
        """Return captured signatures that this one supersedes.

        - Signatures from before some module or optimizer was known: no call matches them again.
        - The least recently used, if there are MAX_GRAPHS.
        - Of those that differ only in optimizer settings (a learning rate schedule), all but the last MAX_SETTINGS - 1.
        """
        (key, state), counts = signature, _known_counts(signature[1])
        outdated = [other for other in self._captured if other[0] == key and _known_counts(other[1]) != counts]
        same_but_settings = [other for other in self._captured if other[0] == key and other[1][:-1] == state[:-1]]
        superseded = [*outdated, *same_but_settings[: max(0, len(same_but_settings) + 1 - MAX_SETTINGS)]]
        others = [other for other in self._captured if other not in superseded]
        if len(others) >= MAX_GRAPHS:
            superseded.append(min(others, key=lambda other: self._captured[other].last_call))
            logger.warning(
                "%s: %d graphs, the limit; the least recently used is dropped: pad inputs to fewer shapes",
                self.name,
                MAX_GRAPHS,
            )
        return list(dict.fromkeys(superseded))

    def _known_modules(self) -> list[nn.Module]:
        return [module for reference in self._modules.valuerefs() if (module := reference()) is not None]

    def _all_parameters(self) -> list[Tensor]:
        """Return the parameters of all known modules, once per module that has them, and other trained tensors."""
        parameters: list[Tensor] = [
            parameter
            for module in self._known_modules()
            for parameter in module._parameters.values()
            if parameter is not None
        ]
        return parameters + list(self._leaves.values())

    def _parameters(self) -> list[Tensor]:
        """Return the parameters that require a gradient or have one, without duplicates."""
        found = {id(parameter): parameter for parameter in self._all_parameters()}
        return [parameter for parameter in found.values() if parameter.requires_grad or parameter.grad is not None]

    def _note_owned(self) -> set[int]:
        """Remember the parameters of all known modules, and those that a module had before as other trained tensors.

        A step may still train a parameter that was replaced, such as one in a list. Return the ids of the parameters.
        """
        owned = {
            id(parameter): parameter
            for module in self._known_modules()
            for parameter in module._parameters.values()
            if parameter is not None
        }
        for identity, parameter in self._owned.items():
            if identity not in owned:
                self._leaves[identity] = parameter
        self._owned = weakref.WeakValueDictionary(owned)
        return set(owned)

    def _add_state(self, signature: IterationSignature) -> CaptureState:
        """Add a signature. If there are too many without a graph, forget those first."""
        waiting = [known for known, state in self._states.items() if not (state.captured or state.failed)]
        if len(waiting) >= MAX_WARMING:
            logger.warning(
                "%s: %d call signatures, none frequent enough to be captured: a shape or value of an argument, "
                "a number in a module attribute, or an optimizer setting keeps changing",
                self.name,
                len(waiting),
            )
            self._forget(waiting)
        state = self._states[signature] = CaptureState(self._warmup_steps)
        return state

    def _forget(self, signatures: Sequence[IterationSignature]) -> None:
        for signature in signatures:
            del self._states[signature]

    def _addresses_unchanged(self, captured: _IterationGraph) -> bool:
        """Whether all state that this graph reads is still in place. If not, drop all graphs for recapture."""
        has_quantizers = captured.quantizers.are_current()
        if captured.addresses.unchanged() and captured.outside_addresses.unchanged() and has_quantizers:
            return True
        moved = [*captured.addresses.moved(), *captured.outside_addresses.moved()]
        if not has_quantizers:
            moved.append("quantizers of Transformer Engine")
        logger.error(
            "%d tensors moved under graphs of %s, which were dropped: %s",
            len(moved),
            self.name,
            "; ".join(map(str, moved)),
        )
        self._stats.invalidations[STALE] += 1
        self._drop_all(CaptureStatus.STALE)
        if (
            not captured.addresses.has_its_modules()
            or set(self._extra_state) != captured.extra_state
            or captured.outside_addresses.moved()
            or not has_quantizers
        ):
            # Warm up again: eager calls must register modules and trained tensors, and recreate lost state.
            self._forget([signature for signature, state in self._states.items() if not state.failed])
        return False

    def _eager(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        key: CallKey | None = None,
        tensors: Sequence[Tensor] = (),
        objects: Sequence[Any] = (),
    ) -> Any:
        """Run the step. With a `key`, observe what it uses and changes of its arguments: `tensors` and `objects`."""
        if not self._ran_eager:  # first call: the capture stream can't use memory cached for other streams
            self._ran_eager = True
            self._pool.trim()
        observed = nullcontext() if key is None else self._observing(key, tensors, objects)
        # On the capture stream: autograd ties grad accumulators to the stream of their first use.
        with self._pool.backend.on_capture_stream(), observe_steps(self._register_optimizer), observed:
            result, outputs = Result.of(self._step(*args, **kwargs))
        return result.build([output.detach() for output in outputs])

    @contextmanager
    def _observing(self, key: CallKey, tensors: Sequence[Tensor], objects: Sequence[Any]) -> Iterator[None]:
        """Observe an eager run: register what it uses, and record why a replay could differ from it."""
        seen = _Observation()
        state, process = self._whole_state(objects), ProcessState(self._generators)
        hooks = TensorHooks(tensors)
        if self._compiled:  # compiled code bypasses the dispatcher, and profiling would compile it anew
            yield
            changes = state.changes() if self._checks_attributes else []
            seen.refusals = _describe_changes(changes + process.changes())
            seen.refusals += self._optimizers_on_host()
            if hooks.have_changed():
                seen.refusals.append(TensorHooks.REFUSAL)
            self._watch_reads(seen, objects, Reads.of_calls(self._known_modules(), self._step))
            self._observations[key] = seen
            return
        reads, audit = Reads(), StorageAudit()
        # Backwards run in this thread, where their code is observed. By itself, autograd uses a thread for each GPU.
        observed = Observation(state, reads=reads, audit=audit)  # its effects stay: this is the call itself
        with torch.autograd.set_multithreading_enabled(False), observed.running():
            yield
        device = self._pool.backend.device
        self._ran = (self._ran or Reads()).merged(reads)
        for module in reads.modules.values():
            self._register_module(module)
        arguments = {storage._cdata for tensor in tensors if (storage := storage_of(tensor)) is not None}
        owned = self._note_owned()
        for leaf in audit.leaves.values():
            storage = storage_of(leaf)
            if id(leaf) not in owned and (storage is None or storage._cdata not in arguments):
                self._leaves[id(leaf)] = leaf
        is_whole = not self._ran.compiled  # compiled functions bypass the dispatcher
        changes = state.changes(
            lambda tensor: not is_whole or (storage := storage_of(tensor)) is None or storage._cdata in audit.outside
        )
        seen.refusals = _describe_changes((changes if self._checks_attributes else []) + process.changes())
        if iterators := iterators_read(state.namespaces, self._ran.names) if self._checks_attributes else []:
            seen.refusals.append(f"may read the iterator {', '.join(iterators)}, which a replay would not advance")
        seen.refusals += refused_reads(self._ran, device)
        seen.refusals += self._optimizers_on_host() or audit.refusals(device)
        if hooks.have_changed():
            seen.refusals.append(TensorHooks.REFUSAL)
        declared = self._declared_storages()
        for index, tensor in enumerate(tensors):
            address = None if (storage := storage_of(tensor)) is None else storage._cdata
            if address in audit.written:
                seen.refusals.append(f"writes to its argument {index} in place: return the result")
            if address in declared:
                seen.refusals.append(f"takes memory of a module as argument {index}, of which a graph reads a copy")
        declared |= arguments
        other = [address for address in audit.outside if address not in declared]
        if not is_whole:
            # What compiled code has made looks like memory from before the run. Some of it is freed by now.
            other = [address for address in other if address not in reads.made and storage_users(address) > 1]
        seen.outside = [audit.outside[address] for address in other]
        if any(address in audit.computed for address in other):
            seen.refusals.append("uses a tensor that was computed from trainable tensors before the call")
        casts = {torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
        if any(audit.dtypes[address] & casts for address in other):
            seen.refusals.append("runs in an autocast region that holds casts of weights from before the call")
        if self._watch.signature():  # the first run may create state that later runs only read
            self._watch.exclude(state.changed)
        namespaces = self._watch_reads(seen, objects, self._ran)
        gradients = {storage._cdata for grad in self._gradients() if (storage := storage_of(grad)) is not None}
        seen.read_tensors = ReadTensors(namespaces, audit.outside.keys() - arguments - gradients)
        if len(self._observations) > 2 * MAX_WARMING:  # of forgotten signatures
            known = {key for key, _ in self._states}
            self._observations = {key: one for key, one in self._observations.items() if key in known}
        self._observations[key] = seen

    def _watch_reads(self, seen: _Observation, objects: Sequence[Any], ran: Reads) -> Sequence[Namespace]:
        """Watch what code may read of Python state, and return the state.

        Optimizers are left out: the signature holds their settings separately.
        """
        namespaces, unwatched = read_by(self._host_roots(objects), ran, without=(Optimizer,))
        if self._checks_attributes:
            seen.refusals += unwatched
        self._watch.leave_out(self._known_modules())
        self._watch.add(namespaces, ran)
        return namespaces

    def _optimizers_on_host(self) -> list[str]:
        """Return which optimizers a graph can't step, since they keep state in host memory."""
        device = self._pool.backend.device
        return [
            f"steps {type(optimizer).__name__}, which keeps state in host memory: step it outside, or create it with "
            "capturable=True"
            for optimizer in self._optimizers.values()
            if any(tensor.device.type != device.type for tensor in OptimizerState(optimizer).values())
        ]

    def _host_state(self) -> HostState:
        """Return the current Python state, of the process too, that a step must not change."""
        if self._checks_attributes:
            return self._whole_state(process=True)
        buffers = [(f"{type(module).__name__}._buffers", module._buffers) for module in self._known_modules()]
        return HostState(buffers, ignored=self._generators, process=True)

    def _whole_state(self, objects: Sequence[Any] = (), process: bool = False) -> HostState:
        """Return the current Python state that is reachable, also from these arguments."""
        ran = ANY_CODE if self._ran is None else self._ran
        roots = self._host_roots(objects)
        return HostState(roots, libraries=False, ignored=self._generators, ran=ran, process=process)

    def _host_roots(self, objects: Sequence[Any] = ()) -> list[tuple[str, Any]]:
        """Return the objects from which Python state is searched that the step reads or changes."""
        modules = [(type(module).__name__, module) for module in self._roots]
        optimizers = [(type(optimizer).__name__, optimizer) for optimizer in self._optimizers.values()]
        return [("step", self._step), *modules, *optimizers, *[("argument", value) for value in objects]]

    def _quantized_modules(self) -> list[nn.Module]:
        return list(filter(is_of_transformer_engine, self._known_modules()))

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._all_parameters() if parameter.grad is not None]

    def _declared_storages(self) -> set[int]:
        """Return the addresses of storages that a graph watches or copies."""
        return set(self._declared())

    def _declared(self) -> dict[int, torch.UntypedStorage]:
        """Return the storages that a graph watches or copies, by address."""
        modules = self._known_modules()
        tensors = [
            *self._all_parameters(),
            *self._gradients(),
            *[buffer for module in modules for buffer in module._buffers.values()],
            *[tensor for optimizer in self._optimizers.values() for tensor in OptimizerState(optimizer).values()],
            *[main_grad for root in self._roots for main_grad in MainGrads(root).values()],
            *self._extra_state.values(),
        ]
        storages = [storage_of(tensor) for tensor in tensors if tensor is not None]
        return {storage._cdata: storage for storage in storages if storage is not None}

    def _capture(
        self,
        signature: IterationSignature,
        state: CaptureState,
        key: CallKey,
        tensors: Sequence[Tensor],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """Capture this call and run it: by the capture itself if the backend executes captures, else by a replay."""
        self._pool.trim()  # the graph can't use memory cached by eager steps
        self._note_owned()
        parameters, seen = self._parameters(), self._observations.get(key, _Observation())
        with torch.inference_mode(False):  # a replay can't write to inference tensors
            captured = _IterationGraph(key, tensors, state)
            before = _InitialGrads(parameters, self._pool.backend)

        def body() -> None:
            self._refuse(seen.refusals)
            static_args, static_kwargs = unflatten_call(key, captured.inputs)
            hooks = TensorHooks(captured.inputs)
            with Observation(self._host_state()) as seen_capture:
                with (
                    torch.set_grad_enabled(key.grad),
                    modes_as(key.autocast, key.settings),
                    refuse_new_quantizers(self._quantized_modules()),
                ):
                    captured.result, captured.outputs = Result.of(self._step(*static_args, **static_kwargs))
                if hooks.have_changed():
                    self._refuse([TensorHooks.REFUSAL])
                if made := made_objects(captured.result.leaves, (seen_capture.state, static_args, static_kwargs)):
                    self._refuse([f"returns a new {', '.join(made)}, and replays would return the same one"])
                if kinds := objects_with_tensors(captured.result.leaves):
                    self._refuse([f"returns tensors inside {', '.join(kinds)}: register the type with pytree"])
                self._refuse(_describe_changes(seen_capture.changes(lambda tensor: False)))
            captured.stored = seen_capture.state.results

        runner = GraphRunner(
            body, self._pool, statics=list, generators=self._generators, memory=self._memory, grad=True, checked=False
        )
        try:
            with torch.inference_mode(False), without_compiling(self._pool.backend):
                runner.capture()
        except CaptureError as error:
            before.restore()
            logger.error("capture of %s failed, it will run eager: %s", self.name, error)
            state.fail(error)
            self._stats.capture_failed(self.name, SCOPE, error)
            self._stats.fallbacks[self.name, SCOPE, CAPTURE_FAILED] += 1
            return self._eager(args, kwargs)
        captured.runner = runner
        captured.argument_grads = [
            (index, static.grad) for index, static in enumerate(captured.inputs) if static.grad is not None
        ]
        known = {id(parameter): parameter for parameter in (*parameters, *self._parameters())}
        captured.grads_after = [(parameter, parameter.grad) for parameter in known.values()]
        captured.grads_before = before.read()
        for other in self._superseded_by(signature):
            self._drop(other, CaptureStatus.EVICTED)
        stored = {(id(namespace.container), name) for namespace, name, _ in captured.stored}
        for root in self._roots:
            captured.addresses.watch(root, prefix=f"{type(root).__name__}.", trained=True, without=stored)
            captured.addresses.watch(MainGrads(root), prefix=f"{type(root).__name__}.main_grad of ")
        for optimizer in self._optimizers.values():
            captured.addresses.watch(OptimizerState(optimizer), prefix=f"{type(optimizer).__name__}.")
        captured.addresses.watch(self._extra_state)
        captured.quantizers = Quantizers(self._quantized_modules())
        captured.outside_addresses.watch(_Leaves(self._leaves), prefix="trained ")
        captured.outside_addresses.watch(seen.read_tensors, trained=True)
        captured.extra_state = set(self._extra_state)
        captured.outside, captured.last_call = seen.outside, self._calls
        state.succeed()
        self._captured[signature] = captured
        self._stats.captures[self.name, SCOPE, "recorded"] += 1
        self._stats.observe_capture(runner.capture_seconds)
        self._pool.trim()  # release gradients that the step cleared: graphs can't use cached memory
        if not self._pool.backend.capture_runs:
            runner.replay()
        captured.pass_gradients(tensors)
        captured.store_results()
        return captured.result.build([output.detach().clone() for output in captured.outputs])

    @torch.no_grad()
    def _replay(self, captured: _IterationGraph, tensors: Sequence[Tensor]) -> Any:
        load(captured.inputs, tensors)
        grads: list[Any] = [parameter.grad for parameter, _ in captured.grads_before]  # none is None, by the signature
        load([static for _, static in captured.grads_before], grads)
        captured.runner.replay()
        captured.state.replays += 1
        self._stats.replays[self.name, SCOPE, "iteration", 1] += 1
        for parameter, grad in captured.grads_after:
            parameter.grad = grad
        captured.pass_gradients(tensors)
        captured.store_results()
        return captured.result.build([output.detach().clone() for output in captured.outputs])

    # ---- shadow check ----------------------------------------------------------------------------------------------

    def _is_unequal(self, signature: IterationSignature, captured: _IterationGraph, tensors: Sequence[Tensor]) -> bool:
        """Compare a replay with eager, and drop the graph if they differ. All state is as before afterwards."""
        captured.checked = True
        finding = self.compared_with_eager(captured, tensors)
        self._stats.shadow_checks[self.name, SCOPE, finding.outcome] += 1
        if finding.outcome == NOT_DETERMINISTIC:
            logger.warning("%s is not deterministic: two eager runs differ in %s", self.name, listed(finding.differing))
        if finding.outcome != DIFFERS:
            return False
        problem = describe(finding)
        logger.error("%s runs eager from now on: %s", self.name, problem)
        self._stats.shadow_mismatches[self.name, SCOPE] += 1
        self._drop(signature, CaptureStatus.EVICTED)
        captured.state.fail(problem)
        return True

    def compared_with_eager(self, captured: _IterationGraph, tensors: Sequence[Tensor]) -> Finding:
        """Run the graph and the step on copies of parameters, gradients and optimizer state, and compare.

        Not checked are steps whose memory is not known as a whole (compiled code, Transformer Engine), steps whose
        counters the caller handles, and steps of several processes, whose reducers keep state beside memory.
        """
        has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self._compiled or not self._checks_attributes or self._quantized_modules() or has_ranks:
            return Finding(UNCHECKED, [])
        key, backend = captured.key, self._pool.backend
        parameters = [parameter for parameter, _ in captured.grads_after]
        grads = [parameter.grad for parameter in parameters]
        kept = {id(grad): grad for grad in grads if grad is not None}
        if any(map(lacks_memory, (*self._all_parameters(), *kept.values()))):
            return Finding(UNCHECKED, [])
        contents = {address: copy_of(grad) for address, grad in kept.items()}
        # Eager adds to the gradients, of which it gets copies, and a graph writes separate memory.
        gradients = {grad.untyped_storage()._cdata for grad in kept.values()}
        storages = {storage._cdata: storage for storage in captured.outside} | self._declared()
        regions = [
            Bytes(f"memory {index}", storage)
            for index, (address, storage) in enumerate(storages.items())
            if address not in gradients
        ]

        def replay() -> list[Tensor | None]:
            load(captured.inputs, tensors)
            read: list[Any] = [parameter.grad for parameter, _ in captured.grads_before]  # none is None
            load([static for _, static in captured.grads_before], read)
            captured.runner.replay()
            left: list[Tensor | None] = [
                *[grad for _, grad in captured.grads_after],
                *[grad for _, grad in captured.argument_grads],
            ]
            found = [None if one is None else copy_of(one) for one in (*captured.outputs, *left)]
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
                    Observation(self._host_state()),
                    backend.on_capture_stream(),
                    torch.set_grad_enabled(key.grad),
                ):
                    _, outputs = Result.of(self._step(*args, **kwargs))
                left = [parameter.grad for parameter in parameters]
                left += [inputs[index].grad for index, _ in captured.argument_grads]
                return [None if one is None else copy_of(one) for one in (*outputs, *left)]
            finally:
                for parameter, grad in zip(parameters, grads, strict=True):
                    parameter.grad = grad

        generators = list(dict.fromkeys((backend.default_generator, *self._generators)))
        with torch.inference_mode(False):
            return compared(replay, eager, regions, generators, backend.device)

    def _refuse(self, reasons: Sequence[str]) -> None:
        if reasons:
            raise CaptureRefused(f"{self.name} {'; '.join(reasons)}. A replay would not repeat this")


def _has_gradient_of_its_own(tensor: Tensor) -> bool:
    """Whether the argument has a history or a gradient already, to which a replay could not add as eager does."""
    if not tensor.is_leaf:
        return torch.is_grad_enabled()
    return tensor.grad is not None


def _describe_changes(names: Sequence[str]) -> list[str]:
    """Return why changed Python state can't be replayed, as a list of at most one reason."""
    if not names:
        return []
    return [
        f"changes {', '.join(names)}: keep it outside the step, or in a tensor that is written in place (add_, copy_)"
    ]


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


class _InitialGrads:
    """Gradients that exist before a capture, and those among them that replays read.

    The step gets an alias of each gradient, so that we notice when it drops one. The graph doesn't read a gradient that
    is dropped before anything was captured, so it is released at once: a step that clears gradients first frees their
    memory as in eager. All others are held, whether the step leaves them or consumes them, as an optimizer does before
    `zero_grad`.
    """

    def __init__(self, parameters: Sequence[Tensor], backend: Backend):
        # For each parameter [original gradient, gradient that the graph reads]; empty if it had none or it was freed.
        self._grads: list[tuple[Tensor, list[Tensor]]] = []
        self._weakrefs: list[weakref.ref[Tensor]] = []
        users: dict[int, int] = {}
        aliases: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by id of the gradient, which parameters may share
        for parameter in parameters:
            grad = parameter.grad
            if grad is None:
                self._grads.append((parameter, []))
                continue
            if id(grad) not in aliases:
                # A capture that executes adds to a copy of the gradients, so that a failed one can be undone.
                read = grad.detach().clone() if backend.capture_runs else grad
                aliases[id(grad)] = read.detach(), [grad, read]
                self._weakrefs.append(_watch_alias(*aliases[id(grad)], users, backend))
            parameter.grad, held = aliases[id(grad)]
            self._grads.append((parameter, held))
        for _, held in aliases.values():
            if not lacks_memory(held[-1]):
                users[_storage(held[-1])] = storage_users(_storage(held[-1]))

    def restore(self) -> None:
        """Undo a failed capture. Gradients that the step cleared before anything was captured stay cleared."""
        for parameter, held in self._grads:
            parameter.grad = held[0] if held else None

    def read(self) -> list[tuple[Tensor, Tensor]]:
        """Return the gradients that a graph may read, which must be loaded before every replay."""
        return [(parameter, held[-1]) for parameter, held in self._grads if held]


def _watch_alias(alias: Tensor, held: list[Tensor], users: dict[int, int], backend: Backend) -> weakref.ref[Tensor]:
    """Clear `held` when this alias is freed, unless a graph reads the memory by then or may later.

    `users` counts the known tensors of each storage. One more means that the step made another tensor of the gradient
    and may still read it.
    """
    if lacks_memory(held[-1]):  # users of its component tensors aren't counted: hold it
        return weakref.ref(alias)
    storage = _storage(held[-1])

    def dropped(_: weakref.ref[Tensor]) -> None:
        others = storage_users(storage) > users[storage]  # includes the alias that is being freed
        users[storage] -= 1
        if not others and not backend.has_captured():
            users[storage] -= 1
            held.clear()

    return weakref.ref(alias, dropped)


def _storage(grad: Tensor) -> int:
    """Return the address of the storage object."""
    return grad.untyped_storage()._cdata


def _known_counts(state: tuple) -> tuple[int, ...]:
    """Return the numbers of known modules, trainable tensors, watched values and optimizers."""
    return len(state[0]), len(state[1]), len(state[3][0]), len(state[4])

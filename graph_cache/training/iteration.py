"""A whole training iteration as one graph: forward, backward and whatever else the step function does on the device.

Owns static copies of the step's arguments, the gradients that it leaves, and that a call which differs in anything
from the capture is never served by it. One thread calls it.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from graph_cache import keys
from graph_cache.addresses import AddressBook
from graph_cache.backends.base import Backend
from graph_cache.errors import CaptureError
from graph_cache.pool import GraphPool
from graph_cache.runner import GraphRunner
from graph_cache.stats import CacheStats
from graph_cache.training.call import (
    ELSEWHERE,
    NO_MEMORY,
    CallKey,
    Result,
    any_on_other_device,
    flatten_call,
    is_sparse,
    lacks_memory,
    load,
    unflatten_call,
)
from graph_cache.training.compiled import is_compiled, reached_from, without_compiling
from graph_cache.training.gradients import storage_users
from graph_cache.training.optimizers import OptimizerState, observe_steps, settings_of
from graph_cache.training.parameter_aliases import MainGrads
from graph_cache.training.side_effects import floats_of, numbers_of, refuse_replaced_buffers

logger = logging.getLogger(__name__)

SCOPE = "full_iteration"
WARMING = "warming_up"
FAILED = "capture_failed"
MAX_SETTINGS = 4  # graphs that differ in settings of optimizers alone
MAX_WARMING = 64  # kinds that are counted towards a capture at a time: what they were called with is held meanwhile


class _IterationGraph:
    """One kind of call: its static arguments, its graph, its results, and the gradients it starts from and leaves."""

    def __init__(self, key: CallKey, tensors: Sequence[Tensor]):
        self.key = key
        self.inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
        self.addresses = AddressBook()
        self.extra_state: set[str] = set()  # names of tensors outside of modules
        self.result: Result | None = None
        self.outputs: list[Tensor] = []
        self.grads_before: list[tuple[nn.Parameter, Tensor]] = []
        self.grads_after: list[tuple[nn.Parameter, Tensor | None]] = []
        self.runner: GraphRunner | None = None


class CapturedIteration:
    """`step(*args, **kwargs)` from a graph, one for each kind of call.

    A kind is the structure of the arguments, the shapes and dtypes of tensors, every other value, whether gradients are
    enabled, of each module train or eval and its floating-point attributes, which parameters want a gradient, and which
    have one already, and the settings of optimizers that step inside; modules among the arguments count with those that
    the step runs. Calls run eager `warmup_steps` times per kind (at least
    one), then are captured. A graph is dropped when parameters, buffers or main_grads moved, or tensors of `state`,
    which the step reads or writes beside them. Tensors that the step returns come back without history, from a replay
    as copies; `.grad` is left as the step leaves it.
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
    ):
        self.name = name
        self._step = step
        self._extra_state = {} if state is None else state
        self._pool = pool
        self._stats = stats
        self._warmup_steps = max(1, warmup_steps)
        self._generators = tuple(generators)
        self._memory = pool.new_memory()
        self._warmup_calls: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, _IterationGraph] = {}
        self._failed: set[Hashable] = set()
        # Weakly, as a step may make modules anew at every call.
        self._modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._floats: dict[int, tuple[str, ...]] = {}  # of each module by its id: attributes that were numbers
        # Those that take their step inside, in the order of their first.
        self._optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._inspected = self._compiled = self._warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one iteration."""
        key, tensors = flatten_call(args, kwargs, training=True)
        if any(map(is_sparse, tensors)):
            self._stats.fallbacks[self.name, SCOPE, NO_MEMORY] += 1
            return self._eager(args, kwargs)
        if any_on_other_device(tensors, self._pool.backend.device):
            self._stats.fallbacks[self.name, SCOPE, ELSEWHERE] += 1
            return self._eager(args, kwargs)
        self._discover_modules([value for value in key.values if isinstance(value, nn.Module)])
        signature = (key, self._state())
        captured = self._captured.get(signature)
        if captured is not None and self._addresses_unchanged(captured):
            return self._replay(captured, tensors)
        self._warn_of_settings(signature)
        if signature in self._failed or self._warmup_calls[signature] < self._warmup_steps:
            self._count_warming(signature)
            self._stats.fallbacks[self.name, SCOPE, FAILED if signature in self._failed else WARMING] += 1
            return self._eager(args, kwargs)
        return self._capture(signature, key, tensors, args, kwargs)

    def clear(self) -> None:
        """Drop every graph and give the memory back; kinds seen before are captured again at their next call."""
        for signature in list(self._captured):
            self._drop(signature)
        self._pool.trim()

    def _drop(self, signature: Hashable) -> None:
        captured = self._captured.pop(signature)
        for parameter, grad in captured.grads_after:
            if grad is not None and parameter.grad is grad:
                parameter.grad = grad.clone()
        captured.runner.close()

    def table(self) -> list[dict[str, Any]]:
        """Every graph as plain values."""
        return [
            {
                "module": self.name,
                "instance": index,
                "engine": captured.runner.engine,
                "bytes": captured.runner.nbytes,
                "capture_seconds": round(captured.runner.capture_seconds, 6),
            }
            for index, captured in enumerate(self._captured.values())
        ]

    def _state(self) -> Hashable:
        """What of the model is baked into a graph: the mode of each module, where gradients are wanted and are, and
        which parameters share one.
        """
        parameters, ids = self._all_parameters(), {id(None): 0}
        grads = [ids.setdefault(id(parameter.grad), len(ids)) for parameter in parameters]
        known = self._known_modules()
        return (
            tuple([module.training for module in known]),
            tuple([parameter.requires_grad for parameter in parameters]),
            tuple(grads),
            tuple(floats_of(*self._floats_of(known))),
            tuple(map(settings_of, self._optimizers.values())),
        )

    def _warn_of_settings(self, signature: Hashable) -> None:
        """Once, where an optimizer's settings are all that this kind has other than one with a graph."""
        if not self._warned and any(
            key == signature[0] and state[:-1] == signature[1][:-1] for key, state in self._captured
        ):
            self._warned = True
            logger.warning(
                "%s: settings of an optimizer inside changed, constants of a graph: each value gets "
                "one of its own. A learning rate that changes belongs in a tensor (lr=torch.tensor(…), "
                "capturable=True), which a scheduler fills and every replay reads",
                self.name,
            )

    def _discover_modules(self, modules: Sequence[nn.Module]) -> None:
        """Note the modules among the arguments, and whether something is compiled: a hook that notes modules would be
        compiled in with them, so beside compiled ones those within reach count."""
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

    def _register_module(self, module: nn.Module, inputs: Any = None) -> None:
        if id(module) not in self._modules:
            self._roots.add(module)
            for inner in module.modules():
                self._modules[id(inner)] = inner
                self._floats[id(inner)] = tuple(numbers_of(inner, (float,)))

    def _floats_of(self, modules: Sequence[nn.Module]) -> tuple[list[dict[str, Any]], list[str]]:
        found = [(vars(module), name) for module in modules for name in self._floats.get(id(module), ())]
        return [owner for owner, _ in found], [name for _, name in found]

    def _register_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.setdefault(id(optimizer), optimizer)

    def _superseded_by(self, signature: Hashable) -> list[Hashable]:
        """Kinds from before some module or optimizer was known, which no call would find again; and of those that
        differ in settings of optimizers alone, as learning rates of a schedule do, all but the last few.
        """
        (key, state), counts = signature, _known_counts(signature[1])
        outdated = [other for other in self._captured if other[0] == key and _known_counts(other[1]) != counts]
        same_but_settings = [other for other in self._captured if other[0] == key and other[1][:-1] == state[:-1]]
        return list(dict.fromkeys([*outdated, *same_but_settings[: max(0, len(same_but_settings) + 1 - MAX_SETTINGS)]]))

    def _known_modules(self) -> list[nn.Module]:
        return [module for reference in self._modules.valuerefs() if (module := reference()) is not None]

    def _all_parameters(self) -> list[nn.Parameter]:
        """Of every module that is known; one that several modules share comes several times."""
        return [
            parameter
            for module in self._known_modules()
            for parameter in module._parameters.values()
            if parameter is not None
        ]

    def _parameters(self) -> list[nn.Parameter]:
        """Those that want gradients or have one left, each once."""
        found = {id(parameter): parameter for parameter in self._all_parameters()}
        return [parameter for parameter in found.values() if parameter.requires_grad or parameter.grad is not None]

    def _count_warming(self, signature: Hashable) -> None:
        finished = len(self._captured) + len(self._failed)
        if signature not in self._warmup_calls and len(self._warmup_calls) >= MAX_WARMING + finished:
            logger.warning(
                "%s: %d kinds of calls, and none came often enough to be captured: a shape or a value among "
                "its arguments, a number in a module's attribute, or a setting of an optimizer changes",
                self.name,
                len(self._warmup_calls) - finished,
            )
            self._warmup_calls.clear()
        self._warmup_calls[signature] += 1

    def _addresses_unchanged(self, captured: _IterationGraph) -> bool:
        """Whether everything is where this graph reads it; if not, all graphs are dropped, to be captured again."""
        if captured.addresses.unchanged():
            return True
        moved = captured.addresses.moved()
        logger.error(
            "%d tensors moved under graphs of %s, which were dropped: %s",
            len(moved),
            self.name,
            "; ".join(map(str, moved)),
        )
        self._stats.invalidations[keys.STALE] += 1
        self.clear()
        if not captured.addresses.has_its_modules() or set(self._extra_state) != captured.extra_state:
            self._warmup_calls.clear()  # only eager calls note which modules there are now, and make state that is gone
        return False

    def _eager(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the step, and note the modules that it runs."""
        if (
            self._warmup_calls.total() == 1
        ):  # the first: what is cached for another stream is of no use on that of captures
            self._pool.trim()
        handle = None if self._compiled else register_module_forward_pre_hook(self._register_module)
        try:
            # On the stream of captures: autograd ties the accumulation of gradients to the stream of its first use.
            with self._pool.backend.on_capture_stream(), observe_steps(self._register_optimizer):
                result, outputs = Result.of(self._step(*args, **kwargs))
        finally:
            if handle is not None:
                handle.remove()
        return result.build([output.detach() for output in outputs])

    def _capture(
        self, signature: Hashable, key: CallKey, tensors: Sequence[Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Capture this call, and run it: by the capture itself where that runs, else by the first replay."""
        self._pool.trim()  # what the eager steps left cached is of no use to the graph's own memory
        parameters = self._parameters()
        with torch.inference_mode(False):  # what is made in that mode can't be written to by a replay outside of it
            captured = _IterationGraph(key, tensors)
            before = _InitialGrads(parameters, self._pool.backend)

        def body() -> None:
            static_args, static_kwargs = unflatten_call(key, captured.inputs)
            with torch.set_grad_enabled(key.grad), refuse_replaced_buffers(self.name, self._known_modules()):
                captured.result, captured.outputs = Result.of(self._step(*static_args, **static_kwargs))

        runner = GraphRunner(
            body, self._pool, statics=list, generators=self._generators, memory=self._memory, grad=True, checked=False
        )
        try:
            with torch.inference_mode(False), without_compiling(self._pool.backend):
                runner.capture()
        except CaptureError as error:
            before.restore()
            logger.error("capture of %s failed, it will run eager: %s", self.name, error)
            self._failed.add(signature)
            self._stats.capture_failed(self.name, SCOPE, error)
            self._stats.fallbacks[self.name, SCOPE, FAILED] += 1
            return self._eager(args, kwargs)
        captured.runner = runner
        captured.grads_after = [(parameter, parameter.grad) for parameter in parameters]
        captured.grads_before = before.read()
        for other in self._superseded_by(signature):
            self._drop(other)
        for root in self._roots:
            captured.addresses.watch(root, prefix=f"{type(root).__name__}.")
            captured.addresses.watch(MainGrads(root), prefix=f"{type(root).__name__}.main_grad of ")
        for optimizer in self._optimizers.values():
            captured.addresses.watch(OptimizerState(optimizer), prefix=f"{type(optimizer).__name__}.")
        captured.addresses.watch(self._extra_state)
        captured.extra_state = set(self._extra_state)
        self._captured[signature] = captured
        self._stats.captures[self.name, SCOPE, "recorded"] += 1
        self._stats.observe_capture(runner.capture_seconds)
        self._pool.trim()  # gradients that the step cleared inside: no graph can use what is cached outside of it
        if not self._pool.backend.capture_runs:
            runner.replay()
        return captured.result.build([output.detach().clone() for output in captured.outputs])

    @torch.no_grad()
    def _replay(self, captured: _IterationGraph, tensors: Sequence[Tensor]) -> Any:
        load(captured.inputs, tensors)
        load(
            [static for _, static in captured.grads_before], [parameter.grad for parameter, _ in captured.grads_before]
        )
        captured.runner.replay()
        self._stats.replays[self.name, SCOPE, "iteration", 1] += 1
        for parameter, grad in captured.grads_after:
            parameter.grad = grad
        return captured.result.build([output.detach().clone() for output in captured.outputs])


class _InitialGrads:
    """The gradients that a capture starts from, and which of them its replays start from, too.

    The step is given an alias of each, so that we see when it drops one. What it drops before anything was captured no
    graph reads: we let go of that at once, so that a step that clears gradients first frees their memory as it does in
    eager. The others are held, whether the step leaves them or, like an optimizer before `zero_grad`, consumes them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], backend: Backend):
        # For each parameter its gradient as it was and as the graph reads it; nothing if there was none or we let go.
        self._grads: list[tuple[nn.Parameter, list[Tensor]]] = []
        self._weakrefs: list[weakref.ref[Tensor]] = []
        users: dict[int, int] = {}
        aliases: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by the gradient, which several parameters may share
        for parameter in parameters:
            grad = parameter.grad
            if grad is None:
                self._grads.append((parameter, []))
                continue
            if id(grad) not in aliases:
                # Where the capture itself adds to gradients, to a copy: a failed one must be able to go back.
                read = grad.detach().clone() if backend.capture_runs else grad
                aliases[id(grad)] = read.detach(), [grad, read]
                self._weakrefs.append(_watch_alias(*aliases[id(grad)], users, backend))
            parameter.grad, held = aliases[id(grad)]
            self._grads.append((parameter, held))
        for _, held in aliases.values():
            if not lacks_memory(held[-1]):
                users[_storage(held[-1])] = storage_users(_storage(held[-1]))

    def restore(self) -> None:
        """As before a capture that failed; what the step had cleared before anything was captured stays cleared."""
        for parameter, held in self._grads:
            parameter.grad = held[0] if held else None

    def read(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Those that a graph may read, to be loaded before every replay."""
        return [(parameter, held[-1]) for parameter, held in self._grads if held]


def _watch_alias(alias: Tensor, held: list[Tensor], users: dict[int, int], backend: Backend) -> weakref.ref[Tensor]:
    """Empty `held` when this alias dies, unless a graph may read the memory by then or later.

    `users`: how many tensors hold each storage, as far as we know; one more is a tensor that the step made of the
    gradient and may still read.
    """
    if lacks_memory(held[-1]):  # who reads what it is made of isn't counted: it is held
        return weakref.ref(alias)
    storage = _storage(held[-1])

    def dropped(_: weakref.ref[Tensor]) -> None:
        others = storage_users(storage) > users[storage]  # a tensor whose Python object is dying is still counted
        users[storage] -= 1
        if not others and not backend.has_captured():
            users[storage] -= 1
            held.clear()

    return weakref.ref(alias, dropped)


def _storage(grad: Tensor) -> int:
    """The address of its storage object."""
    return grad.untyped_storage()._cdata


def _known_counts(state: tuple) -> tuple[int, int]:
    """How many modules and optimizers were known."""
    return len(state[0]), len(state[-1])

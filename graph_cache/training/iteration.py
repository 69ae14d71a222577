"""A whole training iteration as one graph: forward, backward and all other device work of the step function.

Holds static copies of the step's arguments and the gradients that it leaves. A graph never serves a call that differs
from its capture.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from graph_cache.core.capture_state import CaptureState, CaptureStatus
from graph_cache.core.keys import CAPTURE_FAILED, STALE
from graph_cache.core.pool import GraphPool
from graph_cache.core.shadow import DIFFERS, NOT_DETERMINISTIC, listed
from graph_cache.core.stats import CacheStats
from graph_cache.errors import CaptureError
from graph_cache.guards.library_state import precision_autocast
from graph_cache.guards.parametrizations import is_cached
from graph_cache.guards.search import objects_with_tensors
from graph_cache.guards.torch_settings import modes_active
from graph_cache.training.call import (
    CallKey,
    Result,
    any_on_other_device,
    flatten_call,
    is_lazy,
    is_sparse,
    objects_of,
)
from graph_cache.training.changing_values import ChangingValues
from graph_cache.training.compiled import at_compile_time
from graph_cache.training.iteration_graph import IterationGraph
from graph_cache.training.observed_call import ObservedCall, observing
from graph_cache.training.optimizers import observe_steps
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
from graph_cache.training.shadow_checks import Finding, describe
from graph_cache.training.step_state import StepState, known_counts
from graph_cache.training.threads import one_at_a_time
from graph_cache.utils.cpu_threads import ThreadTuner
from graph_cache.utils.layout import overlaps

logger = logging.getLogger(__name__)

SCOPE = "full_iteration"
MAX_SETTINGS = 4  # graphs that differ only in optimizer settings
MAX_GRAPHS = 64  # graphs of one iteration; the least recently used is dropped for another
MAX_WARMING = 64  # signatures without a graph at a time; each holds its arguments' values


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
        self._step = StepState(step, generators, {} if state is None else state, checks_attributes)
        self._pool, self._memory = pool, pool.new_memory()
        self._stats = stats
        self._warmup_steps = max(1, warmup_steps)
        self._generators = tuple(generators)
        self._states: dict[IterationSignature, CaptureState] = {}
        self._captured: dict[IterationSignature, IterationGraph] = {}
        self._observed: dict[CallKey, ObservedCall] = {}
        self._changing = ChangingValues(stats)
        self._calls = 0
        self._count_compiled = at_compile_time(functools.partial(self._count_eager, COMPILED))
        self._warned = self._ran_eager = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one iteration. Threads run theirs one after another."""
        if torch.compiler.is_dynamo_compiling():  # code around this is compiled: it contains the step
            self._count_compiled()
            result = self._step.function(*args, **kwargs)
            return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)
        return self._run(args, kwargs)

    @one_at_a_time
    def _run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run one call: eager, captured, or as a replay."""
        if reason := self._refused_modes():
            return self._eager(args, kwargs, reason)
        key, tensors = flatten_call(args, kwargs, training=True)
        if self._threads is not None:
            self._threads.begin((self.name, tuple([tensor.shape for tensor in tensors]), len(self._captured)))
        if reason := _refused_arguments(tensors, self._pool.backend.device):
            return self._eager(args, kwargs, reason)
        self._step.discover([value for value in key.values if isinstance(value, nn.Module)])
        signature = (key, self._step.current())
        captured = self._captured.get(signature)
        self._calls += 1
        if captured is not None and self._is_in_place(captured):
            return self._replay(signature, captured, tensors, args, kwargs)
        objects = [value for value in objects_of(key) if not isinstance(value, (nn.Module, Optimizer))]
        if objects_with_tensors(objects, without=(nn.Module, Optimizer)):
            return self._eager(args, kwargs, OBJECT)
        state = self._state_of(signature)
        if not state.may_capture:  # it warms up, or its capture failed
            return self._warm_up(signature, state, tensors, objects, args, kwargs)
        return self._capture(signature, state, tensors, args, kwargs)

    # ---- what runs eager -------------------------------------------------------------------------------------------

    def _refused_modes(self) -> str:
        """Return why no call replays in the present modes; empty if calls may."""
        if modes_active():
            return TRANSFORM
        if precision_autocast() is not None:
            return PRECISION_AUTOCAST
        return CACHED_PARAMETRIZATION if is_cached(self._step.modules()) else ""

    def _count_eager(self, reason: str) -> None:
        self._stats.fallbacks[self.name, SCOPE, reason] += 1

    def _eager(
        self,
        args: tuple,
        kwargs: dict[str, Any],
        reason: str,
        observed: AbstractContextManager[Any] | None = None,
    ) -> Any:
        """Run the step, in the context `observed` if given, and count it under `reason`."""
        self._count_eager(reason)
        if not self._ran_eager:  # first call: the capture stream can't use memory cached for other streams
            self._ran_eager = True
            self._pool.trim()
        # On the capture stream: autograd ties grad accumulators to the stream of their first use.
        with self._pool.backend.on_capture_stream(), observe_steps(self._step.register_optimizer):
            with observed or nullcontext():
                result, outputs = Result.of(self._step.function(*args, **kwargs))
        return result.build([output.detach() for output in outputs])

    def _warm_up(
        self,
        signature: IterationSignature,
        state: CaptureState,
        tensors: Sequence[Tensor],
        objects: Sequence[Any],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call of a signature without a graph, and observe it if one may follow. It may change `objects`."""
        (key, before), reason = signature, state.fallback_reason
        state.count_warmup()
        observed = None if state.failed else self._observing(key, tensors, objects)
        result = self._eager(args, kwargs, reason, observed)
        # The call may have revealed Python state: the warm-up counts for the same signature with that.
        now = self._step.with_watched(before) if signature in self._states else None
        if now is not None:
            self._states.setdefault((key, now), self._states.pop(signature))
        return result

    @contextmanager
    def _observing(self, key: CallKey, tensors: Sequence[Tensor], objects: Sequence[Any]) -> Iterator[None]:
        with observing(self._step, tensors, objects, self._generators, self._pool.backend.device) as seen:
            yield
        if len(self._observed) > 2 * MAX_WARMING:  # of forgotten signatures
            known = {key for key, _ in self._states}
            self._observed = {key: one for key, one in self._observed.items() if key in known}
        self._observed[key] = seen

    # ---- signatures ------------------------------------------------------------------------------------------------

    def _state_of(self, signature: IterationSignature) -> CaptureState:
        """Return the state of a signature's capture. If there are too many without a graph, forget those first."""
        self._warn_of_settings(signature)
        is_new = signature not in self._states
        self._changing.observe(self.name, signature[0], signature[1][-1], is_new=is_new)
        return self._add_state(signature) if is_new else self._states[signature]

    def _add_state(self, signature: IterationSignature) -> CaptureState:
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

    # ---- dropping ----------------------------------------------------------------------------------------------------

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
        self._captured.pop(signature).drop(cause)

    def table(self) -> list[dict[str, Any]]:
        """Return a row of plain values for every graph."""
        return [
            {"module": self.name, "instance": index} | captured.row()
            for index, captured in enumerate(self._captured.values())
        ]

    def _superseded_by(self, signature: IterationSignature) -> list[IterationSignature]:
        """Return captured signatures that this one supersedes.

        - Signatures from before some module or optimizer was known: no call matches them again.
        - The least recently used, if there are MAX_GRAPHS.
        - Of those that differ only in optimizer settings (a learning rate schedule), all but the last MAX_SETTINGS - 1.
        """
        (key, state), counts = signature, known_counts(signature[1])
        outdated = [other for other in self._captured if other[0] == key and known_counts(other[1]) != counts]
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

    def _forget(self, signatures: Sequence[IterationSignature]) -> None:
        for signature in signatures:
            del self._states[signature]

    def _is_in_place(self, captured: IterationGraph) -> bool:
        """Whether all state that this graph reads is still in place. If not, drop all graphs for recapture."""
        moved = captured.moved()
        if not moved:
            return True
        logger.error(
            "%d tensors moved under graphs of %s, which were dropped: %s",
            len(moved),
            self.name,
            "; ".join(map(str, moved)),
        )
        self._stats.invalidations[STALE] += 1
        self._drop_all(CaptureStatus.STALE)
        if captured.must_warm_up_again():
            self._forget([signature for signature, state in self._states.items() if not state.failed])
        return False

    # ---- captures and replays --------------------------------------------------------------------------------------

    def _capture(
        self,
        signature: IterationSignature,
        state: CaptureState,
        tensors: Sequence[Tensor],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """Capture this call and run it: by the capture itself if the backend executes captures, else by a replay."""
        self._pool.trim()  # the graph can't use memory cached by eager steps
        self._step.note_owned()
        key, _ = signature
        seen = self._observed.get(key, ObservedCall())
        captured = IterationGraph(self.name, self._step, seen, key, tensors, state)
        try:
            captured.capture(self._pool, self._memory, self._generators)
        except CaptureError as error:
            logger.error("capture of %s failed, it will run eager: %s", self.name, error)
            state.fail(error)
            self._stats.capture_failed(self.name, SCOPE, error)
            return self._eager(args, kwargs, CAPTURE_FAILED)
        for other in self._superseded_by(signature):
            self._drop(other, CaptureStatus.EVICTED)
        captured.watch()
        captured.last_call = self._calls
        state.succeed()
        self._captured[signature] = captured
        self._stats.captures[self.name, SCOPE, "recorded"] += 1
        self._stats.observe_capture(captured.runner.capture_seconds)
        self._pool.trim()  # release gradients that the step cleared: graphs can't use cached memory
        if not self._pool.backend.capture_runs:
            captured.runner.replay()
        return captured.results(tensors)

    def _replay(
        self,
        signature: IterationSignature,
        captured: IterationGraph,
        tensors: Sequence[Tensor],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """Replay a call. The first one is compared with eager, and runs eager if they differ."""
        captured.last_call = self._calls
        if self._checks and not captured.checked and self._is_unequal(signature, captured, tensors):
            return self._eager(args, kwargs, CAPTURE_FAILED)
        result = captured.replay(tensors)
        self._stats.replays[self.name, SCOPE, "iteration", 1] += 1
        return result

    def compared_with_eager(self, captured: IterationGraph, tensors: Sequence[Tensor]) -> Finding:
        """Compare a graph with the step; see `IterationGraph.compared_with_eager`."""
        return captured.compared_with_eager(tensors, self._generators, self._pool.backend)

    def _is_unequal(self, signature: IterationSignature, captured: IterationGraph, tensors: Sequence[Tensor]) -> bool:
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


def _refused_arguments(tensors: Sequence[Tensor], device: torch.device) -> str:
    """Return why a call with these tensors can't replay; empty if it can."""
    if any(is_sparse(one) or one.is_quantized or is_lazy(one) or overlaps(one) for one in tensors):
        return NO_MEMORY
    if any_on_other_device(tensors, device):
        return ELSEWHERE
    return ARGUMENT_GRADIENT if any(map(_has_gradient_of_its_own, tensors)) else ""


def _has_gradient_of_its_own(tensor: Tensor) -> bool:
    """Whether the argument has a history or a gradient already, to which a replay could not add as eager does."""
    if not tensor.is_leaf:
        return torch.is_grad_enabled()
    return tensor.grad is not None

"""Graphs of modules inside a training step: warm-up, recording, capture and replay.

Detects when a step begins, selects the entry that serves a call, and counts every fallback with its reason. A
step begins with a forward while no backward is outstanding. One thread runs the forwards (`threads.py`); backwards
run in autograd's threads.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from graph_cache.core.capture_state import CaptureState, CaptureStatus
from graph_cache.core.keys import CAPTURE_FAILED, STALE, WARMING_UP
from graph_cache.core.shadow import DIFFERS, EQUAL, NOT_DETERMINISTIC, UNCHECKED, listed
from graph_cache.errors import CaptureError, CaptureRefused, GraphConfigError
from graph_cache.guards.parametrizations import is_cached, uncached
from graph_cache.guards.search import objects_with_tensors
from graph_cache.guards.torch_settings import modes_active, records_gradients
from graph_cache.training.attached import AttachedModule, Attachment, Watched
from graph_cache.training.autograd import DOUBLE_BACKWARD, Lease, probe, replay
from graph_cache.training.call import Result, flatten_call, input_refusal, objects_of
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.changing_values import ChangingValues
from graph_cache.training.compiled import keeping_history
from graph_cache.training.microbatch_graphs import SCOPE, CallEntry, CallSignature, MicrobatchGraphs
from graph_cache.training.reasons import (
    CACHED_PARAMETRIZATION,
    COMPILED,
    HOOKS,
    NO_GRAD,
    NO_INSTANCE,
    OBJECT,
    OTHER_PARAMETERS,
    SAVED_TENSOR_HOOKS,
    TRANSFORM,
    UNSEEN,
)
from graph_cache.training.recorded_step import RecordedStep
from graph_cache.training.shadow_checks import check_call, describe
from graph_cache.training.side_effects import TensorHooks
from graph_cache.training.threads import OneThread

logger = logging.getLogger(__name__)

# Recorded steps with graphs, and call signatures that are counted towards a recording.
MAX_RECORDED_STEPS, MAX_CALL_SIGNATURES = 64, 4096
OBSERVED_CALLS = 4  # warm-up calls of a module that are observed, besides recorded ones
MAX_OBJECTS = 8  # call signatures that differ only in objects among the arguments

_transforms_active = torch._C._are_functorch_transforms_active
_tracing_state = torch._C._get_tracing_state
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def _nothing() -> None:
    """Do nothing."""


class TrainingGraphs:
    """Forward and backward graphs of attached modules, in one memory pool.

    The first `warmup_rounds` steps (at least one) with a new call signature run eager; the last of them is recorded.
    The next step begins with the capture.
    """

    def __init__(self, context: CaptureContext, *, warmup_rounds: int = 3):
        self.context = context
        self.stats = context.stats
        self.modules: list[AttachedModule] = []
        self._watched = Watched(())
        self._warmup_steps = max(1, warmup_rounds)
        self._recorded_steps: list[RecordedStep] = []
        self._recording: RecordedStep | None = None
        # The capture that calls of a signature without a free entry count towards. Warm-up runs are steps.
        self._states: dict[CallSignature, CaptureState] = {}
        self._unserved: set[CaptureState] = set()  # those with calls in this step
        self._doubled: set[CallSignature] = set()  # captured, but with a backward that was differentiated again
        self._object_keys: Counter[tuple[AttachedModule, int]] = Counter()  # signatures that differ in objects only
        self._changing = ChangingValues(context.stats)
        self._outstanding = 0  # eager and recorded calls that await their backward
        self._running = context.running

    # ---- attaching -------------------------------------------------------------------------------------------------

    def attach(self, attachment: Attachment) -> None:
        """Intercept the calls of these parts, all or none. Raises GraphConfigError if one is already intercepted.

        Modules compiled by `module.compile()` or `torch.compile(module)` stay compiled.
        """
        counts = Counter((part.module, part.method) for part in attachment.parts)
        duplicates = [part.name for part in attachment.parts if counts[part.module, part.method] > 1]
        if duplicates:
            raise GraphConfigError(f"{', '.join(duplicates)} name the same module: name it once")
        found = [AttachedModule(part, attachment.fired, attachment.ambient) for part in attachment.parts]
        call = OneThread(self.context.pool, self.stats).calls(self._call)
        for attached in found:
            attached.take_over(call, functools.partial(self._count_compiled, attached.name))
            self.modules.append(attached)
        self._watched = Watched(self.modules)

    def detach(self) -> None:
        """Restore all modules, and drop the graphs once their backwards are done."""
        for attached in self.modules:
            attached.give_back()
        self.modules, self._watched = [], Watched(())
        self.clear()

    def clear(self) -> None:
        """Drop all graphs once their outstanding backwards are done; the next steps warm up again.

        Failed captures are tried again.
        """
        for recorded in self._recorded_steps:
            recorded.retire()
        self._recorded_steps = []
        self._recording = None
        self._states.clear()
        self._unserved.clear()
        self._doubled.clear()
        self._object_keys.clear()
        self.context.pool.trim()

    # ---- calls -----------------------------------------------------------------------------------------------------

    @property
    def recorded_steps(self) -> tuple[RecordedStep, ...]:
        """The recorded steps whose graphs serve calls, in the order of their captures."""
        return tuple(self._recorded_steps)

    @property
    def recording(self) -> RecordedStep | None:
        """The step that is being recorded, which the next step captures, or None."""
        return self._recording

    @property
    def outstanding(self) -> int:
        """Number of forwards that await their backward."""
        return self._outstanding + sum(recorded.awaiting for recorded in self._recorded_steps)

    def _call(self, attached: AttachedModule, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Intercepted call. Fast path: within a step, a call that matches the next recorded one replays at once."""
        if self._running.active:
            return attached.eager(*args, **kwargs)
        if _transforms_active() or forward_ad._current_level >= 0 or _tracing_state() is not None or modes_active():
            return self._eager(attached, args, kwargs, TRANSFORM)
        if _saved_tensor_hooks(True) is not None:  # a checkpoint or offload around this needs eager's saved tensors
            return self._eager(attached, args, kwargs, SAVED_TENSOR_HOOKS)
        if is_cached(attached.submodules):
            return self._eager(attached, args, kwargs, CACHED_PARAMETRIZATION, track_backward=True)
        if records_gradients():
            for recorded in self._recorded_steps:
                graphs = recorded.current
                index = graphs.order.next_index()
                entry = graphs.order.entries[index] if 0 < index < len(graphs.order.entries) else None
                if graphs.abandoned and graphs.is_held(index):
                    continue
                tensors = entry.tensors(attached, args, kwargs) if entry is not None else None
                if tensors is not None and (entry.checked or not self.context.checks):
                    return self._replay(graphs, index, entry, tensors)
        return self._dispatch(attached, args, kwargs)

    def _count_compiled(self, name: str) -> None:
        self.stats.fallbacks[name, "forward", COMPILED] += 1

    def _dispatch(self, attached: AttachedModule, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Full path: begin a step if no backward is outstanding, then replay an entry or run eager with a reason."""
        key, tensors = flatten_call(args, kwargs, attached.module.training, attached.ambient_state())
        attached.refresh()
        if not key.grad or not attached.wants_gradients(tensors):
            return self._eager(attached, args, kwargs, NO_GRAD)
        step_begins = self.outstanding == 0 and self._begin_step()
        if step_begins and self.context.threads is not None:
            shapes = tuple([tensor.shape for tensor in tensors])
            self.context.threads.begin((attached.name, shapes, len(self._recorded_steps)))
        if not attached.has_same_parameters():
            return self._eager(attached, args, kwargs, OTHER_PARAMETERS, track_backward=True)
        if reason := input_refusal(tensors, self.context.pool.backend.device):
            return self._eager(attached, args, kwargs, reason, track_backward=True)
        signature = (attached, key, attached.state)
        state = self._states.get(signature)
        if state is not None and state.failed:
            return self._eager(attached, args, kwargs, CAPTURE_FAILED)
        for recorded in list(self._recorded_steps):
            found = recorded.find(signature, tensors)
            if found is None:
                continue
            if not step_begins and not found[0].order.awaiting:  # a microbatch begins while others are outstanding
                self._watched.refresh()
                if self._drop_if_moved(recorded):
                    continue
            recorded.current, index, entry = found
            is_checked = entry.checked or not self.context.checks
            if not is_checked and (reason := self._checked(recorded.current, index, entry, tensors)):
                return self._eager(attached, args, kwargs, reason, track_backward=True)
            return self._replay(recorded.current, index, entry, tensors)
        if state is None and self._refuses_objects(signature):
            return self._eager(attached, args, kwargs, OBJECT, track_backward=True)
        if attached.hooks_inside:
            return self._eager(attached, args, kwargs, HOOKS)
        self._changing.observe(attached.name, key, is_new=state is None)
        state = self._states.setdefault(signature, CaptureState(self._warmup_steps))
        self._unserved.add(state)
        doubled = functools.partial(self._refuse_double_backward, signature)
        if state.warmup_left <= 1 and self._may_record():  # the last warm-up step is recorded
            return self._record(self._recording, signature, tensors, args, kwargs, doubled)
        reason = UNSEEN if self._recorded_steps else WARMING_UP
        if any(recorded.knows(signature) for recorded in self._recorded_steps):
            reason = NO_INSTANCE  # recorded as further graphs if later steps need them too
        return self._eager(attached, args, kwargs, reason, track_backward=True, doubled=doubled)

    def _refuses_objects(self, signature: CallSignature) -> bool:
        """Whether an object among the arguments keeps the call eager: it holds tensors, or is new at every call."""
        attached, key, _ = signature
        if not (objects := objects_of(key)):
            return False
        if objects_with_tensors(objects):
            return True
        self._object_keys[attached, hash(key)] += 1  # objects don't count in the hash
        return self._object_keys[attached, hash(key)] > MAX_OBJECTS

    def _may_record(self) -> bool:
        """Start recording in this step, unless MAX_RECORDED_STEPS have graphs. Return whether it records."""
        if self._recording is None and len(self._recorded_steps) < MAX_RECORDED_STEPS:
            self._recording = RecordedStep(self.context, self._states)
            if len(self._recorded_steps) == MAX_RECORDED_STEPS - 1:
                logger.warning(
                    "%d recorded steps have graphs, the limit; other steps run eager: pad inputs to fewer shapes",
                    MAX_RECORDED_STEPS,
                )
        return self._recording is not None

    def _begin_step(self) -> bool:
        """Between two steps: check what changed or moved, count warm-up, and capture a recorded step.

        Returns False, having done nothing, if plain tensors are in the place of parameters for this call.
        """
        changed = [attached for attached in self.modules if not attached.has_same_parameters()]
        if any(attached.has_stand_ins() for attached in changed):
            self._recording = None  # a capture would read the stand-ins: record again in a later step
            return False
        if changed:
            for attached in changed:
                attached.reread_parameters()
            self._watched = Watched(self.modules)
            for recorded in list(self._recorded_steps):
                if any(entry.owner in changed for entry in recorded.entries()):
                    self._drop(recorded, [f"parameters of {attached.name}" for attached in changed])
        self._watched.refresh()
        if self._doubled:
            self._drop_doubled()
        for recorded in list(self._recorded_steps):
            self._drop_if_moved(recorded)
        for state in self._unserved:
            state.count_warmup()
        self._unserved.clear()
        if self._recording is not None:
            recorded, self._recording = self._recording, None
            self._capture(recorded)
        if len(self._states) > MAX_CALL_SIGNATURES:  # shapes that never recur
            for signature in [signature for signature, state in self._states.items() if not state.failed]:
                del self._states[signature]
        return True

    def _drop_if_moved(self, recorded: RecordedStep) -> bool:
        """Drop these graphs if any state that they read has moved. Return whether they were dropped."""
        moved = recorded.moved()
        if moved:
            self._drop(recorded, moved)
        return bool(moved)

    def _drop(self, recorded: RecordedStep, moved: Sequence[str]) -> None:
        logger.error("%d tensors moved under training graphs, which were dropped: %s", len(moved), "; ".join(moved))
        self.stats.invalidations[STALE] += 1
        self._recorded_steps.remove(recorded)
        for signature, state in recorded.captured_states().items():
            state.drop(CaptureStatus.STALE, self._warmup_steps)
            self._states.setdefault(signature, state)
        recorded.retire()

    def _capture(self, recorded: RecordedStep) -> None:
        self._running.active = True
        try:
            with uncached():
                recorded.capture()
        except BaseException:
            recorded.retire()
            raise
        finally:
            self._running.active = False
        self._recorded_steps.append(recorded)
        for signature, entry in recorded.captured():
            entry.graphs.refuse_double_backward = functools.partial(self._doubled.add, signature)
        for signature in recorded.captured_states():
            self._states.pop(signature).succeed()

    def _refuse_double_backward(self, signature: CallSignature) -> None:
        """Run calls of this signature eager from now on: their gradients need a history, which graphs don't return."""
        state = self._states.get(signature)
        if state is None or state.failed:
            return
        attached = signature[0]
        logger.warning("%s runs eager: %s", attached.name, DOUBLE_BACKWARD)
        if not state.may_capture:
            state.drop(CaptureStatus.EVICTED)
        state.fail(DOUBLE_BACKWARD)
        self.stats.capture_failed(attached.name, SCOPE, CaptureRefused(DOUBLE_BACKWARD))

    def _drop_doubled(self) -> None:
        """Drop the steps with graphs of which a backward was differentiated again."""
        for recorded in list(self._recorded_steps):
            states = recorded.captured_states()
            if not self._doubled.isdisjoint(states):
                self._recorded_steps.remove(recorded)
                for signature, state in states.items():
                    state.drop(CaptureStatus.EVICTED, self._warmup_steps)
                    self._states.setdefault(signature, state)
                recorded.retire()
        for signature in self._doubled:
            self._refuse_double_backward(signature)
        self._doubled.clear()

    def _eager(
        self,
        attached: AttachedModule,
        args: tuple,
        kwargs: dict[str, Any],
        reason: str,
        track_backward: bool = False,
        doubled: Callable[[], None] = _nothing,
    ) -> Any:
        self.stats.fallbacks[attached.name, "forward", reason] += 1
        observes = reason in (WARMING_UP, UNSEEN) and attached.observed_calls < OBSERVED_CALLS
        with attached.observing() if observes else nullcontext():
            value = self._run_eager(attached, args, kwargs)
        return self._track_backward(value, doubled) if track_backward else value

    def _run_eager(self, attached: AttachedModule, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the eager forward. Attached modules inside it run eager as part of it."""
        self._running.active = True
        try:
            # The capture retains the autograd graph, and compiled functions inside must allow that.
            with keeping_history() if torch.is_grad_enabled() else nullcontext():
                return attached.eager(*args, **kwargs)
        finally:
            self._running.active = False

    def _track_backward(self, value: Any, doubled: Callable[[], None]) -> Any:
        """Return the same value with its backward counted as outstanding: a step lasts until all backwards are done."""
        result, tensors = Result.of(value)
        indices = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
        if not indices:
            return value
        self._outstanding += 1
        lease = Lease(self._backward_done)
        for index, tensor in zip(indices, probe(lease, [tensors[i] for i in indices], doubled), strict=True):
            tensors[index] = tensor
        return result.build(tensors)

    def _backward_done(self, index: int) -> None:
        self._outstanding -= 1

    def _checked(self, graphs: MicrobatchGraphs, index: int, entry: CallEntry, tensors: Sequence[Tensor]) -> str:
        """Compare the first replay of an entry with eager. Return why the call runs eager; empty if it replays.

        If they differ, the graphs of the step are dropped, and the call runs eager from now on. A call that can't be
        compared now is captured again, with a comparison at its capture.
        """
        entry.checked = True
        finding = check_call(entry, tensors, self.context)
        name = entry.owner.name
        self.stats.shadow_checks[name, SCOPE, finding.outcome] += 1
        is_first = self.context.pool.backend.capture_runs and not entry.graphs.was_compared  # comparison of any kind
        if finding.outcome == NOT_DETERMINISTIC:
            logger.warning("%s is not deterministic: two eager runs differ in %s", name, listed(finding.differing))
        if finding.outcome == EQUAL or (finding.outcome != DIFFERS and not is_first):
            return ""
        recorded = next(one for one in self._recorded_steps if graphs in one.graphs_of_microbatches)
        if finding.outcome == UNCHECKED:
            entry.owner.compares_replays = False
            self._drop_for_recapture(recorded)
            return WARMING_UP
        problem = describe(finding)
        logger.error("%s runs eager from now on: %s", name, problem)
        if finding.outcome == DIFFERS:
            self.stats.shadow_mismatches[name, SCOPE] += 1
        else:
            self.stats.capture_failed(name, SCOPE, CaptureError(problem))
        self._drop_for_recapture(recorded, unequal := graphs.order.signature(index))
        self._states[unequal].fail(problem)
        return CAPTURE_FAILED

    def _drop_for_recapture(self, recorded: RecordedStep, unequal: CallSignature | None = None) -> None:
        """Drop a step's graphs: all calls but the unequal one warm up and are captured again."""
        self._recorded_steps.remove(recorded)
        for signature, state in recorded.captured_states().items():
            state.drop(CaptureStatus.EVICTED, 0 if signature == unequal else self._warmup_steps)
            self._states.setdefault(signature, state)
        recorded.retire()

    def _replay(self, graphs: MicrobatchGraphs, index: int, entry: CallEntry, tensors: Sequence[Tensor]) -> Any:
        entry.owner.before_replay()
        entry.remember_inputs(tensors)
        graphs.order.await_backward(index)
        lease = Lease(graphs.release, index, graphs.abandon)
        try:
            outputs = replay(entry.graphs, lease, tensors)
        except BaseException:
            lease.end()
            raise
        entry.owner.after_replay()
        entry.capture.replays += 1
        self.stats.replays[entry.label] += 1
        return outputs[0] if entry.is_tensor else entry.graphs.result.build(outputs)

    def _record(
        self,
        recorded: RecordedStep,
        signature: CallSignature,
        tensors: list[Tensor],
        args: tuple,
        kwargs: dict[str, Any],
        doubled: Callable[[], None],
    ) -> Any:
        """Run eager and record the call. An index is reused as it would be in a replay."""
        attached = signature[0]
        self.stats.fallbacks[attached.name, "forward", WARMING_UP] += 1
        graphs, index = recorded.record(signature, tensors, args, kwargs)
        hooks = TensorHooks([*tensors, *attached.scope.parameters()])
        try:
            with attached.observing(objects_of(signature[1])) as refusals:
                value = self._run_eager(attached, args, kwargs)
            result, outputs = Result.of(value)
        except BaseException:
            self._recording = None  # record again in the next step: half a step is useless
            raise
        graphs.refuse(index, [*refusals, TensorHooks.REFUSAL] if hooks.have_changed() else refusals)
        wanted = [output_index for output_index, tensor in enumerate(outputs) if tensor.requires_grad]
        if wanted:
            graphs.order.await_backward(index)
            self._outstanding += 1

            def backward_done(index: int) -> None:
                graphs.release(index)
                self._outstanding -= 1

            for output_index, tensor in zip(
                wanted,
                probe(
                    Lease(backward_done, index),
                    [outputs[i] for i in wanted],
                    doubled,
                    functools.partial(graphs.record_backward, index),
                ),
                strict=True,
            ):
                outputs[output_index] = tensor
        graphs.record_outputs(index, outputs)
        return result.build(outputs)

    def table(self) -> list[dict[str, Any]]:
        """Return a row of plain values for every entry.

        State, replays and failure belong to the call signature: a step's entries of one signature share them.
        """
        return [
            {"module": entry.graphs.name, "instance": index}
            | entry.capture.row(
                engine=entry.graphs.engine,
                nbytes=entry.graphs.nbytes,
                capture_seconds=entry.graphs.capture_seconds,
                digest=entry.graphs.digest,
            )
            for recorded in self._recorded_steps
            for index, entry in enumerate(recorded.entries())
        ]

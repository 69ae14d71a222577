"""Graphs of modules inside a training step: warm-up, recording, capture, and from then on replay.

Owns the rounds of a step, which pair serves a call, and every fallback with its reason. A round begins with a forward
while no backward is outstanding. One thread runs the forwards; backwards come from autograd's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from graph_cache.errors import GraphConfigError
from graph_cache.training.attached import AttachedModule, Attachment, Watched
from graph_cache.training.autograd import Lease, probe, replay
from graph_cache.training.call import Result, flatten_call, why_no_input
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.compiled import keeping_history
from graph_cache.training.microbatch_graphs import CallSignature, CapturedCall, MicrobatchGraphs
from graph_cache.training.recorded_step import RecordedStep

logger = logging.getLogger(__name__)

WARMING = "warming_up"
UNSEEN = "unseen_signature"
NO_INSTANCE = "no_free_instance"
FAILED = "capture_failed"
HOOKS = "hooks_inside"
NO_GRAD = "no_gradient"
STALE = "stale_address"
HOOKED = "saved_tensor_hooks"
OTHER_PARAMETERS = "other_parameters"
MAX_RECORDED_STEPS, MAX_CALL_SIGNATURES = (
    64,
    4096,
)  # kinds of step with graphs, and kinds of calls that are counted towards some

_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class TrainingGraphs:
    """Forward and backward graphs of attached modules, from one pool.

    `warmup_rounds` rounds run eager before a kind of step is captured; the last of them is recorded (at least one).
    """

    def __init__(self, job: CaptureContext, *, warmup_rounds: int = 3):
        self.job = job
        self.stats = job.stats
        self.modules: list[AttachedModule] = []
        self._watched = Watched(())
        self._warmup_rounds = max(1, warmup_rounds)
        self._recorded_steps: list[RecordedStep] = []
        self._recording: RecordedStep | None = None
        self._rounds_of: Counter[CallSignature] = Counter()  # rounds in which a kind came up that no graph serves
        self._unserved: set[CallSignature] = set()  # those of this round
        self._outstanding = 0  # eager and recorded calls whose backward is to come
        self._busy = False  # inside a capture or an attached module: nested modules run eager

    # ---- attaching -------------------------------------------------------------------------------------------------

    def attach(self, attachment: Attachment) -> None:
        """Take over the calls of these parts, all or none. Raises GraphConfigError where one is taken over already.

        Modules that `module.compile()` or `torch.compile(module)` made are taken over as compiled.
        """
        seams = Counter((part.module, part.method) for part in attachment.parts)
        twice = [part.name for part in attachment.parts if seams[part.module, part.method] > 1]
        if twice:
            raise GraphConfigError(f"{', '.join(twice)} are the same module: name it once")
        found = [AttachedModule(part, attachment.fired, attachment.surroundings) for part in attachment.parts]
        for attached in found:
            attached.take_over(self._call)
            self.modules.append(attached)
        self._watched = Watched(self.modules)

    def detach(self) -> None:
        """Give all modules their calls back, and drop the graphs once their backwards are done."""
        for attached in self.modules:
            attached.give_back()
        self.modules, self._watched = [], Watched(())
        self.clear()

    def clear(self) -> None:
        """Drop all graphs, now or as soon as outstanding backwards are done; the next rounds warm up anew."""
        for recorded in self._recorded_steps:
            recorded.retire()
        self._recorded_steps = []
        self._recording = None
        self._rounds_of.clear()
        self._unserved.clear()
        self.job.pool.trim()

    # ---- calls -----------------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Forwards whose backward is still to come."""
        return self._outstanding + sum(recorded.awaiting for recorded in self._recorded_steps)

    def _call(self, attached: AttachedModule, args: tuple, kwargs: dict[str, Any]) -> Any:
        """In the middle of a round, a call like the recorded one at the next place is served without further ado."""
        if self._busy:
            return attached.eager(*args, **kwargs)
        if _saved_tensor_hooks(True) is not None:  # a checkpoint or an offload around this sees what eager saves
            return self._eager(attached, args, kwargs, HOOKED)
        if torch.is_grad_enabled():
            for recorded in self._recorded_steps:
                graphs = recorded.current
                place = graphs.order.following()
                entry = graphs.order.pairs[place] if 0 < place < len(graphs.order.pairs) else None
                if graphs.abandoned and graphs.is_held(place):
                    continue
                tensors = entry.tensors(attached, args, kwargs) if entry is not None else None
                if tensors is not None:
                    return self._replay(graphs, place, entry, tensors)
        return self._look_closer(attached, args, kwargs)

    def _look_closer(self, attached: AttachedModule, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Whatever it is: begin a round if one begins, and find a pair, or run eager with a reason."""
        key, tensors = flatten_call(args, kwargs, attached.module.training, attached.around())
        attached.refresh()
        if not key.grad or not attached.wants_gradients(tensors):
            return self._eager(attached, args, kwargs, NO_GRAD)
        begins = self.outstanding == 0
        if begins:
            self._begin_step()
        if not attached.has_its_parameters():
            return self._eager(attached, args, kwargs, OTHER_PARAMETERS, tracked=True)
        if reason := why_no_input(tensors, self.job.pool.backend.device):
            return self._eager(attached, args, kwargs, reason, tracked=True)
        kind = (attached, key, attached.state)
        if kind in attached.refused:
            return self._eager(attached, args, kwargs, FAILED)
        for recorded in list(self._recorded_steps):
            found = recorded.find(kind, tensors)
            if found is None:
                continue
            if not begins and not found[0].order.awaiting:  # a microbatch begins, while others are outstanding
                self._watched.refresh()
                if self._drop_if_moved(recorded):
                    continue
            recorded.current, place, entry = found
            return self._replay(recorded.current, place, entry, tensors)
        if attached.hooks_inside:
            return self._eager(attached, args, kwargs, HOOKS)
        self._unserved.add(kind)
        if self._rounds_of[kind] >= self._warmup_rounds - 1 and self._may_record():
            return self._record(self._recording, kind, tensors, args, kwargs)
        reason = UNSEEN if self._recorded_steps else WARMING
        if any(recorded.knows(kind) for recorded in self._recorded_steps):
            reason = NO_INSTANCE  # if rounds go on to want more than were recorded, those are recorded beside them
        return self._eager(attached, args, kwargs, reason, tracked=True)

    def _may_record(self) -> bool:
        """Begin to record in this round, unless there are more kinds of step than could ever pay."""
        if self._recording is None and len(self._recorded_steps) < MAX_RECORDED_STEPS:
            self._recording = RecordedStep(self.job)
            if len(self._recorded_steps) == MAX_RECORDED_STEPS - 1:
                logger.warning(
                    "%d kinds of step have graphs, and no further one will get them: pad what varies to fewer shapes",
                    MAX_RECORDED_STEPS,
                )
        return self._recording is not None

    def _begin_step(self) -> None:
        """Between two steps: capture what was recorded, count warm-up, and look whether anything changed or moved."""
        changed = [attached for attached in self.modules if not attached.has_its_parameters()]
        if changed:
            for attached in changed:
                attached.reread_parameters()
            self._watched = Watched(self.modules)
            for recorded in list(self._recorded_steps):
                if any(entry.owner in changed for entry in recorded.entries()):
                    self._drop(recorded, [f"parameters of {attached.name}" for attached in changed])
        self._watched.refresh()
        for recorded in list(self._recorded_steps):
            self._drop_if_moved(recorded)
        self._rounds_of.update(self._unserved)
        self._unserved.clear()
        if len(self._rounds_of) > MAX_CALL_SIGNATURES:  # of shapes that never come back
            self._rounds_of.clear()
        if self._recording is not None:
            recorded, self._recording = self._recording, None
            self._capture(recorded)

    def _drop_if_moved(self, recorded: RecordedStep) -> bool:
        """Whether anything that these graphs read isn't where it was: they serve no more forwards then."""
        moved = recorded.moved()
        if moved:
            self._drop(recorded, moved)
        return bool(moved)

    def _drop(self, recorded: RecordedStep, moved: Sequence[str]) -> None:
        logger.error("%d tensors moved under training graphs, which were dropped: %s", len(moved), "; ".join(moved))
        self.stats.invalidations[STALE] += 1
        self._recorded_steps.remove(recorded)
        recorded.retire()

    def _capture(self, recorded: RecordedStep) -> None:
        self._busy = True
        try:
            recorded.capture()
        except BaseException:
            recorded.retire()
            raise
        finally:
            self._busy = False
        self._recorded_steps.append(recorded)
        for kind in recorded.kinds():
            del self._rounds_of[kind]

    def _eager(
        self, attached: AttachedModule, args: tuple, kwargs: dict[str, Any], reason: str, tracked: bool = False
    ) -> Any:
        self.stats.fallbacks[attached.name, "forward", reason] += 1
        value = self._inside(attached, args, kwargs)
        return self._tracked(value) if tracked else value

    def _inside(self, attached: AttachedModule, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The eager forward; attached modules inside it are part of it."""
        self._busy = True
        try:
            # It is captured with its history retained, and may have compiled functions inside.
            with keeping_history() if torch.is_grad_enabled() else nullcontext():
                return attached.eager(*args, **kwargs)
        finally:
            self._busy = False

    def _tracked(self, value: Any) -> Any:
        """The same value, with its backward counted as outstanding: a round lasts until every backward is done."""
        result, tensors = Result.of(value)
        places = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
        if not places:
            return value
        self._outstanding += 1
        lease = Lease(self._backward_came)
        for index, tensor in zip(places, probe(lease, [tensors[i] for i in places]), strict=True):
            tensors[index] = tensor
        return result.build(tensors)

    def _backward_came(self, place: int) -> None:
        self._outstanding -= 1

    def _replay(self, graphs: MicrobatchGraphs, place: int, entry: CapturedCall, tensors: Sequence[Tensor]) -> Any:
        entry.owner.before_replay()
        graphs.order.await_backward(place)
        lease = Lease(graphs.release, place, graphs.abandon)
        try:
            outputs = replay(entry.pair, lease, tensors)
        except BaseException:
            lease.end()
            raise
        entry.owner.after_replay()
        self.stats.replays[entry.label] += 1
        return outputs[0] if entry.is_tensor else entry.pair.result.build(outputs)

    def _record(
        self, recorded: RecordedStep, kind: CallSignature, tensors: list[Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Run eager, and note what was called with what; a place is reused as it would be in a replay."""
        attached = kind[0]
        self.stats.fallbacks[attached.name, "forward", WARMING] += 1
        graphs, place = recorded.record(kind, tensors, args, kwargs)
        try:
            result, outputs = Result.of(self._inside(attached, args, kwargs))
        except BaseException:
            self._recording = None  # the next round records anew: a graph of half a step serves no whole one
            raise
        wanted = [index for index, tensor in enumerate(outputs) if tensor.requires_grad]
        if wanted:
            graphs.order.await_backward(place)
            self._outstanding += 1

            def came(place: int) -> None:
                graphs.release(place)
                self._outstanding -= 1

            for index, tensor in zip(wanted, probe(Lease(came, place), [outputs[i] for i in wanted]), strict=True):
                outputs[index] = tensor
        graphs.came_out(place, outputs)
        return result.build(outputs)

    def table(self) -> list[dict[str, Any]]:
        """Every pair as plain values."""
        return [
            {
                "module": entry.pair.name,
                "instance": place,
                "engine": entry.pair.engine,
                "bytes": entry.pair.nbytes,
                "capture_seconds": round(entry.pair.capture_seconds, 6),
            }
            for recorded in self._recorded_steps
            for place, entry in enumerate(recorded.entries())
        ]

"""Graphs of modules inside a training step: warm-up, recording, capture, and from then on replay.

Owns the modules' forwards while attached, the rounds of a step, and every fallback with its reason. A round begins with
a forward while no backward is outstanding. One thread runs the forwards; backwards come from autograd's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graph_cache.addresses import AddressBook
from graph_cache.backends.base import Memory
from graph_cache.errors import CaptureError, GraphConfigError
from graph_cache.pool import GraphPool
from graph_cache.stats import CacheStats
from graph_cache.training.autograd import Lease, probe, replay
from graph_cache.training.call import CallKey, Result, take_apart
from graph_cache.training.graphed_call import GraphedCall
from graph_cache.training.instance_order import InstanceOrder

logger = logging.getLogger(__name__)

SCOPE = "module"
WARMING = "warming_up"
UNSEEN = "unseen_signature"
NO_INSTANCE = "no_free_instance"
FAILED = "capture_failed"
HOOKS = "hooks_inside"
NO_GRAD = "no_gradient"
STALE = "stale_address"


Kind = tuple["AttachedModule", CallKey, tuple[bool, ...]]  # what one pair of graphs serves


@dataclass(eq=False)
class AttachedModule:
    """A module whose forward is replaced; `eager` is the forward that it had."""

    name: str
    module: nn.Module
    eager: Callable[..., Any]
    refused: set[Kind] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.parameters = list(self.module.parameters())

    def frozen(self) -> tuple[bool, ...]:
        """Which parameters want no gradient: part of what a capture bakes in."""
        return tuple([not parameter.requires_grad for parameter in self.parameters])

    def hooks_inside(self) -> bool:
        """Whether submodules have hooks, which a replay would leave out."""
        inner = (module for module in self.module.modules() if module is not self.module)
        return any(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
                   or module._backward_pre_hooks for module in inner)


@dataclass
class Sample:
    """What a recorded call was given: copies of its tensors, or the output of an earlier call that one of them was."""

    owner: AttachedModule
    key: CallKey
    tensors: list[Tensor]
    sources: list[tuple[int, int] | None]  # (place, output) of an earlier call


class Program:
    """The pairs captured together, in memory of their own."""

    def __init__(self, memory: Memory):
        self.memory = memory
        self.order: InstanceOrder[GraphedCall] = InstanceOrder()
        self.samples: list[Sample] = []
        self.recorded: dict[int, tuple[int, int]] = {}  # address of a recorded output -> (place, output)
        self.addresses = AddressBook()
        self.captured = False
        self.retired = False

    def retire(self) -> None:
        """Serve no more forwards; the graphs go once outstanding backwards are done."""
        self.retired = True
        self.close_if_idle()

    def close_if_idle(self) -> None:
        """Destroy a retired program's graphs once no backward needs them."""
        if self.retired and not self.order.awaiting:
            for pair in self.order.pairs:
                if pair is not None:
                    pair.close()
            self.order.pairs = []


class TrainingGraphs:
    """Forward and backward graphs of attached modules, from one pool.

    `warmup_rounds` rounds run eager before a kind of step is captured; the last of them is recorded (at least one).
    """

    def __init__(self, pool: GraphPool, stats: CacheStats, *, warmup_rounds: int = 3,
                 generators: Sequence[torch.Generator] = ()):
        self.pool = pool
        self.stats = stats
        self.modules: list[AttachedModule] = []
        self._warmup_rounds = max(1, warmup_rounds)
        self._generators = list(generators)
        self._programs: list[Program] = []
        self._recording: Program | None = None
        self._unseen_rounds = 0
        self._unseen_this_round = False
        self._outstanding = 0  # eager and recorded calls whose backward is to come
        self._busy = False  # inside a capture or an attached module: nested modules run eager

    # ---- attaching -------------------------------------------------------------------------------------------------

    def attach(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Replace the forwards of these modules, all or none. Raises GraphConfigError where one is replaced already."""
        found = list(modules)
        for name, module in found:
            if "forward" in vars(module):
                raise GraphConfigError(f"{name}: its forward is replaced already ({vars(module)['forward']!r}); detach "
                                       "whatever did so first")
        for name, module in found:
            attached = AttachedModule(name, module, module.forward)
            module.forward = self._entry(attached)
            self.modules.append(attached)

    def detach(self) -> None:
        """Give all modules their forwards back, and drop the graphs once their backwards are done."""
        for attached in self.modules:
            del attached.module.forward
        self.modules = []
        self.clear()

    def clear(self) -> None:
        """Drop all graphs, now or as soon as outstanding backwards are done; the next rounds warm up anew."""
        for program in self._programs:
            program.retire()
        self._programs = []
        self._recording = None
        self._unseen_rounds = 0
        self.pool.trim()

    def _entry(self, attached: AttachedModule) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(attached, args, kwargs)

        return forward

    # ---- calls -----------------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Forwards whose backward is still to come."""
        return self._outstanding + sum(program.order.awaiting for program in self._programs)

    def _call(self, attached: AttachedModule, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self._busy:
            return attached.eager(*args, **kwargs)
        key, tensors = take_apart(args, kwargs, attached.module.training)
        frozen = attached.frozen()
        if not key.grad or (all(frozen) and not any(tensor.requires_grad for tensor in tensors)):
            return self._eager(attached, args, kwargs, NO_GRAD)
        if self.outstanding == 0:
            self._begin_round()
        kind = (attached, key, frozen)
        if kind in attached.refused:
            return self._eager(attached, args, kwargs, FAILED)
        for program in self._programs:
            place = program.order.find(kind)
            if place is not None:
                return self._replay(program, place, attached, tensors)
        if any(program.order.knows(kind) for program in self._programs):
            return self._eager(attached, args, kwargs, NO_INSTANCE)
        if attached.hooks_inside():
            return self._eager(attached, args, kwargs, HOOKS)
        self._unseen_this_round = True
        if self._recording is not None:
            return self._record(self._recording, kind, tensors, args, kwargs)
        return self._eager(attached, args, kwargs, UNSEEN if self._programs else WARMING, tracked=True)

    def _begin_round(self) -> None:
        """Between two steps: count warm-up, capture what was recorded, and look whether anything moved."""
        for program in list(self._programs):
            if not program.addresses.unchanged():
                moved = program.addresses.moved()
                logger.error("%d tensors moved under training graphs, which were dropped: %s", len(moved),
                             "; ".join(map(str, moved)))
                self.stats.invalidations[STALE] += 1
                self._programs.remove(program)
                program.retire()
        if self._recording is not None:
            recorded, self._recording = self._recording, None
            if len(recorded.order):
                self._capture(recorded)
            self._unseen_rounds = 0
        elif self._unseen_this_round:
            self._unseen_rounds += 1
        self._unseen_this_round = False
        if self._unseen_rounds >= self._warmup_rounds - 1 and self._recording is None and not self._settled():
            self._recording = Program(self.pool.backend.new_memory())

    def _settled(self) -> bool:
        """Whether a captured program serves this job and nothing unseen came up since."""
        return bool(self._programs) and self._unseen_rounds == 0

    def _eager(self, attached: AttachedModule, args: tuple, kwargs: dict[str, Any], reason: str,
               tracked: bool = False) -> Any:
        self.stats.fallbacks[attached.name, "forward", reason] += 1
        value = self._inside(attached, args, kwargs)
        return self._tracked(value) if tracked else value

    def _inside(self, attached: AttachedModule, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The eager forward; attached modules inside it are part of it."""
        self._busy = True
        try:
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
        for index, tensor in zip(places, probe(Lease(self._backward_came), [tensors[i] for i in places]), strict=True):
            tensors[index] = tensor
        return result.build(tensors)

    def _backward_came(self) -> None:
        self._outstanding -= 1

    def _replay(self, program: Program, place: int, attached: AttachedModule, tensors: list[Tensor]) -> Any:
        pair = program.order.pairs[place]
        program.order.await_backward(place)

        def release() -> None:
            program.order.release(place)
            program.close_if_idle()

        lease = Lease(release)
        try:
            outputs = replay(pair, lease, tensors)
        except BaseException:
            lease.end()
            raise
        rows = tensors[0].shape[0] if tensors and tensors[0].dim() else 1
        self.stats.replays[attached.name, SCOPE, "forward", rows] += 1
        return pair.result.build(outputs)

    # ---- recording and capturing -----------------------------------------------------------------------------------

    def _record(self, program: Program, kind: Kind, tensors: list[Tensor], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run eager, and note what was called with what; a place is reused as it would be in a replay."""
        attached, key, _ = kind
        self.stats.fallbacks[attached.name, "forward", WARMING] += 1
        place = program.order.find(kind)
        if place is None:
            place = program.order.add(kind)
            program.samples.append(Sample(attached, key, [tensor.detach().clone() for tensor in tensors],
                                          [program.recorded.get(tensor.data_ptr()) for tensor in tensors]))
        result, outputs = Result.of(self._inside(attached, args, kwargs))
        wanted = [index for index, tensor in enumerate(outputs) if tensor.requires_grad]
        if wanted:
            program.order.await_backward(place)
            self._outstanding += 1

            def came() -> None:
                program.order.release(place)
                self._outstanding -= 1

            for index, tensor in zip(wanted, probe(Lease(came), [outputs[i] for i in wanted]), strict=True):
                outputs[index] = tensor
        for index, tensor in enumerate(outputs):
            program.recorded[tensor.data_ptr()] = (place, index)
        return result.build(outputs)

    def _capture(self, program: Program) -> None:
        """Capture the recorded calls: forwards in order, then backwards from last to first."""
        order, started = program.order, time.perf_counter()
        with self.pool.session():
            self._busy = True
            try:
                for place, sample in enumerate(program.samples):
                    self._try(program, place, lambda p=place, s=sample: self._capture_forward(program, p, s))
                for place in reversed(range(len(program.samples))):
                    if order.pairs[place] is not None:
                        self._try(program, place, lambda p=place: self._capture_backward(program, p))
            finally:
                self._busy = False
        for attached in {sample.owner.name: sample.owner for sample in program.samples}.values():
            program.addresses.watch(attached.module, prefix=f"{attached.name}.")
        program.samples, program.recorded = [], {}
        self._programs.append(program)
        captured = sum(pair is not None for pair in order.pairs)
        logger.info("captured %d forward and backward graphs in %.2f s", captured, time.perf_counter() - started)

    def _capture_forward(self, program: Program, place: int, sample: Sample) -> None:
        inputs = []
        for tensor, source, signature in zip(sample.tensors, sample.sources, sample.key.tensors, strict=True):
            producer = program.order.pairs[source[0]] if source is not None and source[0] < place else None
            static = tensor if producer is None else producer.outputs[source[1]].detach()
            same = (static.shape, static.stride(), static.dtype) == signature[:3]
            inputs.append((static if same else tensor).requires_grad_(signature[4]))
        owner = sample.owner
        pair = GraphedCall(owner.name, owner.module, owner.eager, sample.key, inputs, self.pool, program.memory,
                           self._generators)
        program.order.pairs[place] = pair
        pair.capture_forward()

    def _capture_backward(self, program: Program, place: int) -> None:
        """Where one later call alone took an output, its gradient is read where that call's backward leaves it."""
        pair, arriving = program.order.pairs[place], {}
        for index in pair.differentiable:
            takers = [(taker, position) for taker, sample in enumerate(program.samples)
                      for position, source in enumerate(sample.sources) if source == (place, index)]
            taker = program.order.pairs[takers[0][0]] if len(takers) == 1 and takers[0][0] > place else None
            grad = taker.input_grads[takers[0][1]] if taker is not None and taker.input_grads else None
            output = pair.outputs[index]
            if grad is not None and (grad.shape, grad.stride(), grad.dtype) == (
                    output.shape, output.stride(), output.dtype):
                arriving[index] = grad
        pair.capture_backward(arriving)

    def _try(self, program: Program, place: int, capture: Callable[[], None]) -> None:
        """A failed capture costs its own call only: it runs eager from then on, and the reason is kept."""
        kind = program.order.kind(place)
        owner = kind[0]
        try:
            capture()
            self.stats.captures[owner.name, SCOPE, "recorded"] += 1
        except CaptureError as error:
            logger.error("capture of %s failed, it will run eager: %s", owner.name, error)
            self.stats.failed_captures[owner.name, SCOPE] += 1
            owner.refused.add(kind)
            program.order.remove(place)
            pair, program.order.pairs[place] = program.order.pairs[place], None
            if pair is not None:
                pair.close()

    def table(self) -> list[dict[str, Any]]:
        """Every pair as plain values."""
        rows = []
        for program in self._programs:
            for place, pair in enumerate(program.order.pairs):
                if pair is not None:
                    rows.append({"module": pair.name, "instance": place, "engine": pair.engine, "bytes": pair.nbytes,
                                 "capture_seconds": round(pair.capture_seconds, 6)})
        return rows

"""The calls that one microbatch makes, captured in their order: forwards first, then backwards from last to first.

Owns pairs of graphs in memory that no other chain is given, so microbatches of different chains may interleave in any
order: a chain serves the next microbatch as soon as the backwards of its last are done. Knows no rounds, nor what runs
eager.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graph_cache.errors import CaptureError
from graph_cache.training.attached import AttachedModule
from graph_cache.training.call import CallKey, Expected, is_sparse
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.graphed_call import GraphedCall
from graph_cache.training.parameter_aliases import trainable
from graph_cache.training.replay_order import ReplayOrder

logger = logging.getLogger(__name__)

SCOPE = "module"
SMALL = 4096  # bytes of an output that is copied for who takes it
COPIED_SHARE, LOSS_SHARE = 0.5, 0.25  # of the gradients' bytes, and of what forwards leave
CallSignature = tuple[
    AttachedModule, CallKey, tuple[bool, ...]
]  # what one pair of graphs serves: `state` of the module is last
Source = tuple[int, int]  # (place, output) of an earlier call of the same chain


@dataclass
class Sample:
    """What a recorded call was given: copies of its tensors, or the output of an earlier call that one of them was."""

    tensors: list[Tensor | None]
    sources: list[Source | None]
    expected: Expected


@dataclass
class CapturedCall:
    """A captured pair, and what it takes to see that a call is one that it serves."""

    pair: GraphedCall
    owner: AttachedModule
    state: tuple[bool, ...]
    expected: Expected
    label: tuple[str, str, str, int]  # under which its replays are counted
    taken: list[tuple[int, int]]  # inputs that are outputs of earlier pairs, and their addresses
    is_tensor: bool = False  # it returns a tensor by itself

    def tensors(self, owner: AttachedModule, args: tuple, kwargs: dict[str, Any]) -> Sequence[Tensor] | None:
        """The tensors of a call that this pair serves; None for another."""
        if owner is not self.owner or owner.state != self.state or not owner.has_its_parameters():
            return None
        tensors = self.expected.tensors(args, kwargs, owner.module.training, owner.around())
        return tensors if tensors is not None and self.finds(tensors) else None

    def finds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether each input that this pair reads where an earlier one left it is there.

        Another tensor would have to be copied there, over an output that its own backward may still need.
        """
        for index, address in self.taken:
            if tensors[index].data_ptr() != address:
                return False
        return True

    def close(self) -> None:
        """Destroy the pair."""
        if self.owner.handing_out is self.pair:
            self.owner.handing_out = None
        self.pair.close()


class MicrobatchGraphs:
    """The pairs of one microbatch on one model chunk, in memory of their own."""

    def __init__(self, job: CaptureContext, chunk: int):
        self.chunk = chunk
        self.order: ReplayOrder[CapturedCall] = ReplayOrder()
        self._job = job
        self._memory = job.pool.new_memory()
        self._retired = False
        self._samples: list[Sample] = []
        self._recorded: dict[int, Source] = {}  # address of a recorded output -> where it came from
        self.abandoned: set[int] = set()  # places whose last forward had no backward: its output may still be held
        self._alive: dict[int, list[Tensor]] = {}  # those outputs, by place, so that their addresses name nothing else

    def entries(self) -> Iterator[CapturedCall]:
        """What was captured."""
        return (entry for entry in self.order.pairs if entry is not None)

    def find(self, kind: CallSignature) -> int | None:
        """A place that may serve such a call now."""
        place = self.order.find(kind)
        while place is not None and self.is_held(place):
            place = self.order.find(kind, behind=place)
        return place

    def is_held(self, place: int) -> bool:
        """Whether somebody still has the output of a forward from this place that will have no backward.

        Of one that had its backward we don't ask: a training loop's variable holds the last loss as long as it does.
        """
        if place not in self.abandoned:
            return False
        entry = self.order.pairs[place]
        if entry is not None and entry.pair.is_held():
            return True
        self.abandoned.discard(place)
        return False

    # ---- recording -------------------------------------------------------------------------------------------------

    def sources(self, tensors: Sequence[Tensor]) -> list[Source | None]:
        """For each tensor, which recorded output of this chain it is."""
        return [self._recorded.get(tensor.data_ptr()) for tensor in tensors]

    def find_recorded(self, kind: CallSignature, tensors: Sequence[Tensor]) -> int | None:
        """A recorded place that such a call may have now."""
        place = self.order.find(kind)
        return place if place is not None and self._samples[place].sources == self.sources(tensors) else None

    def record(self, kind: CallSignature, tensors: Sequence[Tensor], args: tuple, kwargs: dict[str, Any]) -> int:
        """A new place for a call like this one, which runs eager now."""
        sources = self.sources(tensors)
        kept = [
            tensor.detach().clone() if source is None else None for tensor, source in zip(tensors, sources, strict=True)
        ]
        self._samples.append(Sample(kept, sources, Expected(kind[1], args, kwargs)))
        return self.order.add(kind)

    def came_out(self, place: int, outputs: Sequence[Tensor]) -> None:
        """Note where a recorded call left its outputs, so that those who take them are known."""
        outputs = [output for output in outputs if not is_sparse(output)]  # which no graph returns
        for tensor in self._alive.pop(place, ()):  # of the microbatch that had this place before
            self._recorded.pop(tensor.data_ptr(), None)
        self._alive[place] = [tensor.detach() for tensor in outputs]
        self._recorded.update((tensor.data_ptr(), (place, index)) for index, tensor in enumerate(outputs))

    # ---- capture ---------------------------------------------------------------------------------------------------

    def forget_outputs(self) -> None:
        """Let go of what the eager calls left: a capture needs none of it."""
        self._alive, self._recorded = {}, {}

    def capture(self) -> None:
        """Capture what was recorded. A call whose capture fails has no pair, and is refused from then on."""
        self._capture_forwards()
        while not self._capture_backwards():
            self._close_all()
            self._capture_forwards()
        self._choose_who_hands_copies()
        self._samples = []

    def _capture_forwards(self) -> None:
        for place, sample in enumerate(self._samples):
            owner, _, state = kind = self.order.kind(place)
            if not self.order.serves(place):
                continue
            if kind in owner.refused or not owner.may_be(state):  # or frozen or unfrozen since it was recorded
                self.order.remove(place)
                continue
            with owner.in_modes_of(state):
                self._try(place, lambda p=place, s=sample: self._capture_forward(p, s))

    def _capture_backwards(self) -> bool:
        """False if a call without a backward left the graphs of others to read its outputs where nobody writes them."""
        self._choose_who_hands_out()
        is_whole = True
        for place in reversed(range(len(self.order))):
            if self.order.pairs[place] is not None:
                self._try(place, lambda p=place: self._capture_backward(p))
                is_whole &= self.order.pairs[place] is not None or not self._feeds_others(place)
        return is_whole

    def _feeds_others(self, place: int) -> bool:
        return any(
            entry is not None and source is not None and source[0] == place
            for entry, sample in zip(self.order.pairs, self._samples, strict=True)
            for source in sample.sources
        )

    def _choose_who_hands_out(self) -> None:
        """Of each module's calls the first hands its gradients out without a copy: the others' are added to those.

        What is handed out so keeps its memory for good, also through the loss, where eager has none. So the first
        modules hand out copies: their backward runs last, when the memory of the loss is free again. No more of them
        than the loss may take, which grows with tokens as what forwards leave does, nor than COPIED_SHARE of all: with
        24 layers a peak of 1.18 times eager's became 1.16 so, and with 4 sequences at a time 1.10.
        """
        entries = list(self.entries())
        owners = list(dict.fromkeys(entry.owner for entry in entries))
        sizes = [sum(parameter.nbytes for parameter in trainable(owner.scope)) for owner in owners]
        left = sum(entry.pair.left for entry in entries)
        copied = min(COPIED_SHARE * sum(sizes), LOSS_SHARE * left)
        copying = {owner for owner, upto in zip(owners, itertools.accumulate(sizes), strict=True) if upto <= copied}
        for entry in entries:
            entry.pair.hands_out = entry.owner.handing_out is None and entry.owner not in copying
            if entry.pair.hands_out:
                entry.owner.handing_out = entry.pair

    def _choose_who_hands_copies(self) -> None:
        """A loss or a metric may be kept in a list until the step ends, while the next microbatch's takes its place."""
        taken = {source for sample in self._samples for source in sample.sources}
        for place, entry in enumerate(self.order.pairs):
            if entry is not None:
                entry.pair.copied = {
                    index
                    for index, output in enumerate(entry.pair.outputs)
                    if output.nbytes <= SMALL and (place, index) not in taken
                }

    def _capture_forward(self, place: int, sample: Sample) -> None:
        owner, key, state = self.order.kind(place)
        inputs, taken = [], []
        for kept, source, signature in zip(sample.tensors, sample.sources, key.tensors, strict=True):
            producer = self.order.pairs[source[0]] if source is not None and source[0] < place else None
            static = kept if producer is None else producer.pair.outputs[source[1]].detach()
            if static is None or (static.shape, static.stride(), static.dtype) != signature[:3]:
                shape, strides, dtype, device, _ = signature  # its producer has no graph, or it was a view
                static = torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
            elif producer is not None:
                taken.append((len(inputs), static.data_ptr()))
            inputs.append(static.requires_grad_(signature[4]))
        pair = GraphedCall(owner, key, inputs, self._job, self._memory)
        rows = key.tensors[0][0][0] if key.tensors and key.tensors[0][0] else 1
        entry = CapturedCall(pair, owner, state, sample.expected, (owner.name, SCOPE, "forward", rows), taken)
        self.order.pairs[place] = entry
        pair.capture_forward()
        entry.is_tensor = pair.result.is_tensor

    def _capture_backward(self, place: int) -> None:
        """Where one later call alone took an output, its gradient is read where that call's backward leaves it."""
        pair, arriving = self.order.pairs[place].pair, {}
        for index in pair.differentiable:
            takers = [
                (taker, position)
                for taker, sample in enumerate(self._samples)
                for position, source in enumerate(sample.sources)
                if source == (place, index)
            ]
            taker = self.order.pairs[takers[0][0]] if len(takers) == 1 and takers[0][0] > place else None
            grad = taker.pair.input_grads[takers[0][1]] if taker is not None and taker.pair.input_grads else None
            output = pair.outputs[index]
            if grad is not None and (grad.shape, grad.stride(), grad.dtype) == (
                output.shape,
                output.stride(),
                output.dtype,
            ):
                arriving[index] = grad
                taker.pair.passed_on.add(takers[0][1])
        pair.capture_backward(arriving)

    def _try(self, place: int, capture: Callable[[], None]) -> None:
        """A failed capture costs its own call only: it runs eager from then on, and the reason is kept."""
        kind = self.order.kind(place)
        owner = kind[0]
        try:
            capture()
            self._job.stats.captures[owner.name, SCOPE, "recorded"] += 1
        except Exception as error:  # of the capture, or for want of memory for what it needs
            logger.error(
                "capture of %s failed, it will run eager: %s",
                owner.name,
                error,
                exc_info=not isinstance(error, CaptureError),
            )
            self._job.stats.capture_failed(owner.name, SCOPE, error)
            owner.refused.add(kind)
            self.order.remove(place)
            entry, self.order.pairs[place] = self.order.pairs[place], None
            if entry is not None:
                entry.close()

    # ---- the end ---------------------------------------------------------------------------------------------------

    def release(self, place: int) -> None:
        """The backward of a forward from this place is done, or never began."""
        self.order.release(place)
        if self._retired:
            self._close_if_idle()

    def abandon(self, place: int) -> None:
        """The backward of a forward from this place will never come, but what it returned may be in use."""
        self.abandoned.add(place)
        self.release(place)

    def retire(self) -> None:
        """Serve no more forwards; the graphs go once outstanding backwards are done."""
        self._retired = True
        for entry in self.entries():
            if entry.owner.handing_out is entry.pair:
                entry.owner.handing_out = None
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self.order.awaiting:
            self._close_all()

    def _close_all(self) -> None:
        for entry in self.entries():
            entry.close()
        self.order.pairs = [None] * len(self.order)

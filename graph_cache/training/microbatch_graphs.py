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
MAX_CLONED_BYTES = 4096  # bytes of an output that is copied for who takes it
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
    aliased_inputs: list[tuple[int, int]]  # inputs that are outputs of earlier pairs, and their addresses
    is_tensor: bool = False  # it returns a tensor by itself

    def tensors(self, owner: AttachedModule, args: tuple, kwargs: dict[str, Any]) -> Sequence[Tensor] | None:
        """The tensors of a call that this pair serves; None for another."""
        if owner is not self.owner or owner.state != self.state or not owner.has_same_parameters():
            return None
        tensors = self.expected.tensors(args, kwargs, owner.module.training, owner.ambient_state())
        return tensors if tensors is not None and self.accepts(tensors) else None

    def accepts(self, tensors: Sequence[Tensor]) -> bool:
        """Whether each input that this pair reads where an earlier one left it is there.

        Another tensor would have to be copied there, over an output that its own backward may still need.
        """
        for index, address in self.aliased_inputs:
            if tensors[index].data_ptr() != address:
                return False
        return True

    def close(self) -> None:
        """Destroy the pair."""
        if self.owner.uncopied_pair is self.pair:
            self.owner.uncopied_pair = None
        self.pair.close()


class MicrobatchGraphs:
    """The pairs of one microbatch on one model chunk, in memory of their own."""

    def __init__(self, context: CaptureContext, chunk: int):
        self.chunk = chunk
        self.order: ReplayOrder[CapturedCall] = ReplayOrder()
        self._context = context
        self._memory = context.pool.new_memory()
        self._retired = False
        self._samples: list[Sample] = []
        self._output_sources: dict[int, Source] = {}  # address of a recorded output -> where it came from
        self.abandoned: set[int] = set()  # places whose last forward had no backward: its output may still be held
        self._live_outputs: dict[
            int, list[Tensor]
        ] = {}  # those outputs, by place, so that their addresses name nothing else

    def entries(self) -> Iterator[CapturedCall]:
        """What was captured."""
        return (entry for entry in self.order.pairs if entry is not None)

    def find(self, signature: CallSignature) -> int | None:
        """A place that may serve such a call now."""
        index = self.order.find(signature)
        while index is not None and self.is_held(index):
            index = self.order.find(signature, after=index)
        return index

    def is_held(self, index: int) -> bool:
        """Whether somebody still has the output of a forward from this place that will have no backward.

        Of one that had its backward we don't ask: a training loop's variable holds the last loss as long as it does.
        """
        if index not in self.abandoned:
            return False
        entry = self.order.pairs[index]
        if entry is not None and entry.pair.is_held():
            return True
        self.abandoned.discard(index)
        return False

    # ---- recording -------------------------------------------------------------------------------------------------

    def sources(self, tensors: Sequence[Tensor]) -> list[Source | None]:
        """For each tensor, which recorded output of this chain it is."""
        return [self._output_sources.get(tensor.data_ptr()) for tensor in tensors]

    def find_recorded(self, signature: CallSignature, tensors: Sequence[Tensor]) -> int | None:
        """A recorded place that such a call may have now."""
        index = self.order.find(signature)
        return index if index is not None and self._samples[index].sources == self.sources(tensors) else None

    def record(self, signature: CallSignature, tensors: Sequence[Tensor], args: tuple, kwargs: dict[str, Any]) -> int:
        """A new place for a call like this one, which runs eager now."""
        sources = self.sources(tensors)
        copies = [
            tensor.detach().clone() if source is None else None for tensor, source in zip(tensors, sources, strict=True)
        ]
        self._samples.append(Sample(copies, sources, Expected(signature[1], args, kwargs)))
        return self.order.add(signature)

    def record_outputs(self, index: int, outputs: Sequence[Tensor]) -> None:
        """Note where a recorded call left its outputs, so that those who take them are known."""
        outputs = [output for output in outputs if not is_sparse(output)]  # which no graph returns
        for tensor in self._live_outputs.pop(index, ()):  # of the microbatch that had this place before
            self._output_sources.pop(tensor.data_ptr(), None)
        self._live_outputs[index] = [tensor.detach() for tensor in outputs]
        self._output_sources.update(
            (tensor.data_ptr(), (index, output_index)) for output_index, tensor in enumerate(outputs)
        )

    # ---- capture ---------------------------------------------------------------------------------------------------

    def forget_outputs(self) -> None:
        """Let go of what the eager calls left: a capture needs none of it."""
        self._live_outputs, self._output_sources = {}, {}

    def capture(self) -> None:
        """Capture what was recorded. A call whose capture fails has no pair, and is refused from then on."""
        self._capture_forwards()
        while not self._capture_backwards():
            self._close_all()
            self._capture_forwards()
        self._choose_cloned_outputs()
        self._samples = []

    def _capture_forwards(self) -> None:
        for index, sample in enumerate(self._samples):
            owner, _, state = signature = self.order.signature(index)
            if not self.order.serves(index):
                continue
            if signature in owner.refused or not owner.differs_only_in_modes(
                state
            ):  # or frozen or unfrozen since it was recorded
                self.order.remove(index)
                continue
            with owner.with_modes(state):
                self._capture_or_refuse(index, lambda p=index, s=sample: self._capture_forward(p, s))

    def _capture_backwards(self) -> bool:
        """False if a call without a backward left the graphs of others to read its outputs where nobody writes them."""
        self._choose_uncopied_gradients()
        complete = True
        for index in reversed(range(len(self.order))):
            if self.order.pairs[index] is not None:
                self._capture_or_refuse(index, lambda p=index: self._capture_backward(p))
                complete &= self.order.pairs[index] is not None or not self._feeds_others(index)
        return complete

    def _feeds_others(self, index: int) -> bool:
        return any(
            entry is not None and source is not None and source[0] == index
            for entry, sample in zip(self.order.pairs, self._samples, strict=True)
            for source in sample.sources
        )

    def _choose_uncopied_gradients(self) -> None:
        """Of each module's calls the first hands its gradients out without a copy: the others' are added to those.

        What is handed out so keeps its memory for good, also through the loss, where eager has none. So the first
        modules hand out copies: their backward runs last, when the memory of the loss is free again. No more of them
        than the loss may take, which grows with tokens as what forwards leave does, nor than COPIED_SHARE of all: with
        24 layers a peak of 1.18 times eager's became 1.16 so, and with 4 sequences at a time 1.10.
        """
        entries = list(self.entries())
        owners = list(dict.fromkeys(entry.owner for entry in entries))
        sizes = [sum(parameter.nbytes for parameter in trainable(owner.scope)) for owner in owners]
        forward_nbytes = sum(entry.pair.forward_nbytes for entry in entries)
        copied_bytes = min(COPIED_SHARE * sum(sizes), LOSS_SHARE * forward_nbytes)
        copying = {
            owner
            for owner, cumulative in zip(owners, itertools.accumulate(sizes), strict=True)
            if cumulative <= copied_bytes
        }
        for entry in entries:
            entry.pair.returns_uncopied = entry.owner.uncopied_pair is None and entry.owner not in copying
            if entry.pair.returns_uncopied:
                entry.owner.uncopied_pair = entry.pair

    def _choose_cloned_outputs(self) -> None:
        """A loss or a metric may be kept in a list until the step ends, while the next microbatch's takes its place."""
        consumed = {source for sample in self._samples for source in sample.sources}
        for index, entry in enumerate(self.order.pairs):
            if entry is not None:
                entry.pair.cloned_outputs = {
                    output_index
                    for output_index, output in enumerate(entry.pair.outputs)
                    if output.nbytes <= MAX_CLONED_BYTES and (index, output_index) not in consumed
                }

    def _capture_forward(self, index: int, sample: Sample) -> None:
        owner, key, state = self.order.signature(index)
        inputs, aliased_inputs = [], []
        for recorded, source, tensor_signature in zip(sample.tensors, sample.sources, key.tensors, strict=True):
            producer = self.order.pairs[source[0]] if source is not None and source[0] < index else None
            static = recorded if producer is None else producer.pair.outputs[source[1]].detach()
            if static is None or (static.shape, static.stride(), static.dtype) != tensor_signature[:3]:
                shape, strides, dtype, device, _ = tensor_signature  # its producer has no graph, or it was a view
                static = torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()
            elif producer is not None:
                aliased_inputs.append((len(inputs), static.data_ptr()))
            inputs.append(static.requires_grad_(tensor_signature[4]))
        pair = GraphedCall(owner, key, inputs, self._context, self._memory)
        rows = key.tensors[0][0][0] if key.tensors and key.tensors[0][0] else 1
        entry = CapturedCall(pair, owner, state, sample.expected, (owner.name, SCOPE, "forward", rows), aliased_inputs)
        self.order.pairs[index] = entry
        pair.capture_forward()
        entry.is_tensor = pair.result.is_tensor

    def _capture_backward(self, index: int) -> None:
        """Where one later call alone took an output, its gradient is read where that call's backward leaves it."""
        pair, static_grads = self.order.pairs[index].pair, {}
        for output_index in pair.differentiable:
            consumers = [
                (consumer, position)
                for consumer, sample in enumerate(self._samples)
                for position, source in enumerate(sample.sources)
                if source == (index, output_index)
            ]
            consumer = self.order.pairs[consumers[0][0]] if len(consumers) == 1 and consumers[0][0] > index else None
            grad = (
                consumer.pair.input_grads[consumers[0][1]]
                if consumer is not None and consumer.pair.input_grads
                else None
            )
            output = pair.outputs[output_index]
            if grad is not None and (grad.shape, grad.stride(), grad.dtype) == (
                output.shape,
                output.stride(),
                output.dtype,
            ):
                static_grads[output_index] = grad
                consumer.pair.grads_read_in_place.add(consumers[0][1])
        pair.capture_backward(static_grads)

    def _capture_or_refuse(self, index: int, capture: Callable[[], None]) -> None:
        """A failed capture costs its own call only: it runs eager from then on, and the reason is kept."""
        signature = self.order.signature(index)
        owner = signature[0]
        try:
            capture()
            self._context.stats.captures[owner.name, SCOPE, "recorded"] += 1
        except Exception as error:  # of the capture, or for want of memory for what it needs
            logger.error(
                "capture of %s failed, it will run eager: %s",
                owner.name,
                error,
                exc_info=not isinstance(error, CaptureError),
            )
            self._context.stats.capture_failed(owner.name, SCOPE, error)
            owner.refused.add(signature)
            self.order.remove(index)
            entry, self.order.pairs[index] = self.order.pairs[index], None
            if entry is not None:
                entry.close()

    # ---- the end ---------------------------------------------------------------------------------------------------

    def release(self, index: int) -> None:
        """The backward of a forward from this place is done, or never began."""
        self.order.release(index)
        if self._retired:
            self._close_if_idle()

    def abandon(self, index: int) -> None:
        """The backward of a forward from this place will never come, but what it returned may be in use."""
        self.abandoned.add(index)
        self.release(index)

    def retire(self) -> None:
        """Serve no more forwards; the graphs go once outstanding backwards are done."""
        self._retired = True
        for entry in self.entries():
            if entry.owner.uncopied_pair is entry.pair:
                entry.owner.uncopied_pair = None
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self.order.awaiting:
            self._close_all()

    def _close_all(self) -> None:
        for entry in self.entries():
            entry.close()
        self.order.pairs = [None] * len(self.order)

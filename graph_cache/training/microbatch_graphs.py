"""Graphs of the calls of one microbatch, captured in order: forwards first, then backwards from last to first.

Each MicrobatchGraphs has separate memory, so microbatches with different graphs may interleave in any order. The
graphs serve the next microbatch as soon as the backwards of the previous one are done. Steps and eager calls are
handled by `modules.py`.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graph_cache.core.capture_state import CaptureState
from graph_cache.errors import CaptureError, CaptureRefused
from graph_cache.training.attached import AttachedModule, ModuleState
from graph_cache.training.call import BackwardKey, CallKey, Expected, as_kind, is_sparse
from graph_cache.training.call_graphs import CallGraphs
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.gradients import MAX_USES
from graph_cache.training.replay_order import ReplayOrder
from graph_cache.training.shared_inputs import RecordedInputs, SharedInput
from graph_cache.utils.layout import distinct

logger = logging.getLogger(__name__)

SCOPE = "module"
MAX_CLONED_BYTES = 4096  # outputs up to this size are returned as copies, unless another graph reads them
COPIED_SHARE, LOSS_SHARE = 0.5, 0.25  # limits of copied gradients: share of gradient bytes, and of forward bytes
# (module, key, module state): an entry serves calls of one signature.
CallSignature = tuple[AttachedModule, CallKey, ModuleState]
Source = tuple[int, int]  # (call index, output index) of an earlier call of the same microbatch


@dataclass
class Sample:
    """Inputs of a recorded call: for each tensor a copy, or its source if it is an output of an earlier call."""

    tensors: list[SharedInput | None]
    sources: list[Source | None]
    expected: Expected
    backward: BackwardKey | None = None  # of the last recorded backward
    refusals: tuple[str, ...] = ()  # what the call did that a replay would not


@dataclass
class CallEntry:
    """The graphs of a captured call, and the checks whether it serves a call.

    `capture` is the state of its signature's capture, which all entries of the signature in this step share.
    """

    graphs: CallGraphs
    capture: CaptureState
    owner: AttachedModule
    state: ModuleState
    expected: Expected
    label: tuple[str, str, str, int]  # labels of the replay counter
    aliased_inputs: list[tuple[int, int]]  # (input index, address) of inputs that alias outputs of earlier entries
    shared_inputs: list[tuple[int, SharedInput]]  # (input index, buffer) of inputs that other entries read too
    is_tensor: bool = False  # the call returns a single tensor
    checked: bool = False  # its first replay was compared with eager

    def tensors(self, owner: AttachedModule, args: tuple, kwargs: dict[str, Any]) -> Sequence[Tensor] | None:
        """Return the tensors of a call if this entry serves it, else None."""
        if owner is not self.owner or owner.state != self.state or not owner.has_same_parameters():
            return None
        tensors = self.expected.tensors(args, kwargs, owner.module.training, owner.ambient_state())
        return tensors if tensors is not None and self.accepts(tensors) else None

    def accepts(self, tensors: Sequence[Tensor]) -> bool:
        """Whether each input that aliases an output of an earlier entry has its address, and whether inputs that other
        entries share hold what those got.

        Any other tensor would have to be copied there, over one that a backward may still need.
        """
        for index, address in self.aliased_inputs:
            if tensors[index].data_ptr() != address:
                return False
        return all([shared.accepts(tensors[index]) for index, shared in self.shared_inputs])

    def remember_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Record what a replay copies into the inputs that other entries share."""
        for index, shared in self.shared_inputs:
            shared.remember(tensors[index])

    def close(self) -> None:
        """Destroy the graphs."""
        if self.owner.uncopied is self.graphs:
            self.owner.uncopied = None
        self.graphs.close()


class MicrobatchGraphs:
    """The entries of one microbatch on one model chunk, in memory that no other microbatch uses.

    `states` holds the state of each recorded signature's capture.
    """

    def __init__(self, context: CaptureContext, chunk: int, states: Mapping[CallSignature, CaptureState]):
        self.chunk = chunk
        self.order: ReplayOrder[CallSignature, CallEntry] = ReplayOrder()
        self._context, self._states = context, states
        self._memory = context.pool.new_memory()
        self._retired = False
        self._repeated: Container[AttachedModule] = ()
        self._samples: list[Sample] = []
        self._recorded_inputs = RecordedInputs(self.order)
        self._output_sources: dict[int, Source] = {}  # address of a recorded output -> its source
        # Indices of calls with a last forward that will have no backward: its output may still be referenced.
        self.abandoned: set[int] = set()
        # Recorded outputs by call index, kept alive so that their addresses are not reused.
        self._live_outputs: dict[int, list[Tensor]] = {}

    @property
    def num_held_outputs(self) -> int:
        """Number of recorded outputs that are kept alive until the capture."""
        return sum(map(len, self._live_outputs.values()))

    def entries(self) -> Iterator[CallEntry]:
        """Iterate over the captured calls."""
        return (entry for entry in self.order.entries if entry is not None)

    def captured(self) -> Iterator[tuple[CallSignature, CallEntry]]:
        """Iterate over the captured calls with their signatures."""
        for index, entry in enumerate(self.order.entries):
            if entry is not None:
                yield self.order.signature(index), entry

    def find(self, signature: CallSignature) -> int | None:
        """Return the index of an entry that may serve this signature now, or None."""
        index = self.order.find(signature)
        while index is not None and self.is_held(index):
            index = self.order.find(signature, after=index)
        return index

    def is_held(self, index: int) -> bool:
        """Whether the output of a forward without a backward is still referenced at this index.

        Outputs that had their backward are not checked: the variables of a training loop often hold the last loss.
        """
        if index not in self.abandoned:
            return False
        entry = self.order.entries[index]
        if entry is not None and entry.graphs.is_held():
            return True
        self.abandoned.discard(index)
        return False

    # ---- recording -------------------------------------------------------------------------------------------------

    def sources(self, tensors: Sequence[Tensor]) -> list[Source | None]:
        """Return, for each tensor, the recorded output of this microbatch that it is, or None."""
        return [self._output_sources.get(tensor.data_ptr()) for tensor in tensors]

    def find_recorded(self, signature: CallSignature, tensors: Sequence[Tensor]) -> int | None:
        """Return the index of a recorded call that this call may repeat now, or None."""
        index = self.order.find(signature)
        return index if index is not None and self._samples[index].sources == self.sources(tensors) else None

    def record(self, signature: CallSignature, tensors: Sequence[Tensor], args: tuple, kwargs: dict[str, Any]) -> int:
        """Record a call, which runs eager now, and return its index."""
        sources = self.sources(tensors)
        index = self.order.add(signature)
        copies = [
            self._recorded_inputs.copy(tensor, index) if source is None else None
            for tensor, source in zip(tensors, sources, strict=True)
        ]
        self._samples.append(Sample(copies, sources, Expected(signature[1], args, kwargs)))
        return index

    def refuse(self, index: int, reasons: Sequence[str]) -> None:
        """Refuse the capture of a recorded call for these reasons."""
        self._samples[index].refusals += tuple(reasons)

    def record_outputs(self, index: int, outputs: Sequence[Tensor]) -> None:
        """Record the addresses of a call's outputs, so that calls that take them as inputs are recognized."""
        outputs = [output for output in outputs if not is_sparse(output)]  # graphs never return sparse tensors
        for tensor in self._live_outputs.pop(index, ()):  # of the previous microbatch at this index
            self._output_sources.pop(tensor.data_ptr(), None)
        self._live_outputs[index] = [tensor.detach() for tensor in outputs]
        self._output_sources.update(
            (tensor.data_ptr(), (index, output_index)) for output_index, tensor in enumerate(outputs)
        )

    def record_backward(self, index: int, grads: Sequence[Tensor | None]) -> None:
        """Record the gradients that a recorded call's backward gets. Unused outputs have None."""
        if index < len(self._samples):
            self._samples[index].backward = BackwardKey.of(grads)

    # ---- capture ---------------------------------------------------------------------------------------------------

    def forget_outputs(self) -> None:
        """Release the outputs of eager calls: a capture doesn't need them."""
        self._live_outputs, self._output_sources = {}, {}
        self._recorded_inputs.clear()

    def capture(self, repeated: Container[AttachedModule] = ()) -> None:
        """Capture the recorded calls. If the capture of a call fails, it gets no entry and runs eager from then on.

        `repeated`: modules that are called several times before a backward.
        """
        self._repeated = repeated
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
            if self._states[signature].failed or not owner.differs_only_in_flags(state):
                self.order.remove(index)
                continue
            with owner.with_flags(state):
                self._capture_or_refuse(index, functools.partial(self._capture_forward, index, sample))

    def _capture_backwards(self) -> bool:
        """Return False if a call without a backward graph feeds other entries, which would read unwritten outputs."""
        self._choose_uncopied_gradients()
        complete = True
        for index in reversed(range(len(self.order))):
            if (entry := self.order.entries[index]) is not None:
                with entry.owner.with_flags(entry.state):
                    self._capture_or_refuse(index, functools.partial(self._capture_backward, index))
                complete &= self.order.entries[index] is not None or not self._feeds_others(index)
        return complete

    def _feeds_others(self, index: int) -> bool:
        return any(
            entry is not None and source is not None and source[0] == index
            for entry, sample in zip(self.order.entries, self._samples, strict=True)
            for source in sample.sources
        )

    def _choose_uncopied_gradients(self) -> None:
        """Choose the entries that return their gradients uncopied.

        Only the first call of a module returns its gradients uncopied; gradients of the others are added to those.

        Uncopied gradients keep their memory permanently, also during the loss, when eager holds no gradients. So the
        first modules return copies: their backward runs last, when the memory of the loss is free again. Copies are
        limited to the memory that the loss may take (it grows with tokens, as forward bytes do: LOSS_SHARE), and to
        COPIED_SHARE of all gradients. With 24 layers, this reduced the peak from 1.18 to 1.16 times eager's, and with 4
        sequences at a time to 1.10.
        """
        entries = list(self.entries())
        owners = list(dict.fromkeys(entry.owner for entry in entries))
        parameters = {owner: [one for entry in entries if entry.owner is owner for one in entry.graphs.parameters]
                      for owner in owners}  # fmt: skip
        sizes = [sum(one.nbytes for one in {id(one): one for one in parameters[owner]}.values()) for owner in owners]
        forward_nbytes = sum(entry.graphs.forward_nbytes for entry in entries)
        copied_bytes = min(COPIED_SHARE * sum(sizes), LOSS_SHARE * forward_nbytes)
        copying = {
            owner
            for owner, cumulative in zip(owners, itertools.accumulate(sizes), strict=True)
            if cumulative <= copied_bytes
        }
        for entry in entries:
            entry.graphs.returns_uncopied = entry.owner.uncopied is None and entry.owner not in copying
            if entry.graphs.returns_uncopied:
                entry.owner.uncopied = entry.graphs

    def _choose_cloned_outputs(self) -> None:
        """Return small outputs as copies: a job may keep losses or metrics until the step ends, across microbatches.

        Parameters, buffers and views of them stay what they are: they change with their memory.
        """
        consumed = {source for sample in self._samples for source in sample.sources}
        for index, entry in enumerate(self.order.entries):
            if entry is not None:
                entry.graphs.cloned_outputs = {
                    output_index
                    for output_index, output in enumerate(entry.graphs.outputs)
                    if output.nbytes <= MAX_CLONED_BYTES
                    and (index, output_index) not in consumed
                    and not entry.graphs.is_from_outside(output)
                }

    def _capture_forward(self, index: int, sample: Sample) -> None:
        owner, key, state = signature = self.order.signature(index)
        if sample.refusals:
            raise CaptureRefused(f"{owner.name} {'; '.join(dict.fromkeys(sample.refusals))}")
        inputs: list[Tensor] = []
        aliased_inputs: list[tuple[int, int]] = []
        shared_inputs: list[tuple[int, SharedInput]] = []
        for recorded, source, tensor_signature in zip(sample.tensors, sample.sources, key.tensors, strict=True):
            producer = self.order.entries[source[0]] if source is not None and source[0] < index else None
            static = None if recorded is None else recorded.static
            if producer is not None:
                static = producer.graphs.outputs[source[1]].detach()
            if static is None or (static.shape, static.stride(), static.dtype) != tensor_signature[:3]:
                # The producer has no graph, or the input was a view of its output.
                shape, strides, dtype, device, _ = tensor_signature
                static = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                distinct(static).zero_()
            elif producer is not None:
                aliased_inputs.append((len(inputs), static.data_ptr()))
            elif recorded is not None and len(recorded.indices) > 1:
                shared_inputs.append((len(inputs), recorded))
            inputs.append(static.requires_grad_(tensor_signature[4]))
        if key.kinds:
            inputs = list(map(as_kind, inputs, key.kinds))
        graphs = CallGraphs(
            owner, key, inputs, sample.backward, self._context, self._memory, self._inputs_of_several_calls(index)
        )
        rows = key.tensors[0][0][0] if key.tensors and key.tensors[0][0] else 1
        label = (owner.name, SCOPE, "forward", rows)
        entry = CallEntry(
            graphs, self._states[signature], owner, state, sample.expected, label, aliased_inputs, shared_inputs
        )
        self.order.entries[index] = entry
        graphs.capture_forward()
        entry.is_tensor = graphs.result.is_tensor
        if graphs.most_uses > MAX_USES and owner in self._repeated:
            raise CaptureRefused(
                f"{owner.name} uses a parameter {graphs.most_uses} times, and is called several times before a "
                f"backward: replays keep the order of at most {MAX_USES} gradients: call it once for all inputs"
            )

    def _inputs_of_several_calls(self, index: int) -> set[int]:
        """Return which inputs of a call other calls take too, or the call takes from outside with a gradient."""
        taken = Counter(source for sample in self._samples for source in sample.sources if source is not None)
        return {
            position
            for position, source in enumerate(self._samples[index].sources)
            if source is None or taken[source] > 1
        }

    def _capture_backward(self, index: int) -> None:
        """Capture a backward. If a single later call took an output, read its gradient where that call leaves it."""
        graphs, static_grads = self.order.entries[index].graphs, {}
        for output_index, strides in graphs.used_outputs():
            consumers = [
                (consumer, position)
                for consumer, sample in enumerate(self._samples)
                for position, source in enumerate(sample.sources)
                if source == (index, output_index)
            ]
            consumer = self.order.entries[consumers[0][0]] if len(consumers) == 1 and consumers[0][0] > index else None
            grad = (
                consumer.graphs.input_grads[consumers[0][1]]
                if consumer is not None and consumer.graphs.input_grads
                else None
            )
            output = graphs.outputs[output_index]
            if grad is not None and (grad.shape, grad.stride(), grad.dtype) == (output.shape, strides, output.dtype):
                static_grads[output_index] = grad
                consumer.graphs.grads_read_in_place.add(consumers[0][1])
        graphs.capture_backward(static_grads)

    def _capture_or_refuse(self, index: int, capture: Callable[[], None]) -> None:
        """Capture, and on failure record the reason and run only this call eager from then on."""
        signature = self.order.signature(index)
        owner = signature[0]
        try:
            capture()
            self._context.stats.captures[owner.name, SCOPE, "recorded"] += 1
        except Exception as error:  # a CaptureError, or out of memory
            logger.error(
                "capture of %s failed, it will run eager: %s",
                owner.name,
                error,
                exc_info=not isinstance(error, CaptureError),
            )
            self._context.stats.capture_failed(owner.name, SCOPE, error)
            self._states[signature].fail(error)
            self.order.remove(index)
            entry, self.order.entries[index] = self.order.entries[index], None
            if entry is not None:
                entry.close()

    # ---- release ---------------------------------------------------------------------------------------------------

    def release(self, index: int) -> None:
        """Mark the entry at this index as free: its backward is done, or its forward failed."""
        self.order.release(index)
        if self._retired:
            self._close_if_idle()

    def abandon(self, index: int) -> None:
        """Mark the entry as free: its backward will never run. Its output may still be referenced."""
        self.abandoned.add(index)
        self.release(index)

    def retire(self) -> None:
        """Serve no more forwards, and destroy the graphs once outstanding backwards are done."""
        self._retired = True
        for entry in self.entries():
            if entry.owner.uncopied is entry.graphs:
                entry.owner.uncopied = None
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self.order.awaiting:
            self._close_all()

    def _close_all(self) -> None:
        for entry in self.entries():
            entry.close()
        self.order.entries = [None] * len(self.order)

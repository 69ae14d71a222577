"""Record the calls of layers during warm-up, and choose the static inputs to capture them with.

Decides which calls a graph may serve. Runs on any device.
"""

from __future__ import annotations

import enum
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graph_cache.adapters.transformer_engine.maker import Precision
from graph_cache.adapters.transformer_engine.order import assign_buffers
from graph_cache.errors import CaptureError
from graph_cache.training.attached import AttachedModule
from graph_cache.training.call import PLAIN, CallKey, Expected, Result, flatten_call, modes_as, unflatten_call

# Argument types that may be baked into a graph: they are compared at each call. Other objects may be mutated later.
CONSTANTS = (*PLAIN, enum.Enum)


@dataclass
class CallRecord:
    """Calls with one key: their count, the precision of the last, and the arguments that were always one tensor."""

    expected: Expected
    precision: Precision
    same_tensors: list[Tensor | None]  # held, so that its address names nothing else
    count: int = 1
    differentiable: tuple[bool, ...] = ()  # for each output tensor, whether it requires grad


class CallLog:
    """Recorded calls of one layer."""

    def __init__(self) -> None:
        self._records: dict[CallKey, CallRecord] = {}

    def record(
        self, key: CallKey, tensors: Sequence[Tensor], args: tuple, kwargs: dict[str, Any], precision: Precision | None
    ) -> CallRecord | None:
        """Record a call. Returns None for a call that can't be captured: in eval mode, while calibrating, or with an
        argument that is neither a tensor nor a constant.
        """
        if precision is None or not key.training or not all(isinstance(value, CONSTANTS) for value in key.values):
            return None
        record = self._records.get(key)
        if record is None:
            same_tensors = [None if tensor.requires_grad else tensor for tensor in tensors]
            record = self._records[key] = CallRecord(Expected(key, args, kwargs), precision, same_tensors)
            return record
        record.count += 1
        record.precision = precision
        record.same_tensors = [
            one if one is not None and one.data_ptr() == tensor.data_ptr() else None
            for one, tensor in zip(record.same_tensors, tensors, strict=True)
        ]
        return record

    def most_common(self) -> tuple[CallKey, CallRecord] | None:
        """Return the most frequent key among calls with a backward."""
        found = [item for item in self._records.items() if any(item[1].differentiable)]
        return max(found, key=lambda item: item[1].count, default=None)


@dataclass
class SharedInput:
    """A static input read by several layers. Reloaded when a call passes another tensor or a modified one."""

    static: Tensor
    _source: Tensor  # held, so that its address names nothing else
    _version: int = field(init=False)

    def __post_init__(self) -> None:
        self._version = self._source._version

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is the one loaded last, unmodified."""
        return tensor.data_ptr() == self._source.data_ptr() and tensor._version == self._version

    def load(self, tensor: Tensor) -> None:
        """Copy `tensor` in. Outstanding graphs would read the new value in their backward."""
        self.static.copy_(tensor)
        self._source, self._version = tensor, tensor._version


@dataclass(frozen=True)
class Sample:
    """The call that a layer's graphs are captured for: its key, its record, and each tensor's SharedInput or None.

    Tensors without a SharedInput are passed to the graph at each replay (`per_call`).
    """

    key: CallKey
    record: CallRecord
    shared: tuple[SharedInput | None, ...]

    @property
    def per_call(self) -> list[int]:
        """Indices of the tensor arguments that are passed at each replay."""
        return [index for index, one in enumerate(self.shared) if one is None]

    def fits(self, args: tuple, kwargs: dict[str, Any], training: bool) -> Sequence[Tensor] | None:
        """Return the tensors of a call that these graphs serve, else None. Gradients must be enabled."""
        tensors = self.record.expected.tensors(args, kwargs, training)
        if tensors is not None:
            return tensors
        key, tensors = flatten_call(args, kwargs, training)
        return tensors if key.types == self.key.types and key == self.key else None

    def loads(self, tensors: Sequence[Tensor], idle: bool) -> bool:
        """Return whether the shared inputs match this call. Reloads them only if no graph is outstanding (`idle`)."""
        others = [
            (one, tensor)
            for one, tensor in zip(self.shared, tensors, strict=True)
            if one is not None and not one.holds(tensor)
        ]
        if others and not idle:
            return False
        for one, tensor in others:
            one.load(tensor)
        return True

    def arguments(self, per_call: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
        """Build the arguments of a call from per-call tensors and the shared inputs."""
        rest = iter(per_call)
        return unflatten_call(self.key, [next(rest) if one is None else one.static for one in self.shared])


def choose_samples(layers: Sequence[CallLog]) -> list[Sample | None]:
    """Choose for each layer the call to capture; None if it had no call that can be captured.

    A tensor without gradient that at least two layers received in all of at least two calls (rotary frequencies, a
    mask) becomes one shared static input instead of one per layer and slot.
    """
    found = [calls.most_common() for calls in layers]
    readers: defaultdict[int, int] = defaultdict(int)
    for one in found:
        for address in (
            {tensor.data_ptr() for tensor in one[1].same_tensors if tensor is not None} if one is not None else ()
        ):
            readers[address] += 1
    shared_inputs: dict[tuple, SharedInput] = {}

    def shared(tensor: Tensor | None, record: CallRecord) -> SharedInput | None:
        if tensor is None or record.count < 2 or readers[tensor.data_ptr()] < 2:
            return None
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in shared_inputs:
            shared_inputs[key] = SharedInput(tensor.detach().clone(memory_format=torch.preserve_format), tensor)
        return shared_inputs[key]

    samples = [
        None if one is None else Sample(*one, tuple(shared(tensor, one[1]) for tensor in one[1].same_tensors))
        for one in found
    ]
    for sample in samples:
        if sample is not None:
            sample.record.same_tensors = []  # held only to keep their addresses unique
    return samples


def static_inputs(samples: Sequence[Sequence[Sample]], order: Sequence[float]) -> list[dict[str, Tensor]]:
    """Allocate the per-call static inputs of each graph by keyword, in Transformer Engine's order: chunk, microbatch,
    layer.

    `samples`: the layers of each chunk. Graphs that are never outstanding together share tensors of equal signature.

    Transformer Engine itself shares static inputs between graphs with equal keywords, shapes and dtypes whose
    microbatches don't overlap. It ignores strides, requires_grad, existing sharing, and the order of keywords. Keywords
    of the position and the buffer restrict it to the sharing chosen here.
    """
    signatures = [[[sample.key.tensors[index] for index in sample.per_call] for sample in chunk] for chunk in samples]
    buffers: dict[int, Tensor] = {}
    found = []
    for (chunk, _, layer), numbers in sorted(assign_buffers(order, signatures).items()):
        for number, signature in zip(numbers, signatures[chunk][layer], strict=True):
            if number not in buffers:
                buffers[number] = _static(signature)
        found.append({f"input{position}_buffer{number}": buffers[number] for position, number in enumerate(numbers)})
    return found


def _static(signature: tuple) -> Tensor:
    """Allocate a tensor of this signature: ones if it requires grad, to avoid division by zero in norms, else zeros."""
    shape, strides, dtype, device, wants_gradient = signature
    if any(stride == 0 < size - 1 for size, stride in zip(shape, strides, strict=True)):
        tensor = torch.empty(shape, dtype=dtype, device=device)  # an expanded tensor can't be copied into
    else:
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return tensor.fill_(1 if wants_gradient else 0).requires_grad_(wants_gradient)


class CapturedLayer(nn.Module):
    """Module that Transformer Engine captures in place of a layer. Called with the per-call tensors by keyword, it
    repeats the recorded call and returns its tensors: the differentiable ones, then the others, padded with None to
    `nondiff_outputs`.

    Transformer Engine 2.20 reuses output-gradient buffers between graphs whose differentiable outputs have equal
    shapes, so these need the same positions among the same number of outputs. The module has the parameters and
    submodules of the captured part, without the layer's own hooks.
    """

    def __init__(self, attached: AttachedModule, call: Callable[..., Any], sample: Sample, nondiff_outputs: int):
        super().__init__()
        self.scope = attached.scope
        self.call = functools.partial(call)  # wrapped, since a module attribute would be registered as a submodule
        self.sample = sample
        self._nondiff_outputs = nondiff_outputs
        wanted = sample.record.differentiable
        self._output_order = sorted(
            range(len(wanted)), key=lambda index: not wanted[index]
        )  # indices of the result's tensors
        self._result: Result | None = None

    def forward(self, **per_call: Tensor) -> tuple[Tensor | None, ...]:
        args, kwargs = self.sample.arguments(list(per_call.values()))
        with modes_as(self.sample.key.autocast, self.sample.key.settings):
            return self.flatten_result(self.call(*args, **kwargs))

    def flatten_result(self, value: Any) -> tuple[Tensor | None, ...]:
        """Return the tensors of the layer's result in the graph's output order."""
        self._result, tensors = Result.of(value)
        wanted = self.sample.record.differentiable
        if len(tensors) != len(wanted):
            raise CaptureError(f"the layer returned {len(tensors)} tensors, but {len(wanted)} in the recorded call")
        return (
            *[tensors[index] for index in self._output_order],
            *[None] * (self._nondiff_outputs - wanted.count(False)),
        )

    def rebuild_result(self, outputs: Sequence[Tensor]) -> Any:
        """Rebuild the layer's result from a replay's outputs. Non-differentiable outputs are detached."""
        if self._result.is_tensor:
            return outputs[0]
        count = sum(self.sample.record.differentiable)
        tensors: list[Any] = [None] * len(self._output_order)
        for position, index in enumerate(self._output_order):
            tensors[index] = outputs[position] if position < count else outputs[position].detach()
        return self._result.build(tensors)

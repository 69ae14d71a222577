"""What layers were called with while they warmed up, and from it what they are captured with: static inputs by slot.

Owns what must be the same for a graph to serve a call. Knows neither graphs nor rounds, and runs on any device.
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
from graph_cache.errors import CaptureError
from graph_cache.training.attached import AttachedModule
from graph_cache.training.call import PLAIN, CallKey, Expected, Result, autocast_as, flatten_call, unflatten_call

# Values that a graph may hold: they are compared at each call. An object of another kind may change under a graph.
CONSTANTS = (*PLAIN, enum.Enum)


@dataclass
class CallRecord:
    """Calls of one key: how many, under which precision the last, and which arguments were the same tensor in all."""

    expected: Expected
    precision: Precision
    same_tensors: list[Tensor | None]  # held, so that its address names nothing else
    count: int = 1
    differentiable: tuple[bool, ...] = ()  # which of the tensors that came out have gradients


class CallLog:
    """The calls of one layer."""

    def __init__(self) -> None:
        self._records: dict[CallKey, CallRecord] = {}

    def record(
        self, key: CallKey, tensors: Sequence[Tensor], args: tuple, kwargs: dict[str, Any], precision: Precision | None
    ) -> CallRecord | None:
        """Remember a call; None for one that no graph may serve: in eval mode, while calibrating, with an argument that
        is neither tensor nor constant.
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
        """The key that was seen most, of those whose calls have a backward."""
        found = [item for item in self._records.items() if any(item[1].differentiable)]
        return max(found, key=lambda item: item[1].count, default=None)


@dataclass
class SharedInput:
    """A static input that several layers read, loaded when a call brings another tensor or a changed one."""

    static: Tensor
    _source: Tensor  # held, so that its address names nothing else
    _version: int = field(init=False)

    def __post_init__(self) -> None:
        self._version = self._source._version

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is the tensor that was loaded last, unchanged."""
        return tensor.data_ptr() == self._source.data_ptr() and tensor._version == self._version

    def load(self, tensor: Tensor) -> None:
        """Hold this from now on; graphs whose backward is to come would read it too."""
        self.static.copy_(tensor)
        self._source, self._version = tensor, tensor._version


@dataclass(frozen=True)
class Sample:
    """What a layer's graphs are captured for: a key, a precision, and for each tensor what all layers share, or None.

    The tensors that are not shared, the moving ones, are what a graph is given at each replay.
    """

    key: CallKey
    record: CallRecord
    shared: tuple[SharedInput | None, ...]

    @property
    def per_call(self) -> list[int]:
        """Which tensor arguments a replay brings."""
        return [index for index, one in enumerate(self.shared) if one is None]

    def fits(self, args: tuple, kwargs: dict[str, Any], training: bool) -> Sequence[Tensor] | None:
        """The tensors of a call that these graphs serve; None for another. The caller has gradients enabled."""
        tensors = self.record.expected.tensors(args, kwargs, training)
        if tensors is not None:
            return tensors
        key, tensors = flatten_call(args, kwargs, training)
        return tensors if key.types == self.key.types and key == self.key else None

    def loads(self, tensors: Sequence[Tensor], idle: bool) -> bool:
        """Whether the shared inputs are those of this call; others are loaded if no graph is outstanding (`idle`)."""
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
        """The arguments of a call with these moving tensors and the shared ones."""
        rest = iter(per_call)
        return unflatten_call(self.key, [next(rest) if one is None else one.static for one in self.shared])


def choose_samples(layers: Sequence[CallLog]) -> list[Sample | None]:
    """For each layer what to capture it for; None for one without a call that a graph may serve.

    A tensor without gradient that at least two layers were given, in every call of at least two, is shared by them
    (rotary frequencies, a mask): one static input instead of one for each layer and slot.
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
            sample.record.same_tensors = []  # it held them for their addresses
    return samples


def input_names(chunk: int, layer: int, slot: int, sample: Sample) -> list[str]:
    """Keywords for the moving tensors of a layer's graphs in one slot.

    Transformer Engine gives two graphs the same static inputs if their keywords, shapes and dtypes are the same and the
    lives of their microbatches don't overlap. It looks at neither strides nor whether a gradient is wanted, nor at who
    shares already; with a keyword for each slot it can only choose what was chosen here.
    """
    return [f"chunk{chunk}_layer{layer}_slot{slot}_{index}" for index in sample.per_call]


def static_inputs(
    samples: Sequence[Sequence[Sample]], slots: Sequence[tuple[int, int, int]]
) -> list[dict[str, Tensor]]:
    """The moving static inputs of each graph by keyword, in Transformer Engine's order: chunk, microbatch, layer.

    `samples` lists the layers of each chunk; `slots` is (chunk, microbatch, slot) of each forward: graphs of the same
    layer and slot have the same tensors.
    """
    inputs_by_slot: dict[tuple[int, int, int], dict[str, Tensor]] = {}
    found = []
    for chunk, _, slot in sorted(slots):
        for layer, sample in enumerate(samples[chunk]):
            key = (chunk, layer, slot)
            if key not in inputs_by_slot:
                inputs_by_slot[key] = {
                    name: _static(sample.key.tensors[index])
                    for name, index in zip(input_names(*key, sample), sample.per_call, strict=True)
                }
            found.append(dict(inputs_by_slot[key]))
    return found


def _static(signature: tuple) -> Tensor:
    """A tensor of this signature: ones where a gradient is wanted, which no norm divides by zero, else zeros."""
    shape, strides, dtype, device, wants_gradient = signature
    if any(stride == 0 < size - 1 for size, stride in zip(shape, strides, strict=True)):
        tensor = torch.empty(shape, dtype=dtype, device=device)  # an expanded tensor can't be copied into
    else:
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return tensor.fill_(1 if wants_gradient else 0).requires_grad_(wants_gradient)


class CapturedLayer(nn.Module):
    """What Transformer Engine is given in a layer's place: called with the moving tensors by keyword, it makes the call
    that was recorded, and returns its tensors: those with a gradient, `without` of no gradient, None where there are
    fewer.

    By the shapes of the first Transformer Engine 2.20 takes one graph's gradients of outputs for another's, which must
    then be at the same places among as many outputs. Has the parameters and submodules of the part of the layer that
    is captured, and none of its own hooks.
    """

    def __init__(self, attached: AttachedModule, call: Callable[..., Any], sample: Sample, nondiff_outputs: int):
        super().__init__()
        self.scope = attached.scope
        self._call = functools.partial(call)  # a module by itself would become a part of this one
        self._sample = sample
        self._nondiff_outputs = nondiff_outputs
        wanted = sample.record.differentiable
        self._output_order = sorted(
            range(len(wanted)), key=lambda index: not wanted[index]
        )  # of what is returned, in it
        self._result: Result | None = None

    def forward(self, **per_call: Tensor) -> tuple[Tensor | None, ...]:
        args, kwargs = self._sample.arguments(list(per_call.values()))
        with autocast_as(self._sample.key):
            return self.flatten_result(self._call(*args, **kwargs))

    def flatten_result(self, value: Any) -> tuple[Tensor | None, ...]:
        """The tensors of what the layer returned, in the order of a graph."""
        self._result, tensors = Result.of(value)
        wanted = self._sample.record.differentiable
        if len(tensors) != len(wanted):
            raise CaptureError(f"the layer returned {len(tensors)} tensors, and {len(wanted)} in the recorded call")
        return (
            *[tensors[index] for index in self._output_order],
            *[None] * (self._nondiff_outputs - wanted.count(False)),
        )

    def rebuild_result(self, outputs: Sequence[Tensor]) -> Any:
        """What the layer would have returned, from a replay's outputs, without history where it gives none."""
        if self._result.is_tensor:
            return outputs[0]
        count = sum(self._sample.record.differentiable)
        tensors: list[Any] = [None] * len(self._output_order)
        for position, index in enumerate(self._output_order):
            tensors[index] = outputs[position] if position < count else outputs[position].detach()
        return self._result.build(tensors)

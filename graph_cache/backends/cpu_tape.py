"""Records the ATen calls of one run: which operations, on which memory, living from when to when.

Owns the recording and the refusals. A CUDA graph can hold no operation whose shape or control flow depends on data;
the CPU tape refuses the same ones, so that what is captured on a laptop can be captured on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from graph_cache.errors import CaptureRefused

aten = torch.ops.aten
MOVES_STORAGE = {"aten::resize_", "aten::set_", "aten::resize_as_"}
BYTE_MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor inside memory that the recorded run allocated: which buffer, and how it is seen there."""

    buffer: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements of dtype


@dataclass(slots=True)
class Op:
    """One call: its function, its arguments with Refs in place of intermediates, and what it returned."""

    func: torch._ops.OpOverload
    args: tuple
    kwargs: dict[str, Any]
    outs: list[Ref | None]  # None: the output aliases memory that the run did not allocate
    fresh: bool  # True: the outputs are new memory, to be placed in the arena


@dataclass(slots=True)
class Buffer:
    """One allocation of the recorded run: its size in bytes and the first and last operation that touch it."""

    nbytes: int
    first: int
    last: int


@dataclass
class Tape:
    """A recorded run. `external` keeps alive every tensor that it reads or writes but did not allocate."""

    ops: list[Op] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    external: list[torch.Tensor] = field(default_factory=list)


class TapeRecorder(TorchDispatchMode):
    """Runs operations and writes them down. Use as a context manager; then read `tape`.

    Sees what reaches the dispatcher: `numpy()` and `tolist()` read a CPU tensor behind its back and can't be refused.
    A mode that could see them would also switch off fast paths of torch.nn, so that the recorded run would round
    otherwise than eager does.
    """

    def __init__(self, generators: Sequence[torch.Generator] = ()):
        super().__init__()
        self.tape = Tape()
        # By their C++ object: the dispatcher wraps a generator anew for every call.
        self._generators = {generator._cdata for generator in generators}
        self._buffer_of: dict[int, int] = {}
        # A weak reference to each storage keeps its address from being used again, so an address names one buffer.
        self._pinned: list[StorageWeakRef] = []
        self._external_seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._can_decompose():
            # Composite operations arrive whole under inference mode: take them apart, so that what they allocate
            # inside is placed in the arena too.
            with self:
                return func.decompose(*args, **kwargs)
        self._refuse(func, args, kwargs)
        inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        fresh = [tensor.untyped_storage()._cdata not in known for tensor in results]
        mutates = func._schema.is_mutable
        if results and not any(fresh) and not mutates:
            self._remember_external(inputs)
            return result  # a view: its geometry is in the Refs of whoever uses it
        self._record(func, args, kwargs, inputs, results, any(fresh) and not mutates)
        return result

    def _record(self, func, args, kwargs, inputs, results, fresh: bool) -> None:
        index = len(self.tape.ops)
        for tensor in results:
            storage = tensor.untyped_storage()
            if fresh and storage._cdata not in self._buffer_of:
                self._buffer_of[storage._cdata] = len(self.tape.buffers)
                self._pinned.append(StorageWeakRef(storage))
                self.tape.buffers.append(Buffer(storage.nbytes(), index, index))
        self._remember_external(inputs)
        to_ref = lambda leaf: self._ref(leaf) if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
        op = Op(func, tree_map(to_ref, args), tree_map(to_ref, kwargs),
                [ref if isinstance(ref := self._ref(tensor), Ref) else None for tensor in results], fresh)
        for tensor in (*inputs, *results):
            buffer = self._buffer_of.get(tensor.untyped_storage()._cdata)
            if buffer is not None:
                self.tape.buffers[buffer].last = index
        self.tape.ops.append(op)

    def _ref(self, tensor: torch.Tensor) -> Ref | torch.Tensor:
        buffer = self._buffer_of.get(tensor.untyped_storage()._cdata)
        if buffer is None:
            return tensor
        return Ref(buffer, tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), tensor.storage_offset())

    def _remember_external(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            if address not in self._buffer_of and address not in self._external_seen:
                self._external_seen.add(address)
                self.tape.external.append(tensor)

    def _refuse(self, func, args, kwargs) -> None:
        name = func._schema.name
        if name == "aten::_local_scalar_dense" or torch.Tag.data_dependent_output in func.tags:
            raise CaptureRefused(f"{func}: the host reads a tensor's value here, and a replay would not "
                                 "read it again. Keep it in a tensor, or make it a keyword of the graph's key")
        if torch.Tag.dynamic_output_shape in func.tags:
            raise CaptureRefused(f"{func}: the shape of its output depends on data, and a graph's shapes are fixed")
        if name in MOVES_STORAGE:
            raise CaptureRefused(f"{func}: it moves storage, and a graph's addresses are fixed")
        if name in ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"):
            if any(index is not None and index.dtype in BYTE_MASKS for index in args[1]):
                raise CaptureRefused(f"{func} with a boolean or uint8 mask: how many elements it selects depends on "
                                     "data. Use torch.where or integer indices")
        devices = {leaf.device.type for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)}
        if devices - {"cpu", "meta"}:
            raise CaptureRefused(f"{func}: tensors on {', '.join(sorted(devices))} inside a CPU graph")
        if torch.Tag.nondeterministic_seeded in func.tags and not self._draw_is_registered(func, args, kwargs):
            raise CaptureRefused(f"{func} draws from a generator that is not registered with this graph: "
                                 "pass it in `generators`, so that replays draw fresh numbers")

    def _draw_is_registered(self, func, args, kwargs) -> bool:
        """Deterministic uses of random-capable calls (dropout off) pass; true draws need a registered generator."""
        if func._schema.name == "aten::native_dropout" and len(args) > 2 and not args[2]:
            return True
        if "dropout_p" in {argument.name for argument in func._schema.arguments}:
            position = [argument.name for argument in func._schema.arguments].index("dropout_p")
            rate = kwargs.get("dropout_p", args[position] if len(args) > position else 0.0)
            if rate == 0.0:
                return True
        generator = kwargs.get("generator")
        return (torch.default_generator if generator is None else generator)._cdata in self._generators

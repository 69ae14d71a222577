"""Record the ATen calls of one run: operations, the memory that they use, and its lifetimes.

A CUDA graph cannot contain an operation whose shape or control flow depends on data. The CPU tape refuses the same
operations, so that a capture that works on a laptop also works on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from graph_cache.backends.cpu_call_site import host_read_refusal
from graph_cache.backends.cpu_generators import recorded_states
from graph_cache.backends.cpu_out import out_overload_matches
from graph_cache.backends.cpu_seeds import marked
from graph_cache.errors import CaptureRefused
from graph_cache.guards.audit import higher_order_refusal
from graph_cache.guards.call_values import OTHERS, map_leaves, tensors_in
from graph_cache.guards.composites import FUSED, DecomposingMode, is_composite
from graph_cache.guards.namespaces import state_of
from graph_cache.utils.profiling import unprofiled

aten = torch.ops.aten
MOVES_STORAGE = {"aten::resize_", "aten::set_", "aten::resize_as_"}
UNDEFINED_CONTENTS = {
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::new_empty_strided",
    "aten::empty_permuted",
}
OVERWRITING = {"aten::copy_", "aten::fill_", "aten::zero_"}  # their first argument
BYTE_MASKS = (torch.bool, torch.uint8)
INDEXING = {
    "aten::index",
    "aten::_unsafe_index",
    "aten::index_put_",
    "aten::index_put",
    "aten::_unsafe_index_put",
    "aten::_index_put_impl_",
}
# Operations whose kernels read a tensor on the host, to know an output's shape, and the index of that argument.
HOST_READS = {
    "aten::_pack_padded_sequence": 1,
    "aten::_pad_packed_sequence": 1,
}
CPU = frozenset(("cpu",))
MAX_MATCHES = 1 << 16
_ITEM = "aten::_local_scalar_dense"
COLLECTIVES = ("c10d::", "_c10d_functional::")


@dataclass(frozen=True, slots=True)
class Facts:
    """What the recorder asks of an operation at each call; PyTorch computes it anew each time."""

    name: str
    is_composite: bool
    is_seeded: bool
    is_inplace_view: bool
    is_mutable: bool
    is_unbounded: bool  # its results or their shapes depend on data
    is_plain: bool  # it may be refused for its devices only
    returns: int

    @staticmethod
    @functools.cache
    def of(func: torch._ops.OpOverload) -> Facts:
        """Return the facts of an operation."""
        tags, schema = func.tags, func._schema
        name, special = schema.name, (HOST_READS, FUSED, MOVES_STORAGE, INDEXING)
        is_seeded = torch.Tag.nondeterministic_seeded in tags
        is_unbounded = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        is_special = any(name in names for names in special) or name.startswith(COLLECTIVES) or name == _ITEM
        return Facts(
            name,
            is_composite(func, CPU),
            is_seeded,
            torch.Tag.inplace_view in tags,
            schema.is_mutable,
            is_unbounded,
            not (is_seeded or is_unbounded or is_special),
            len(schema.returns),
        )


@dataclass(slots=True, unsafe_hash=True)  # not frozen: several times as fast to make
class Ref:
    """A tensor in memory that the recorded run allocated: the buffer and its geometry."""

    buffer: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements of dtype
    conjugated: bool = False
    negated: bool = False


@dataclass(slots=True)
class Op:
    """One call: its function, its arguments with Refs in place of intermediates, and the new memory it returned.

    `outs` has an entry for each of the schema's returns: a Ref for a tensor in new memory, a list for a list of
    tensors, None for anything else (numbers, tensors that alias an input).
    """

    func: torch._ops.OpOverload
    args: tuple
    kwargs: dict[str, Any]
    outs: tuple[Any, ...]
    fresh: bool  # some output is new memory, to be placed in the arena
    in_place: bool  # an out= overload exists for all outputs, saves a copy, and was verified to match
    grad: bool  # the gradient mode it ran under, which some kernels query


@dataclass(slots=True)
class Buffer:
    """One allocation of the recorded run: its size in bytes and the first and last operation that touch it."""

    nbytes: int
    first: int
    last: int


@dataclass
class Tape:
    """A recorded run. Its operations keep every tensor alive that they use and the run did not allocate."""

    ops: list[Op] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    kept: dict[int, torch.UntypedStorage] = field(default_factory=dict)  # buffers that outlive the run, left in place

    def read_outs(self, index: int) -> tuple[Any, ...]:
        """Return the outs of operation `index` with None for each tensor that nothing reads afterwards."""

        def read(out: Any) -> Any:
            is_read = not isinstance(out, Ref) or out.buffer in self.kept or self.buffers[out.buffer].last > index
            return out if is_read else None

        return map_leaves(read, self.ops[index].outs)

    def reads(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether a call may read memory of these tensors, from outside, that no call has overwritten before.

        Only a read of exactly what was written is known to be of the run.
        """
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        written: set[Hashable] = set()
        for op in self.ops:
            targets, read = _targets_and_sources(op)
            for tensor in read:
                place = tensor.untyped_storage()._cdata
                if place in storages and (place, _geometry(tensor)) not in written:
                    return True
            written |= {(target.untyped_storage()._cdata, _geometry(target)) for target in targets}
        return False


class TapeRecorder(DecomposingMode):
    """Dispatch mode that runs operations and records them. Use as a context manager, then read `tape`.

    Sees only what reaches the dispatcher; cpu_host_reads.py refuses reads that bypass it.
    """

    def __init__(
        self,
        generators: Sequence[Any] = (),  # of torch.Generator
        can_undo: bool = False,
        check: Callable[[], None] = lambda: None,
        matches: dict[Hashable, bool] | None = None,
    ):
        super().__init__()
        self._check = check  # before each operation: may raise
        # Whether out= overloads match, by call: to be given where replays are compared with eager runs afterwards.
        self._matches = matches
        self.tape = Tape()
        # With `can_undo`, by address: outside memory that the run wrote to, and its former contents.
        self._overwritten: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] | None = (
            {} if can_undo else None
        )
        # By C++ object: the dispatcher wraps a generator in a new Python object for every call.
        self._generators = {generator._cdata: generator for generator in generators}
        self._generator_states = self._read_generators()  # after the last recorded operation
        self._seeded = False  # the run has set the state of one of them
        self._refusal: CaptureRefused | None = None
        self._buffer_of: dict[int, int] = {}
        self._literals: set[int] = set()  # storages of tensors made from Python values
        self._constant_storages: set[int] = set()  # storages computed without outside tensors or randomness
        # Weak references keep storage addresses from being reused, so an address identifies one buffer.
        self._storage_refs: list[StorageWeakRef] = []
        self._aliases: dict[tuple, torch.Tensor] = {}

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._check()
        kwargs = kwargs or {}
        with unprofiled():  # a profiler would be called for each function here, which takes longer than the rest
            if isinstance(func, HigherOrderOperator):
                self._refusal = CaptureRefused(higher_order_refusal([func.name()]))
                raise self._refusal
            if self.rewrites:
                func, args, kwargs = self.rewritten(func, args, kwargs)
            inputs = tensors_in(args, kwargs)
            for one in self.followers:
                one.before(func, inputs, args, kwargs)
            if any([kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types]):
                return NotImplemented  # a wrapper subclass: its operations on inner tensors are dispatched here next
            facts = Facts.of(func)
        if facts.is_composite:
            # Under inference mode, composite operations are not decomposed. Decompose them, so that their inner
            # allocations are placed in the arena too. Use the C++ kernel that eager runs: the Python
            # decompositions for compilers round differently.
            return self.decompose(func, args, kwargs)
        with unprofiled():
            lifted = self._prepare(func, facts, args, kwargs, inputs)
        if lifted:
            # A tensor made from Python values: the callable may write into it, so each replay makes a new copy.
            func = aten.clone.default
            facts = Facts.of(func)
        input_storages = {one.untyped_storage()._cdata for one in inputs}
        result = self.run(func, args, kwargs)
        with unprofiled():
            self._record_result(func, facts, args, kwargs, inputs, result, input_storages, lifted)
        return result

    def _prepare(
        self, func: OpOverload, facts: Facts, args: tuple, kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> bool:
        """Refuse a call that can't be recorded, and save what it overwrites. Return whether it lifts a new tensor."""
        for one in self.followers:
            one.writes(func, args, kwargs)
        try:
            self._refuse(func, facts, args, kwargs, inputs)
        except CaptureRefused as refusal:
            self._refusal = refusal
            raise
        if self._overwritten is not None:
            self._save_overwritten(self._overwritten, func, args, kwargs)
        if facts.is_seeded:
            self.check_generators()
        return func is aten.lift_fresh.default

    def _record_result(
        self,
        func: OpOverload,
        facts: Facts,
        args: tuple,
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        result: Any,
        input_storages: set[int],
        lifted: bool,
    ) -> None:
        results = tensors_in(result)
        for one in self.followers:
            one.after(inputs, result)
        if any([tensor._is_zerotensor() for tensor in (*inputs, *results)]):  # noqa: SLF001
            self._refusal = CaptureRefused(
                f"{func} in forward-mode AD (torch.func.jvp, torch.autograd.forward_ad), whose zeros have no memory"
            )
            raise self._refusal
        if facts.is_seeded:
            self._generator_states = self._read_generators()
        if lifted:
            self._literals.add(result.untyped_storage()._cdata)
        if facts.is_inplace_view:
            return  # changes only the geometry, which is in the Refs of later operations
        result_storages = [one.untyped_storage()._cdata for one in results]
        is_fresh = not input_storages.issuperset(result_storages)
        if lifted or (input_storages <= self._constant_storages and not facts.is_seeded):
            self._constant_storages.update(input_storages, result_storages)
        elif facts.is_mutable:
            self._constant_storages.difference_update(input_storages, result_storages)
        # Else a view: its geometry is in the Refs of later operations.
        if is_fresh or facts.is_mutable or not results:
            self._add_buffers(results, result_storages, input_storages)
            self._record(func, facts, args, kwargs, result, input_storages, is_fresh)
            for storage in (*[one.untyped_storage() for one in inputs], *[one.untyped_storage() for one in results]):
                if (buffer := self._buffer_of.get(storage._cdata)) is not None:
                    entry, index = self.tape.buffers[buffer], len(self.tape.ops) - 1
                    entry.nbytes, entry.last = max(entry.nbytes, storage.nbytes()), index  # out= may have resized it

    def _save_overwritten(
        self,
        saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]],
        func,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> None:
        """Save the contents of outside memory that the call is about to overwrite."""
        names = _written_arguments(func)
        if not names:
            return
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for tensor in tensors_in([given.get(name) for name in names]):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._buffer_of and storage._cdata not in saved:
                saved[storage._cdata] = storage, storage.clone()

    def _read_generators(self) -> list[bytes]:
        return list(map(state_of, self._generators.values()))

    @contextmanager
    def observing_generators(self) -> Iterator[None]:
        """Record within the block that code saves a generator's state and restores it, and note any other seed."""
        with marked(self._generators.values()), recorded_states(self._generators, self._note_seed):
            self._generator_states = self._read_generators()
            yield

    def _note_seed(self) -> None:
        self._seeded = True

    def check_generators(self) -> None:
        """Raise CaptureRefused if the state of a generator was set since the last operation that used it."""
        if self._seeded or self._generator_states != self._read_generators():
            raise CaptureRefused(
                "the state of a random generator is set (manual_seed, set_state), which a replay would not repeat: "
                "seed before the call"
            )

    def undo(self) -> None:
        """Restore outside memory that the run overwrote."""
        for storage, before in (self._overwritten or {}).values():
            storage.copy_(before)

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor holds the same values in every run."""
        return tensor.untyped_storage()._cdata in self._constant_storages

    def may_read(self, tensor: torch.Tensor) -> bool:
        """Return whether the host may read the tensor's values, which makes them a part of the capture."""
        if self.is_constant(tensor):
            return True
        self._refusal = CaptureRefused("the host reads a tensor's values, and a replay would not read them again")
        return False

    def check_refusals(self) -> None:
        """Raise CaptureRefused if an operation or a read was refused, and the code caught the exception."""
        if self._refusal is not None:
            raise self._refusal

    def touched_memory(self) -> bool:
        """Return whether a recorded call read or wrote a tensor. An optimizer's profiler marks are calls, too."""
        return bool(self.tape.buffers or self._aliases)

    def keep_live_buffers(self) -> None:
        """Keep memory that is still referenced after the run in place, outside the arena.

        Call after the run.
        """
        for buffer, reference in enumerate(self._storage_refs):
            if not reference.expired():
                self.tape.kept[buffer] = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)

    def _add_buffers(
        self, results: Sequence[torch.Tensor], result_storages: Sequence[int], input_storages: set[int]
    ) -> None:
        """Add a buffer for each storage that the next call of the tape makes."""
        index = len(self.tape.ops)
        for tensor, address in zip(results, result_storages, strict=True):
            if address not in input_storages and address not in self._buffer_of:
                self._buffer_of[address] = len(self.tape.buffers)
                self._storage_refs.append(StorageWeakRef(tensor.untyped_storage()))
                self.tape.buffers.append(Buffer(0, index, index))

    def _record(
        self,
        func: OpOverload,
        facts: Facts,
        args: tuple,
        kwargs: dict[str, Any],
        result: Any,
        input_storages: set[int],
        fresh: bool,
    ) -> None:
        """Add a call to the tape. `fresh`: some result is in other storage than the inputs."""
        outs = [self._new_refs(one, input_storages) for one in (result if facts.returns > 1 else (result,))]
        in_place = (
            facts.name not in UNDEFINED_CONTENTS
            and all([type(out) is Ref for out in outs])
            and self._out_overload_matches(func, args, kwargs, result)
        )
        args, kwargs = self._refs(args), self._refs(kwargs) if kwargs else kwargs
        self.tape.ops.append(Op(func, args, kwargs, tuple(outs), fresh, in_place, torch.is_grad_enabled()))

    def _refs(self, value: Any) -> Any:
        """Return a copy of arguments with `_ref` of each tensor in its place."""
        if type(value) in OTHERS:
            return value
        if isinstance(value, torch.Tensor):
            return self._ref(value)
        if isinstance(value, tuple):
            return tuple([self._refs(one) for one in value])
        if isinstance(value, list):
            return [self._refs(one) for one in value]
        return {name: self._refs(one) for name, one in value.items()} if isinstance(value, dict) else value

    def _new_refs(self, value: Any, input_storages: set[int]) -> Any:
        """Return Refs in the place of tensors in new memory, and None in the place of any other result."""
        if isinstance(value, torch.Tensor):
            return None if value.untyped_storage()._cdata in input_storages else self._ref(value)
        if isinstance(value, (tuple, list)):
            return type(value)([self._new_refs(one, input_storages) for one in value])
        return None

    def _out_overload_matches(self, func, args: tuple, kwargs: dict[str, Any], result: Any) -> bool:
        if self._matches is None:
            return out_overload_matches(func, args, kwargs, result)
        key = func, _geometry(args), _geometry(kwargs)
        found = self._matches.get(key)
        if found is None:
            if len(self._matches) >= MAX_MATCHES:
                self._matches.clear()
            found = self._matches[key] = out_overload_matches(func, args, kwargs, result)
        return found

    def _ref(self, tensor: torch.Tensor) -> Ref | torch.Tensor:
        """Return a Ref for a tensor in recorded memory, or an alias of a tensor in outside memory.

        An alias, because the callable may later change its own tensor object (`t_`, `.data = …`) while a graph stays at
        the addresses that it was captured with, and because the interpreter accepts no constants that require grad.
        """
        storage = tensor.untyped_storage()
        geometry = (
            tensor.dtype,
            tuple(tensor.size()),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        buffer = self._buffer_of.get(storage._cdata)
        if buffer is not None:
            return Ref(buffer, *geometry)
        if (storage._cdata, geometry) not in self._aliases:
            self._aliases[storage._cdata, geometry] = aten.alias.default(tensor)
        return self._aliases[storage._cdata, geometry]

    def _refuse(self, func, facts: Facts, args, kwargs, inputs: list[torch.Tensor]) -> None:
        if not all([tensor.is_cpu or tensor.is_meta for tensor in inputs]):
            devices = sorted({tensor.device.type for tensor in inputs})
            raise CaptureRefused(f"{func}: tensors on {', '.join(devices)} in a CPU graph: keep all tensors on the CPU")
        if facts.is_plain:
            return
        name = facts.name
        index = HOST_READS.get(name)
        if index is not None and not self.is_constant(args[index]):
            raise CaptureRefused(host_read_refusal(str(func)))
        if name == _ITEM or (facts.is_unbounded and torch.Tag.data_dependent_output in func.tags):
            raise CaptureRefused(host_read_refusal(str(func)))
        if facts.is_unbounded and torch.Tag.dynamic_output_shape in func.tags and name not in INDEXING:
            raise CaptureRefused(f"{func}: its output shape depends on data, and a graph's shapes are fixed")
        if name.startswith(COLLECTIVES) and not _is_single_rank_all_reduce(name, args):
            raise CaptureRefused(
                f"{func}: a collective between processes, which a CPU graph cannot replay. Leave it out of the capture"
            )
        if name in FUSED and self.is_in_autocast():
            raise CaptureRefused(f"{func}: a fused attention in an autocast region, which casts inside of it")
        if name in MOVES_STORAGE:
            raise CaptureRefused(f"{func}: it moves storage, and a graph's addresses are fixed")
        if name in INDEXING:
            masked = any(index is not None and index.dtype in BYTE_MASKS for index in args[1])
            if masked and not self._is_masked_fill(name, *args):
                raise CaptureRefused(
                    f"{func} with a boolean or uint8 mask: how many elements it selects depends on "
                    "data. Use torch.where or integer indices"
                )
        if facts.is_seeded and not self._uses_registered_generator(func, args, kwargs):
            raise CaptureRefused(
                f"{func} samples from a generator that is not registered with this graph: "
                "pass it in `generators`, so that each replay samples new numbers"
            )

    def _is_masked_fill(
        self,
        name: str,
        tensor: torch.Tensor,
        indices: Sequence[torch.Tensor | None],
        value: Any = None,
        accumulate: bool = False,
    ) -> bool:
        """Return whether this is `x[mask] = number`, which torch runs as masked_fill_ on every device."""
        return (
            "index_put" in name
            and not accumulate
            and sum(index is not None for index in indices) == 1
            and value.numel() == 1
            and value.untyped_storage()._cdata in self._literals
        )

    def _uses_registered_generator(self, func, args, kwargs) -> bool:
        """Return True for a registered generator, and for calls that are deterministic here (dropout off)."""
        arguments = func._schema.arguments
        given = {argument.name: argument.default_value for argument in arguments}
        given |= dict(zip(given, args, strict=False)) | kwargs
        if given.get("train", True) is False or given.get("training", True) is False or given.get("dropout_p") == 0.0:
            return True
        generator: Any = given.get("generator")
        if generator is None:
            generator = torch.default_generator
        return generator._cdata in self._generators


def _geometry(value: Any) -> Hashable:
    """Return arguments of a call with the geometry of tensors in their place."""
    if isinstance(value, (tuple, list)):
        return tuple([_geometry(one) for one in value])
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.storage_offset(), value.is_conj(), value.is_neg()
    if isinstance(value, dict):
        return tuple([(name, _geometry(one)) for name, one in value.items()])
    return type(value), value  # 1, 1.0 and True are equal


@functools.cache
def _written_arguments(func: torch._ops.OpOverload) -> list[str]:
    """Return the arguments that an operation writes; batch norm's schema omits its running statistics."""
    names = [
        argument.name for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write
    ]
    return names + ["running_mean", "running_var"] if func is aten.native_batch_norm.default else names


def _targets_and_sources(op: Op) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors in outside memory of which a call overwrites every element, and the others."""
    if op.func._schema.name in OVERWRITING:
        return tensors_in(op.args[:1]), tensors_in(op.args[1:], op.kwargs)
    outs = {argument.name for argument in op.func._schema.arguments if argument.is_out}
    targets = [value for name, value in op.kwargs.items() if name in outs]
    return tensors_in(targets), tensors_in(op.args, [value for name, value in op.kwargs.items() if name not in outs])


def _is_single_rank_all_reduce(name: str, args: tuple) -> bool:
    """Return whether a collective is an in-place all-reduce over a single process."""
    return name == "c10d::allreduce_" and torch.distributed.ProcessGroup.unbox(args[1]).size() == 1

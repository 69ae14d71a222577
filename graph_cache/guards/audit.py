"""Audit of a run: the memory from before the run that its operations read and write.

A graph reads memory by address. Whatever a run uses besides its declared tensors must be found, kept alive and watched.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode

from graph_cache.guards.call_values import tensors_in
from graph_cache.guards.composites import DecomposingMode, Follower, has_composite_kernel, is_composite
from graph_cache.utils.profiling import unprofiled

_LIFT = torch.ops.aten.lift_fresh.default
# Operations that write running statistics in training without declaring it in their schema.
_BATCH_NORMS = frozenset(
    (
        "aten::batch_norm",
        "aten::_batch_norm_impl_index",
        "aten::native_batch_norm",
        "aten::cudnn_batch_norm",
        "aten::miopen_batch_norm",
        "aten::instance_norm",
    )
)


class StorageAudit(DecomposingMode):
    """Dispatch mode that observes the operations of one or more runs.

    Args:
        saves: Save memory from before the run when it is first written, for `undo`.
        saves_host: Save host memory in this way.

    Attributes:
        outside: Storages that existed before the run and were read or written, by address of the storage object.
        written: Addresses of those that were written.
        leaves: Leaf tensors from before the run that require a gradient, by id.
        computed: Of `outside`, those with autograd history: results from before the run.
        dtypes: The dtypes in which each of `outside` was used.
        host: Of `outside`, those in host memory, except new tensors of `torch.tensor` and the like.
    """

    def __init__(self, saves: bool = False, saves_host: bool = False):
        super().__init__()
        self.outside: dict[int, torch.UntypedStorage] = {}
        self.written: set[int] = set()
        self.leaves: dict[int, Tensor] = {}
        self.computed: set[int] = set()
        self.dtypes: dict[int, set[torch.dtype]] = {}
        self.host: set[int] = set()
        self._uses_sparse_on_host = False
        self._higher_order: set[str] = set()
        self._saves, self._saves_host = saves, saves_host
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        # Weak references keep the addresses of storages made in the run from being reused.
        self._made: dict[int, StorageWeakRef] = {}
        self._views: dict[int, weakref.ref[Tensor]] = {}  # of storages from outside, as the run returned them

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # False would run compiled functions uncompiled, which rounds differently

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # its operations are not observed
            self._higher_order.add(func.name())
            return func(*args, **kwargs)
        with unprofiled():
            if self.rewrites:
                func, args, kwargs = self.rewritten(func, args, kwargs)
            observers: list[Follower] = [self, *self.followers]
            inputs = tensors_in(args, kwargs)
            for one in observers:
                one.before(func, inputs, args, kwargs)
            if any(map(_is_wrapper, types)):
                return NotImplemented  # a wrapper subclass: its operations on inner tensors are dispatched here next
            facts = _facts_of(func)
            decomposes = facts.may_be_composite and is_composite(func, frozenset([one.device.type for one in inputs]))
            if facts.written and not decomposes:
                for one in observers:
                    one.writes(func, args, kwargs)
        if decomposes:
            return self.decompose(func, args, kwargs)
        result = self.run(func, args, kwargs)
        with unprofiled():
            for one in observers:
                one.after(inputs, result)
        return result

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe the operations of the block: as a follower of the innermost mode if it is one of this package's."""
        mode = _get_current_dispatch_mode()
        if not isinstance(mode, DecomposingMode):
            with self:
                yield
            return
        mode.followers.append(self)
        try:
            yield
        finally:
            mode.followers.remove(self)

    def before(self, func: torch._ops.OpOverload, inputs: list[Tensor], args: tuple, kwargs: dict[str, Any]) -> None:
        for tensor in inputs:
            self._observe(tensor)
        if _facts_of(func).takes_storages:  # such as `set_`, by which cuDNN's layers take all weights at once
            for leaf in (*args, *kwargs.values()):
                if isinstance(leaf, torch.UntypedStorage):
                    self._observe_storage(leaf)
        if func is _LIFT:  # torch.tensor and torch.from_numpy: their values are Python state, which is watched
            self.host.discard(_address(inputs[0]))

    def writes(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
        for tensor in written_tensors(func, args, kwargs):
            self._observe_write(tensor)

    def after(self, inputs: list[Tensor], result: Any) -> None:
        given = set(map(id, inputs))  # operations in place, and those with `out`, return an argument
        for tensor in tensors_in(result):
            storage = storage_of(tensor)
            if storage is None or id(tensor) in given:
                continue
            address = storage._cdata
            if address in self._made:
                continue
            if address in self.outside:
                self._views[id(tensor)] = weakref.ref(tensor)
            else:
                self._made[address] = StorageWeakRef(storage)

    def _is_view_from_the_run(self, tensor: Tensor) -> bool:
        """Whether an operation of the run made this view. Views of leaves look like leaves in backward operations."""
        view = self._views.get(id(tensor))
        return view is not None and view() is tensor

    def _observe(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is not None:
            if storage._cdata in self._made:
                return
            if self._observe_storage(storage) and tensor.grad_fn is not None:
                self.computed.add(storage._cdata)
            self.dtypes[storage._cdata].add(tensor.dtype)
        elif tensor.device.type == "cpu" and tensor.layout is not torch.strided:
            self._uses_sparse_on_host = True
        if tensor.is_leaf and tensor.requires_grad and not self._is_view_from_the_run(tensor):
            self.leaves[id(tensor)] = tensor

    def _observe_storage(self, storage: torch.UntypedStorage) -> bool:
        """Record the use of a storage. Returns whether it is from before the run and was not used so far."""
        address = storage._cdata
        if address in self._made or address in self.outside:
            return False
        self.outside[address], self.dtypes[address] = storage, set()
        if storage.device.type == "cpu":
            self.host.add(address)
        return True

    def _observe_write(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is None or storage._cdata in self._made:
            return
        self.written.add(storage._cdata)
        saves = self._saves or (self._saves_host and storage.device.type == "cpu")
        if saves and storage._cdata not in self._saved:
            self._saved[storage._cdata] = storage, storage.clone()

    def audited(self, fn: Callable[[], None]) -> Callable[[], None]:
        """Return `fn` with its runs observed."""

        def run() -> None:
            with self.observing():
                fn()

        return run

    def refusals(self, device: torch.device, earlier: StorageAudit | None = None) -> list[str]:
        """Return why a graph on `device` can't repeat the runs, as a list of at most one reason.

        `earlier` observed the runs of another graph, which has held the same host values.
        """
        if self._higher_order:
            return [higher_order_refusal(sorted(self._higher_order))]
        return self._refused_host_memory(device, earlier)

    def _refused_host_memory(self, device: torch.device, earlier: StorageAudit | None) -> list[str]:
        """Return why a graph on `device` can't repeat the use of host memory, as a list of at most one reason.

        Such a graph has operations of its device only: it holds host values as constants and repeats no write to them.
        Storages that the run of `earlier` used or made are constants already.
        """
        found = [address for address in self.host if earlier is None or not earlier.knows(address)]
        if device.type == "cpu" or not (found or self._uses_sparse_on_host):
            return []
        if not found:
            return [f"uses sparse tensors in host memory: move them to {device.type}"]
        dtypes = {str(dtype).removeprefix("torch.") for address in found for dtype in self.dtypes[address]}
        return [
            f"uses {len(found)} tensors in host memory ({', '.join(sorted(dtypes))}) that exist before the call: move "
            f"them to {device.type}, or use numbers"
        ]

    def knows(self, address: int) -> bool:
        """Whether a storage with this address was used or made by the run."""
        return address in self.outside or address in self._made

    def contents(self, without: Container[int]) -> dict[int, bytes]:
        """Return what was written to, by address, except storages in `without`. Needs `saves`."""
        return {
            address: bytes(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).cpu().numpy())
            for address, (storage, _) in self._saved.items()
            if address not in without
        }

    def undo(self) -> None:
        """Restore the saved memory that the runs overwrote."""
        for storage, before in self._saved.values():
            if storage.nbytes() != before.nbytes():
                storage.resize_(before.nbytes())
            storage.copy_(before)


def higher_order_refusal(names: Sequence[str]) -> str:
    """Return why code that calls these higher-order operators can't be captured."""
    return f"calls the higher-order operators {', '.join(names)}, which run Python or compiled code: call them outside"


def _address(tensor: Tensor) -> int:
    """Return the address of the tensor's storage object; 0 if `storage_of` finds none."""
    storage = storage_of(tensor)
    return 0 if storage is None else storage._cdata


def _is_wrapper(tensor_type: Any) -> bool:
    """Whether tensors of this type are made of others, on which their operations run."""
    return tensor_type.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the tensor's storage, or None if it lacks its own storage (sparse, wrapper subclass)."""
    if tensor.layout is not torch.strided or _is_wrapper(type(tensor)):
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def storages_of(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of these tensors by address, without tensors that lack their own."""
    found = map(storage_of, tensors)
    return {storage._cdata: storage for storage in found if storage is not None}


def written_tensors(func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that this call writes, including running statistics that a schema does not declare."""
    names = _facts_of(func).written
    if not names:
        return []
    schema = func._schema.arguments
    given = dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
    if func._schema.name in _BATCH_NORMS and not (given.get("training") or given.get("use_input_stats")):
        return []
    return tensors_in([given.get(name) for name in names])


class _Facts:
    """What an audit asks of an operation at each call; PyTorch computes it anew each time.

    Attributes:
        written: Names of the arguments that it may write.
        takes_storages: Whether some arguments are storages.
        may_be_composite: Whether eager may run it as other operations.
    """

    def __init__(self, func: torch._ops.OpOverload):
        arguments = func._schema.arguments
        self.written = [one.name for one in arguments if one.alias_info and one.alias_info.is_write]
        if func._schema.name in _BATCH_NORMS:
            self.written += ["running_mean", "running_var"]
        self.takes_storages = any("Storage" in str(argument.type) for argument in arguments)
        self.may_be_composite = has_composite_kernel(func)


_facts_of = functools.cache(_Facts)

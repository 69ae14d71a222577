"""Key of a module call: everything that must match for a graph of one call to serve another.

Flattens arguments into tensors and other values, and rebuilds results. Does not handle graphs.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_unflatten

from graph_cache.guards.torch_settings import (
    AUTOCAST_DEVICES,
    Autocast,
    Settings,
    autocast_state,
    records_gradients,
    recreated,
    settings,
)
from graph_cache.guards.values import PLAIN, SameValue, kind_of
from graph_cache.training.reasons import ELSEWHERE, NO_MEMORY
from graph_cache.utils.layout import copy_into, overlaps


class Repeated(int):
    """Stands for an argument that is an earlier tensor argument too: its index among the tensors."""


# Exact types only: a subclass may define its own equality.
CONSTANTS = PLAIN | {Repeated}


# The class of a tensor, and the names and values of its attributes.
TensorKind = tuple[type, tuple[tuple[str, Any], ...]]


@dataclass(frozen=True)
class CallKey:
    """Everything about a call that a capture bakes in: structure, non-tensor values, tensor signatures, modes.

    - `tensors`: (shape, strides, dtype, device, requires_grad) of each tensor argument, in order.
    - `types`: what distinguishes values that compare equal but compute differently, such as 2, 2.0 and True.
    - `autocast`: see `autocast_state`.
    - `settings`: PyTorch's global settings, which select kernels.
    - `ambient_state`: other state that a capture would bake in (see `AmbientState`).
    - `leaves`: under autocast, whether each tensor is a leaf; else empty. Autocast caches the casts of leaves, so their
      gradients are added before the cast and not after it.
    - `kinds`: for each tensor, its class and attributes that code has given to it; empty if all are plain tensors.
    """

    structure: TreeSpec
    values: tuple[Any, ...]
    types: tuple[Any, ...]
    tensors: tuple[tuple, ...]
    training: bool
    grad: bool
    autocast: Autocast
    settings: Settings
    ambient_state: Hashable = None
    leaves: tuple[bool, ...] = ()
    kinds: tuple[TensorKind, ...] = ()

    def __hash__(self) -> int:
        return self._hash  # cached: each call is looked up several times

    @functools.cached_property
    def _hash(self) -> int:
        """Hash that includes constants among the values, since a value that keeps changing makes many keys.

        Other values are excluded: they may be unhashable, or define their own equality.
        """
        constants = tuple([value for value in self.values if type(value) in CONSTANTS or _is_hashable_enum(value)])
        modes = (self.training, self.grad, self.autocast, self.settings, self.ambient_state)
        return hash((constants, self.types, self.tensors, *modes))


def objects_of(key: CallKey) -> list[Any]:
    """Return the arguments that are neither tensors nor constants."""
    return [value for value in key.values if type(value) not in CONSTANTS and not _is_hashable_enum(value)]


def _is_hashable_enum(value: Any) -> bool:
    if not isinstance(value, enum.Enum):
        return False
    try:
        hash(value)
    except TypeError:  # it holds a list, for example
        return False
    return True


class _Record:
    """Stands in a pytree for an object that is rebuilt from its attributes: see `_is_record`."""

    def __init__(self, value: Any, depth: int):
        self.value, self.depth = value, depth


class _TooDeep(Exception):
    """A dataclass is inside too many others, or inside itself."""


def _record_parts(record: _Record) -> tuple[list[Any], Any]:
    attributes = vars(record.value)
    parts = [_with_records(one, record.depth + 1) for one in attributes.values()]
    return parts, (type(record.value), tuple(attributes))


def _record_of(parts: Any, context: Any) -> Any:
    kind, names = context
    made = object.__new__(kind)
    vars(made).update(zip(names, parts, strict=True))
    return made


register_pytree_node(_Record, _record_parts, _record_of, serialized_type_name="graph_cache.training.call._Record")


def _is_record(value: Any, depth: int) -> bool:
    """Whether the value is a dataclass that holds tensors, with nothing but its fields, or a distribution of PyTorch.

    A dataclass without tensors, such as a configuration, stays one object.
    """
    if type(value) in PLAIN or isinstance(value, (Tensor, type, nn.Module)):
        return False
    kind = type(value)
    is_distribution = isinstance(value, torch.distributions.Distribution) and kind.__module__.startswith(DISTRIBUTIONS)
    attributes = getattr(value, "__dict__", None)
    if not (is_distribution or is_dataclass(value)) or type(attributes) is not dict:
        return False
    if not is_distribution and attributes.keys() != {field.name for field in fields(value)}:
        return False
    classes = kind.__mro__[:-1]
    is_plain = all(vars(one).get("__slots__", ()) == () and one.__module__ != "builtins" for one in classes)
    if not is_plain or hasattr(kind, "__del__"):
        return False
    if depth == MAX_NESTED:
        raise _TooDeep
    return any(isinstance(one, Tensor) for one in tree_flatten(_with_records(attributes, depth + 1))[0])


def _with_records(tree: Any, depth: int = 0) -> Any:
    """Return the tree with a _Record in the place of each leaf that is one."""
    leaves, structure = tree_flatten(tree)
    found = [_is_record(leaf, depth) for leaf in leaves]
    if not any(found):
        return tree
    marked = [_Record(leaf, depth) if is_record else leaf for leaf, is_record in zip(leaves, found, strict=True)]
    return tree_unflatten(marked, structure)


def flattened(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Flatten a pytree, and dataclasses and distributions with tensors inside it, which `tree_unflatten` rebuilds."""
    try:
        return tree_flatten(_with_records(tree))
    except _TooDeep:  # they stay objects
        return tree_flatten(tree)


MAX_NESTED = 4  # dataclasses inside each other
DISTRIBUTIONS = "torch.distributions."
PLAIN_TENSOR_TYPES = (Tensor, nn.Parameter)  # other classes need the full check
TENSOR = "<tensor>"  # placeholder of a tensor argument among the values


def flatten_call(
    args: tuple, kwargs: dict[str, Any], training: bool, ambient_state: Hashable = None
) -> tuple[CallKey, list[Tensor]]:
    """Return the key of a call and its tensor arguments, in order; a tensor that is given several times comes once."""
    if not kwargs and all(isinstance(argument, Tensor) for argument in args):
        tensors, values = list(args), (TENSOR,) * len(args)  # flat: skip tree_flatten
        structure = _flat_structure(len(args), ())
    else:
        leaves, structure = flattened((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        values = tuple([TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    if _has_repeated(tensors):
        tensors, values = _without_repeated(tensors, values)
    grad, autocast = records_gradients(), autocast_state()
    signatures = tuple(
        [
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, grad and tensor.requires_grad)
            for tensor in tensors
        ]
    )
    key = CallKey(
        structure,
        values,
        tuple(map(_kind_of, values)),
        signatures,
        training,
        grad,
        autocast,
        settings(),
        ambient_state,
        _leaves(tensors) if any(autocast) else (),
        _kinds(tensors),
    )
    return key, tensors


def _has_repeated(tensors: Sequence[Tensor]) -> bool:
    return len(tensors) > 1 and len(set(map(id, tensors))) < len(tensors)


def _without_repeated(tensors: Sequence[Tensor], values: tuple[Any, ...]) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Return each tensor once, and the values with Repeated in the place of further ones."""
    indices: dict[int, int] = {}
    found: list[Tensor] = []
    marked: list[Any] = []
    remaining = iter(tensors)
    for value in values:
        if value is not TENSOR:
            marked.append(value)
            continue
        tensor = next(remaining)
        if id(tensor) in indices:
            marked.append(Repeated(indices[id(tensor)]))
        else:
            indices[id(tensor)] = len(found)
            found.append(tensor)
            marked.append(TENSOR)
    return found, tuple(marked)


def _leaves(tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    return tuple([tensor.is_leaf for tensor in tensors])


def _kinds(tensors: Sequence[Tensor]) -> tuple[TensorKind, ...]:
    """Return the class and attributes of each tensor, or nothing if all are plain tensors without attributes.

    Attributes of parameters are left out: libraries keep flags in them that change during a step.
    """
    if not any([type(tensor) is not Tensor or tensor.__dict__ for tensor in tensors]):
        return ()
    return tuple([(type(tensor), _attributes(tensor) if type(tensor) is Tensor else ()) for tensor in tensors])


def _attributes(tensor: Tensor) -> tuple[tuple[str, Any], ...]:
    return tuple([(name, SameValue(value)) for name, value in tensor.__dict__.items()])


def as_kind(tensor: Tensor, kind: TensorKind) -> Tensor:
    """Return a static input as code sees the argument that it stands for: as a parameter, and with its attributes."""
    if kind[0] is nn.Parameter:
        return nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
    tensor.__dict__.update({name: same.value for name, same in kind[1]})
    return tensor


def _kind_of(value: Any) -> Any:
    return Repeated if type(value) is Repeated else kind_of(value)


@functools.cache
def _flat_structure(count: int, names: tuple[str, ...]) -> TreeSpec:
    """Return the TreeSpec of a call with `count` positional leaves and one leaf per keyword."""
    return tree_flatten(((TENSOR,) * count, dict.fromkeys(names, TENSOR)))[1]


@contextmanager
def modes_as(state: Autocast, wanted: Settings) -> Iterator[None]:
    """Set autocast and PyTorch's settings for a capture, with a fresh cast cache.

    Casts must not leak between graphs and other code. Where autocast is off and stays off, change nothing:
    torch.compile guards on the cache setting too and would recompile. Raises CaptureRefused for settings that can't be
    set and restored.
    """
    with ExitStack() as stack:
        stack.enter_context(recreated(wanted))
        now = autocast_state()
        for device, dtype, current in zip(AUTOCAST_DEVICES, state, now, strict=True):
            if dtype is not None or current is not None:
                stack.enter_context(torch.autocast(device, dtype=dtype or current, enabled=dtype is not None))
        if not any(state) and not any(now):
            yield
            return
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()


@dataclass(frozen=True)
class BackwardKey:
    """Everything about a backward that a capture bakes in.

    - `strides` of the gradient of each differentiable output; None for an output that no loss used.
    - `autocast` and `settings`, as in CallKey, when the backward runs.
    """

    strides: tuple[tuple[int, ...] | None, ...]
    autocast: Autocast
    settings: Settings

    @classmethod
    def of(cls, grads: Sequence[Tensor | None]) -> BackwardKey:
        """Return the key of a backward with these gradients that runs now."""
        return cls(_strides(grads), autocast_state(), settings())

    def matches(self, grads: Sequence[Tensor | None]) -> bool:
        """Return whether `of` would return an equal key. Runs for every layer of every backward."""
        return _strides(grads) == self.strides and settings() == self.settings and autocast_state() == self.autocast


def _strides(grads: Sequence[Tensor | None]) -> tuple[tuple[int, ...] | None, ...]:
    return tuple([None if grad is None else grad.stride() for grad in grads])


class Expected:
    """Fast matcher for calls of one key. Runs at every call of a step, at a fraction of the cost of building a key.

    Matches only calls with flat arguments (tensors and values). Calls with containers always need a key.
    """

    def __init__(self, key: CallKey, args: tuple, kwargs: dict[str, Any]):
        self._is_flat = key.structure == _flat_structure(len(args), tuple(kwargs))
        self._count, self._names = len(args), tuple(kwargs)
        self._training, self._autocast, self._ambient_state = key.training, key.autocast, key.ambient_state
        self._settings = key.settings
        self._only_tensors = all(value is TENSOR for value in key.values) and not kwargs
        self._signatures, self._leaves, self._kinds = key.tensors, key.leaves, key.kinds
        self._values = list(zip(key.values, key.types, strict=True))

    def tensors(
        self, args: tuple, kwargs: dict[str, Any], training: bool, ambient_state: Hashable = None
    ) -> Sequence[Tensor] | None:
        """Return the tensors of a call of this key, in order, or None if the call differs or needs the full check.

        The caller must have gradients enabled.
        """
        if (
            not self._is_flat
            or training != self._training
            or len(args) != self._count
            or ambient_state != self._ambient_state
        ):
            return None
        if autocast_state() != self._autocast or settings() != self._settings:
            return None
        tensors = args if self._only_tensors and not kwargs else self._match_leaves(args, kwargs)
        if tensors is None or _has_repeated(tensors):
            return None
        for tensor, signature in zip(tensors, self._signatures, strict=True):
            if (
                type(tensor) not in PLAIN_TENSOR_TYPES
                or is_sparse(tensor)
                or is_lazy(tensor)
                or signature != (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
            ):
                return None
        if _kinds(tensors) != self._kinds:
            return None
        return tensors if not self._leaves or _leaves(tensors) == self._leaves else None

    def _match_leaves(self, args: tuple, kwargs: dict[str, Any]) -> list[Any] | None:
        """Return the leaves at tensor positions if all other leaves match, else None."""
        if tuple(kwargs) != self._names:
            return None
        found = []
        for leaf, (value, expected_type) in zip((*args, *kwargs.values()), self._values, strict=True):
            if value is TENSOR:
                found.append(leaf)
            elif expected_type is Repeated:
                if leaf is not found[value]:
                    return None
            elif leaf is not value and (
                isinstance(leaf, Tensor) or _kind_of(leaf) != expected_type or not _equal(leaf, value)
            ):
                return None
        return found


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values of one type are equal; not if their comparison fails, as that of arrays."""
    try:
        return bool(one == other)
    except Exception:  # of any kind: it runs code of the value
        return False


def unflatten_call(key: CallKey, tensors: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of a call of this key with these tensors."""
    remaining = iter(tensors)
    leaves = [
        next(remaining) if value is TENSOR else tensors[value] if type(value) is Repeated else value
        for value in key.values
    ]
    return tree_unflatten(leaves, key.structure)


def as_leaves(key: CallKey, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors that are leaves, or aliases with a history, as autocast saw them in a call of this key."""
    if not key.leaves:
        return list(tensors)
    return [
        tensor if is_leaf or not tensor.requires_grad else torch.ops.aten.alias(tensor)
        for tensor, is_leaf in zip(tensors, key.leaves, strict=True)
    ]


@dataclass(frozen=True)
class Result:
    """Structure and leaves of a return value; TENSOR replaces each tensor."""

    structure: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a single tensor, which needs no rebuilding."""
        return self.leaves == (TENSOR,) and self.structure.is_leaf()

    @classmethod
    def of(cls, value: Any) -> tuple[Result, list[Tensor]]:
        """Flatten a return value into a Result and its tensors; a tensor that it holds several times comes once."""
        leaves, structure = flattened(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        values = tuple([TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        if _has_repeated(tensors):
            tensors, values = _without_repeated(tensors, values)
        return cls(structure, values), tensors

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """Rebuild the value with these tensors."""
        remaining = iter(tensors)
        leaves = [
            next(remaining) if leaf is TENSOR else tensors[leaf] if type(leaf) is Repeated else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.structure)


def load(statics: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors into static tensors, except those that already alias them."""
    for static, tensor in zip(statics, tensors, strict=True):
        if lacks_memory(static) or static.data_ptr() != tensor.data_ptr():
            copy_into(static, tensor)


def is_sparse(tensor: Tensor) -> bool:
    """Whether the tensor is sparse: its memory size depends on its values, so no graph can take another one."""
    return tensor.layout is not torch.strided


def is_lazy(tensor: Tensor) -> bool:
    """Whether the tensor is a lazy conjugate or negative, with memory that holds other values."""
    return tensor.is_conj() or tensor.is_neg()


def input_refusal(tensors: Sequence[Tensor], device: torch.device) -> str:
    """Return why a graph can't take these inputs, as a metrics reason, or an empty string if it can."""
    if any(map(lacks_memory, tensors)) or any(map(overlaps, tensors)):
        return NO_MEMORY
    return ELSEWHERE if any_on_other_device(tensors, device) else ""


def any_on_other_device(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether any tensor is not on the graphs' device.

    Values of host tensors are baked into a capture: a kernel launch takes a scalar by value, and counts become shapes.
    """
    return any(tensor.device.type != device.type for tensor in tensors)


def lacks_memory(tensor: Tensor) -> bool:
    """Whether the tensor lacks a storage address that identifies it.

    True for wrappers of other tensors (DTensor), sparse tensors, lazy views that share the address of their base, and
    quantized tensors, whose scale is a number beside the memory.
    """
    try:
        if is_sparse(tensor) or tensor.is_quantized or is_lazy(tensor):
            return True
        return not tensor.data_ptr() and tensor.numel() > 0
    except RuntimeError:  # tracing tensors (torch.export, torch.func) have no data_ptr
        return True

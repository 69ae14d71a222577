"""One call of a module: what must be the same for a graph of it to serve another call.

Owns taking arguments apart into tensors and the rest, and putting results together. Knows no graphs.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

# Of exactly these types: a subclass may be equal by a rule of its own.
PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device))


@dataclass(frozen=True)
class CallKey:
    """Everything of a call that a capture bakes in: structure, values that are no tensors, tensor signatures, modes.

    `tensors` holds (shape, strides, dtype, device, requires_grad) of each tensor argument, in order; `types` tells
    values apart that compare equal and compute differently (2, 2.0 and True). `around`: what else of a call's
    surroundings would be baked in (see `AmbientState`).
    """

    structure: TreeSpec
    values: tuple[Any, ...]
    types: tuple[type, ...]
    tensors: tuple[tuple, ...]
    training: bool
    grad: bool
    autocast: tuple[bool, torch.dtype | None]
    ambient_state: Hashable = None

    def __hash__(self) -> int:
        return self._hash  # one call is looked up in several places

    @functools.cached_property
    def _hash(self) -> int:
        """Of constants among the values, too: kinds that differ in nothing else are many where a value keeps changing.

        Other values stay out: they may have no hash, or be equal by rules of their own.
        """
        constants = tuple([value for value in self.values if type(value) in PLAIN or _is_hashable_enum(value)])
        return hash((constants, self.types, self.tensors, self.training, self.grad, self.autocast, self.ambient_state))


def _is_hashable_enum(value: Any) -> bool:
    return isinstance(value, enum.Enum) and isinstance(value, Hashable)


NO_MEMORY = "argument_without_memory"  # why a call runs eager
ELSEWHERE = "argument_elsewhere"
PLAIN_TENSOR_TYPES = (Tensor, nn.Parameter)  # other classes take a closer look
TENSOR = "<tensor>"  # stands where a tensor argument was, among the values


def flatten_call(
    args: tuple, kwargs: dict[str, Any], training: bool, ambient_state: Hashable = None
) -> tuple[CallKey, list[Tensor]]:
    """A call's key and its tensor arguments, in order."""
    if not kwargs and all(isinstance(argument, Tensor) for argument in args):
        tensors, values = list(args), (TENSOR,) * len(args)  # no tree to walk
        structure = _flat_structure(len(args), ())
    else:
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        values = tuple([TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    grad = torch.is_grad_enabled()
    signatures = tuple(
        [
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, grad and tensor.requires_grad)
            for tensor in tensors
        ]
    )
    key = CallKey(
        structure,
        values,
        tuple(map(type, values)),
        signatures,
        training,
        grad,
        _autocast(tensors[0].device.type if tensors else "cpu"),
        ambient_state,
    )
    return key, tensors


@functools.cache
def _flat_structure(count: int, names: tuple[str, ...]) -> TreeSpec:
    """The structure of a call with this many positional leaves and a leaf for each of these keywords."""
    return tree_flatten(((TENSOR,) * count, dict.fromkeys(names, TENSOR)))[1]


def _autocast(device: str) -> tuple[bool, torch.dtype | None]:
    enabled = torch.is_autocast_enabled(device)
    return enabled, torch.get_autocast_dtype(device) if enabled else None


def autocast_as(key: CallKey) -> AbstractContextManager:
    """PyTorch's autocast as it was around the call."""
    return _autocast_in(_device_of(key), *key.autocast)


def no_autocast(key: CallKey) -> AbstractContextManager:
    """No autocast, as around a backward, which computes as its forward did."""
    return _autocast_in(_device_of(key), False, None)


@contextmanager
def _autocast_in(device: str, enabled: bool, dtype: torch.dtype | None) -> Iterator[None]:
    """Casts that were cached outside are none of a graph's, nor the other way round. What is off stays as it is, since
    compiled code is told a mere change of the cache's setting, too, and would be compiled anew."""
    if not enabled and not torch.is_autocast_enabled(device):
        yield
        return
    with torch.autocast(device, dtype=dtype, enabled=enabled):
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()


def _device_of(key: CallKey) -> str:
    return key.tensors[0][3].type if key.tensors else "cpu"


class Expected:
    """What calls of one key look like. Asked at every call of a step: a fraction of the cost of making a key.

    Only for calls whose arguments are tensors and values; those with containers among them always make a key.
    """

    def __init__(self, key: CallKey, args: tuple, kwargs: dict[str, Any]):
        self._is_flat = key.structure == _flat_structure(len(args), tuple(kwargs))
        self._count, self._names = len(args), tuple(kwargs)
        self._training, self._autocast, self._ambient_state = key.training, key.autocast, key.ambient_state
        self._device = _device_of(key)
        self._only_tensors = all(value is TENSOR for value in key.values) and not kwargs
        self._signatures = key.tensors
        self._values = list(zip(key.values, key.types, strict=True))

    def tensors(
        self, args: tuple, kwargs: dict[str, Any], training: bool, ambient_state: Hashable = None
    ) -> Sequence[Tensor] | None:
        """The tensors of a call of this key, in order; None for any other call, and for one that takes a closer look.

        The caller has gradients enabled.
        """
        if (
            not self._is_flat
            or training != self._training
            or len(args) != self._count
            or ambient_state != self._ambient_state
        ):
            return None
        if torch.is_autocast_enabled(self._device) != self._autocast[0] or (
            self._autocast[0] and torch.get_autocast_dtype(self._device) != self._autocast[1]
        ):
            return None
        tensors = args if self._only_tensors and not kwargs else self._match_leaves(args, kwargs)
        if tensors is None:
            return None
        for tensor, signature in zip(tensors, self._signatures, strict=True):
            if (
                type(tensor) not in PLAIN_TENSOR_TYPES
                or is_sparse(tensor)
                or is_lazy(tensor)
                or signature != (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
            ):
                return None
        return tensors

    def _match_leaves(self, args: tuple, kwargs: dict[str, Any]) -> list[Any] | None:
        """What stands where tensors are wanted, if everything else is as expected."""
        if tuple(kwargs) != self._names:
            return None
        found = []
        for leaf, (value, expected_type) in zip((*args, *kwargs.values()), self._values, strict=True):
            if value is TENSOR:
                found.append(leaf)
            elif isinstance(leaf, Tensor) or type(leaf) is not expected_type or leaf != value:
                return None
        return found


def unflatten_call(key: CallKey, tensors: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call of this key with these tensors."""
    remaining = iter(tensors)
    leaves = [next(remaining) if value is TENSOR else value for value in key.values]
    return tree_unflatten(leaves, key.structure)


@dataclass(frozen=True, eq=False)
class IdentityKey:
    """Part of a key: equal to another only if it holds the very same object, which lives as long, so that its address
    names nothing else. A bound method is the same with the same owner.
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IdentityKey):
            return NotImplemented
        bound = isinstance(self.value, types.MethodType)
        return self.value is other.value or bound and self.value == other.value

    def __hash__(self) -> int:
        return hash(type(self.value))


@dataclass(frozen=True)
class Result:
    """What a call returned: its structure, and the leaves with None where a tensor was."""

    structure: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor by itself, which needs no putting together."""
        return self.leaves == (TENSOR,) and self.structure.is_leaf()

    @classmethod
    def of(cls, value: Any) -> tuple[Result, list[Tensor]]:
        """Take a returned value apart; dataclasses must be registered with pytree by their owner to count as trees."""
        leaves, structure = tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return cls(structure, tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)), tensors

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The value again, with these tensors."""
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if leaf is TENSOR else leaf for leaf in self.leaves], self.structure)


def load(statics: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy into static tensors what isn't there already."""
    for static, tensor in zip(statics, tensors, strict=True):
        if lacks_memory(static) or static.data_ptr() != tensor.data_ptr():
            static.data.copy_(tensor)


def is_sparse(tensor: Tensor) -> bool:
    """Whether how much memory it takes depends on its values: no graph can be given another one."""
    return tensor.layout is not torch.strided


def is_lazy(tensor: Tensor) -> bool:
    """Whether it is a conjugate or a negative that is computed by who reads it: its memory holds something else."""
    return tensor.is_conj() or tensor.is_neg()


def input_refusal(tensors: Sequence[Tensor], device: torch.device) -> str:
    """Why a graph can't be given one of these; empty where it can."""
    if any(map(lacks_memory, tensors)):
        return NO_MEMORY
    return ELSEWHERE if any_on_other_device(tensors, device) else ""


def any_on_other_device(tensors: Sequence[Tensor], device: torch.device) -> bool:
    """Whether one of these is not on a graph's device.

    What is on the host is as good as read there: a GPU is given a single number with the launch, and a list of counts
    becomes shapes.
    """
    return any(tensor.device.type != device.type for tensor in tensors)


def lacks_memory(tensor: Tensor) -> bool:
    """Whether it is made of other tensors, as a DTensor is, and so has no address by which to know it again; or has one
    that it shares with what it was made of."""
    try:
        return is_sparse(tensor) or is_lazy(tensor) or (not tensor.data_ptr() and tensor.numel() > 0)
    except RuntimeError:  # those by which PyTorch traces (torch.export, torch.func) refuse to tell theirs
        return True

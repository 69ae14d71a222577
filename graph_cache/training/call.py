"""One call of a module: what must be the same for a graph of it to serve another call.

Owns taking arguments apart into tensors and the rest, and putting results together. Knows no graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True)
class CallKey:
    """Everything of a call that a capture bakes in: structure, values that are no tensors, tensor signatures, modes.

    `tensors` holds (shape, strides, dtype, device, requires_grad) of each tensor argument, in order.
    """

    structure: TreeSpec
    values: tuple[Any, ...]
    tensors: tuple[tuple, ...]
    training: bool
    grad: bool
    autocast: tuple[bool, torch.dtype | None]

    def __hash__(self) -> int:
        return hash((self.tensors, self.training, self.grad, self.autocast))


TENSOR = "<tensor>"  # stands where a tensor argument was, among the values


def take_apart(args: tuple, kwargs: dict[str, Any], training: bool) -> tuple[CallKey, list[Tensor]]:
    """A call's key and its tensor arguments, in order."""
    if not kwargs and all(isinstance(argument, Tensor) for argument in args):
        tensors, values = list(args), (TENSOR,) * len(args)  # the usual layer: no tree to walk
        structure = _flat_structure(len(args))
    else:
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        values = tuple([TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    device = tensors[0].device.type if tensors else "cpu"
    autocast = torch.is_autocast_enabled(device)
    grad = torch.is_grad_enabled()
    signatures = tuple([(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, grad and tensor.requires_grad)
                        for tensor in tensors])
    key = CallKey(structure, values, signatures, training, grad,
                  (autocast, torch.get_autocast_dtype(device) if autocast else None))
    return key, tensors


@functools.cache
def _flat_structure(count: int) -> TreeSpec:
    """The structure of a call with this many positional tensors and nothing else."""
    return tree_flatten(((TENSOR,) * count, {}))[1]


def put_together(key: CallKey, tensors: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call of this key with these tensors."""
    rest = iter(tensors)
    leaves = [next(rest) if value is TENSOR else value for value in key.values]
    return tree_unflatten(leaves, key.structure)


@dataclass(frozen=True)
class Result:
    """What a call returned: its structure, and the leaves with None where a tensor was."""

    structure: TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> tuple[Result, list[Tensor]]:
        """Take a returned value apart; dataclasses must be registered with pytree by their owner to count as trees."""
        leaves, structure = tree_flatten(value)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return cls(structure, tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)), tensors

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The value again, with these tensors."""
        rest = iter(tensors)
        return tree_unflatten([next(rest) if leaf is TENSOR else leaf for leaf in self.leaves], self.structure)


def load(statics: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy into static tensors what isn't there already."""
    for static, tensor in zip(statics, tensors, strict=True):
        if static.data_ptr() != tensor.data_ptr():
            static.data.copy_(tensor)

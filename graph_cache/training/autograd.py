"""A graphed call as autograd sees it: one node whose backward replays a graph.

Parameters enter as inputs and their gradients are returned, so that plain loops, hooks and DistributedDataParallel see
what they would see of the eager module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from graph_cache.errors import GraphError
from graph_cache.training.graphed_call import GraphedCall


class Lease:
    """A pair's use by one forward: ended by its backward, or when autograd lets go of a history that never ran it."""

    def __init__(self, release: Callable[[], None]):
        self._release: Callable[[], None] | None = release

    @property
    def ended(self) -> bool:
        return self._release is None

    def end(self) -> None:
        """Give the pair back, once."""
        if self._release is not None:
            release, self._release = self._release, None
            release()

    def __del__(self) -> None:
        self.end()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: GraphedCall, lease: Lease, inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.lease = call, lease
        # A leaf's .grad may become the very tensor that is returned for it, so leaves get copies.
        ctx.leaves = [index for index, tensor in enumerate(tensors[:inputs]) if tensor.requires_grad and tensor.is_leaf]
        outputs = call.replay_forward(tensors[:inputs])
        ctx.mark_non_differentiable(*(output for index, output in enumerate(outputs)
                                      if index not in call.differentiable))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        call, lease = ctx.call, ctx.lease
        if lease.ended:
            raise GraphError(f"the backward of {call.name} was run twice: a graph's backward runs once, since the next "
                             "forward reuses its memory; detach the module from its graphs to retain it")
        inputs, parameters = call.replay_backward([grads[index] for index in call.differentiable])
        for index in ctx.leaves:
            if inputs[index] is not None:
                inputs[index] = inputs[index].clone()
        lease.end()
        return (None, None, None, *inputs, *parameters)


def replay(call: GraphedCall, lease: Lease, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The call's outputs for these inputs, with a history that leads to its backward graph."""
    return _Replay.apply(call, lease, len(tensors), *tensors, *call.parameters)


class _Probe(torch.autograd.Function):
    """The identity; its backward says that the gradients of a call's outputs have arrived."""

    @staticmethod
    def forward(ctx: Any, lease: Lease, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.lease = lease
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.lease.end()
        return (None, *grads)


def probe(lease: Lease, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same tensors; the lease ends when their backward begins, or when it will never come."""
    return _Probe.apply(lease, *tensors)

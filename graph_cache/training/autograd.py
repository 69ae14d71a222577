"""A graphed call as autograd sees it: one node whose backward replays a graph.

Parameters enter as inputs and their gradients are returned, so that plain loops, hooks and DistributedDataParallel see
what they would see of the eager module. This runs for every layer of every step: what it does is counted in
microseconds (`benchmarks/training_step.py` prints the host's time).
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
    """A pair's use by one forward: ended by its backward, or when autograd lets go of a history that never ran it, of
    which `abandon` is told instead, if given.
    """

    __slots__ = ("_abandon", "_index", "_release")

    def __init__(self, release: Callable[[int], None], index: int = 0, abandon: Callable[[int], None] | None = None):
        self._release: Callable[[int], None] | None = release
        self._abandon = abandon
        self._index = index

    @property
    def ended(self) -> bool:
        return self._release is None

    def end(self) -> None:
        """Give the pair back, once."""
        release, self._release = self._release, None
        if release is not None:
            release(self._index)

    def __del__(self) -> None:
        if self._release is not None and self._abandon is not None:
            self._release = self._abandon
        self.end()


def _replay_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    call, lease = ctx.call, ctx.lease
    if lease.ended:
        raise GraphError(
            f"the backward of {call.name} was run twice: a graph's backward runs once, since the next "
            "forward reuses its memory; detach the module from its graphs to retain it"
        )
    results = call.replay_backward(grads)
    for index in ctx.cloned:
        if results[index] is not None:
            results[index] = results[index].clone()
    lease.end()
    return (None, None, *results)


_replay_backward_once = once_differentiable(_replay_backward)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: GraphedCall, lease: Lease, *tensors: Tensor) -> Any:
        ctx.call, ctx.lease = call, lease
        # What is returned for an input may become the .grad of a leaf before it, or be sent away while the next graph
        # runs, whose temporaries may lie there: copies, but where another pair's backward reads it at once.
        ctx.cloned = [
            index
            for index in call.inputs_requiring_grad
            if index not in call.grads_read_in_place or type(tensors[index].grad_fn) is not _REPLAY_NODE
        ]
        outputs = call.replay_forward(tensors)
        ctx.set_materialize_grads(False)  # an output that no loss used has no gradient, and not one of zeros
        if call.undifferentiable:
            ctx.mark_non_differentiable(*[outputs[index] for index in call.undifferentiable])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # The guard against a second differentiation costs as much as a replay; nobody can ask for one without a graph.
        return _replay_backward_once(ctx, *grads) if torch.is_grad_enabled() else _replay_backward(ctx, *grads)


_REPLAY_NODE = _Replay._backward_cls

# What `Function.apply` comes to without functorch, without its walk over all arguments in Python.
_apply = super(torch.autograd.Function, _Replay).apply


def replay(call: GraphedCall, lease: Lease, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The call's outputs for these inputs, with a history that leads to its backward graph."""
    apply = _Replay.apply if torch._C._are_functorch_transforms_active() else _apply
    return apply(call, lease, *tensors, *call.parameters)


class _Probe(torch.autograd.Function):
    """The identity; its backward says that the gradients of a call's outputs have arrived."""

    @staticmethod
    def forward(ctx: Any, lease: Lease, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.lease = lease
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors])  # no views: some may not be written to or let go of

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.lease.end()
        return (None, *grads)


def probe(lease: Lease, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same tensors; the lease ends when their backward begins, or when it will never come."""
    return _Probe.apply(lease, *tensors)

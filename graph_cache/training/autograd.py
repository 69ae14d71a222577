"""Autograd node of a graphed call. Its forward and backward replay CUDA graphs.

Parameters are inputs of the node and it returns their gradients, so plain loops, hooks and DistributedDataParallel
behave as with the eager module. This code runs for every layer of every step, so its host time is measured in
microseconds (`benchmarks/training/training_step.py` prints it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from graph_cache.errors import GraphError
from graph_cache.layout import copy_of
from graph_cache.training.graphed_call import GraphedCall


class Lease:
    """The use of a pair of graphs by one forward.

    The backward ends it with `release(index)`. If autograd frees the history before any backward, `abandon(index)` is
    called instead, or `release` if `abandon` is None.
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
        """Release the pair. Further calls do nothing."""
        release, self._release = self._release, None
        if release is not None:
            release(self._index)

    def __del__(self) -> None:
        if self._release is not None and self._abandon is not None:
            self._release = self._abandon
        self.end()


DOUBLE_BACKWARD = (
    "its gradient is differentiated again (create_graph=True), and the gradients that a graph returns have no history"
)


def _replay_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    call, lease = ctx.call, ctx.lease
    if torch.is_grad_enabled():  # create_graph=True
        call.refuse_double_backward()
        raise GraphError(
            f"{call.name}: {DOUBLE_BACKWARD}. Calls of this signature run eager from the next step on; they would have "
            "from the start if this backward had occurred during warm-up"
        )
    if lease.ended:
        raise GraphError(
            f"the backward of {call.name} was run twice: a graph's backward runs once per forward, because the next "
            "forward reuses its memory; detach the module from its graphs to use retain_graph=True"
        )
    results = call.replay_backward(grads)
    for index in ctx.cloned:
        if results[index] is not None:
            results[index] = copy_of(results[index])
    lease.end()
    return (None, None, *results)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: GraphedCall, lease: Lease, *tensors: Tensor) -> Any:
        ctx.call, ctx.lease = call, lease
        # An input's gradient may become the .grad of a leaf, or be sent to another rank while the next graph runs and
        # overwrites that memory with temporaries. Clone it unless another pair's backward reads it immediately.
        ctx.cloned = [
            index
            for index in call.inputs_requiring_grad
            if index not in call.grads_read_in_place or type(tensors[index].grad_fn) is not _REPLAY_NODE
        ]
        outputs = call.replay_forward(tensors)
        ctx.set_materialize_grads(False)  # None, not zeros, for outputs that no loss used
        if call.undifferentiable:
            ctx.mark_non_differentiable(*[outputs[index] for index in call.undifferentiable])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _replay_backward(ctx, *grads)


_REPLAY_NODE = _Replay._backward_cls

# `Function.apply` without the functorch path, which walks all arguments in Python. Calls under transforms run eager.
_apply = super(torch.autograd.Function, _Replay).apply


def replay(call: GraphedCall, lease: Lease, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Replay the forward with these inputs, and return outputs with a history that replays the backward graph."""
    return _apply(call, lease, *tensors, *call.parameters)


SeesGradients = Callable[[Sequence[Tensor | None]], None] | None


class _Probe(torch.autograd.Function):
    """Identity. Its backward ends a lease when the gradients of a call's outputs arrive."""

    @staticmethod
    def forward(
        ctx: Any, lease: Lease, doubled: Callable[[], None], seen: SeesGradients, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.lease, ctx.doubled, ctx.seen = lease, doubled, seen
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors])  # no views: some reject in-place writes and detach_()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.lease.end()
        if ctx.seen is not None:
            ctx.seen(grads)
        if torch.is_grad_enabled():
            ctx.doubled()
        return (None, None, None, *grads)


class _Identity(torch.autograd.Function):
    """Identity, whose result is no view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        return grads[0]


def probe(
    lease: Lease, tensors: Sequence[Tensor], doubled: Callable[[], None], seen: SeesGradients = None
) -> tuple[Tensor, ...]:
    """Return the same tensors. The lease ends when their backward begins, or when their history is freed.

    `seen` is called with their gradients; a tensor that is given twice has one gradient, given twice. `doubled` is
    called if the backward has a history itself (create_graph=True).
    """
    different = {id(tensor): tensor for tensor in tensors}
    indices = [list(different).index(id(tensor)) for tensor in tensors]
    if len(different) == 1:
        see_all = None if seen is None else lambda grads: seen([grads[0]] * len(tensors))
        outputs = _Probe.apply(lease, doubled, see_all, *different.values())
        return tuple([outputs[index] for index in indices])

    def arrived(grads: Sequence[Tensor | None]) -> None:
        lease.end()
        if seen is not None:
            seen([grads[index] for index in indices])
        if torch.is_grad_enabled():
            doubled()

    outputs = tuple(different.values())
    if seen is not None or any(tensor.is_leaf for tensor in outputs):
        # Hooks on the results would also see the gradients that flow between them inside the module. A node for each:
        # one for all would wait for all gradients, whose parts would then be summed in another order.
        outputs = tuple(map(_Identity.apply, outputs))
    register_multi_grad_hook(outputs, arrived)
    return tuple([outputs[index] for index in indices])

"""Autograd node of a graphed call. Its forward and backward replay CUDA graphs.

Parameters are inputs of the node and it returns their gradients, so plain loops, hooks and DistributedDataParallel
behave as with the eager module. This code runs for every layer of every step, so its host time is measured in
microseconds (`benchmarks/training/training_step.py` prints it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from graph_cache.errors import GraphError
from graph_cache.training.call_graphs import CallGraphs
from graph_cache.utils.layout import copy_of


class Lease:
    """The use of an entry by one forward.

    A backward without retain_graph=True ends it with `release(index)`. If autograd frees the history before,
    `abandon(index)` is called instead, or `release` if `abandon` is None.
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
        """Release the entry. Further calls do nothing."""
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
    if lease.ended and call.reads_saved_tensors:
        raise GraphError(
            f"the backward of {call.name} was run twice, the first time without retain_graph=True, which frees the "
            "saved tensors: set it"
        )
    if call.reads_saved_tensors:
        ctx.saved_tensors  # noqa: B018 (raises, as eager does, if one was written in place since the forward)
    results = call.replay_backward(grads)
    for index in ctx.cloned:
        if results[index] is not None:
            results[index] = copy_of(results[index])
    if not _retains_graph():  # else another backward may follow: no forward uses the entry until the history is freed
        lease.end()
    return (None, None, *results)


_retains_graph = torch._C._autograd._get_current_graph_task_keep_graph  # of the backward that runs now


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: CallGraphs, lease: Lease, *tensors: Tensor) -> Any:
        ctx.call, ctx.lease = call, lease
        # An input's gradient may become the .grad of a leaf, or be sent to another rank while the next graph runs and
        # overwrites that memory with temporaries. Clone it unless another entry's backward reads it immediately.
        ctx.cloned = [
            index
            for index in call.inputs_requiring_grad
            if index not in call.grads_read_in_place or type(tensors[index].grad_fn) is not _REPLAY_NODE
        ]
        ctx.cloned += range(len(tensors) - len(call.repeated_inputs), len(tensors))
        outputs = call.replay_forward(tensors)
        saved = [tensors[index] for index in call.saved_arguments] + [outputs[index] for index in call.saved_outputs]
        ctx.save_for_backward(*saved)
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


def replay(call: CallGraphs, lease: Lease, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Replay the forward with these inputs, and return outputs with a history that replays the backward graph."""
    return _apply(call, lease, *tensors, *call.parameters, *[tensors[index] for index in call.repeated_inputs])


SeesGradients = Callable[[Sequence[Tensor | None]], None] | None


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

    def arrived(grads: Sequence[Tensor | None], with_history: bool) -> None:
        lease.end()
        if seen is not None:
            seen([grads[index] for index in indices])
        if with_history:
            doubled()

    # Hooks alone, wherever possible: a further node groups the parts of a gradient, and a second derivative then
    # sums them in another order than eager. A node for each tensor that needs one, since one node for all would wait
    # for all gradients.
    outputs = list(different.values())
    shared = _used_by_others(outputs) if seen is not None else set()
    outputs = [
        _Identity.apply(tensor) if tensor.is_leaf or index in shared else tensor for index, tensor in enumerate(outputs)
    ]
    _on_gradients(outputs, arrived)
    return tuple([outputs[index] for index in indices])


def _on_gradients(tensors: Sequence[Tensor], arrived: Callable[[list[Tensor | None], bool], None]) -> None:
    """Call `arrived` in every backward, once all gradients of the tensors are known, or at its end if it lacks some.

    Second argument: whether the backward has a history itself. Unlike the hooks of torch's register_multi_grad_hook,
    these hooks hold no node: a history that no backward ever frees would keep itself alive.
    """
    pending: dict[int, list[Tensor | None]] = {}  # by backward

    def add(index: int, grad: Tensor) -> None:
        backward, with_history = torch._C._current_graph_task_id(), torch.is_grad_enabled()
        if backward not in pending:
            pending[backward] = [None] * count
            if count > 1:
                engine.queue_callback(functools.partial(finish, backward, with_history))
        pending[backward][index] = grad
        if not any(known is None for known in pending[backward]):
            finish(backward, with_history)

    def finish(backward: int, with_history: bool) -> None:
        grads = pending.pop(backward, None)
        if grads is not None:
            arrived(grads, with_history)

    engine = torch.autograd.Variable._execution_engine
    count = len(tensors)
    for index, tensor in enumerate(tensors):
        tensor.register_hook(functools.partial(add, index))


def _used_by_others(tensors: Sequence[Tensor]) -> set[int]:
    """Return the indices of tensors that others were computed from, unless a leaf that is no parameter takes part.

    Hooks on these would also see the gradients that flow between the tensors. A job that trains on gradients of its
    inputs (gradient penalties, forces) differentiates twice: there `seen` gets these sums instead.
    """
    indices: dict[tuple[Node, int], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.grad_fn is not None:
            indices.setdefault((tensor.grad_fn, tensor.output_nr), []).append(index)
    if len(tensors) == 1:
        return set()
    found: set[int] = set()
    visited = {node for node, _ in indices}
    stack = list(visited)
    while stack:
        for edge in stack.pop().next_functions:
            node = edge[0]
            found.update(indices.get(edge, ()))
            if node is None or node in visited:
                continue
            if hasattr(node, "variable") and not isinstance(node.variable, Parameter):
                return set()
            visited.add(node)
            stack.append(node)
    return found

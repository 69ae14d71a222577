"""Gradients of parameters as a captured backward leaves them, and how they reach autograd.

Autograd may keep what a backward returns as `.grad`, for as long as the job likes. Owns that a later replay never
changes a gradient that somebody still holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors as unflatten_dense_tensors
from torch.utils._python_dispatch import TorchDispatchMode

storage_users = torch._C._storage_Use_Count
ALIGNED = 64  # bytes


class UncopiedGradients:
    """Static gradients that are handed out without a copy.

    Before each replay, the number of users of their memory says whether somebody still holds one (gradients that
    accumulate, a hook that kept one). Then they are saved, and put back once the new ones are copied out.
    """

    def __init__(self, grads: Sequence[Tensor]):
        self._grads = list(grads)
        self._copies = Copies(grads)
        self._storages = [grad.untyped_storage()._cdata for grad in self._grads]
        self._baseline: list[int] | None = None

    def save(self) -> list[Tensor] | None:
        """Copies of the gradients if anybody holds one, else None. Call before a replay."""
        users = list(map(storage_users, self._storages))
        if users == self._baseline:
            return None
        if self._baseline is None:  # before the first replay nobody can hold any
            self._baseline = users
            return None
        if all(now <= baseline for now, baseline in zip(users, self._baseline, strict=True)):
            self._baseline = users
            return None
        return self._copies()

    def restore(self, saved: Sequence[Tensor]) -> None:
        """Give those who hold gradients their values back."""
        torch._foreach_copy_(self._grads, saved)


class GradientMemory:
    """Memory for a gradient of each parameter, outside of any graph's: what lies in a graph's, the temporaries of
    others may overwrite. A backward under `filling()` computes as much of it in place as it can.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        self._buffers = [
            torch.empty_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
            for parameter in parameters
        ]
        self._by_address = {buffer.data_ptr(): buffer for buffer in self._buffers if buffer.numel()}
        self._used: set[int] = set()  # addresses that the backward writes to

    def writing_in_place(self) -> TorchDispatchMode:
        """Context in which matrix products of a weight's shape are written here: most gradients by far are such."""
        return _MatmulInto(self._buffers, self._used)

    def release_unused(self) -> None:
        """Keep no more than what the backward writes to: some parameters may have no gradient in it."""
        self._buffers = [buffer for buffer in self._buffers if buffer.numel() and buffer.data_ptr() in self._used]
        self._by_address = {buffer.data_ptr(): buffer for buffer in self._buffers}

    def assign(
        self, input_grads: Sequence[Tensor | None], parameter_grads: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The gradients of inputs and of parameters after a backward: those of parameters here and all apart, those of
        inputs elsewhere.
        """
        free = dict(self._by_address)
        assigned: list[Tensor | None] = [None] * len(parameter_grads)
        for index, grad in enumerate(parameter_grads):
            if grad is not None and not grad.numel():
                assigned[index] = torch.empty_like(grad, memory_format=torch.contiguous_format)  # of no address
            elif grad is not None and grad.is_contiguous():
                buffer = free.get(grad.data_ptr())
                if buffer is not None and buffer.shape == grad.shape and buffer.dtype == grad.dtype:
                    assigned[index] = free.pop(grad.data_ptr())
        storages = {buffer.untyped_storage()._cdata for buffer in self._buffers}

        def clone_if_inside(grad: Tensor) -> Tensor:
            return grad.clone() if grad.untyped_storage()._cdata in storages else grad

        sources, targets = [], []
        for index, grad in enumerate(parameter_grads):
            if grad is not None and assigned[index] is None:
                assigned[index] = next(
                    buffer for buffer in free.values() if buffer.shape == grad.shape and buffer.dtype == grad.dtype
                )
                sources.append(clone_if_inside(grad))
                targets.append(free.pop(assigned[index].data_ptr()))
        self._used |= {grad.data_ptr() for grad in assigned if grad is not None}
        outside = [None if grad is None else clone_if_inside(grad) for grad in input_grads]
        if targets:
            torch._foreach_copy_(targets, sources)
        return outside, assigned


class _MatmulInto(TorchDispatchMode):
    """Gives matrix products a place that has their shape, each place once."""

    def __init__(self, buffers: Sequence[Tensor], used: set[int]):
        super().__init__()
        self._free = list(buffers)
        self._used = used

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation would import the compiler

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            left, right = args
            shape = (left.shape[0], right.shape[1])
            for index, buffer in enumerate(self._free):
                if buffer.shape == shape and buffer.dtype == left.dtype and buffer.device == left.device:
                    self._used.add(buffer.data_ptr())
                    return torch.ops.aten.mm.out(left, right, out=self._free.pop(index))
        return func(*args, **(kwargs or {}))


class Copies:
    """Makes contiguous copies of the same static gradients again and again; what can be known before is known.

    Those of one dtype share one allocation, as making tensors is what takes the time, if each begins where a vector
    load may begin, as in an allocation of its own: kernels round otherwise from other addresses.
    """

    def __init__(self, grads: Sequence[Tensor | None]):
        self._indices = [index for index, grad in enumerate(grads) if grad is not None]
        self._grads = [grads[index] for index in self._indices]
        self._template: list[Tensor | None] = [None] * len(grads)
        aligned = [index for index, grad in enumerate(self._grads) if grad.nbytes % ALIGNED == 0]
        self._separate = [index for index in range(len(self._grads)) if index not in aligned]
        self._grouped = []
        for dtype in dict.fromkeys(self._grads[index].dtype for index in aligned):
            group = [index for index in aligned if self._grads[index].dtype == dtype]
            group_grads = [self._grads[index] for index in group]
            self._grouped.append((group, group_grads, sum(grad.numel() for grad in group_grads)))

    def __call__(self) -> list[Tensor | None]:
        """Copies of what the gradients hold now, in order."""
        copies = self._template.copy()
        for group, group_grads, size in self._grouped:
            parts = unflatten_dense_tensors(group_grads[0].new_empty(size), group_grads)
            for index, part in zip(group, parts, strict=True):
                copies[self._indices[index]] = part
        for index in self._separate:
            copies[self._indices[index]] = torch.empty_like(self._grads[index], memory_format=torch.contiguous_format)
        if self._grads:
            torch._foreach_copy_([copies[index] for index in self._indices], self._grads)
        return copies


def reachable_leaves(output: Tensor, leaves: Sequence[Tensor]) -> set[int]:
    """Which of these leaves an output's history leads to, by their place."""
    indices = {id(leaf): index for index, leaf in enumerate(leaves)}
    if output.grad_fn is None:  # a leaf itself
        return {index for index, leaf in enumerate(leaves) if leaf is output}
    found, seen, stack = set(), set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) in indices:
            found.add(indices[id(node.variable)])
        stack += [next_node for next_node, _ in node.next_functions if next_node is not None]
    return found

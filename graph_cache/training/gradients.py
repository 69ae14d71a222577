"""Parameter gradients of a captured backward, and how they are returned to autograd.

Autograd may keep a returned gradient as `.grad` indefinitely. This file ensures that a later replay never changes a
gradient that is still referenced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors as unflatten_dense_tensors
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from graph_cache.guards.audit import storage_of
from graph_cache.guards.composites import Call, rewriting

storage_users = torch._C._storage_Use_Count
ALIGNED = 64  # bytes


class UncopiedGradients:
    """Static gradients that are returned without a copy.

    Before each replay, the use counts of their storages show whether one is still referenced (gradient accumulation, a
    hook that kept one, a job that holds the storage itself). If so, they are saved, and restored after the new ones are
    copied out.
    """

    def __init__(self, grads: Sequence[Tensor]):
        self._grads = list(grads)
        self._copies = Copies(grads)
        # A storage has one Python object, which counts as one user however often it is referenced.
        self._objects = [grad.untyped_storage() for grad in self._grads]
        self._storages = [storage._cdata for storage in self._objects]
        self._baseline: list[int] | None = None

    def save(self) -> list[Tensor | None] | None:
        """Return copies of the gradients if one is still referenced, else None. Call before a replay."""
        users = [*map(storage_users, self._storages), *map(sys.getrefcount, self._objects)]
        if users == self._baseline:
            return None
        if self._baseline is None:  # nothing is referenced before the first replay
            self._baseline = users
            return None
        if all(now <= baseline for now, baseline in zip(users, self._baseline, strict=True)):
            self._baseline = users
            return None
        return self._copies()

    def restore(self, saved: Sequence[Tensor | None]) -> None:
        """Restore the values of gradients that are still referenced."""
        torch._foreach_copy_(self._grads, saved)


class GradientMemory:
    """One gradient buffer per parameter. Not in graph memory: temporaries of other graphs could overwrite it there.

    A backward under `writing_in_place()` computes as many gradients as possible directly in these buffers.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        self._buffers = [
            torch.empty_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
            for parameter in parameters
        ]
        self._by_address = {buffer.data_ptr(): buffer for buffer in self._buffers if buffer.numel()}
        self._used: set[int] = set()  # addresses of buffers that the backward writes

    def writing_in_place(self) -> AbstractContextManager[None]:
        """Return a context in which GEMMs of a weight's shape write here; most gradients come from such a GEMM."""
        return rewriting(_MatmulInto(self._buffers, self._used))

    def release_unused(self) -> None:
        """Release the buffers that the backward doesn't write: some parameters may have no gradient in it."""
        self._buffers = [buffer for buffer in self._buffers if buffer.numel() and buffer.data_ptr() in self._used]
        self._by_address = {buffer.data_ptr(): buffer for buffer in self._buffers}

    def assign(
        self, input_grads: Sequence[Tensor | None], parameter_grads: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of inputs and parameters after a backward, copied where needed.

        Each parameter gradient gets a separate buffer. Input gradients never alias these buffers.
        """
        free = dict(self._by_address)
        assigned: list[Tensor | None] = [None] * len(parameter_grads)
        for index, grad in enumerate(parameter_grads):
            if grad is not None and not grad.numel():
                assigned[index] = torch.empty_like(grad, memory_format=torch.contiguous_format)  # has no address
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


class _MatmulInto:
    """Write matrix products into a buffer of their shape; use each buffer once."""

    def __init__(self, buffers: Sequence[Tensor], used: set[int]):
        self._free = list(buffers)
        self._used = used

    def __call__(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Call:
        """Return a matrix product into a free buffer in the place of a matrix product, and any other call as it is."""
        if func is not torch.ops.aten.mm.default:
            return func, args, kwargs
        left, right = args
        shape = (left.shape[0], right.shape[1])
        for index, buffer in enumerate(self._free):
            if buffer.shape == shape and buffer.dtype == left.dtype and buffer.device == left.device:
                self._used.add(buffer.data_ptr())
                return torch.ops.aten.mm.out, args, {"out": self._free.pop(index)}
        return func, args, kwargs


class Copies:
    """Make contiguous copies of the same static gradients repeatedly, with a layout computed once.

    Gradients of one dtype share one allocation, because creating tensors dominates the cost. Only gradients with sizes
    that keep the next one aligned for vector loads are grouped: kernels round differently at unaligned addresses.
    """

    def __init__(self, grads: Sequence[Tensor | None]):
        self._indices = [index for index, grad in enumerate(grads) if grad is not None]
        self._grads = [grad for grad in grads if grad is not None]
        self._template: list[Any] = [None] * len(grads)
        aligned = [index for index, grad in enumerate(self._grads) if grad.nbytes % ALIGNED == 0]
        self._separate = [index for index in range(len(self._grads)) if index not in aligned]
        self._grouped: list[tuple[list[int], list[Tensor], int]] = []
        for dtype in dict.fromkeys(self._grads[index].dtype for index in aligned):
            group = [index for index in aligned if self._grads[index].dtype == dtype]
            group_grads = [self._grads[index] for index in group]
            self._grouped.append((group, group_grads, sum(grad.numel() for grad in group_grads)))

    def __call__(self) -> list[Tensor | None]:
        """Return copies of the current gradients, in order."""
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


def history_of(outputs: Sequence[Tensor]) -> Iterator[Node]:
    """Yield the nodes of autograd that these tensors were computed by, each once."""
    seen: set[Node] = set()
    stack = [output.grad_fn for output in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
        yield node


def leaves_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that require a gradient and that the history of these outputs reaches."""
    leaves = [output for output in outputs if output.grad_fn is None and output.requires_grad]
    leaves += [node.variable for node in history_of(outputs) if hasattr(node, "variable")]  # accumulates into a leaf
    return list({id(leaf): leaf for leaf in leaves}.values())


MAX_USES = 16  # gradients of one tensor that are kept apart, each in memory of its size


class Uses:
    """Where the history of some outputs uses some tensors.

    A tensor that is used several times gets a gradient from each use, and autograd adds them in the order in which they
    arrive. The order matters in the last bits if the tensor gets gradients from elsewhere in the same backward.
    """

    def __init__(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]):
        indices = {_edge_to(tensor): index for index, tensor in enumerate(tensors)}
        self._places: list[tuple[Node, int, int]] = []  # node, position among its inputs, index of the tensor
        self.counts = [0] * len(tensors)
        for node in history_of(outputs):
            for position, (following, number) in enumerate(node.next_functions):
                variable = getattr(following, "variable", None)
                edge = (following, number) if variable is None else (id(variable), 0)
                if following is not None and edge in indices:
                    self._places.append((node, position, indices[edge]))
                    self.counts[indices[edge]] += 1

    @contextmanager
    def gradients(self) -> Iterator[list[list[Tensor]]]:
        """Yield, for each tensor, the gradients of its uses in the order in which a backward in the block adds them."""
        found: list[list[Tensor]] = [[] for _ in self.counts]

        def arrived(position: int, index: int, grads: Sequence[Tensor | None], _: Any) -> None:
            if (grad := grads[position]) is not None:
                found[index].append(grad)

        handles = [
            node.register_hook(functools.partial(arrived, position, index))
            for node, position, index in self._places
            if 1 < self.counts[index] <= MAX_USES
        ]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()


def _edge_to(tensor: Tensor) -> tuple[Any, int]:
    return (id(tensor), 0) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def saved_storages(outputs: Sequence[Tensor]) -> set[int]:
    """Return the addresses of the storages that the history of these tensors saves for a backward.

    Calls the hooks that unpack saved tensors, if there are any.
    """
    found: set[int] = set()
    for node in history_of(outputs):
        names = ["saved_tensors"] if hasattr(node, "saved_tensors") else _saved_names(type(node))
        for value in tree_leaves([getattr(node, name) for name in names]):
            storage = storage_of(value) if isinstance(value, Tensor) else None
            if storage is not None:
                found.add(storage._cdata)
    return found


def functions_of(outputs: Sequence[Tensor]) -> set[type]:
    """Return the classes of the autograd.Functions in the history of these tensors."""
    return {node._forward_cls for node in history_of(outputs) if hasattr(node, "_forward_cls")}  # noqa: SLF001


@functools.cache
def _saved_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_saved_")]

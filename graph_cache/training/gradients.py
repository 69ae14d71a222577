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
        self._unheld: list[int] | None = None

    def save(self) -> list[Tensor] | None:
        """Copies of the gradients if anybody holds one, else None. Call before a replay."""
        users = list(map(storage_users, self._storages))
        if users == self._unheld:
            return None
        if self._unheld is None:  # before the first replay nobody can hold any
            self._unheld = users
            return None
        if all(now <= unheld for now, unheld in zip(users, self._unheld, strict=True)):
            self._unheld = users
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
        self._places = [
            torch.empty_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
            for parameter in parameters
        ]
        self._at = {place.data_ptr(): place for place in self._places if place.numel()}
        self._used: set[int] = set()  # addresses that the backward writes to

    def filling(self) -> TorchDispatchMode:
        """Context in which matrix products of a weight's shape are written here: most gradients by far are such."""
        return _ProductsInto(self._places, self._used)

    def let_go_of_the_rest(self) -> None:
        """Keep no more than what the backward writes to: some parameters may have no gradient in it."""
        self._places = [place for place in self._places if place.numel() and place.data_ptr() in self._used]
        self._at = {place.data_ptr(): place for place in self._places}

    def settle(
        self, inputs: Sequence[Tensor | None], found: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The gradients of inputs and of parameters after a backward: those of parameters here and all apart, those of
        inputs elsewhere.
        """
        free = dict(self._at)
        settled: list[Tensor | None] = [None] * len(found)
        for index, grad in enumerate(found):
            if grad is not None and not grad.numel():
                settled[index] = torch.empty_like(grad, memory_format=torch.contiguous_format)  # of no address
            elif grad is not None and grad.is_contiguous():
                place = free.get(grad.data_ptr())
                if place is not None and place.shape == grad.shape and place.dtype == grad.dtype:
                    settled[index] = free.pop(grad.data_ptr())
        here = {place.untyped_storage()._cdata for place in self._places}

        def elsewhere(grad: Tensor) -> Tensor:
            return grad.clone() if grad.untyped_storage()._cdata in here else grad

        sources, targets = [], []
        for index, grad in enumerate(found):
            if grad is not None and settled[index] is None:
                settled[index] = next(
                    place for place in free.values() if place.shape == grad.shape and place.dtype == grad.dtype
                )
                sources.append(elsewhere(grad))
                targets.append(free.pop(settled[index].data_ptr()))
        self._used |= {grad.data_ptr() for grad in settled if grad is not None}
        outside = [None if grad is None else elsewhere(grad) for grad in inputs]
        if targets:
            torch._foreach_copy_(targets, sources)
        return outside, settled


class _ProductsInto(TorchDispatchMode):
    """Gives matrix products a place that has their shape, each place once."""

    def __init__(self, places: Sequence[Tensor], used: set[int]):
        super().__init__()
        self._free = list(places)
        self._used = used

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation would import the compiler

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            left, right = args
            shape = (left.shape[0], right.shape[1])
            for index, place in enumerate(self._free):
                if place.shape == shape and place.dtype == left.dtype and place.device == left.device:
                    self._used.add(place.data_ptr())
                    return torch.ops.aten.mm.out(left, right, out=self._free.pop(index))
        return func(*args, **(kwargs or {}))


class Copies:
    """Makes contiguous copies of the same static gradients again and again; what can be known before is known.

    Those of one dtype share one allocation, as making tensors is what takes the time, if each begins where a vector
    load may begin, as in an allocation of its own: kernels round otherwise from other addresses.
    """

    def __init__(self, grads: Sequence[Tensor | None]):
        self._places = [index for index, grad in enumerate(grads) if grad is not None]
        self._grads = [grads[index] for index in self._places]
        self._nothing: list[Tensor | None] = [None] * len(grads)
        even = [index for index, grad in enumerate(self._grads) if grad.nbytes % ALIGNED == 0]
        self._alone = [index for index in range(len(self._grads)) if index not in even]
        self._together = []
        for dtype in dict.fromkeys(self._grads[index].dtype for index in even):
            group = [index for index in even if self._grads[index].dtype == dtype]
            alike = [self._grads[index] for index in group]
            self._together.append((group, alike, sum(grad.numel() for grad in alike)))

    def __call__(self) -> list[Tensor | None]:
        """Copies of what the gradients hold now, in order."""
        copies = self._nothing.copy()
        for group, alike, size in self._together:
            parts = unflatten_dense_tensors(alike[0].new_empty(size), alike)
            for index, part in zip(group, parts, strict=True):
                copies[self._places[index]] = part
        for index in self._alone:
            copies[self._places[index]] = torch.empty_like(self._grads[index], memory_format=torch.contiguous_format)
        if self._grads:
            torch._foreach_copy_([copies[place] for place in self._places], self._grads)
        return copies


def reached(output: Tensor, leaves: Sequence[Tensor]) -> set[int]:
    """Which of these leaves an output's history leads to, by their place."""
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    if output.grad_fn is None:  # a leaf itself
        return {place for place, leaf in enumerate(leaves) if leaf is output}
    found, seen, waiting = set(), set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) in places:
            found.add(places[id(node.variable)])
        waiting += [following for following, _ in node.next_functions if following is not None]
    return found

"""Gradients of parameters as a captured backward leaves them, and how they reach autograd.

Autograd may keep what a backward returns as `.grad`, for as long as the job likes. Owns that a later replay never
changes a gradient that somebody still holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_users = torch._C._storage_Use_Count


class HandedOut:
    """Static gradients that are handed out without a copy.

    Before each replay, the number of users of their memory says whether somebody still holds one (gradients that
    accumulate, a hook that kept one). Then they are saved, and put back once the new ones are copied out.
    """

    def __init__(self, grads: Sequence[Tensor]):
        self._grads = list(grads)
        self._storages = [grad.untyped_storage()._cdata for grad in self._grads]
        self._unheld: list[int] | None = None

    def save(self) -> list[Tensor] | None:
        """Copies of the gradients if anybody holds one, else None. Call before a replay."""
        users = list(map(_users, self._storages))
        if users == self._unheld:
            return None
        if self._unheld is None:  # before the first replay nobody can hold any
            self._unheld = users
            return None
        if all(now <= unheld for now, unheld in zip(users, self._unheld, strict=True)):
            self._unheld = users
            return None
        return copies_of(self._grads)

    def restore(self, saved: Sequence[Tensor]) -> None:
        """Give those who hold gradients their values back."""
        torch._foreach_copy_(self._grads, saved)


def room_for(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Memory for a gradient of each parameter, outside of any graph's."""
    return [torch.empty_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
            for parameter in parameters]


def copies_of(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Contiguous copies; those of one dtype share one allocation, which is what takes the time."""
    found = [grad for grad in grads if grad is not None]
    if not found:
        return list(grads)
    copies = _empty_like(found)
    torch._foreach_copy_(copies, found)
    rest = iter(copies)
    return [None if grad is None else next(rest) for grad in grads]


def _empty_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
    # Each begins where a vector load may begin, as it would in an allocation of its own: kernels round otherwise from
    # other addresses.
    sizes = [-(-tensor.numel() * tensor.itemsize // 64) * 64 // tensor.itemsize for tensor in tensors]
    whole = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
    parts = whole.split_with_sizes(sizes)
    return [part[:tensor.numel()].view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

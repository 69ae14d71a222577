"""Save and restore the model state that warm-up and capture runs change.

This covers gradients, `main_grad` buffers, module buffers, Megatron's flags, and the tensors of the capture context.
All-zero `main_grad` buffers, as between two steps, are zeroed again instead of copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from graph_cache.training.parameter_aliases import ADDED, MAIN_GRAD

T = TypeVar("T")
# An argument of Transformer Engine's modules and a flag of Megatron's: weights have changed since the last call.
FIRST_MICROBATCH = "is_first_microbatch"


class PreservedState:
    """Context manager that restores modules and the tensors of `state` on exit, also after an error.

    `is_first_microbatch` is False inside, since gradients of a first microbatch overwrite `main_grad`. After exit,
    `added` holds the ids of parameters whose gradients were added to their `main_grad` inside.
    """

    def __init__(self, scopes: Iterable[nn.Module], state: Iterable[Tensor]):
        scopes = list(scopes)
        self.added: set[int] = set()
        self._parameters = _distinct(parameter for scope in scopes for parameter in scope.parameters())
        self._first_flagged = [
            module
            for module in _distinct(module for scope in scopes for module in scope.modules())
            if FIRST_MICROBATCH in vars(module)
        ]
        self._tensors = _distinct([*(buffer for scope in scopes for buffer in scope.buffers()), *state])

    @torch.no_grad()
    def __enter__(self) -> PreservedState:
        self._grads = [parameter.grad for parameter in self._parameters]
        self._values = [(tensor, tensor.clone()) for tensor in self._tensors]
        self._main_grads = [
            (main_grad, main_grad.clone() if main_grad.any() else None)
            for main_grad in (getattr(parameter, MAIN_GRAD, None) for parameter in self._parameters)
            if isinstance(main_grad, Tensor)
        ]
        self._added_flags = [
            (parameter, getattr(parameter, ADDED)) for parameter in self._parameters if hasattr(parameter, ADDED)
        ]
        self._first_flags = [vars(module)[FIRST_MICROBATCH] for module in self._first_flagged]
        for module in self._first_flagged:
            setattr(module, FIRST_MICROBATCH, False)
        for parameter in self._parameters:
            parameter.grad = None  # otherwise runs inside would accumulate into it in place
        for parameter, _ in self._added_flags:
            setattr(parameter, ADDED, False)
        return self

    @torch.no_grad()
    def __exit__(self, *exc_info: object) -> None:
        self.added = {id(parameter) for parameter, _ in self._added_flags if getattr(parameter, ADDED)}
        for module, before in zip(self._first_flagged, self._first_flags, strict=True):
            setattr(module, FIRST_MICROBATCH, before)
        for parameter, before in self._added_flags:
            setattr(parameter, ADDED, before)
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        for tensor, value in self._values:  # `.data` does not bump the version counter that autograd checks
            tensor.data.copy_(value)
        for main_grad, saved in self._main_grads:
            if saved is None:
                main_grad.data.zero_()
            else:
                main_grad.data.copy_(saved)


def _distinct(items: Iterable[T]) -> list[T]:
    return list({id(item): item for item in items}.values())

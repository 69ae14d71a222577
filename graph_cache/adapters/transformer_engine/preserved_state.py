"""State of a model that a capture's own runs change, and that training must find as it was.

Owns gradients, the buffers that they are added up in, running statistics, Megatron's flags, and what a job names. The
copies are made where there is something: between two steps buffers for gradients are zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from graph_cache.training.parameter_aliases import ADDED, MAIN_GRAD

Thing = TypeVar("Thing")
FIRST = "is_first_microbatch"  # "the weights are new": an argument of Transformer Engine's, and a flag of Megatron's


class PreservedState:
    """Context that leaves modules, and the tensors of `state`, as they were, however it ends.

    No microbatch is a first one inside, whose gradients would take the place of those in `main_grad`. `added` then
    holds the parameters whose gradients were added to their `main_grad` inside, by id.
    """

    def __init__(self, scopes: Iterable[nn.Module], state: Iterable[Tensor]):
        scopes = list(scopes)
        self.added: set[int] = set()
        self._parameters = _distinct(parameter for scope in scopes for parameter in scope.parameters())
        self._first = [
            module for module in _distinct(one for scope in scopes for one in scope.modules()) if FIRST in vars(module)
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
        self._flags = [
            (parameter, getattr(parameter, ADDED)) for parameter in self._parameters if hasattr(parameter, ADDED)
        ]
        self._were_first = [vars(module)[FIRST] for module in self._first]
        for module in self._first:
            setattr(module, FIRST, False)
        for parameter in self._parameters:
            parameter.grad = None  # or what runs inside would add to it in place
        for parameter, _ in self._flags:
            setattr(parameter, ADDED, False)
        return self

    @torch.no_grad()
    def __exit__(self, *exc_info: object) -> None:
        self.added = {id(parameter) for parameter, _ in self._flags if getattr(parameter, ADDED)}
        for module, before in zip(self._first, self._were_first, strict=True):
            setattr(module, FIRST, before)
        for parameter, before in self._flags:
            setattr(parameter, ADDED, before)
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        for tensor, value in self._values:  # by `.data`: to autograd this is no change of what was saved
            tensor.data.copy_(value)
        for main_grad, saved in self._main_grads:
            if saved is None:
                main_grad.data.zero_()
            else:
                main_grad.data.copy_(saved)


def _distinct(things: Iterable[Thing]) -> list[Thing]:
    return list({id(thing): thing for thing in things}.values())

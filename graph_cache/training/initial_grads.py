"""Gradients that exist when an iteration is captured, and which of them its graph reads."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from graph_cache.backends.base import Backend
from graph_cache.training.call import lacks_memory
from graph_cache.training.gradients import storage_users


class InitialGrads:
    """Gradients that exist before a capture, and those among them that replays read.

    The step gets an alias of each gradient, so that we notice when it drops one. The graph doesn't read a gradient that
    is dropped before anything was captured, so it is released at once: a step that clears gradients first frees their
    memory as in eager. All others are held, whether the step leaves them or consumes them, as an optimizer does before
    `zero_grad`.
    """

    def __init__(self, parameters: Sequence[Tensor], backend: Backend):
        # For each parameter [original gradient, gradient that the graph reads]; empty if it had none or it was freed.
        self._grads: list[tuple[Tensor, list[Tensor]]] = []
        self._weakrefs: list[weakref.ref[Tensor]] = []
        users: dict[int, int] = {}
        aliases: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by id of the gradient, which parameters may share
        for parameter in parameters:
            grad = parameter.grad
            if grad is None:
                self._grads.append((parameter, []))
                continue
            if id(grad) not in aliases:
                # A capture that executes adds to a copy of the gradients, so that a failed one can be undone.
                read = grad.detach().clone() if backend.capture_runs else grad
                aliases[id(grad)] = read.detach(), [grad, read]
                self._weakrefs.append(_watch_alias(*aliases[id(grad)], users, backend))
            parameter.grad, held = aliases[id(grad)]
            self._grads.append((parameter, held))
        for _, held in aliases.values():
            if not lacks_memory(held[-1]):
                users[_storage(held[-1])] = storage_users(_storage(held[-1]))

    def restore(self) -> None:
        """Undo a failed capture. Gradients that the step cleared before anything was captured stay cleared."""
        for parameter, held in self._grads:
            parameter.grad = held[0] if held else None

    def read(self) -> list[tuple[Tensor, Tensor]]:
        """Return the gradients that a graph may read, which must be loaded before every replay."""
        return [(parameter, held[-1]) for parameter, held in self._grads if held]


def _watch_alias(alias: Tensor, held: list[Tensor], users: dict[int, int], backend: Backend) -> weakref.ref[Tensor]:
    """Clear `held` when this alias is freed, unless a graph reads the memory by then or may later.

    `users` counts the known tensors of each storage. One more means that the step made another tensor of the gradient
    and may still read it.
    """
    if lacks_memory(held[-1]):  # users of its component tensors aren't counted: hold it
        return weakref.ref(alias)
    storage = _storage(held[-1])

    def dropped(_: weakref.ref[Tensor]) -> None:
        others = storage_users(storage) > users[storage]  # includes the alias that is being freed
        users[storage] -= 1
        if not others and not backend.has_captured():
            users[storage] -= 1
            held.clear()

    return weakref.ref(alias, dropped)


def _storage(grad: Tensor) -> int:
    """Return the address of the storage object."""
    return grad.untyped_storage()._cdata

"""Static inputs that several calls of one microbatch share, because all of them got the same tensor.

Masks, rotary tables and cu_seqlens go to every layer: one buffer holds them for all layers. A call shares a buffer only
while it gets the tensor that the others got, unchanged, so that their backwards read what their forwards read.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from graph_cache.training.replay_order import ReplayOrder
from graph_cache.utils.layout import copy_of


class SharedInput:
    """One static input of the calls at `indices`, and the tensor that was last copied into it."""

    __slots__ = ("_order", "_tensor", "_version", "indices", "static")

    def __init__(self, static: Tensor, order: ReplayOrder[Any, Any]):
        self.static = static
        self.indices: list[int] = []
        self._order = order
        self._tensor: weakref.ref[Tensor] | None = None
        self._version = -1

    def accepts(self, tensor: Tensor) -> bool:
        """Whether a call may copy `tensor` here: it is there already, or no call awaits its backward."""
        is_same = self._tensor is not None and self._tensor() is tensor and self._version == tensor._version
        return is_same or not any(self._order.awaits(index) for index in self.indices)

    def remember(self, tensor: Tensor) -> None:
        """Record that `tensor` is being copied here."""
        self._tensor, self._version = weakref.ref(tensor), tensor._version


class RecordedInputs:
    """The inputs of a microbatch's recorded calls, by tensor: calls that got the same tensor share one copy."""

    def __init__(self, order: ReplayOrder[Any, Any]):
        self._order = order
        self._found: dict[int, list[tuple[weakref.ref[Tensor], int, SharedInput]]] = {}

    def copy(self, tensor: Tensor, index: int) -> SharedInput:
        """Return a copy of an input of the call at `index`, shared with earlier calls that got it unchanged.

        Not shared: two arguments of one call, tensors with a gradient, and inference tensors, which count no changes.
        """
        if tensor.requires_grad or tensor.is_inference():
            return SharedInput(copy_of(tensor), self._order)
        found = self._found.setdefault(id(tensor), [])
        for reference, version, shared in found:
            if reference() is tensor and version == tensor._version and index not in shared.indices:
                break
        else:
            shared = SharedInput(copy_of(tensor), self._order)
            found.append((weakref.ref(tensor), tensor._version, shared))
        shared.indices.append(index)
        return shared

    def clear(self) -> None:
        """Forget the tensors: calls that are recorded later share nothing with earlier ones."""
        self._found = {}

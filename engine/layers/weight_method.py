"""Weight methods: how a linear layer stores its weight, computes with it, and takes checkpoint tensors.

A storage format is one class. Linear layers and experts call it; kernels dispatch on the `LinearWeight` that it gives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.kernels.linear_weight import LinearWeight
from engine.layers.plain_linear import linear
from engine.layers.weight_slot import Slot, WeightSlot


class Stored(NamedTuple):
    """The storage of a checkpoint tensor of a layer, and its dimensions that run along the layer's outputs and inputs.

    None: the tensor has no such dimension, so ranks that split the outputs, or the inputs, each store all of it.
    """

    slot: Slot
    output_dim: int | None
    input_dim: int | None


class WeightMethod(ABC):
    """A storage format of weights. Tensors are attributes of the layer, a module on which `create` registers them."""

    @abstractmethod
    def create(self, layer: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Register uninitialised storage of W on `layer`. Addresses never change afterwards.

        `shape` is [outputs, inputs], or [experts, outputs, inputs]. Raises ModelError for a shape or a device that the
        format doesn't support.
        """

    @abstractmethod
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + bias of x [T, inputs], in x's dtype."""

    def dense(self, layer: Any, dtype: torch.dtype) -> Tensor:
        """Return W in `dtype` for a step's own kernels: the stored tensor if it is plain, else a new one."""
        raise ModelError(f"weights of format {self.linear_weight(layer).format!r} can't be read as plain tensors")

    @abstractmethod
    def linear_weight(self, layer: Any) -> LinearWeight:
        """Return the weight as kernels read it."""

    @abstractmethod
    def slots(self, layer: Any, start: int, rows: int, expert: int | None = None) -> dict[str, Stored]:
        """Map the last part of checkpoint names ("weight", "weight_scale") to the storage of some rows of W.

        The rows are `rows` outputs from `start` on, of one expert in a layer with experts.
        """


class PlainWeight(WeightMethod):
    """One number per weight, in the layer's dtype: the parameter `weight`."""

    def create(self, layer: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        layer.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, layer.weight, bias)

    def dense(self, layer: Any, dtype: torch.dtype) -> Tensor:
        return layer.weight

    def linear_weight(self, layer: Any) -> LinearWeight:
        return LinearWeight.plain(layer.weight)

    def slots(self, layer: Any, start: int, rows: int, expert: int | None = None) -> dict[str, Stored]:
        weight = layer.weight if expert is None else layer.weight[expert]
        return {"weight": Stored(WeightSlot(weight, start, rows), 0, 1)}


PLAIN = PlainWeight()

WeightMethods = Callable[[str, Mapping[str, int], int], WeightMethod]
"""Chooses the method of a layer: from the prefix of its checkpoint names, the sizes of its parts, and its inputs.

The sizes are per rank.
"""


def plain_weights(prefix: str, parts: Mapping[str, int], inputs: int) -> WeightMethod:
    """Choose PLAIN for every layer."""
    return PLAIN

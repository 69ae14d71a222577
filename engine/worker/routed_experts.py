"""The experts of a step's tokens, written inside its graphs, for a trainer that replays the routing."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.layers.moe import MoE
from engine.models.interface import Model


class RoutedExperts:
    """One static buffer int16 [rows, L, k]: per token of a step, its k experts in each of the L layers with experts.

    A layer writes its column in each step, graph or eager. The next step overwrites the rows, so copy those wanted.
    """

    def __init__(self, layers: list[MoE], rows: int):
        self.top_k = layers[0].router.top_k
        device = layers[0].router.weight.device
        self.buffer = torch.zeros(rows, len(layers), self.top_k, dtype=torch.int16, device=device)
        for index, layer in enumerate(layers):
            layer.recorded = self.buffer[:, index]

    @property
    def shape(self) -> tuple[int, int]:
        """L and k."""
        return self.buffer.shape[1], self.top_k

    def rows(self, index: Tensor) -> Tensor:
        """Return a copy of the rows of the last step at `index`, int64 [n]."""
        return self.buffer.index_select(0, index)

    def span(self, start: int, length: int) -> Tensor:
        """Return a copy of the rows [start, start + length) of the last step."""
        return self.buffer[start : start + length].clone()


def record_experts(model: Model, rows: int) -> RoutedExperts:
    """Make the layers of a model record the experts of up to `rows` tokens per step.

    Raises ConfigError if no layer has experts.
    """
    layers = [module for module in model.module.modules() if isinstance(module, MoE)]
    if not layers:
        raise ConfigError(
            f"enable_return_routed_experts: {model.config.architecture} has no layer with experts whose router the "
            "engine runs; leave it off"
        )
    return RoutedExperts(layers, rows)

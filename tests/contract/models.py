"""Small real models for the contract suite."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 64


class Net(nn.Module):
    """Residual blocks with a norm, an activation and an attention-like softmax: several kernels and views."""

    def __init__(self, layers: int = 3):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(layers))

    def block(self, index: int, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.ups[index](self.norms[index](x)).chunk(2, dim=-1)
        return x + self.downs[index](torch.softmax(gate, dim=-1) * torch.tanh(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.ups)):
            x = self.block(index, x)
        return x


def net(device: torch.device, layers: int = 3) -> Net:
    """Return a network in eval mode whose parameters require no grad."""
    return Net(layers).to(device).eval().requires_grad_(False)

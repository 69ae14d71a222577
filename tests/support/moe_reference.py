"""An independent mixture-of-experts reference: a Python loop over tokens and their experts, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def experts_reference(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return float64 [T, h] on the CPU; entries with a negative expert add nothing."""
    x, weights, gate_up, down = (tensor.cpu().double() for tensor in (x, weights, gate_up, down))
    out = torch.zeros_like(x)
    for token, choices in enumerate(experts.tolist()):
        for choice, expert in enumerate(choices):
            if expert >= 0:
                gate, up = (gate_up[expert] @ x[token]).chunk(2)
                out[token] += weights[token, choice] * (down[expert] @ (gate * torch.sigmoid(gate) * up))
    return out


def random_experts(
    experts: int, hidden: int, width: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Return gate_up [E, 2I, h] and down [E, h, I] whose outputs are about as large as their inputs."""
    gate_up = torch.randn(experts, 2 * width, hidden) * (2 / hidden**0.5)
    down = torch.randn(experts, hidden, width) * (2 / width**0.5)
    return gate_up.to(device, dtype), down.to(device, dtype)


def random_routing(tokens: int, experts: int, top_k: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Return weights float32 [T, k] and distinct experts int64 [T, k] per token."""
    weights, chosen = torch.rand(tokens, experts).softmax(-1).topk(top_k)
    return weights.to(device), chosen.to(device)

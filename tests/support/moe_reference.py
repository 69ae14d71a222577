"""An independent mixture-of-experts reference: a Python loop over tokens and their experts, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def experts_reference(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """Return float64 [T, h] on the CPU; entries with a negative expert add nothing.

    With a limit, the activation is gpt-oss's: (min(max(up, -limit), limit) + 1) * g * sigmoid(alpha g), g = min(gate,
    limit); else silu(gate) * up.
    """
    x, weights, gate_up, down = (tensor.cpu().double() for tensor in (x, weights, gate_up, down))
    in_bias = torch.zeros(gate_up.shape[:2]).double() if gate_up_bias is None else gate_up_bias.cpu().double()
    out_bias = torch.zeros(down.shape[:2]).double() if down_bias is None else down_bias.cpu().double()
    out = torch.zeros_like(x)
    for token, choices in enumerate(experts.tolist()):
        for choice, expert in enumerate(choices):
            if expert >= 0:
                gate, up = (gate_up[expert] @ x[token] + in_bias[expert]).chunk(2)
                if limit is not None:
                    gate, up = torch.minimum(gate, torch.tensor(limit)), up.clip(-limit, limit) + 1
                hidden = gate / (1 + torch.exp(-alpha * gate)) * up
                out[token] += weights[token, choice] * (down[expert] @ hidden + out_bias[expert])
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

"""Activation functions of MLPs, by the names that a model's config uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import cpu_library


def relu_squared(x: Tensor) -> Tensor:
    """Return max(x, 0)²."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": relu_squared,
}
"""Functions by their name in Hugging Face's config.json."""


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, both [T, N]."""
    if gate.dim() == 2 and cpu_library.computes_bfloat16(gate):
        return cpu_library.silu_mul(gate, up)
    return F.silu(gate) * up


def gated(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function (gate, up) -> act(gate) * up of the activation `name`."""
    act = ACTIVATIONS[name]
    return silu_mul if act is F.silu else lambda gate, up: act(gate) * up


ALIASES = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}
"""Other names of the same functions."""


@dataclass(frozen=True, kw_only=True)
class GatedActivation:
    """The activation of a gated MLP: (gate, up) -> the input of its last GEMM, all of one shape.

    - limit None: silu(gate) * up.
    - else: gate * sigmoid(alpha * gate) * (up + 1), with gate at most `limit` and up within ± `limit` (gpt-oss).
    """

    limit: float | None = None
    alpha: float = 1.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.limit is None:
            return silu_mul(gate, up)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


SWIGLU = GatedActivation()
"""silu(gate) * up."""

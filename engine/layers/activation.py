"""Activation functions of gated MLPs, by the names that a model's config uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
"""Functions by their name in Hugging Face's config.json."""

ALIASES = {"swish": "silu"}
"""Other names of the same functions."""

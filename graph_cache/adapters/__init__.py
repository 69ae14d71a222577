"""Adapters from the capture core to external frameworks. Each framework is imported only by its own adapter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # settings of an adapter are read without torch
    from torch import nn


def is_megatron(model: nn.Module) -> bool:
    """Return whether the model contains Megatron-Core modules. If it does, Megatron is already imported."""
    return any(kind.__module__.startswith("megatron.") for module in model.modules() for kind in type(module).__mro__)

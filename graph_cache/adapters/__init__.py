"""Adapters of the capture core to other people's systems: each is the sole importer of its own."""

from __future__ import annotations

from torch import nn


def is_megatron(model: nn.Module) -> bool:
    """Whether a model has modules of Megatron-Core, which then is imported already."""
    return any(kind.__module__.startswith("megatron.") for module in model.modules() for kind in type(module).__mro__)

"""Ambient state of Megatron modules during a capture: selective recompute is off."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

# Flags that make a module drop activations and recompute them in its backward. The recompute runs a nested backward,
# which can't be captured. It would save nothing: activations saved by a captured part keep their memory anyway.
RECOMPUTE_FLAGS = (
    "recompute_input_layernorm",
    "recompute_pre_mlp_layernorm",
    "recompute_mlp",
    "recompute_up_proj",
    "recompute_norm_out",
    "checkpoint_core_attention",
    "moe_layer_recompute",
    "shared_experts_recompute",
    "activation_recompute",
)


class SelectiveRecompute:
    """`AmbientState` that disables selective recompute in captures."""

    def of(self, modules: Sequence[nn.Module]) -> Hashable:
        return None

    @contextmanager
    def recreate(self, modules: Sequence[nn.Module], seen: Hashable) -> Iterator[None]:
        enabled = [(module, name) for module in modules for name in RECOMPUTE_FLAGS if vars(module).get(name)]
        for module, name in enabled:
            setattr(module, name, False)
        try:
            yield
        finally:
            for module, name in enabled:
                setattr(module, name, True)

    def watch(self, modules: Sequence[nn.Module]) -> Callable[[], bool]:
        return lambda: True

    def replaying(self, modules: Sequence[nn.Module]) -> None:
        """Nothing to update."""

    def replayed(self, modules: Sequence[nn.Module]) -> None:
        """Nothing to apply."""

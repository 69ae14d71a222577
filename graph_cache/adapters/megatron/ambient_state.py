"""What surrounds calls of Megatron's modules and a capture must have as it was, or otherwise: precision, recompute."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from torch import nn

from graph_cache.training.attached import AmbientState

# By these a module throws away what its backward needs and computes it anew there, by a backward inside the backward
# that no graph can hold. All that a captured part saves has memory of its own for good: nothing is left to be won.
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


class MegatronAmbientState:
    """`AmbientState` that leave selective recompute out of captures; `precision` is Transformer Engine's, if any."""

    def __init__(self, precision: AmbientState | None):
        self._precision = precision

    def of(self, modules: Sequence[nn.Module]) -> Hashable:
        return None if self._precision is None else self._precision.of(modules)

    @contextmanager
    def recreate(self, modules: Sequence[nn.Module], seen: Hashable) -> Iterator[None]:
        enabled = [(module, name) for module in modules for name in RECOMPUTE_FLAGS if vars(module).get(name)]
        for module, name in enabled:
            setattr(module, name, False)
        try:
            with nullcontext() if self._precision is None else self._precision.recreate(modules, seen):
                yield
        finally:
            for module, name in enabled:
                setattr(module, name, True)

    def replaying(self, modules: Sequence[nn.Module]) -> None:
        if self._precision is not None:
            self._precision.replaying(modules)

    def watch(self, modules: Sequence[nn.Module]) -> Callable[[], bool]:
        return (lambda: True) if self._precision is None else self._precision.watch(modules)

    def replayed(self, modules: Sequence[nn.Module]) -> None:
        if self._precision is not None:
            self._precision.replayed(modules)

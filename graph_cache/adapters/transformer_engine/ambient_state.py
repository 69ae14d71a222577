"""Ambient state for Encore's own graphs of Transformer Engine modules: the autocast, with or without fp8 weight cache.

The autocast is global state; a capture runs under the autocast that was recorded with its call. The state includes
which module is first in the autocast region: the backward of that module updates all scales, in its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

from graph_cache.adapters.transformer_engine.quantizers import Quantizers

FIRST_MICROBATCH = "is_first_microbatch"  # Megatron sets it on modules to requantize cached weights
CACHE_DISABLED = "disable_parameter_transpose_cache"


@dataclass(frozen=True)
class AutocastState:
    """Autocast state in a call's key. Recipes are compared by value, since Megatron creates a new one for each call."""

    recipe: str
    group: Any
    is_first: bool
    state: tuple = field(compare=False)


class Fp8AmbientState:
    """`AmbientState` of parts with Transformer Engine modules. Not thread-safe."""

    def __init__(self) -> None:
        # Captured weight casts read this tensor to decide whether to skip. Create it before the first capture: creating
        # it inside would capture its initialization.
        State.set_skip_fp8_weight_update_tensor(False)
        self._skipping = False

    def of(self, modules: Sequence[nn.Module]) -> AutocastState | None:
        if not State.is_fp8_enabled():
            return None
        state = State.get_autocast_state()
        return AutocastState(
            str(State.get_fp8_recipe()), State.get_fp8_group(), State.quantization_state.is_first_fp8_module, state
        )

    @contextmanager
    def recreate(self, modules: Sequence[nn.Module], seen: Any) -> Iterator[None]:
        quantization = State.quantization_state
        state, tensor = State.get_autocast_state(), quantization.skip_fp8_weight_update_tensor
        flags = [(module, getattr(module, FIRST_MICROBATCH)) for module in modules if hasattr(module, FIRST_MICROBATCH)]
        if seen is not None:
            State.set_autocast_state(seen.state)
        if seen is None or not self._caching_modules(modules):
            quantization.skip_fp8_weight_update_tensor = None  # while set, captured casts use the cache
        try:
            yield
        finally:
            quantization.skip_fp8_weight_update_tensor = tensor
            State.set_autocast_state(state)
            for module, flag in flags:
                setattr(module, FIRST_MICROBATCH, flag)

    def replaying(self, modules: Sequence[nn.Module]) -> None:
        """Cast weights in a first microbatch; use the cached ones in the others."""
        if State.is_fp8_enabled():
            caching = self._caching_modules(modules)
            if caching:
                self._set_skip(not any(getattr(module, FIRST_MICROBATCH) for module in caching))

    def watch(self, modules: Sequence[nn.Module]) -> Callable[[], bool]:
        """Watch scales, quantizers and cached weights, which another recipe replaces."""
        return Quantizers(modules).are_current

    def replayed(self, modules: Sequence[nn.Module]) -> None:
        """Mark the region's first module as done and its weights as cached, as a call does."""
        if State.is_fp8_enabled():
            State.quantization_state.is_first_fp8_module = False
        for module in self._caching_modules(modules):
            setattr(module, FIRST_MICROBATCH, False)

    def _caching_modules(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        return [
            module
            for module in modules
            if hasattr(module, FIRST_MICROBATCH) and not getattr(module, CACHE_DISABLED, False)
        ]

    def _set_skip(self, skip: bool) -> None:
        """Set whether captured casts skip. Does nothing if unchanged, to avoid a kernel launch."""
        if self._skipping != skip:
            State.set_skip_fp8_weight_update_tensor(skip)
            self._skipping = skip

"""Ambient state for Encore's own graphs of Transformer Engine modules: the autocast, with or without fp8 weight cache.

The autocast is global state; a capture runs under the autocast that was recorded with its call. The state includes
which module is first in the autocast region: the backward of that module updates all scales, in its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

from graph_cache.guards.library_state import precision_autocast, weight_update_flag
from graph_cache.guards.quantizers import Quantizers, refuse_new_quantizers

FIRST_MICROBATCH = "is_first_microbatch"  # Megatron sets it on modules to requantize cached weights
CACHE_DISABLED = "disable_parameter_transpose_cache"


@dataclass(frozen=True)
class AutocastState:
    """Autocast state in a call's key."""

    autocast: Hashable  # recipe and group
    is_first: bool
    state: tuple = field(compare=False)


class Fp8AmbientState:
    """`AmbientState` of parts with Transformer Engine modules. Not thread-safe."""

    def __init__(self) -> None:
        # Captured casts of cached weights read it; 1 skips them. Our own, since other users of the process set theirs.
        self._skips = torch.zeros(1, device="cuda")
        self._skipping = False

    def of(self, modules: Sequence[nn.Module]) -> AutocastState | None:
        autocast = precision_autocast()
        if autocast is None:
            return None
        return AutocastState(autocast, State.quantization_state.is_first_fp8_module, State.get_autocast_state())

    @contextmanager
    def recreate(self, modules: Sequence[nn.Module], seen: Any) -> Iterator[None]:
        state = State.get_autocast_state()
        flags = [(module, getattr(module, FIRST_MICROBATCH)) for module in modules if hasattr(module, FIRST_MICROBATCH)]
        # A capture may run inside another call's autocast.
        State.set_autocast_state((False, False, *state[2:]) if seen is None else seen.state)
        caches_weights = seen is not None and bool(self._caching_modules(modules))
        try:
            capturing = torch.cuda.is_current_stream_capturing()
            with (
                weight_update_flag(self._skips if caches_weights else None),
                refuse_new_quantizers(modules if capturing else []),
            ):
                yield
        finally:
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
            self._skips.fill_(skip)
            self._skipping = skip

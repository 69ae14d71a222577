"""Transformer Engine's precision around modules that are captured by our own graphs, with fp8 weights cached or not.

Its autocast is a state of the process; a capture runs under the one that its call was recorded under. Which module is
the first of an autocast's region is part of it: that one's backward updates the scales of all, in its graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

from graph_cache.adapters.transformer_engine.quantizers import Quantizers

FIRST = "is_first_microbatch"  # what Megatron sets on modules whose cached fp8 weights are to be made anew
UNCACHED = "disable_parameter_transpose_cache"


@dataclass(frozen=True)
class Around:
    """An autocast as `around` of a call's key: recipes are compared by what they say, Megatron makes one each time."""

    recipe: str
    group: Any
    is_first: bool
    state: tuple = field(compare=False)


class Fp8AmbientState:
    """`AmbientState` of parts with modules of Transformer Engine. One thread calls it."""

    def __init__(self) -> None:
        # The tensor that captured casts of weights ask whether to skip them: there before the first capture, in which
        # nothing may be launched that isn't a part of what is captured.
        State.set_skip_fp8_weight_update_tensor(False)
        self._skipping = False

    def of(self, modules: Sequence[nn.Module]) -> Around | None:
        if not State.is_fp8_enabled():
            return None
        state = State.get_autocast_state()
        return Around(
            str(State.get_fp8_recipe()), State.get_fp8_group(), State.quantization_state.is_first_fp8_module, state
        )

    @contextmanager
    def recreate(self, modules: Sequence[nn.Module], seen: Any) -> Iterator[None]:
        quantization = State.quantization_state
        state, tensor = State.get_autocast_state(), quantization.skip_fp8_weight_update_tensor
        flags = [(one, getattr(one, FIRST)) for one in modules if hasattr(one, FIRST)]
        if seen is not None:
            State.set_autocast_state(seen.state)
        if seen is None or not self._cache_weights(modules):
            quantization.skip_fp8_weight_update_tensor = None  # while it is there, casts in captures take a cache
        try:
            yield
        finally:
            quantization.skip_fp8_weight_update_tensor = tensor
            State.set_autocast_state(state)
            for one, flag in flags:
                setattr(one, FIRST, flag)

    def replaying(self, modules: Sequence[nn.Module]) -> None:
        """Weights of a first microbatch are cast anew, those of the others are in the cache."""
        if State.is_fp8_enabled():
            cached = self._cache_weights(modules)
            if cached:
                self._skip(not any(getattr(one, FIRST) for one in cached))

    def watch(self, modules: Sequence[nn.Module]) -> Callable[[], bool]:
        """Scales, quantizers and cached weights, which another recipe would replace."""
        return Quantizers(modules).are_current

    def replayed(self, modules: Sequence[nn.Module]) -> None:
        """As a call does: the region's first module has been, and its weights are in the cache."""
        if State.is_fp8_enabled():
            State.quantization_state.is_first_fp8_module = False
        for one in self._cache_weights(modules):
            setattr(one, FIRST, False)

    def _cache_weights(self, modules: Sequence[nn.Module]) -> list[nn.Module]:
        return [one for one in modules if hasattr(one, FIRST) and not getattr(one, UNCACHED, False)]

    def _skip(self, skip: bool) -> None:
        """Tell the captured casts, where they aren't told already: it is a launch."""
        if self._skipping != skip:
            State.set_skip_fp8_weight_update_tensor(skip)
            self._skipping = skip

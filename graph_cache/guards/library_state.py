"""Process-wide state of Transformer Engine that decides what a capture holds. Empty until it is imported."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

PACKAGE = "transformer_engine"


def _precision() -> Any:
    """Return Transformer Engine's manager of the precision, or None."""
    library = sys.modules.get(f"{PACKAGE}.pytorch.quantization")
    return getattr(library, "FP8GlobalStateManager", None)


def precision_autocast() -> Hashable:
    """Return the recipe and process group of the current `transformer_engine.pytorch.autocast`; None outside of one.

    Recipes are compared by value, since some libraries create one for each call.
    """
    manager = _precision()
    if manager is None or not (manager.is_fp8_enabled() or manager.is_fp8_calibration()):
        return None
    return str(manager.get_fp8_recipe()), manager.get_fp8_group(), manager.is_fp8_calibration()


@contextmanager
def weight_update_flag(flag: Tensor | None) -> Iterator[None]:
    """Set the tensor that captured casts of weights read within the block; None: they cast at every replay.

    Transformer Engine keeps one per process, and reads it in captures alone. A capture with cached weights sets it. If
    it stayed set, graphs captured later would skip their casts whenever the other graphs do, and replay old weights.
    """
    manager = _precision()
    if manager is None:
        yield
        return
    state = manager.quantization_state
    before = state.skip_fp8_weight_update_tensor
    state.skip_fp8_weight_update_tensor = flag
    try:
        yield
    finally:
        state.skip_fp8_weight_update_tensor = before


def is_of_transformer_engine(module: nn.Module) -> bool:
    """Whether this module is Transformer Engine's, or of a class that derives from one of its."""
    return any(base.__module__.partition(".")[0] == PACKAGE for base in type(module).__mro__)

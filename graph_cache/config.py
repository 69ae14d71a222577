"""Settings that select what is captured, and at which granularity. Validated at construction.

Frameworks with other names map them onto these; see `adapters/megatron/config.py`. Pure Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph_cache.errors import GraphConfigError
from graph_cache.utils.validation import NamesFields, did_you_mean, is_whole_number

INFERENCE_SCOPES = ("none", "layer", "block")
DEFAULT_SHARE = 0.002  # an eager decode step takes 16 ms of Python, a replay 0.7
TRAINING_CAPTURES = ("none", "native", "transformer_engine", "iteration")


@dataclass(frozen=True, kw_only=True)
class GraphConfig(NamesFields):
    """Select which graphs are captured.

    Args:
        inference_scope: `block` captures one graph per step, `layer` one per layer, `none` no graphs.
        training_captures: `native` captures modules or whole iterations with this package, `iteration` whole
            iterations only, `transformer_engine` layers with Transformer Engine, `none` nothing.
        modules: Names of the parts of a layer that a training capture covers. Empty: the whole layer.
        warmup_steps: Eager training steps before a capture. Inference warms up within each capture.
        shadow_check_share: Share of the time in which replays are compared with eager runs, from 0 to 1, after the
            first comparison of each graph. 0: replays are never compared. See `shadow.py`.

    Raises GraphConfigError for an invalid value.
    """

    inference_scope: str = "block"
    training_captures: str = "native"
    modules: tuple[str, ...] = ()
    warmup_steps: int = 3
    shadow_check_share: float = DEFAULT_SHARE

    def __post_init__(self) -> None:
        _check_choice("inference_scope", self.inference_scope, INFERENCE_SCOPES)
        _check_choice("training_captures", self.training_captures, TRAINING_CAPTURES)
        modules = self.modules
        if (
            isinstance(modules, str)
            or not isinstance(modules, Sequence)
            or not all(isinstance(name, str) and name for name in modules)
        ):
            raise GraphConfigError(f"modules is {modules!r}: give a sequence of names, empty for whole layers")
        object.__setattr__(self, "modules", tuple(dict.fromkeys(modules)))
        if not is_whole_number(self.warmup_steps, 0):
            raise GraphConfigError(f"warmup_steps is {self.warmup_steps!r}: give a whole number, 0 or more")
        share = self.shadow_check_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise GraphConfigError(f"shadow_check_share is {share!r}: give a number from 0 to 1")

    @property
    def captures_inference(self) -> bool:
        """Whether inference uses graphs."""
        return self.inference_scope != "none"


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise GraphConfigError(f"{name} is {value!r}: give one of {', '.join(known)}{did_you_mean(value, known)}")

"""Interface for capturing a plan as graphs. Transformer Engine implements it on a GPU; tests implement it on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class Precision:
    """Transformer Engine's autocast at a call. `recipe` and the amax reduction `group` apply if enabled."""

    enabled: bool = False
    recipe: Any = None
    group: Any = None


@dataclass(frozen=True)
class CapturePlan:
    """Input of a capture.

    `modules`: the layers of all chunks. `enabled`: whether each layer runs in reduced precision. `samples`: static
    inputs by keyword for each layer and microbatch, ordered by chunk, microbatch, layer.
    """

    modules: tuple[nn.Module, ...]
    layers_per_chunk: list[int]
    order: list[float]
    samples: list[dict[str, Tensor]]
    enabled: tuple[bool, ...]
    precision: Precision
    caches_weights: bool


class GraphSet(Protocol):
    """The captured graphs of a plan."""

    engine: str
    nbytes: int
    calls: Sequence[Callable[..., Any]]
    """One callable per sample of the plan. Takes the sample's keywords, and `is_first_microbatch` (whether weights are
    new) if weights are cached. Copies inputs that are not already static, replays, and returns the module's output
    tensors in static memory, as outputs of one autograd node. Its `backward_dw()` replays the weight gradients."""

    def are_current(self) -> bool:
        """Return whether the modules still use the state that the graphs read (quantizers, cached weights)."""

    def close(self) -> None:
        """Destroy the graphs and free their memory."""


class Maker(Protocol):
    """Captures plans and reports Transformer Engine's precision."""

    def make(self, plan: CapturePlan) -> GraphSet:
        """Capture the plan and restore the generators. Raises CaptureError after releasing everything.

        Warm-up runs before the capture add gradients and change buffers; the caller restores the model's state.
        """

    def accumulators(self, parameters: Iterable[Tensor]) -> dict[Tensor, Any]:
        """Create AccumulateGrad nodes that are safe in a capture, for parameters that have none now.

        Autograd reuses a node while it is alive. A node created by a training step is on the step's stream and would
        break a capture while that step's loss, or a later one that reuses the node, is held.
        """

    def precision(self) -> Precision | None:
        """Return the current precision; None while calibrating, which can't be captured."""

    def update_weights(self, are_new: bool) -> None:
        """Set whether subsequent replays quantize their weights or use the cached ones."""

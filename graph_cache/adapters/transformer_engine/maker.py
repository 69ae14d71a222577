"""What makes graphs of a plan. Transformer Engine does on a GPU; whatever else does must keep the same contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn


@dataclass(frozen=True)
class Precision:
    """Transformer Engine's autocast around a call; `recipe` and the amax reduction `group` apply when enabled."""

    enabled: bool = False
    recipe: Any = None
    group: Any = None


@dataclass(frozen=True)
class CapturePlan:
    """Everything that a capture is of.

    `modules` are the layers of all chunks, `enabled` says for each whether its precision is reduced, `samples` are the
    static inputs of each of them in each microbatch, by keyword: chunk, microbatch, layer.
    """

    modules: tuple[nn.Module, ...]
    layers_per_chunk: list[int]
    order: list[float]
    samples: list[dict[str, Tensor]]
    enabled: tuple[bool, ...]
    precision: Precision
    caches_weights: bool


class GraphSet(Protocol):
    """The graphs of a plan."""

    engine: str
    nbytes: int
    calls: Sequence[Callable[..., Any]]
    """One for each of the plan's samples: takes its keywords, and `is_first_microbatch` (whether weights are new) where
    weights are cached; copies what is not there already, replays, and returns the tensors that the module did, from
    static memory, as outputs of one node of autograd. `backward_dw()` of it replays the weight gradients."""

    def are_current(self) -> bool:
        """Whether what the graphs read beside parameters and inputs is still what the modules use."""

    def close(self) -> None:
        """Destroy the graphs and give their memory back."""


class Maker(Protocol):
    """Captures by its own ways, at the caller's word alone."""

    def make(self, plan: CapturePlan) -> GraphSet:
        """Capture all of it, with generators as before. Raises CaptureError; then nothing is left of it.

        What it runs before the capture adds gradients and changes buffers: the caller puts back what is the model's.
        """

    def accumulators(self, parameters: Iterable[Tensor]) -> dict[Tensor, Any]:
        """New nodes of autograd that add up gradients, such as a capture may hold, for parameters that have none now.

        While one is kept, all steps go by it. One that a step made would break a capture for as long as that step's
        loss is held, and the next step's, which goes by it too.
        """

    def precision(self) -> Precision | None:
        """That of a call made now; None while calibrating, which no graph does."""

    def update_weights(self, are_new: bool) -> None:
        """Whether graphs that replay from here on quantize their weights, or use what they have cached."""

"""What a model keeps for each slot beside tokens and pages, such as recurrent states or the slot's adapter.

Slot s is entry s + 1. Entry 0 belongs to padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from engine.protocol.slot_assignment import SlotAssignment
from graph_cache.core.shadow import WrittenMemory


class StepRows(NamedTuple):
    """The sequences of a step's tokens, as int64 tensors on the device.

    A step has C chunks of consecutive tokens, each of another sequence. In a decode step every row is a chunk of one
    token.

    - entries [C]: each chunk's entry; 0 for padding.
    - ends [C]: number of tokens of the step up to each chunk's end. A padding chunk has no tokens. None in a decode
      step.
    - chunk_of [T]: the chunk of each token, -1 for padding tokens. None in a decode step.
    """

    entries: Tensor
    ends: Tensor | None = None
    chunk_of: Tensor | None = None

    def entry_of_tokens(self) -> Tensor:
        """Return the entry of each token, int64 [T]; 0 for padding tokens."""
        if self.chunk_of is None:
            return self.entries
        return F.pad(self.entries, (1, 0)).index_select(0, self.chunk_of + 1)


class ModelState:
    """The state of a model's slots. Created by `Model.make_state`; this one keeps nothing.

    The runner of each rank calls `assign` on the host before a step, and a step calls `begin` and `context` on the
    device. Those two are captured: they read and write only `tensors`, and no values on the host.
    """

    joins_phases = True
    """Whether decodes may run in one packed step with prompt chunks."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that steps read by address. They never move."""
        return {}

    def assign(self, slots: Sequence[SlotAssignment]) -> None:
        """Enqueue what makes these slots ready for their new requests, before the first step that has them."""

    def begin(self, rows: StepRows) -> None:
        """Prepare a step, once, before its embedding."""

    def context(self, rows: StepRows) -> dict[str, Any]:
        """Return keyword arguments of ForwardContext. With a graph per layer, each graph calls it."""
        return {}

    def reset_padding(self) -> None:
        """Clear what a run without results may have left in the entry of padding."""

    def written(self, rows: StepRows) -> list[WrittenMemory]:
        """Return what a step changes, for shadow checks; not what `begin` writes again in each step."""
        return []

    def discardable(self) -> list[Tensor]:
        """Return the tensors whose values may be lost while no slot is assigned, such as during sleep."""
        return []


class ModelStates(ModelState):
    """Several states of one model."""

    def __init__(self, parts: Sequence[ModelState]):
        self.parts = list(parts)
        self.joins_phases = all(part.joins_phases for part in parts)

    def tensors(self) -> Mapping[str, Tensor]:
        return {name: tensor for part in self.parts for name, tensor in part.tensors().items()}

    def assign(self, slots: Sequence[SlotAssignment]) -> None:
        for part in self.parts:
            part.assign(slots)

    def begin(self, rows: StepRows) -> None:
        for part in self.parts:
            part.begin(rows)

    def context(self, rows: StepRows) -> dict[str, Any]:
        return {name: value for part in self.parts for name, value in part.context(rows).items()}

    def reset_padding(self) -> None:
        for part in self.parts:
            part.reset_padding()

    def written(self, rows: StepRows) -> list[WrittenMemory]:
        return [region for part in self.parts for region in part.written(rows)]

    def discardable(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in part.discardable()]

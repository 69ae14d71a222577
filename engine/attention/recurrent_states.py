"""Recurrent states: per layer, tensors of a fixed size for each slot, without pages.

Slot s is entry s + 1 and entry 0 is that of padding rows, as in SlotState. A slot's states are zeroed when it is
assigned to a request, so a state never outlives its request, not even one that holds NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.attention.cache_spec import CacheSpec, recurrent_layers
from engine.attention.model_state import ModelState, StepRows
from engine.protocol.slot_assignment import SlotAssignment
from engine.utils.async_copy import ids_to
from graph_cache.core.shadow import Rows, WrittenMemory


class RecurrentStates(ModelState):
    """The states of all recurrent layers: `.of_layer[i]` are layer i's tensors [max_num_seqs + 1, *shape].

    `storage` [layers, max_num_seqs + 1, *shape] holds the states of equal shape and dtype, so that one kernel zeroes
    them for all layers. Its addresses are fixed.
    """

    joins_phases = False

    def __init__(self, specs: Sequence[CacheSpec], max_num_seqs: int, dtype: torch.dtype, device: torch.device | str):
        layers = recurrent_layers(specs)
        kinds = {index: [(shape, spec.dtype or dtype) for shape in spec.shapes] for index, spec in layers.items()}
        each = [kind for own in kinds.values() for kind in own]
        storage = {
            (shape, kind): torch.zeros((each.count((shape, kind)), max_num_seqs + 1, *shape), dtype=kind, device=device)
            for shape, kind in dict.fromkeys(each)
        }
        unused = {kind: iter(whole) for kind, whole in storage.items()}
        self.storage, self._device = list(storage.values()), torch.device(device)
        self.of_layer = {index: tuple(next(unused[kind]) for kind in own) for index, own in kinds.items()}

    def zero(self, entries: Tensor) -> None:
        """Zero the states of these entries, int64 [n], in all layers."""
        for whole in self.storage:
            whole.index_fill_(1, entries, 0)

    def tensors(self) -> Mapping[str, Tensor]:
        return {f"states.{index}": whole for index, whole in enumerate(self.storage)}

    def assign(self, slots: Sequence[SlotAssignment]) -> None:
        self.zero(ids_to(self._device, [slot.slot + 1 for slot in slots]))

    def context(self, rows: StepRows) -> dict[str, Any]:
        return {"states": StepStates(self, *rows)}

    def reset_padding(self) -> None:
        self.zero(ids_to(self._device, [0]))

    def written(self, rows: StepRows) -> list[WrittenMemory]:
        return [
            Rows(f"recurrent states {index}", whole, rows.entries, dim=1) for index, whole in enumerate(self.storage)
        ]

    def discardable(self) -> list[Tensor]:
        return self.storage


class StepStates:
    """The recurrent states of a step's sequences, for its layers. `entries`, `ends` and `chunk_of`: see StepRows."""

    def __init__(
        self, states: RecurrentStates, entries: Tensor, ends: Tensor | None = None, chunk_of: Tensor | None = None
    ):
        self._states = states
        self.entries, self.ends, self.chunk_of = entries, ends, chunk_of

    def tensors(self, layer: int) -> tuple[Tensor, ...]:
        """Return a layer's states of all entries, [max_num_seqs + 1, *shape], for kernels that update them in place.

        Such a kernel must leave entry 0 unchanged: padding rows of all steps read it.
        """
        return self._states.of_layer[layer]

    def read(self, layer: int) -> tuple[Tensor, ...]:
        """Return the states before each chunk, as new tensors [C, *shape]. They are zeros at a sequence's start."""
        return tuple(whole.index_select(0, self.entries) for whole in self.tensors(layer))

    def last(self, values: Tensor) -> Tensor:
        """Return the rows of values [T, …] at each chunk's last token, [C, …]; any row for padding."""
        return values if self.ends is None else values.index_select(0, (self.ends - 1).clamp(min=0))

    def write(self, layer: int, *states: Tensor) -> None:
        """Store the states [C, *shape] after each chunk. The states of padding are dropped."""
        for whole, state in zip(self.tensors(layer), states, strict=True):
            whole.index_copy_(0, self.entries, state.to(whole.dtype))
            whole[0].zero_()  # otherwise padding rows would depend on earlier steps, and two replays would differ

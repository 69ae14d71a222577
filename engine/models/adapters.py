"""Adapter rows: which adapter each token of a step uses, on the device, for layers that compute with adapters.

A request names its adapter. The number of the adapter is stored for the request's slot when the slot is assigned, and
every step copies it to the rows of the slot's tokens. So a layer in a captured graph reads it like its own input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.attention.model_state import ModelState, StepRows
from engine.errors import ModelError
from engine.protocol.slot_assignment import SlotAssignment
from engine.utils.async_copy import ids_to


class AdapterRows(ModelState):
    """The adapters that a model has, by name, and the adapter of each row of a step.

    Create it with the layers, which keep it and read `of_tokens`, and set it as `Model.adapters`. The first adapter has
    number 1; 0 stands for none.
    """

    def __init__(self, names: Sequence[str]):
        if not all(names) or len(set(names)) < len(names):
            raise ModelError(f"adapters {list(names)} need different names that are not empty")
        self.names = tuple(names)
        self._numbers = {"": 0} | {name: number for number, name in enumerate(names, 1)}
        self._of_slots = self._of_tokens = torch.empty(0, dtype=torch.int64)

    def allocate(self, max_num_seqs: int, max_tokens: int, device: torch.device) -> None:
        """Allocate the tables for this many slots and tokens of a step."""
        self._of_slots = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._of_tokens = torch.zeros(max_tokens, dtype=torch.int64, device=device)

    def of_tokens(self, count: int) -> Tensor:
        """Return the adapter of each of the step's `count` tokens, int64 [count], as a view; 0 for padding."""
        return self._of_tokens[:count]

    def tensors(self) -> Mapping[str, Tensor]:
        return {"adapters.of_slots": self._of_slots, "adapters.of_tokens": self._of_tokens}

    def assign(self, slots: Sequence[SlotAssignment]) -> None:
        pairs = [[slot.slot + 1 for slot in slots], [self._numbers[slot.adapter] for slot in slots]]
        entries, numbers = ids_to(self._of_slots.device, pairs)
        self._of_slots.index_copy_(0, entries, numbers)

    def begin(self, rows: StepRows) -> None:
        entries = rows.entry_of_tokens()
        self.of_tokens(len(entries)).copy_(self._of_slots.index_select(0, entries))

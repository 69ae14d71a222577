"""Which tokens each slot has seen, and the penalties for them.

Owns one count per slot and token, and the arithmetic of repetition, frequency and presence penalties. Knows no
request and no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.utils.async_copy import ids_to


class TokenCounts:
    """Counts [max_num_seqs, vocab_size] on the device, allocated when the first slot is tracked.

    An entry is twice the token's count in the output, plus 1 if the prompt has it: one int32 tensor (4 bytes per
    slot and token) says both, and int32 can't overflow where int16 could within a long context.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self._shape = (max_num_seqs, vocab_size)
        self._device = device
        self._counts: Tensor | None = None

    def track(self, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Start a slot anew with these tokens."""
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        row = self._counts[slot].zero_()
        row[ids_to(self._device, prompt_ids)] = 1
        outputs = ids_to(self._device, output_ids)
        row.index_add_(0, outputs, torch.full_like(outputs, 2, dtype=torch.int32))

    def add(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count one more output token of each slot, both int64 [b] on the device; -1 (none was chosen) counts nothing.

        On the device, so that the next `penalise` may be enqueued before the host knows the tokens. A slot whose
        request is gone may be counted once more by work under way: `track`, enqueued later, starts it anew.
        """
        if self._counts is None:
            raise ValueError("no slot is tracked")
        added = (token_ids >= 0).to(torch.int32) * 2
        self._counts.index_put_((slots, token_ids.clamp(min=0)), added, accumulate=True)

    def penalise(
        self, logits: Tensor, slots: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
    ) -> Tensor:
        """New logits float32 [b, V]; row i is slot slots[i] of int64 [b], the penalties are float32 [b, 1].

        Repetition (prompt and output): a positive logit is divided by it, a negative one multiplied. Frequency
        (output): subtracted once per occurrence. Presence (output): subtracted once.
        """
        if self._counts is None:
            raise ValueError("no slot is tracked")
        counts = self._counts[slots]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        out = torch.where(counts > 0, repeated, logits)
        occurrences = (counts >> 1).to(torch.float32)
        return out.sub_(frequency * occurrences).sub_(presence * (occurrences > 0))

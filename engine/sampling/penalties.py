"""Token counts of each slot, and the repetition, frequency and presence penalties computed from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.utils.async_copy import ids_to


class TokenCounts:
    """`values` int32 [max_num_seqs, vocab_size] on the device.

    An entry is twice the token's count in the output, plus 1 if the prompt contains it: one int32 tensor (4 bytes per
    slot and token) holds both. int16 could overflow within a long context.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self._device = device
        self.values = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int32, device=device)

    def track(self, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Reset a slot's counts to these tokens."""
        row = self.values[slot].zero_()
        row[ids_to(self._device, prompt_ids)] = 1
        outputs = ids_to(self._device, output_ids)
        row.index_add_(0, outputs, torch.full_like(outputs, 2, dtype=torch.int32))

    def penalise(
        self, logits: Tensor, slots: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
    ) -> Tensor:
        """Return penalised logits float32 [b, V]. Row i belongs to slots[i], int64 [b]; penalties are float32 [b, 1].

        Repetition (prompt and output) divides a positive logit and multiplies a negative one. Frequency (output) is
        subtracted once per occurrence. Presence (output) is subtracted once.
        """
        return penalised_logits(logits, self.values[slots], repetition, frequency, presence)


def count_tokens(counts: Tensor, slots: Tensor, token_ids: Tensor) -> None:
    """Count one output token per slot in counts int32 [slots, V]; a token of -1 is ignored. Can be captured."""
    added = (token_ids >= 0).to(torch.int32) * 2
    counts.index_put_((slots, token_ids.clamp(min=0)), added, accumulate=True)


def penalised_logits(logits: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor) -> Tensor:
    """Return penalised logits float32 [b, V] from the rows' counts int32 [b, V]. See `TokenCounts.penalise`."""
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    out = torch.where(counts > 0, repeated, logits)
    occurrences = (counts >> 1).to(torch.float32)
    return out.sub_(frequency * occurrences).sub_(presence * (occurrences > 0))

"""Which tokens each slot has seen, and the penalties for them.

Owns one count per slot and token, and the arithmetic of repetition, frequency and presence penalties. Knows no
request and no sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TokenCounts:
    """Counts [max_num_seqs, vocab_size] on the device, allocated when the first slot is tracked.

    An entry is twice the token's count in the output, plus 1 if the prompt has it: one int32 tensor (4 bytes per
    slot and token) says both, and int32 can't overflow where int16 could within a long context.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self._shape = (max_num_seqs, vocab_size)
        self._device = device
        self._counts: Tensor | None = None
        self._new: list[tuple[int, int]] = []  # (slot, token) not yet on the device

    def track(self, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Start a slot anew with these tokens."""
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        self.forget(slot)
        row = self._counts[slot].zero_()
        row[ids_to(self._device, prompt_ids)] = 1
        outputs = ids_to(self._device, output_ids)
        row.index_add_(0, outputs, torch.full_like(outputs, 2, dtype=torch.int32))

    def forget(self, slot: int) -> None:
        """Drop what was appended to the slot but not yet counted; its row is reset by the next `track`."""
        self._new = [pair for pair in self._new if pair[0] != slot]

    def append(self, slot: int, token: int) -> None:
        """Note one more output token; it reaches the device with the next `penalise`."""
        self._new.append((slot, token))

    def penalise(
        self, logits: Tensor, slots: Sequence[int], repetition: Tensor, frequency: Tensor, presence: Tensor
    ) -> Tensor:
        """New logits float32 [b, V]; row i is slot slots[i], the penalties are float32 [b, 1].

        Repetition (prompt and output): a positive logit is divided by it, a negative one multiplied. Frequency
        (output): subtracted once per occurrence. Presence (output): subtracted once.
        """
        if self._counts is None:
            raise ValueError("no slot is tracked")
        self._flush()
        counts = self._counts[ids_to(self._device, slots)]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        out = torch.where(counts > 0, repeated, logits)
        occurrences = (counts >> 1).to(torch.float32)
        return out.sub_(frequency * occurrences).sub_(presence * (occurrences > 0))

    def _flush(self) -> None:
        if self._new:
            pairs = ids_to(self._device, self._new)
            two = torch.full((len(self._new),), 2, dtype=torch.int32, device=self._device)
            self._counts.index_put_((pairs[:, 0], pairs[:, 1]), two, accumulate=True)
            self._new = []


def ids_to(device: torch.device, values: Sequence) -> Tensor:
    """Host integers (a list, or a list of rows) as int64 on the device."""
    return upload(torch.tensor(values, dtype=torch.int64), device)


def upload(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting for the device; on a CPU the tensor itself."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

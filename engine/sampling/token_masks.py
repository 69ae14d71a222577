"""Masks of the tokens that constrained slots may sample next, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.slot_columns import MASK_BITS
from engine.utils.async_copy import ids_to

MAX_COPIES = 8  # more runs of slots are scattered by a kernel


class TokenMasks:
    """Masks int32 [max_num_seqs + 1, ceil(vocab_size / 32)] on the device; slot s is row s + 1, as in SlotTensors.

    A row is read only for a slot that is constrained, and is written before each of its samples.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        words = -(-vocab_size // MASK_BITS)
        self.masks = torch.zeros(max_num_seqs + 1, words, dtype=torch.int32, device=device)
        self._vocab_size, self._device = vocab_size, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def write(self, slots: Sequence[int], masks: np.ndarray) -> None:
        """Copy masks int32 [len(slots), words] to the device for samples that are enqueued later. Doesn't wait.

        All samples enqueued earlier from these slots must be complete: the copy runs beside the device's other work.
        `masks` may be written to again when a sample enqueued later is complete. It should be pinned.
        """
        if not slots:
            return
        host = torch.from_numpy(masks)
        if self._stream is None or self._copied is None:
            self.masks[[slot + 1 for slot in slots]] = host
            return
        runs = consecutive(slots)
        with torch.cuda.stream(self._stream):
            if len(runs) <= MAX_COPIES:
                for row, slot, count in runs:
                    self.masks[slot + 1 : slot + 1 + count].copy_(host[row : row + count], non_blocking=True)
            else:
                rows = ids_to(self._device, [slot + 1 for slot in slots])
                self.masks.index_copy_(0, rows, host.to(self._device, non_blocking=True))
            self._copied.record(self._stream)
        self._copied.wait(torch.cuda.current_stream(self._device))

    def apply(self, x: Tensor, slots: Sequence[int]) -> Tensor:
        """Return x float32 [b, V] with -inf for the tokens that the slots of its rows don't allow, in new memory."""
        allowed = unpacked(self.masks.index_select(0, ids_to(self._device, [slot + 1 for slot in slots])))
        return x.masked_fill(~allowed[:, : self._vocab_size], float("-inf"))


def consecutive(slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive slots: (index of the first, its slot, number of slots) of each."""
    runs: list[tuple[int, int, int]] = []
    for index, slot in enumerate(slots):
        if runs and slot == sum(runs[-1][1:]):
            first, first_slot, count = runs[-1]
            runs[-1] = first, first_slot, count + 1
        else:
            runs.append((index, slot, 1))
    return runs


def unpacked(masks: Tensor) -> Tensor:
    """Return masks int32 [b, words] as bool [b, words * 32]. Can be captured."""
    bits = torch.arange(8, dtype=torch.uint8, device=masks.device)
    octets = masks.contiguous().view(torch.uint8)  # little-endian: octet k of a row holds tokens 8 k to 8 k + 7
    return ((octets.unsqueeze(-1) >> bits) & 1).flatten(1).to(torch.bool)

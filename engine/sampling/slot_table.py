"""The sampling parameters of every slot on the device, for captured sampling.

A request's parameters are written once, when it gets its slot, so that a steady step uploads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.slot_columns import (
    ADJUSTED_ARGMAX,
    BANNED_UNTIL,
    CONSTRAINED,
    KEY,
    NUM_BANNED,
    NUM_BIASED,
    NUM_COLUMNS,
    NUM_FLOATS,
    NUM_NAMED,
    PENALISED,
    TOP_COUNT,
    SlotTensors,
)
from engine.protocol.sampling_params import MAX_BIASED_TOKENS, MAX_LOGPROB_TOKEN_IDS, MAX_STOP_TOKEN_IDS
from engine.sampling.penalties import TokenCounts
from engine.sampling.token_masks import TokenMasks
from engine.utils.async_copy import upload


class SlotTable:
    """Parameters of the slots in [0, max_num_seqs) on the device. See SlotTensors for the layout.

    The logit bias table has a fixed width, the API's limit of biased tokens: 8 bytes each, 34 MB for 1024 slots.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, num_eos_tokens: int, device: torch.device):
        entries = max_num_seqs + 1
        biased = min(vocab_size, MAX_BIASED_TOKENS)
        banned = min(vocab_size, MAX_STOP_TOKEN_IDS + num_eos_tokens)
        self.values = torch.zeros(entries, NUM_COLUMNS, dtype=torch.int64, device=device)
        self.bias_ids = torch.zeros(entries, biased, dtype=torch.int32, device=device)
        self.bias_values = torch.full((entries, biased), -0.0, dtype=torch.float32, device=device)
        self.banned_ids = torch.zeros(entries, banned, dtype=torch.int32, device=device)
        self.named_ids = torch.zeros(entries, MAX_LOGPROB_TOKEN_IDS, dtype=torch.int32, device=device)
        self._kept = torch.zeros(entries, 2, dtype=torch.int64, device=device)
        self._device = device
        self._host = torch.zeros(entries, NUM_COLUMNS, dtype=torch.int64)

    def tensors(self, counts: TokenCounts, masks: TokenMasks) -> SlotTensors:
        """Return the table with the masks and the token counts, which are allocated if they are not yet."""
        return SlotTensors(
            self.values, self.bias_ids, self.bias_values, self.banned_ids, self.named_ids, masks.masks, self._kept,
            counts.values,
        )  # fmt: skip

    def set(
        self,
        slot: int,
        floats: Sequence[float],
        *,
        key: int,
        penalised: bool,
        adjusted_argmax: bool,
        bias: tuple[Tensor, Tensor] | None,
        banned: Tensor | None,
        banned_until: int,
        constrained: bool,
        top_count: int,
        named: Sequence[int],
    ) -> None:
        """Write a slot's parameters; `floats` are the first NUM_FLOATS columns.

        `bias`: token ids int64 [n] and values float32 [n], and `banned`: token ids int64 [m], all on the host.
        `top_count` and `named` (logprob_token_ids): see TOP_COUNT. Steps enqueued earlier still read the former
        parameters.
        """
        entry = slot + 1
        row = torch.zeros(NUM_COLUMNS, dtype=torch.int64)
        row[:NUM_FLOATS] = torch.tensor(floats, dtype=torch.float64).view(torch.int64)
        row[KEY] = key
        row[PENALISED], row[ADJUSTED_ARGMAX] = int(penalised), int(adjusted_argmax)
        row[CONSTRAINED] = int(constrained)
        if bias is not None:
            ids, values = bias
            row[NUM_BIASED] = len(ids)
            self._write(self.bias_ids[entry], _padded(ids.to(torch.int32), self.bias_ids.shape[1], 0))
            self._write(self.bias_values[entry], _padded(values, self.bias_values.shape[1], -0.0))
        elif self._host[entry, NUM_BIASED]:
            self.bias_ids[entry].zero_()
            self.bias_values[entry].fill_(-0.0)
        if banned is not None:
            row[NUM_BANNED], row[BANNED_UNTIL] = len(banned), banned_until
            ids = banned.to(torch.int32)
            self._write(self.banned_ids[entry], _padded(ids, self.banned_ids.shape[1], int(ids[0])))
        row[TOP_COUNT], row[NUM_NAMED] = top_count, len(named)
        if named:
            ids = torch.tensor(named, dtype=torch.int32)
            self._write(self.named_ids[entry], _padded(ids, self.named_ids.shape[1], 0))
        if not row.equal(self._host[entry]):  # a greedy request after another one changes nothing
            self._host[entry] = row
            self._write(self.values[entry], row)

    def _write(self, target: Tensor, values: Tensor) -> None:
        target.copy_(upload(values, self._device), non_blocking=True)


def _padded(values: Tensor, size: int, padding: float) -> Tensor:
    out = torch.full((size,), padding, dtype=values.dtype)
    out[: len(values)] = values
    return out

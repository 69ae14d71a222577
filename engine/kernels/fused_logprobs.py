"""Compute log-probabilities on CUDA in three launches that read the logits twice, without a copy or a sort.

The same as `DeviceLogprobs.of` of engine/sampling/logprobs.py, for rows of slots whose distribution is that of the
unmodified logits with a temperature, top-k, top-p and min-p; exp and division are as exact as torch's. What top-k and
top-p keep is read from the slots, where fused_sampling.py left it. Device code: logprob_kernels.py. Imports triton:
import this module only on CUDA (or under TRITON_INTERPRET=1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels import logprob_kernels as kernels
from engine.kernels.launch import cdiv, next_power_of_2
from engine.kernels.logprob_layout import MAX_TOP
from engine.kernels.slot_columns import SlotTensors

TILE = 4096
"""Logits per program. Does not affect the results."""


def score_slots(
    slots_of: SlotTensors, logits: Tensor, slots: Tensor, next_tokens: Tensor, scores: Tensor, *, raw: bool
) -> None:
    """Write the log-probabilities of the rows whose slot has a TOP_COUNT above 0; others are not written.

    logits [b, V] of any float dtype and row stride, read only. slots int64 [b]: slot + 1, 0 for padding. next_tokens
    int64 [b] are the chosen tokens, -1 where there is none. scores int64 [at least (NAMED + N) * b] gets the layout of
    logprob_layout.py, with N the width of named_ids. `raw`: ignore temperature and min-p. Grids depend only on shapes
    and the host never waits, so the call can be captured.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (rows, vocab_size), device = logits.shape, logits.device
    tiles = cdiv(vocab_size, TILE)
    tile_max = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    tile_sums = torch.empty(rows, tiles, dtype=torch.int64, device=device)
    tile_above = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    found = torch.empty(rows, dtype=torch.int32, device=device)
    sort_keys = torch.empty(rows, tiles * MAX_TOP, dtype=torch.int64, device=device)
    values, floats = slots_of.values, slots_of.values.view(torch.float64)
    row_args = {
        "NUM_TILES": tiles,
        "TILES_PAD": next_power_of_2(tiles),
        "ID_BITS": (vocab_size - 1).bit_length(),
        "RAW": raw,
    }
    kernels.scored_max_kernel[(tiles, rows)](
        logits, values, slots, tile_max, found, logits.stride(0), V=vocab_size, TILE=TILE, num_warps=8
    )
    kernels.scored_tile_kernel[(tiles, rows)](
        logits, values, floats, slots, next_tokens, tile_max, tile_sums, tile_above, found, sort_keys,
        logits.stride(0), V=vocab_size, TILE=TILE, num_warps=8, **row_args,
    )  # fmt: skip
    kernels.scored_row_kernel[(rows,)](
        logits, values, floats, slots, next_tokens, slots_of.named_ids, slots_of.kept, tile_max, tile_sums, tile_above,
        found, sort_keys, scores, scores.view(torch.float64), logits.stride(0),
        NAMED_WIDTH=slots_of.named_ids.shape[1], num_warps=4, **row_args,
    )  # fmt: skip

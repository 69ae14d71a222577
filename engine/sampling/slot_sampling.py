"""Sampling with PyTorch operations from parameters in device memory: fixed shapes, no host reads, so that a graph can
contain it.

engine/kernels/fused_sampling.py is the same in Triton kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.kernels.slot_columns import (
    ADJUSTED_ARGMAX,
    BANNED_UNTIL,
    CONSTRAINED,
    FREQUENCY,
    FULL_TEMPERATURE,
    KEY,
    MIN_P,
    NUM_BANNED,
    PENALISED,
    PRESENCE,
    REPETITION,
    TOP_K,
    TOP_P,
    TRUNCATED_TEMPERATURE,
    SlotTensors,
)
from engine.sampling.ops import CANDIDATES, sample_full, sample_ranked, uniform, weights_of
from engine.sampling.penalties import count_tokens, penalised_logits
from engine.sampling.token_masks import unpacked

# How the rows of a batch are truncated: not at all, to at most CANDIDATES tokens by top-k, or to any number of tokens.
UNTRUNCATED, TOP_K_ONLY, ANY_NUMBER = "none", "top_k", "any"


def sample_slots(
    slots_of: SlotTensors,
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    next_tokens: Tensor,
    last_tokens: Tensor,
    *,
    processors: bool,
    limits: str,
    chunk_rows: int,
) -> None:
    """Sample a token for each row whose slot needs more than the argmax of the unmodified logits.

    logits [b, V] of any float dtype, read only. slots int64 [b]: slot + 1, 0 for padding. positions int64 [b] of the
    tokens to sample. next_tokens int64 [b] and last_tokens int64 [slots + 1] hold the greedy tokens of all rows, which
    stay where argmax is enough. Writes a sampled token to both; for a row without a finite maximum -1 to next_tokens
    and 0, a valid id, to last_tokens.

    `processors`: apply penalties, logit bias, min_tokens bans and masks, and count the sampled tokens. `limits`:
    UNTRUNCATED, TOP_K_ONLY or ANY_NUMBER, the widest truncation of the rows. ANY_NUMBER sorts the vocabulary, since a
    fixed shape can't depend on the size of a nucleus. `chunk_rows` bounds the scratch.
    """
    for start in range(0, len(slots), chunk_rows):
        rows = slice(start, start + chunk_rows)
        _sample_chunk(
            slots_of, logits[rows], slots[rows], positions[rows], next_tokens[rows], last_tokens, processors, limits
        )


def _sample_chunk(
    slots_of: SlotTensors,
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    next_tokens: Tensor,
    last_tokens: Tensor,
    processors: bool,
    limits: str,
) -> None:
    values = slots_of.values.index_select(0, slots)
    params = values.view(torch.float64)
    x = logits.to(torch.float32)
    if processors:
        x = _adjusted(slots_of, x, slots, positions, values)
    best, best_ids = x.max(dim=1)
    is_truncated = params[:, TRUNCATED_TEMPERATURE] > 0
    temperature = params[:, FULL_TEMPERATURE] + params[:, TRUNCATED_TEMPERATURE]
    is_random = temperature > 0
    z = (x - best.unsqueeze(1)).div_(temperature.masked_fill(~is_random, 1.0).to(torch.float32).unsqueeze(1))
    weights = weights_of(z)
    u = uniform(values[:, KEY], positions)
    tokens = sample_full(weights, params[:, MIN_P], u).token_ids
    if limits != UNTRUNCATED:
        count = z.shape[1] if limits == ANY_NUMBER else min(z.shape[1], CANDIDATES)
        truncated, _ = sample_ranked(z, weights, params[:, TOP_K], params[:, TOP_P], params[:, MIN_P], u, count)
        tokens = torch.where(is_truncated, truncated.token_ids, tokens)
    is_sampled = is_random
    if processors:
        tokens = torch.where(is_random, tokens, best_ids)
        is_sampled = is_random | (values[:, ADJUSTED_ARGMAX] > 0)
    tokens = torch.where(best - best == 0, tokens, -1)  # the difference is NaN for NaN and the infinities
    next_tokens.copy_(torch.where(is_sampled, tokens, next_tokens))
    last = torch.where(is_sampled, tokens.clamp(min=0), last_tokens.index_select(0, slots))
    last_tokens.index_copy_(0, slots, last)
    if processors:
        counted = torch.where(values[:, PENALISED] > 0, tokens, -1)
        count_tokens(slots_of.counts, (slots - 1).clamp(min=0), counted)


def _adjusted(slots_of: SlotTensors, x: Tensor, slots: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    """Return x float32 [b, V] after penalties, logit bias, bans and masks, in new memory."""
    repetition, frequency, presence = (
        values.view(torch.float64)[:, column : column + 1].to(torch.float32)
        for column in (REPETITION, FREQUENCY, PRESENCE)
    )
    counts = slots_of.counts.index_select(0, (slots - 1).clamp(min=0))
    penalised = penalised_logits(x, counts, repetition, frequency, presence)
    x = torch.where(values[:, PENALISED].unsqueeze(1) > 0, penalised, x)
    biased = slots_of.bias_ids.index_select(0, slots).to(torch.int64)
    x.scatter_add_(1, biased, slots_of.bias_values.index_select(0, slots))
    banned = slots_of.banned_ids.index_select(0, slots).to(torch.int64)
    applies = (values[:, NUM_BANNED] > 0) & (positions < values[:, BANNED_UNTIL])
    x.scatter_(1, banned, x.gather(1, banned).masked_fill_(applies.unsqueeze(1), float("-inf")))
    allowed = unpacked(slots_of.masks.index_select(0, slots))[:, : x.shape[1]]
    return x.masked_fill_((values[:, CONSTRAINED] > 0).unsqueeze(1) & ~allowed, float("-inf"))

"""One sampling step without a graph: what `SamplingStep.run` captures, for any batch of slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling.sampler import Sampler, SampleResult
from engine.utils.async_copy import ids_to


def sample(sampler: Sampler, logits: Tensor, slots: Sequence[int], positions: Sequence[int]) -> SampleResult:
    """Sample a token for each of `slots` (-1: padding, which keeps its argmax) from the first rows of logits."""
    slots, positions, logits = list(slots), list(positions), logits[: len(slots)]
    best, greedy = logits.max(dim=1)
    token_ids = torch.where(torch.isfinite(best), greedy, -1)
    last_tokens = torch.zeros(sampler.max_num_seqs + 1, dtype=torch.int64, device=logits.device)
    sampler.lift_min_tokens(slots, positions)
    logprobs_of = sampler.logprobs_of(logits, slots)
    variant = sampler.variant(slots)
    if variant is not None:
        entries, at = (ids_to(sampler.device, values) for values in ([slot + 1 for slot in slots], positions))
        sampler.slot_sampling()(logits, entries, at, token_ids, last_tokens, **variant)
    return SampleResult(token_ids, [] if logprobs_of is None else logprobs_of(token_ids))

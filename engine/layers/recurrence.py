"""Linear recurrence h_t = decay_t * h_{t-1} + input_t over packed chunks of sequences, without host reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_recurrence(decay: Tensor, inputs: Tensor, before: Tensor, chunk_of: Tensor | None) -> Tensor:
    """Return h [T, n] after each token, for decay and inputs [T, n].

    `before` [C, n] is h before each chunk, and `chunk_of` int64 [T] the chunk of each token, -1 for padding; see
    StepStates. With None every token is a separate chunk, as in a decode step. Takes log2(T) passes over the tokens.
    """
    if chunk_of is None:
        return torch.addcmul(inputs, decay, before)
    is_first = (chunk_of != F.pad(chunk_of[:-1], (1, 0), value=-2)).unsqueeze(1)
    carried = torch.addcmul(inputs, decay, before.index_select(0, chunk_of.clamp(min=0)))
    h, factor = torch.where(is_first, carried, inputs), decay.masked_fill(is_first, 0)
    distance = 1  # h[t] holds the terms of tokens t - distance + 1 to t, and factor[t] the product of their decays
    while distance < len(h):
        h, factor = (
            torch.addcmul(h, factor, F.pad(h[:-distance], (0, 0, distance, 0))),
            factor * F.pad(factor[:-distance], (0, 0, distance, 0)),
        )
        distance *= 2
    return h

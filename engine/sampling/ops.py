"""Exact sampling from a distribution, independent of the rest of the batch.

Random numbers, integer weights and truncation (top-k, top-p, min-p): pure tensor functions, vectorised over rows.

A probability becomes the integer weight floor(2**40 * p / p_max). Integer sums are exact in any order, so a row's token
does not depend on how a kernel splits the work, which changes with the number of rows. A token 2**40 times less likely
than the best has weight 0 and is never sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.sampling_constants import ONE
from engine.protocol.request import GOLDEN, MIX_1, MIX_2

CANDIDATES = 1024  # best tokens ranked at first; a nucleus that exceeds them is ranked again in full

HASH_CONSTANTS = tuple(value - 2**64 if value >> 63 else value for value in (GOLDEN, MIX_1, MIX_2))
"""The constants of `uniform` as int64."""


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Return random numbers in [0, 1), float64 [b], a pure function of (key, position), both int64 [b].

    A counter-based generator: the upper 53 bits of splitmix64's finalizer over key + (position + 1) * golden ratio. It
    has no state to restore after a preemption, and other rows cannot advance it. Keys are `mix64(seed)`, so that the
    streams of seeds 1, 2, 3 start far apart. Relies on int64 wrap-around. All operations can be captured.
    """
    golden, mix_1, mix_2 = HASH_CONSTANTS
    x = keys + (positions + 1) * golden
    x = (x ^ _shift_right(x, 30)) * mix_1
    x = (x ^ _shift_right(x, 27)) * mix_2
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).to(torch.float64) * 2.0**-53


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch's shift is arithmetic; a hash needs a logical one


def weights_of(z: Tensor) -> Tensor:
    """Return integer weights int64 [b, V] of z float32 [b, V], logits with row maximum 0."""
    return z.exp().mul_(float(ONE)).to(torch.int64)


def ranked(z: Tensor, count: int) -> Tensor:
    """Return ids int64 [b, count] of the `count` largest values of z float32 [b, V] (all <= 0), ties by ascending id.

    Ties are common among bfloat16 logits, and with an unstable sort their order would depend on the batch. Each
    (value, id) becomes one integer, so every algorithm gives the same order.
    """
    vocab_size = z.shape[1]
    magnitude = z.contiguous().view(torch.int32) & 0x7FFFFFFF
    keys = (magnitude.to(torch.int64) << 32) | torch.arange(vocab_size, device=z.device)
    if count >= vocab_size:
        best = keys.sort(dim=1).values
    else:
        best = keys.topk(count, dim=1, largest=False, sorted=True).values
    return best & 0xFFFFFFFF


@dataclass(slots=True)
class SampledTokens:
    """Tokens int64 [b], and the number of tokens and total weight of each row's truncated distribution, int64 [b]."""

    token_ids: Tensor
    kept: Tensor
    total: Tensor


def untruncated(token_ids: Tensor, weights: Tensor) -> SampledTokens:
    """Return given tokens with the untruncated distribution of weights int64 [b, V]."""
    return SampledTokens(token_ids, torch.full_like(token_ids, weights.shape[1]), weights.sum(dim=1))


def sample_full(weights: Tensor, min_p: Tensor | None, u: Tensor) -> SampledTokens:
    """Sample by inverse CDF in id order. weights int64 [b, V]; min_p, u float64 [b]; None means min_p is 0 for all."""
    kept = torch.full_like(u, weights.shape[1], dtype=torch.int64)
    if min_p is not None:
        weights = weights.masked_fill(weights < _min_p_weight(min_p), 0)
        kept = torch.where(min_p > 0, torch.count_nonzero(weights, dim=1), kept)
    cumulative = weights.cumsum(dim=1)
    total = cumulative[:, -1]
    return SampledTokens(_inverse_cdf(cumulative, total, u), kept, total)


def sample_truncated(
    z: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor, max_top_k: int
) -> SampledTokens:
    """Sample by inverse CDF, most likely token first, after top-k, then top-p, then min-p.

    z float32 [b, V] (row maximum 0), weights int64 [b, V]; top_k float64 [b] (0: off), top_p, min_p, u float64 [b].
    top-p keeps the fewest tokens whose share of the mass left by top-k reaches it. min-p then drops tokens below min_p
    times the best. `max_top_k` is the largest top_k of the batch, or 0 if any row has none. With 0, the host reads one
    flag back from the device, because a nucleus wider than the candidates is ranked again in full. The value does not
    affect the result.
    """
    vocab_size = z.shape[1]
    count = min(vocab_size, max_top_k or CANDIDATES)
    sampled, complete = sample_ranked(z, weights, top_k, top_p, min_p, u, count)
    if count == vocab_size or max_top_k or bool(complete.all()):
        return sampled
    rows = (~complete).nonzero().squeeze(1)
    wide, _ = sample_ranked(z[rows], weights[rows], top_k[rows], top_p[rows], min_p[rows], u[rows], vocab_size)
    sampled.token_ids[rows] = wide.token_ids
    sampled.kept[rows] = wide.kept
    sampled.total[rows] = wide.total
    return sampled


def sample_ranked(
    z: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor, count: int
) -> tuple[SampledTokens, Tensor]:
    """Sample like `sample_truncated` from the `count` best tokens, without a host read.

    Also returns bool [b]: whether all kept tokens are known to be among them, which holds for a top-k of at most
    `count` and for a `count` of V.
    """
    ids = ranked(z, count)
    ranked_weights = weights.gather(1, ids)
    cumulative = ranked_weights.cumsum(dim=1)
    limit = torch.where(top_k > 0, top_k, float(z.shape[1])).to(torch.int64)
    mass_at_limit = cumulative.gather(1, (limit.clamp(max=count) - 1).unsqueeze(1)).squeeze(1)
    mass = torch.where(limit <= count, mass_at_limit, weights.sum(dim=1))
    goal = (top_p * mass).ceil().to(torch.int64)  # an integer, so that sums compare exactly; float64 would round them
    keep = (cumulative - ranked_weights < goal.unsqueeze(1)) | (top_p >= 1.0).unsqueeze(1)
    keep &= torch.arange(count, device=z.device) < limit.unsqueeze(1)
    keep &= ranked_weights >= _min_p_weight(min_p)
    kept = keep.sum(dim=1).clamp(min=1)
    total = cumulative.gather(1, (kept - 1).unsqueeze(1)).squeeze(1)
    token_ids = ids.gather(1, _inverse_cdf(cumulative, total, u).unsqueeze(1)).squeeze(1)
    # The mass that top-p is a share of is unknown if top-k keeps more than `count` tokens.
    is_mass_known = (limit >= z.shape[1]) | (top_p >= 1.0)
    return SampledTokens(token_ids, kept, total), (limit <= count) | ((kept < count) & is_mass_known)


def _min_p_weight(min_p: Tensor) -> Tensor:
    return (min_p * float(ONE)).ceil().to(torch.int64).unsqueeze(1)


def _inverse_cdf(cumulative: Tensor, total: Tensor, u: Tensor) -> Tensor:
    """Return the first column whose cumulative weight exceeds floor(u * total); its own weight is above 0."""
    # u <= 1 - 2**-53 lowers the product by at least half a unit in the last place, so it stays below total.
    target = (u * total).to(torch.int64)
    column = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    return column.clamp_(max=cumulative.shape[1] - 1)  # clamps only rows of NaN, which the sampler reports

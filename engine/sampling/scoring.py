"""Log-probabilities of sampled tokens under the distribution that they were sampled from.

Rows are scored with torch, in chunks that bound the scratch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.protocol.request import SamplingParams
from engine.sampling.logprobs import DeviceLogprobs, SlotLogprobs, Support
from engine.sampling.ops import sample_full, sample_truncated, untruncated, weights_of
from engine.utils.async_copy import ids_to

# The first columns of the row parameters.
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = range(4)
NUM_COLUMNS = 4

Pending = tuple[list[int], DeviceLogprobs | SlotLogprobs]
"""Rows of the batch, and their log-probabilities."""

# Logits per chunk on a CPU and on a GPU. On a GPU it bounds the scratch (about 20 bytes per logit); a CPU is several
# times faster when a row's scratch stays in its cache.
_CHUNK_LOGITS = (2**16, 2**26)


@dataclass(frozen=True, slots=True)
class SamplingMethod:
    """How a row's token is chosen, as known on the host. The default is argmax."""

    random: bool = False
    top_k: int = 0
    truncated: bool = False  # by top-k or top-p: sampled in order of probability
    min_p: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    kept_mass: bool = False  # with logprobs, also the mass of the tokens that are not cut off
    kept_ids: bool = False

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> SamplingMethod:
        """Return how to sample a request. Depends only on its parameters, so the batch does not affect its tokens."""
        top_k = params.top_k if params.top_k < vocab_size else 0
        return cls(
            random=not params.is_greedy,
            top_k=top_k,
            truncated=top_k > 0 or params.top_p < 1.0,
            min_p=params.min_p > 0.0,
            logprobs=params.logprobs,
            logprob_token_ids=params.logprob_token_ids,
            kept_mass=params.returns_support,
            kept_ids=params.return_sampling_mask,
        )

    @property
    def is_cut(self) -> bool:
        """Whether some tokens may never be sampled, by top-k, top-p or min-p."""
        return self.random and (self.truncated or self.min_p)

    @property
    def is_argmax(self) -> bool:
        """Whether only the most likely token is needed."""
        return not self.random and self.logprobs is None

    def row_params(self, params: SamplingParams) -> list[float]:
        """Return a row's first NUM_COLUMNS parameters."""
        return [params.temperature or 1.0, self.top_k, params.top_p, params.min_p]


class LogprobScorer:
    """Computes log-probabilities of chosen tokens. Not thread-safe."""

    def __init__(self, vocab_size: int, device: torch.device):
        self.chunk_rows = max(1, _CHUNK_LOGITS[device.type == "cuda"] // vocab_size)
        """Maximum number of rows per chunk."""

    def split(self, rows: list[int]) -> Iterator[list[int]]:
        """Yield the rows in chunks of at most chunk_rows."""
        for start in range(0, len(rows), self.chunk_rows):
            yield rows[start : start + self.chunk_rows]

    def score(
        self, x: Tensor, row_params: Tensor, methods: Sequence[SamplingMethod], token_ids: Tensor
    ) -> list[Pending]:
        """Return the log-probabilities that the methods request for tokens int64 [b] chosen from logits x [b, V].

        A token is -1 where none could be chosen. All methods request log-probabilities. row_params float64
        [b, >= NUM_COLUMNS] is on the device, with rows from `SamplingMethod.row_params`.
        """
        x = x.to(torch.float32, memory_format=torch.contiguous_format)
        pending: list[Pending] = []
        for rows in self._chunks(methods):
            chunk = rows_of(x, rows), rows_of(row_params, rows), [methods[i] for i in rows], rows_of(token_ids, rows)
            pending.append((rows, self._score_chunk(*chunk)))
        return pending

    def _chunks(self, methods: Sequence[SamplingMethod]) -> Iterator[list[int]]:
        """Yield chunks of rows that are sampled in the same way."""
        ways: dict[tuple[bool, bool], list[int]] = {}
        for row, method in enumerate(methods):
            ways.setdefault((method.random, method.truncated and method.random), []).append(row)
        for rows in ways.values():
            yield from self.split(rows)

    def _score_chunk(
        self, x: Tensor, row_params: Tensor, methods: list[SamplingMethod], token_ids: Tensor
    ) -> DeviceLogprobs:
        best = x.max(dim=1).values
        z = (x - best.unsqueeze(1)).div_(row_params[:, _TEMPERATURE].to(torch.float32).unsqueeze(1))
        weights = weights_of(z)
        top_k, top_p, min_p = (row_params[:, column] for column in (_TOP_K, _TOP_P, _MIN_P))
        unused = torch.zeros_like(top_p)  # the random number: only the distribution is wanted
        if not methods[0].random:
            distribution = untruncated(token_ids, weights)
        elif methods[0].truncated:
            ks = [method.top_k for method in methods]
            distribution = sample_truncated(z, weights, top_k, top_p, min_p, unused, max(ks) if min(ks) > 0 else 0)
        else:
            distribution = sample_full(weights, min_p if any(method.min_p for method in methods) else None, unused)
        chosen = torch.where(torch.isfinite(best), token_ids, -1)
        counts = [method.logprobs or 0 for method in methods]
        named = [method.logprob_token_ids for method in methods]
        truncated = any(method.is_cut for method in methods)
        support = None
        if any(method.kept_mass for method in methods):
            support = Support(
                weights,
                [method.kept_mass for method in methods],
                [method.kept_ids for method in methods],
                [method.is_cut for method in methods],
            )
        return DeviceLogprobs.of(z, chosen, distribution.kept, distribution.total, counts, named, truncated, support)


def rows_of(x: Tensor, rows: list[int]) -> Tensor:
    """Return these ascending rows of x, as a view if they are contiguous."""
    first, last = rows[0], rows[-1]
    if last - first + 1 == len(rows):
        return x[first : last + 1]
    return x.index_select(0, ids_to(x.device, rows))


def put_rows(x: Tensor, rows: list[int], values: Tensor) -> Tensor:
    """Replace these ascending rows of x and return x, modified in place; return `values` if they are all its rows."""
    first, last = rows[0], rows[-1]
    if len(rows) == len(x):
        return values
    if last - first + 1 == len(rows):
        x[first : last + 1] = values
        return x
    return x.index_copy_(0, ids_to(x.device, rows), values)

"""Token selection from adjusted logits: choose per row how to sample, with torch or with the CUDA kernels.

Prepares each request's parameters for sampling and bounds the scratch. Sampling itself is in engine/sampling/ops.py
(torch) and engine/kernels/fused_sampling.py (CUDA).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from engine.protocol.request import SamplingParams
from engine.sampling.logprobs import DeviceLogprobs
from engine.sampling.ops import sample_full, sample_truncated, untruncated, weights_of
from engine.utils.async_copy import ids_to

# The first columns of the row parameters, uploaded once per step. UNIFORM: the random number in [0, 1). The last two:
# the temperature if the kernels sample the row, from the full or the truncated distribution; else 0.
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, UNIFORM, _FULL_TEMPERATURE, _TRUNCATED_TEMPERATURE = range(7)
NUM_COLUMNS = 7

Pending = tuple[list[int], DeviceLogprobs]
"""Rows of the batch, and their log-probabilities."""

# Logits per chunk on a CPU and on a GPU. On a GPU it bounds the scratch (about 20 bytes per logit); a CPU is several
# times faster when a row's scratch stays in its cache.
_CHUNK_LOGITS = (2**16, 2**26)


@dataclass(frozen=True, slots=True)
class SamplingMethod:
    """How a row's token is chosen, as known on the host. The default is argmax."""

    random: bool = False
    fused: bool = False  # sampled by the CUDA kernels
    top_k: int = 0
    truncated: bool = False  # by top-k or top-p: sampled in order of probability
    min_p: bool = False
    logprobs: int | None = None

    @property
    def is_argmax(self) -> bool:
        """Whether only the most likely token is needed."""
        return not self.random and self.logprobs is None


def _kernels(fused: bool) -> ModuleType | None:
    """Return the kernels that sample rows without log-probabilities; None to use torch for all rows."""
    if not fused:
        return None
    from engine.kernels import fused_sampling  # triton is installed only with CUDA

    return fused_sampling


class TokenSelector:
    """Chooses a token per row. Not thread-safe.

    With `raw`, the caller computes logprobs and `select` returns none. With `fused`, by default on a GPU only, the
    kernels sample rows without logprobs.
    """

    def __init__(self, vocab_size: int, device: torch.device, raw: bool, fused: bool | None = None):
        self._vocab_size = vocab_size
        self._device = device
        self._raw = raw
        self.chunk_rows = max(1, _CHUNK_LOGITS[device.type == "cuda"] // vocab_size)
        """Maximum number of rows per chunk."""
        self.kernels: Any = _kernels(device.type == "cuda" if fused is None else fused)  # a module or None

    @property
    def is_fused(self) -> bool:
        """Whether the Triton kernels sample rows."""
        return self.kernels is not None

    def method_for(self, params: SamplingParams) -> SamplingMethod:
        """Return how to sample a request. Depends only on its parameters, so the batch does not affect its tokens."""
        top_k = params.top_k if params.top_k < self._vocab_size else 0
        random = not params.is_greedy
        return SamplingMethod(
            random=random,
            fused=random and params.logprobs is None and self.kernels is not None,
            top_k=top_k,
            truncated=top_k > 0 or params.top_p < 1.0,
            min_p=params.min_p > 0.0,
            logprobs=params.logprobs,
        )

    def row_params(self, params: SamplingParams, method: SamplingMethod) -> list[float]:
        """Return a row's first NUM_COLUMNS parameters. Column UNIFORM, the random number, changes with each token."""
        temperature = params.temperature if method.fused else 0.0
        by_kernels = (0.0, temperature) if method.truncated else (temperature, 0.0)
        return [params.temperature or 1.0, method.top_k, params.top_p, params.min_p, 0.0, *by_kernels]

    def split(self, rows: list[int]) -> Iterator[list[int]]:
        """Yield the rows in chunks of at most chunk_rows."""
        for start in range(0, len(rows), self.chunk_rows):
            yield rows[start : start + self.chunk_rows]

    def warm_up(self, logits: Tensor, columns: int) -> None:
        """Compile the kernels for logits like these [rows, V] and row parameters [rows, columns]."""
        if self.kernels is not None:
            zeros = torch.zeros(1, columns, dtype=torch.float64, device=self._device)  # temperature 0
            for x in (logits[:1], logits[:1].to(torch.float32)):  # unmodified and adjusted logits
                for truncated in (False, True):
                    self._sample_fused(x, zeros, torch.empty(1, dtype=torch.int64, device=self._device), truncated)

    def select(self, x: Tensor, row_params: Tensor, methods: Sequence[SamplingMethod]) -> tuple[Tensor, list[Pending]]:
        """Choose tokens int64 [b] from x [b, V]; also return the log-probabilities that the methods request.

        A token is -1 if the row has no finite maximum. row_params float64 [b, >= NUM_COLUMNS] is on the device, with
        rows from `row_params`.
        """
        torch_rows = [i for i, method in enumerate(methods) if not method.fused]
        if len(torch_rows) == len(methods):
            return self._sample_torch(x, row_params, torch_rows, methods)
        token_ids = torch.empty(len(methods), dtype=torch.int64, device=self._device)
        for truncated in sorted({method.truncated for method in methods if method.fused}):
            self._sample_fused(x, row_params, token_ids, truncated)
        if not torch_rows:
            return token_ids, []
        chosen, pending = self._sample_torch(
            rows_of(x, torch_rows), rows_of(row_params, torch_rows), torch_rows, methods
        )
        return put_rows(token_ids, torch_rows, chosen), pending

    def score(
        self, x: Tensor, row_params: Tensor, methods: Sequence[SamplingMethod], token_ids: Tensor
    ) -> list[Pending]:
        """Return the log-probabilities that the methods request for tokens int64 [b] chosen from x [b, V] before.

        Arguments as for `select`; a token is -1 where none could be chosen.
        """
        return self._sample_torch(x, row_params, list(range(len(methods))), methods, token_ids)[1]

    def _sample_fused(self, x: Tensor, row_params: Tensor, token_ids: Tensor, truncated: bool) -> None:
        """Sample with the kernels, into token_ids int64 [b], the fused rows of x [b, V] that are (not) truncated."""
        column = row_params.unbind(1)
        if truncated:
            limits = (column[c] for c in (_TOP_K, _TOP_P, _MIN_P))
            self.kernels.sample_truncated_rows(x, column[_TRUNCATED_TEMPERATURE], *limits, column[UNIFORM], token_ids)
        else:
            self.kernels.sample_rows(x, column[_FULL_TEMPERATURE], column[_MIN_P], column[UNIFORM], token_ids)

    def _sample_torch(
        self,
        x: Tensor,
        row_params: Tensor,
        rows: list[int],
        methods: Sequence[SamplingMethod],
        chosen: Tensor | None = None,
    ) -> tuple[Tensor, list[Pending]]:
        """Like `select`, with torch, for these rows: x and row_params hold only them, `methods` the whole batch.

        Log-probabilities are those of the tokens `chosen`, if given.
        """
        x = x.to(torch.float32, memory_format=torch.contiguous_format)
        best, token_ids = x.max(dim=1)
        pending: list[Pending] = []
        row_methods = [methods[i] for i in rows]
        for chunk in self._chunks(row_methods):
            sampled, logprobs = self._sample_chunk(
                rows_of(x, chunk),
                rows_of(best, chunk),
                rows_of(token_ids, chunk),
                rows_of(row_params, chunk),
                [rows[j] for j in chunk],
                [row_methods[j] for j in chunk],
                None if chosen is None else rows_of(chosen, chunk),
            )
            token_ids = put_rows(token_ids, chunk, sampled)
            pending += logprobs
        return torch.where(torch.isfinite(best), token_ids, -1), pending

    def _chunks(self, methods: list[SamplingMethod]) -> Iterator[list[int]]:
        """Yield chunks of rows that need more than argmax; the rows of a chunk are sampled in the same way."""
        yield from self.split([i for i, method in enumerate(methods) if method.random and not method.truncated])
        yield from self.split([i for i, method in enumerate(methods) if method.random and method.truncated])
        if not self._raw:
            yield from self.split(
                [i for i, method in enumerate(methods) if not method.random and method.logprobs is not None]
            )

    def _sample_chunk(
        self,
        x: Tensor,
        best: Tensor,
        best_ids: Tensor,
        row_params: Tensor,
        rows: list[int],
        chunk_methods: list[SamplingMethod],
        chosen: Tensor | None,
    ) -> tuple[Tensor, list[Pending]]:
        """Return tokens int64 [b] of one chunk, and the log-probabilities of its rows that request them.

        x float32 [b, V], its maxima best and best_ids [b], row_params and chunk_methods belong to the rows `rows` of
        the batch, which are all sampled in the same way. Log-probabilities are those of the tokens `chosen`, if given.
        """
        z = (x - best.unsqueeze(1)).div_(row_params[:, _TEMPERATURE].to(torch.float32).unsqueeze(1))
        weights = weights_of(z)
        top_k, top_p, min_p, u = (row_params[:, c] for c in (_TOP_K, _TOP_P, _MIN_P, UNIFORM))
        if not chunk_methods[0].random:
            sampled = untruncated(best_ids, weights)
        elif chunk_methods[0].truncated:
            ks = [method.top_k for method in chunk_methods]
            sampled = sample_truncated(z, weights, top_k, top_p, min_p, u, max(ks) if min(ks) > 0 else 0)
        else:
            sampled = sample_full(weights, min_p if any(method.min_p for method in chunk_methods) else None, u)
        top_counts = {j: count for j, method in enumerate(chunk_methods) if (count := method.logprobs) is not None}
        if self._raw or not top_counts:
            return sampled.token_ids, []
        # Mark rows without a finite maximum with the token -1, as in the batch.
        token_ids = torch.where(torch.isfinite(best), sampled.token_ids if chosen is None else chosen, -1)
        logprob_rows = list(top_counts)
        logprobs = DeviceLogprobs.of(
            rows_of(z, logprob_rows),
            rows_of(token_ids, logprob_rows),
            rows_of(sampled.kept, logprob_rows),
            rows_of(sampled.total, logprob_rows),
            list(top_counts.values()),
        )
        return sampled.token_ids, [([rows[j] for j in logprob_rows], logprobs)]


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

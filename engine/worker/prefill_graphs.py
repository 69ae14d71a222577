"""Prefill: prompt chunks packed into one varlen step, replayed as one graph per token bucket.

Backends whose attention reads host values run the same step eager, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.attention.metadata import PrefillMetadata
from engine.models.interface import Model
from engine.sampling.greedy import GreedySampler
from engine.scheduling.batch import PrefillChunk
from engine.utils.async_copy import ids_to, upload
from engine.worker.step_input import ChunkInput
from graph_cache.addresses import AddressBook
from graph_cache.buckets import Buckets
from graph_cache.buffers import BATCH, BufferSpec, StaticBuffers
from graph_cache.site import Site

SITE = "prefill"
TOKEN_BUCKETS = (*range(64, 1024, 64), *range(1024, 2048, 128), *range(2048, 4096, 512), *range(4096, 8193, 1024))
"""Token buckets below max_num_batched_tokens, which is a bucket too. They are dense at small sizes: under load, each
request that ends is followed by one prompt of a few hundred tokens, so nearly every step pays for padding there.
"""

MIN_CHUNKS, MAX_CHUNKS, TOKENS_PER_CHUNK = 16, 256, 16
"""A bucket holds one chunk per TOKENS_PER_CHUNK tokens, within these limits. Each is a row of the LM head's GEMM, used
or not. A step with more chunks takes a larger bucket.
"""


class PackedLayout(NamedTuple):
    """Layout of a prefill step's inputs in one int64 tensor.

    - [4, num_chunks]: per chunk, the number of tokens up to its end, the number of tokens before it in its sequence,
      the index of its last token in the step, and the `last_tokens` entry for its next token (0: none).
    - [tokens, 3]: per token, its id, its position and its page table row.
    - [num_chunks + 1, groups, pages_per_chunk]: page tables, last because only those of the step's chunks are uploaded;
      row 0 is padding.
    """

    num_chunks: int
    pages_per_chunk: int
    groups: int

    def size(self, tokens: int, chunks: int) -> int:
        """Return the number of elements of a step of `tokens` tokens with the page tables of its first `chunks`."""
        return self._table_start(tokens) + (chunks + 1) * self.groups * self.pages_per_chunk

    def split(self, packed: Any, tokens: int) -> tuple[Any, Any, Any]:
        """Return views of the parts of a tensor or array: [4, num_chunks], [tokens, 3] and the page tables."""
        start = self._table_start(tokens)
        return (
            packed[: 4 * self.num_chunks].reshape(4, self.num_chunks),
            packed[4 * self.num_chunks : start].reshape(tokens, 3),
            packed[start:].reshape(-1, self.groups, self.pages_per_chunk),
        )

    def _table_start(self, tokens: int) -> int:
        return 4 * self.num_chunks + 3 * tokens

    def fill(self, chunks: Sequence[PrefillChunk], tokens: int) -> np.ndarray:
        """Create the host array of a step of `tokens` tokens, padding included, with its chunks' page tables."""
        packed = np.zeros(self.size(tokens, len(chunks)), np.int64)
        per_chunk, per_token, tables = self.split(packed, tokens)
        start = 0
        for index, chunk in enumerate(chunks):
            end = start + chunk.length
            entry = chunk.request.slot + 1 if chunk.is_last else 0
            per_chunk[:, index] = end, chunk.start, end - 1, entry
            for group, pages in enumerate(chunk.request.page_tables):
                tables[index + 1, group, : len(pages)] = pages
            per_token[start:end, 0] = chunk.request.token_ids[chunk.start : chunk.start + chunk.length]
            per_token[start:end, 1] = np.arange(chunk.start, chunk.start + chunk.length)
            per_token[start:end, 2] = index + 1
            start = end
        per_chunk[0, len(chunks) :] = start  # unused chunks are empty: they end where the last one does
        return packed


class PrefillBuckets:
    """The token buckets of prefill, and how many chunks each holds."""

    def __init__(self, max_chunks: int, max_tokens: int, pages_per_chunk: int, groups: int):
        self.sizes = Buckets((*(size for size in TOKEN_BUCKETS if size < max_tokens), max_tokens))
        self._max_chunks, self._pages, self._groups = max_chunks, pages_per_chunk, groups

    @property
    def max_chunks(self) -> int:
        """Number of chunks of the largest bucket: a step must not have more."""
        return self.num_chunks(self.sizes.max)

    def num_chunks(self, bucket: int) -> int:
        """Return how many chunks a bucket holds."""
        return min(self._max_chunks, MAX_CHUNKS, max(MIN_CHUNKS, bucket // TOKENS_PER_CHUNK))

    def choose(self, tokens: int, chunks: int) -> int | None:
        """Return the smallest bucket for this many tokens and chunks; None if no bucket holds them."""
        return next((size for size in self.sizes.sizes if size >= tokens and self.num_chunks(size) >= chunks), None)

    def rows(self, tokens: int, bucket: int) -> int:
        """Return the number of rows to plan with, which rounds up to `bucket`: `tokens`, if it does."""
        return tokens if self.sizes.round_up(tokens) == bucket else bucket

    def layout(self, bucket: int) -> PackedLayout:
        """Return the input layout of a bucket."""
        return PackedLayout(self.num_chunks(bucket), self._pages, self._groups)

    def exact_layout(self, chunks: int) -> PackedLayout:
        """Return the input layout of a step without padding."""
        return PackedLayout(chunks, self._pages, self._groups)


class PrefillOutput(NamedTuple):
    """Hidden states [T, h] after the last layer; logits [C, vocab] and greedy tokens [C] of the C chunks that end."""

    hidden: Tensor
    logits: Tensor
    next_tokens: Tensor


class PrefillStep:
    """Runs packed chunks on a model: captured over static buffers, or eager on new tensors.

    `logits` [rows, vocab] and `next_tokens` [rows] are the outputs of a captured step, and `last_tokens` gets each
    finished prompt's greedy token.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        sampler: GreedySampler,
        buckets: PrefillBuckets,
        last_tokens: Tensor,
        logits: Tensor,
        next_tokens: Tensor,
    ):
        self._model, self._attention, self._sampler, self._buckets = model, attention, sampler, buckets
        self._last_tokens, self._logits, self._next_tokens = last_tokens, logits, next_tokens
        self._rows = torch.arange(1, buckets.max_chunks + 1, device=model.device)
        self._static: StaticBuffers | None = None

    def site(self, addresses: AddressBook) -> Site:
        """Build the site for the graph cache: the packed step at each token bucket.

        `addresses` are those of the model, the KV cache and the outputs.
        """
        model, sizes = self._model, self._buckets.sizes
        layout = self._buckets.layout(sizes.max)
        self._static = StaticBuffers(
            {
                "packed": BufferSpec((layout.size(sizes.max, layout.num_chunks),), torch.int64),
                "hidden": BufferSpec((BATCH, model.config.hidden_size), model.dtype, pad=None),
            },
            sizes.max,
            model.device,
        )
        return Site(SITE, [self._part], self._static, sizes, phase="prefill", addresses=addresses)

    def load(self, packed: np.ndarray) -> None:
        """Copy a bucket's inputs to the static buffers."""
        self._buffers["packed"][: len(packed)].copy_(
            upload(torch.from_numpy(packed), self._model.device), non_blocking=True
        )

    def outputs(self, chunks: Sequence[ChunkInput]) -> PrefillOutput:
        """Return the results of the last run on the static buffers, which the next run overwrites."""
        hidden = self._buffers["hidden"][: sum(chunk.length for chunk in chunks)]
        logits, next_tokens = self._logits[: len(chunks)], self._next_tokens[: len(chunks)]
        ended = _ended(chunks)
        if 0 < len(ended) < len(chunks):
            index = ids_to(self._model.device, ended)
            return PrefillOutput(hidden, logits.index_select(0, index), next_tokens.index_select(0, index))
        return PrefillOutput(hidden, logits, next_tokens)

    def run_eager(self, packed: np.ndarray, chunks: Sequence[ChunkInput]) -> PrefillOutput:
        """Run chunks eager and without padding."""
        spans = [(chunk.start, chunk.length) for chunk in chunks]
        inputs = upload(torch.from_numpy(packed), self._model.device)
        layout = self._buckets.exact_layout(len(chunks))
        hidden = self._forward(layout, inputs, sum(chunk.length for chunk in chunks), spans)
        ended = _ended(chunks)
        logits, next_tokens = self._logits[: len(ended)], self._next_tokens[: len(ended)]
        if ended:
            index = ids_to(self._model.device, ended)
            per_chunk, _, _ = layout.split(inputs, len(hidden))
            _, _, last_rows, entries = per_chunk.index_select(1, index)
            self._sample(hidden, last_rows, entries, logits, next_tokens)
        return PrefillOutput(hidden, logits, next_tokens)

    @property
    def _buffers(self) -> StaticBuffers:
        if self._static is None:
            raise RuntimeError("build the site first: this step has no static buffers")
        return self._static

    def _part(self, packed: Tensor, hidden: Tensor) -> None:
        layout = self._buckets.layout(len(hidden))
        chunks, tokens = layout.num_chunks, len(hidden)
        inputs = packed[: layout.size(tokens, chunks)]
        hidden.copy_(self._forward(layout, inputs, tokens, None))
        (_, _, last_rows, entries), _, _ = layout.split(inputs, tokens)
        self._sample(hidden, last_rows, entries, self._logits[:chunks], self._next_tokens[:chunks])

    def _forward(
        self, layout: PackedLayout, packed: Tensor, tokens: int, spans: Sequence[tuple[int, int]] | None
    ) -> Tensor:
        (ends, starts, _, _), per_token, tables = layout.split(packed, tokens)
        ids, positions, rows = per_token.t().contiguous()
        attention = self._attention.prefill(
            PrefillMetadata(
                tables.transpose(0, 1), positions, rows, ends, starts, self._rows[: layout.num_chunks], spans
            )
        )
        return self._model.forward(ids, positions, attention, rows)

    def _sample(self, hidden: Tensor, last_rows: Tensor, entries: Tensor, logits: Tensor, next_tokens: Tensor) -> None:
        maxima = self._model.head(hidden.index_select(0, last_rows), logits, after_layer=False)
        self._sampler(logits, maxima, entries, None, self._last_tokens, next_tokens)


def _ended(chunks: Sequence[ChunkInput]) -> list[int]:
    """Return the indices of the chunks that end their prompt."""
    return [index for index, chunk in enumerate(chunks) if chunk.is_last]

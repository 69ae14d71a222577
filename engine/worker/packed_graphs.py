"""Packed steps: prompt chunks, alone or with decodes, and drafts to verify. Varlen, one graph per token bucket.

Backends whose attention reads host values run the same step eager, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend
from engine.attention.kv_cache import KVCache
from engine.attention.metadata import PrefillMetadata
from engine.attention.model_state import ModelState, StepRows
from engine.config import ResolvedConfig
from engine.models.interface import Model
from engine.protocol.phase import Phase
from engine.sampling.greedy import GreedySampler
from engine.scheduling.batch import PrefillChunk, VerifyRow
from engine.scheduling.request import Request
from engine.utils.async_copy import ids_to, upload
from engine.worker.routed_experts import RoutedExperts
from engine.worker.written_memory import written_experts, written_slots
from graph_cache.core.addresses import AddressBook
from graph_cache.core.buckets import Buckets
from graph_cache.core.buffers import BATCH, BufferSpec, StaticBuffers
from graph_cache.core.shadow import Whole, WrittenMemory
from graph_cache.core.site import Site

TOKEN_BUCKETS = (*range(64, 1024, 64), *range(1024, 2048, 128), *range(2048, 4096, 256), *range(4096, 8193, 512))
"""Token buckets below max_num_batched_tokens, which is a bucket too. They are dense at small sizes: under load, each
request that ends is followed by one prompt of a few hundred tokens, so nearly every step pays for padding there.
"""

VERIFY_BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
"""Token buckets of steps that verify drafts, below the largest."""

MIN_VERIFY_TOKENS = 64  # room for drafts of a few requests, however small the batch
MAX_MIXED_DECODES = 128
"""Decodes in one packed step with prompt chunks, if prefill attention reads their keys once. Decode attention reads
more of them faster.
"""

SIZES = {Phase.PREFILL: TOKEN_BUCKETS, Phase.VERIFY: VERIFY_BUCKETS}

MIN_CHUNKS, MAX_CHUNKS, TOKENS_PER_CHUNK = 16, 256, 16
"""A bucket holds one chunk per TOKENS_PER_CHUNK tokens, within these limits. Each is a row of the LM head's GEMM, used
or not. A step with more chunks takes a larger bucket.
"""


class PackedLayout(NamedTuple):
    """Layout of a prefill step's inputs in one int64 tensor.

    - [5, num_chunks]: per chunk, the number of tokens up to its end, the number of tokens before it in its sequence,
      the index of its last token in the step, the `last_tokens` entry for its next token (0: none), and the
      entry of its slot in the model's state (0: padding).
    - [tokens, 3]: per token, its id, its position and its page table row.
    - [num_chunks + 1, groups, pages_per_chunk]: page tables, last because only the tables of the step's chunks are
      uploaded; row 0 is padding.
    """

    num_chunks: int
    pages_per_chunk: int
    groups: int

    def size(self, tokens: int, chunks: int) -> int:
        """Return the number of elements of a step of `tokens` tokens with the page tables of its first `chunks`."""
        return self._table_start(tokens) + (chunks + 1) * self.groups * self.pages_per_chunk

    def split(self, packed: Any, tokens: int) -> tuple[Any, Any, Any]:
        """Return views of the parts of a tensor or array: [5, num_chunks], [tokens, 3] and the page tables."""
        start, table_size = self._table_start(tokens), self.groups * self.pages_per_chunk
        tables = (len(packed) - start) // table_size if table_size else 0
        return (
            packed[: 5 * self.num_chunks].reshape(5, self.num_chunks),
            packed[5 * self.num_chunks : start].reshape(tokens, 3),
            packed[start:].reshape(tables, self.groups, self.pages_per_chunk),
        )

    def _table_start(self, tokens: int) -> int:
        return 5 * self.num_chunks + 3 * tokens

    def fill(self, rows: Sequence[PackedRow], tokens: int) -> np.ndarray:
        """Create the host array of a step of `tokens` tokens, padding included, with its rows' page tables."""
        packed = np.zeros(self.size(tokens, len(rows)), np.int64)
        per_chunk, per_token, tables = self.split(packed, tokens)
        start = 0
        for index, row in enumerate(rows):
            end = start + len(row.tokens)
            per_chunk[:, index] = end, row.start, end - 1, row.entry, row.slot_entry
            for group, pages in enumerate(row.page_tables):
                tables[index + 1, group, : len(pages)] = pages
            per_token[start:end, 0] = row.tokens
            per_token[start:end, 1] = np.arange(row.start, row.start + len(row.tokens))
            per_token[start:end, 2] = index + 1
            start = end
        per_chunk[0, len(rows) :] = start  # unused chunks are empty: they end where the last one does
        return packed


class PackedRow(NamedTuple):
    """Tokens of one sequence from position `start` on.

    A token -n stands for the newest one of entry n, `last_tokens[n]`, which the host may not know yet.

    `entry`: of `last_tokens`, for the greedy token after them; 0: none. `slot_entry`: see ModelState.
    """

    page_tables: Sequence[Sequence[int]]
    start: int
    tokens: Sequence[int]
    entry: int
    slot_entry: int


def prefill_row(chunk: PrefillChunk) -> PackedRow:
    """Return a prompt chunk as a row."""
    request, end = chunk.request, chunk.start + chunk.length
    slot, entry = request.slot + 1, request.slot + 1 if chunk.is_last else 0
    return PackedRow(request.page_tables, chunk.start, request.token_ids[chunk.start : end], entry, slot)


def decode_row(request: Request, position: int) -> PackedRow:
    """Return a decode, which computes the token at `position`, as a row."""
    entry = request.slot + 1
    token = request.token_ids[position] if position < len(request.token_ids) else -entry
    return PackedRow(request.page_tables, position, (token,), entry, entry)


def verify_row(row: VerifyRow) -> PackedRow:
    """Return a request's newest token and its drafts as a row."""
    request = row.request
    return PackedRow(request.page_tables, row.start, (request.token_ids[row.start], *row.drafts), 0, request.slot + 1)


class PackedBuckets:
    """The token buckets of a phase's packed steps, and how many chunks each holds.

    A step that verifies drafts has at least two tokens per chunk. One of prefill has room for fewer chunks, because
    each is a row of logits. Beside those, there is room for up to `max_decodes` decodes.
    """

    def __init__(
        self, phase: Phase, max_chunks: int, max_tokens: int, pages_per_chunk: int, groups: int, max_decodes: int = 0
    ):
        self.phase = phase
        self._max_decodes = max_decodes
        self.sizes = Buckets((*(size for size in SIZES[phase] if size < max_tokens), max_tokens))
        self._max_chunks, self._pages, self._groups = max_chunks, pages_per_chunk, groups

    @property
    def max_chunks(self) -> int:
        """Number of chunks of the largest bucket: a step must not have more."""
        return self.num_chunks(self.sizes.max)

    def num_chunks(self, bucket: int) -> int:
        """Return how many chunks a bucket holds."""
        if self.phase is Phase.VERIFY:
            return min(self._max_chunks, max(1, bucket // 2))
        prompts = min(MAX_CHUNKS, max(MIN_CHUNKS, bucket // TOKENS_PER_CHUNK))
        return min(self._max_chunks, max(prompts, min(bucket, self._max_decodes + prompts)))

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


def prefill_buckets(config: ResolvedConfig, pages_per_chunk: int, groups: int, max_decodes: int) -> PackedBuckets:
    """Return the buckets of prompt chunks, with room for up to `max_decodes` decodes beside them."""
    tokens = config.max_num_batched_tokens
    return PackedBuckets(Phase.PREFILL, config.max_num_seqs, tokens, pages_per_chunk, groups, max_decodes)


def verify_buckets(config: ResolvedConfig, pages_per_chunk: int, groups: int) -> PackedBuckets:
    """Return the buckets of drafts to verify."""
    tokens = min(config.max_num_batched_tokens, max(MIN_VERIFY_TOKENS, config.max_num_seqs))
    return PackedBuckets(Phase.VERIFY, config.max_num_seqs, tokens, pages_per_chunk, groups)


class PackedOutput(NamedTuple):
    """Hidden states [T, h] after the last layer; logits [N, vocab] and greedy tokens [N] of the sampled rows."""

    hidden: Tensor
    logits: Tensor
    next_tokens: Tensor


class PackedStep:
    """Runs packed rows on a model: captured over static buffers, or eager on new tensors.

    In phase PREFILL a token may be sampled after the last token of each chunk, and `last_tokens` gets the greedy token
    of chunks that end their prompt, and of decodes among them. In phase VERIFY one is sampled after every token.
    `logits` [rows, vocab] and `next_tokens` [rows] are the outputs.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        sampler: GreedySampler,
        buckets: PackedBuckets,
        last_tokens: Tensor,
        logits: Tensor,
        next_tokens: Tensor,
        kv: KVCache,
        model_state: ModelState,
        routed_experts: RoutedExperts | None = None,
    ):
        self._routed_experts = routed_experts
        self._model, self._attention, self._sampler, self.buckets = model, attention, sampler, buckets
        self._kv, self._model_state = kv, model_state
        self._last_tokens, self._logits, self._next_tokens = last_tokens, logits, next_tokens
        self._rows = torch.arange(1, buckets.max_chunks + 1, device=model.device)
        self._padding = torch.zeros(len(logits), dtype=torch.int64, device=model.device)
        self._static: StaticBuffers | None = None

    def site(self, addresses: AddressBook) -> Site:
        """Build the site for the graph cache, named like the phase: the packed step at each token bucket.

        `addresses` are the addresses of the model, the KV cache and the outputs.
        """
        model, sizes, phase = self._model, self.buckets.sizes, self.buckets.phase
        layout = self.buckets.layout(sizes.max)
        self._static = StaticBuffers(
            {
                "packed": BufferSpec((layout.size(sizes.max, layout.num_chunks),), torch.int64),
                "hidden": BufferSpec((BATCH, model.config.hidden_size), model.dtype, pad=None),
            },
            sizes.max,
            model.device,
        )
        return Site(
            phase.value,
            [self._part],
            self._static,
            sizes,
            phase=phase.value,
            addresses=addresses,
            writes=self._writes,
        )

    def load(self, packed: np.ndarray) -> None:
        """Copy a bucket's inputs to the static buffers."""
        self._buffers["packed"][: len(packed)].copy_(
            upload(torch.from_numpy(packed), self._model.device), non_blocking=True
        )

    def outputs(self, tokens: int, rows: Sequence[int]) -> PackedOutput:
        """Return the results of the last run on the static buffers for its first `tokens` tokens.

        `rows` are the sampled rows wanted: indices of chunks or, in phase VERIFY, of tokens. They are moved to the
        first rows of the outputs, which the next run overwrites.
        """
        count = len(rows)
        logits, next_tokens = self._logits[:count], self._next_tokens[:count]
        if list(rows) != list(range(count)):
            index = ids_to(self._model.device, rows)
            logits.copy_(self._logits.index_select(0, index))
            next_tokens.copy_(self._next_tokens.index_select(0, index))
        return PackedOutput(self._buffers["hidden"][:tokens], logits, next_tokens)

    def run_eager(self, packed: np.ndarray, spans: Sequence[tuple[int, int]], rows: Sequence[int]) -> PackedOutput:
        """Run rows of these (start, length) eager and without padding. `rows`: see `outputs`."""
        inputs, tokens = upload(torch.from_numpy(packed), self._model.device), sum(length for _, length in spans)
        layout = self.buckets.exact_layout(len(spans))
        hidden = self._forward(layout, inputs, tokens, spans)
        logits, next_tokens = self._logits[: len(rows)], self._next_tokens[: len(rows)]
        if rows:
            ends, entries = self._sampled(layout, inputs, tokens)
            index = ids_to(self._model.device, rows)
            self._sample(hidden, ends.index_select(0, index), entries.index_select(0, index), logits, next_tokens)
        return PackedOutput(hidden, logits, next_tokens)

    @property
    def _buffers(self) -> StaticBuffers:
        if self._static is None:
            raise RuntimeError("build the site first: this step has no static buffers")
        return self._static

    def _part(self, packed: Tensor, hidden: Tensor) -> None:
        tokens = len(hidden)
        layout = self.buckets.layout(tokens)
        inputs = packed[: layout.size(tokens, layout.num_chunks)]
        hidden.copy_(self._forward(layout, inputs, tokens, None))
        ends, entries = self._sampled(layout, inputs, tokens)
        self._sample(hidden, ends, entries, self._logits[: len(ends)], self._next_tokens[: len(ends)])

    def _writes(self, tokens: int) -> list[WrittenMemory]:
        """Return what a step of this bucket on the loaded inputs writes beside the static buffers."""
        layout = self.buckets.layout(tokens)
        packed = self._buffers["packed"][: layout.size(tokens, layout.num_chunks)]
        (_, _, _, _, entries), per_token, tables = layout.split(packed, tokens)
        _, positions, rows = per_token.t().contiguous()
        ends, _ = self._sampled(layout, packed, tokens)
        found: list[WrittenMemory] = [
            Whole("last_tokens", self._last_tokens),
            Whole("logits", self._logits[: len(ends)]),
            Whole("next_tokens", self._next_tokens[: len(ends)]),
        ]
        found += written_slots(self._kv, tables.transpose(0, 1), rows, positions)
        return found + self._model_state.written(StepRows(entries)) + written_experts(self._routed_experts, tokens)

    def _sampled(self, layout: PackedLayout, packed: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Return the indices of the tokens after which one is sampled, and their entries of `last_tokens`."""
        if self.buckets.phase is Phase.VERIFY:
            return torch.arange(tokens, device=packed.device), self._padding[:tokens]
        (_, _, ends, entries, _), _, _ = layout.split(packed, tokens)
        return ends, entries

    def _forward(
        self, layout: PackedLayout, packed: Tensor, tokens: int, spans: Sequence[tuple[int, int]] | None
    ) -> Tensor:
        (ends, starts, _, _, entries), per_token, tables = layout.split(packed, tokens)
        ids, positions, rows = per_token.t().contiguous()
        if self.buckets.phase is Phase.PREFILL:
            newest = self._last_tokens.index_select(0, ids.neg().clamp_(min=0))
            ids = torch.where(ids < 0, newest, ids)
        attention = self._attention.prefill(
            PrefillMetadata(
                tables.transpose(0, 1), positions, rows, ends, starts, self._rows[: layout.num_chunks], spans
            )
        )
        step_rows = StepRows(entries, ends, rows - 1)
        self._model_state.begin(step_rows)
        return self._model.forward(ids, positions, attention, rows, **self._model_state.context(step_rows))

    def _sample(self, hidden: Tensor, ends: Tensor, entries: Tensor, logits: Tensor, next_tokens: Tensor) -> None:
        maxima = self._model.head(hidden.index_select(0, ends), logits, after_layer=False)
        self._sampler(logits, maxima, entries, None, self._last_tokens, next_tokens)

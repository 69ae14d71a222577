"""Prefill on CUDA: prompt chunks packed into one varlen step, replayed as one graph per token bucket.

Imports triton through the fused model, so import this module only on CUDA (or under TRITON_INTERPRET=1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.kernels.paged_prefill import VarlenLayout
from engine.models.fused_dense import FusedDense
from engine.scheduling.batch import PrefillChunk
from engine.utils.async_copy import upload
from graph_cache.addresses import AddressBook
from graph_cache.buckets import Buckets
from graph_cache.buffers import BATCH, BufferSpec, StaticBuffers
from graph_cache.site import Site

SITE = "prefill"
TOKEN_BUCKETS = (*range(64, 1024, 64), *range(1024, 2048, 128), *range(2048, 4096, 512), *range(4096, 8193, 1024))
"""Token buckets below max_num_batched_tokens, which is a bucket too. They are dense at small sizes: under load, each
request that ends is followed by one prompt of a few hundred tokens, so nearly every step pays for padding there.
"""

MIN_CHUNKS, TOKENS_PER_CHUNK = 8, 32
"""A bucket holds one chunk per TOKENS_PER_CHUNK tokens, at least MIN_CHUNKS. Each is a row of the LM head's GEMM, used
or not.
"""


class PackedLayout(NamedTuple):
    """Layout of a prefill step's inputs in one int64 tensor.

    - [4, num_chunks]: per chunk, the number of tokens up to its end, the number of tokens before it in its sequence,
      the index of its last token in the step, and the `last_tokens` entry for its next token (0: none).
    - [num_chunks + 1, pages_per_chunk]: page tables; row 0 is padding.
    - [tokens, 3]: per token, its id, its position and its page table row.
    """

    num_chunks: int
    pages_per_chunk: int

    @property
    def token_start(self) -> int:
        """Offset of the per-token part."""
        return 4 * self.num_chunks + (self.num_chunks + 1) * self.pages_per_chunk

    def fill(self, chunks: Sequence[PrefillChunk], tokens: int) -> Tensor:
        """Create the host tensor of a step of `tokens` tokens, padding included."""
        packed = np.zeros(self.token_start + 3 * tokens, np.int64)
        per_chunk = packed[: 4 * self.num_chunks].reshape(4, self.num_chunks)
        table = packed[4 * self.num_chunks : self.token_start].reshape(self.num_chunks + 1, self.pages_per_chunk)
        per_token = packed[self.token_start :].reshape(tokens, 3)
        start = 0
        for index, chunk in enumerate(chunks):
            end = start + chunk.length
            entry = chunk.request.slot + 1 if chunk.is_last else 0
            per_chunk[:, index] = end, chunk.start, end - 1, entry
            pages = chunk.request.page_tables[0]
            table[index + 1, : len(pages)] = pages
            per_token[start:end, 0] = chunk.request.token_ids[chunk.start : chunk.start + chunk.length]
            per_token[start:end, 1] = np.arange(chunk.start, chunk.start + chunk.length)
            per_token[start:end, 2] = index + 1
            start = end
        per_chunk[0, len(chunks) :] = start  # unused chunks are empty: they end where the last one does
        return torch.from_numpy(packed)


class Prefill:
    """Runs packed chunks on a fused model: captured over the static `buffers`, or eager on new tensors."""

    def __init__(self, fused: FusedDense, last_tokens: Tensor, max_chunks: int, max_tokens: int, max_model_len: int):
        model, device = fused.model, fused.model.device
        self._fused, self._last_tokens, self._device = fused, last_tokens, device
        self._pages = -(-max_model_len // fused.kv.page_size)
        self._max_chunks = max_chunks
        self._rows = torch.arange(1, max_chunks + 1, device=device)
        self.buckets = Buckets((*(size for size in TOKEN_BUCKETS if size < max_tokens), max_tokens))
        max_bucket, layout = self.buckets.max, self.layout(self.buckets.max)
        self.buffers = StaticBuffers(
            {
                "packed": BufferSpec((layout.token_start + 3 * max_bucket,), torch.int64),
                "hidden": BufferSpec((BATCH, model.config.hidden_size), model.dtype, pad=None),
                "logits": BufferSpec((layout.num_chunks, model.config.vocab_size), model.dtype, pad=None),
                "next_tokens": BufferSpec((layout.num_chunks,), torch.int64, pad=None),
            },
            max_bucket,
            device,
        )

    def layout(self, bucket: int) -> PackedLayout:
        """Return the input layout of a token bucket, including its number of chunks."""
        return PackedLayout(min(self._max_chunks, max(MIN_CHUNKS, bucket // TOKENS_PER_CHUNK)), self._pages)

    def site(self, addresses: AddressBook) -> Site:
        """Build the site for the graph cache: the packed step at each token bucket.

        `addresses` are those of the model and the KV cache; the site adds its own.
        """
        addresses.watch({"last_tokens": self._last_tokens})
        return Site(SITE, [self._part], self.buffers, self.buckets, phase="prefill", addresses=addresses)

    def load(self, chunks: Sequence[PrefillChunk], bucket: int) -> None:
        """Copy the chunks to a bucket's static inputs."""
        host = self.layout(bucket).fill(chunks, bucket)
        self.buffers["packed"][: len(host)].copy_(upload(host, self._device), non_blocking=True)

    def run_eager(self, chunks: Sequence[PrefillChunk]) -> tuple[Tensor, Tensor, Tensor]:
        """Run any number of chunks eager.

        Returns hidden [T, h] before the final norm, logits [chunks, vocab] and greedy tokens int64 [chunks].
        """
        layout = PackedLayout(len(chunks), self._pages)
        tokens = sum(chunk.length for chunk in chunks)
        inputs = upload(layout.fill(chunks, tokens), self._device)
        vocab = self._fused.model.config.vocab_size
        logits = torch.empty(len(chunks), vocab, dtype=self._fused.model.dtype, device=self._device)
        next_tokens = torch.empty(len(chunks), dtype=torch.int64, device=self._device)
        return self._run(layout, inputs, logits, next_tokens), logits, next_tokens

    def _part(self, packed: Tensor, hidden: Tensor, logits: Tensor, next_tokens: Tensor) -> None:
        layout = self.layout(len(hidden))
        inputs = packed[: layout.token_start + 3 * len(hidden)]
        hidden.copy_(self._run(layout, inputs, logits[: layout.num_chunks], next_tokens[: layout.num_chunks]))

    def _run(self, layout: PackedLayout, packed: Tensor, logits: Tensor, next_tokens: Tensor) -> Tensor:
        ends, starts, last_rows, entries = packed[: 4 * layout.num_chunks].view(4, layout.num_chunks)
        table = packed[4 * layout.num_chunks : layout.token_start].view(layout.num_chunks + 1, layout.pages_per_chunk)
        tokens, positions, rows = packed[layout.token_start :].view(-1, 3).t().contiguous()
        varlen = VarlenLayout(positions, rows, ends, starts, self._rows[: layout.num_chunks])
        hidden = self._fused.prefill(tokens, varlen, table)
        self._fused.sample_greedy(
            entries, None, self._last_tokens, hidden.index_select(0, last_rows), logits, next_tokens, after_layer=False
        )
        return hidden

"""The capturable decode step: one callable under scope `block`, one per layer under scope `layer`.

A step reads only static buffers, the model's weights and the KV cache, so that it can be captured. It writes the next
step's inputs itself (the sampled token and each row's next position), so that it can be replayed again before the host
reads its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from engine.attention.backend import DecodeAttention
from engine.attention.kv_cache import KVCache
from engine.megatron.model import MegatronModel
from engine.models.dense import DenseModel
from engine.worker.input_buffers import Layout
from graph_cache.addresses import AddressBook
from graph_cache.buckets import Buckets
from graph_cache.buffers import StaticBuffers
from graph_cache.site import Site

if TYPE_CHECKING:
    from engine.models.fused_dense import FusedDense  # imports triton, which is installed only with CUDA

SITE = "decode"
Part = Callable[..., None]


def decode_site(
    model: DenseModel | MegatronModel,
    kv: KVCache,
    buffers: StaticBuffers,
    layout: Layout,
    buckets: Buckets,
    *,
    scope: str,
    impl: str,
    contexts: Sequence[int],
    warm_contexts: Sequence[int],
    fused: FusedDense | None = None,
) -> Site:
    """Build the decode site over `buffers` (see `decode_buffers`).

    `contexts` are the KV widths, in tokens, that attention can read; each is a graph variant. Empty if the attention
    kernel reads lengths from device memory. `warm_contexts` are the ones to capture at warm-up. If given, `fused`
    computes the step instead of the model's own layers.
    """
    addresses = model_addresses(model, kv)
    variants = [{"context": width} for width in contexts] or [{}]
    warm = [{"context": width} for width in warm_contexts] or [{}]
    if fused is not None:
        build_parts = _fused_layer_parts if scope == "layer" else _fused_block_part
        parts = build_parts(fused, layout)
    else:
        parts = (_layer_parts if scope == "layer" else _block_part)(model, kv, layout, impl)
    return Site(
        SITE,
        parts,
        buffers,
        buckets,
        scope="layer" if scope == "layer" else "block",
        phase="decode",
        variants=variants,
        warm_variants=warm,
        addresses=addresses,
    )


def model_addresses(model: DenseModel | MegatronModel, kv: KVCache) -> AddressBook:
    """Collect the tensors that a step reads by address, beside its site's static buffers: weights and KV cache."""
    addresses = AddressBook()
    addresses.watch(model, prefix="model.")
    for name, tensors in (("k", kv.k), ("v", kv.v)):
        addresses.watch({str(layer): tensor for layer, tensor in enumerate(tensors)}, prefix=f"kv.{name}.")
    return addresses


class _Rows:
    """The model inputs of one bucket's rows: `tokens` [b], `positions` [b] and each row's page table."""

    def __init__(self, state: Tensor, layout: Layout, bucket: int):
        self._state = layout.views(state)
        self.slots = self._state.slots[:bucket]
        self.positions = self._state.positions[:bucket]

    def tokens(self) -> Tensor:
        return self._state.last_tokens.index_select(0, self.slots)

    def attention(self, kv: KVCache, impl: str, context: int | None) -> DecodeAttention:
        table = self._state.page_table
        width = table if context is None else table[:, : context // kv.page_size]
        return DecodeAttention(kv, width.index_select(0, self.slots), self.positions, impl)

    def advance(self, tokens: Tensor) -> None:
        """Write the next step's inputs: `tokens` int64 [b] and positions plus 1. Padding (entry 0) stays 0."""
        is_real = self.slots.sign()
        self._state.last_tokens.index_copy_(0, self.slots, tokens * is_real)
        self.positions.add_(is_real)


def _sample_greedy(model: DenseModel | MegatronModel, hidden: Tensor, logits: Tensor, next_tokens: Tensor) -> Tensor:
    """Write the logits and the greedy tokens to their buffers; -1 marks a row whose logits are not finite.

    Returns the tokens to feed back, which are always valid ids: the request of a non-finite row fails, but its next
    step may already be enqueued and must have a token to embed.
    """
    logits.copy_(model.logits(hidden))
    best, ids = logits.max(dim=-1)
    next_tokens.copy_(ids.masked_fill(best - best != 0, -1))  # the difference is NaN for NaN and the infinities
    return ids


def _block_part(model: DenseModel | MegatronModel, kv: KVCache, layout: Layout, impl: str) -> list[Part]:
    def step(state, hidden, logits, next_tokens, context=None):
        rows = _Rows(state, layout, len(next_tokens))
        out = model(rows.tokens(), rows.positions, rows.attention(kv, impl, context))
        rows.advance(_sample_greedy(model, out, logits, next_tokens))

    return [step]


def _layer_parts(model: DenseModel | MegatronModel, kv: KVCache, layout: Layout, impl: str) -> list[Part]:
    """Return the parts: embedding, each layer, and the head.

    Only `hidden` is passed from part to part. A graph's internal memory is reused by the next graph's replay, so each
    layer recomputes the rotary embedding and page metadata.
    """

    def embed(state, hidden, logits, next_tokens, context=None):
        hidden.copy_(model.embed_tokens(_Rows(state, layout, len(hidden)).tokens()))

    def layer_part(index: int) -> Part:
        def layer(state, hidden, logits, next_tokens, context=None):
            rows = _Rows(state, layout, len(hidden))
            rope = model.rope(rows.positions)
            hidden.copy_(model.layer(index, hidden, rope, rows.attention(kv, impl, context)))

        return layer

    def head(state, hidden, logits, next_tokens, context=None):
        ids = _sample_greedy(model, model.norm(hidden), logits, next_tokens)
        _Rows(state, layout, len(hidden)).advance(ids)

    return [embed, *(layer_part(index) for index in range(len(model.layers))), head]


def _fused_block_part(fused: FusedDense, layout: Layout) -> list[Part]:
    def step(**buffers: Tensor) -> None:
        for part in _fused_layer_parts(fused, layout):
            part(**buffers)

    return [step]


def _fused_layer_parts(fused: FusedDense, layout: Layout) -> list[Part]:
    """Return the same parts as `_layer_parts`. They pass on `hidden` and scratch memory owned by the fused model."""

    def embed(state, hidden, logits, next_tokens):
        fused.embed_rows(layout.views(state), hidden)

    def layer_part(index: int) -> Part:
        def layer(state, hidden, logits, next_tokens):
            fused.layer(index, hidden, fused.decode_attention(layout.views(state), len(hidden)))

        return layer

    def head(state, hidden, logits, next_tokens):
        rows = layout.views(state)
        fused.sample_greedy(rows.slots, rows.positions, rows.last_tokens, hidden, logits, next_tokens, after_layer=True)

    return [embed, *(layer_part(index) for index in range(fused.depth)), head]

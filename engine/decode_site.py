"""The decode step as the capture core sees it: one callable under scope `block`, one per layer under scope `layer`.

Owns which part of the model goes into which graph. Reads nothing but static buffers, the model's weights and the KV
cache, so that what it does can be captured. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.attention.base import DecodeAttention, KVCache
from engine.models.dense import DenseModel
from graph_cache.addresses import AddressBook
from graph_cache.buckets import Buckets
from graph_cache.buffers import StaticBuffers
from graph_cache.site import Site

SITE = "decode"
Part = Callable[..., None]


def decode_site(model: DenseModel, kv: KVCache, buffers: StaticBuffers, buckets: Buckets, *, scope: str, impl: str,
                contexts: Sequence[int], warm_contexts: Sequence[int]) -> Site:
    """Build the site. `contexts` are the widths that the attention may read, each a graph of its own; empty if the
    attention kernel reads lengths from device memory and needs none.
    """
    book = AddressBook()
    book.watch(model, prefix="model.")
    for name, tensors in (("k", kv.k), ("v", kv.v)):
        book.watch({str(layer): tensor for layer, tensor in enumerate(tensors)}, prefix=f"kv.{name}.")
    variants = [{"context": width} for width in contexts] or [{}]
    warm = [{"context": width} for width in warm_contexts] or [{}]
    make = _layer_parts if scope == "layer" else _block_part
    return Site(SITE, make(model, kv, impl), buffers, buckets, scope="layer" if scope == "layer" else "block",
                phase="decode", variants=variants, warm_variants=warm, addresses=book)


def _attention(kv: KVCache, page_table: Tensor, positions: Tensor, impl: str, context: int | None) -> DecodeAttention:
    width = page_table if context is None else page_table[:, : context // kv.page_size]
    return DecodeAttention(kv, width, positions, impl)


def _finish(model: DenseModel, hidden: Tensor, logits: Tensor, next_tokens: Tensor) -> None:
    """Logits and the greedy choice into their buffers; -1 marks a row whose logits are not finite."""
    logits.copy_(model.logits(hidden))
    best, ids = logits.max(dim=-1)
    next_tokens.copy_(torch.where(torch.isfinite(best), ids, -1))


def _block_part(model: DenseModel, kv: KVCache, impl: str) -> list[Part]:
    def step(tokens, positions, page_table, hidden, logits, next_tokens, context=None):
        attention = _attention(kv, page_table, positions, impl, context)
        _finish(model, model(tokens, positions, attention), logits, next_tokens)

    return [step]


def _layer_parts(model: DenseModel, kv: KVCache, impl: str) -> list[Part]:
    """Embedding, each layer, and the head. Only `hidden` passes from one part to the next: memory inside one graph
    belongs to the next graph as soon as it replays, so each layer derives rotary and page metadata anew.
    """

    def embed(tokens, positions, page_table, hidden, logits, next_tokens, context=None):
        hidden.copy_(model.embed_tokens(tokens))

    def layer_part(index: int) -> Part:
        def layer(tokens, positions, page_table, hidden, logits, next_tokens, context=None):
            attention = _attention(kv, page_table, positions, impl, context)
            cos, sin = model.rope(positions)
            hidden.copy_(model.layer(index, hidden, cos, sin, attention))

        return layer

    def head(tokens, positions, page_table, hidden, logits, next_tokens, context=None):
        _finish(model, model.norm(hidden), logits, next_tokens)

    return [embed, *(layer_part(index) for index in range(len(model.layers))), head]

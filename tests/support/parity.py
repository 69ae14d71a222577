"""Logits of a model of the engine beside a reference's, in chunked prefill and in decode, over pages of a KV cache."""

from __future__ import annotations

from typing import Any

import torch

from engine.attention.cache_spec import group_layers
from engine.attention.kv_cache import KVCache
from engine.attention.metadata import DecodeMetadata
from tests.support.attention import backend_for, prefill_metadata

TOLERANCE = 1e-3
PAGE, PAGES = 8, 24  # tokens in a page, pages of a cache group


def make_cache(model: Any) -> KVCache:
    groups = len(group_layers(model.cache_specs()))
    return KVCache(model.cache_specs(), 1 + groups * PAGES, PAGE, model.dtype, model.device)


def pages_per_group(kv: KVCache, table: torch.Tensor) -> torch.Tensor:
    """Return page tables [groups, rows, P] from the first group's: groups share the pool, so each has its own pages."""
    return torch.stack([torch.where(table > 0, table + group * PAGES, 0) for group in range(len(kv.groups))])


def check_against(reference: Any, model: Any, backend: str = "sdpa") -> None:
    """Compare logits of prefill and of 20 decode steps: two texts in unordered pages, and a padded row."""
    device, lengths = model.device, (67, 22)
    pages = ([9, 3, 14, 2, 8, 21, 5, 1, 23, 24, 17, 12], [4, 22, 6, 13, 7, 11, 10, 15, 16, 18, 19, 20])
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(0, model.config.vocab_size, (length + 20,), generator=generator) for length in lengths]
    expected = [reference(text[None], use_cache=False).logits[0] for text in texts]
    cache = make_cache(model)
    attention_backend = backend_for(cache, backend)

    def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
        assert float((found.cpu() - wanted).abs().max()) < TOLERANCE

    for first, last in ((0, 15), (15, None)):  # chunks of the prompts
        chunks = [(first, (length if last is None else last) - first) for length in lengths]
        spans = [slice(start, start + count) for start, count in chunks]
        tokens = torch.cat([text[span] for text, span in zip(texts, spans, strict=True)]).to(device)
        positions = torch.cat([torch.arange(span.start, span.stop) for span in spans]).to(device)
        metadata = prefill_metadata(cache, chunks, pages)
        metadata = metadata._replace(page_tables=pages_per_group(cache, metadata.page_tables[0]))
        logits = model.compute_logits(model(tokens, positions, attention_backend.prefill(metadata)))
        check(logits, torch.cat([wanted[span] for wanted, span in zip(expected, spans, strict=True)]))

    tables, rows = (
        pages_per_group(cache, torch.tensor([*pages, [0] * 12], device=device)),
        torch.arange(3, device=device),
    )
    for step in range(20):
        at = torch.tensor([lengths[0] + step, lengths[1] + step, 0])
        tokens = torch.tensor([texts[0][at[0]], texts[1][at[1]], 0]).to(device)
        attention = attention_backend.decode(DecodeMetadata(tables, rows, at.to(device)))
        logits = model.compute_logits(model(tokens, at.to(device), attention))
        check(logits[:2], torch.stack([expected[row][at[row]] for row in (0, 1)]))

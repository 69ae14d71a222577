"""Packed prefill: what a bucket's graph captures equals the unfused model, chunk by chunk, including padding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.kernels import DEVICE, DTYPE, relative_error  # isort: skip  (before what imports triton)

from engine.attention.backend import PrefillAttention
from engine.attention.kv_cache import KVCache
from engine.models.fused_dense import FusedDense
from engine.scheduling.batch import PrefillChunk
from engine.worker.decode_graphs import model_addresses
from engine.worker.prefill_graphs import Prefill
from tests.engine.kernels.test_decode_step import TOLERANCE, small_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpretable,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # from Triton: Python's ast, numpy scalars
]


def chunk(slot: int, start: int, length: int, is_last: bool, pages: list[int]) -> PrefillChunk:
    tokens = [(7 * place + 13 * slot + 3) % 512 for place in range(start + length)]
    return PrefillChunk(SimpleNamespace(slot=slot, page_tables=[pages], token_ids=tokens), start, length, is_last, 0)


def test_a_padded_bucket_gives_what_the_plain_model_gives():
    model = small_model()
    config = model.config
    caches = [KVCache(config.num_layers, 24, 16, config.num_kv_heads, config.head_dim, DTYPE, DEVICE) for _ in range(2)]
    past = torch.randn(24, 16, config.num_kv_heads, config.head_dim)
    for cache in caches:
        for layer in range(config.num_layers):
            cache.k[layer].copy_(past)
            cache.v[layer].copy_(past.flip(0))
            cache.k[layer][0], cache.v[layer][0] = 0, 0
    last_tokens = torch.full((9,), 77, dtype=torch.int64, device=DEVICE)
    prefill = Prefill(FusedDense(model, caches[0], 8, 64), last_tokens, 8, 64, 128)
    chunks = [chunk(2, 0, 5, True, [3, 4]), chunk(0, 20, 9, False, [5, 6, 7]), chunk(5, 16, 1, True, [8, 9])]
    with torch.inference_mode():
        prefill.load(chunks, 64)
        [part] = prefill.site(model_addresses(model, caches[0])).parts
        part(**prefill.buffers.view(64))
        logits, chosen = prefill.buffers["logits"][:3], prefill.buffers["next_tokens"][:3]
        attention = PrefillAttention(
            caches[1], [(one.start, one.length) for one in chunks], [one.request.page_tables[0] for one in chunks]
        )
        spans = [(one.request.token_ids, range(one.start, one.start + one.length)) for one in chunks]
        tokens = torch.tensor([ids[place] for ids, span in spans for place in span], device=DEVICE)
        places = torch.tensor([place for _, span in spans for place in span], device=DEVICE)
        hidden = model(tokens, places, attention)
        assert relative_error(logits, model.logits(hidden[[4, 13, 14]])) < 4 * TOLERANCE
        assert relative_error(model.norm(prefill.buffers["hidden"][:15]), hidden) < 4 * TOLERANCE
    assert torch.equal(chosen, logits.float().argmax(-1))
    # only chunks that end their prompts write a token, and padding writes to no request's pages
    assert last_tokens.tolist() == [77, 77, 77, int(chosen[0]), 77, 77, int(chosen[2]), 77, 77]
    for layer in range(config.num_layers):
        assert relative_error(caches[0].k[layer], caches[1].k[layer]) < 4 * TOLERANCE
        assert not caches[0].k[layer][0].any()
    with torch.inference_mode():
        eager_hidden, eager_logits, eager_chosen = prefill.run_eager(chunks)
    assert relative_error(eager_logits, logits) < 4 * TOLERANCE and len(eager_hidden) == 15 and len(eager_chosen) == 3


def test_chunk_capacity_follows_the_bucket_and_max_tokens_is_a_bucket():
    model = small_model()
    cache = KVCache(2, 8, 16, 2, 32, DTYPE, DEVICE)
    prefill = Prefill(FusedDense(model, cache, 4, 300), torch.zeros(5, dtype=torch.int64, device=DEVICE), 4, 300, 64)
    assert prefill.buckets.sizes == (64, 128, 192, 256, 300)
    assert [prefill.layout(size).num_chunks for size in prefill.buckets.sizes] == [4] * 5
    wide = Prefill(FusedDense(model, cache, 64, 1024), torch.zeros(65, dtype=torch.int64, device=DEVICE), 64, 1024, 64)
    assert [wide.layout(size).num_chunks for size in (64, 256, 512, 1024)] == [8, 8, 16, 32]

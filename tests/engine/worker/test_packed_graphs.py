"""Packed prefill: what a bucket's graph captures equals the unfused model, chunk by chunk, including padding."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from tests.support.kernels import DEVICE, DTYPE, relative_error  # isort: skip  (before what imports triton)

from engine.attention.kv_cache import KVCache
from engine.attention.model_state import ModelState
from engine.attention.recurrent_states import RecurrentStates
from engine.attention.triton import TritonBackend
from engine.protocol.phase import Phase
from engine.sampling.greedy import GreedySampler
from engine.scheduling.batch import PrefillChunk
from engine.worker.decode_graphs import model_addresses
from engine.worker.packed_graphs import PackedBuckets, PackedRow, PackedStep, prefill_row
from tests.engine.kernels.test_decode_step import TOLERANCE, small_model
from tests.support.attention import prefill_attention
from tests.support.toy_models import ENTRY, ToyReference, read_config, write_toy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpretable,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # from Triton: Python's ast, numpy scalars
]


def chunk(slot: int, start: int, length: int, is_last: bool, pages: list[int]) -> PrefillChunk:
    tokens = [(7 * place + 13 * slot + 3) % 512 for place in range(start + length)]
    request = SimpleNamespace(
        slot=slot, page_tables=[pages], token_ids=tokens, params=SimpleNamespace(prompt_logprobs=None)
    )
    return PrefillChunk(request, start, length, is_last, 0)


@pytest.mark.parametrize("kernels", ["fused", "torch"])
@pytest.mark.parametrize("dtype", [DTYPE, torch.float32], ids=str)
def test_a_padded_bucket_gives_what_the_plain_model_gives(kernels, dtype):
    if kernels == "fused" and dtype == torch.float32 and DTYPE != dtype:
        pytest.skip("fused kernels compute 16-bit models")
    model = small_model(dtype)
    config = model.config
    caches = [KVCache(config.cache_specs(), 24, 16, dtype, DEVICE) for _ in range(2)]
    past = torch.randn(24, 16, config.num_kv_heads, config.head_dim)
    for cache in caches:
        for layer in range(config.num_layers):
            cache.k[layer].copy_(past)
            cache.v[layer].copy_(past.flip(0))
            cache.k[layer][0], cache.v[layer][0] = 0, 0
    last_tokens = torch.tensor([0] + [77] * 8, device=DEVICE)
    out = torch.empty(8, config.vocab_size, dtype=dtype, device=DEVICE)
    next_tokens = torch.empty(8, dtype=torch.int64, device=DEVICE)
    buckets = PackedBuckets(Phase.PREFILL, 8, 64, 8, 1)
    prefill = PackedStep(
        model.fused(8, 64) if kernels == "fused" else model,
        TritonBackend(caches[0], 8),
        GreedySampler(8, config.vocab_size, torch.device(DEVICE)),
        buckets,
        last_tokens,
        out,
        next_tokens,
        caches[0],
        ModelState(),
    )
    chunks = [chunk(2, 0, 5, True, [3, 4]), chunk(0, 20, 9, False, [5, 6, 7]), chunk(5, 16, 1, True, [8, 9])]
    tolerance = 4 * TOLERANCE if dtype == DTYPE else 1e-4
    with torch.inference_mode():
        site = prefill.site(model_addresses(model, caches[0], ModelState()))
        site.buffers["packed"].fill_(10**9)  # the page tables of unused chunks keep the last step's contents
        prefill.load(buckets.layout(64).fill([prefill_row(one) for one in chunks], 64))
        [part] = site.parts
        part(**site.buffers.view(64))
        spans = [(one.request.token_ids, range(one.start, one.start + one.length)) for one in chunks]
        tokens = torch.tensor([ids[place] for ids, span in spans for place in span], device=DEVICE)
        places = torch.tensor([place for _, span in spans for place in span], device=DEVICE)
        attention = prefill_attention(
            caches[1], [(one.start, one.length) for one in chunks], [one.request.page_tables[0] for one in chunks]
        )
        hidden = model.forward(tokens, places, attention)
        wanted = model.compute_logits(hidden[[4, 13, 14]])
        assert relative_error(out[:3], wanted) < tolerance
        assert torch.equal(next_tokens[:3], out[:3].float().argmax(-1))
        # only chunks that end their prompts write a token, and padding writes to no request's pages
        assert last_tokens.tolist() == [0, 77, 77, int(next_tokens[0]), 77, 77, int(next_tokens[2]), 77, 77]
        graph_logits, graph_tokens = out[[0, 2]].clone(), next_tokens[[0, 2]].clone()
        found = prefill.outputs(15, [0, 2])
        assert relative_error(found.hidden, hidden) < tolerance
    assert torch.equal(found.logits, graph_logits) and torch.equal(found.next_tokens, graph_tokens)
    for layer in range(config.num_layers):
        assert relative_error(caches[0].k[layer][1:], caches[1].k[layer][1:]) < tolerance
    packed = buckets.exact_layout(3).fill([prefill_row(one) for one in chunks], 15)
    with torch.inference_mode():
        eager = prefill.run_eager(packed, [(one.start, one.length) for one in chunks], [0, 2])
    assert relative_error(eager.logits, graph_logits) < tolerance and len(eager.hidden) == 15


@pytest.mark.parametrize("kernels", ["fused", "torch"])
def test_a_step_that_verifies_drafts_has_the_logits_after_every_token(kernels):
    model = small_model()
    config = model.config
    kv = KVCache(config.cache_specs(), 24, 16, DTYPE, DEVICE)
    last_tokens = torch.full((9,), 77, dtype=torch.int64, device=DEVICE)
    out = torch.empty(16, config.vocab_size, dtype=DTYPE, device=DEVICE)
    next_tokens = torch.empty(16, dtype=torch.int64, device=DEVICE)
    buckets = PackedBuckets(Phase.VERIFY, 8, 16, 8, 1)
    verify = PackedStep(
        model.fused(8, 16) if kernels == "fused" else model,
        TritonBackend(kv, 8),
        GreedySampler(16, config.vocab_size, torch.device(DEVICE)),
        buckets,
        last_tokens,
        out,
        next_tokens,
        kv,
        ModelState(),
    )
    ids = [(7 * place + 3) % 512 for place in range(30)]
    rows = [PackedRow([[3, 4]], 20, ids[20:24], 0, 3), PackedRow([[8]], 0, ids[:2], 0, 1)]
    with torch.inference_mode():
        tokens, places = torch.tensor(ids[:24], device=DEVICE), torch.arange(24, device=DEVICE)
        hidden = model.forward(tokens, places, prefill_attention(kv, [(0, 24)], [[3, 4]]))
        wanted = model.compute_logits(hidden[[20, 21, 22, 23, 0, 1]])
        site = verify.site(model_addresses(model, kv, ModelState()))
        assert buckets.choose(6, 2) == 8 and site.phase == site.name == "verify"
        verify.load(buckets.layout(8).fill(rows, 8))
        [part] = site.parts
        part(**site.buffers.view(8))
        assert relative_error(verify.outputs(6, range(6)).logits, wanted) < 4 * TOLERANCE
        eager = verify.run_eager(buckets.exact_layout(2).fill(rows, 6), [(20, 4), (0, 2)], range(6))
        assert relative_error(eager.logits, wanted) < 4 * TOLERANCE
    assert last_tokens[1:].tolist() == [77] * 8  # which drafts are accepted is decided later


@pytest.mark.parametrize("mixers", [("recurrent", "attention"), ("recurrent",)], ids=str)
def test_a_padded_bucket_carries_recurrent_states_from_chunk_to_chunk(mixers, tmp_path):
    weights = write_toy(tmp_path, mixers)
    values = json.loads((tmp_path / "config.json").read_text())
    model = ENTRY.model(read_config(values, ENTRY.family, "config.json"), torch.float32, DEVICE)
    for name, slot in model.weight_slots().items():
        slot.write(weights[name])
    kv = KVCache(model.cache_specs(), 24, 16, torch.float32, DEVICE)
    states = RecurrentStates(model.cache_specs(), 8, torch.float32, DEVICE)
    out = torch.empty(8, model.config.vocab_size, device=DEVICE)
    buckets = PackedBuckets(Phase.PREFILL, 8, 64, 8, len(kv.groups))
    prefill = PackedStep(
        model,
        TritonBackend(kv, 8),
        GreedySampler(8, model.config.vocab_size, torch.device(DEVICE)),
        buckets,
        torch.zeros(9, dtype=torch.int64, device=DEVICE),
        out,
        torch.empty(8, dtype=torch.int64, device=DEVICE),
        kv,
        states,
    )
    site = prefill.site(model_addresses(model, kv, states))
    [part] = site.parts

    def chunk_of(slot: int, start: int, length: int, is_last: bool) -> PrefillChunk:
        one = chunk(slot, start, length, is_last, [2 * slot + 1, 2 * slot + 2])
        one.request.token_ids = [token % 97 for token in one.request.token_ids]
        one.request.page_tables = one.request.page_tables * len(kv.groups)
        return one

    wanted = ToyReference(weights, mixers)
    steps = [
        [chunk_of(2, 0, 5, False), chunk_of(0, 0, 9, True)],
        [chunk_of(5, 0, 1, False), chunk_of(2, 5, 12, False)],
        [chunk_of(2, 17, 1, True), chunk_of(5, 1, 20, True)],
    ]
    with torch.inference_mode():
        for chunks in steps:
            prefill.load(buckets.layout(64).fill([prefill_row(one) for one in chunks], 64))
            part(**site.buffers.view(64))
            for row, one in enumerate(chunks):
                assert relative_error(out[row].cpu(), wanted.logits(one.request.token_ids)[-1]) < 1e-5
    assert not any(whole[:, 0].any() for whole in states.storage)  # padding
    assert not any(whole[:, [2, 4, 5, 7, 8]].any() for whole in states.storage)  # slots of no chunk


def test_chunk_capacity_follows_the_bucket_and_max_tokens_is_a_bucket():
    few, wide = PackedBuckets(Phase.PREFILL, 4, 300, 4, 1), PackedBuckets(Phase.PREFILL, 64, 1024, 4, 1)
    assert few.sizes.sizes == (64, 128, 192, 256, 300)
    assert [few.num_chunks(size) for size in few.sizes.sizes] == [4] * 5
    assert [wide.num_chunks(size) for size in (64, 256, 512, 1024)] == [16, 16, 32, 64]


@pytest.mark.parametrize(("tokens", "chunks", "bucket"), [(60, 3, 64), (60, 17, 320), (1000, 64, 1024), (65, 1, 128)])
def test_a_step_takes_the_smallest_bucket_that_holds_its_tokens_and_chunks(tokens, chunks, bucket):
    buckets = PackedBuckets(Phase.PREFILL, 64, 1024, 4, 1)
    assert buckets.choose(tokens, chunks) == bucket
    assert buckets.sizes.round_up(buckets.rows(tokens, bucket)) == bucket

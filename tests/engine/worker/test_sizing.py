"""The sizes that the engine chooses, and the ones it rejects."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from dataclasses import replace

import pytest
import torch

from engine.attention.cache_spec import LatentSpec, RecurrentStateSpec
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.rotary import RopeScaling
from engine.models.registry import config_from_folder
from engine.worker.sizing import CPU_KV_BYTES, CPU_KV_SHARE, context_buckets, page_bytes, resolve, state_bytes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny_model):
    return config_from_folder(tiny_model)


def resolved(model, **settings) -> EngineConfig:
    return resolve(EngineConfig(**settings), model, CPU, torch.float32)


def test_every_gap_is_filled_and_what_was_given_stays(model):
    config = resolved(model)
    assert config.max_model_len == model.context_length == 4096
    assert (config.device, config.dtype) == ("cpu", "float32")
    for name in ("max_num_seqs", "max_num_batched_tokens", "num_pages"):
        assert getattr(config, name) >= 2
    given = {"max_model_len": 100, "max_num_seqs": 3, "max_num_batched_tokens": 5, "num_pages": 7, "page_size": 4}
    config = resolved(model, **given)
    assert {name: getattr(config, name) for name in given} == given
    assert vars(resolve(config, model, CPU, torch.float32)) == vars(config)


def test_pages_hold_every_sequence_at_full_length_where_memory_allows(model):
    config = resolved(model, max_model_len=100, max_num_seqs=3, page_size=16)
    assert config.num_pages == 1 + 3 * 7
    many = resolved(model, max_num_seqs=4000, max_num_batched_tokens=4000)
    assert 4096 // 16 < many.num_pages < 4000 * 4096 // 16
    assert many.num_pages * page_bytes(model, 16, torch.float32) <= CPU_KV_BYTES


def test_a_budget_of_tokens_grows_with_the_sequences(model):
    assert resolved(model, max_num_seqs=1000).max_num_batched_tokens >= 1000


@pytest.mark.parametrize("total, seqs", [(24 << 30, 256), (79 << 30, 1024), (141 << 30, 1024)])
def test_a_large_gpu_runs_more_sequences_at_once(model, monkeypatch, total, seqs):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - (1 << 30), total))
    assert resolve(EngineConfig(), model, torch.device("cuda"), torch.bfloat16).max_num_seqs == seqs
    fewer = resolve(EngineConfig(max_num_batched_tokens=200), model, torch.device("cuda"), torch.bfloat16)
    assert (fewer.max_num_seqs, fewer.max_num_batched_tokens) == (200, 200)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"max_model_len": 4097}, "max_model_len=4097 exceeds the model's context of 4096"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "max_num_batched_tokens=7 is below max_num_seqs=8"),
        ({"num_pages": 1}, "num_pages=1"),
        ({"graph_buckets": (1, 64)}, r"graph_buckets=1,64: .*\[64\] are larger than max_num_seqs=16"),
    ],
)
def test_sizes_that_contradict_the_model_or_each_other_are_refused(model, settings, words):
    with pytest.raises(ConfigError, match=words):
        resolved(model, **settings)


def test_a_context_that_no_memory_holds_is_refused_with_what_to_do(model):
    huge = dataclasses.replace(model, num_layers=200, num_kv_heads=64, head_dim=256)
    with pytest.raises(ConfigError, match=r"lower max_model_len, or give num_pages") as refused:
        resolved(huge, max_model_len=4096)
    assert "4096" in str(refused.value)
    assert resolved(huge, max_model_len=4096, num_pages=10).num_pages == 10


def with_specs(model, *specs):
    """Return the model's config with these cache specs."""
    kind = type("ConfigWithSpecs", (type(model),), {"cache_specs": lambda self: specs})
    return kind(**vars(model))


def test_a_page_of_latents_holds_no_values(model):
    latent = LatentSpec(width=24, scale=1.0)
    assert page_bytes(with_specs(model, latent, latent), 16, torch.bfloat16) == 2 * 16 * 24 * 2


def test_recurrent_states_take_their_memory_from_the_pages(model):
    [full, _] = model.cache_specs()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    budget = min(CPU_KV_BYTES, int(memory * CPU_KV_SHARE))
    settings = {"max_num_batched_tokens": 4096, "max_num_seqs": 4000, "max_model_len": 4096}
    per_sequence = budget // 4001 // 2  # in elements of 2 bytes
    small, large = (
        with_specs(model, full, RecurrentStateSpec(shapes=((size,), (2, 3)), dtype=torch.bfloat16))
        for size in (per_sequence // 4, per_sequence)
    )
    taken = 4001 * 2 * (per_sequence // 4 + 6)
    assert state_bytes(small, 4000, torch.float32) == taken
    assert resolved(small, **settings).num_pages == (budget - taken) // page_bytes(small, 16, torch.float32)
    with pytest.raises(ConfigError, match="recurrent states for max_num_seqs=4000.*: lower max_model_len or max_num_s"):
        resolved(large, **settings)


def test_a_model_without_paged_layers_gets_no_pages(model):
    state = RecurrentStateSpec(shapes=((4,),))
    assert resolved(with_specs(model, state, state)).num_pages == 2


@pytest.mark.parametrize(
    "limit, page_size, expected",
    [
        (2048, 16, (256, 512, 1024, 2048)),
        (2000, 16, (256, 512, 1024, 2000)),
        (100, 16, (112,)),
        (256, 16, (256,)),
        (257, 16, (256, 272)),
        (5, 16, (16,)),
        (600, 300, (300, 600)),
        (270, 48, (288,)),
    ],
)
def test_context_buckets_double_up_to_the_context(limit, page_size, expected):
    assert context_buckets(limit, page_size) == expected


def test_context_buckets_are_ascending_whole_pages_that_reach_the_context():
    limits, page_sizes = (1, 15, 255, 256, 257, 700, 1024, 4097), (1, 3, 16, 48, 100, 256, 300, 1024)
    for limit, page_size in itertools.product(limits, page_sizes):
        widths = context_buckets(limit, page_size)
        assert list(widths) == sorted(set(widths)), (limit, page_size)
        assert all(width % page_size == 0 for width in widths)
        assert limit <= widths[-1] < limit + page_size


def test_a_long_context_of_longrope_is_logged(model, caplog):
    scaling = RopeScaling(
        kind="longrope", original_max_position_embeddings=512, short_factor=(1.0,) * 8, long_factor=(2.0,) * 8
    )
    long = replace(model, rope_scaling=scaling)
    with caplog.at_level(logging.INFO, logger="engine.worker.sizing"):
        resolved(long, max_model_len=512)
        assert not caplog.records
        resolved(long)
    assert "all contexts use long_factor, since max_model_len is 4096; up to 512 would select short" in caplog.text


def test_a_context_that_dynamic_scaling_would_change_is_refused(model):
    dynamic = replace(model, rope_scaling=RopeScaling(kind="dynamic", factor=4.0))
    with pytest.raises(ConfigError, match="max_model_len=4097 exceeds the model's context of 4096 tokens"):
        resolved(dynamic, max_model_len=4097)

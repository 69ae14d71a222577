"""An engine on a Qwen3-MoE model: every scope, chunking, preemption and cached prefix gives transformers' tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine
from engine.errors import WeightUpdateError
from tests.engine.lively import MANY, PROMPTS, Reference
from tests.support.engines import DEVICES, engines, greedy_tokens
from tests.support.qwen3_moe import write_lively_moe

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")  # from Triton: Python's ast, numpy scalars
LAYERS = 3
SMALL = {"num_pages": 20, "max_model_len": 128}


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lively-moe")
    write_lively_moe(tiny_model, folder)
    return folder


@pytest.fixture(scope="module")
def moe_reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(params=DEVICES)
def make(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[..., Engine]]:
    """Make engines with settings; each is checked for leaks and closed after the test."""
    with engines(model=str(folder), device=request.param) as make:
        yield make


def tokens_of(engine: Engine, prompts: Any = PROMPTS, count: int = 20) -> list[list[int]]:
    return greedy_tokens(engine, prompts, count)


@pytest.mark.parametrize("scope", ["none", "layer", "block"])
def test_every_scope_gives_the_tokens_of_transformers(make, moe_reference, scope):
    engine = make(inference_cuda_graph_scope=scope)
    assert tokens_of(engine) == [moe_reference.greedy(prompt, 20) for prompt in PROMPTS]
    replays = dict(engine.stats().graphs["replays"])
    assert any(labels[2] == "decode" for labels in replays) == (scope != "none")
    assert not any(reason == "capture_failed" for (_, _, reason), _ in engine.stats().graphs["fallbacks"])


def test_chunked_prefill_gives_the_same_tokens(make, moe_reference):
    engine = make(max_num_batched_tokens=8)
    assert tokens_of(engine) == [moe_reference.greedy(prompt, 20) for prompt in PROMPTS]


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_requests_give_the_same_tokens(make, moe_reference, prefix_caching):
    engine = make(**SMALL, enable_prefix_caching=prefix_caching)
    assert tokens_of(engine, MANY, 60) == [moe_reference.greedy(prompt, 60) for prompt in MANY]
    assert engine.stats().num_preemptions > 0


def test_a_cached_prefix_gives_the_same_tokens(make, moe_reference):
    engine = make()
    shared = [5 + 7 * place % 300 for place in range(48)]
    for prompt in ([*shared, 9], [*shared, 200, 31]):
        assert tokens_of(engine, [prompt]) == [moe_reference.greedy(prompt, 20)]
    assert engine.stats().prefix_cache_hits > 0


@pytest.mark.parametrize("scope", ["layer", "block"])
def test_a_padded_bucket_gives_the_tokens_of_the_exact_one(make, moe_reference, scope):
    expected = [moe_reference.greedy(prompt, 20) for prompt in PROMPTS[:3]]
    for buckets in ((3, 8), (4, 8)):
        assert tokens_of(make(graph_buckets=buckets, inference_cuda_graph_scope=scope), PROMPTS[:3]) == expected


@pytest.mark.parametrize("stacked", [True, False])
def test_updated_experts_serve_without_a_new_capture(make, folder, stacked):
    engine = make(warmup="full")
    captures = dict(engine.stats().graphs["captures"])
    before = tokens_of(engine)
    changed = Reference(folder)
    stacks = {name: tensor for name, tensor in changed.model.named_parameters() if ".mlp.experts." in name}
    with torch.no_grad():
        for tensor in stacks.values():
            tensor.mul_(-0.5)
    if stacked:
        update = list(stacks.items())
    else:
        own = engine.loop.executor.worker.runner.model.named_weights()
        update = [(name, tensor * -0.5) for name, tensor in own if ".mlp.experts." in name]
    engine.update_weights(update, version="other")
    assert tokens_of(engine) == [changed.greedy(prompt, 20) for prompt in PROMPTS] != before
    assert dict(engine.stats().graphs["captures"]) == captures


def test_an_invalid_update_keeps_the_old_experts(make, moe_reference):
    engine = make()
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    with pytest.raises(WeightUpdateError, match=name):
        engine.update_weights([(name, torch.zeros(3, 3))], version="bad")
    assert tokens_of(engine, PROMPTS[:1]) == [moe_reference.greedy(PROMPTS[0], 20)]


def test_dummy_weights_serve(make):
    engine = make(load_format="dummy")
    assert [len(tokens) for tokens in tokens_of(engine)] == [20] * len(PROMPTS)


def test_int4_stores_experts_in_4_bits(folder):
    with engines(model=str(folder), dtype="auto", cpu_weight_format="int4") as make:
        engine = make()
        assert engine.loop.executor.worker.runner.model.layers[0].mlp.experts.down.linear_weight.format == "int4"
        assert [len(tokens) for tokens in tokens_of(engine)] == [20] * len(PROMPTS)

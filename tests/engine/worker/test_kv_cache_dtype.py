"""A KV cache in fp8: the tokens of transformers with keys and values rounded, in every phase and scope."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.attention.cache_spec import FullAttentionSpec
from engine.attention.kv_cache import FP8_DTYPES, KVCache
from engine.attention.selection import choose_backend
from engine.errors import ConfigError
from tests.engine.lively import MANY, PROMPTS, Reference
from tests.support.engines import greedy_tokens

NAMES = tuple(FP8_DTYPES)


class RoundedReference(Reference):
    """transformers, with keys and values rounded to fp8 after the rotary embedding."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        def attend(module, query, key, value, *args, **kwargs):
            key, value = (one.to(dtype).to(one.dtype) for one in (key, value))
            return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *args, **kwargs)

        name = f"rounded_{dtype}".replace(".", "_")
        ALL_ATTENTION_FUNCTIONS.register(name, attend)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=name).eval()
        self._greedy = {}


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def rounded(name: str, lively_model: Path) -> RoundedReference:
    return RoundedReference(lively_model, FP8_DTYPES[name])


def expected(reference: Reference, prompts=PROMPTS, count: int = 16) -> list[list[int]]:
    return [reference.greedy(prompt, count) for prompt in prompts]


@pytest.mark.parametrize("scope", ["none", "layer", "block"])
def test_tokens_are_those_of_rounded_keys_and_values(make_engine, name, rounded, reference, scope):
    engine = make_engine(kv_cache_dtype=name, inference_cuda_graph_scope=scope)
    assert greedy_tokens(engine, PROMPTS, 16) == expected(rounded) != expected(reference)
    assert not any(reason == "capture_failed" for (_, _, reason), _ in engine.stats().graphs["fallbacks"])


@pytest.mark.parametrize(
    "settings", [{"max_num_batched_tokens": 8}, {"num_speculative_tokens": 3}], ids=["chunks", "drafts"]
)
def test_other_phases_give_the_same_tokens(make_engine, name, rounded, settings):
    assert greedy_tokens(make_engine(kv_cache_dtype=name, **settings), PROMPTS, 16) == expected(rounded)


def test_preemption_and_cached_prefixes_give_the_same_tokens(make_engine, name, rounded):
    engine = make_engine(kv_cache_dtype=name, num_pages=20, max_model_len=128)
    assert greedy_tokens(engine, MANY, 40) == expected(rounded, MANY, 40)
    assert engine.stats().num_preemptions > 0
    shared = list(range(3, 51))
    for prompt in ([*shared, 9], [*shared, 200, 31]):
        assert greedy_tokens(engine, [prompt], 8) == expected(rounded, [prompt], 8)
    assert engine.stats().prefix_cache_hits > 0


def test_the_cache_takes_one_byte_per_value(make_engine, name):
    plain, fp8 = make_engine(num_pages=40), make_engine(num_pages=40, kv_cache_dtype=name)
    assert fp8.loop.executor.worker.runner.kv.nbytes * 4 == plain.loop.executor.worker.runner.kv.nbytes


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_large_values_saturate_and_those_that_are_not_finite_become_nan(dtype, limit):
    specs = (FullAttentionSpec(kv_heads=1, head_dim=4),)
    kv = KVCache(specs, 2, 16, torch.float32, "cpu", stored=dtype)
    found = kv.decode(kv.encode(torch.tensor([1e6, -1e6, 0.0, 1.0, float("inf"), float("nan")])))
    assert found[:4].tolist() == [limit, -limit, 0.0, 1.0] and found[4:].isnan().all()


def test_a_backend_says_what_it_cannot_store():
    specs, cpu = [FullAttentionSpec(kv_heads=1, head_dim=16)], torch.device("cpu")
    assert choose_backend(specs, torch.float32, cpu, torch.float8_e4m3fn).name == "sdpa"
    with pytest.raises(ConfigError, match="sdpa: no support for a KV cache in float16"):
        choose_backend(specs, torch.float32, cpu, torch.float16)

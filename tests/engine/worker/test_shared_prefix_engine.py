"""Engines whose decodes read shared prefixes once, against float32 and against eager steps."""

from __future__ import annotations

import json
import random

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: torch.cuda.is_available() is False", allow_module_level=True)

from engine import Engine, EngineConfig, SamplingParams
from engine.worker import model_runner
from engine.worker.decode_graphs import SHARED_SITE
from tests.support.prompt_scores import check_beside_float32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # from Triton: Python's ast, numpy scalars
]
SETTINGS = {
    "device": "cuda", "load_format": "dummy", "max_num_seqs": 40, "max_model_len": 2048, "num_pages": 4000,
    "max_num_batched_tokens": 2048, "graph_manifest": "none", "warmup": "full", "seed": 3,
}  # fmt: skip


@pytest.fixture(scope="module", params=[(8, 2, 64), (8, 8, 64), (14, 2, 128)], ids=str)
def folder(request, tmp_path_factory):
    heads, kv_heads, dim = request.param
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "attention_bias": False, "tie_word_embeddings": True, "max_position_embeddings": 4096,
        "vocab_size": 1024, "hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 1024,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("shared")
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def always_share(monkeypatch):
    monkeypatch.setattr(model_runner, "MIN_SHARED_BYTES", 1)


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Three prompts for several requests each, of which two begin alike, and prompts of their own."""
    rng = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 1024) for _ in range(count)]

    first, other = tokens(700), tokens(100)
    shared = [(first, 12), (first[:300] + tokens(500), 6), (other, 5)]
    prompts = [prefix + tokens(rng.randint(1, 40)) for prefix, count in shared for _ in range(count)]
    prompts += [tokens(rng.choice([1, 30, 600])) for _ in range(7)]
    params = [
        SamplingParams(max_tokens=rng.randint(20, 60), temperature=index % 2 * 0.7, seed=index, logprobs=0,
                       ignore_eos=True)
        for index in range(len(prompts))
    ]  # fmt: skip
    return prompts, params


def run(folder: str, **options) -> tuple[list, int]:
    """Return the outputs of the workload, and how many steps read shared prefixes once."""
    prompts, params = workload()
    with Engine(EngineConfig(model=folder, dtype="bfloat16", **(SETTINGS | options))) as engine:
        engine.generate(prompt_token_ids=prompts[:24:6], sampling_params=SamplingParams(max_tokens=1))  # fill the cache
        outputs = engine.generate(prompt_token_ids=prompts, sampling_params=params)
        graphs = engine.stats().graphs
        if "cuda_graph_impl" not in options:
            assert not dict(graphs["fallbacks"])
        return outputs, sum(count for labels, count in graphs["batch_rows"] if labels[0] == SHARED_SITE)


def test_gpu_log_probabilities_of_rows_that_share_prefixes_are_those_of_float32(folder, always_share):
    outputs, shared_steps = run(folder)
    assert shared_steps > 15
    check_beside_float32(folder, SETTINGS, *workload(), outputs)


def test_gpu_graphs_of_shared_prefixes_give_the_tokens_of_eager_steps(folder, always_share):
    replayed, shared_steps = run(folder)
    eager, eager_steps = run(folder, cuda_graph_impl="none")
    assert shared_steps and shared_steps == eager_steps
    assert [one.token_ids for one in replayed] == [one.token_ids for one in eager]
    by_layer, _ = run(folder, inference_cuda_graph_scope="layer")
    assert [one.token_ids for one in by_layer] == [one.token_ids for one in eager]


def test_gpu_rows_are_read_one_by_one_where_sharing_saves_little(folder, monkeypatch):
    monkeypatch.setattr(model_runner, "MIN_SHARED_BYTES", 1 << 30)
    _, shared_steps = run(folder)
    assert shared_steps == 0

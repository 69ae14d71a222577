"""Engines whose prefill attention and mixed steps run on the kernels for Hopper GPUs, against float32."""

from __future__ import annotations

import json
import random

import pytest
import torch

from tests.support.kernels import DTYPE, INTERPRETED  # isort: skip  (before what imports triton)

from engine import Engine, EngineConfig, SamplingParams
from engine.kernels.launch import has_hopper_kernels
from engine.protocol.phase import Phase
from tests.support.prompt_scores import check_beside_float32

if INTERPRETED or not has_hopper_kernels(torch.device("cuda", 0), DTYPE, 128, 16):
    pytest.skip("needs a GPU with compute capability 9.0 and Triton 3.6 or 3.7", allow_module_level=True)

pytestmark = pytest.mark.gpu
SETTINGS = {
    "device": "cuda", "load_format": "dummy", "max_num_seqs": 48, "max_model_len": 2048, "num_pages": 4000,
    "max_num_batched_tokens": 512, "graph_manifest": "none", "warmup": "full",
    "enable_prefix_caching": False, "seed": 3,
}  # fmt: skip


@pytest.fixture(scope="module", params=[64, 128], ids=["heads of 64", "heads of 128"])
def folder(request, tmp_path_factory):
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "attention_bias": False, "tie_word_embeddings": True, "max_position_embeddings": 4096,
        "vocab_size": 1024, "hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 1024,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": request.param, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("hopper")
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 1024) for _ in range(rng.choice([1, 7, 90, 300, 1100]))] for _ in range(60)]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 60), temperature=index % 3 * 0.5, seed=index, logprobs=0, ignore_eos=True
        )
        for index in range(len(prompts))
    ]
    return prompts, params


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_gpu_log_probabilities_in_mixed_steps_are_those_of_prompts_in_float32(folder, async_scheduling):
    """Every generated token's log-probability, beside that of the same token in a prompt of a float32 engine."""
    prompts, params = workload()
    with Engine(EngineConfig(model=folder, dtype="bfloat16", async_scheduling=async_scheduling, **SETTINGS)) as engine:
        runner = engine.loop.executor.worker.runner
        assert runner.attention.hopper is not None and runner.builder.max_mixed_decodes
        outputs = engine.generate(prompt_token_ids=prompts, sampling_params=params)
        graphs = engine.stats().graphs
        computed = sum(count for labels, count in graphs["real_tokens"] if labels[0] == Phase.PREFILL.value)
        assert computed > sum(map(len, prompts)) + 100, "no decodes were computed with prompt chunks"
        assert not dict(graphs["fallbacks"])
    check_beside_float32(folder, SETTINGS, prompts, params, outputs)


def test_gpu_graphs_give_the_tokens_of_eager_steps(folder):
    prompts, params = workload()
    found = []
    for options in ({}, {"cuda_graph_impl": "none"}):
        with Engine(EngineConfig(model=folder, dtype="bfloat16", **(SETTINGS | options))) as engine:
            found.append([one.token_ids for one in engine.generate(prompt_token_ids=prompts, sampling_params=params)])
    assert found[0] == found[1]

"""The first start on a GPU compiles the kernels of all graphs before warm-up, which then compiles none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.lively import write_lively_model
from tests.support.gemma3 import write_lively_gemma3

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, sys, threading
import triton
from engine import Engine, EngineConfig, SamplingParams
from engine.utils.processes.child import running_children

compiled = []

def listen(*, src, cache_hit, **_):
    is_ahead = threading.current_thread().name.startswith("compile-ahead")
    if is_ahead or not cache_hit:
        compiled.append((src.fn.__name__, is_ahead, cache_hit))

triton.knobs.compilation.listener = listen
model, is_ahead, settings = sys.argv[1], sys.argv[2] == "ahead", json.loads(sys.argv[3])
if not is_ahead:
    del triton.AsyncCompileMode
prompts = [[3 + 7 * index % 200 for index in range(length)] for length in (1, 2, 17, 130, 500)]
params = [SamplingParams(max_tokens=12, ignore_eos=True, seed=1, temperature=temperature, top_p=top_p)
          for temperature, top_p in ((0, 1), (0, 1), (1, 1), (1, 0.9), (0, 1))]
settings = {"max_model_len": 1024} | settings
with Engine(EngineConfig(model=model, device="cuda", dtype="bfloat16", max_num_seqs=24, num_pages=400,
                         max_num_batched_tokens=600, graph_manifest="none", **settings)) as engine:
    assert running_children() == []
    outputs = engine.generate(prompt_token_ids=prompts, sampling_params=params)
    fallbacks = sum(count for _, count in engine.stats().graphs["fallbacks"])
    digests = [row["digest"] for row in engine.graphs()]
    engine._loop.executor.worker.runner.cache.invalidate("test")
    engine.warm()  # with a warm-up run before each capture
    digests_after = [row["digest"] for row in engine.graphs()]
print(json.dumps([compiled, [output.token_ids for output in outputs], fallbacks, digests, digests_after]))
"""


def start(model: Path, cache: Path, mode: str, **settings: object) -> tuple[list, list, int, list, list]:
    """Return what an engine compiles, its answers, the number of steps without a graph, and the graphs' digests, twice.

    What it compiles: (kernel, whether ahead, whether another process had compiled it) each.
    """
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), mode, json.dumps(settings)],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=1200,
    )
    return json.loads(found.stdout.splitlines()[-1])


def not_ahead(compiled: list) -> list:
    """Return the kernels that were not compiled ahead, or not by another process."""
    return [kernel for kernel in compiled if kernel[1:] != [True, True]]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_warm_up_compiles_nothing_after_compilation_ahead(tiny_model, tmp_path, kernels):
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    write_lively_model(tiny_model, model, seed=0)
    settings = {"warmup": "full", "kernels": kernels, "num_speculative_tokens": 2}
    compiled, answers, fallbacks, digests, digests_after = start(model, cache, "ahead", **settings)
    assert len(compiled) > 15 and not_ahead(compiled) == []
    assert fallbacks == 0
    compiled_later, same_answers, *_ = start(model, cache, "at launch", **settings)
    assert compiled_later == []  # the cache on disk has every kernel that a start without compilation ahead launches
    assert same_answers == answers
    assert len(digests) > 50 and all(digests) and digests_after == digests


def test_layers_with_page_tables_of_another_alignment_compile_nothing_late(tiny_model, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    write_lively_gemma3(tiny_model, model)
    settings = {"warmup": "full", "max_model_len": 1000}  # 63 pages a table: every other table is not aligned
    compiled, _, fallbacks, digests, digests_after = start(model, tmp_path / "cache", "ahead", **settings)
    assert compiled and not_ahead(compiled) == []
    assert fallbacks == 0 and all(digests) and digests_after == digests


def test_the_check_of_hopper_kernels_compiles_nothing_either(tmp_path):
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "attention_bias": False, "tie_word_embeddings": True, "max_position_embeddings": 4096,
        "vocab_size": 1024, "hidden_size": 512, "num_hidden_layers": 4, "intermediate_size": 1024,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    compiled, *_ = start(tmp_path, tmp_path / "cache", "ahead", load_format="dummy", warmup="full")
    assert compiled and not_ahead(compiled) == []


def test_lazy_warm_up_compiles_only_sampling_ahead(tiny_model, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    write_lively_model(tiny_model, model, seed=0)
    compiled, *_ = start(model, tmp_path / "cache", "ahead", warmup="lazy")
    ahead = {name for name, is_ahead, _ in compiled if is_ahead}
    assert "sample_kernel" in ahead and "decode_kernel" not in ahead

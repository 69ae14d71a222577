"""Quantised checkpoints of every format on a GPU: fused steps with right log-probabilities, replays equal to eager."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: torch.cuda.is_available() is False", allow_module_level=True)

from engine import Engine, EngineConfig, SamplingParams
from engine.models.fused_decoder import FusedDecoder
from tests.engine.lively import PROMPTS, write_lively_model
from tests.support.quantized import FORMATS, quantize_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # from Triton: Python's ast, numpy scalars
]
SETTINGS = {"device": "cuda", "max_num_seqs": 8, "max_model_len": 512, "num_pages": 200, "graph_manifest": "none",
            "max_num_batched_tokens": 256, "warmup": "lazy"}  # fmt: skip
QUANTIZE_ACTIVATIONS = ("ct-fp8-channel", "modelopt-channel")  # in fp8, with many rows
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, logprobs=0, ignore_eos=True)
TEXT = [index * 37 % 300 + 3 for index in range(200)]  # a prompt of more rows than the kernel for few rows takes


@pytest.fixture(scope="module")
def source(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lively")
    write_lively_model(tiny_model, folder, seed=0)
    return folder


def logprobs(engine: Engine) -> torch.Tensor:
    outputs = engine.generate(prompt_token_ids=[*PROMPTS, TEXT], sampling_params=SCORED)
    return torch.tensor([entry.logprob for output in outputs for entry in output.prompt_logprobs[1:]])


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_runs_fused_with_the_log_probabilities_of_its_weights(source, tmp_path, caplog, name):
    quantize_folder(source, tmp_path / "quantized", tmp_path / "plain", name)
    found = {}
    caplog.set_level(logging.INFO)
    for folder, dtype, kernels in (("plain", "float32", "auto"), ("plain", "bfloat16", "fused"),
                                   ("quantized", "bfloat16", "fused"), ("quantized", "bfloat16", "torch")):  # fmt: skip
        config = EngineConfig(model=str(tmp_path / folder), **(SETTINGS | {"dtype": dtype, "kernels": kernels}))
        with Engine(config) as engine:
            found[folder, dtype, kernels] = logprobs(engine)
    assert "using fused kernels" in caplog.text
    exact = found["plain", "float32", "auto"]
    plain = (found["plain", "bfloat16", "fused"] - exact).abs().mean()
    for kernels in ("fused", "torch"):
        error = (found["quantized", "bfloat16", kernels] - exact).abs().mean()
        assert error < 1.5 * plain + (0.3 if name in QUANTIZE_ACTIVATIONS else 5e-3), kernels


@pytest.mark.parametrize("name", ["fp8-block", "ct-fp8-channel", "awq", "gptq-desc-act", "ct-int8-zeros", "ct-mxfp4"])
def test_replays_equal_eager(source, tmp_path, name):
    quantize_folder(source, tmp_path / "quantized", tmp_path / "plain", name)
    answers = []
    for options in ({}, {"cuda_graph_impl": "none"}, {"inference_cuda_graph_scope": "layer"}):
        settings = SETTINGS | {"dtype": "bfloat16"} | options
        with Engine(EngineConfig(model=str(tmp_path / "quantized"), **settings)) as engine:
            assert isinstance(engine.loop.executor.worker.runner.step_model, FusedDecoder)
            outputs = engine.generate(prompt_token_ids=[*PROMPTS, TEXT], sampling_params=GREEDY)
            answers.append([output.token_ids for output in outputs])
            if not options:
                assert not dict(engine.stats().graphs["fallbacks"])
    assert answers[0] == answers[1] == answers[2]


def test_a_quantised_model_says_which_layers_it_decodes_with(source, tmp_path, caplog):
    """One that no fused step computes says why, and what its weights cost."""
    quantize_folder(source, tmp_path / "quantized", tmp_path / "plain", "awq")
    caplog.set_level(logging.INFO)
    for options, said in (
        ({}, ["using fused kernels", "weights quantised by awq stay int4 in memory; steps of up to 128 rows multiply"]),
        ({"kernels": "torch"}, ["using the model's own layers: kernels='torch'", "steps of up to 128 rows multiply"]),
        ({"dtype": "float32"}, ["using the model's own layers", "each step dequantises them with PyTorch operations"]),
    ):
        caplog.clear()
        settings = SETTINGS | {"dtype": "bfloat16"} | options
        with Engine(EngineConfig(model=str(tmp_path / "quantized"), **settings)) as engine:
            is_fused = isinstance(engine.loop.executor.worker.runner.step_model, FusedDecoder)
        assert is_fused == (not options)
        for text in said:
            assert text in caplog.text


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_an_fp8_cache_is_read_by_fused_steps_and_replays_equal_eager(source, name):
    answers, scores = [], []
    for options in (
        {},
        {"cuda_graph_impl": "none"},
        {"max_num_batched_tokens": 32},
        {"kernels": "torch", "dtype": "float32"},
        {"kernels": "torch", "dtype": "float32", "kv_cache_dtype": "auto"},
    ):
        settings = SETTINGS | {"dtype": "bfloat16", "kv_cache_dtype": name} | options
        with Engine(EngineConfig(model=str(source), **settings)) as engine:
            if "kernels" not in options:
                assert isinstance(engine.loop.executor.worker.runner.step_model, FusedDecoder)
                assert engine.loop.executor.worker.runner.attention.name == "triton"
                outputs = engine.generate(prompt_token_ids=[*PROMPTS, TEXT], sampling_params=GREEDY)
                answers.append([output.token_ids for output in outputs])
            scores.append(logprobs(engine))
    assert answers[0] == answers[1]
    # of the same model in float32, beside what rounding the cache changes
    assert (scores[0] - scores[3]).abs().mean() < 0.1 + 0.5 * (scores[3] - scores[4]).abs().mean()
    assert (scores[2] - scores[0]).abs().mean() < 0.1

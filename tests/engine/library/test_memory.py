"""Whether a model fits a machine agrees with what a worker accepts at its start."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.library.memory import Fit, Machine, fit, this_machine, weight_bytes
from engine.models import config_from_dict, config_from_folder
from engine.models.config import ModelConfig
from engine.worker.sizing import resolve

GIB = 1 << 30
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> ModelConfig:
    return config_from_dict(LLAMA_8B)


def fitted(model: ModelConfig, gib: float, device: str = "cpu") -> Fit:
    _, weights = weight_bytes(model, torch.bfloat16)
    return fit(model, torch.bfloat16, weights, Machine(device=device, name="test", memory_bytes=int(gib * GIB)))


def test_parameters_are_counted_without_allocating(llama: ModelConfig, tiny_model: Path) -> None:
    assert weight_bytes(llama, torch.bfloat16) == (8_030_261_248, 16_060_522_496)
    assert weight_bytes(config_from_folder(tiny_model), torch.float32)[1] == 4 * 94528


@pytest.mark.parametrize(
    ("settings", "bytes_per_weight"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 128**2),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5 + (4 + 1) / 128),
        ({"quant_method": "mxfp4"}, 0.5 + 1 / 32),
    ],
)
def test_quantised_weights_take_the_bytes_of_their_format(settings: dict, bytes_per_weight: float) -> None:
    count, found = weight_bytes(config_from_dict({**LLAMA_8B, "quantization_config": settings}), torch.bfloat16)
    linear = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    assert count == 8_030_261_248
    assert found == pytest.approx(2 * (count - linear) + bytes_per_weight * linear, rel=1e-6)


@pytest.mark.parametrize(
    ("gib", "device", "fits"),
    [(8, "cpu", False), (15, "cpu", False), (24, "cpu", True), (16, "cuda:0", False), (24, "cuda:0", True)],
)
def test_weights_and_a_useful_context_must_fit(llama: ModelConfig, gib: float, device: str, fits: bool) -> None:
    assert fitted(llama, gib, device).fits is fits


def test_a_context_is_shortened_to_what_fits(llama: ModelConfig) -> None:
    found = fitted(llama, 24, "cuda:0")
    assert 4096 < found.max_context < found.model_context == 131072
    assert fitted(llama, 80, "cuda:0").max_context == 131072
    assert fitted(llama, 1, "cuda:0").max_context == 0


def test_a_worker_accepts_the_longest_context_that_fits_and_no_longer_one(llama: ModelConfig) -> None:
    model = dataclasses.replace(llama, num_layers=16)  # of which every machine of the tests can hold the cache's share
    machine = this_machine()
    if machine.device != "cpu" or machine.memory_bytes < 4 * GIB:
        pytest.skip("needs a CPU with 4 GiB")
    longest = fit(model, torch.bfloat16, 0, machine).max_context
    resolve(EngineConfig(max_model_len=longest), model, torch.device("cpu"), torch.bfloat16)
    with pytest.raises(ConfigError, match="lower max_model_len"):
        resolve(EngineConfig(max_model_len=longest + 16), model, torch.device("cpu"), torch.bfloat16)

"""RoPE scaling of GGUF files: cos and sin are llama.cpp's for the same keys, and what can't be mapped is named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from engine.errors import ModelError
from engine.layers.rotary import RotaryTable
from engine.loader.cpu_formats import gguf_config
from tests.engine.checkpoint.gguf_samples import SIZES, write_gguf

THETA, POSITIONS = 20000.0, 300


def llama_cpp_table(keys: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [positions, head_dim / 2] as llama.cpp computes them from the keys below `rope.`."""
    dims = SIZES["head_dim"]
    kind = keys.get("scaling.type", "linear")
    factor = keys.get("scaling.factor", keys.get("scale_linear", 0.0)) or 1.0
    scale = 1.0 if kind == "none" else 1.0 / factor
    extrapolation = keys.get("scaling.yarn_ext_factor", -1.0)
    if extrapolation < 0:
        extrapolation = float(kind == "yarn")
    attention = keys.get("scaling.yarn_attn_factor", 1.0)
    if extrapolation:
        log_multiplier = keys.get("scaling.yarn_log_multiplier", 0.0)

        def temperature(weight: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

        attention = temperature(1.0) / (temperature(log_multiplier) if log_multiplier else 1.0)
        attention /= 1.0 + 0.1 * math.log(factor)
    attention *= keys.get("scaling.attn_factor", 1.0)
    context = keys.get("scaling.original_context_length", 0) or SIZES["context"]

    def bound(rotations: float) -> float:
        return dims * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(THETA))

    low = max(0.0, math.floor(bound(keys.get("scaling.yarn_beta_fast", 32.0))))
    high = min(dims - 1.0, math.ceil(bound(keys.get("scaling.yarn_beta_slow", 1.0))))
    position = torch.arange(POSITIONS, dtype=torch.float64)[:, None]
    pair = torch.arange(dims // 2, dtype=torch.float64)
    extrapolated = position * THETA ** (-2 * pair / dims)
    angle, amplitude = scale * extrapolated, attention
    if extrapolation:
        ramp = (1 - ((pair - low) / max(0.001, high - low)).clamp(0, 1)) * extrapolation
        angle = angle * (1 - ramp) + extrapolated * ramp
        amplitude *= 1.0 + 0.1 * math.log(1.0 / scale)
    return angle.cos() * amplitude, angle.sin() * amplitude


YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32}
CASES = [
    {},
    {"scaling.factor": 4.0},
    {"scale_linear": 4.0},
    {"scaling.factor": 2.0, "scale_linear": 8.0},
    {"scaling.factor": 0.0, "scale_linear": 8.0},
    {"scaling.type": "linear", "scale_linear": 2.0},
    {"scaling.type": "linear"},
    {"scaling.type": "none", "scaling.factor": 4.0},
    {"scaling.type": "none", "scaling.factor": 4.0, "scaling.attn_factor": 1.5},
    {"scaling.attn_factor": 1.25},
    {"scaling.factor": 4.0, "scaling.attn_factor": 0.75, "scaling.yarn_attn_factor": 1.5},
    {"scaling.factor": 4.0, "scaling.yarn_beta_fast": 4.0, "scaling.yarn_log_multiplier": 2.0},
    {"scaling.factor": 0.5, "scaling.finetuned": True},
    YARN,
    YARN | {"scaling.yarn_beta_fast": 4.0},
    YARN | {"scaling.yarn_beta_slow": 0.25},
    YARN | {"scaling.yarn_beta_fast": 2.0, "scaling.yarn_beta_slow": 0.5, "scaling.attn_factor": 1.5},
    YARN | {"scaling.yarn_log_multiplier": 1.0},
    YARN | {"scaling.yarn_log_multiplier": 0.5, "scaling.attn_factor": 0.5},
    YARN | {"scaling.yarn_ext_factor": 1.0, "scaling.yarn_attn_factor": 1.0},
    YARN | {"scaling.yarn_ext_factor": 0.0, "scaling.yarn_attn_factor": 1.5},
    YARN | {"scaling.original_context_length": 0},
    {"scaling.type": "yarn", "scale_linear": 4.0},
    {"scaling.type": "yarn"},
    {"scaling.type": "yarn", "scaling.factor": 0.5},
    {"scaling.factor": 4.0, "scaling.yarn_ext_factor": 1.0, "scaling.original_context_length": 64},
]  # fmt: skip


@pytest.mark.parametrize("keys", CASES, ids=str)
def test_cos_and_sin_are_those_of_llama_cpp(tmp_path: Path, keys: dict) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={f"rope.{key}": value for key, value in keys.items()})
    config, _ = gguf_config(str(tmp_path / "m.gguf"))
    scaling, dims = config.rope_scaling, config.head_dim
    table = RotaryTable(dims, config.rope_theta, scaling, POSITIONS, torch.float32, torch.device("cpu"))
    cos, sin = table(torch.arange(POSITIONS))
    wanted_cos, wanted_sin = llama_cpp_table(keys)
    torch.testing.assert_close(cos[:, 0, dims // 2 :].double(), wanted_cos, rtol=0, atol=5e-5)
    torch.testing.assert_close(sin[:, 0, dims // 2 :].double(), wanted_sin, rtol=0, atol=5e-5)


@pytest.mark.parametrize(("keys", "message"), [
    ({"scaling.type": "dynamic"}, r"llama\.rope\.scaling\.type is 'dynamic'; it must be one of none, linear, yarn"),
    ({"scaling.type": "longrope", "scaling.factor": 2.0}, r"llama\.rope\.scaling\.type is 'longrope'"),
    ({"scaling.type": "llama3", "scaling.factor": 2.0}, r"llama\.rope\.scaling\.type is 'llama3'"),
    ({"scaling.type": 3}, r"llama\.rope\.scaling\.type is 3"),
    ({"scaling.factor": -2.0}, r"llama\.rope\.scaling\.factor is -2"),
    ({"scaling.factor": float("nan")}, r"llama\.rope\.scaling\.factor is nan"),
    ({"scaling.factor": "4"}, r"llama\.rope\.scaling\.factor is '4'"),
    ({"scale_linear": -1.0}, r"llama\.rope\.scale_linear is -1"),
    ({"scaling.attn_factor": 0.0}, r"llama\.rope\.scaling\.attn_factor is 0"),
    (YARN | {"scaling.yarn_ext_factor": 0.5}, r"llama\.rope\.scaling\.yarn_ext_factor is 0\.5; it must be 0 or 1"),
    (YARN | {"scaling.yarn_attn_factor": 1.5}, r"llama\.rope\.scaling\.yarn_attn_factor is 1\.5"),
    (YARN | {"scaling.yarn_beta_fast": 0.01}, r"llama\.rope\.scaling\.yarn_beta_fast is 0\.01.*in order"),
    (YARN | {"scaling.original_context_length": 1}, r"llama\.rope\.scaling\.original_context_length is 1.*in order"),
    (YARN | {"scaling.yarn_log_multiplier": -1.0}, r"llama\.rope\.scaling\.yarn_log_multiplier is -1"),
    ({"scaling.alpha": 1000.0}, r"llama\.rope\.scaling\.alpha is 1000"),
    ({"freq_base_swa": 10000.0}, r"llama\.rope\.freq_base_swa is 10000"),
])  # fmt: skip
def test_a_key_that_cannot_be_mapped_is_refused_by_name(tmp_path: Path, keys: dict, message: str) -> None:
    write_gguf(tmp_path / "m.gguf", metadata={f"rope.{key}": value for key, value in keys.items()})
    with pytest.raises(ModelError, match=message) as error:
        gguf_config(str(tmp_path / "m.gguf"))
    assert str(tmp_path / "m.gguf") in str(error.value)


def test_keys_of_another_architecture_are_not_read(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", architecture="qwen2", metadata={"rope.scaling.factor": 2.0})
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content.replace(b"qwen2.rope.scaling.factor", b"other.rope.scaling.factor"))
    assert gguf_config(str(tmp_path / "m.gguf"))[0].rope_scaling is None

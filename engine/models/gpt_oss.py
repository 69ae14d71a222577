"""gpt-oss: attention sinks, alternating windows, and experts with biases and a clamped SwiGLU.

Published checkpoints store the experts in MXFP4, which checkpoint/mxfp4.py dequantises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.layers.activation import GatedActivation
from engine.layers.expert_names import ExpertNames
from engine.models.config import Family, ModelConfig, read_model_config
from engine.models.expert_config import family_fields, read_experts

GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    window="listed",
    default_window=128,
    window_pattern=2,
)
GPT_OSS_NAMES = ExpertNames(
    router="mlp.router", stacked=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), interleaved=True
)
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_gpt_oss_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build the config from the content of a config.json; `where` names the file in errors.

    Raises ModelError for a missing, invalid or unsupported value.
    """
    given = dict(values)
    if not given.get("rope_scaling") and not given.get("rope_parameters"):
        given["rope_scaling"] = _ROPE
    quantization = given.get("quantization_config")
    if isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4":
        del given["quantization_config"]
    fields, base = family_fields(values, family, where), read_model_config(given, family, where)
    return replace(
        read_experts(fields, base, width_key="intermediate_size", normalize=True),
        scaled_positions=True,
        attention_sinks=True,
        router_bias=True,
        expert_bias=True,
        expert_activation=GatedActivation(limit=fields.number("swiglu_limit"), alpha=fields.number("swiglu_alpha")),
        expert_names=GPT_OSS_NAMES,
    )

"""Mixtral: Mistral's attention, and experts in all layers, weighted by the softmax over the chosen ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.layers.expert_names import ExpertNames
from engine.models.config import Family, ModelConfig, read_model_config
from engine.models.expert_config import family_fields, read_experts

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    defaults={
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    },
    qkv_bias=False,
    output_bias=False,
    window="always",
)
MIXTRAL_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    gate="w1",
    up="w3",
    down="w2",
    aliases=((".mlp.", ".block_sparse_moe."),),
)


def read_mixtral_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build the config from the content of a config.json; `where` names the file in errors.

    Raises ModelError for a missing, invalid or unsupported value.
    """
    fields = family_fields(values, family, where)
    base = read_model_config(values, family, where)
    return replace(
        read_experts(fields, base, width_key="intermediate_size", normalize=True), expert_names=MIXTRAL_NAMES
    )

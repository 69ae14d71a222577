"""OLMoE: experts in all layers, and a norm over all heads of q and of k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.config import Family, ModelConfig, read_model_config
from engine.models.expert_config import family_fields, read_experts

OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    defaults={
        "eos_token_id": 50279,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-5,
    },
    numbers={"qkv_clip": "clip_qkv"},
    qk_norm=True,
    qk_norm_kind="all_heads",
)


def read_olmoe_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build the config from the content of a config.json; `where` names the file in errors.

    Raises ModelError for a missing, invalid or unsupported value.
    """
    base = read_model_config(values, family, where)
    return read_experts(
        family_fields(values, family, where), base, count_key="num_experts", width_key="intermediate_size"
    )

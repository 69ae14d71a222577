"""Granite 3: a Llama with factors on embeddings, attention scores, residual connections and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import ALL_ACTIVATIONS, Family, Fields, ModelConfig, read_model_config

GRANITE = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    defaults={"attention_multiplier": 1.0, "bos_token_id": 1, "eos_token_id": 2},
    activations=ALL_ACTIVATIONS,
    mlp_bias_key="mlp_bias",
    numbers={
        "embedding_scale": "embedding_multiplier",
        "attention_scale": "attention_multiplier",
        "residual_scale": "residual_multiplier",
    },
)


def read_granite_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build the config from the content of a config.json; `where` names the file in errors.

    Raises ModelError for a missing, invalid or unsupported value.
    """
    divisor = Fields(values, where).number("logits_scaling", 1.0)
    return replace(read_model_config(values, family, where), logit_scale=None if divisor == 1.0 else 1.0 / divisor)

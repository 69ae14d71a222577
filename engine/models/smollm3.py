"""SmolLM3: a Llama in which every fourth layer has no rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import (
    ALL_ACTIVATIONS,
    FULL,
    MAX_LAYERS,
    SLIDING,
    Family,
    Fields,
    ModelConfig,
    read_model_config,
)

SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    defaults={
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2e6,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    activations=ALL_ACTIVATIONS,
    mlp_bias_key="mlp_bias",
    window="flagged",
)


def read_smollm3_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build the config from the content of a config.json; `where` names the file in errors.

    Layers without rotary embedding have a 0 in `no_rope_layers`; by default it is every n-th layer, with n from
    `no_rope_layer_interval`. Without `layer_types`, these layers have the window. Raises ModelError for a missing,
    invalid or unsupported value.
    """
    fields = Fields(values, where)
    layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    rotates = values.get("no_rope_layers")
    if rotates is None:
        interval = fields.integer("no_rope_layer_interval", 4)
        rotates = [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(rotates, list) or len(rotates) < layers or any(one not in (0, 1) for one in rotates):
        raise fields.error("no_rope_layers", f"a list of at least {layers} times 0 or 1")
    kinds = values.get("layer_types")
    if not kinds and fields.flag("use_sliding_window"):
        kinds = [SLIDING if not one else FULL for one in rotates[:layers]]
    base = read_model_config({**values, "layer_types": kinds}, family, where)
    return replace(base, nope_layers=frozenset(index for index in range(layers) if not rotates[index]))

"""EXAONE 4: norms after attention and MLP, norms of q and k, and layers without window or rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import ALL_ACTIVATIONS, PATTERN, Family, ModelConfig, read_model_config
from engine.models.dense import POST_NORMS

EXAONE4 = Family(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 2},
    activations=ALL_ACTIVATIONS,
    norms=POST_NORMS,
    qk_norm=True,
    qkv_bias=False,
    output_bias=False,
    window="listed",
    default_window=4096,
    window_pattern=4,
    window_pattern_key=PATTERN,
)


def read_exaone4_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build the config from the content of a config.json; `where` names the file in errors.

    Where some layers have a window, the others have no rotary embedding. Raises ModelError for a missing, invalid or
    unsupported value.
    """
    base = read_model_config(values, family, where)
    has_windows = values.get("sliding_window", family.default_window) is not None
    windows = base.windows or (None,) * base.num_layers
    return replace(base, nope_layers=frozenset(i for i in range(base.num_layers) if has_windows and windows[i] is None))

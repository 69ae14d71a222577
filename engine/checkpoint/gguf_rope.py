"""RoPE scaling of GGUF files: llama.cpp's keys, as the `rope_scaling` of a config.json.

llama.cpp rotates by position / factor (linear), and mixes that with the unscaled angle between two bounds if the
extrapolation factor is 1 (yarn; its default there). It multiplies cos and sin by the attention factor in all types.
"""

from __future__ import annotations

import math
from typing import Any

from engine.checkpoint.gguf_keys import ArchitectureKeys


def rope_scaling(keys: ArchitectureKeys, context_length: int, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Return the scaling, None if there is none. Raises ModelError naming the key that can't be mapped."""
    kind = keys.text("rope.scaling.type", "linear", allowed=("none", "linear", "yarn"))
    factor = _factor(keys)
    if kind == "none":
        factor = 1.0
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    extrapolation = keys.number("rope.scaling.yarn_ext_factor", -1.0, low=-1.0)  # negative: not set
    if extrapolation < 0:
        extrapolation = 1.0 if kind == "yarn" else 0.0
    if extrapolation not in (0.0, 1.0):
        raise keys.error("rope.scaling.yarn_ext_factor", "0 or 1")
    yarn = _yarn(keys, context_length)
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0, low=0.0)
    own_attention = keys.number("rope.scaling.yarn_attn_factor", 1.0)
    if extrapolation == 0.0:
        attention *= own_attention
    elif own_attention != 1.0:
        # llama.cpp replaces it by the formula below, and its converter writes Hugging Face's attention_factor there.
        raise keys.error("rope.scaling.yarn_attn_factor", "1.0 for yarn, or left out")
    if extrapolation == 0.0 or factor == 1.0:
        plain = factor == attention == 1.0
        return None if plain else {"rope_type": "linear", "factor": factor, "gguf_attn_factor": attention}
    _require_bounds_in_order(keys, yarn, head_dim, theta)
    attention *= _temperature(factor, 1.0) / (_temperature(factor, multiplier) if multiplier else 1.0)
    return yarn | {"rope_type": "yarn", "factor": factor, "attention_factor": attention}


def _factor(keys: ArchitectureKeys) -> float:
    new = keys.number("rope.scaling.factor", 0.0, low=0.0)
    old = keys.number("rope.scale_linear", 0.0, low=0.0)  # of files of 2023; read if there is no new key
    return (new if keys.has("rope.scaling.factor") else old) or 1.0


def _yarn(keys: ArchitectureKeys, context_length: int) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": int(
            keys.number("rope.scaling.original_context_length", 0, low=0) or context_length
        ),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _temperature(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _require_bounds_in_order(keys: ArchitectureKeys, yarn: dict[str, Any], head_dim: int, theta: float) -> None:
    """Refuse bounds out of order, for which llama.cpp's ramp and Hugging Face's differ."""
    if theta <= 1:
        return  # refused with the config

    def dimension_at(rotations: float) -> float:
        context = yarn["original_max_position_embeddings"]
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = math.floor(dimension_at(yarn["beta_fast"])), math.ceil(dimension_at(yarn["beta_slow"]))
    if max(first, 0) > min(last, head_dim - 1):
        for key in ("yarn_beta_fast", "yarn_beta_slow", "original_context_length"):
            if keys.has(f"rope.scaling.{key}"):
                raise keys.error(f"rope.scaling.{key}", "such that yarn's bounds are in order")
        raise keys.error("context_length", "such that yarn's bounds are in order")

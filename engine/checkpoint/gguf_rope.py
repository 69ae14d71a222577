"""RoPE scaling of GGUF files: llama.cpp's keys and tensors, as the `rope_scaling` of a config.json.

llama.cpp rotates by position / factor (linear), and mixes that with the unscaled angle between two bounds if the
extrapolation factor is 1 (yarn; its default there). A tensor may divide each frequency (Llama 3.1's scaling; two of
them for short and long contexts: longrope). It multiplies cos and sin by the attention factor in all types.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from engine.checkpoint.gguf_file import GGUFFile
from engine.checkpoint.gguf_keys import ArchitectureKeys
from engine.errors import ModelError

FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)
"""Tensors [rotated elements of a head / 2] that divide the frequencies: always, in long, and in short contexts."""


def rope_scaling(
    keys: ArchitectureKeys, file: GGUFFile, context_length: int, dims: int, theta: float
) -> dict[str, Any] | None:
    """Return the scaling of `dims` rotated elements of a head, None if there is none.

    Raises ModelError naming the key or tensor that can't be mapped.
    """
    factors = _read_factors(file, dims)
    kinds = ("none", "linear", "yarn") + ("longrope",) * (factors is not None)
    kind = keys.text("rope.scaling.type", "linear", allowed=kinds)
    factor = _factor(keys)
    if kind == "none":
        factor = 1.0
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    if factors is not None:
        if factor != 1.0 or kind == "yarn":
            raise ModelError(f"{file.path}: rope.scaling.* and the factors in {FACTORS} can't both apply")
        return {
            "rope_type": "longrope",
            "short_factor": factors[0],
            "long_factor": factors[1],
            "factor": 1.0,
            "attention_factor": attention,
            "original_max_position_embeddings": _original_length(keys, context_length),
        }
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
    _require_bounds_in_order(keys, yarn, dims, theta)
    attention *= _temperature(factor, 1.0) / (_temperature(factor, multiplier) if multiplier else 1.0)
    return yarn | {"rope_type": "yarn", "factor": factor, "attention_factor": attention}


def _read_factors(file: GGUFFile, dims: int) -> tuple[Sequence[float], Sequence[float]] | None:
    """Return the factors of short and of long contexts."""
    found = [name for name in FACTOR_TENSORS if name in file.tensors]
    if not found:
        return None
    if found not in ([FACTORS], [LONG_FACTORS, SHORT_FACTORS]):
        raise ModelError(f"{file.path}: has {' and '.join(found)}: {FACTORS} alone, or both others, can be read")
    values = []
    for name in found:
        factors = file.dense(name)
        if factors.shape != (dims // 2,) or not bool((factors > 0).all() and factors.isfinite().all()):
            raise ModelError(f"{file.path}: {name} must be {dims // 2} positive numbers")
        values.append(factors.tolist())
    return values[-1], values[0]


def _original_length(keys: ArchitectureKeys, context_length: int) -> int:
    return int(keys.number("rope.scaling.original_context_length", 0, low=0) or context_length)


def _factor(keys: ArchitectureKeys) -> float:
    new = keys.number("rope.scaling.factor", 0.0, low=0.0)
    old = keys.number("rope.scale_linear", 0.0, low=0.0)  # of files of 2023; read if there is no new key
    return (new if keys.has("rope.scaling.factor") else old) or 1.0


def _yarn(keys: ArchitectureKeys, context_length: int) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": _original_length(keys, context_length),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _temperature(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _require_bounds_in_order(keys: ArchitectureKeys, yarn: dict[str, Any], dims: int, theta: float) -> None:
    """Refuse bounds out of order, for which llama.cpp's ramp and Hugging Face's differ."""
    if theta <= 1:
        return  # refused with the config

    def dimension_at(rotations: float) -> float:
        context = yarn["original_max_position_embeddings"]
        return dims * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = math.floor(dimension_at(yarn["beta_fast"])), math.ceil(dimension_at(yarn["beta_slow"]))
    if max(first, 0) > min(last, dims - 1):
        for key in ("yarn_beta_fast", "yarn_beta_slow", "original_context_length"):
            if keys.has(f"rope.scaling.{key}"):
                raise keys.error(f"rope.scaling.{key}", "such that yarn's bounds are in order")
        raise keys.error("context_length", "such that yarn's bounds are in order")

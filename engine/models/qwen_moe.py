"""Qwen2-MoE and Qwen3-MoE: a mixture of experts in place of the MLP of all or some layers.

Qwen2-MoE has a shared expert with a gate beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import Family, Fields, ModelConfig, read_model_config, require_no_listed_windows
from engine.models.expert_config import family_fields, read_experts, read_sparse_layers
from engine.models.rope_fields import FULL, SLIDING

QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    defaults={
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 4096,
    },
    bias_key="qkv_bias",
    output_bias=False,
)
QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults={
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
    },
    qk_norm=True,
)


def read_qwen3_moe_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build the config from the content of a config.json; `where` names the file in errors.

    Raises ModelError for a missing, invalid or unsupported value.
    """
    fields = family_fields(values, family, where)
    base = read_experts(fields, read_model_config(values, family, where), count_key="num_experts")
    base = replace(base, sparse_layers=read_sparse_layers(fields, base.num_layers))
    if fields.flag("use_sliding_window") and values.get("sliding_window", 0) is not None:
        # unlike Qwen3's, this window applies to every layer
        base = replace(base, windows=(fields.integer("sliding_window", 4096),) * base.num_layers)
    return base


def read_qwen2_moe_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build the config from the content of a config.json; `where` names the file in errors.

    Raises ModelError for a missing, invalid or unsupported value.
    """
    fields = family_fields(values, family, where)
    base = read_experts(fields, read_model_config(values, family, where), count_key="num_experts")
    return replace(
        base,
        windows=_qwen2_windows(fields, base.num_layers),
        sparse_layers=read_sparse_layers(fields, base.num_layers),
        shared_expert_size=fields.integer("shared_expert_intermediate_size"),
        shared_expert_gate=True,
    )


def _qwen2_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window: by `layer_types`, or of every other layer below `max_window_layers`."""
    if not fields.flag("use_sliding_window"):
        require_no_listed_windows(fields)
        return ()
    kinds = fields.values.get("layer_types")
    if kinds is None:
        last = fields.integer("max_window_layers", 28, low=0)
        kinds = [SLIDING if index % 2 == 0 and index < last else FULL for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (SLIDING, FULL) for kind in kinds):
        raise fields.error("layer_types", f"a list of {layers} times {SLIDING!r} or {FULL!r}")
    window = fields.integer("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds) if SLIDING in kinds else ()

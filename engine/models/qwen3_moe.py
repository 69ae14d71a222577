"""Qwen3-MoE: Qwen3's attention, with a mixture of experts in place of the MLP of all or some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.layers.moe import EXPERT_ALIGNMENT
from engine.models.config import MAX_LAYERS, Family, Fields, ModelConfig, read_model_config
from graph_cache.validation import is_whole_number

QWEN3_MOE = Family(architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", qk_norm=True)
MAX_EXPERTS = 1024


def read_qwen3_moe_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build the config from the content of a config.json; `where` names the file in errors.

    Raises ModelError for a missing, invalid or unsupported value.
    """
    base, fields = read_model_config(values, family, where), Fields(values, where)
    if fields.flag("use_sliding_window") and values.get("sliding_window", 0) is not None:
        # unlike Qwen3's, this window applies to every layer
        base = replace(base, windows=(fields.integer("sliding_window", 4096),) * base.num_layers)
    # transformers 5 saves the number as num_local_experts
    experts_key = "num_experts" if values.get("num_experts") is not None else "num_local_experts"
    experts = fields.integer(experts_key, high=MAX_EXPERTS)
    step = fields.integer("decoder_sparse_step", 1, high=MAX_LAYERS)
    width = fields.integer("moe_intermediate_size")
    for key, size in (("hidden_size", base.hidden_size), ("moe_intermediate_size", width)):
        if size % EXPERT_ALIGNMENT:
            raise fields.error(key, f"a multiple of {EXPERT_ALIGNMENT}")
    dense = [] if values.get("mlp_only_layers") is None else values["mlp_only_layers"]
    if not isinstance(dense, list) or not all(is_whole_number(index, 0) for index in dense):
        raise fields.error("mlp_only_layers", "a list of layer indices")
    return replace(
        base,
        num_experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", high=experts),
        moe_intermediate_size=width,
        normalize_weights=fields.flag("norm_topk_prob"),
        sparse_layers=frozenset(i for i in range(base.num_layers) if i not in dense and (i + 1) % step == 0),
    )

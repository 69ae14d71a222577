"""GLM-4.5 and 4.6: experts chosen by sigmoids, beside shared ones; the first layers are dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.layers.expert_names import ExpertNames
from engine.layers.moe import SigmoidRouting
from engine.models.config import Family, ModelConfig, read_model_config
from engine.models.expert_config import family_fields, read_experts

GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    defaults={
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "topk_group": 1,
    },
    output_bias=False,
    qk_norm_key="use_qk_norm",
    partial_rotary=True,
)
GLM4_MOE_NAMES = ExpertNames(shared="mlp.shared_experts")
MAX_DRAFT_LAYERS = 16


def read_glm4_moe_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build the config from the content of a config.json; `where` names the file in errors.

    Raises ModelError for a missing, invalid or unsupported value.
    """
    fields, base = family_fields(values, family, where), read_model_config(values, family, where)
    base = read_experts(fields, base, count_key="n_routed_experts")
    groups = fields.integer("n_group", high=base.num_experts)
    if base.num_experts % groups or (groups > 1 and base.num_experts < 2 * groups):
        raise fields.error("n_group", f"a divisor of the {base.num_experts} experts, with at least 2 in each group")
    used = fields.integer("topk_group", high=groups)
    if used * (base.num_experts // groups) < base.experts_per_token:
        raise fields.error("topk_group", f"enough groups for {base.experts_per_token} experts per token")
    key = "num_nextn_predict_layers" if "num_nextn_predict_layers" in values else "num_mtp_layers"
    dense = fields.integer("first_k_dense_replace", low=0)
    return replace(
        base,
        sparse_layers=frozenset(range(dense, base.num_layers)),
        sigmoid_routing=SigmoidRouting(
            groups=groups, groups_used=used, scale=fields.number("routed_scaling_factor", 1.0)
        ),
        shared_expert_size=fields.integer("n_shared_experts", low=0) * base.moe_intermediate_size,
        draft_layers=fields.integer(key, 1, low=0, high=MAX_DRAFT_LAYERS),
        expert_names=GLM4_MOE_NAMES,
    )

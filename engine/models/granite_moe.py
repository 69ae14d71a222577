"""Granite-MoE: Granite's factors, and experts in all layers, perhaps beside a shared MLP (GraniteMoeShared)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.layers.expert_names import ExpertNames
from engine.models.config import Family, ModelConfig, TensorNames
from engine.models.expert_config import family_fields, read_experts
from engine.models.granite import GRANITE, read_granite_config

DEFAULTS = {**GRANITE.defaults, "num_experts_per_tok": 2, "num_local_experts": 8}
GRANITE_MOE = Family(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    defaults=DEFAULTS,
    numbers=GRANITE.numbers,
)
GRANITE_MOE_SHARED = Family(
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    defaults=DEFAULTS,
    numbers=GRANITE.numbers,
    names=TensorNames(gate_up=("input_linear",), down="output_linear"),
)
BLOCK = "block_sparse_moe"
GRANITE_MOE_NAMES = ExpertNames(
    router=f"{BLOCK}.router.layer",
    experts=f"{BLOCK}.experts",
    stacked=(f"{BLOCK}.input_linear.weight", f"{BLOCK}.output_linear.weight"),
    aliases=(
        (f".{BLOCK}.experts.gate_up_proj", f".{BLOCK}.input_linear.weight"),
        (f".{BLOCK}.experts.down_proj", f".{BLOCK}.output_linear.weight"),
        (f".{BLOCK}.router.weight", f".{BLOCK}.router.layer.weight"),
    ),
    shared="shared_mlp",
)


def read_granite_moe_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build the config from the content of a config.json; `where` names the file in errors.

    Raises ModelError for a missing, invalid or unsupported value.
    """
    fields, base = family_fields(values, family, where), read_granite_config(values, family, where)
    shared = 0
    if family is GRANITE_MOE_SHARED and fields.values.get("shared_intermediate_size") not in (None, 0):
        shared = fields.integer("shared_intermediate_size")
    return replace(
        read_experts(fields, base, width_key="intermediate_size", normalize=True),
        shared_expert_size=shared,
        expert_names=GRANITE_MOE_NAMES,
    )

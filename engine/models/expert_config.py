"""Readers of what families with experts share in a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.layers.moe import EXPERT_ALIGNMENT
from engine.models.config import MAX_LAYERS, Family, Fields, ModelConfig
from graph_cache.utils.validation import is_whole_number

MAX_EXPERTS = 1024


def family_fields(values: Mapping[str, Any], family: Family, where: str) -> Fields:
    """Return the fields of a config.json, with the family's defaults for absent and null ones."""
    given = {key: value for key, value in values.items() if value is not None}
    return Fields({**values, **family.defaults, **given}, where)


def read_experts(
    fields: Fields,
    base: ModelConfig,
    *,
    count_key: str = "num_local_experts",
    width_key: str = "moe_intermediate_size",
    normalize: bool | None = None,
) -> ModelConfig:
    """Return `base` with experts in all layers.

    `count_key`: the key of the number of experts; transformers may save it as num_experts or num_local_experts.
    `normalize`: whether the weights of a token are scaled to a sum of 1; None: as `norm_topk_prob`. Raises ModelError.
    """
    others = {"num_experts", "num_local_experts"} - {count_key}
    key = next((key for key in (*others, count_key) if fields.values.get(key) is not None), count_key)
    experts, width = fields.integer(key, high=MAX_EXPERTS), fields.integer(width_key)
    for key, size in (("hidden_size", base.hidden_size), (width_key, width)):
        if size % EXPERT_ALIGNMENT:
            raise fields.error(key, f"a multiple of {EXPERT_ALIGNMENT}")
    return replace(
        base,
        num_experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", high=experts),
        moe_intermediate_size=width,
        normalize_weights=fields.flag("norm_topk_prob") if normalize is None else normalize,
        sparse_layers=frozenset(range(base.num_layers)),
    )


def read_sparse_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Return the layers with experts by `decoder_sparse_step` and `mlp_only_layers` (Qwen). Raises ModelError."""
    step = fields.integer("decoder_sparse_step", 1, high=MAX_LAYERS)
    dense = [] if fields.values.get("mlp_only_layers") is None else fields.values["mlp_only_layers"]
    if not isinstance(dense, list) or not all(is_whole_number(index, 0) for index in dense):
        raise fields.error("mlp_only_layers", "a list of layer indices")
    return frozenset(index for index in range(layers) if index not in dense and (index + 1) % step == 0)

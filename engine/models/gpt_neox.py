"""GPT-NeoX and Pythia: LayerNorm, attention and MLP in parallel, partial rotary embedding, one tensor for q, k and v.

The names of tensors differ from a Llama's throughout, and so do the keys of the rotary embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import ALL_ACTIVATIONS, Family, Fields, ModelConfig, TensorNames, read_model_config

GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    defaults={
        "layer_norm_eps": 1e-5,
        "attention_bias": True,
        "use_parallel_residual": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    eps_key="layer_norm_eps",
    activations=ALL_ACTIVATIONS,
    default_activation="gelu",
    names=TensorNames(
        embedding="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        attention="attention",
        qkv=("query_key_value",),
        qkv_by_group=True,
        output="dense",
        gate_up=("dense_h_to_4h",),
        down="dense_4h_to_h",
        norm="gpt_neox.final_layer_norm",
        head="embed_out",
        unused=("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias"),
    ),
    norm="layer_bias",
    mlp_bias=True,
    gated_mlp=False,
    parallel_block=True,
    partial_rotary=True,
)


def read_gpt_neox_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build the config of GPT-NeoX or Pythia, whose heads all have keys and values.

    `rotary_pct` and `rotary_emb_base` stand for the values that the object of the rotary embedding lacks. `where` names
    the config.json in errors. Raises ModelError for a missing, invalid or unsupported value.
    """
    fields = Fields({**family.defaults, **values}, where)
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    settings = values.get(key) or {}
    if not isinstance(settings, Mapping):
        raise fields.error(key, "an object")
    rope = {
        "rope_theta": fields.number("rotary_emb_base", 10000.0),
        "partial_rotary_factor": fields.number("rotary_pct", 0.25),
        **settings,
    }
    own = {**values, "rope_scaling": None, "rope_parameters": rope, "num_key_value_heads": None}
    base = read_model_config(own, family, where)
    if base.head_dim * base.num_heads != base.hidden_size:
        raise fields.error("hidden_size", f"num_attention_heads ({base.num_heads}) times the size of a head")
    return replace(base, parallel_block=fields.flag("use_parallel_residual", True))

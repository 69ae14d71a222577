"""Gemma 3, text only: sliding and full attention layers, each kind with its own rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.errors import ModelError
from engine.layers.rotary import RopeScaling
from engine.models.config import (
    MAX_CONTEXT,
    MAX_LAYERS,
    Family,
    Fields,
    LayerNorms,
    ModelConfig,
    read_model_config,
    read_rope,
)

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE_KINDS = ("default", "linear")
GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    activation_key="hidden_activation",
    activations=("gelu_pytorch_tanh",),
    fixed={"attn_logit_softcapping": (), "use_bidirectional_attention": (False,)},
    norms=LayerNorms(
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    ),
    norm_offset=True,
    qk_norm=True,
)
_ROPE_KEYS = ("rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters")


def read_gemma3_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build the config from the content of a config.json; `where` names the file in errors.

    Raises ModelError for a missing, invalid or unsupported value.
    """
    fields = Fields(values, where)
    theta, scaling = _read_rope(fields, FULL)
    local_theta, local_scaling = _read_rope(fields, SLIDING)
    base = read_model_config({key: value for key, value in values.items() if key not in _ROPE_KEYS}, family, where)
    softcap = values.get("final_logit_softcapping")
    return replace(
        base,
        rope_theta=theta,
        rope_scaling=scaling,
        local_rope_theta=local_theta,
        local_rope_scaling=local_scaling,
        scaled_positions=True,
        windows=_read_windows(fields, base.num_layers),
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        embedding_scale=base.hidden_size**0.5,
        logit_softcap=None if softcap is None else fields.number("final_logit_softcapping"),
    )


def _read_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window, from `layer_types` or from `sliding_window_pattern`: every n-th layer is full."""
    kinds = fields.values.get("layer_types")
    if kinds is None:
        pattern = fields.integer("sliding_window_pattern", 6, high=MAX_LAYERS)
        kinds = [FULL if (index + 1) % pattern == 0 else SLIDING for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (SLIDING, FULL) for kind in kinds):
        raise fields.error("layer_types", f"a list of {layers} times {SLIDING!r} or {FULL!r}")
    window = fields.integer("sliding_window", 4096)
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _read_rope(fields: Fields, kind: str) -> tuple[float, RopeScaling | None]:
    """Return RoPE theta and scaling of a kind of layer.

    Reads transformers 5's `rope_parameters`, an object per kind, or `rope_theta` and `rope_scaling` of full attention
    layers and `rope_local_base_freq` of sliding layers.
    """
    values = fields.values
    settings = values.get("rope_parameters") or {}
    if not isinstance(settings, Mapping) or any(not isinstance(value, Mapping | None) for value in settings.values()):
        raise fields.error("rope_parameters", f"an object with the objects {FULL!r} and {SLIDING!r}")
    key, default = ("rope_theta", 1e6) if kind == FULL else ("rope_local_base_freq", 1e4)
    own = dict(settings.get(kind) or {})
    scaling = values.get("rope_scaling")
    if kind == FULL and scaling is not None:
        if not isinstance(scaling, Mapping):
            raise fields.error("rope_scaling", "an object")
        own |= scaling
    rope_type = own.get("rope_type", own.get("type", "default"))
    if rope_type not in ROPE_KINDS:
        raise ModelError(
            f"{fields.where}: rope scaling {rope_type!r} of {kind} layers is not supported; supported are "
            f"{', '.join(ROPE_KINDS)}"
        )
    positions = fields.integer("max_position_embeddings", GEMMA3.defaults["max_position_embeddings"], high=MAX_CONTEXT)
    one_kind = {"rope_theta": fields.number(key, default), "rope_parameters": own}
    return read_rope(one_kind, positions, f"{fields.where}, {kind}")

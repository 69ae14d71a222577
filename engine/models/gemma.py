"""Gemma, Gemma 2 and Gemma 3, text only.

All have norms with a factor of 1 + weight and scaled embeddings. Gemma 2 and 3 alternate layers with a sliding window
and with full attention, and have norms after attention and MLP too. Gemma 2 bounds attention scores and logits; Gemma 3
has norms of q and k, and another rotary embedding in layers with a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import PATTERN, Family, Fields, LayerNorms, ModelConfig, read_model_config

ACTIVATIONS = ("gelu_pytorch_tanh",)
NORMS = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
SCALAR = "query_pre_attn_scalar"
IDS = {"bos_token_id": 2, "eos_token_id": 1}

GEMMA = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    defaults={"head_dim": 256, "num_key_value_heads": 16, "tie_word_embeddings": True, **IDS},
    # hidden_activation replaces hidden_act, whose "gelu" means the tanh approximation too
    activation_key="hidden_activation",
    activations=ACTIVATIONS,
    default_activation="gelu_pytorch_tanh",
    fixed={"hidden_act": ("gelu", "gelu_pytorch_tanh"), "use_bidirectional_attention": (False,)},
    norm_offset=True,
    embedding_scale_in_dtype=True,
)
GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        SCALAR: 256,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        **IDS,
    },
    activation_key="hidden_activation",
    activations=ACTIVATIONS,
    default_activation="gelu_pytorch_tanh",
    fixed={"use_bidirectional_attention": (False,)},
    numbers={"logit_softcap": "final_logit_softcapping", "attention_softcap": "attn_logit_softcapping"},
    norms=NORMS,
    norm_offset=True,
    embedding_scale_in_dtype=True,
    window="listed",
    default_window=4096,
    window_pattern=2,
)
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
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        SCALAR: 256,
        **IDS,
    },
    activation_key="hidden_activation",
    activations=ACTIVATIONS,
    default_activation="gelu_pytorch_tanh",
    fixed={"attn_logit_softcapping": (), "use_bidirectional_attention": (False,)},
    numbers={"logit_softcap": "final_logit_softcapping"},
    norms=NORMS,
    norm_offset=True,
    qk_norm=True,
    rope_by_layer="rope_local_base_freq",
    embedding_scale_in_dtype=True,
    window="listed",
    default_window=4096,
    window_pattern=6,
    window_pattern_key=PATTERN,
)


def read_gemma_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build the config from the content of a config.json; `where` names the file in errors.

    Raises ModelError for a missing, invalid or unsupported value.
    """
    base = read_model_config(values, family, where)
    scalar = family.defaults.get(SCALAR)
    return replace(
        base,
        attention_scale=None if scalar is None else Fields(values, where).number(SCALAR, scalar) ** -0.5,
        embedding_scale=base.hidden_size**0.5,
    )

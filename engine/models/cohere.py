"""Cohere's Command-R and Command-R7B: LayerNorm, attention and MLP in parallel, interleaved rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine.models.config import ALL_ACTIVATIONS, PATTERN, Family, LayerNorms, ModelConfig, read_model_config

DEFAULTS = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 255001,
}
COHERE = Family(
    architecture="CohereForCausalLM",
    model_type="cohere",
    defaults={**DEFAULTS, "rope_theta": 500000.0},
    eps_key="layer_norm_eps",
    activations=ALL_ACTIVATIONS,
    numbers={"logit_scale": "logit_scale"},
    norms=LayerNorms(before_mlp=None),
    norm="layer",
    qk_norm_kind="layer",
    qk_norm_key="use_qk_norm",
    parallel_block=True,
    rope_interleaved=True,
)
COHERE2 = Family(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    defaults=DEFAULTS,
    eps_key="layer_norm_eps",
    fixed={"position_embedding_type": ("rope_gptj",), "rotary_pct": (1, 1.0)},
    activations=ALL_ACTIVATIONS,
    numbers={"logit_scale": "logit_scale"},
    norms=LayerNorms(before_mlp=None),
    norm="layer",
    parallel_block=True,
    rope_interleaved=True,
    window="listed",
    default_window=4096,
    window_pattern=4,
    window_pattern_key=PATTERN,
)


def read_cohere2_config(values: Mapping[str, Any], family: Family, where: str) -> ModelConfig:
    """Build the config of Command-R7B, whose layers with full attention have no rotary embedding.

    `where` names the config.json in errors. Raises ModelError for a missing, invalid or unsupported value.
    """
    base = read_model_config(values, family, where)
    windows = base.windows or (None,) * base.num_layers
    return replace(base, nope_layers=frozenset(index for index, window in enumerate(windows) if window is None))

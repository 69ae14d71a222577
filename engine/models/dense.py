"""Families of dense decoders that their options describe: Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from engine.models.config import Family

FAMILIES = (
    Family(architecture="LlamaForCausalLM", model_type="llama", mlp_bias_key=True),
    Family(
        architecture="MistralForCausalLM",
        model_type="mistral",
        qkv_bias=False,
        output_bias=False,
        window="always",
        default_window=4096,
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        qkv_bias=True,
        output_bias=False,
        window="flagged",
        default_window=4096,
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        qk_norm=True,
        window="flagged",
        default_window=4096,
        defaults={"head_dim": 128},
    ),
)

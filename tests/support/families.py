"""A tiny random folder of every family that the engine serves, made by transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

WINDOW = 12
SHAPES = {
    "vocab_size": 320,  # as the tokenizer of the tiny_model fixture
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,  # with a tied head, random weights repeat tokens
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
FACTORS = [1.0 + 0.25 * index for index in range(8)]


class Tiny(NamedTuple):
    """The class of a family's config in transformers, and its arguments beside SHAPES."""

    config: str
    changes: dict[str, Any] = {}


FAMILIES = {
    "llama": Tiny("LlamaConfig"),
    "mistral": Tiny("MistralConfig", {"sliding_window": WINDOW}),
    "ministral": Tiny(
        "MinistralConfig",
        {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "qwen2": Tiny("Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": Tiny(
        "Qwen3Config",
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3_moe": Tiny(
        "Qwen3MoeConfig",
        {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3, "mlp_only_layers": [1]},
    ),
    "qwen2_moe": Tiny(
        "Qwen2MoeConfig",
        {
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "shared_expert_intermediate_size": 80,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": Tiny("MixtralConfig", {"num_experts_per_tok": 3, "head_dim": 16}),
    "gpt_oss": Tiny(
        "GptOssConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": 32,
            "sliding_window": WINDOW,
            "swiglu_limit": 2.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "glm4_moe": Tiny(
        "Glm4MoeConfig",
        {
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "olmoe": Tiny("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 3}),
    "granitemoe": Tiny(
        "GraniteMoeConfig",
        {
            "num_experts_per_tok": 3,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "granitemoeshared": Tiny(
        "GraniteMoeSharedConfig",
        {
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 80,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
        },
    ),
    "gemma": Tiny("GemmaConfig", {"head_dim": 16}),
    "gemma2": Tiny(
        "Gemma2Config",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 40,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma3_text": Tiny(
        "Gemma3TextConfig",
        {"head_dim": 16, "query_pre_attn_scalar": 40, "sliding_window": WINDOW, "sliding_window_pattern": 3},
    ),
    "phi": Tiny("PhiConfig"),
    "phi3": Tiny("Phi3Config", {"sliding_window": WINDOW}),
    "olmo": Tiny("OlmoConfig"),
    "olmo2": Tiny("Olmo2Config"),
    "olmo3": Tiny(
        "Olmo3Config",
        {
            "sliding_window": WINDOW,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        },
    ),
    "granite": Tiny(
        "GraniteConfig",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "smollm3": Tiny("SmolLM3Config"),
    "starcoder2": Tiny("Starcoder2Config", {"sliding_window": WINDOW}),
    "stablelm": Tiny("StableLmConfig"),
    "nemotron": Tiny("NemotronConfig", {"head_dim": 16}),
    "seed_oss": Tiny("SeedOssConfig", {"head_dim": 16}),
    "cohere": Tiny("CohereConfig", {"logit_scale": 0.25}),
    "cohere2": Tiny("Cohere2Config", {"logit_scale": 0.25, "sliding_window": WINDOW}),
    "exaone4": Tiny("Exaone4Config", {"sliding_window": WINDOW}),
    "glm": Tiny("GlmConfig", {"head_dim": 16}),
    "glm4": Tiny("Glm4Config", {"head_dim": 16}),
    "gpt_neox": Tiny("GPTNeoXConfig"),
}
"""By model_type."""

WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "glm4_moe", "olmoe", "granitemoe", "granitemoeshared")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases-gelu": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2-listed": (
        "qwen2",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma2-tied": ("gemma2", {"tie_word_embeddings": True, "final_logit_softcapping": None}),
    "gemma2-one-kv-head": ("gemma2", {"num_key_value_heads": 1, "attn_logit_softcapping": 0.7}),
    "gemma3-softcap": ("gemma3_text", {"final_logit_softcapping": 6.0}),
    "phi3-short": (
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 2048,
            "rope_scaling": {"type": "longrope", "short_factor": FACTORS, "long_factor": [2 * one for one in FACTORS]},
        },
    ),
    "phi3-long-partial": (
        "phi3",
        {
            "sliding_window": None,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 16,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": FACTORS[:6],
                "long_factor": [2 * one for one in FACTORS[:6]],
            },
        },
    ),
    "olmo-clip": ("olmo", {"clip_qkv": 0.8}),
    "stablelm-biases": ("stablelm", {"use_qkv_bias": True}),
    "nemotron-biases": ("nemotron", {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 1.0}),
    "olmo2-one-kv-head": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "olmo3-listed": ("olmo3", {"rope_scaling": None, "layer_types": ["full_attention", "sliding_attention"] * 2}),
    "granite-biases-tied": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "smollm3-listed": ("smollm3", {"no_rope_layers": [0, 1, 1, 0]}),
    "smollm3-windows": ("smollm3", {"use_sliding_window": True, "sliding_window": WINDOW}),
    "starcoder2-no-biases": ("starcoder2", {"use_bias": False, "sliding_window": None, "hidden_act": "relu2"}),
    "exaone4-no-windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "cohere-qk-norms": ("cohere", {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": True}),
    "mixtral-window-tied": ("mixtral", {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "mixtral-one-of-one": ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "qwen2_moe-windows": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 3, "norm_topk_prob": True},
    ),
    "qwen2_moe-listed": (
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "qkv_bias": False,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3_moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": WINDOW, "norm_topk_prob": True}),
    "gpt_oss-no-biases": ("gpt_oss", {"attention_bias": False, "swiglu_limit": 7.0, "num_experts_per_tok": 1}),
    "gpt_oss-listed": (
        "gpt_oss",
        {
            "layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"],
            "head_dim": 16,
            "num_experts_per_tok": 8,
        },
    ),
    "glm4_moe-groups": (
        "glm4_moe",
        {
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
    ),
    "olmoe-normalized-biases": ("olmoe", {"norm_topk_prob": True, "attention_bias": True, "clip_qkv": 0.8}),
    "granitemoeshared-tied-no-shared": (
        "granitemoeshared",
        {"shared_intermediate_size": 0, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "gpt_neox-sequential-tied": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0, "rope_theta": 1e4},
        },
    ),
    "glm4-whole-heads": ("glm4", {"attention_bias": False, "rope_parameters": {"partial_rotary_factor": 1.0}}),
}
"""Other options of families: the family, and further arguments of its config."""


def config_of(family: str, **changes: Any) -> transformers.PreTrainedConfig:
    """Return the config in transformers of a family, by model_type, or of a variant."""
    base, own = VARIANTS.get(family, (family, {}))
    tiny = FAMILIES[base]
    return getattr(transformers, tiny.config)(**{**SHAPES, **tiny.changes, **own, **changes})


def tiny_folder(family: str, folder: Path, tokenizer: Path | None = None, **changes: Any) -> Path:
    """Save a random float32 model of a family, by model_type, or of a variant, to `folder`, and return it.

    Its weights are large enough that every part affects the logits and greedy text varies. `tokenizer` is a folder
    whose other files are copied. `changes` are further arguments of the config in transformers.
    """
    if tokenizer is not None:
        shutil.copytree(tokenizer, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    config = config_of(family, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def load_reference(folder: Path) -> transformers.PreTrainedModel:
    """Load the float32 model of a folder in transformers. Its SDPA attention refuses soft-caps of scores."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":  # transformers 5.17 ignores this field of the config
            module.limit = model.config.swiglu_limit
    return model.eval()

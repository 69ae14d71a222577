"""Small random Qwen3-MoE models in transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

SHAPES = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}


def reference_model(**changes: Any) -> transformers.PreTrainedModel:
    """Create a float32 model whose weights are large enough that every part affects the logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**{**SHAPES, **changes}))
        model = model.float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def write_lively_moe(tiny: Path, folder: Path, **changes: Any) -> None:
    """Save a model with the tiny model's tokenizer, a dense layer and two with experts, whose greedy text varies."""
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    config = transformers.Qwen3MoeConfig(
        **{
            **SHAPES,
            "vocab_size": 320,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 4096,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "initializer_range": 0.2,
            **changes,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)

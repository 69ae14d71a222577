"""Small random Gemma 3 models in transformers, with a window of 12 tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

WINDOW = 12
SHAPES = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 40,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 3,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def reference_model(**changes: Any) -> transformers.PreTrainedModel:
    """Create a float32 model whose weights are large enough that every part affects the logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        config = transformers.Gemma3TextConfig(**{**SHAPES, **changes})
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.3)
    return model


def write_lively_gemma3(tiny: Path, folder: Path) -> None:
    """Save a model with the tiny model's tokenizer whose greedy text varies."""
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    changes = {
        "vocab_size": 320,
        "tie_word_embeddings": False,  # with a tied head, random weights repeat tokens
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    reference_model(**changes).save_pretrained(folder)

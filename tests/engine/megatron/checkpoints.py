"""Helpers: checkpoints written by transformers, GPTModels of the same configuration, and comparisons."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from engine.loader.weights import iterate_safetensors
from engine.megatron.config import gpt_model_arguments, transformer_config_values
from engine.models import config_from_folder
from graph_cache.adapters.megatron.cpu import keep_rotary_in_place, layer_spec
from tests.support import megatron_models as models

TOLERANCE = 1e-5
"""For float32 logits of about 1: the two implementations sum in different orders."""

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-linear-biases": (
        transformers.LlamaConfig,
        {"rope_parameters": LINEAR, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "rms_norm_eps": 1e-5}),
    "qwen3-tied": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 1}),
}


def checkpoint(
    folder: Path, case: str = "llama", *, dtype: torch.dtype = torch.float32, shard: str = "1GB", **changes: Any
) -> transformers.PreTrainedModel:
    """Save a random transformers model in which every parameter affects the output, and return it."""
    make, more = CASES[case]
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(make(**{**SIZES, **more, **changes})).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def gpt_for(
    folder: Path,
    *,
    tp_size: int = 1,
    pp_size: int = 1,
    pre_process: bool = True,
    post_process: bool = True,
    vocab_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> GPTModel:
    """Build a GPTModel of the folder's configuration, with other weights, as a user would."""
    hf = config_from_folder(folder)
    if pp_size > 1:
        changes |= {"pipeline_model_parallel_size": pp_size, "pipeline_dtype": dtype}
    values = transformer_config_values(hf) | {"tensor_model_parallel_size": tp_size, "params_dtype": dtype} | changes
    config = models.config(**values)
    arguments = gpt_model_arguments(hf)
    if vocab_size is not None:
        arguments["vocab_size"] = vocab_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = GPTModel(
            config,
            layer_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm),
            pre_process=pre_process,
            post_process=post_process,
            **arguments,
        )
    keep_rotary_in_place(model)
    return model.eval()


def stored(folder: Path) -> dict[str, Tensor]:
    return dict(iterate_safetensors(folder))


def hf_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Compare names, shapes, dtypes and bits."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype
        and tensor.shape == other[name].shape
        and torch.equal(bits(tensor), bits(other[name]))
        for name, tensor in one.items()
    )


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

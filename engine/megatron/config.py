"""Translate a Hugging Face model configuration to Megatron-Core's, and compare a GPTModel with it.

Returns arguments for the caller's `TransformerConfig` and `GPTModel`; dtypes, parallel sizes and fusions are up to the
caller. Models that Megatron-Core can't express are rejected.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.errors import ModelError
from engine.layers.rotary import RopeScaling, inverse_frequencies
from engine.models.config import ModelConfig

LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Values that are fixed in Megatron-Core's rope scaling."""

TRANSLATED = frozenset(
    """rope_scaling tie_word_embeddings attention_bias output_bias mlp_bias qk_norm windows bos_token_id eos_token_ids
    dtype""".split()
)
"""Options of ModelConfig that are translated, or refused below with a reason."""

TRAINING_ONLY = ("hidden_dropout", "attention_dropout")
"""Fields that a trainer may set to other values: they don't change what the weights compute in inference."""


def transformer_config_values(config: ModelConfig) -> dict[str, Any]:
    """Return keyword arguments of Megatron-Core's TransformerConfig for the model of `config` (`config_from_folder`).

    Raises one ModelError that lists every feature of the model that Megatron-Core can't express.
    """
    if problems := _unsupported(config):
        raise ModelError(f"{config.architecture} can't be a Megatron-Core GPTModel: {'; '.join(problems)}")
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_query_groups": config.num_kv_heads,
        "kv_channels": config.head_dim,
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "layernorm_zero_centered_gamma": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": config.output_bias,
        "add_qkv_bias": config.attention_bias and not config.output_bias,
        "qk_layernorm": config.qk_norm,
        "rotary_interleaved": False,
        # Megatron-Core's default is 0.1; these models have no dropout
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def gpt_model_arguments(config: ModelConfig) -> dict[str, Any]:
    """Return keyword arguments of Megatron-Core's GPTModel for the model of `config`, except config and layer spec.

    `vocab_size` is the checkpoint's; replace it by a larger one to pad for tensor parallelism. Raises ModelError as
    `transformer_config_values` does.
    """
    transformer_config_values(config)
    scaling = config.rope_scaling or RopeScaling()
    arguments = {
        "vocab_size": config.vocab_size,
        "max_sequence_length": config.context_length,
        "position_embedding_type": "rope",
        "rotary_base": config.rope_theta,
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
    }
    if scaling.kind == "llama3":
        arguments |= {"rope_scaling": True, "rope_scaling_factor": scaling.factor}
    elif scaling.kind == "linear":
        arguments |= {"seq_len_interpolation_factor": scaling.factor}
    return arguments


def differences(model: nn.Module, config: ModelConfig) -> list[str]:
    """List the settings in which an unwrapped GPTModel differs from the model of `config`, except weight shapes."""
    found: list[str] = []
    wanted = transformer_config_values(config)
    for name in wanted.keys() - set(TRAINING_ONLY):
        found += _difference(name, getattr(model.config, name, None), wanted[name])
    wanted = gpt_model_arguments(config)
    for name in ("position_embedding_type", "share_embeddings_and_output_weights"):
        found += _difference(name, getattr(model, name, None), wanted[name])
    if not _same_frequencies(model, config):
        arguments = {name: wanted[name] for name in wanted if name.startswith(("ro", "seq_len"))}
        found.append(f"the model has other rotary frequencies; build it with {arguments}")
    return sorted(found)


def _difference(name: str, found: Any, wanted: Any) -> list[str]:
    return [] if found == wanted else [f"{name} is {found!r} in the model, {wanted!r} is needed"]


def _same_frequencies(model: nn.Module, config: ModelConfig) -> bool:
    """Return whether the rotary frequencies agree; they cover base, scaling rule and factors."""
    rotary = getattr(model, "rotary_pos_emb", None)
    found = getattr(rotary, "inv_freq", None)
    if found is None:
        return False
    wanted = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    found = found.detach().to("cpu", torch.float32) / (getattr(rotary, "seq_len_interpolation_factor", None) or 1)
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-5, atol=0.0)


def _unsupported(config: ModelConfig) -> list[str]:
    """List the features for which Megatron-Core has no setting."""
    problems: list[str] = []
    if untranslated := [f"{name}={value!r}" for name, value in config.options().items() if name not in TRANSLATED]:
        problems.append(f"options that are not translated: {', '.join(untranslated)}")
    biases = (config.attention_bias, config.output_bias, config.mlp_bias)
    if biases not in ((False, False, False), (True, False, False), (True, True, True)):
        problems.append(
            f"biases on {_named_biases(biases)} only; it supports biases on no projection, on q, k and v, or on all"
        )
    if sizes := sorted({size for size in config.windows if size is not None}):
        problems.append(
            f"attention within a sliding window of {' or '.join(map(str, sizes))} tokens, which is not "
            "translated to its window_size"
        )
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind not in ("linear", "llama3"):
        problems.append(f"rope scaling {scaling.kind!r}, for which its TransformerConfig has no fields")
    if scaling is not None and scaling.kind == "llama3":
        problems += [
            f"rope scaling 'llama3' with {name} {getattr(scaling, name)}, where it has {fixed} fixed"
            for name, fixed in LLAMA3_FIXED.items()
            if getattr(scaling, name) != fixed
        ]
    return problems


def _named_biases(biases: tuple[bool, bool, bool]) -> str:
    return " and ".join(name for name, present in zip(("q, k and v", "o", "the MLP"), biases, strict=True) if present)

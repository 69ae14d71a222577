"""Check whether a GPTModel is fusable: a plain dense decoder that the engine's fused kernels compute as Megatron does.

Checks the configuration, module types, parameter shapes, and that every parameter is used. If any check is
inconclusive, the engine falls back to the model's own layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import ModelError
from engine.megatron.dense_tensors import MegatronDecoder, MegatronTensors
from engine.megatron.weight_layout import listed

_REQUIRED_SETTINGS = {
    "normalization": "RMSNorm",
    "layernorm_zero_centered_gamma": False,
    "gated_linear_unit": True,
    "rotary_interleaved": False,
    "num_moe_experts": None,
    "apply_residual_connection_post_layernorm": False,
    "heterogeneous_block_specs": False,
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "qk_l2_norm": False,
    "apply_query_key_layer_scaling": False,
    "no_rope_freq": None,
    "use_kitchen": False,
    "quant_recipe": None,
    "batch_invariant_mode": False,
}
"""Fields of TransformerConfig, where its version has them, and the only value that the kernels support."""

_KNOWN_PACKAGES = ("megatron.core.", "transformer_engine.", "torch.nn.modules.", "apex.")
_OPTIONAL_TENSORS = {"qkv_bias", "q_norm", "k_norm", "o_bias", "gate_up_bias", "down_bias", "sinks"} | {
    "attention_out_norm",
    "mlp_out_norm",
}


def fusable_tensors(model: MegatronDecoder) -> MegatronTensors:
    """Return the model's tensors. Raises ModelError, listing every difference from a plain dense decoder."""
    problems = _unsupported_settings(model) + _unknown_modules(model.gpt)
    if not problems:  # other modules have other parameter names
        tensors = MegatronTensors(model)
        problems = _unreadable_parameters(model, tensors) + _unread_parameters(model.gpt, tensors)
    if problems:
        raise ModelError(f"{type(model.gpt).__name__} is not a plain dense decoder: {listed(problems)}")
    model.weight_slots()  # raises on parameters of other shapes
    return tensors


def _unsupported_settings(model: MegatronDecoder) -> list[str]:
    config = model.gpt.config
    found = [
        f"{name}={getattr(config, name)!r}"
        for name, required in _REQUIRED_SETTINGS.items()
        if getattr(config, name, required) not in (required, None)
    ]
    if config.activation_func is not F.silu:
        found.append(f"activation_func {getattr(config.activation_func, '__name__', config.activation_func)}")
    if model.rotary.shape[-1] != model.config.head_dim:
        found.append(f"rotary positions on {model.rotary.shape[-1]} of {model.config.head_dim} dimensions of a head")
    if config.num_query_groups % config.tensor_model_parallel_size:
        found.append(f"{config.num_query_groups} query groups over {config.tensor_model_parallel_size} ranks")
    return found


def _unknown_modules(gpt: nn.Module) -> list[str]:
    """List modules that may compute something else, such as another layer type or an adapter around a projection.

    Skips core attention, which the engine replaces, and the rotary embedding, of which only the frequencies are used.
    """
    found, eps = set(), gpt.config.layernorm_epsilon
    for name, module in gpt.named_modules():
        if {"core_attention", "rotary_pos_emb"}.intersection(name.split(".")):
            continue
        type_name = f"{type(module).__module__}.{type(module).__qualname__}"
        if not type_name.startswith(_KNOWN_PACKAGES):
            found.add(f"{name} is a {type_name}")
        if "forward" in vars(module) and not type(module.forward).__module__.startswith("graph_cache."):
            found.add(f"{name} has a replaced forward")  # other than the intercepted method of a training engine
        if getattr(module, "eps", eps) != eps:
            found.add(f"{name} has an eps of {module.eps}, the configuration has {eps}")
    for layer in gpt.decoder.layers:
        for module, expected in (
            (layer, "TransformerLayer"),
            (layer.self_attention, "SelfAttention"),
            (getattr(layer, "mlp", None), "MLP"),
        ):
            if type(module).__name__ != expected:
                found.add(f"a {type(module).__name__} in place of {expected}")
        for name in ("self_attn_bda", "mlp_bda"):
            if type(getattr(layer, name, None)).__name__ == "IdentityFuncOp":
                found.add(f"a layer without the residual of {name}")
        for name in ("q_layernorm", "k_layernorm"):
            norm = getattr(layer.self_attention, name, None)
            if type(norm).__name__ not in ("NoneType", "IdentityOp") and getattr(norm, "weight", None) is None:
                found.add(f"a {type(norm).__name__} as {name}")
    return sorted(found)


def _unreadable_parameters(model: MegatronDecoder, tensors: MegatronTensors) -> list[str]:
    """List parameters that are missing or not contiguous in the model's dtype."""
    named = [
        (f"{name} of layer {index}", tensor)
        for index in range(model.config.num_layers)
        for name, tensor in tensors.layer(index).named_tensors()
        if tensor is not None or name not in _OPTIONAL_TENSORS
    ]
    named += [("the final norm", tensors.norm.weight), ("the embedding", tensors.embedding)]
    if not model.config.tie_word_embeddings:
        named.append(("the head", model.gpt.output_layer.weight))
    return [
        f"{name} is {_describe(tensor)}, a contiguous parameter of {model.dtype} is needed"
        for name, tensor in named
        if not _is_plain_parameter(tensor, model.dtype)
    ]


def _unread_parameters(gpt: nn.Module, tensors: MegatronTensors) -> list[str]:
    """List parameters that the kernels don't read, although the model may compute with them."""
    layers = [tensor for index in range(len(gpt.decoder.layers)) for _, tensor in tensors.layer(index).named_tensors()]
    read = {
        tensor.data_ptr()
        for tensor in (*layers, tensors.norm.weight, tensors.embedding, tensors.head.weight)
        if tensor is not None
    }
    return [
        f"{name} is a parameter that a plain decoder doesn't have"
        for name, parameter in gpt.named_parameters()
        if parameter.numel() and parameter.data_ptr() not in read
    ]


def _is_plain_parameter(tensor: Tensor | None, dtype: torch.dtype) -> bool:
    return (
        isinstance(tensor, nn.Parameter)
        and type(tensor.data) is Tensor
        and tensor.dtype == dtype
        and tensor.is_contiguous()
    )


def _describe(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"a {type(tensor.data).__name__} {list(tensor.shape)} of {tensor.dtype}"

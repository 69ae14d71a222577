"""A hosted GPTModel as the tensors of a dense decoder, for kernels of our own that compute a step in its place.

Owns which models these kernels compute as Megatron does. Every parameter is the model's own, read where it lies: what
trains is what generates. Knows no kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.tensors import HeadLayout, LayerTensors

if TYPE_CHECKING:
    from engine.megatron.hosted import HostedModel

_NEEDED = {
    "normalization": "RMSNorm", "layernorm_zero_centered_gamma": False, "gated_linear_unit": True,
    "rotary_interleaved": False, "num_moe_experts": None, "apply_residual_connection_post_layernorm": False,
    "heterogeneous_block_specs": False, "activation_func_clamp_value": None, "glu_linear_offset": 0.0,
    "qk_l2_norm": False, "apply_query_key_layer_scaling": False, "no_rope_freq": None,
}
"""Fields of a TransformerConfig, where its version has them, and the only value that these kernels compute with."""

_KNOWN_PACKAGES = ("megatron.core.", "transformer_engine.", "torch.nn.modules.", "apex.")


class HostedTensors:
    """A HostedModel as DenseTensors; `uncommon` must be empty of it."""

    def __init__(self, hosted: HostedModel):
        self._gpt, self.config = hosted.gpt, hosted.config
        config, group = hosted.config, hosted.gpt.pg_collection.tp
        self.heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, by_group=True)
        self.group = group if group.size() > 1 else None
        self.first_token = group.rank() * len(self.embedding)
        # As Megatron rotates: by cos and sin in the dtype of what is rotated.
        angles = hosted.rotary.view(len(hosted.rotary), -1)
        sign = torch.ones(angles.shape[1], device=angles.device)
        sign[: angles.shape[1] // 2] = -1.0
        self.cos, self.sin = angles.cos().to(hosted.dtype), (angles.sin() * sign).to(hosted.dtype)

    def layer(self, index: int) -> LayerTensors:
        layer = self._gpt.decoder.layers[index]
        attention, mlp = layer.self_attention, layer.mlp
        return LayerTensors(
            input_norm=_norm_weight(layer.input_layernorm, attention.linear_qkv),
            qkv=attention.linear_qkv.weight, qkv_bias=_bias(attention.linear_qkv),
            q_norm=getattr(attention.q_layernorm, "weight", None),
            k_norm=getattr(attention.k_layernorm, "weight", None),
            o=attention.linear_proj.weight, o_bias=_bias(attention.linear_proj),
            post_norm=_norm_weight(layer.pre_mlp_layernorm, mlp.linear_fc1),
            gate_up=mlp.linear_fc1.weight, gate_up_bias=_bias(mlp.linear_fc1),
            down=mlp.linear_fc2.weight, down_bias=_bias(mlp.linear_fc2),
        )

    @property
    def embedding(self) -> Tensor:
        return self._gpt.embedding.word_embeddings.weight

    @property
    def norm(self) -> Tensor:
        return self._gpt.decoder.final_layernorm.weight

    @property
    def head(self) -> Tensor:
        return self.embedding if self._gpt.share_embeddings_and_output_weights else self._gpt.output_layer.weight


def uncommon(hosted: HostedModel) -> list[str]:
    """In what a hosted model is no plain dense decoder: what our kernels would compute otherwise than Megatron does."""
    gpt, config = hosted.gpt, hosted.gpt.config
    found = [f"{name}={getattr(config, name)!r}" for name, needed in _NEEDED.items()
             if getattr(config, name, needed) not in (needed, None)]
    if config.activation_func is not F.silu:
        found.append(f"activation_func {getattr(config.activation_func, '__name__', config.activation_func)}")
    if hosted.rotary.shape[-1] != hosted.config.head_dim:
        found.append(f"rotary positions on {hosted.rotary.shape[-1]} of {hosted.config.head_dim} numbers of a head")
    if config.num_query_groups % config.tensor_model_parallel_size:
        found.append(f"{config.num_query_groups} query groups over {config.tensor_model_parallel_size} ranks")
    found += _foreign(gpt)
    # The parameters of others have other names.
    return found or _misshapen(hosted)


def _foreign(gpt: nn.Module) -> list[str]:
    """Modules that may compute anything: a layer of another kind, an adapter in a projection's place. A core attention
    is the engine's while it serves, and of the rotary embedding only the frequencies are read.
    """
    found = {f"{name} is a {type(module).__module__}.{type(module).__qualname__}"
             for name, module in gpt.named_modules()
             if not type(module).__module__.startswith(_KNOWN_PACKAGES)
             and not {"core_attention", "rotary_pos_emb"}.intersection(name.split("."))}
    for layer in gpt.decoder.layers:
        for module, wanted in ((layer, "TransformerLayer"), (getattr(layer, "self_attention", None), "SelfAttention"),
                               (getattr(layer, "mlp", None), "MLP")):
            if type(module).__name__ != wanted:
                found.add(f"a {type(module).__name__} where a plain decoder has its {wanted}")
    return sorted(found)


def _misshapen(hosted: HostedModel) -> list[str]:
    """Parameters that kernels can't read as they lie."""
    config, gpt = hosted.config, hosted.gpt
    hidden, width, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    shapes = {"input_norm": (hidden,), "qkv": (qkv, hidden), "qkv_bias": (qkv,), "q_norm": (config.head_dim,),
              "k_norm": (config.head_dim,), "o": (hidden, heads), "o_bias": (hidden,), "post_norm": (hidden,),
              "gate_up": (2 * width, hidden), "gate_up_bias": (2 * width,), "down": (hidden, width),
              "down_bias": (hidden,)}
    tensors = HostedTensors(hosted)
    named = [(f"{name} of layer {index}", tensor, shapes[name]) for index in range(config.num_layers)
             for name, tensor in tensors.layer(index)._asdict().items()]
    named += [("the last norm", tensors.norm, (hidden,)), ("the embedding", tensors.embedding, tensors.embedding.shape),
              ("the head", tensors.head, tensors.embedding.shape)]
    found = [f"{name} is {_described(tensor)}, a contiguous parameter {list(shape)} of {hosted.dtype} is needed"
             for name, tensor, shape in named if tensor is not None and not _is_plain(tensor, shape, hosted.dtype)]
    if getattr(gpt.output_layer, "bias", None) is not None:
        found.append("its output layer has a bias")
    return found


def _is_plain(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return (isinstance(tensor, nn.Parameter) and type(tensor.data) is Tensor and tensor.dtype == dtype
            and tuple(tensor.shape) == tuple(shape) and tensor.is_contiguous())


def _described(tensor: Any) -> str:
    return f"a {type(tensor.data).__name__} {list(tensor.shape)} of {tensor.dtype}"


def _norm_weight(norm: nn.Module, following: nn.Module) -> Tensor:
    """A norm's weight: of a module of its own (local spec), or of the linear layer behind it (Transformer Engine's)."""
    own = getattr(norm, "weight", None)
    return following.layer_norm_weight if own is None else own


def _bias(linear: nn.Module) -> Tensor | None:
    """A linear layer's bias; Transformer Engine's have an empty tensor where they have none."""
    bias = getattr(linear, "bias", None)
    return None if bias is None or bias.numel() == 0 else bias

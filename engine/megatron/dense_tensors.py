"""Expose a Megatron model as the tensors of a dense decoder, for the fused kernels.

All tensors are the model's own parameters, without copies. fusable.py checks whether a model is such a decoder.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.kernels.linear_weight import LinearWeight
from engine.kernels.norm_weights import NormWeights
from engine.megatron.weight_layout import Slot
from engine.models.config import ModelConfig
from engine.models.decoder_tensors import HeadLayout, LayerTensors


class MegatronDecoder(Protocol):
    """The attributes of MegatronModel used here. `rotary` [positions, 1, 1, D] holds the rotary frequencies."""

    gpt: Any
    config: ModelConfig
    dtype: torch.dtype
    rotary: Tensor

    def weight_slots(self) -> dict[str, Slot]: ...


class MegatronTensors:
    """DecoderTensors of a MegatronModel. A tensor that the model lacks is None."""

    embedding_scale: float | None = None
    head_bias: Tensor | None = None

    def __init__(self, model: MegatronDecoder):
        self._gpt, self.config = model.gpt, model.config
        config, group = model.config, model.gpt.pg_collection.tp
        self.heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, by_group=True)
        self.group = group if group.size() > 1 else None
        self.first_token = group.rank() * len(self.embedding)
        # Like Megatron, use cos and sin in the dtype of the rotated tensor.
        angles = model.rotary.view(len(model.rotary), -1)
        sign = torch.ones(angles.shape[1], device=angles.device)
        sign[: angles.shape[1] // 2] = -1.0
        self.cos, self.sin = angles.cos().to(model.dtype), (angles.sin() * sign).to(model.dtype)

    def rotary(self, index: int) -> tuple[Tensor, Tensor]:
        return self.cos, self.sin

    def layer(self, index: int) -> LayerTensors:
        layer = self._gpt.decoder.layers[index]
        attention, mlp = layer.self_attention, layer.mlp
        return LayerTensors(
            input_norm=_norm_weights(layer.input_layernorm, attention.linear_qkv),
            qkv=LinearWeight.plain(attention.linear_qkv.weight),
            qkv_bias=_bias(attention.linear_qkv),
            q_norm=getattr(attention.q_layernorm, "weight", None),
            k_norm=getattr(attention.k_layernorm, "weight", None),
            o=LinearWeight.plain(attention.linear_proj.weight),
            o_bias=_bias(attention.linear_proj),
            post_norm=_norm_weights(layer.pre_mlp_layernorm, mlp.linear_fc1),
            gate_up=LinearWeight.plain(mlp.linear_fc1.weight),
            gate_up_bias=_bias(mlp.linear_fc1),
            down=LinearWeight.plain(mlp.linear_fc2.weight),
            down_bias=_bias(mlp.linear_fc2),
        )

    @property
    def embedding(self) -> Tensor:
        return self._gpt.embedding.word_embeddings.weight

    @property
    def norm(self) -> NormWeights:
        return NormWeights(getattr(self._gpt.decoder.final_layernorm, "weight", None))

    @property
    def head(self) -> LinearWeight:
        weight = self.embedding if self._gpt.share_embeddings_and_output_weights else self._gpt.output_layer.weight
        # With several ranks, padding columns are cut when the logits are gathered.
        return LinearWeight.plain(weight if self.group is not None else weight[: self.config.vocab_size])


def _norm_weights(norm: nn.Module, following: nn.Module) -> NormWeights:
    """Return a norm's parameters, from a separate module (local spec) or the next linear layer (Transformer Engine)."""
    own = getattr(norm, "weight", None)
    return NormWeights(getattr(following, "layer_norm_weight", None) if own is None else own)


def _bias(linear: nn.Module) -> Tensor | None:
    """Return a linear layer's bias or None. Transformer Engine uses an empty tensor for no bias."""
    bias = getattr(linear, "bias", None)
    return None if bias is None or bias.numel() == 0 else bias

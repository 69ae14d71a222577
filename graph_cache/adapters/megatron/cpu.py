"""CPU support for GPTModel: a core attention in plain torch, and rotary frequencies that stay on the CPU.

With both, construction under `use_cpu_initialization=True` and a training forward and backward work on a CPU.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from graph_cache.errors import GraphConfigError


class SdpaCoreAttention(nn.Module):
    """Causal scaled-dot-product attention for the `core_attention` of a layer spec.

    query [s, b, heads, d], key and value [s, b, kv_heads, d] -> [s, b, heads * d]. Raises GraphConfigError for an
    explicit mask, a bias or packed sequences.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ):
        super().__init__()
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        for name, argument in (
            ("attention_mask", attention_mask),
            ("attention_bias", attention_bias),
            ("packed_seq_params", packed_seq_params),
        ):
            if argument is not None:
                raise GraphConfigError(
                    f"{name} was given, but SdpaCoreAttention supports only causal attention: pass None, or build "
                    "the model with another core_attention"
                )
        length, batch, heads, size = query.shape
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=True,
        )
        return out.permute(2, 0, 1, 3).reshape(length, batch, heads * size)


def layer_spec(**options: Any) -> ModuleSpec:
    """Return Megatron's local layer spec with SdpaCoreAttention. `options`: as in `get_gpt_layer_local_spec`."""
    spec = get_gpt_layer_local_spec(**options)
    spec.submodules.self_attention.submodules.core_attention = SdpaCoreAttention
    return spec


class _RotaryInPlace(RotaryEmbedding):
    """Rotary embedding that keeps frequencies on their device; Megatron's moves them to the GPU."""

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        freqs = self.get_freqs_non_repeated(max_seq_len, offset)
        if self.rotary_interleaved:
            emb = torch.stack((freqs, freqs), dim=-1).flatten(-2)
        else:
            emb = torch.cat((freqs, freqs), dim=-1)
        return emb[:, None, None, :]


def keep_rotary_in_place(model: nn.Module) -> None:
    """Keep a model's rotary frequencies on the CPU. Does nothing for a model without rotary embedding."""
    rotary: Any = getattr(model, "rotary_pos_emb", None)
    if type(rotary) is RotaryEmbedding:
        model.rotary_pos_emb = copy.copy(rotary)
        model.rotary_pos_emb.__class__ = _RotaryInPlace

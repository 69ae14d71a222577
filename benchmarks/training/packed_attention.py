"""Attention over packed sequences in plain PyTorch, for Megatron-Core benchmarks without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn


class PackedSdpa(nn.Module):
    """`core_attention` of a layer spec: attention within each packed sequence, [tokens, heads, d]. No host reads.

    Causal, unless the layer's mask type is `no_mask`.
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, *args: Any, **options: Any):
        super().__init__()
        self.layer_number = layer_number
        self.is_causal = attn_mask_type != AttnMaskType.no_mask

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
        if packed_seq_params is None:
            q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, enable_gqa=True)
            return out.permute(2, 0, 1, 3).flatten(2)
        at = torch.arange(len(query), dtype=torch.int32, device=query.device)
        sequence = torch.searchsorted(packed_seq_params.cu_seqlens_q, at, right=True)
        seen = sequence[:, None] == sequence
        if self.is_causal:
            seen = seen & (at[:, None] >= at)
        q, k, v = (one.transpose(0, 1)[None] for one in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

"""Attention over packed images for transformers' vision towers, without host reads: an attention implementation.

transformers' own implementations split the batch by `lengths.tolist()` in every layer, which a capture refuses. Those
with "flash" in their name get cu_seqlens instead, and so does this one. On a GPU in 16 bits it calls PyTorch's varlen
attention; otherwise it masks attention between images, with positions computed from cu_seqlens on the device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from engine.errors import ConfigError

NAME = "encore_flash_varlen"  # transformers passes cu_seqlens to implementations with "flash" in their name
HALF = (torch.float16, torch.bfloat16)


def register() -> str:
    """Register the implementation with transformers, and return its name for `config._attn_implementation`."""
    AttentionInterface.register(NAME, varlen_attention)
    return NAME


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention within each image and None for the weights.

    query, key, value [1, heads, patches, d]; cu_seqlens [images + 1] int32, the last entry the number of patches ->
    [1, patches, heads, d]. Raises ConfigError for a mask, dropout, or a call without cu_seqlens.
    """
    if attention_mask is not None or dropout or cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise ConfigError(
            f"attn_implementation={NAME!r} computes attention of packed images, with cu_seqlens and without a mask or "
            f"dropout; {type(module).__name__} called it otherwise: use it for the vision tower only"
        )
    if query.is_cuda and query.dtype in HALF:
        q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
        lengths = (max_length_q or query.shape[2], max_length_k or key.shape[2])
        packed: Any = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_k, *lengths, scale=scaling)
        return packed[None], None
    at_q = torch.searchsorted(cu_seq_lens_q, _positions(query, cu_seq_lens_q), right=True)
    at_k = torch.searchsorted(cu_seq_lens_k, _positions(key, cu_seq_lens_k), right=True)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=at_q[:, None] == at_k[None], scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


def _positions(states: Tensor, like: Tensor) -> Tensor:
    return torch.arange(states.shape[2], dtype=like.dtype, device=states.device)

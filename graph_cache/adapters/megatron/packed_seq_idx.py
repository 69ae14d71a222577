"""Sequence indices of packed batches for Mamba mixers: computed once before the layers, and shared by all of them.

Megatron-Core 0.16 computes them in every mixer by `repeat_interleave`, whose size the host reads; 0.19 does so in the
constructor of PackedSeqParams, if it is given `total_tokens`. Here they come from cu_seqlens without a host read.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

_METHOD = "_create_packed_seq_idx"  # of Megatron-Core 0.16's MambaMixer
_FIELD = "seq_idx"


def computes_indices(model: nn.Module) -> bool:
    """Whether the model has mixers that compute sequence indices themselves, and not from `PackedSeqParams.seq_idx`."""
    return any(hasattr(type(module), _METHOD) for module in model.modules())


def sequence_indices(packed: PackedSeqParams, tokens: int) -> Tensor:
    """Return the document of each token, int32 [1, tokens]. Tokens beyond the last document have the next index."""
    cu_seqlens = packed.cu_seqlens_q_padded if packed.cu_seqlens_q_padded is not None else packed.cu_seqlens_q
    positions = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return (torch.searchsorted(cu_seqlens, positions, right=True, out_int32=True) - 1).unsqueeze(0)


def with_sequence_indices(packed: PackedSeqParams, tokens: int) -> PackedSeqParams:
    """Return a copy with the indices of these cu_seqlens, which all layers of the batch share."""
    if packed.cu_seqlens_q is None:
        return packed
    result = copy.copy(packed)  # the constructor of 0.19 would compute them by repeat_interleave
    setattr(result, _FIELD, sequence_indices(packed, tokens))
    return result


class PrecomputedIndices:
    """Make the mixers of a model take the indices of their PackedSeqParams, between `install` and `remove`."""

    def __init__(self, model: nn.Module):
        self._mixers = [one for one in model.modules() if hasattr(type(one), _METHOD)]

    def install(self) -> None:
        """Replace the mixers' own computation."""
        for mixer in self._mixers:
            setattr(mixer, _METHOD, _given_indices)

    def remove(self) -> None:
        """Restore it."""
        for mixer in self._mixers:
            vars(mixer).pop(_METHOD, None)


def _given_indices(packed_seq_params: PackedSeqParams, total_tokens: int) -> Any:
    given = getattr(packed_seq_params, _FIELD, None)
    return sequence_indices(packed_seq_params, total_tokens) if given is None else given

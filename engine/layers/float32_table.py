"""The vocabulary's tables of a 16-bit model in float32 storage, with 16-bit values.

A CPU has no 16-bit GEMM with a float32 result, and converting the head's weight at each step takes as long as its GEMM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.parallel import VocabParallelEmbedding, VocabParallelHead
from engine.layers.weight_slot import Slot, WeightSlot

CPU = torch.device("cpu")


class Float32Slot(WeightSlot):
    """A checkpoint tensor of `dtype` in float32 storage: `write` rounds to `dtype`, `read` returns a copy in it."""

    def __init__(self, storage: Tensor, dtype: torch.dtype):
        super().__init__(storage)
        self._dtype = dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values, to which `write` rounds."""
        return self._dtype

    def write(self, tensor: Tensor) -> None:
        """Copy `tensor` (same shape, any floating dtype, any device) into the storage; its address doesn't change."""
        super().write(tensor.to(self._dtype))

    def read(self) -> Tensor:
        return self.target.to(self._dtype)


class Float32Embedding(VocabParallelEmbedding):
    """Embedding table [vocab, hidden] in float32; maps token ids [T] int64 to rows [T, hidden] of `dtype`."""

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype):
        super().__init__(vocab, hidden, dtype=torch.float32, device=CPU)
        self.dtype = dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight).to(self.dtype)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the table's Hugging Face name to its slot."""
        return {f"{prefix}.weight": Float32Slot(self.weight, self.dtype)}


class Float32Head(VocabParallelHead):
    """LM head of a model of `dtype` with float32 storage: hidden [N, h] of `dtype` -> float32 logits [N, vocab].

    `tied`: the weight of a Float32Embedding, which the head then uses.
    """

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype, tied: nn.Parameter | None = None):
        super().__init__(vocab, hidden, dtype=torch.float32, device=CPU, tied=tied)
        self.dtype = dtype

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the weight's Hugging Face name to its slot."""
        return {f"{prefix}.lm_head.weight": Float32Slot(self.weight, self.dtype)}

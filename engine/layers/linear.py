"""Linear and embedding layers. A linear layer can fuse several checkpoint tensors into one GEMM."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels.linear_weight import LinearWeight
from engine.layers.weight_slot import Slot, WeightSlot


class Linear(nn.Module):
    """Linear layer y = x Wᵀ + b with W [sum of rows, inputs]; `parts` maps checkpoint names to row counts, in order.

    `Linear({"q_proj": 576, "k_proj": 192, "v_proj": 192}, 576, ...)` fuses three GEMMs; an unfused layer has one part.
    """

    def __init__(self, parts: dict[str, int], inputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.parts = dict(parts)
        self.inputs, self.outputs = inputs, sum(parts.values())
        self.weight = nn.Parameter(torch.empty(self.outputs, inputs, dtype=dtype, device=device), requires_grad=False)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(self.outputs, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    @property
    def linear_weight(self) -> LinearWeight:
        """The weight as kernels read it."""
        return LinearWeight.plain(self.weight)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map Hugging Face names (`prefix.q_proj.weight`, `….bias`) to row ranges of the fused storage."""
        return {**self._row_slots(prefix)}

    def _row_slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        start = 0
        for name, rows in self.parts.items():
            slots[f"{prefix}.{name}.weight"] = WeightSlot(self.weight, start, rows)
            if self.bias is not None:
                slots[f"{prefix}.{name}.bias"] = WeightSlot(self.bias, start, rows)
            start += rows
        return slots

    def extra_repr(self) -> str:
        return f"{self.inputs} -> {'+'.join(f'{name}:{rows}' for name, rows in self.parts.items())}"


class Embedding(nn.Module):
    """Embedding table [vocab, hidden]; maps token ids [T] int64 to rows [T, hidden]."""

    def __init__(self, vocab: int, hidden: int, *, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden, dtype=dtype, device=device), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the table's Hugging Face name to its slot."""
        return {f"{prefix}.weight": WeightSlot(self.weight)}

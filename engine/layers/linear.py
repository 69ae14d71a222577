"""Linear and embedding layers. A linear layer can fuse several checkpoint tensors into one GEMM."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels.linear_weight import LinearWeight
from engine.layers.weight_method import PLAIN, Stored, WeightMethod
from engine.layers.weight_slot import Slot, WeightSlot


class Linear(nn.Module):
    """Linear layer y = x Wᵀ + b with W [sum of rows, inputs]; `parts` maps checkpoint names to row counts, in order.

    `Linear({"q_proj": 576, "k_proj": 192, "v_proj": 192}, 576, ...)` fuses three GEMMs; an unfused layer has one part.
    `joined` is the name of a checkpoint tensor that has the rows of all parts. `method` stores W and computes with it.
    """

    weight: Any  # the parameter of a plain weight; see `method`

    def __init__(
        self,
        parts: dict[str, int],
        inputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        method: WeightMethod = PLAIN,
        joined: str | None = None,
    ):
        super().__init__()
        self.parts, self.method, self.joined = dict(parts), method, joined
        self.inputs, self.outputs = inputs, sum(parts.values())
        method.create(self, (self.outputs, inputs), dtype, device)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(self.outputs, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self, x, self.bias)

    @property
    def linear_weight(self) -> LinearWeight:
        """The weight as kernels read it."""
        return self.method.linear_weight(self)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map Hugging Face names (`prefix.q_proj.weight`, `….bias`) to row ranges of the fused storage."""
        return {name: stored.slot for name, stored in self.stored(prefix).items()}

    def stored(self, prefix: str) -> dict[str, Stored]:
        """Map Hugging Face names to row ranges of the fused storage, with the dimensions that ranks may split."""
        found: dict[str, Stored] = {}
        start = 0
        for name, rows in (self.parts if self.joined is None else {self.joined: self.outputs}).items():
            found |= {f"{prefix}.{name}.{suffix}": one for suffix, one in self.stored_rows(start, rows).items()}
            start += rows
        return found

    def stored_rows(self, start: int, rows: int) -> dict[str, Stored]:
        """Map the last parts of checkpoint names to the storage of some rows of W, and of the bias."""
        found = dict(self.method.slots(self, start, rows))
        if self.bias is not None:
            found["bias"] = Stored(WeightSlot(self.bias, start, rows), 0, None)
        return found

    def extra_repr(self) -> str:
        shape = f"{self.inputs} -> {'+'.join(f'{name}:{rows}' for name, rows in self.parts.items())}"
        return shape if self.method is PLAIN else f"{shape}, {self.linear_weight.format}"


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

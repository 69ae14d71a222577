"""Mixture of experts: a router and gated MLPs, of which each token uses its top k.

Every tensor has a shape that depends only on the number of tokens, and the rows per expert stay on the device, so the
layer can be captured. Nothing accumulates with atomics: a row is the sum of its experts' outputs in routing order.

Shapes: T tokens, h hidden size, E experts, k experts per token, I an expert's intermediate size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels.linear_weight import LinearWeight
from engine.layers.weight_method import PLAIN, WeightMethod
from engine.layers.weight_slot import Slot, WeightSlot

NO_EXPERT = -1
"""The expert of padding rows: no expert computes them."""

EXPERT_ALIGNMENT = 8
"""h and I must be multiples of this: torch's grouped GEMM needs rows of whole 16-byte units."""


class Router(nn.Module):
    """Choose k experts per token by the softmax of x Wᵀ, W [E, h].

    `normalize`: scale each token's k weights to a sum of 1.
    """

    def __init__(
        self, experts: int, top_k: int, hidden: int, *, normalize: bool, dtype: torch.dtype, device: torch.device
    ):
        super().__init__()
        self.top_k, self.normalize = top_k, normalize
        self.weight = nn.Parameter(torch.empty(experts, hidden, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights, float32 [T, k], and the experts, int64 [T, k], of x [T, h], the largest weight first."""
        probabilities = F.softmax(F.linear(x, self.weight), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Map the weight's Hugging Face name to its slot."""
        return {f"{prefix}.weight": WeightSlot(self.weight)}


class ExpertWeights(nn.Module):
    """One matrix W [outputs, inputs] of each of E experts, stacked; `method` stores them."""

    weight: Any  # the parameter of a plain weight; see `method`

    def __init__(
        self,
        experts: int,
        outputs: int,
        inputs: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        method: WeightMethod = PLAIN,
    ):
        super().__init__()
        self.shape, self.method = (experts, outputs, inputs), method
        method.create(self, self.shape, dtype, device)

    @property
    def linear_weight(self) -> LinearWeight:
        """The weights [E, outputs, inputs] as kernels read them."""
        return self.method.linear_weight(self)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [E, outputs, inputs] in `dtype`; those of a quantised format are dequantised anew."""
        return self.method.dense(self, dtype)

    def slots(self, prefix: str, expert: int, start: int, rows: int) -> dict[str, Slot]:
        """Map the names of some rows of an expert's matrix to their storage."""
        return {
            f"{prefix}.{name}": stored.slot for name, stored in self.method.slots(self, start, rows, expert).items()
        }


class Experts(nn.Module):
    """The MLPs down(silu(gate(x)) * up(x)) of all experts, stacked: gate_up [E, 2I, h], gate first, and down [E, h, I].

    h and I must be multiples of EXPERT_ALIGNMENT.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        width: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        method: WeightMethod = PLAIN,
    ):
        super().__init__()
        if hidden % EXPERT_ALIGNMENT or width % EXPERT_ALIGNMENT:
            raise ValueError(f"hidden={hidden} and width={width} must be multiples of {EXPERT_ALIGNMENT}")
        self.count, self.hidden, self.width = experts, hidden, width
        self.gate_up = ExpertWeights(experts, 2 * width, hidden, dtype=dtype, device=device, method=method)
        self.down = ExpertWeights(experts, hidden, width, dtype=dtype, device=device, method=method)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Return each row's sum of its experts' outputs times their weights: x [T, h] -> [T, h].

        weights float32 [T, k], experts int64 [T, k]. A row whose experts are all NO_EXPERT gets 0.
        """
        gate_up, down = self.gate_up.dense(x.dtype), self.down.dense(x.dtype)
        if x.is_cuda:
            from engine.kernels.moe import run_experts  # triton is installed only with CUDA

            return run_experts(x, weights, experts, gate_up, down)
        return run_experts_grouped(x, weights, experts, gate_up, down)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the Hugging Face names of each expert's three matrices to their parts of the stacked storage."""
        slots: dict[str, Slot] = {}
        for index in range(self.count):
            slots |= self.gate_up.slots(f"{prefix}.{index}.gate_proj", index, 0, self.width)
            slots |= self.gate_up.slots(f"{prefix}.{index}.up_proj", index, self.width, self.width)
            slots |= self.down.slots(f"{prefix}.{index}.down_proj", index, 0, self.hidden)
        return slots

    def extra_repr(self) -> str:
        return f"{self.count} x ({self.hidden} -> {self.width} -> {self.hidden})"


class MoE(nn.Module):
    """Router and experts: normed hidden [T, h] -> [T, h]; rows that are not `valid` get 0 and cost no expert."""

    def __init__(
        self,
        experts: int,
        top_k: int,
        hidden: int,
        width: int,
        *,
        normalize: bool,
        dtype: torch.dtype,
        device: torch.device,
        method: WeightMethod = PLAIN,
    ):
        super().__init__()
        self.router = Router(experts, top_k, hidden, normalize=normalize, dtype=dtype, device=device)
        self.experts = Experts(experts, hidden, width, dtype=dtype, device=device, method=method)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """`valid` bool [T]: False for padding rows; None: there are none."""
        weights, experts = self.router(x)
        if valid is not None:
            # not torch.where, which copies the constant from the host: a capture on CUDA would be refused
            experts = experts.masked_fill(valid.logical_not().unsqueeze(1), NO_EXPERT)
        return self.experts(x, weights, experts)

    def slots(self, prefix: str) -> dict[str, Slot]:
        return {**self.router.slots(f"{prefix}.gate"), **self.experts.slots(f"{prefix}.experts")}


def run_experts_grouped(x: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute `Experts.forward` with torch's grouped GEMM: the CPU's formulation, and the reference of the kernels.

    The rows are sorted by expert, and each expert multiplies its own range of them. Measured on a CPU, it is as fast as
    gathering each row's matrices with one row, and 3 to 70 times as fast with 16 rows or more; a loop over all experts
    computes E / k times as much.
    """
    tokens, top_k = experts.shape
    # NO_EXPERT becomes E, so that its rows come last, after every expert's range
    keys, order = experts.remainder(len(down) + 1).flatten().sort(stable=True)
    ends = torch.searchsorted(keys, torch.arange(len(down), device=x.device), right=True, out_int32=True)
    rows = x.index_select(0, order // top_k)
    gate, up = F.grouped_mm(rows, gate_up.mT, offs=ends).chunk(2, dim=-1)
    product = F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
    outputs = torch.empty_like(product).index_copy_(0, order, product).view(tokens, top_k, -1)
    total = (outputs * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
    # rows that no expert computes are undefined until here
    return total.masked_fill_(experts[:, :1] < 0, 0)

"""Mixture of experts: a router and gated MLPs, of which each token uses its top k, and perhaps a shared MLP.

Every tensor has a shape that depends only on the number of tokens, and the rows per expert stay on the device, so the
layer can be captured. Nothing accumulates with atomics: a row is the sum of its experts' outputs in routing order.

Shapes: T tokens, h hidden size, E experts, k experts per token, I an expert's intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.kernels.launch import fits
from engine.kernels.linear_weight import LinearWeight
from engine.layers.activation import SWIGLU, GatedActivation
from engine.layers.expert_names import ExpertNames, StackedSlot
from engine.layers.linear import Linear
from engine.layers.parallel import split_slot
from engine.layers.weight_method import PLAIN, Stored, WeightMethod
from engine.layers.weight_slot import Slot, WeightSlot

NO_EXPERT = -1
"""The expert of padding rows: no expert computes them."""

EXPERT_ALIGNMENT = 8
"""h and I must be multiples of this: torch's grouped GEMM needs rows of whole 16-byte units."""


class Router(nn.Module):
    """Choose k experts per token by the softmax of x Wᵀ + b, W [E, h].

    `normalize`: scale each token's k weights to a sum of 1, as the softmax over the logits of the chosen experts does.
    `bias`: whether there is a b.
    """

    def __init__(
        self,
        experts: int,
        top_k: int,
        hidden: int,
        *,
        normalize: bool,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
    ):
        super().__init__()
        self.top_k, self.normalize = top_k, normalize
        self.weight = nn.Parameter(torch.empty(experts, hidden, dtype=dtype, device=device), requires_grad=False)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(experts, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights, float32 [T, k], and the experts, int64 [T, k], of x [T, h], the largest weight first."""
        probabilities = F.softmax(F.linear(x, self.weight, self.bias), dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the Hugging Face names of the weight and the bias to their slots."""
        slots: dict[str, Slot] = {f"{prefix}.weight": WeightSlot(self.weight)}
        if self.bias is not None:
            slots[f"{prefix}.bias"] = WeightSlot(self.bias)
        return slots


@dataclass(frozen=True, kw_only=True)
class SigmoidRouting:
    """How a SigmoidRouter chooses and weighs.

    - groups, groups_used: the experts are in `groups` equal groups, of which a token uses `groups_used`.
    - scale: the factor of the weights.
    """

    groups: int = 1
    groups_used: int = 1
    scale: float = 1.0


class SigmoidRouter(nn.Module):
    """Choose k experts per token by sigmoid(x Wᵀ) + bias, W [E, h], and weigh them by the sigmoids (DeepSeek-V3).

    Computes in float32. With groups, only experts of the groups with the largest sums of their two best are chosen.
    `normalize`: scale each token's k weights to a sum of 1, before `routing.scale`.
    """

    def __init__(
        self,
        experts: int,
        top_k: int,
        hidden: int,
        routing: SigmoidRouting,
        *,
        normalize: bool,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.top_k, self.routing, self.normalize = top_k, routing, normalize
        self.weight = nn.Parameter(torch.empty(experts, hidden, dtype=dtype, device=device), requires_grad=False)
        bias = torch.empty(experts, dtype=torch.float32, device=device)  # of the choice alone: 16 bits would change it
        self.choice_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights, float32 [T, k], and the experts, int64 [T, k], of x [T, h]."""
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        choice, groups = scores + self.choice_bias, self.routing.groups
        if groups > 1:
            grouped = choice.unflatten(-1, (groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(self.routing.groups_used, dim=-1).indices
            unused = torch.ones_like(choice[:, :groups], dtype=torch.bool).scatter_(1, best, False)
            choice = grouped.masked_fill(unused.unsqueeze(-1), float("-inf")).flatten(1)
        experts = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.routing.scale, experts

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the Hugging Face names of the weight and the bias to their slots."""
        return {
            f"{prefix}.weight": WeightSlot(self.weight),
            f"{prefix}.e_score_correction_bias": WeightSlot(self.choice_bias),
        }


class ExpertWeights(nn.Module):
    """One matrix W [outputs, inputs] of each of E experts, stacked, and one bias [outputs] of each if `bias`.

    `method` stores W.
    """

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
        bias: bool = False,
    ):
        super().__init__()
        self.shape, self.method = (experts, outputs, inputs), method
        method.create(self, self.shape, dtype, device)
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.empty(experts, outputs, dtype=dtype, device=device), requires_grad=False)

    @property
    def linear_weight(self) -> LinearWeight:
        """The weights [E, outputs, inputs] as kernels read them."""
        return self.method.linear_weight(self)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [E, outputs, inputs] in `dtype`; quantised weights are dequantised at each call."""
        return self.method.dense(self, dtype)

    def operand(self, x: Tensor) -> Tensor | LinearWeight:
        """Return the weights for a product with x: as stored if the GPU's kernels read them, else in x's dtype."""
        if self.method is not PLAIN and x.is_cuda and fits(x.device):
            from engine.kernels.moe import reads  # triton is installed only with CUDA

            if reads(self.linear_weight, x.dtype):
                return self.linear_weight
        return self.dense(x.dtype)

    def stored(self, expert: int, start: int, rows: int) -> dict[str, Stored]:
        """Map the last part of checkpoint names to the storage of some rows of an expert's matrix and bias."""
        found = self.method.slots(self, start, rows, expert)
        if self.bias is not None:
            found["bias"] = Stored(WeightSlot(self.bias[expert], start, rows), 0, None)
        return found


class Experts(nn.Module):
    """The gated MLPs of all experts, stacked: gate_up [E, 2I, h], gate first, and down [E, h, I].

    An expert computes down(activation(gate(x), up(x))), with biases if `bias`. `width` is I of one rank; h and I must
    be multiples of EXPERT_ALIGNMENT.
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
        bias: bool = False,
        activation: GatedActivation = SWIGLU,
        parallel: TensorParallel = SINGLE_RANK,
    ):
        super().__init__()
        if hidden % EXPERT_ALIGNMENT or width % EXPERT_ALIGNMENT:
            raise ValueError(f"hidden={hidden} and width={width} must be multiples of {EXPERT_ALIGNMENT}")
        self.count, self.hidden, self.width = experts, hidden, width
        self.activation, self.parallel = activation, parallel
        self.gate_up = ExpertWeights(experts, 2 * width, hidden, dtype=dtype, device=device, method=method, bias=bias)
        self.down = ExpertWeights(experts, hidden, width, dtype=dtype, device=device, method=method, bias=bias)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Return each row's sum of its experts' outputs times their weights: x [T, h] -> [T, h].

        weights float32 [T, k], experts int64 [T, k]. A row whose experts are all NO_EXPERT gets 0. With several ranks,
        each computes its columns of every expert, and the outputs are summed over the ranks.
        """
        run: Callable[..., Tensor] = run_experts_grouped
        if x.is_cuda:
            from engine.kernels.moe import run_experts  # triton is installed only with CUDA

            run = run_experts
        out = run(
            x,
            weights,
            experts,
            self.gate_up.operand(x),
            self.down.operand(x),
            gate_up_bias=self.gate_up.bias,
            down_bias=self.down.bias if self.parallel.is_first else None,
            limit=self.activation.limit,
            alpha=self.activation.alpha,
        )
        return self.parallel.all_reduce(out)

    def slots(self, prefix: str, names: ExpertNames) -> dict[str, Slot]:
        """Map the checkpoint's names of all experts' tensors to their parts of the stacked storage.

        `prefix` is the layer's.
        """
        gates, ups, downs = (
            [self._split(weights.stored(expert, start, rows), by_output) for expert in range(self.count)]
            for weights, start, rows, by_output in (
                (self.gate_up, 0, self.width, True),
                (self.gate_up, self.width, self.width, True),
                (self.down, 0, self.hidden, False),
            )
        )
        slots: dict[str, Slot] = {}
        if names.stacked is None:
            for index in range(self.count):
                for part, found in ((names.gate, gates), (names.up, ups), (names.down, downs)):
                    for suffix, slot in found[index].items():
                        slots[f"{prefix}.{names.experts}.{index}.{part}.{suffix}"] = slot
            return slots
        for name, parts in zip(names.stacked, ((gates, ups), (downs,)), strict=True):
            for suffix in parts[0][0]:
                stack = [tuple(found[index][suffix] for found in parts) for index in range(self.count)]
                whole = f"{prefix}.{name}" if suffix == "weight" else f"{prefix}.{name}_{suffix}"
                slots[whole] = StackedSlot(stack, interleaved=names.interleaved)
        return slots

    def _split(self, found: dict[str, Stored], by_output: bool) -> dict[str, Slot]:
        """Return slots of whole tensors, of which the ranks split the outputs or the inputs."""
        return {
            suffix: split_slot(stored.slot, stored.output_dim if by_output else stored.input_dim, self.parallel)
            for suffix, stored in found.items()
        }

    def extra_repr(self) -> str:
        return f"{self.count} x ({self.hidden} -> {self.width} -> {self.hidden})"


class SharedExpert(nn.Module):
    """An MLP of all tokens, times sigmoid(gate(x)) if there is a gate: [T, h] -> [T, h]."""

    def __init__(self, mlp: nn.Module, gate: Linear | None):
        super().__init__()
        self.mlp: Any = mlp
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        out = self.mlp(x)
        return out if self.gate is None else torch.sigmoid(self.gate(x)) * out


class MoE(nn.Module):
    """Router, experts and perhaps a shared expert: normed hidden [T, h] -> [T, h].

    Rows that are not `valid` cost no expert, and get 0 but for the shared expert. `recorded` [rows, k] of an integer
    dtype, if set, gets the experts that the router chooses for each row.
    """

    def __init__(
        self,
        router: Router | SigmoidRouter,
        experts: Experts,
        shared: SharedExpert | None = None,
        names: ExpertNames = ExpertNames(),  # noqa: B008 (immutable)
    ):
        super().__init__()
        self.router, self.experts, self.shared, self.names = router, experts, shared, names
        self.recorded: Tensor | None = None

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """`valid` bool [T]: False for padding rows; None: there are none."""
        weights, experts = self.router(x)
        self.record(experts)
        if valid is not None:
            # not torch.where, which copies the constant from the host: a capture on CUDA would be refused
            experts = experts.masked_fill(valid.logical_not().unsqueeze(1), NO_EXPERT)
        out = self.experts(x, weights, experts)
        return out if self.shared is None else out + self.shared(x)

    def record(self, experts: Tensor) -> None:
        """Write the experts [T, k] of a step's rows to `recorded`, if it is set."""
        if self.recorded is not None:
            self.recorded[: len(experts)].copy_(experts)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the checkpoint's names to slots; `prefix` is the layer's."""
        names = self.names
        slots = {**self.router.slots(f"{prefix}.{names.router}"), **self.experts.slots(prefix, names)}
        if self.shared is not None:
            slots |= self.shared.mlp.slots(f"{prefix}.{names.shared}")
            if self.shared.gate is not None:
                parent, _, part = names.shared_gate.rpartition(".")
                assert list(self.shared.gate.parts) == [part]
                slots |= self.shared.gate.slots(f"{prefix}.{parent}")
        return slots


def run_experts_grouped(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    limit: float | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """Compute `Experts.forward` with torch's grouped GEMM: the CPU's formulation, and the reference of the kernels.

    Biases are [E, 2I] and [E, h]; `limit` and `alpha`: as in GatedActivation. The rows are sorted by expert, and
    each expert multiplies its own range of them. Measured on a CPU, it is as fast as gathering each row's matrices with
    one row, and 3 to 70 times as fast with 16 rows or more; a loop over all experts computes E / k times as much.
    """
    (tokens, top_k), count = experts.shape, len(down)
    # NO_EXPERT becomes E, so that its rows come last, after every expert's range
    keys, order = experts.remainder(count + 1).flatten().sort(stable=True)
    ends = torch.searchsorted(keys, torch.arange(count, device=x.device), right=True, out_int32=True)

    def grouped(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = F.grouped_mm(rows, weight.mT, offs=ends)
        return product if bias is None else product + bias.index_select(0, keys.clamp(max=count - 1))

    gate, up = grouped(x.index_select(0, order // top_k), gate_up, gate_up_bias).chunk(2, dim=-1)
    product = grouped(GatedActivation(limit=limit, alpha=alpha)(gate, up), down, down_bias)
    outputs = torch.empty_like(product).index_copy_(0, order, product).view(tokens, top_k, -1)
    total = (outputs * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)
    # rows that no expert computes are undefined until here
    return total.masked_fill_(experts[:, :1] < 0, 0)

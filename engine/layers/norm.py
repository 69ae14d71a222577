"""RMSNorm and LayerNorm over the last dimension, of hidden states and of attention heads.

torch has a fused RMSNorm only on CUDA. On a CPU `F.rms_norm` runs six to eight small ops; the implementations here need
three, or one in bfloat16 where the compiled kernels are loaded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.kernels.cpu_library import computes_bfloat16, rms_norm
from engine.layers.parallel import split_slot
from engine.layers.weight_slot import Slot, WeightSlot


class _Norm(nn.Module):
    """Compute x / sqrt(mean(x²) + eps) over the last dimension, of `size`, in float32; the result has x's dtype."""

    eps_tensor: Tensor
    signs: Tensor

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.size, self.eps = size, eps
        self.register_buffer("eps_tensor", torch.full((1,), eps, dtype=torch.float32, device=device), persistent=False)
        signs = torch.tensor([[1.0], [-1.0]], dtype=dtype, device=device)
        self.register_buffer("signs", signs, persistent=False)

    def normalise(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, (self.size,), None, self.eps)
        if x.dtype == torch.float32:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x * torch.addcmul(self.eps_tensor, length, length, value=1.0 / self.size).rsqrt()
        # The concatenation of x and -x has mean 0 and variance mean(x²), so its layer norm is the RMSNorm of x. It
        # accumulates in float32 and rounds once, which matches Hugging Face bit for bit; F.rms_norm does not.
        mirrored = (x.unsqueeze(-2) * self.signs).flatten(-2)
        return F.layer_norm(mirrored, (2 * self.size,), eps=self.eps)[..., : self.size]


class RMSNorm(_Norm):
    """RMSNorm: y = weight * x / sqrt(mean(x²) + eps) over the last dimension, for x of any leading shape.

    y is a new tensor of x's dtype. `weight_offset`: the factor is 1 + weight, in float32 until y is rounded (Gemma).
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device, *, weight_offset: bool = False):
        super().__init__(size, eps, dtype, device)
        self.weight_offset = weight_offset
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if computes_bfloat16(x):
            rows = x.reshape(-1, 1, self.size)
            return rms_norm(rows, self.weight, self.eps, offset=self.weight_offset).view(x.shape)
        if self.weight_offset:
            return (self.normalise(x.float()) * (1.0 + self.weight.float())).type_as(x)
        if x.is_cuda:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return self.normalise(x) * self.weight

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the weight's Hugging Face name to its slot."""
        return {f"{prefix}.weight": WeightSlot(self.weight)}

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


class LayerNorm(nn.Module):
    """LayerNorm: y = weight * (x - mean) / sqrt(variance + eps) + bias over the last dimension, for any leading shape.

    y is a new tensor of x's dtype, computed in float32. `weight`, `bias`: whether the norm has them. `weight_offset`:
    the factor is 1 + weight (Nemotron).
    """

    def __init__(
        self,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        weight: bool = True,
        bias: bool = False,
        weight_offset: bool = False,
    ):
        super().__init__()
        self.size, self.eps, self.weight_offset = size, eps, weight_offset

        def parameter(present: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False) if present else None

        self.weight, self.bias = parameter(weight), parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 1.0 if self.weight_offset and self.weight is not None else self.weight
        return F.layer_norm(x, (self.size,), weight, self.bias, self.eps)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the parameters' Hugging Face names to their slots."""
        return {f"{prefix}.{name}": WeightSlot(parameter) for name, parameter in self.named_parameters()}

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


class HeadNorm(_Norm):
    """RMSNorm of each head of q and k together, [T, H + KV, D]: q's weight for the first H heads, k's for the others.

    q and k share one normalisation and one multiplication. The two weights [D] are expanded per head at each call, so
    that in-place weight updates take effect immediately. `weight_offset` as in RMSNorm.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        *,
        weight_offset: bool = False,
    ):
        super().__init__(size, eps, dtype, device)
        self.heads, self.kv_heads, self.weight_offset = heads, kv_heads, weight_offset
        self.q_weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.k_weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, qk: Tensor) -> Tensor:
        weight = torch.cat((self.q_weight.expand(self.heads, -1), self.k_weight.expand(self.kv_heads, -1)))
        if computes_bfloat16(qk):
            return rms_norm(qk, weight, self.eps, offset=self.weight_offset)
        if self.weight_offset:
            return (self.normalise(qk.float()) * (1.0 + weight.float())).type_as(qk)
        return self.normalise(qk) * weight

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the two weights' Hugging Face names to their slots."""
        return {
            f"{prefix}.q_norm.weight": WeightSlot(self.q_weight),
            f"{prefix}.k_norm.weight": WeightSlot(self.k_weight),
        }


class _SplitHeadNorm(nn.Module):
    """A norm of q and k, [T, H + KV, D], whose weights have a row per head, of which a rank holds its heads' rows.

    `shape` is the shape of a tensor of `heads` rows in the checkpoint.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        size: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel = SINGLE_RANK,
    ):
        super().__init__()
        self.heads, self.kv_heads, self.size, self.eps, self.parallel = heads, kv_heads, size, eps, parallel

        def weight(rows: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, size, dtype=dtype, device=device), requires_grad=False)

        self.q_weight, self.k_weight = weight(heads), weight(kv_heads)

    def in_checkpoint(self, weight: Tensor) -> Tensor:
        """Return a view of a weight [heads, D] in the shape of the checkpoint, its first dimension split by heads."""
        return weight

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the two weights' Hugging Face names to this rank's rows."""
        pairs = (("q_norm", self.q_weight), ("k_norm", self.k_weight))
        return {
            f"{prefix}.{name}.weight": split_slot(WeightSlot(self.in_checkpoint(weight.data)), 0, self.parallel)
            for name, weight in pairs
        }


class PerHeadLayerNorm(_SplitHeadNorm):
    """LayerNorm of each head of q and k, [T, H + KV, D], with a weight [D] per head. Computes in float32."""

    def forward(self, qk: Tensor) -> Tensor:
        weight = torch.cat((self.q_weight, self.k_weight)).float()
        return (F.layer_norm(qk.float(), (self.size,), eps=self.eps) * weight).type_as(qk)


class AllHeadsNorm(_SplitHeadNorm):
    """RMSNorm of all heads of q as one vector, and of all heads of k as another: [T, H + KV, D] -> same shape.

    Computes in float32. With tensor parallelism, the ranks add up their sums of squares.
    """

    def in_checkpoint(self, weight: Tensor) -> Tensor:
        return weight.flatten()

    def forward(self, qk: Tensor) -> Tensor:
        x, counts = qk.float(), (self.heads, self.kv_heads)
        squares = torch.stack([part.square().sum(dim=(1, 2)) for part in x.split(counts, dim=1)], dim=1)
        means = [
            part / (count * self.size * self.parallel.size)
            for part, count in zip(self.parallel.all_reduce(squares).split(1, dim=1), counts, strict=True)
        ]
        scale = torch.cat([(mean + self.eps).rsqrt().expand(-1, n) for mean, n in zip(means, counts, strict=True)], 1)
        weight = torch.cat((self.q_weight, self.k_weight)).float()
        return (x * scale.unsqueeze(-1) * weight).type_as(qk)

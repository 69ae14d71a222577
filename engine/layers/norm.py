"""Root-mean-square normalisation over the last dimension, of hidden states and of attention heads.

Owns the weights and the choice of kernel. torch has a fused RMSNorm on CUDA only; on a CPU `F.rms_norm` runs as six to
eight small ops, so the two CPU forms here say the same with three.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.weight_slot import WeightSlot


class _Norm(nn.Module):
    """x / sqrt(mean(x²) + eps) over the last dimension, of `size`; in x's dtype, computed in float32."""

    eps_tensor: Tensor

    def __init__(self, size: int, eps: float, device: torch.device):
        super().__init__()
        self.size, self.eps = size, eps
        self.register_buffer("eps_tensor", torch.full((1,), eps, device=device), persistent=False)

    def normalise(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, (self.size,), None, self.eps)
        if x.dtype == torch.float32:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x * torch.addcmul(self.eps_tensor, length, length, value=1.0 / self.size).rsqrt()
        # The concatenation of x and -x has mean 0 and variance mean(x²), so the native layer norm of it is the RMSNorm
        # of x: accumulated in float32 and rounded once, which gives Hugging Face's bits where F.rms_norm does not.
        mirrored = F.layer_norm(torch.cat((x, -x), dim=-1), (2 * self.size,), eps=self.eps)
        return mirrored[..., : self.size]


class RMSNorm(_Norm):
    """y = weight * x / sqrt(mean(x²) + eps) over the last dimension; x of any leading shape, y new, in x's dtype."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device):
        super().__init__(size, eps, device)
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return self.normalise(x) * self.weight

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Hugging Face's name of the weight to where it is stored."""
        return {f"{prefix}.weight": WeightSlot(self.weight)}

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"


class HeadNorm(_Norm):
    """RMSNorm of each head of q and k together: [T, H + KV, D], the first H heads by q's weight, the others by k's.

    One normalisation and one product for both: the two weights [D] are laid out per head anew at each call, so that
    they stay the checkpoint's own tensors and an update in place is seen at once.
    """

    def __init__(self, heads: int, kv_heads: int, size: int, eps: float, dtype: torch.dtype, device: torch.device):
        super().__init__(size, eps, device)
        self.heads, self.kv_heads = heads, kv_heads
        self.q_weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)
        self.k_weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, qk: Tensor) -> Tensor:
        rows = (self.q_weight.expand(self.heads, -1), self.k_weight.expand(self.kv_heads, -1))
        return self.normalise(qk) * torch.cat(rows)

    def slots(self, prefix: str) -> dict[str, WeightSlot]:
        """Hugging Face's names of the two weights to where they are stored."""
        return {
            f"{prefix}.q_norm.weight": WeightSlot(self.q_weight),
            f"{prefix}.k_norm.weight": WeightSlot(self.k_weight),
        }

"""x Wᵀ of 16-bit x and W with a float32 result: the GEMM of the LM head.

Logits of 16 come in steps of 0.125 in bfloat16, so the two best tokens often tie, and which of them is chosen depends
on the batch. Float32 logits keep the difference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.cpu_library import dense_linear
from engine.layers.plain_linear import has_few_rows

BLOCK_BYTES = 8 << 20
"""Size of the float32 copy of a block of W on a CPU. It stays in the cache between the copy and its GEMM."""

ROW_MULTIPLE = 16


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ as float32 [N, n], accumulated in float32, for x [N, k] and W [n, k] of one dtype, or W in float32.

    On CUDA it is one GEMM, and on a CPU for few rows in bfloat16 where the compiled kernels are loaded. PyTorch has no
    16-bit GEMM with a float32 result on a CPU, so else blocks of a 16-bit W are converted one after the other, which
    takes about as long as the GEMM.
    """
    if has_few_rows(x, weight):
        return dense_linear(x, weight, None, torch.float32)
    if weight.dtype == torch.float32:
        return F.linear(x, weight) if x.dtype == torch.float32 else _linear_cpu(x.float(), weight)
    if weight.is_cuda:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    outputs, inputs = weight.shape
    rows = max(ROW_MULTIPLE, BLOCK_BYTES // (4 * inputs) // ROW_MULTIPLE * ROW_MULTIPLE)
    x = x.float()
    block, out = x.new_empty(min(rows, outputs), inputs), x.new_empty(len(x), outputs)
    for start in range(0, outputs, rows):
        part = block[: min(rows, outputs - start)]
        part.copy_(weight[start : start + rows])
        out[:, start : start + rows] = _linear_cpu(x, part)
    return out


def _linear_cpu(x: Tensor, weight: Tensor) -> Tensor:
    """Return x Wᵀ, by oneDNN if this torch has it: it is faster than F.linear, except for 2 and 3 rows."""
    if torch.backends.mkldnn.is_available() and len(x) not in (2, 3):
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return F.linear(x, weight)

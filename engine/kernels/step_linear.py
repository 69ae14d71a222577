"""Linear layers of a fused step: the kernels of each weight format, behind one interface.

To add a format, write its `linear` and `half_normed` and add it to the choice here. Imports triton: import this module
only on CUDA (or under TRITON_INTERPRET=1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from engine.kernels import quantized_gemm, small_batch_gemm
from engine.kernels.linear_weight import LinearWeight
from engine.kernels.small_batch_gemm import Scratch

FORMATS = (*small_batch_gemm.FORMATS, *quantized_gemm.FORMATS)
"""Weight formats that `linear` supports."""


def linear(x: Tensor, weight: LinearWeight, out: Tensor, scratch: Scratch, **options: Any) -> int:
    """Write y = rms_norm(x) Wᵀ + bias to `out`, with the kernels of the weight's format.

    Takes the options of small_batch_gemm.linear and returns what it returns; `best` needs a plain weight. Raises
    ModelError if the format is not one of FORMATS.
    """
    if weight.format not in quantized_gemm.FORMATS:
        return small_batch_gemm.linear(x, weight, out, scratch, **options)
    if options.pop("best", False):
        weight.require(small_batch_gemm.FORMATS, "the LM head")
    scale, softcap = options.pop("scale", 1.0), options.pop("softcap", None)
    quantized_gemm.linear(x, weight, out, scratch, **options)
    small_batch_gemm.finish_logits(out, scale, softcap)
    return 0


def half_normed(rows: int, weight: LinearWeight, dtype: torch.dtype) -> int:
    """Return the sums of squares per row that `linear` writes with `next_norm`; 0 if it does not start that norm."""
    if weight.format in quantized_gemm.FORMATS:
        return quantized_gemm.half_normed(rows, weight, dtype)
    outputs, inputs = weight.weight.shape
    return small_batch_gemm.half_normed(rows, outputs, inputs, dtype)

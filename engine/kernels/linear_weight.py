"""A linear layer's weight with the name of its storage format, on which kernels dispatch.

Layers create it, models pass it to kernels. This module does not import triton.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import ModelError

PLAIN_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Formats without scales: one number per weight, in this dtype."""


class LinearWeight(NamedTuple):
    """The weight W [outputs, inputs] of a linear layer, as stored.

    - `format`: one of PLAIN_FORMATS' values, "int4" on a CPU (engine/layers/int4.py), or the element of a quantised
      format (engine/layers/formats/elements.py).
    - `weight`: W itself in a plain format; the packed codes in a quantised one.
    - `scale`: scales in the layout of a quantised format; None in a plain one.
    """

    weight: Tensor
    format: str
    scale: Tensor | None = None

    @classmethod
    def plain(cls, weight: Tensor) -> LinearWeight:
        """Return `weight` [outputs, inputs] in the plain format of its dtype; other dtypes are named as in torch."""
        return cls(weight, PLAIN_FORMATS.get(weight.dtype) or str(weight.dtype).removeprefix("torch."))

    def require(self, supported: Collection[str], layer: str) -> None:
        """Raise ModelError if the format is not in `supported`. `layer` names the layer in the error."""
        if self.format not in supported:
            raise ModelError(
                f"{layer} stores its weight in format {self.format!r}; these kernels support {', '.join(supported)}: "
                "use another kernel setting or weight format"
            )

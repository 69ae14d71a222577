"""A linear layer's weight with the name of its storage format, on which kernels dispatch.

Layers create it, models pass it to kernels. This module does not import triton.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import ModelError

PLAIN_FORMATS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Formats without scales: one number per weight, in this dtype."""


CODES_PER_BYTE = {"fp8": 1, "int8": 1, "int4": 2, "mxfp4": 2}
"""Quantised formats (engine/layers/formats/elements.py), and the number of codes in a byte of their storage."""

PACKED_COLUMNS = 256
"""The columns of a block of 4-bit codes. Byte j of a block has column j in its low half and column 128 + j in its high
half. The last block of a row, if it has fewer columns, is halved in the same way. So a tile of bytes holds two tiles of
consecutive columns, and kernels need no exchange between threads."""


class LinearWeight(NamedTuple):
    """The weight W [outputs, inputs] of a linear layer, as stored.

    - `format`: one of PLAIN_FORMATS' values, one of CODES_PER_BYTE's names, "cpu_int4" or "cpu_int8"
      (engine/layers/int4.py and int8_table.py).
    - `weight`: W itself in a plain format; the packed codes in a quantised one.
    - `scale`: scales in the layout of a quantised format; None in a plain one. For CODES_PER_BYTE's formats, W is
      (code - zero) * scale, with scales [outputs / r, inputs / c], each for r rows and c columns.
    - `zero`: zeros in the shape of the scales; None: all are 0.
    - `group_of`, `part_of_row`: where columns name their groups of scales (`act_order`), the group of each column,
      int32 [parts, inputs], and the part of each row, int64 [outputs]; None: groups are in order.
    - `quantizes_activations`: whether kernels may quantise activations to fp8, as the checkpoint's own definition does.
    """

    weight: Tensor
    format: str
    scale: Tensor | None = None
    zero: Tensor | None = None
    group_of: Tensor | None = None
    part_of_row: Tensor | None = None
    quantizes_activations: bool = False

    @classmethod
    def plain(cls, weight: Tensor) -> LinearWeight:
        """Return `weight` [outputs, inputs] in the plain format of its dtype; other dtypes are named as in torch."""
        return cls(weight, PLAIN_FORMATS.get(weight.dtype) or str(weight.dtype).removeprefix("torch."))

    def named_tensors(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of all that is stored: `name` is the weight's, and the others' are `name`.scale etc."""
        yield name, self.weight
        for field in ("scale", "zero", "group_of", "part_of_row"):
            if (tensor := getattr(self, field)) is not None:
                yield f"{name}.{field}", tensor

    def require(self, supported: Collection[str], layer: str) -> None:
        """Raise ModelError if the format is not in `supported`. `layer` names the layer in the error."""
        if self.format not in supported:
            raise ModelError(
                f"{layer} stores its weight in format {self.format!r}; these kernels support {', '.join(supported)}: "
                "use another kernel setting or weight format"
            )

"""Linear layers with 8-bit weights in groups of 32 or 16 inputs, for CPUs: see int8_table.py.

Activations are bfloat16. The compiled kernels of kernels/cpu_library.py compute them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.kernels.cpu_library import cpu_kernels_loaded, int8_linear
from engine.kernels.linear_weight import LinearWeight
from engine.layers.int4 import DENSE_ABOVE
from engine.layers.int8_table import GROUP, Int8Slot, Int8Table, dequantize_int8
from engine.layers.weight_method import Stored, WeightMethod


def fits_int8(inputs: int) -> bool:
    """Return whether this machine's kernels multiply a weight of `inputs` inputs in 8 bits."""
    return inputs % GROUP == 0 and cpu_kernels_loaded()


class Int8Weight(WeightMethod):
    """8-bit W [outputs, inputs] on a CPU: the `table` of a bfloat16 layer.

    `group`: how many inputs share a scale, 32 or 16. With `keep_dense`, a bfloat16 copy of W, the parameter `weight`,
    computes calls with more than DENSE_ABOVE rows, as in Int4Weight.
    """

    def __init__(self, *, keep_dense: bool, group: int = GROUP):
        self.keep_dense, self.group = keep_dense, group

    def create(self, layer: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        rows, inputs = shape
        layer.table = Int8Table(rows, inputs, self.group)
        layer.weight = None
        if self.keep_dense:
            layer.weight = nn.Parameter(torch.empty(rows, inputs, dtype=torch.bfloat16), requires_grad=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        if layer.weight is not None and x.shape[0] > DENSE_ABOVE:
            return F.linear(x, layer.weight, bias)
        out = int8_linear(x, layer.table.codes, layer.table.scales, layer.table.rows)
        return (out if bias is None else out.add_(bias)).bfloat16()

    def linear_weight(self, layer: Any) -> LinearWeight:
        return LinearWeight(layer.table.codes, "cpu_int8", layer.table.scales)

    def slots(self, layer: Any, start: int, rows: int, expert: int | None = None) -> dict[str, Stored]:
        return {"weight": Stored(_LayerSlot(layer, start, rows), 0, 1)}


def load_codes(layer: Any, codes: Tensor, scales: Tensor, start: int = 0) -> None:
    """Set rows of a layer from `start` on in place: codes int8 [N, K], scales float16 [N, K / 32] or [N, K / 16]."""
    with torch.no_grad():
        layer.table.store(codes, scales, start)
        if layer.weight is not None:
            layer.weight[start : start + len(codes)] = dequantize_int8(codes, scales)


class _LayerSlot(Int8Slot):
    """Rows of a layer's table and of its bfloat16 copy, which gets the dequantised weight."""

    def __init__(self, layer: Any, start: int, rows: int):
        super().__init__(layer.table, torch.bfloat16, start, rows)
        self._layer = layer

    def write(self, tensor: Tensor) -> None:
        super().write(tensor)
        if self._layer.weight is not None:
            with torch.no_grad():
                self._layer.weight[self.start : self.start + self.rows] = self.read()

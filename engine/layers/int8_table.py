"""Matrices of a 16-bit model on a CPU in 8 bits: weight = scale * code + low.

Codes are -128..127. Inputs share a float16 scale in groups of 32 or 16, and a float16 low, the minimum that some GGUF
types add, in groups of 32. These are the numbers of a GGUF file: exactly, of Q8_0, Q5_0 and Q5_1; factors that are
products, of Q6_K and Q5_K, are rounded to float16. The compiled kernels of kernels/cpu_library.py compute with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import ModelError
from engine.kernels.cpu_library import int8_linear, int8_rows
from engine.kernels.linear_weight import LinearWeight
from engine.layers.weight_slot import Slot

GROUP = 32
LANES = 16  # rows of a block


class Int8Table(nn.Module):
    """A table W [rows, inputs] in the order in which the kernels read it: blocks of 16 rows, the last one padded.

    `codes` are int8 [blocks, inputs, 16], `scales` float16 [blocks, inputs / group, 16] with a `group` of 32 or 16, and
    `lows` float16 [blocks, inputs / 32, 16] or None. Raises ModelError for inputs that aren't a multiple of 32.
    """

    codes: Tensor
    scales: Tensor
    lows: Tensor | None

    def __init__(self, rows: int, inputs: int, group: int = GROUP, has_lows: bool = False):
        super().__init__()
        if inputs % GROUP:
            raise ModelError(f"a table of {rows} x {inputs} can't be stored in 8 bits: inputs must be a multiple of 32")
        self.rows, self.inputs, self.group = rows, inputs, group
        blocks = -(-rows // LANES)
        self.register_buffer("codes", torch.zeros(blocks, inputs, LANES, dtype=torch.int8))
        self.register_buffer("scales", torch.zeros(blocks, inputs // group, LANES, dtype=torch.float16))
        lows = torch.zeros(blocks, inputs // GROUP, LANES, dtype=torch.float16) if has_lows else None
        self.register_buffer("lows", lows)

    def store(self, codes: Tensor, scales: Tensor, lows: Tensor | None = None, *, start: int = 0) -> None:
        """Set rows from `start` on in place.

        codes int8 [rows, inputs], scales float16 [rows, inputs / group] or of larger groups, lows float16
        [rows, inputs / 32]; None: all are 0.
        """
        scales = scales.repeat_interleave(self.scales.shape[1] // scales.shape[1], dim=1)
        rows = torch.arange(start, start + len(codes))
        for stored, values in ((self.codes, codes), (self.scales, scales), (self.lows, 0 if lows is None else lows)):
            if stored is not None:
                stored.transpose(1, 2)[rows // LANES, rows % LANES] = values

    def load(self) -> Tensor:
        """Return the weight as a new float32 tensor [rows, inputs]."""
        lows = None if self.lows is None else self._rows(self.lows)
        return dequantize_int8(self._rows(self.codes), self._rows(self.scales), lows)

    def _rows(self, stored: Tensor) -> Tensor:
        return stored.transpose(1, 2).flatten(0, 1)[: self.rows]


def quantize_int8(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Quantise a dense weight [N, K], lossy: return codes int8 [N, K] and scales float16 [N, K / group].

    A scale is a 127th of the largest magnitude of its group, which is at least the smallest normal float16. Raises
    ModelError for weights beyond the range of a float16 scale, and for infinities and NaNs.
    """
    groups = weight.float().view(weight.shape[0], -1, group)
    largest = groups.abs().amax(dim=2)
    scales = (largest / 127).half()
    if not bool(scales.isfinite().all()):
        raise ModelError(f"the weights can't be stored in 8 bits: their largest magnitude is {float(largest.max())}")
    scales = scales.clamp(min=torch.finfo(torch.float16).tiny).where(largest > 0, scales)
    step = scales.float().where(scales > 0, 1.0).unsqueeze(2)
    codes = (groups / step).round_().clamp_(-128, 127)
    return codes.to(torch.int8).view(weight.shape), scales


def dequantize_int8(codes: Tensor, scales: Tensor, lows: Tensor | None = None) -> Tensor:
    """Return the weight float32 [N, K] of codes [N, K], scales [N, K / group] and lows [N, K / 32], exactly."""
    groups = codes.view(*scales.shape, -1).float()
    weight = (groups * scales.float().unsqueeze(2)).view(codes.shape)
    return weight if lows is None else weight + lows.float().repeat_interleave(GROUP, dim=1)


class Int8Slot:
    """The slot of a checkpoint tensor of `dtype` in an Int8Table; like WeightSlot, but `write` quantises (lossy).

    The tensor has the table's rows from `start` on, `rows` or all of them.
    """

    def __init__(self, table: Int8Table, dtype: torch.dtype, start: int = 0, rows: int | None = None):
        self.table, self.dtype, self.start = table, dtype, start
        self.rows = table.rows if rows is None else rows

    @property
    def shape(self) -> tuple[int, ...]:
        """The checkpoint tensor's shape."""
        return (self.rows, self.table.inputs)

    def write(self, tensor: Tensor) -> None:
        """Quantise `tensor` into the storage in place; addresses don't change."""
        with torch.no_grad():
            self.table.store(*quantize_int8(tensor.to(device="cpu"), self.table.group), start=self.start)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the part of a whole checkpoint tensor that is stored here: all of it."""
        return tensor

    def read(self) -> Tensor:
        """Return a dequantised copy in `dtype`."""
        return self.table.load()[self.start : self.start + self.rows].to(self.dtype)


class Int8Embedding(nn.Module):
    """Embedding table [vocab, hidden] in 8 bits; maps token ids [T] int64 to rows [T, hidden] in bfloat16."""

    def __init__(self, table: Int8Table):
        super().__init__()
        self.table = table

    def forward(self, token_ids: Tensor) -> Tensor:
        table = self.table
        return int8_rows(token_ids, table.codes, table.scales, table.inputs, table.lows)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the table's Hugging Face name to its slot."""
        return {f"{prefix}.weight": Int8Slot(self.table, torch.bfloat16)}


class Int8Head(nn.Module):
    """LM head in 8 bits: hidden [N, h] in bfloat16 -> float32 logits [N, vocab]. A tied embedding shares its table."""

    bias: Any = None

    def __init__(self, table: Int8Table):
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        table = self.table
        return int8_linear(x, table.codes, table.scales, table.rows, table.lows)

    @property
    def linear_weight(self) -> LinearWeight:
        """The weight as kernels read it."""
        return LinearWeight(self.table.codes, "cpu_int8", self.table.scales, self.table.lows)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the weight's Hugging Face name to its slot."""
        return {f"{prefix}.lm_head.weight": Int8Slot(self.table, torch.bfloat16)}

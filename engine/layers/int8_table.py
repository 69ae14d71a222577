"""Matrices of a 16-bit model on a CPU in 8 bits: weight = scale * code, with a scale per 32 or 16 inputs.

These are the numbers of a GGUF file in Q8_0, exactly: codes -128..127 and float16 scales. A head reads 8.5 bits per
weight in each step, instead of 32 in float32. The compiled kernels of kernels/cpu_library.py compute with them.
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

    `codes` are int8 [blocks, inputs, 16], `scales` float16 [blocks, inputs / group, 16]; `group` is 32 or 16. Raises
    ModelError for inputs that aren't a multiple of 32.
    """

    codes: Tensor
    scales: Tensor

    def __init__(self, rows: int, inputs: int, group: int = GROUP):
        super().__init__()
        if inputs % GROUP:
            raise ModelError(f"a table of {rows} x {inputs} can't be stored in 8 bits: inputs must be a multiple of 32")
        self.rows, self.inputs, self.group = rows, inputs, group
        blocks = -(-rows // LANES)
        self.register_buffer("codes", torch.zeros(blocks, inputs, LANES, dtype=torch.int8))
        self.register_buffer("scales", torch.zeros(blocks, inputs // group, LANES, dtype=torch.float16))

    def store(self, codes: Tensor, scales: Tensor, start: int = 0) -> None:
        """Set rows from `start` on in place: codes int8 [rows, inputs], scales float16 [rows, inputs / group].

        Scales of larger groups than the table's are repeated.
        """
        scales = scales.repeat_interleave(self.scales.shape[1] // scales.shape[1], dim=1)
        rows = torch.arange(start, start + len(codes))
        for stored, values in ((self.codes, codes), (self.scales, scales)):
            stored.transpose(1, 2)[rows // LANES, rows % LANES] = values

    def load(self) -> tuple[Tensor, Tensor]:
        """Return copies of the codes int8 [rows, inputs] and the scales float16 [rows, inputs / group]."""
        codes, scales = (one.transpose(1, 2).flatten(0, 1)[: self.rows] for one in (self.codes, self.scales))
        return codes, scales


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


def dequantize_int8(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the weight float32 [N, K] of codes [N, K] and scales [N, K / group], exactly."""
    groups = codes.view(*scales.shape, -1).float()
    return (groups * scales.float().unsqueeze(2)).view(codes.shape)


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
            self.table.store(*quantize_int8(tensor.to(device="cpu"), self.table.group), self.start)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the part of a whole checkpoint tensor that is stored here: all of it."""
        return tensor

    def read(self) -> Tensor:
        """Return a dequantised copy in `dtype`."""
        codes, scales = (one[self.start : self.start + self.rows] for one in self.table.load())
        return dequantize_int8(codes, scales).to(self.dtype)


class Int8Embedding(nn.Module):
    """Embedding table [vocab, hidden] in 8 bits; maps token ids [T] int64 to rows [T, hidden] in bfloat16."""

    def __init__(self, table: Int8Table):
        super().__init__()
        self.table = table

    def forward(self, token_ids: Tensor) -> Tensor:
        return int8_rows(token_ids, self.table.codes, self.table.scales, self.table.inputs)

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
        return int8_linear(x, self.table.codes, self.table.scales, self.table.rows)

    @property
    def linear_weight(self) -> LinearWeight:
        """The weight as kernels read it."""
        return LinearWeight(self.table.codes, "cpu_int8", self.table.scales)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map the weight's Hugging Face name to its slot."""
        return {f"{prefix}.lm_head.weight": Int8Slot(self.table, torch.bfloat16)}

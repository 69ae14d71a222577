"""The numbers of GGUF matrices that CPUs compute with as they are stored: codes, and a scale per 32 inputs.

Blocks of bytes [N, blocks, bytes] become codes [N, K]. Layouts are from ggml-quants.h of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FourBits = tuple[Tensor, Tensor, Tensor]
"""Codes uint8 [N, K] in 0..15, scale and minimum float32 [N, K / 32]: weight = scale * code + minimum."""

EightBits = tuple[Tensor, Tensor]
"""Codes int8 [N, K], and scales float16 [N, K / 32] or [N, K / 16]: weight = scale * code. A scale of Q6_K is a product
that is rounded to float16."""


def _float16(blocks: Tensor, start: int, count: int = 1) -> Tensor:
    """Return `count` float16 numbers from a byte on, as float32 [N, blocks, count]."""
    return blocks[:, :, start : start + 2 * count].contiguous().view(torch.float16).float()


def _halves(nibbles: Tensor, width: int) -> Tensor:
    """Return codes of 4 bits: of each `width` bytes, the low halves come first."""
    rows = nibbles.reshape(nibbles.shape[0], -1, width)
    return torch.cat((rows & 15, rows >> 4), dim=2).view(nibbles.shape[0], -1)


def read_q4_0(blocks: Tensor) -> FourBits:
    """Read blocks of 32 weights: a scale, and codes from which 8 is subtracted."""
    scale = _float16(blocks, 0).flatten(1)
    return _halves(blocks[:, :, 2:], 16), scale, -8.0 * scale


def read_q4_1(blocks: Tensor) -> FourBits:
    """Read blocks of 32 weights: a scale, a minimum, and codes."""
    scale, low = _float16(blocks, 0, 2).unbind(2)
    return _halves(blocks[:, :, 4:], 16), scale.contiguous(), low.contiguous()


def read_q4_k(blocks: Tensor) -> FourBits:
    """Read blocks of 256 weights: factors of all scales and minima, then 6 bits for each of 8 groups, and codes."""
    factors, packed = _float16(blocks, 0, 2), blocks[:, :, 4:16]
    first, second, third = packed.split(4, dim=2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=2)
    lows = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=2)
    scale, low = factors[:, :, :1] * scales.float(), factors[:, :, 1:] * lows.float()
    return _halves(blocks[:, :, 16:], 32), scale.flatten(1), -low.flatten(1)


def read_q8_0(blocks: Tensor) -> EightBits:
    """Read blocks of 32 weights: a scale, and codes."""
    codes = blocks[:, :, 2:].contiguous().view(torch.int8).view(blocks.shape[0], -1)
    return codes, _float16(blocks, 0).flatten(1).half()


def read_q5_0(blocks: Tensor) -> EightBits:
    """Read blocks of 32 weights: a scale, the fifth bits of all codes, and their other bits. 16 is subtracted."""
    low = _halves(blocks[:, :, 6:], 16).view(blocks.shape[0], -1, 4, 8)
    high = blocks[:, :, 2:6].unsqueeze(3) >> torch.arange(8, dtype=torch.uint8) & 1
    codes = (low | high << 4).to(torch.int8) - 16
    return codes.view(blocks.shape[0], -1), _float16(blocks, 0).flatten(1).half()


def read_q6_k(blocks: Tensor) -> EightBits:
    """Read blocks of 256 weights: 4 bits of codes, 2 bits, from which 32 is subtracted, 8-bit scales, and a factor."""
    rows, count = blocks.shape[:2]
    halves = blocks[:, :, :128].reshape(rows, count, 2, 1, 64)  # of each 128 weights: low halves first
    low = torch.cat((halves & 15, halves >> 4), dim=3).view(rows, count, 2, 4, 32)
    high = blocks[:, :, 128:192].view(rows, count, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1) & 3
    codes = (low | high << 4).to(torch.int8) - 32
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8).float() * _float16(blocks, 208)
    return codes.view(rows, -1), scales.flatten(1).half()


FOUR_BITS: dict[int, Callable[[Tensor], FourBits]] = {2: read_q4_0, 3: read_q4_1, 12: read_q4_k}
"""The readers of types with codes of 4 bits, by GGMLQuantizationType."""

EIGHT_BITS: dict[int, Callable[[Tensor], EightBits]] = {6: read_q5_0, 8: read_q8_0, 14: read_q6_k}
"""The readers of types whose codes fit 8 bits, without a minimum."""

SMALL_GROUPS = (14,)
"""Types of EIGHT_BITS with a scale per 16 inputs instead of 32."""

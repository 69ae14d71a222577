"""The numbers of GGUF matrices that CPUs compute with as they are stored: codes, and a scale per 32 inputs.

Blocks of bytes [N, blocks, bytes] become codes [N, K]. Layouts are from ggml-quants.h of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FourBits = tuple[Tensor, Tensor, Tensor]
"""Codes uint8 [N, K] in 0..15, scale and minimum float32 [N, K / 32]: weight = scale * code + minimum."""


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


def read_q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Read blocks of 32 weights: codes int8 [N, K] and scales float16 [N, K / 32], where weight = scale * code."""
    codes = blocks[:, :, 2:].contiguous().view(torch.int8).view(blocks.shape[0], -1)
    return codes, blocks[:, :, :2].contiguous().view(torch.float16).squeeze(2)


FOUR_BITS: dict[int, Callable[[Tensor], FourBits]] = {2: read_q4_0, 3: read_q4_1, 12: read_q4_k}
"""The readers of types with codes of 4 bits, by GGMLQuantizationType."""

Q8_0 = 8

"""Codes packed in 32-bit integers, the first code in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack_int32(packed: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack codes along `dim`: int32 [..., n] -> uint8 [..., n * 32 / bits]. `bits` is 4 or 8."""
    packed = packed.movedim(dim, -1)
    shifts = torch.arange(0, 32, bits, device=packed.device, dtype=torch.int32)
    codes = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2).movedim(-1, dim)


def pack_int32(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Undo `unpack_int32`; a last integer that isn't full is padded with 0."""
    codes = codes.movedim(dim, -1)
    per_word = 32 // bits
    words = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[-1] % per_word)).unflatten(
        -1, (-1, per_word)
    )
    packed = (words << torch.arange(0, 32, bits, device=codes.device)).sum(dim=-1)
    return ((packed + 2**31) % 2**32 - 2**31).to(torch.int32).movedim(-1, dim).contiguous()

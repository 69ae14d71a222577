"""Types of quantised weights: how codes are stored, what they mean, and how plain weights become codes.

All functions are PyTorch operations without host reads, so that a step that decodes weights can be captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from engine.kernels.linear_weight import PACKED_COLUMNS

FP8 = torch.float8_e4m3fn
TINY = 2.0**-100
"""The smallest scale, that of blocks of zeros."""


class Element(ABC):
    """A type of codes. Code values are float32 or integer tensors [outputs, inputs] outside storage.

    - stored: the dtype of the storage; per_byte: the number of codes in one of its elements, along the inputs.
    - scale_dtype: the dtype of stored scales; zero_dtype: the dtype of stored zeros.
    """

    name: str
    stored: torch.dtype
    per_byte: int = 1
    scale_dtype = torch.float32
    zero_dtype = torch.int16

    def pack(self, codes: Tensor) -> Tensor:
        """Return codes [R, C] in storage form [R, C / per_byte]."""
        return codes.to(self.stored)

    def unpack(self, stored: Tensor) -> Tensor:
        """Return the codes [R, C] of a stored tensor [R, C / per_byte], in the form that `pack` takes."""
        return stored

    @abstractmethod
    def decode(self, stored: Tensor) -> Tensor:
        """Return the values of stored codes as a new float32 tensor [..., C]."""

    def decode_scale(self, scale: Tensor) -> Tensor:
        """Return stored scales as float32."""
        return scale

    @abstractmethod
    def quantize(
        self, blocks: Tensor, symmetric: bool, scale_dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Quantise blocks, float32 [RB, r, CB, c]: codes of that shape, and scales and zeros (or None) [RB, CB].

        Scales are float32, with values that `scale_dtype` can hold.
        """


def _largest(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each block, [RB, CB]; NaN if it holds a NaN."""
    return blocks.abs().amax(dim=(1, 3))


def _rounded(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return positive scales, float32, with values of `dtype`. One that is too small for it becomes its smallest."""
    limits = torch.finfo(dtype)
    return scale.to(dtype).float().clamp(min=max(TINY, limits.tiny * limits.eps))


def _spread(values: Tensor) -> Tensor:
    """Return [RB, CB] as [RB, 1, CB, 1]."""
    return values[:, None, :, None]


class Fp8(Element):
    """float8_e4m3fn, with scale = largest magnitude / 448."""

    name, stored = "fp8", FP8

    def decode(self, stored: Tensor) -> Tensor:
        return stored.float()

    def quantize(
        self, blocks: Tensor, symmetric: bool, scale_dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        limit = torch.finfo(FP8).max
        scale = _rounded(_largest(blocks) / limit, scale_dtype)
        return (blocks / _spread(scale)).clamp(-limit, limit).to(FP8), scale, None


class Integer(Element):
    """Signed codes from -half to half - 1."""

    half: int

    def quantize(
        self, blocks: Tensor, symmetric: bool, scale_dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        half = self.half
        if symmetric:
            scale, zero = _rounded(_largest(blocks) / (half - 0.5), scale_dtype), None
            codes = (blocks / _spread(scale)).round_()
        else:
            low, high = blocks.amin(dim=(1, 3)).clamp(max=0), blocks.amax(dim=(1, 3)).clamp(min=0)
            scale = _rounded((high - low) / (2 * half - 1), scale_dtype)
            zero = (-low / scale).round_().nan_to_num_(0).clamp(0, 2 * half - 1) - half
            codes = (blocks / _spread(scale)).round_() + _spread(zero)
        return codes.nan_to_num_(0).clamp_(-half, half - 1).to(torch.int16), scale, zero


class Int8(Integer):
    """Signed bytes."""

    name, stored, half = "int8", torch.int8, 128

    def decode(self, stored: Tensor) -> Tensor:
        return stored.float()


class Int4(Integer):
    """Two codes per byte, as `pack_halves` places them. Stored unsigned: a code plus 8."""

    name, stored, half, per_byte = "int4", torch.uint8, 8, 2
    zero_dtype = torch.int8

    def pack(self, codes: Tensor) -> Tensor:
        return pack_halves((codes + 8).to(torch.uint8))

    def unpack(self, stored: Tensor) -> Tensor:
        return unpack_halves(stored).to(torch.int16) - 8

    def decode(self, stored: Tensor) -> Tensor:
        return unpack_halves(stored).float().sub_(8)


class MxFp4(Element):
    """E2M1 numbers, two per byte, with scales that are powers of two: exponents + 127 in a byte (E8M0).

    Codes are 0 to 15: sign, two bits of exponent, one of mantissa. `pack_halves` places them.
    """

    name, stored, per_byte, scale_dtype = "mxfp4", torch.uint8, 2, torch.uint8

    def pack(self, codes: Tensor) -> Tensor:
        return pack_halves(codes.to(torch.uint8))

    def unpack(self, stored: Tensor) -> Tensor:
        return unpack_halves(stored)

    def decode(self, stored: Tensor) -> Tensor:
        codes = unpack_halves(stored)
        size = (codes & 7).float()  # 0 to 7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6
        value = 0.5 * size + 0.5 * (size - 4).clamp_(min=0) + (size - 6).clamp_(min=0)
        return value * (1 - 2 * (codes >> 3).float())

    def decode_scale(self, scale: Tensor) -> Tensor:
        # the exponent's bits of a float32; 0 stands for 2^-127, a subnormal number
        return (scale.to(torch.int32) << 23).clamp_(min=1 << 22).view(torch.float32)

    def quantize(
        self, blocks: Tensor, symmetric: bool, scale_dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        largest = _largest(blocks)
        exponent = torch.frexp(largest.clamp(min=TINY)).exponent - 3 + 127  # the largest number is 6 = 1.5 * 2^2
        scale = exponent.clamp(0, 254).masked_fill(~largest.isfinite(), 255).to(torch.uint8)
        x = blocks / _spread(self.decode_scale(scale))
        size = x.abs()
        # round to the nearest number, and halfway to the one with an even mantissa
        codes = x.signbit().int() << 3
        for boundary in (0.25, 1.25, 2.5, 5.0):
            codes += size > boundary
        for boundary in (0.75, 1.75, 3.5):
            codes += size >= boundary
        return codes, scale, None


def pack_halves(codes: Tensor) -> Tensor:
    """Pack codes 0..15, uint8 [..., C], two per byte in the layout of PACKED_COLUMNS: [..., C / 2]."""
    full = codes.shape[-1] // PACKED_COLUMNS * PACKED_COLUMNS
    blocks, last = codes[..., :full].unflatten(-1, (-1, PACKED_COLUMNS)), codes[..., full:]
    pack = lambda part: part.chunk(2, dim=-1)[0] | part.chunk(2, dim=-1)[1] << 4  # noqa: E731
    if not full or not last.shape[-1]:
        return pack(blocks).flatten(-2) if full else pack(last)
    return torch.cat((pack(blocks).flatten(-2), pack(last)), dim=-1)


def unpack_halves(packed: Tensor) -> Tensor:
    """Undo `pack_halves`."""
    width = PACKED_COLUMNS // 2
    full = packed.shape[-1] // width * width
    blocks, last = packed[..., :full].unflatten(-1, (-1, width)), packed[..., full:]
    unpack = lambda part: torch.cat((part & 15, part >> 4), dim=-1)  # noqa: E731
    if not full or not last.shape[-1]:
        return unpack(blocks).flatten(-2) if full else unpack(last)
    return torch.cat((unpack(blocks).flatten(-2), unpack(last)), dim=-1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes 0..15, uint8 [..., C], two per byte, the first in the low half: [..., C / 2]."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


ELEMENTS: dict[str, Element] = {element.name: element for element in (Fp8(), Int8(), Int4(), MxFp4())}

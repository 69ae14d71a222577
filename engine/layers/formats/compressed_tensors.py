"""compressed-tensors checkpoints (`quant_method: compressed-tensors`), of its formats

- float-quantized, int-quantized, naive-quantized ("ct"): `weight` in fp8 or int8, `weight_scale`, and for asymmetric
  codes `weight_zero_point` of the same shape.
- pack-quantized ("ct-packed"): int4 or int8 codes in 32-bit integers: `weight_packed` [O, K * bits / 32],
  `weight_scale`, `weight_shape`, and for asymmetric codes `weight_zero_point`, packed along the outputs (but one byte
  if the matrix has one). Packed codes are a signed code plus half the range. `weight_g_idx` [K] with `actorder: group`.
- mxfp4-pack-quantized ("ct-mxfp4"): `weight_packed` uint8 [O, K / 2], `weight_scale` uint8 [O, K / 32].

Scales of activations (`input_scale` and others) are not used: products are weight-only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.formats.bit_packing import pack_int32, unpack_int32
from engine.layers.formats.elements import pack_nibbles, unpack_nibbles
from engine.layers.formats.fp8 import fp8_codes, scale_shapes
from engine.layers.formats.groups import group_index
from engine.layers.formats.mxfp4 import exponents
from engine.layers.formats.region import CheckpointTensor, Region
from engine.layers.formats.scaled_weight import ScaledWeight, scale_tensor, unused


def _input_tensors() -> dict[str, CheckpointTensor]:
    return {
        "input_scale": unused((1,), ()),
        "input_zero_point": unused((1,), (), dtypes=(torch.int8, torch.float8_e4m3fn)),
        "input_global_scale": unused((1,), ()),
    }


def _zero_points(method: ScaledWeight, region: Region) -> CheckpointTensor:
    """Return the tensor of zero points that are not packed, with the shapes of the scales."""
    shapes = scale_shapes(method, region)
    return CheckpointTensor(
        shapes,
        (torch.int8, torch.int16, torch.int32),
        lambda zeros: method.store_scales(region, "zero", zeros.reshape(method.grid(region))),
        lambda: method.load_scales(region, "zero").to(torch.int8).reshape(shapes[0]),
    )


class CompressedWeight(ScaledWeight):
    """`weight` with one code per element."""

    def checkpoint_tensors(self, region: Region) -> dict[str, CheckpointTensor]:
        tensors = {
            "weight": fp8_codes(self, region) if self.element.name == "fp8" else self._bytes(region),
            "weight_scale": scale_tensor(self, region, scale_shapes(self, region)),
            **_input_tensors(),
        }
        if not self.scheme.symmetric:
            tensors["weight_zero_point"] = _zero_points(self, region)
        if self.scheme.act_order:
            tensors["weight_g_idx"] = group_index(self, region)
        return tensors

    def _bytes(self, region: Region) -> CheckpointTensor:
        return CheckpointTensor(
            ((region.outputs, region.inputs),),
            (torch.int8,),
            lambda codes: self.store_codes(region, codes),
            lambda: self.load_codes(region),
        )


class PackedWeight(ScaledWeight):
    """`weight_packed`: codes in 32-bit integers."""

    def checkpoint_tensors(self, region: Region) -> dict[str, CheckpointTensor]:
        bits = 8 // self.element.per_byte
        half, outputs, inputs = 1 << (bits - 1), region.outputs, region.inputs
        groups = self.grid(region)

        def store_codes(packed: Tensor) -> None:
            self.store_codes(region, unpack_int32(packed, bits, 1)[:, :inputs].to(torch.int16) - half)

        def store_zeros(packed: Tensor) -> None:
            self.store_scales(region, "zero", unpack_int32(packed, bits, 0)[: groups[0]].to(torch.int16) - half)

        def check_shape(shape: Tensor) -> str | None:
            found = shape.tolist()
            return None if found == [outputs, inputs] else f"says {found}, expected {[outputs, inputs]}"

        tensors = {
            "weight_packed": CheckpointTensor(
                ((outputs, -(-inputs * bits // 32)),),
                (torch.int32,),
                store_codes,
                lambda: pack_int32(self.load_codes(region).to(torch.int16) + half, bits, 1),
            ),
            "weight_scale": scale_tensor(self, region, scale_shapes(self, region)),
            "weight_shape": CheckpointTensor(
                ((2,),),
                (torch.int64, torch.int32),
                lambda shape: None,
                lambda: torch.tensor([outputs, inputs]),
                check_shape,
                required=False,
            ),
            **_input_tensors(),
        }
        if not self.scheme.symmetric and self.scheme.block == (None, None):
            tensors["weight_zero_point"] = _zero_points(self, region)
        elif not self.scheme.symmetric:
            tensors["weight_zero_point"] = CheckpointTensor(
                ((-(-groups[0] * bits // 32), groups[1]),),
                (torch.int32,),
                store_zeros,
                lambda: pack_int32(self.load_scales(region, "zero").to(torch.int16) + half, bits, 0),
            )
        if self.scheme.act_order:
            tensors["weight_g_idx"] = group_index(self, region)
        return tensors


class CompressedMxFp4Weight(ScaledWeight):
    """`weight_packed`: two E2M1 numbers per byte, the even column in the low half."""

    def checkpoint_tensors(self, region: Region) -> dict[str, CheckpointTensor]:
        return {
            "weight_packed": CheckpointTensor(
                ((region.outputs, region.inputs // 2),),
                (torch.uint8,),
                lambda packed: self.store_codes(region, unpack_nibbles(packed)),
                lambda: pack_nibbles(self.load_codes(region)),
            ),
            "weight_scale": exponents(self, region),
            **_input_tensors(),
        }

"""MXFP4 checkpoints (`quant_method: mxfp4`): E2M1 numbers, two per byte, with a power of two per 32 inputs.

`weight_blocks` uint8 [O, K / 32, 16], the even column in the low half; `weight_scales` uint8 [O, K / 32], E8M0: an
exponent + 127, or 255 for NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.layers.formats.elements import pack_nibbles, unpack_nibbles
from engine.layers.formats.region import CheckpointTensor, Region
from engine.layers.formats.scaled_weight import ScaledWeight

GROUP = 32
NAN = 255


def exponents(method: ScaledWeight, region: Region) -> CheckpointTensor:
    """Return the tensor of exponents [outputs, inputs / 32]."""
    if region.inputs % GROUP:
        raise ModelError(f"MXFP4 needs rows of a multiple of {GROUP}, found {region.inputs}: use another format")

    def check(exponent: Tensor) -> str | None:
        return "contains NaN (255)" if bool((exponent.view(torch.uint8) == NAN).any()) else None

    return CheckpointTensor(
        (method.grid(region),),
        (torch.uint8, torch.float8_e8m0fnu),
        lambda exponent: method.store_scales(region, "scale", exponent.view(torch.uint8)),
        lambda: method.load_scales(region, "scale"),
        check,
    )


class MxFp4Weight(ScaledWeight):
    """`weight_blocks` and `weight_scales`."""

    def checkpoint_tensors(self, region: Region) -> dict[str, CheckpointTensor]:
        shape = (region.outputs, region.inputs // GROUP, GROUP // 2)
        return {
            "weight_blocks": CheckpointTensor(
                (shape,),
                (torch.uint8,),
                lambda packed: self.store_codes(region, unpack_nibbles(packed).flatten(1)),
                lambda: pack_nibbles(self.load_codes(region)).reshape(-1, *shape[1:]),
            ),
            "weight_scales": exponents(self, region),
        }

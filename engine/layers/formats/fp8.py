"""fp8 checkpoints: float8_e4m3fn weights with float scales per block, row, or matrix.

- "fp8-block" (`quant_method: fp8` with `weight_block_size`): `weight_scale_inv` [row blocks, column blocks].
- "fp8" (`quant_method: fp8`): `weight_scale`, one number; `input_scale`, for static activation scales. Some programs
  call them `weight_scale_inv` and `activation_scale`.
- "modelopt" (`quant_method: modelopt`): as "fp8", or with a scale per row, or per block with shape [rb, 1, cb, 1].

In each, W = weight * scale, whatever the scale is called.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.formats.elements import FP8
from engine.layers.formats.region import CheckpointTensor, Region
from engine.layers.formats.scaled_weight import ScaledWeight, scale_tensor, unused

SCALE_NAMES = ("weight_scale", "weight_scale_inv")


def fp8_codes(method: ScaledWeight, region: Region) -> CheckpointTensor:
    """Return the tensor of the codes [outputs, inputs]."""
    shape = (region.outputs, region.inputs)
    return CheckpointTensor(
        (shape,), (FP8,), lambda codes: method.store_codes(region, codes), lambda: method.load_codes(region), _has_nan
    )


def _has_nan(codes: Tensor) -> str | None:
    """Return what is wrong with codes: NaN, the bytes 0x7f and 0xff. There is no infinity."""
    return "contains NaN" if bool((codes.view(torch.uint8) & 127 == 127).any()) else None


def scale_shapes(method: ScaledWeight, region: Region) -> tuple[tuple[int, ...], ...]:
    """Return the shapes that checkpoints give the scales [row blocks, column blocks]: that one, and shorter ones."""
    rows, columns = method.grid(region)
    shapes: list[tuple[int, ...]] = [(rows, columns)]
    if method.scheme.block == (None, None):
        shapes = [(1,), (), (1, 1)]
    elif method.scheme.block[1] is None:
        shapes.append((rows,))
    return tuple(shapes)


class Fp8Weight(ScaledWeight):
    """`weight` and `weight_scale`."""

    scale_name = "weight_scale"

    def checkpoint_tensors(self, region: Region) -> dict[str, CheckpointTensor]:
        return {
            "weight": fp8_codes(self, region),
            **self._scales(scale_tensor(self, region, scale_shapes(self, region))),
            "input_scale": unused((1,), ()),
            "activation_scale": unused((1,), ()),
        }

    def _scales(self, scale: CheckpointTensor) -> dict[str, CheckpointTensor]:
        """Return the scale under its usual name and the other one."""
        other = next(name for name in SCALE_NAMES if name != self.scale_name)
        return {
            self.scale_name: scale._replace(others=(other,)),
            other: scale._replace(load=None, required=False),
        }


class BlockFp8Weight(Fp8Weight):
    """`weight` and `weight_scale_inv`."""

    scale_name = "weight_scale_inv"


class ModeloptWeight(Fp8Weight):
    """`weight` and `weight_scale`, whose blocks have four dimensions."""

    def checkpoint_tensors(self, region: Region) -> dict[str, CheckpointTensor]:
        rows, columns = self.grid(region)
        shapes = (*scale_shapes(self, region), (rows, 1, columns, 1))
        return super().checkpoint_tensors(region) | self._scales(scale_tensor(self, region, shapes))

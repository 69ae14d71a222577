"""AWQ checkpoints (`quant_method: awq`, version gemm): int4 with a scale and a zero per group of inputs.

- `qweight` int32 [K, O / 8]: eight outputs per integer, in the order of `ORDER` from the lowest bits.
- `qzeros` int32 [groups, O / 8], packed in the same way. `scales` [groups, O].

W = (code - zero) * scale, with codes and zeros from 0 to 15. Storage keeps both less 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.formats.bit_packing import pack_int32, unpack_int32
from engine.layers.formats.region import CheckpointTensor, Region
from engine.layers.formats.scaled_weight import ScaledWeight, scale_tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of each eight, whose code is in bits 4 * index."""


def unpack_awq(packed: Tensor) -> Tensor:
    """Unpack int32 [n, O / 8] to signed codes int16 [n, O]."""
    codes = unpack_int32(packed, 4, 1).unflatten(1, (-1, 8))
    order = torch.tensor([ORDER.index(output) for output in range(8)], device=packed.device)
    return codes.index_select(2, order).flatten(1).to(torch.int16) - 8


def pack_awq(codes: Tensor) -> Tensor:
    """Undo `unpack_awq`."""
    order = torch.tensor(ORDER, device=codes.device)
    return pack_int32((codes.to(torch.int16) + 8).unflatten(1, (-1, 8)).index_select(2, order).flatten(1), 4, 1)


class AwqWeight(ScaledWeight):
    """`qweight`, `qzeros` and `scales`, with outputs along the second dimension."""

    def checkpoint_tensors(self, region: Region) -> dict[str, CheckpointTensor]:
        outputs, groups = region.outputs, self.grid(region)[1]
        return {
            "qweight": CheckpointTensor(
                ((region.inputs, -(-outputs // 8)),),
                (torch.int32,),
                lambda packed: self.store_codes(region, unpack_awq(packed)[:, :outputs].T),
                lambda: pack_awq(self.load_codes(region).T),
            ),
            "qzeros": CheckpointTensor(
                ((groups, -(-outputs // 8)),),
                (torch.int32,),
                lambda packed: self.store_scales(region, "zero", unpack_awq(packed)[:, :outputs].T),
                lambda: pack_awq(self.load_scales(region, "zero").T),
            ),
            "scales": scale_tensor(self, region, ((groups, outputs),), transposed=True),
        }

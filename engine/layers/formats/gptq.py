"""GPTQ checkpoints (`quant_method: gptq`): int4 or int8 with a scale and a zero per group of inputs.

- `qweight` int32 [K * bits / 32, O]: consecutive inputs of an output per integer, from the lowest bits.
- `qzeros` int32 [groups, O * bits / 32]: consecutive outputs per integer. The first version ("gptq") stores zero - 1,
  modulo the range of a code; "gptq_v2" stores zero.
- `scales` [groups, O]. `g_idx` int32 [K]: the group of each input, in any order with `desc_act`.
- `bias` [O]: some programs write one of zeros for layers that have none.

W = (code - zero) * scale, with unsigned codes and zeros. Storage keeps both less half the range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.layers.formats.bit_packing import pack_int32, unpack_int32
from engine.layers.formats.groups import group_index, ordered_groups
from engine.layers.formats.region import CheckpointTensor, Region
from engine.layers.formats.scaled_weight import FLOATS, ScaledWeight, scale_tensor


class GptqV2Weight(ScaledWeight):
    """`qweight`, `qzeros`, `scales` and `g_idx`, with outputs along the second dimension."""

    zero_offset = 0
    """What the stored zeros lack."""

    def checkpoint_tensors(self, region: Region) -> dict[str, CheckpointTensor]:
        bits = 8 // self.element.per_byte
        half, mask, offset = 1 << (bits - 1), (1 << bits) - 1, self.zero_offset
        outputs, inputs, groups = region.outputs, region.inputs, self.grid(region)[1]

        def store_codes(packed: Tensor) -> None:
            self.store_codes(region, unpack_int32(packed, bits, 0)[:inputs].T.to(torch.int16) - half)

        def store_zeros(packed: Tensor) -> None:
            zeros = (unpack_int32(packed, bits, 1)[:, :outputs].to(torch.int16) + offset) & mask
            self.store_scales(region, "zero", (zeros - half).T)

        def load_zeros() -> Tensor:
            zeros = self.load_scales(region, "zero").T.to(torch.int16) + half
            return pack_int32((zeros - offset) & mask, bits, 1)

        tensors = {
            "qweight": CheckpointTensor(
                ((-(-inputs * bits // 32), outputs),),
                (torch.int32,),
                store_codes,
                lambda: pack_int32(self.load_codes(region).T.to(torch.int16) + half, bits, 0),
            ),
            "qzeros": CheckpointTensor(((groups, -(-outputs * bits // 32)),), (torch.int32,), store_zeros, load_zeros),
            "scales": scale_tensor(self, region, ((groups, outputs),), transposed=True),
            "g_idx": (group_index if self.scheme.act_order else ordered_groups)(self, region),
        }
        if getattr(region.layer, "bias", None) is None:
            tensors["bias"] = CheckpointTensor(
                ((outputs,),), FLOATS, lambda bias: None, None, _not_zero, required=False
            )
        return tensors


class GptqWeight(GptqV2Weight):
    """The first version, whose `qzeros` are zero - 1."""

    zero_offset = 1


def _not_zero(bias: Tensor) -> str | None:
    return "is a bias that is not zero, of a layer that has none" if bool(bias.any()) else None

"""How a CPU's 4-bit weights lie in memory: as PyTorch's kernel reads them, or as the compiled one does.

Codes 0..15 are [N, K], scale and zero [N, K / 32]; the stored tensors are `packed` and `scales`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.cpu_library import cpu_kernels_loaded, int4_linear

GROUP = 32
LANES = 16  # rows of a block of the compiled kernel


class Int4Layout(Protocol):
    """A layout. Packing mixes the rows of a block only; `block_rows` rows are a block."""

    block_rows: int

    def scales_shape(self, rows: int, inputs: int) -> tuple[int, ...]:
        """Return the shape of the scales of a weight [rows, inputs], bfloat16."""
        ...

    def read_scales(self, scales: Tensor) -> Tensor:
        """Return the scale and the zero of each group: bfloat16 [N, K / 32, 2]."""
        ...

    def write_scales(self, scales: Tensor, row: int, values: Tensor) -> None:
        """Set the scales and zeros of some rows from `row` on, in place: values [rows, K / 32, 2]."""
        ...

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes, uint8 [N, K]: uint8 [N, K / 2]."""
        ...

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the codes, uint8 [N, K]."""
        ...

    def product(self, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """Return x Wᵀ + bias [T, N] of bfloat16 x [T, K]."""
        ...


class TorchLayout:
    """The layout of torch's _weight_int4pack_mm_for_cpu. It depends on the CPU; scales are [K / 32, N, 2]."""

    block_rows = 64  # 32 under AVX2

    def scales_shape(self, rows: int, inputs: int) -> tuple[int, ...]:
        return (inputs // GROUP, rows, 2)

    def read_scales(self, scales: Tensor) -> Tensor:
        return scales.transpose(0, 1)

    def write_scales(self, scales: Tensor, row: int, values: Tensor) -> None:
        scales.transpose(0, 1)[row : row + len(values)] = values

    def pack(self, codes: Tensor) -> Tensor:
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)

    def unpack(self, packed: Tensor) -> Tensor:
        # multiply with the identity: exact, the codes are small integers
        rows, inputs = packed.shape[0], 2 * packed.shape[1]
        scales = torch.zeros(self.scales_shape(rows, inputs), dtype=torch.bfloat16)
        scales[..., 0] = 1
        identity = torch.eye(inputs, dtype=torch.bfloat16)
        return self.product(identity, packed, scales, None).T.add(8).to(torch.uint8).contiguous()

    def product(self, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)
        return out if bias is None else out.add_(bias)


class CompiledLayout:
    """The layout of int4_linear in kernels/cpu_kernels.cpp, in the order in which it reads.

    Blocks of 16 rows, in each the groups, in each 4 times 8 inputs, of which a row has a 32-bit word: the codes of the
    even inputs in the low half, of the odd ones in the high half, from the lowest 4 bits on. Scales are
    [N / 16, K / 32, 16, 2].
    """

    block_rows = LANES

    def scales_shape(self, rows: int, inputs: int) -> tuple[int, ...]:
        return (rows // LANES, inputs // GROUP, LANES, 2)

    def read_scales(self, scales: Tensor) -> Tensor:
        return scales.transpose(1, 2).flatten(0, 1)

    def write_scales(self, scales: Tensor, row: int, values: Tensor) -> None:
        rows = torch.arange(row, row + len(values))
        scales.transpose(1, 2)[rows // LANES, rows % LANES] = values.to(scales.dtype)

    def pack(self, codes: Tensor) -> Tensor:
        rows, inputs = codes.shape
        # [block, row, 8 inputs, 2 bytes of the half, nibble, half] -> [block, 8 inputs, row, half, byte, nibble]
        parts = codes.view(rows // LANES, LANES, inputs // 8, 2, 2, 2).permute(0, 2, 1, 5, 3, 4)
        return (parts[..., 0] | parts[..., 1] << 4).reshape(rows, inputs // 2)

    def unpack(self, packed: Tensor) -> Tensor:
        rows, inputs = packed.shape[0], 2 * packed.shape[1]
        parts = packed.view(rows // LANES, inputs // 8, LANES, 2, 2)
        nibbles = torch.stack((parts & 15, parts >> 4), dim=-1)
        return nibbles.permute(0, 2, 1, 4, 5, 3).reshape(rows, inputs)

    def product(self, x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        return int4_linear(x, packed, scales, bias)


TORCH_LAYOUT, COMPILED_LAYOUT = TorchLayout(), CompiledLayout()


def int4_layout() -> Int4Layout:
    """Return the layout of this process: the compiled kernel's if it is loaded."""
    return COMPILED_LAYOUT if cpu_kernels_loaded() else TORCH_LAYOUT

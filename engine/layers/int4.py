"""Linear layers with 4-bit weights in groups of 32 inputs, for CPUs: weight = scale * (code - 8) + zero.

Weights are packed exactly from GGUF codes or quantised (lossy) from dense weights. Activations are bfloat16. Kernels
read scales and zeros in bfloat16 too, so a weight's error is at most 2^-9 of the magnitude of the scale and zero.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import ModelError
from engine.kernels.linear_weight import LinearWeight
from engine.layers.int4_layout import GROUP, TORCH_LAYOUT, Int4Layout, int4_layout
from engine.layers.weight_method import Stored, WeightMethod

ROW_MULTIPLE = 16

# The 4-bit kernels read a quarter of the bytes but multiply slowly: they are up to 4 times faster for few rows, while
# dense bfloat16 is faster for many, by 10 times at 512. A layer with a dense copy uses it above a number of rows, which
# is at least every decode bucket of the CPU default, so that all of those use the 4-bit kernel. The choice depends on
# the shape alone, so captured graphs stay valid. The two forms round differently (2^-9): with a larger max_num_seqs, a
# sequence's tokens can depend on whether its batch is above or below the limit.
DENSE_ABOVE = 16
"""Rows above which dense bfloat16 is used: PyTorch's kernel is slower from about a dozen rows on."""

COMPILED_DENSE_ABOVE = 64
"""The same for the compiled kernel, on CPUs without AMX."""


def default_dense_above() -> int:
    """Return the rows above which a layer with a dense copy uses it."""
    compiled = int4_layout() is not TORCH_LAYOUT and torch.cpu._is_avx512_bf16_supported()
    return COMPILED_DENSE_ABOVE if compiled and not torch.cpu._is_amx_tile_supported() else DENSE_ABOVE


def int4_available() -> bool:
    """Return whether this torch and CPU have a fast 4-bit kernel. Nothing is compiled if torch has one."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    return _computes(TORCH_LAYOUT) or (int4_layout() is not TORCH_LAYOUT and _computes(int4_layout()))


def _computes(layout: Int4Layout) -> bool:
    """Return whether the kernel of a layout runs here and gives the right product."""
    codes = torch.arange(ROW_MULTIPLE * GROUP).view(ROW_MULTIPLE, GROUP).remainder(16).to(torch.uint8)
    scale = torch.full((ROW_MULTIPLE, 1), 0.5, dtype=torch.float32)
    scales = torch.empty(layout.scales_shape(ROW_MULTIPLE, GROUP), dtype=torch.bfloat16)
    layout.write_scales(scales, 0, torch.stack((scale, scale), dim=-1))
    try:
        out = layout.product(torch.ones(1, GROUP, dtype=torch.bfloat16), layout.pack(codes), scales, None)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    expected = (scale * (codes.float() - 8) + scale).sum(dim=1)
    return bool(torch.equal(out[0].float(), expected))


def fits_int4(rows: int, inputs: int) -> bool:
    """Return whether the kernel supports a weight [rows, inputs]."""
    return rows % ROW_MULTIPLE == 0 and inputs % GROUP == 0


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise a dense weight [N, K], lossy; return codes uint8 [N, K], scale and zero float32 [N, K / 32].

    Each group's range is divided into 15 steps. Scale and zero are rounded to bfloat16 first, so that the codes are the
    nearest ones for the values that the kernel uses.
    """
    rows, inputs = weight.shape
    groups = weight.float().view(rows, inputs // GROUP, GROUP)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float()
    step = scale.where(scale > 0, torch.ones_like(scale))  # a group of equal values has code 8 and zero = value
    codes = ((groups - zero.unsqueeze(2)) / step.unsqueeze(2)).round_().add_(8).clamp_(0, 15)
    return codes.to(torch.uint8).view(rows, inputs), scale, zero


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Dequantise codes [N, K] with scale and zero [N, K / 32] to float32 [N, K]."""
    groups = codes.view(*scale.shape, GROUP).float() - 8
    return (groups * scale.float().unsqueeze(2) + zero.float().unsqueeze(2)).view(codes.shape)


class Int4Weight(WeightMethod):
    """4-bit W [outputs, inputs] on a CPU: the buffers `packed` and `scales` of a bfloat16 layer.

    With `keep_dense`, a bfloat16 copy of W, the parameter `weight`, computes calls with more than `dense_above` rows
    (default: default_dense_above()); otherwise the 4-bit kernel computes all calls.
    """

    def __init__(self, *, keep_dense: bool, dense_above: int | None = None):
        self.keep_dense = keep_dense
        self.dense_above = default_dense_above() if dense_above is None else dense_above

    def create(self, layer: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        if len(shape) != 2 or not fits_int4(*shape):
            raise ModelError(
                f"a weight of {' x '.join(map(str, shape))} can't be stored in 4 bits (rows must be a multiple of "
                f"{ROW_MULTIPLE}, inputs of {GROUP}, without experts); use cpu_weight_format='bf16'"
            )
        rows, inputs = shape
        layer.register_buffer("packed", torch.empty(rows, inputs // 2, dtype=torch.uint8))
        scales = torch.empty(int4_layout().scales_shape(rows, inputs), dtype=torch.bfloat16)
        layer.register_buffer("scales", scales)
        layer.weight = None
        if self.keep_dense:
            layer.weight = nn.Parameter(torch.empty(rows, inputs, dtype=torch.bfloat16), requires_grad=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        if layer.weight is not None and x.shape[0] > self.dense_above:
            return F.linear(x, layer.weight, bias)
        return int4_layout().product(x, layer.packed, layer.scales, bias)

    def linear_weight(self, layer: Any) -> LinearWeight:
        """Return the weight as kernels read it, in the layout of this process."""
        return LinearWeight(layer.packed, "cpu_int4", layer.scales)

    def slots(self, layer: Any, start: int, rows: int, expert: int | None = None) -> dict[str, Stored]:
        return {"weight": Stored(Int4Slot(layer, start, rows), 0, 1)}


def load_codes(layer: Any, codes: Tensor, scale: Tensor, zero: Tensor) -> None:
    """Set the whole 4-bit weight of a layer in place.

    codes uint8 [N, K] in 0..15, scale and zero [N, K / 32] of any float dtype.
    """
    _store(layer, 0, codes, scale, zero)


def load_dense(layer: Any, weight: Tensor, row: int = 0) -> None:
    """Quantise `weight` [rows, K] (lossy) into rows of a 4-bit layer starting at `row`, in place.

    Other rows are unchanged. With a dense copy, its rows get the dequantised weight, so that both kernels use the same
    values after an update.
    """
    _store(layer, row, *quantize(weight))


def _store(layer: Any, row: int, codes: Tensor, scale: Tensor, zero: Tensor) -> None:
    """Set rows of a 4-bit layer. Packing mixes rows within blocks: partial ones are read back and packed again."""
    layout, end, outputs = int4_layout(), row + codes.shape[0], layer.packed.shape[0]
    with torch.no_grad():
        if row % layout.block_rows == 0 and (end % layout.block_rows == 0 or end == outputs):
            layer.packed[row:end].copy_(layout.pack(codes))
        else:
            all_codes = layout.unpack(layer.packed)
            all_codes[row:end] = codes
            layer.packed.copy_(layout.pack(all_codes))
        layout.write_scales(layer.scales, row, torch.stack((scale, zero), dim=-1))
        if layer.weight is not None:
            layer.weight[row:end].copy_(dequantize(codes, scale, zero))


def unpack_codes(layer: Any) -> Tensor:
    """Return the codes of a layer, uint8 [N, K]."""
    return int4_layout().unpack(layer.packed)


def effective_weight(layer: Any) -> Tensor:
    """Return the weight that the 4-bit kernel uses, as a new float32 tensor [N, K]."""
    return dequantize(unpack_codes(layer), *int4_layout().read_scales(layer.scales).unbind(dim=-1))


class Int4Slot:
    """The slot of one checkpoint tensor in a 4-bit layer; like WeightSlot, but `write` quantises (lossy)."""

    dtype = torch.bfloat16

    def __init__(self, layer: Any, start: int, rows: int):
        self.layer, self.start, self.rows = layer, start, rows

    @property
    def shape(self) -> tuple[int, ...]:
        """The checkpoint tensor's shape."""
        return (self.rows, 2 * self.layer.packed.shape[1])

    def write(self, tensor: Tensor) -> None:
        """Quantise `tensor` into the storage in place; addresses don't change."""
        load_dense(self.layer, tensor.to(device="cpu"), self.start)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the part of a whole checkpoint tensor that is stored here: all of it."""
        return tensor

    def read(self) -> Tensor:
        """Return a dequantised bfloat16 copy of the weight in use."""
        return effective_weight(self.layer)[self.start : self.start + self.rows].bfloat16()

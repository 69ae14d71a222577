"""Linear layers with 4-bit weights in groups of 32 inputs, for CPUs: weight = scale * (code - 8) + zero.

Weights are packed exactly from GGUF codes or quantised (lossy) from dense weights. Activations are bfloat16. The kernel
needs scales and zeros in bfloat16 too, so a weight's error is at most 2^-9 of the magnitude of the scale and zero.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import ModelError
from engine.kernels.linear_weight import LinearWeight
from engine.layers.weight_method import Stored, WeightMethod

GROUP = 32
ROW_MULTIPLE = 16
_PACK_BLOCK_ROWS = 64  # blocks of this many rows are packed independently (32 under AVX2)

# The 4-bit kernel reads a quarter of the bytes but multiplies slowly: it is up to 4 times faster for few rows, while
# dense bfloat16 is faster from about a dozen rows, by 10 times at 512. A layer with a dense copy uses it above this
# many rows, which exceeds every decode bucket of the CPU default, so that all of those use the 4-bit kernel. The choice
# depends on the shape alone, so captured graphs stay valid. The two forms round differently (2^-9): with a larger
# max_num_seqs, a sequence's tokens can depend on whether its batch is above or below the limit.
DENSE_ABOVE = 16


def int4_available() -> bool:
    """Return whether this torch and CPU have a fast 4-bit kernel, by running it once."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    codes = torch.arange(ROW_MULTIPLE * GROUP).view(ROW_MULTIPLE, GROUP).remainder(16).to(torch.uint8)
    scale = torch.full((ROW_MULTIPLE, 1), 0.5, dtype=torch.float32)
    try:
        out = _int4_product(torch.ones(1, GROUP, dtype=torch.bfloat16), pack_codes(codes), pack_scales(scale, scale))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    expected = (scale * (codes.float() - 8) + scale).sum(dim=1)
    return bool(torch.equal(out[0].float(), expected))


def fits_int4(rows: int, inputs: int) -> bool:
    """Return whether the kernel supports a weight [rows, inputs]."""
    return rows % ROW_MULTIPLE == 0 and inputs % GROUP == 0


def pack_codes(codes: Tensor) -> Tensor:
    """Pack codes 0..15, uint8 [N, K], in the kernel's layout: uint8 [N, K / 2]."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)


def pack_scales(scale: Tensor, zero: Tensor) -> Tensor:
    """Pack scale and zero [N, K / 32] in the kernel's layout: bfloat16 [K / 32, N, 2]."""
    return torch.stack((scale, zero), dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()


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


def _int4_product(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)


class Int4Weight(WeightMethod):
    """4-bit W [outputs, inputs] on a CPU: the buffers `packed` and `scales` of a bfloat16 layer.

    With `keep_dense`, a bfloat16 copy of W, the parameter `weight`, computes calls with more than `dense_above` rows;
    otherwise the 4-bit kernel computes all calls.
    """

    def __init__(self, *, keep_dense: bool, dense_above: int = DENSE_ABOVE):
        self.keep_dense, self.dense_above = keep_dense, dense_above

    def create(self, layer: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        if len(shape) != 2 or not fits_int4(*shape):
            raise ModelError(
                f"a weight of {' x '.join(map(str, shape))} can't be stored in 4 bits (rows must be a multiple of "
                f"{ROW_MULTIPLE}, inputs of {GROUP}, without experts); use cpu_weight_format='bf16'"
            )
        rows, inputs = shape
        layer.register_buffer("packed", torch.empty(rows, inputs // 2, dtype=torch.uint8))
        layer.register_buffer("scales", torch.empty(inputs // GROUP, rows, 2, dtype=torch.bfloat16))
        layer.weight = None
        if self.keep_dense:
            layer.weight = nn.Parameter(torch.empty(rows, inputs, dtype=torch.bfloat16), requires_grad=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        if layer.weight is not None and x.shape[0] > self.dense_above:
            return F.linear(x, layer.weight, bias)
        out = _int4_product(x, layer.packed, layer.scales)
        return out if bias is None else out.add_(bias)

    def linear_weight(self, layer: Any) -> LinearWeight:
        """Return the weight as kernels read it, in the layouts of `pack_codes` and `pack_scales`."""
        return LinearWeight(layer.packed, "cpu_int4", layer.scales)

    def slots(self, layer: Any, start: int, rows: int, expert: int | None = None) -> dict[str, Stored]:
        return {"weight": Stored(Int4Slot(layer, start, rows), 0, 1)}


def load_codes(layer: Any, codes: Tensor, scale: Tensor, zero: Tensor) -> None:
    """Set the whole 4-bit weight of a layer in place.

    codes uint8 [N, K] in 0..15, scale and zero [N, K / 32] of any float dtype.
    """
    with torch.no_grad():
        layer.packed.copy_(pack_codes(codes))
        layer.scales.copy_(pack_scales(scale, zero))
        if layer.weight is not None:
            layer.weight.copy_(dequantize(codes, scale, zero))


def load_dense(layer: Any, weight: Tensor, row: int = 0) -> None:
    """Quantise `weight` [rows, K] (lossy) into rows of a 4-bit layer starting at `row`, in place.

    Other rows are unchanged. Packing interleaves rows within blocks of 64. If the rows don't cover whole blocks, all
    codes are read back and repacked.
    """
    end, outputs = row + weight.shape[0], layer.packed.shape[0]
    with torch.no_grad():
        codes, scale, zero = quantize(weight)
        if row % _PACK_BLOCK_ROWS == 0 and (end % _PACK_BLOCK_ROWS == 0 or end == outputs):
            layer.packed[row:end].copy_(pack_codes(codes))
        else:
            all_codes = unpack_codes(layer)
            all_codes[row:end] = codes
            layer.packed.copy_(pack_codes(all_codes))
        layer.scales[:, row:end].copy_(pack_scales(scale, zero))
        if layer.weight is not None:
            # store the dequantised weight, so that both kernels use the same values after an update
            layer.weight[row:end].copy_(dequantize(codes, scale, zero))


def unpack_codes(layer: Any) -> Tensor:
    """Return the codes of a layer, uint8 [N, K], by multiplying with the identity (exact: they are small integers)."""
    ones, zeros = torch.ones_like(layer.scales[..., 0]).T, torch.zeros_like(layer.scales[..., 0]).T
    identity = torch.eye(2 * layer.packed.shape[1], dtype=torch.bfloat16)
    return _int4_product(identity, layer.packed, pack_scales(ones, zeros)).T.add(8).to(torch.uint8).contiguous()


def effective_weight(layer: Any) -> Tensor:
    """Return the weight that the 4-bit kernel uses, as a new float32 tensor [N, K]."""
    return dequantize(unpack_codes(layer), layer.scales[..., 0].T, layer.scales[..., 1].T)


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

"""Linear layers with 4-bit weights in groups of 32 inputs, for CPUs: weight = scale * (code - 8) + zero.

Weights are packed exactly from GGUF codes or quantised (lossy) from dense weights. Activations are bfloat16. The kernel
needs scales and zeros in bfloat16 too, so a weight's error is at most 2^-9 of the magnitude of the scale and zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import ModelError
from engine.kernels.linear_weight import LinearWeight
from engine.layers.weight_slot import Slot, WeightSlot

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
    scale = torch.full((ROW_MULTIPLE, 1), 0.5)
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


class Int4Linear(nn.Module):
    """Linear layer y = x Wᵀ + b with 4-bit W [sum of rows, inputs]; x and y are bfloat16, `parts` as in layers.Linear.

    Storage is allocated here, uninitialised, and only written in place afterwards, so addresses never change. With
    `keep_dense`, a bfloat16 copy of W computes calls with more than `dense_above` rows; otherwise the 4-bit kernel
    computes all calls. Raises ModelError for a shape that `fits_int4` rejects.
    """

    packed: Tensor
    scales: Tensor

    def __init__(
        self, parts: dict[str, int], inputs: int, *, bias: bool, keep_dense: bool, dense_above: int = DENSE_ABOVE
    ):
        super().__init__()
        self.parts, self.inputs, self.outputs = dict(parts), inputs, sum(parts.values())
        if not fits_int4(self.outputs, inputs):
            raise ModelError(
                f"a weight of {self.outputs} x {inputs} can't be stored in 4 bits (rows must be a multiple of "
                f"{ROW_MULTIPLE}, inputs of {GROUP}); use --cpu-weight-format bf16"
            )
        self.dense_above = dense_above
        self.register_buffer("packed", torch.empty(self.outputs, inputs // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(inputs // GROUP, self.outputs, 2, dtype=torch.bfloat16))
        self.weight = self.bias = None
        if keep_dense:
            self.weight = nn.Parameter(torch.empty(self.outputs, inputs, dtype=torch.bfloat16), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.empty(self.outputs, dtype=torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is not None and x.shape[0] > self.dense_above:
            return F.linear(x, self.weight, self.bias)
        out = _int4_product(x, self.packed, self.scales)
        return out if self.bias is None else out.add_(self.bias)

    @property
    def linear_weight(self) -> LinearWeight:
        """The weight as kernels read it, in the layouts of `pack_codes` and `pack_scales`."""
        return LinearWeight(self.packed, "int4", self.scales)

    def load_codes(self, codes: Tensor, scale: Tensor, zero: Tensor) -> None:
        """Set the whole weight in place: codes uint8 [N, K] in 0..15, scale and zero [N, K / 32] of any float dtype."""
        with torch.no_grad():
            self.packed.copy_(pack_codes(codes))
            self.scales.copy_(pack_scales(scale, zero))
            if self.weight is not None:
                self.weight.copy_(dequantize(codes, scale, zero))

    def load_dense(self, weight: Tensor, row: int = 0) -> None:
        """Quantise `weight` [rows, K] (lossy) into rows starting at `row`, in place; other rows are unchanged.

        Packing interleaves rows within blocks of 64. If a part of a fused layer doesn't cover whole blocks, all codes
        are read back and repacked.
        """
        end = row + weight.shape[0]
        with torch.no_grad():
            codes, scale, zero = quantize(weight)
            if row % _PACK_BLOCK_ROWS == 0 and (end % _PACK_BLOCK_ROWS == 0 or end == self.outputs):
                self.packed[row:end].copy_(pack_codes(codes))
            else:
                all_codes = self.codes()
                all_codes[row:end] = codes
                self.packed.copy_(pack_codes(all_codes))
            self.scales[:, row:end].copy_(pack_scales(scale, zero))
            if self.weight is not None:
                # store the dequantised weight, so that both kernels use the same values after an update
                self.weight[row:end].copy_(dequantize(codes, scale, zero))

    def codes(self) -> Tensor:
        """Return the codes, uint8 [N, K], by multiplying with the identity (exact, as they are small integers)."""
        ones, zeros = torch.ones_like(self.scales[..., 0]).T, torch.zeros_like(self.scales[..., 0]).T
        identity = torch.eye(self.inputs, dtype=torch.bfloat16)
        return _int4_product(identity, self.packed, pack_scales(ones, zeros)).T.add(8).to(torch.uint8).contiguous()

    def effective_weight(self) -> Tensor:
        """Return the weight that the 4-bit kernel uses, as a new float32 tensor [N, K]."""
        return dequantize(self.codes(), self.scales[..., 0].T, self.scales[..., 1].T)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Map Hugging Face names to row ranges of the fused storage."""
        slots: dict[str, Slot] = {}
        start = 0
        for name, rows in self.parts.items():
            slots[f"{prefix}.{name}.weight"] = Int4Slot(self, start, rows)
            if self.bias is not None:
                slots[f"{prefix}.{name}.bias"] = WeightSlot(self.bias, start, rows)
            start += rows
        return slots

    def extra_repr(self) -> str:
        used_for = f"up to {self.dense_above} rows" if self.weight is not None else "always"
        return f"{self.inputs} -> {self.outputs}, 4-bit {used_for}"


class Int4Slot:
    """The slot of one checkpoint tensor in an Int4Linear; like WeightSlot, but `write` quantises (lossy)."""

    dtype = torch.bfloat16

    def __init__(self, layer: Int4Linear, start: int, rows: int):
        self.layer, self.start, self.rows = layer, start, rows

    @property
    def shape(self) -> tuple[int, ...]:
        """The checkpoint tensor's shape."""
        return (self.rows, self.layer.inputs)

    def write(self, tensor: Tensor) -> None:
        """Quantise `tensor` into the storage in place; addresses don't change."""
        self.layer.load_dense(tensor.to(device="cpu"), self.start)

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the part of a whole checkpoint tensor that is stored here: all of it."""
        return tensor

    def read(self) -> Tensor:
        """Return a dequantised bfloat16 copy of the weight in use."""
        return self.layer.effective_weight()[self.start : self.start + self.rows].bfloat16()

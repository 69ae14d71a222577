"""Linear layers with 4-bit weights in groups of 32 inputs, for CPUs: weight = scale * (code - 8) + zero.

Owns the packed form, its exact filling from GGUF codes, the lossy quantisation of dense weights, and which kernel a
call takes. Knows no file. Activations are bfloat16; scales and zeros are kept in bfloat16 too, as the kernel wants
them, so the weights differ from the exact ones by at most 2^-9 of the scale's and the zero's size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import ModelError
from engine.layers.weight_slot import WeightSlot

GROUP = 32
ROW_MULTIPLE = 16
_PACK_BLOCK_ROWS = 64  # blocks of this many rows pack independently of each other (32 under AVX2)

# The 4-bit kernel reads a quarter of the bytes but multiplies slowly: at few rows it wins by up to 4 times, from a
# dozen rows on dense bfloat16 does, by 10 times at 512 rows. A layer that keeps a dense copy takes it for more rows
# than these, which is above every decode bucket of the CPU's default: all of those use one form. The choice depends on
# the shape alone, so a captured graph stays right; the two forms are rounded differently (2^-9), so with a larger
# max_num_seqs a sequence's tokens can depend on which side of the bound its batch is.
DENSE_ABOVE = 16


def int4_available() -> bool:
    """Whether this torch and CPU have the 4-bit kernel in a fast form, checked by running it once."""
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
    """Whether the kernel takes a weight [rows, inputs]."""
    return rows % ROW_MULTIPLE == 0 and inputs % GROUP == 0


def pack_codes(codes: Tensor) -> Tensor:
    """Codes 0..15, uint8 [N, K], in the kernel's own order: uint8 [N, K / 2]."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)


def pack_scales(scale: Tensor, zero: Tensor) -> Tensor:
    """Scale and zero [N, K / 32] as the kernel reads them: bfloat16 [K / 32, N, 2]."""
    return torch.stack((scale, zero), dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nearest codes of a dense weight [N, K], lossy: (codes uint8 [N, K], scale, zero float32 [N, K / 32]).

    Each group's range is cut into 15 steps. Scale and zero are rounded to bfloat16 before the codes are chosen, so that
    the codes are the nearest for the numbers that are used.
    """
    rows, inputs = weight.shape
    groups = weight.float().view(rows, inputs // GROUP, GROUP)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (low + 8 * scale).bfloat16().float()
    step = scale.where(scale > 0, torch.ones_like(scale))  # a group of equal values: code 8, the zero says it all
    codes = ((groups - zero.unsqueeze(2)) / step.unsqueeze(2)).round_().add_(8).clamp_(0, 15)
    return codes.to(torch.uint8).view(rows, inputs), scale, zero


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Float32 [N, K] from codes [N, K] and scale, zero [N, K / 32]."""
    groups = codes.view(*scale.shape, GROUP).float() - 8
    return (groups * scale.float().unsqueeze(2) + zero.float().unsqueeze(2)).view(codes.shape)


def _int4_product(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)


class Int4Linear(nn.Module):
    """y = x Wᵀ + b with W [sum of rows, inputs] in 4 bits; x and y bfloat16, `parts` as in layers.Linear.

    All storage is allocated here, uninitialised, and filled in place ever after: addresses are fixed for life. With
    `keep_dense` a bfloat16 copy of W serves calls of more than `dense_above` rows; without, 4 bits serve all.
    Raises ModelError for a shape that `fits_int4` refuses.
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
                f"a weight of {self.outputs} x {inputs} can't be kept in 4 bits (rows in multiples of "
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

    def load_codes(self, codes: Tensor, scale: Tensor, zero: Tensor) -> None:
        """Fill the whole weight: codes uint8 [N, K] in 0..15, scale and zero [N, K / 32] of any floating dtype."""
        with torch.no_grad():
            self.packed.copy_(pack_codes(codes))
            self.scales.copy_(pack_scales(scale, zero))
            if self.weight is not None:
                self.weight.copy_(dequantize(codes, scale, zero))

    def load_dense(self, weight: Tensor, row: int = 0) -> None:
        """Quantise `weight` [rows, K] (lossy) into rows row.. in place; the other rows keep their bits.

        The packed order mixes rows within blocks of 64. Where a part of a fused layer doesn't fill whole blocks, all
        codes are read back first.
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
                # what the 4-bit form computes, so that short and long calls agree about an updated weight
                self.weight[row:end].copy_(dequantize(codes, scale, zero))

    def codes(self) -> Tensor:
        """The codes as uint8 [N, K], read back by a product with the identity (exact: they are small whole numbers)."""
        ones, zeros = torch.ones_like(self.scales[..., 0]).T, torch.zeros_like(self.scales[..., 0]).T
        identity = torch.eye(self.inputs, dtype=torch.bfloat16)
        return _int4_product(identity, self.packed, pack_scales(ones, zeros)).T.add(8).to(torch.uint8).contiguous()

    def effective_weight(self) -> Tensor:
        """Float32 [N, K], a fresh tensor: the weight the 4-bit kernel computes with."""
        return dequantize(self.codes(), self.scales[..., 0].T, self.scales[..., 1].T)

    def slots(self, prefix: str) -> dict[str, WeightSlot | Int4Slot]:
        """Hugging Face's names to row ranges of the fused storage."""
        slots: dict[str, WeightSlot | Int4Slot] = {}
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
    """The home of one checkpoint tensor in an Int4Linear; as WeightSlot, but writing quantises (lossy)."""

    dtype = torch.bfloat16

    def __init__(self, layer: Int4Linear, start: int, rows: int):
        self.layer, self.start, self.rows = layer, start, rows

    @property
    def shape(self) -> tuple[int, ...]:
        """The checkpoint tensor's shape."""
        return (self.rows, self.layer.inputs)

    def write(self, tensor: Tensor) -> None:
        """Quantise `tensor` in place, every group to its own range; the storage's address stays."""
        self.layer.load_dense(tensor.to(device="cpu"), self.start)

    def read(self) -> Tensor:
        """The weight that is computed with, dequantised: a copy."""
        return self.layer.effective_weight()[self.start : self.start + self.rows].bfloat16()

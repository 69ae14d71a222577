"""Storage and arithmetic of quantised weights: W = (code - zero) * scale, with scales that blocks of W share.

All formats share this storage, whatever their checkpoints look like, so a kernel needs one layout per element. Each
format's file says how its checkpoint tensors become codes, scales and zeros.

Arithmetic is weight-only but for one case: scales for activations in a checkpoint are checked and not used. On a GPU
with few rows, a kernel multiplies the codes themselves (engine/kernels/quantized_gemm.py); with many rows, where a
checkpoint's scheme has `dynamic_activations`, a kernel multiplies fp8 codes with activations in fp8. Otherwise a step
dequantises a tile of W in float32, rounds it once to the dtype of its activations, and multiplies. All is computed at
fixed addresses without host reads: a step can be captured.

Shapes: N outputs, K inputs, [r, c] the rows and columns that share a scale in storage.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.checkpoint.quantization import WeightScheme
from engine.errors import ModelError
from engine.kernels.launch import fits
from engine.kernels.linear_weight import CODES_PER_BYTE, LinearWeight
from engine.layers.formats.elements import ELEMENTS
from engine.layers.formats.region import CheckpointTensor, Region
from engine.layers.formats.slots import CheckpointSlot
from engine.layers.plain_linear import linear
from engine.layers.weight_method import Stored, WeightMethod

TILE_ELEMENTS = 1 << 24
"""A step dequantises at most about this many weights at once: 96 MiB in float32 and 16 bits."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (*FLOATS, torch.float8_e8m0fnu)


class ScaledWeight(WeightMethod):
    """W as the buffers `codes`, `scale`, and, where the scheme has them, `zero` and `group_of`.

    - codes [N, K / codes per byte], scale and zero [N / r, K / c]; each with the experts first, if there are any.
    - group_of int32 [parts, K]: the group of each column, for a scheme with `act_order`; scale and zero then have a
      column per group.
    - r and c divide the scheme's block and the sizes of the parts, so a part and a rank may begin within a block.

    `parts` are the outputs of the layer's checkpoint matrices on this rank; `ranks` is the number of tensor-parallel
    ranks.
    """

    def __init__(self, scheme: WeightScheme, parts: Mapping[str, int], ranks: int):
        self.scheme, self.element = scheme, ELEMENTS[scheme.element]
        self._parts, self._ranks = tuple(parts.values()), ranks

    # ---- the format's part -----------------------------------------------------------------------------------------

    @abstractmethod
    def checkpoint_tensors(self, region: Region) -> dict[str, CheckpointTensor]:
        """Map the last part of checkpoint names to the tensors of a matrix."""

    # ---- storage ---------------------------------------------------------------------------------------------------

    def create(self, layer: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        lead, (outputs, inputs) = shape[:-2], shape[-2:]
        element, (block_rows, block_columns) = self.element, self.scheme.block
        if inputs % element.per_byte:
            raise ModelError(
                f"a weight of {outputs} x {inputs} can't be stored as {element.name}, whose rows must be a multiple of "
                f"{element.per_byte}: use another format"
            )
        parts = self._parts if sum(self._parts) == outputs else (outputs,)
        layer.weight_shape, layer.weight_dtype = shape, dtype
        layer.scale_rows = math.gcd(block_rows or outputs, *parts)
        layer.scale_columns = inputs if block_columns is None else math.gcd(block_columns, inputs)
        groups = inputs // layer.scale_columns
        if not self.scheme.act_order:
            layer.group_of = layer.part_of_row = None
        else:
            assert block_columns is not None and block_rows == 1
            groups = -(-inputs * self._ranks // block_columns)  # ranks that split the inputs may need all of them
            layer.register_buffer("group_of", torch.zeros(*lead, len(parts), inputs, dtype=torch.int32, device=device))
            part_of_row = [part for part, rows in enumerate(parts) for _ in range(rows)]
            layer.register_buffer("part_of_row", torch.tensor(part_of_row, device=device))
            layer.part_starts = [sum(parts[:index]) for index in range(len(parts) + 1)]
        scales = (*lead, outputs // layer.scale_rows, groups)
        columns = inputs // element.per_byte
        layer.register_buffer("codes", torch.empty(*lead, outputs, columns, dtype=element.stored, device=device))
        layer.register_buffer("scale", torch.empty(scales, dtype=element.scale_dtype, device=device))
        if self.scheme.symmetric:
            layer.zero = None
        else:
            layer.register_buffer("zero", torch.empty(scales, dtype=element.zero_dtype, device=device))
        layer.weight = None

    def linear_weight(self, layer: Any) -> LinearWeight:
        return LinearWeight(
            layer.codes,
            self.element.name,
            layer.scale,
            layer.zero,
            layer.group_of,
            layer.part_of_row,
            self.scheme.dynamic_activations,
        )

    # ---- arithmetic ------------------------------------------------------------------------------------------------

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        outputs, inputs = layer.weight_shape
        kernels = self._kernels(x.device)
        if kernels is not None and kernels.multiplies(x, self.linear_weight(layer)):
            return kernels.multiply(x, self.linear_weight(layer), bias)
        tile = max(1, TILE_ELEMENTS // (inputs * layer.scale_rows)) * layer.scale_rows
        if tile >= outputs:
            return linear(x, self.dense(layer, x.dtype), bias)
        tiles = [
            linear(x, self.dense(layer, x.dtype, first, min(first + tile, outputs)))
            for first in range(0, outputs, tile)
        ]
        out = torch.cat(tiles, dim=1)
        return out if bias is None else out.add_(bias)

    def dense(self, layer: Any, dtype: torch.dtype, first: int = 0, end: int | None = None) -> Tensor:
        """Return rows [first, end) of W dequantised, a new tensor [..., end - first, K].

        `first` and `end` are multiples of the rows that share a scale, or the end of W.
        """
        (*lead, outputs, inputs), step = layer.weight_shape, layer.scale_rows
        end = outputs if end is None else end
        kernels = self._kernels(layer.codes.device)
        if kernels is not None and not lead:
            return kernels.dequantize(self.linear_weight(layer), inputs, dtype, first, end)
        if kernels is not None and layer.group_of is None and (first, end) == (0, outputs):
            rows = math.prod(lead) * outputs
            return kernels.dequantize(self.linear_weight(layer), inputs, dtype, 0, rows).view(layer.weight_shape)
        values = self.element.decode(layer.codes[..., first:end, :])
        scale = self.element.decode_scale(layer.scale[..., first // step : end // step, :])
        zero = None if layer.zero is None else layer.zero[..., first // step : end // step, :]
        if layer.group_of is None:
            blocks = values.unflatten(-1, (-1, layer.scale_columns)).unflatten(-3, (-1, step))
            if zero is not None:
                blocks = blocks.sub_(zero[..., :, None, :, None])
            blocks.mul_(scale[..., :, None, :, None])
        else:
            columns = layer.group_of.index_select(-2, layer.part_of_row[first:end]).long()
            if zero is not None:
                values.sub_(zero.gather(-1, columns))
            values.mul_(scale.gather(-1, columns))
        return values.to(dtype)

    def _kernels(self, device: torch.device) -> ModuleType | None:
        """Return the module of the kernels for these codes; None if there are none, or this device can't run them."""
        if device.type != "cuda" or self.element.name not in CODES_PER_BYTE or not fits(device):
            return None
        from engine.kernels import quantized_gemm  # triton is installed only with CUDA

        return quantized_gemm

    # ---- checkpoint tensors ----------------------------------------------------------------------------------------

    def slots(self, layer: Any, start: int, rows: int, expert: int | None = None) -> dict[str, Stored]:
        region = self.region(layer, start, rows, expert)
        return {name: Stored(CheckpointSlot(self, region, name), 0, 1) for name in self.checkpoint_tensors(region)}

    def region(self, layer: Any, start: int, rows: int, expert: int | None) -> Region:
        """Return the region of a checkpoint's matrix that one rank stores whole.

        Raises ModelError for rows that begin or end within a block of scales of the storage.
        """
        if start % layer.scale_rows or rows % layer.scale_rows:
            raise ModelError(
                f"rows {start} to {start + rows} of a {self.element.name} weight begin or end within a block of "
                f"{layer.scale_rows} rows that share a scale: they can't be stored apart"
            )
        inputs = layer.weight_shape[-1]
        return Region(layer, expert, start, rows, inputs, outputs=rows, inputs=inputs)

    def blocks(self, region: Region) -> tuple[int, int]:
        """Return the rows and columns of the whole matrix that share a scale in the checkpoint."""
        rows, columns = self.scheme.block
        return rows or region.outputs, columns or region.inputs

    def grid(self, region: Region) -> tuple[int, int]:
        """Return the shape of the checkpoint's scales, [row blocks, column blocks]."""
        rows, columns = self.blocks(region)
        return -(-region.outputs // rows), -(-region.inputs // columns)

    def store_codes(self, region: Region, codes: Tensor) -> None:
        """Write this rank's part of the codes of a whole matrix, [outputs, inputs] as `Element.pack` takes them."""
        self._rows(region, region.layer.codes).copy_(self.element.pack(region.narrow(codes)))

    def load_codes(self, region: Region) -> Tensor:
        """Return the codes of this rank's part, as `store_codes` takes them."""
        return self.element.unpack(self._rows(region, region.layer.codes))

    def store_scales(self, region: Region, name: str, values: Tensor) -> None:
        """Write this rank's part of the scales (`name` "scale") or zeros ("zero") of a matrix, [row, column blocks]."""
        layer, values = region.layer, values.to(getattr(region.layer, name).device)
        rows, columns = self.blocks(region)
        steps = torch.arange(region.first_output, region.first_output + region.rows, layer.scale_rows)
        part = values.index_select(0, (steps // rows).to(values.device))
        if layer.group_of is None:
            steps = torch.arange(region.first_input, region.first_input + region.columns, layer.scale_columns)
            part = part.index_select(1, (steps // columns).to(values.device))
        target = self._blocks_of(region, getattr(layer, name))
        target[:, : part.shape[1]].copy_(part)

    def load_scales(self, region: Region, name: str) -> Tensor:
        """Return the scales or zeros of the blocks that this rank's part of a matrix touches, [rows, columns]."""
        layer, stored = region.layer, self._blocks_of(region, getattr(region.layer, name))
        block_rows, block_columns = self.blocks(region)
        stored = stored.index_select(0, _steps(region.first_output, region.rows, block_rows, layer.scale_rows, stored))
        if layer.group_of is not None:
            return stored[:, : self.grid(region)[1]]
        columns = _steps(region.first_input, region.columns, block_columns, layer.scale_columns, stored)
        return stored.index_select(1, columns)

    def store_groups(self, region: Region, groups: Tensor) -> None:
        """Write this rank's part of the group of each column, [inputs]."""
        part = groups.narrow(0, region.first_input, region.columns)
        self._groups_of(region).copy_(part.to(torch.int32).expand_as(self._groups_of(region)))

    def load_groups(self, region: Region) -> Tensor:
        """Return the group of each column of this rank's part."""
        return self._groups_of(region)[0]

    def _rows(self, region: Region, storage: Tensor) -> Tensor:
        return (storage if region.expert is None else storage[region.expert]).narrow(0, region.start, region.rows)

    def _blocks_of(self, region: Region, storage: Tensor) -> Tensor:
        step = region.layer.scale_rows
        storage = storage if region.expert is None else storage[region.expert]
        return storage.narrow(0, region.start // step, region.rows // step)

    def _groups_of(self, region: Region) -> Tensor:
        """Return the rows of `group_of` of the parts within the region."""
        layer, end = region.layer, region.start + region.rows
        storage = layer.group_of if region.expert is None else layer.group_of[region.expert]
        inside = [index for index, first in enumerate(layer.part_starts[:-1]) if region.start <= first < end]
        return storage[inside[0] : inside[-1] + 1]

    # ---- plain tensors ---------------------------------------------------------------------------------------------

    def store_plain(self, region: Region, weight: Tensor) -> None:
        """Quantise a plain matrix [outputs, inputs] and write this rank's part in place.

        The scales are computed from the whole matrix, so all numbers of ranks store the same values.
        """
        weight = weight.to(region.layer.codes.device, torch.float32)
        codes, scale, zero = self.quantize(weight)
        self.store_codes(region, codes)
        self.store_scales(region, "scale", scale)
        if zero is not None:
            self.store_scales(region, "zero", zero)
        if region.layer.group_of is not None:
            columns = torch.arange(region.inputs, device=weight.device)
            self.store_groups(region, columns // self.blocks(region)[1])

    def load_plain(self, region: Region) -> Tensor:
        """Return this rank's part of the dequantised matrix, in the layer's dtype."""
        dense = self.dense(region.layer, region.layer.weight_dtype)
        return self._rows(region, dense)

    def quantize(
        self, weight: Tensor, scale_dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Quantise a matrix, float32 [O, I]: codes [O, I], scales and zeros (None if symmetric) of its blocks.

        Scales are float32, with values that `scale_dtype` can hold.
        """
        outputs, inputs = weight.shape
        rows, columns = self.scheme.block
        rows, columns = rows or outputs, columns or inputs
        padded = F.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        codes, scale, zero = self.element.quantize(blocks, self.scheme.symmetric, scale_dtype)
        return codes.flatten(2, 3).flatten(0, 1)[:outputs, :inputs], scale, zero


def _steps(first: int, length: int, block: int, step: int, like: Tensor) -> Tensor:
    """Return, for each block that [first, first + length) touches, the index of a stored step within it."""
    blocks = range(first // block, -(-(first + length) // block))
    return torch.tensor([(max(index * block, first) - first) // step for index in blocks], device=like.device)


# ---- checks of values ------------------------------------------------------------------------------------------------


def not_finite(tensor: Tensor) -> str | None:
    """Return what is wrong with scales: NaN or infinity."""
    return None if bool(torch.isfinite(tensor.float()).all()) else "contains NaN or infinity"


def scale_tensor(
    method: ScaledWeight, region: Region, shapes: tuple[tuple[int, ...], ...], transposed: bool = False
) -> CheckpointTensor:
    """Return the scales of a matrix: [row blocks, column blocks] in any of `shapes`; `transposed`: columns first."""
    grid = method.grid(region)

    def store(tensor: Tensor) -> None:
        values = tensor.float()
        method.store_scales(region, "scale", values.T if transposed else values.reshape(grid))

    def load() -> Tensor:
        found = method.element.decode_scale(method.load_scales(region, "scale"))
        if transposed:
            return found.T.contiguous()
        return found.reshape(shapes[0]) if found.shape == grid else found

    return CheckpointTensor(shapes, SCALES, store, load, not_finite)


def unused(*shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = FLOATS) -> CheckpointTensor:
    """Return a tensor of a checkpoint that weight-only arithmetic doesn't use, such as a scale of activations."""
    return CheckpointTensor(shapes, dtypes, lambda tensor: None, None, not_finite, required=False)

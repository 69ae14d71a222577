"""Linear layers with quantised weights on CUDA: a GEMM that converts codes in registers, for few rows; else cuBLAS.

The weight is read in its own bytes, activations stay in 16 bits, and sums are float32. Above MAX_ROWS rows, tiles of
the weight are dequantised one after the other to scratch of at most TILE_WEIGHTS numbers, which cuBLAS multiplies: no
weight ever has a plain copy. Device code: quantized_gemm_kernels.py, and on Hopper GPUs quantized_ring_kernels.py and
quantized_stream_kernels.py. Imports triton: import this module only on CUDA (or under TRITON_INTERPRET=1).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.launch import SHARED_BYTES, cdiv, has_gluon, launch_options, next_power_of_2, overlaps
from engine.kernels.linear_weight import CODES_PER_BYTE, PACKED_COLUMNS, LinearWeight
from engine.kernels.quantized_gemm_kernels import dequantize_kernel, fp8_kernel, quantize_rows_kernel, quantized_kernel
from engine.kernels.small_batch_gemm import NUM_SMS, Scratch, finish_activation, rms_norm

FORMATS = tuple(CODES_PER_BYTE)
"""Weight formats that `linear` supports."""

MAX_ROWS = 128
"""GEMMs of more rows go to cuBLAS."""

STREAM_ROWS = 8
"""GEMMs of at most as many rows may use the kernel of quantized_stream_kernels.py: see `gluon_config`."""

STREAM_FORMATS = ("fp8", "int8", "int4")

RING_REGISTERS = {1: (168, 240), 2: (80, 104)}
"""Registers per thread of quantized_ring_kernels.py by programs per SM: on average, and of its second warpgroup."""

PREFETCHED_LINES = 2
"""Lines of 128 bytes per row of codes. On an H100, a step of one row of Llama-3.1-8B's shape took 4.69 ms in fp8 and
3.22 ms in int4, 4.79 and 3.56 ms without, 4.64 and 3.71 ms with four lines."""

TILE_OUTPUTS = 64
WIDE_ROWS = 64
"""From more rows on, a program computes all of them with 2 x TILE_OUTPUTS outputs: codes are converted once, and x is
read from the L2 cache half as often."""

TILE_WEIGHTS = 1 << 24
"""The most weights that are dequantised at once: 32 MiB in 16 bits, which stay in the L2 cache until they are read."""


class LaunchConfig(NamedTuple):
    """Launch configuration.

    Rows per tile, outputs per tile, bytes of codes per step, split-K, warps, stages, and how many lines of 128 bytes of
    each row of codes a program prefetches to the L2 cache while the previous kernel still runs.
    """

    tile_rows: int
    tile_outputs: int
    step_bytes: int
    splits: int
    warps: int
    stages: int
    lines: int = 0


class StreamConfig(NamedTuple):
    """Launch configuration of quantized_stream_kernels.py: rows, outputs per program, and warps, which share K."""

    tile_rows: int
    tile_outputs: int
    warps: int


class RingConfig(NamedTuple):
    """Launch configuration of quantized_ring_kernels.py.

    Rows, outputs per warpgroup, bytes of codes per step of a row, what its two warpgroups share ("outputs", "gate" or
    "inputs"), split-K, stages of the ring, and programs per SM, which determine registers.
    """

    tile_rows: int
    tile_outputs: int
    step_bytes: int
    share: str
    splits: int
    stages: int
    per_sm: int


class Layout(NamedTuple):
    """How a kernel reads a weight W [outputs, inputs].

    - mode: where scales apply (see quantized_gemm_kernels.py); step_bytes: bytes of a row of codes per step.
    - scale_rows, scale_columns: the rows and columns that share a scale; groups: scales per row.
    """

    mode: str
    step_bytes: int
    per_byte: int
    scale_rows: int
    scale_columns: int
    groups: int


def layout_of(weight: LinearWeight, inputs: int) -> Layout:
    """Return how kernels read this weight [outputs, inputs]. Depends only on its format and shapes."""
    assert weight.scale is not None
    per_byte = CODES_PER_BYTE[weight.format]
    scale_rows, groups = weight.weight.shape[-2] // weight.scale.shape[-2], weight.scale.shape[-1]
    if weight.group_of is not None:
        return Layout("weight", 64, per_byte, scale_rows, 1, groups)
    columns = inputs // groups
    if groups == 1:
        return Layout("row", 128, per_byte, scale_rows, columns, groups)
    step = math.gcd(columns, 128)
    if per_byte == 2:
        step = math.gcd(step, inputs % PACKED_COLUMNS // 2)  # halves of the last block, if it isn't full
    mode, step = ("step", step) if step >= 16 else ("weight", 64)
    return Layout(mode, step, per_byte, scale_rows, columns, groups)


def choose_config(rows: int, outputs: int, inputs: int, gated: bool, layout: Layout) -> LaunchConfig:
    """Return the tile for y [rows, outputs] = x [rows, inputs] Wᵀ. Depends only on shapes and format.

    Measured on an H200 with benchmarks/kernels/quantized_gemm.py: programs that share K pay off while all of them run
    at once.
    """
    wide = _is_wide(rows, layout) and not gated
    tile_rows = 128 if wide else max(16, min(64, next_power_of_2(rows)))
    tile_outputs = 2 * TILE_OUTPUTS if wide else TILE_OUTPUTS
    tiles = cdiv(outputs, tile_outputs) * cdiv(rows, tile_rows)
    step, splits = min(layout.step_bytes, 128 // layout.per_byte) if wide else layout.step_bytes, 1
    steps = cdiv(inputs // layout.per_byte, step)
    resident = (1 if wide else 2 if tile_rows > 16 else 4) * NUM_SMS - 1
    while splits < 4 and tiles * 2 * splits <= resident and steps % (2 * splits) == 0 and steps >= 8 * splits:
        splits *= 2
    stage_bytes = tile_outputs * (2 if gated else 1) * step + tile_rows * step * layout.per_byte * 2
    stages = min(6, cdiv(steps, splits), SHARED_BYTES // 2 // stage_bytes - 1)
    if wide:
        stages = min(3, SHARED_BYTES // stage_bytes - 1)
    if layout.mode == "weight":  # a stage holds scales of 4 bytes too
        stages = 2
    return LaunchConfig(tile_rows, tile_outputs, step, splits, 8 if wide else 4, max(2, stages), PREFETCHED_LINES)


def _is_wide(rows: int, layout: Layout) -> bool:
    return rows > WIDE_ROWS and layout.mode != "weight"


def stream_config(rows: int, weight: LinearWeight, inputs: int, gated: bool = False) -> StreamConfig | None:
    """Return the tile of the kernel for the fewest rows; None if it doesn't compute this product.

    It needs a Hopper GPU, rows of a multiple of 16 bytes, and scales for whole rows or whole 128 columns.
    """
    if rows > STREAM_ROWS or weight.format not in STREAM_FORMATS or not has_gluon(weight.weight.device):
        return None
    layout = layout_of(weight, inputs)
    if inputs // layout.per_byte % 16 or layout.mode == "weight" or layout.step_bytes != 128:
        return None
    # more warps hide more of the latency of loads, while all programs run at once
    tiles = cdiv(len(weight.weight) // (2 if gated else 1), 16)
    warps = 8 if not gated and tiles <= (3 if layout.per_byte == 1 else 2) * NUM_SMS else 4
    return StreamConfig(8, 16, warps)


def ring_config(rows: int, weight: LinearWeight, inputs: int, gated: bool = False) -> RingConfig | None:
    """Return the tile of the kernel that converts codes once for all rows; None if it doesn't compute this product.

    It needs what `stream_config` needs, and blocks of 256 columns if a code has 4 bits.
    """
    if rows > MAX_ROWS or weight.format not in STREAM_FORMATS or not has_gluon(weight.weight.device):
        return None
    layout = layout_of(weight, inputs)
    if inputs % (PACKED_COLUMNS if layout.per_byte == 2 else 16):
        return None
    if layout.mode == "weight" or layout.step_bytes != 128:
        return None
    outputs = len(weight.weight) // (2 if gated else 1)
    tile_rows, tile_outputs = max(8, next_power_of_2(rows)), 64
    if tile_rows == 128:
        share, step, per_sm = "gate" if gated else "outputs", 128 // layout.per_byte, 1
        if not gated and outputs >= 16384 and layout.groups == 1:
            tile_outputs = 128
    else:
        share, step, per_sm = "gate" if gated else "inputs", 128 if tile_rows <= 32 else 64, 2
    return fill_ring(RingConfig(tile_rows, tile_outputs, step, share, 1, 1, per_sm), outputs, inputs, layout)


def gluon_config(rows: int, weight: LinearWeight, inputs: int, gated: bool = False) -> StreamConfig | RingConfig | None:
    """Return the tile of the faster kernel in Gluon for this product; None if neither computes it.

    On an H200 with 8 rows of int4, the 128 programs of a ring took 7.7 µs for 4096 outputs and inputs, and the other
    kernel 6.1; in fp8, 256 programs took 8.5 µs, and the other kernel 8.9.
    """
    ring, stream = ring_config(rows, weight, inputs, gated), stream_config(rows, weight, inputs, gated)
    if ring is None or stream is None:
        return ring or stream
    rows_each = (1 if ring.share == "inputs" else 2) * ring.tile_outputs
    programs = cdiv(len(weight.weight), rows_each) * ring.splits
    return ring if programs > NUM_SMS else stream


def fill_ring(
    pick: RingConfig, outputs: int, inputs: int, layout: Layout, splits: int | None = None
) -> RingConfig | None:
    """Return `pick` with the stages that fit shared memory, or None if two don't.

    splits=None: as many as SMs have room for.
    """
    parts = 2 if pick.share == "inputs" else 1
    stage_bytes = 2 * pick.step_bytes * (pick.tile_outputs + parts * layout.per_byte * pick.tile_rows)
    sums_bytes = 0 if pick.share == "outputs" else 4 * pick.tile_outputs * pick.tile_rows
    stages = (SHARED_BYTES // pick.per_sm - sums_bytes - 1536) // stage_bytes  # 1 KiB of a program is the system's
    tiles = cdiv(outputs, (2 if pick.share == "outputs" else 1) * pick.tile_outputs)
    steps = cdiv(inputs // layout.per_byte, parts * pick.step_bytes)
    count = splits or 1
    while splits is None and count < 4 and tiles * 2 * count <= pick.per_sm * NUM_SMS and steps >= 8 * count:
        count *= 2
    return pick._replace(splits=count, stages=min(8, stages, max(1, cdiv(steps, count)))) if stages >= 2 else None


def half_normed(rows: int, weight: LinearWeight, dtype: torch.dtype) -> int:
    """Return the sums of squares per row that `linear` writes with `next_norm`; 0 if it does not start that norm."""
    if dtype == torch.float16 or rows > MAX_ROWS:  # weights apply before the division: outliers may exceed 65504
        return 0
    outputs, row_bytes = weight.weight.shape
    inputs = row_bytes * CODES_PER_BYTE[weight.format]
    pick = gluon_config(rows, weight, inputs) or choose_config(rows, outputs, inputs, False, layout_of(weight, inputs))
    return cdiv(outputs, pick.tile_outputs)


def linear(
    x: Tensor,
    weight: LinearWeight,
    out: Tensor,
    scratch: Scratch,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gated: bool = False,
    add: bool = False,
    next_norm: Tensor | None = None,
    squares: int = 0,
    late: bool = False,
    activation: str | None = None,
    pick: LaunchConfig | StreamConfig | RingConfig | None = None,
) -> None:
    """Write y = rms_norm(x) Wᵀ + bias to `out` [M, n] of x's dtype; arguments as of small_batch_gemm.linear.

    Grids depend only on shapes and there is no host read: safe to capture.
    """
    rows, inputs = x.shape
    weight.require(FORMATS, f"the linear layer of {list(weight.weight.shape)}")
    if squares:
        x = scratch.normed[: rows * inputs].view(rows, inputs)
    elif norm is not None:
        x = rms_norm(x, norm, eps, scratch.normed[: rows * inputs].view(rows, inputs))
    if rows > MAX_ROWS and pick is None:
        assert not squares  # `half_normed` is 0 for this many rows
        product = scratch.gate_up[: rows * len(weight.weight)].view(rows, -1) if gated else out
        if multiplies_fp8(x, weight):
            _multiply_fp8(x, weight, product, bias, add)
        else:
            _multiply_dequantized(x, weight, product, bias, add)
        finish_activation(product, out, gated, activation)
        return
    layout = layout_of(weight, inputs)
    if gated and pick is None and _is_wide(rows, layout):  # both halves in one wide tile need too many registers
        product = scratch.gate_up[: rows * len(weight.weight)].view(rows, -1)
        linear(x, weight, product, scratch, eps=eps, bias=bias, squares=squares, late=late)
        finish_activation(product, out, gated, activation)
        return
    if pick is None and (activation is None or (gated and activation == "silu")):  # what the kernels in Gluon compute
        pick = gluon_config(rows, weight, inputs, gated)
    pick = pick or choose_config(rows, out.shape[1], inputs, gated, layout)
    half_norm = next_norm if half_normed(rows, weight, out.dtype) else None
    if isinstance(pick, RingConfig):
        _launch_ring(x, weight, out, layout, pick, scratch, eps, bias, add, half_norm, squares, late)
    elif isinstance(pick, StreamConfig):
        _launch_stream(x, weight, out, layout, pick, scratch, eps, bias, gated, add, half_norm, squares, late)
    else:
        _launch(x, weight, out, layout, pick, scratch, eps, bias, gated, add, half_norm, squares, late, activation)


def multiplies(x: Tensor, weight: LinearWeight) -> bool:
    """Return whether `multiply` takes x [T, k]: in 16 bits, with few rows or a weight for fp8 activations."""
    return x.dtype in (torch.bfloat16, torch.float16) and (len(x) <= MAX_ROWS or multiplies_fp8(x, weight))


def multiply(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + bias of x [T, k] in its dtype; see `multiplies`. Uses no scratch: K is not split."""
    x, out = x.contiguous(), torch.empty(len(x), len(weight.weight), dtype=x.dtype, device=x.device)
    if len(x) > MAX_ROWS:
        _multiply_fp8(x, weight, out, bias, False)
        return out
    layout, pick = layout_of(weight, x.shape[1]), gluon_config(len(x), weight, x.shape[1])
    if isinstance(pick, RingConfig):
        _launch_ring(x, weight, out, layout, pick._replace(splits=1), None, 0.0, bias, False, None, 0, False)
        return out
    if pick is not None:
        _launch_stream(x, weight, out, layout, pick, None, 0.0, bias, False, False, None, 0, False)
        return out
    tile = choose_config(len(x), out.shape[1], x.shape[1], False, layout)._replace(splits=1)
    _launch(x, weight, out, layout, tile, None, 0.0, bias, False, False, None, 0, False)
    return out


def multiplies_fp8(x: Tensor, weight: LinearWeight) -> bool:
    """Return whether a product of many rows quantises x [T, k] to fp8.

    The checkpoint must say so, the tensor cores must have fp8, and a scale must belong to a whole row of W. For scales
    of 128 columns, a kernel took longer than dequantising W does.
    """
    if not weight.quantizes_activations or weight.format != "fp8" or not (overlaps(x) or x.device.type == "cpu"):
        return False
    layout = layout_of(weight, x.shape[1])
    return x.shape[1] % 16 == 0 and layout.groups == 1


def _multiply_fp8(x: Tensor, weight: LinearWeight, out: Tensor, bias: Tensor | None, add: bool) -> None:
    """Write x Wᵀ + bias to `out` [M, n], or add it, with x quantised to fp8. Two to four launches."""
    (rows, inputs), (outputs, pdl) = x.shape, (len(weight.weight), overlaps(x))
    assert weight.scale is not None
    layout = layout_of(weight, inputs)
    codes = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(1, rows, dtype=torch.float32, device=x.device)
    quantize_rows_kernel[(rows,)](
        x,
        codes,
        scales,
        K=inputs,
        K_PAD=next_power_of_2(inputs),
        PDL=pdl,
        num_warps=4 if inputs <= 4096 else 8,
        **launch_options(pdl),
    )
    if outputs % 16 == 0 and out.is_contiguous() and x.is_cuda and out.dtype == torch.bfloat16:
        # it takes a scale for each row of W
        row_scales = weight.scale.expand(-1, layout.scale_rows).reshape(1, outputs).contiguous()
        operands = codes, weight.weight.view(torch.float8_e4m3fn).T, scales.T, row_scales
        if add:
            out.add_(torch._scaled_mm(*operands, bias=bias, out_dtype=out.dtype))  # noqa: SLF001  # its only name here
        else:
            torch._scaled_mm(*operands, bias=bias, out_dtype=out.dtype, out=out)  # noqa: SLF001
        return
    tile_rows, tile_outputs, warps = (128, 128, 8) if rows > 512 else (64, 128, 4)
    fp8_kernel[(cdiv(rows, tile_rows) * cdiv(outputs, tile_outputs),)](
        codes,
        scales,
        weight.weight,
        weight.scale,
        x if bias is None else bias,
        out,
        rows,
        outputs,
        out.stride(0),
        K=inputs,
        SCALE_ROWS=layout.scale_rows,
        BM=tile_rows,
        BN=tile_outputs,
        BK=128,
        STAGES=4,
        ADD=add,
        BIAS=bias is not None,
        PDL=pdl,
        num_warps=warps,
        **launch_options(pdl),
    )


def _launch(
    x: Tensor,
    weight: LinearWeight,
    out: Tensor,
    layout: Layout,
    pick: LaunchConfig,
    scratch: Scratch | None,
    eps: float,
    bias: Tensor | None,
    gated: bool,
    add: bool,
    next_norm: Tensor | None,
    squares: int,
    late: bool,
    activation: str | None = None,
) -> None:
    rows, inputs = x.shape
    outputs, pdl = out.shape[1], overlaps(x)
    assert weight.scale is not None
    quantized_kernel[(cdiv(outputs, pick.tile_outputs), pick.splits, cdiv(rows, pick.tile_rows))](
        x,
        weight.weight.view(torch.uint8),
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        x if weight.group_of is None else weight.group_of,
        x if weight.part_of_row is None else weight.part_of_row,
        x if bias is None else bias,
        out,
        x if next_norm is None else next_norm,
        x if scratch is None else scratch.normed,
        x if scratch is None else scratch.squares,
        x if scratch is None else scratch.partials,
        x if scratch is None else scratch.arrivals,
        rows,
        outputs,
        eps,
        K=inputs,
        **constants_of(weight, layout),
        MODE=layout.mode,
        BM=pick.tile_rows,
        BN=pick.tile_outputs,
        BK=pick.step_bytes,
        SPLITS=pick.splits,
        STAGES=pick.stages,
        GATED=gated,
        ADD=add,
        BIAS=bias is not None,
        HALF_NORM=next_norm is not None,
        NUM_SQUARES=squares,
        SQUARES_PAD=next_power_of_2(max(1, squares)),
        PDL=pdl,
        TRIGGER_AFTER_MATH=late,
        ACT=activation or "",
        ASM=pdl,
        LINES=pick.lines,
        num_warps=pick.warps,
        **launch_options(pdl),
    )


def _launch_ring(
    x: Tensor,
    weight: LinearWeight,
    out: Tensor,
    layout: Layout,
    pick: RingConfig,
    scratch: Scratch | None,
    eps: float,
    bias: Tensor | None,
    add: bool,
    next_norm: Tensor | None,
    squares: int,
    late: bool,
) -> None:
    from triton.experimental.gluon import language as gl  # needs Gluon: see `ring_config`
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from engine.kernels.quantized_ring_kernels import quantized_ring_kernel

    (rows, inputs), outputs, codes = x.shape, out.shape[1], weight.weight.view(torch.uint8)
    assert weight.scale is not None
    constants = constants_of(weight, layout)
    del constants["ACT_ORDER"]
    parts = 2 if pick.share == "inputs" else 1
    units = 2 if pick.share == "outputs" else 1
    tiles = cdiv(outputs, units * pick.tile_outputs)
    columns, boxes = pick.step_bytes, []
    for tensor, height, dtype in ((x, pick.tile_rows, x.dtype), (codes, pick.tile_outputs, torch.uint8)):
        box = [height, columns]
        layout_in_shared = gl.NVMMASharedLayout.get_default_for(box, getattr(gl, str(dtype).split(".")[1]))
        boxes.append(TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout_in_shared))
    quantized_ring_kernel[(tiles, pick.splits)](
        *boxes,
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        x if bias is None else bias,
        out,
        x if next_norm is None else next_norm,
        x if scratch is None else scratch.normed,
        x if scratch is None else scratch.squares,
        x if scratch is None else scratch.partials,
        x if scratch is None else scratch.arrivals,
        rows,
        outputs,
        eps,
        K=inputs,
        **constants,
        SHARE=pick.share,
        STEPS=cdiv(inputs // layout.per_byte, parts * pick.step_bytes * pick.splits),
        SPLITS=pick.splits,
        STAGES=pick.stages,
        UNITS=cdiv(outputs, pick.tile_outputs),
        ADD=add,
        BIAS=bias is not None,
        HALF_NORM=next_norm is not None,
        NUM_SQUARES=squares,
        SQUARES_PAD=next_power_of_2(max(1, squares)),
        LATE=late,
        REGISTERS=RING_REGISTERS[pick.per_sm][1],
        num_warps=4,
        maxnreg=RING_REGISTERS[pick.per_sm][0],
        **launch_options(True),
    )


def _launch_stream(
    x: Tensor,
    weight: LinearWeight,
    out: Tensor,
    layout: Layout,
    pick: StreamConfig,
    scratch: Scratch | None,
    eps: float,
    bias: Tensor | None,
    gated: bool,
    add: bool,
    next_norm: Tensor | None,
    squares: int,
    late: bool,
) -> None:
    from engine.kernels.quantized_stream_kernels import quantized_stream_kernel  # needs Gluon: see `stream_config`

    rows, inputs = x.shape
    outputs = out.shape[1]
    assert weight.scale is not None
    constants = constants_of(weight, layout)
    del constants["ACT_ORDER"]
    quantized_stream_kernel[(cdiv(outputs, pick.tile_outputs),)](
        x,
        weight.weight.view(torch.int32),
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        x if bias is None else bias,
        out,
        x if next_norm is None else next_norm,
        x if scratch is None else scratch.normed,
        x if scratch is None else scratch.squares,
        rows,
        outputs,
        eps,
        K=inputs,
        **constants,
        BM=pick.tile_rows,
        BN=pick.tile_outputs,
        GATED=gated,
        ADD=add,
        BIAS=bias is not None,
        HALF_NORM=next_norm is not None,
        NUM_SQUARES=squares,
        SQUARES_PAD=next_power_of_2(max(1, squares)),
        TRIGGER_AFTER_MATH=late,
        num_warps=pick.warps,
        **launch_options(True),
    )


def constants_of(weight: LinearWeight, layout: Layout) -> dict[str, object]:
    """Return what kernels are compiled for, of a weight's format."""
    return {
        "ELEMENT": weight.format,
        "PER_BYTE": layout.per_byte,
        "SCALE_ROWS": layout.scale_rows,
        "SCALE_COLUMNS": layout.scale_columns,
        "GROUPS": layout.groups,
        "ZERO": weight.zero is not None,
        "ACT_ORDER": weight.group_of is not None,
    }


def dequantize(weight: LinearWeight, inputs: int, dtype: torch.dtype, first: int, end: int) -> Tensor:
    """Return rows [first, end) of W [outputs, inputs] in `dtype`, computed in float32 and rounded once. One launch."""
    layout = layout_of(weight, inputs)
    out = torch.empty(end - first, inputs, dtype=dtype, device=weight.weight.device)
    pdl = overlaps(out)
    assert weight.scale is not None
    tile_rows, tile_bytes = 32, 128 // layout.per_byte
    dequantize_kernel[(cdiv(end - first, tile_rows), cdiv(inputs // layout.per_byte, tile_bytes))](
        weight.weight.view(torch.uint8),
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        weight.scale if weight.group_of is None else weight.group_of,
        weight.scale if weight.part_of_row is None else weight.part_of_row,
        out,
        first,
        end - first,
        K=inputs,
        **constants_of(weight, layout),
        BN=tile_rows,
        BK=tile_bytes,
        PDL=pdl,
        **launch_options(pdl),
    )
    return out


def _multiply_dequantized(x: Tensor, weight: LinearWeight, out: Tensor, bias: Tensor | None, add: bool) -> None:
    """Write x Wᵀ + bias to `out` [M, n], or add it, with cuBLAS, tile by tile of the outputs."""
    inputs, outputs = x.shape[1], len(weight.weight)
    step = max(1, TILE_WEIGHTS // inputs)
    step -= step % 256 if step > 256 else 0  # cuBLAS is slow with other widths
    for first in range(0, outputs, step):
        end = min(first + step, outputs)
        tile, part = dequantize(weight, inputs, x.dtype, first, end).T, out[:, first:end]
        if add:
            part.addmm_(x, tile)
        elif bias is not None:
            torch.addmm(bias[first:end], x, tile, out=part)
        else:
            torch.mm(x, tile, out=part)
        del tile  # the next one takes its memory
    if add and bias is not None:
        out.add_(bias)

"""GEMMs with quantised weights against float64, for every format, number of rows, and odd shapes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernels import DEVICE, DTYPE, INTERPRETED, relative_error  # isort: skip  (before what imports triton)

from engine.checkpoint.quantization import WeightScheme
from engine.errors import ModelError
from engine.kernels.linear_weight import LinearWeight
from engine.kernels.quantized_gemm import (
    MAX_ROWS,
    LaunchConfig,
    Layout,
    RingConfig,
    StreamConfig,
    choose_config,
    dequantize,
    fill_ring,
    half_normed,
    layout_of,
    multiplies_fp8,
    multiply,
    ring_config,
    stream_config,
)
from engine.kernels.small_batch_gemm import Scratch
from engine.kernels.step_linear import linear
from engine.layers.formats import build_method
from engine.layers.linear import Linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpretable,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # raised by Triton: ast, numpy scalars
]
TOLERANCE = 1.5e-3 if INTERPRETED else 6e-3
"""Of outputs that are rounded to 16 bits once, from weights that are exact or rounded once."""

SCHEMES = {
    "fp8 per row": ("fp8", (1, None), True, False),
    "fp8 per matrix": ("fp8", (None, None), True, False),
    "fp8 blocks": ("fp8", (128, 128), True, False),
    "int8 per row": ("int8", (1, None), True, False),
    "int8 groups with zeros": ("int8", (1, 128), False, False),
    "int4 per row": ("int4", (1, None), True, False),
    "int4 groups": ("int4", (1, 128), True, False),
    "int4 groups with zeros": ("int4", (1, 128), False, False),
    "int4 small groups": ("int4", (1, 32), False, False),
    "int4 act_order": ("int4", (1, 128), False, True),
    "int8 act_order": ("int8", (1, 64), False, True),
    "mxfp4": ("mxfp4", (1, 32), True, False),
}
ODD = (77, 352)
SHAPES = [(48, 256), ODD] if INTERPRETED else [(1024, 4096), (1000, 1536), (2048, 576), ODD, (130, 96), (51, 10)]
ROWS = [1, 5, 70] if INTERPRETED else [1, 3, 9, 16, 40, 128]


def make_layer(scheme: str, parts: dict[str, int], inputs: int, dtype: torch.dtype = DTYPE, seed: int = 0) -> Linear:
    """Return a layer with random quantised weights; with `act_order`, the columns' groups are in random order."""
    element, block, symmetric, act_order = SCHEMES[scheme]
    found = WeightScheme(layout="online", element=element, block=block, symmetric=symmetric, act_order=act_order)
    method, device = build_method(found, parts), torch.device(DEVICE)
    layer = Linear(parts, inputs, bias=False, dtype=dtype, device=device, method=method)
    generator = torch.Generator().manual_seed(seed)
    for slot in layer.slots("m").values():
        slot.write(torch.randn(slot.shape, generator=generator) / inputs**0.5)
    if act_order:
        order = torch.randint(0, layer.scale.shape[1], layer.group_of.shape, generator=generator)
        layer.group_of.copy_(order)
    return layer


def exact_weight(layer: Linear) -> torch.Tensor:
    """Return W as PyTorch dequantises it on a CPU, in float32."""
    copy = {name: getattr(layer, name) for name in ("codes", "scale", "zero", "group_of", "part_of_row")}
    moved = type("Moved", (), {name: None if value is None else value.cpu() for name, value in copy.items()})()
    for name in ("weight_shape", "scale_rows", "scale_columns"):
        setattr(moved, name, getattr(layer, name))
    return layer.method.dense(moved, torch.float32).to(DEVICE)


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def scratch_for(rows: int, outputs: int, inputs: int) -> Scratch:
    scratch = Scratch(rows, rows, max(inputs, outputs), 2 * outputs, 64, DTYPE, torch.device(DEVICE))
    for buffer in (scratch.normed, scratch.partials, scratch.squares):
        buffer.fill_(float("nan"))
    return scratch


def supports(scheme: str, inputs: int) -> bool:
    return inputs % (32 if scheme == "mxfp4" else 2) == 0


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_and_dequantised_weights_are_right(scheme: str, shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    if not supports(scheme, inputs):
        pytest.skip("MXFP4 needs rows of a multiple of 32")
    layer = make_layer(scheme, {"a": outputs - 16, "b": 16}, inputs)
    weight, wanted = layer.linear_weight, exact_weight(layer)
    for dtype in (torch.float32, DTYPE):
        assert torch.equal(dequantize(weight, inputs, dtype, 0, outputs), wanted.to(dtype))
    assert torch.equal(dequantize(weight, inputs, DTYPE, 17, outputs - 1), wanted[17:-1].to(DTYPE))
    bias = random(outputs, seed=3)
    for rows in ROWS:
        x = random(rows, inputs)
        found = multiply(x, weight, bias)
        assert relative_error(found, x.double() @ wanted.double().T + bias.double()) < TOLERANCE, rows


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: too slow interpreted")
@pytest.mark.parametrize("scheme", ["fp8 per row", "fp8 blocks", "int8 per row", "int4 groups with zeros", "mxfp4"])
def test_every_number_of_rows_gives_the_same_product(scheme: str) -> None:
    outputs, inputs = 192, 1024
    layer, x = make_layer(scheme, {"a": outputs}, inputs), random(MAX_ROWS + 2, inputs)
    wanted = x.double() @ exact_weight(layer).double().T
    scratch = scratch_for(MAX_ROWS + 2, outputs, inputs)
    for rows in range(1, MAX_ROWS + 3):
        out = torch.full((rows, outputs), float("nan"), dtype=DTYPE, device=DEVICE)
        linear(x[:rows], layer.linear_weight, out, scratch)
        assert relative_error(out, wanted[:rows]) < TOLERANCE, rows


@pytest.mark.parametrize("scheme", ["fp8 per row", "fp8 blocks", "int4 groups with zeros", "int4 act_order", "mxfp4"])
@pytest.mark.parametrize(
    "form", ["normed", "biased", "added", "added_biased", "gated", "gated_biased", "gated_gelu", "gelu"]
)
@pytest.mark.parametrize("rows", [3] if INTERPRETED else [1, 9, 24, 64, 100, 200])
def test_norm_and_epilogues_equal_float64(scheme: str, form: str, rows: int) -> None:
    gated, outputs, inputs = form.startswith("gated"), 64, 384 if INTERPRETED else 1536
    layer = make_layer(scheme, {"a": outputs, "b": outputs} if gated else {"a": outputs}, inputs)
    x, norm = random(rows, inputs), random(inputs, seed=2) + 1 if form in ("normed", "gated") else None
    bias = random(layer.outputs, seed=3) if form.endswith("biased") else None
    out = random(rows, outputs, seed=4) if form.startswith("added") else torch.full_like(x[:, :outputs], float("nan"))
    before = out.double() if form.startswith("added") else 0
    value = x.double()
    if norm is not None:
        value = value * torch.rsqrt((value * value).mean(-1, keepdim=True) + 1e-6) * norm.double()
    value = value @ exact_weight(layer).double().T + (0 if bias is None else bias.double())
    activation = "gelu" if form.endswith("gelu") else None
    act = F.gelu if activation else F.silu if gated else torch.nn.Identity()
    wanted = act(value[:, :outputs]) * (value[:, outputs:] if gated else 1.0) + before
    scratch, weight = scratch_for(rows, outputs, inputs), layer.linear_weight
    for _ in range(1 if form.startswith("added") else 2):  # twice: the first launch must reset the arrival counts
        linear(
            x, weight, out, scratch, norm=norm, eps=1e-6, bias=bias, gated=gated, add=form.startswith("added"),
            activation=activation,
        )  # fmt: skip
    assert relative_error(out, wanted) < TOLERANCE
    assert not scratch.arrivals.any()


@pytest.mark.parametrize("lines", [0, 4])
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("scheme", ["fp8 blocks", "int4 groups with zeros"])
def test_splits_and_prefetches_do_not_change_a_result_between_runs(scheme: str, splits: int, lines: int) -> None:
    rows, outputs, inputs = 20, 130, 1024
    layer, x = make_layer(scheme, {"a": outputs}, inputs), random(rows, inputs)
    step = layout_of(layer.linear_weight, inputs).step_bytes
    scratch, runs = scratch_for(rows, outputs, inputs), []
    for _ in range(3):
        out = torch.full((rows, outputs), float("nan"), dtype=DTYPE, device=DEVICE)
        linear(x, layer.linear_weight, out, scratch, pick=LaunchConfig(32, 64, step, splits, 4, 2, lines))
        runs.append(out)
    assert relative_error(runs[0], x.double() @ exact_weight(layer).double().T) < TOLERANCE
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[1], runs[2])


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: Gluon is not interpreted")
@pytest.mark.parametrize("scheme", ["fp8 per row", "fp8 blocks", "int8 groups with zeros", "int4 groups with zeros"])
@pytest.mark.parametrize("gated", [False, True])
def test_tiles_of_the_fewest_rows_do_not_change_a_result_between_runs(scheme: str, gated: bool) -> None:
    outputs, inputs = 130, 1792  # of 1 to 4 steps, the last of which isn't full
    layer = make_layer(scheme, {"a": outputs, "b": outputs} if gated else {"a": outputs}, inputs)
    if stream_config(1, layer.linear_weight, inputs) is None:
        pytest.skip("needs a GPU with compute capability 9.0 and Triton 3.6 or 3.7")
    for rows, tile, warps in itertools.product((1, 7, 8), (16, 32), (2, 4, 8)):
        x, scratch, runs = random(rows, inputs), scratch_for(rows, outputs, inputs), []
        pick = StreamConfig(8, tile, warps)
        for _ in range(3):
            out = torch.full((rows, outputs), float("nan"), dtype=DTYPE, device=DEVICE)
            linear(x, layer.linear_weight, out, scratch, gated=gated, pick=pick)
            runs.append(out)
        value = x.double() @ exact_weight(layer).double().T
        wanted = F.silu(value[:, :outputs]) * value[:, outputs:] if gated else value
        assert relative_error(runs[0], wanted) < TOLERANCE, pick
        assert torch.equal(runs[0], runs[1]) and torch.equal(runs[1], runs[2]), pick


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: Gluon is not interpreted")
@pytest.mark.parametrize(
    "scheme", ["fp8 per row", "fp8 per matrix", "fp8 blocks", "int8 groups with zeros", "int4 per row",
               "int4 groups", "int4 groups with zeros"],
)  # fmt: skip
@pytest.mark.parametrize("share", ["outputs", "inputs", "gate"])
def test_tiles_of_the_ring_do_not_change_a_result_between_runs(scheme: str, share: str) -> None:
    gated, outputs, inputs = share == "gate", 200, 1792  # tiles that aren't full
    layer = make_layer(scheme, {"a": outputs, "b": outputs} if gated else {"a": outputs}, inputs)
    weight = layer.linear_weight
    if ring_config(1, weight, inputs) is None:
        pytest.skip("needs a GPU with compute capability 9.0 and Triton 3.6 or 3.7")
    layout, exact = layout_of(weight, inputs), exact_weight(layer).double()
    for rows, step, per_sm, splits in (
        (1, 128, 2, 1), (8, 64, 2, 4), (13, 128, 1, 2), (32, 64, 2, 2), (60, 64, 1, 4), (100, 64, 1, 2),
    ):  # fmt: skip
        start = RingConfig(max(8, 1 << (rows - 1).bit_length()), 64, step, share, 1, 1, per_sm)
        pick = fill_ring(start, outputs, inputs, layout, splits)
        x, bias, runs = random(rows, inputs), random(layer.outputs, seed=3), []
        scratch = scratch_for(rows, outputs, inputs)
        for _ in range(3):
            out = torch.full((rows, outputs), float("nan"), dtype=DTYPE, device=DEVICE)
            linear(x, weight, out, scratch, bias=bias, gated=gated, pick=pick)
            runs.append(out)
        value = x.double() @ exact.T + bias.double()
        wanted = F.silu(value[:, :outputs]) * value[:, outputs:] if gated else value
        assert relative_error(runs[0], wanted) < TOLERANCE, pick
        assert torch.equal(runs[0], runs[1]) and torch.equal(runs[1], runs[2]), pick
        assert not scratch.arrivals.any()


@pytest.mark.parametrize("rows", [1, 3] if INTERPRETED else [1, 3, 40, 100])
def test_a_product_starts_the_norm_that_the_next_one_completes(rows: int) -> None:
    """In bfloat16 only, which the interpreter lacks: it computes the same without the start."""
    hidden = 128 if INTERPRETED else 1024
    first, second = (make_layer(name, {"a": hidden}, hidden) for name in ("int4 groups", "fp8 blocks"))
    norm, x, out = random(hidden, seed=2) + 1, random(rows, hidden), random(rows, hidden, seed=5)
    residual = out.double() + x.double() @ exact_weight(first).double().T
    scratch, squares = scratch_for(rows, hidden, hidden), half_normed(rows, first.linear_weight, DTYPE)
    assert (squares > 0) is not INTERPRETED
    linear(x, first.linear_weight, out, scratch, add=True, next_norm=norm)
    found = torch.full_like(out, float("nan"))
    linear(out, second.linear_weight, found, scratch, norm=norm, eps=1e-6, squares=squares)
    normed = residual * torch.rsqrt((residual * residual).mean(-1, keepdim=True) + 1e-6) * norm.double()
    assert relative_error(found, normed @ exact_weight(second).double().T) < 2 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16], ids=str)
def test_every_code_is_converted_exactly(dtype: torch.dtype) -> None:
    """Multiplies the identity, so each output is one weight, of all bytes in both places of a register."""
    columns = torch.arange(256)
    for name, scale in (("fp8", 1.0), ("int8", 1.0), ("int4", 1.0), ("mxfp4", 1.0)):
        element = make_layer(f"{name} per row" if name != "mxfp4" else name, {"a": 16}, 256, dtype).method.element
        codes = torch.stack([(columns + shift) % 256 for shift in range(16)]).to(torch.uint8)
        pairs = torch.stack([(columns[:128] * 2 + 17 * row) % 256 for row in range(16)]).to(torch.uint8)
        stored = (pairs if element.per_byte == 2 else codes).view(element.stored)
        if name == "fp8":  # NaN is refused when a checkpoint is read
            stored = torch.where((codes & 127) == 127, 0, codes).to(torch.uint8).view(element.stored)
        groups = 8 if name == "mxfp4" else 1
        scales = torch.full((16, groups), 127, dtype=torch.uint8) if name == "mxfp4" else torch.full((16, 1), scale)
        weight = LinearWeight(stored.to(DEVICE), name, scales.to(DEVICE))
        for rows in (128,) if INTERPRETED else (8, 16, 128):
            for first in range(0, 256, rows):
                found = multiply(torch.eye(256)[first : first + rows].to(DEVICE, dtype), weight, None)
                assert torch.equal(found.cpu().float(), element.decode(stored)[:, first : first + rows].T), (name, rows)


def test_a_tile_fits_shared_memory_and_scratch() -> None:
    for per_byte, (mode, step) in itertools.product(
        (1, 2), (("row", 128), ("step", 128), ("step", 32), ("weight", 64))
    ):
        layout = Layout(mode, step, per_byte, 1, 128, 32)
        for outputs, inputs, gated in ((6144, 4096, False), (14336, 4096, True), (4096, 14336, False), (64, 96, True)):
            for rows in (1, 2, 16, 33, 64, MAX_ROWS):
                pick = choose_config(rows, outputs, inputs, gated, layout)
                tiles = -(-outputs // pick.tile_outputs) * -(-rows // pick.tile_rows)
                gates = 2 if gated else 1
                stage_bytes = (gates * pick.tile_outputs + 2 * per_byte * pick.tile_rows) * pick.step_bytes
                assert (pick.stages + 1) * stage_bytes <= 232_448
                scratch = Scratch(rows, rows, 4096, 2 * outputs, 64, DTYPE, torch.device("meta"))
                partials = tiles * pick.splits * gates * pick.tile_outputs * pick.tile_rows
                assert pick.splits == 1 or partials <= scratch.partials.numel()
                assert tiles <= scratch.arrivals.numel()
                weight = LinearWeight(torch.empty(outputs, inputs, device="meta"), "fp8", torch.empty(outputs, 1))
                pick = choose_config(rows, outputs, inputs, False, layout_of(weight, inputs))
                assert half_normed(rows, weight, torch.bfloat16) == -(-outputs // pick.tile_outputs)


def test_a_ring_fits_shared_memory_and_scratch() -> None:
    for per_byte, groups, rows, share in itertools.product(
        (1, 2), (1, 32), (8, 16, 64, 128), ("outputs", "inputs", "gate")
    ):
        layout = Layout("row" if groups == 1 else "step", 128, per_byte, 1, 128, groups)
        for outputs, per_sm, width in itertools.product((64, 1000, 6144, 28672), (1, 2), (64, 128)):
            pick = fill_ring(RingConfig(rows, width, 64, share, 1, 1, per_sm), outputs, 4096, layout)
            if pick is None or (width == 128 and outputs < 16384):  # not chosen: see `ring_config`
                continue
            parts, units = (2 if share == "inputs" else 1), (2 if share == "outputs" else 1)
            ring = pick.stages * (2 * width * 64 + parts * per_byte * rows * 64 * 2)
            assert pick.stages >= 2 and ring + (4 * width * rows if units == 1 else 0) <= 232_448 // per_sm - 1024
            count = units * -(-outputs // (units * width))
            scratch = Scratch(rows, rows, 64, (2 if share == "gate" else 1) * outputs, 64, DTYPE, torch.device("meta"))
            partials = count * pick.splits * (2 if share == "gate" else 1) * width * rows
            assert pick.splits == 1 or partials <= scratch.partials.numel()
            assert count <= scratch.arrivals.numel()


def test_an_unknown_format_is_refused() -> None:
    x, scratch = random(2, 64), scratch_for(2, 64, 64)
    weight = LinearWeight(torch.zeros(64, 32, dtype=torch.uint8, device=DEVICE), "nf4", random(2, 64))
    with pytest.raises(ModelError, match="stores its weight in format 'nf4'"):
        linear(x, weight, random(2, 64), scratch)


MAX_FP8_ERROR = 0.04
"""Relative error of a product with activations in fp8, which round to 2^-4 at most."""


def quantized_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x quantised to fp8 with a scale per row, and dequantised, in float64."""
    scale = x.double().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x.double() / scale).float().to(torch.float8_e4m3fn).double() * scale


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: Triton's interpreter rounds to fp8 wrongly")
@pytest.mark.parametrize("scheme", ["fp8 per row", "fp8 per matrix"])
@pytest.mark.parametrize("form", ["plain", "added_biased", "gated"])
@pytest.mark.parametrize("rows", [MAX_ROWS + 1, 500, 1030])
def test_many_rows_are_quantised_where_the_checkpoint_says_so(scheme: str, form: str, rows: int) -> None:
    """Compares with the same arithmetic in float64, and, more loosely, with plain activations."""
    outputs, inputs, gated = 1000 if rows > 1000 else 1008, 2048, form == "gated"  # cuBLAS takes multiples of 16
    layer = make_layer(scheme, {"a": outputs, "b": outputs} if gated else {"a": outputs}, inputs)
    weight = layer.linear_weight._replace(quantizes_activations=True)
    x, bias = random(rows, inputs), random(layer.outputs, seed=3) if form == "added_biased" else None
    if not multiplies_fp8(x, weight):
        pytest.skip("this GPU has no fp8")
    before = random(rows, outputs, seed=4)
    found = []
    for exact in (quantized_rows(x), x.double()):
        value = exact @ exact_weight(layer).double().T + (0 if bias is None else bias.double())
        wanted = F.silu(value[:, :outputs]) * value[:, outputs:] if gated else value
        out = before.clone() if form == "added_biased" else torch.full_like(before, float("nan"))
        linear(x, weight, out, scratch_for(rows, outputs, inputs), bias=bias, gated=gated, add=form == "added_biased")
        found.append(relative_error(out, wanted + (before.double() if form == "added_biased" else 0)))
    assert found[0] < 3 * TOLERANCE and found[1] < MAX_FP8_ERROR
    assert found[1] > 2 * found[0]  # the activations were quantised
    if not gated and form == "plain":
        assert torch.equal(multiply(x, weight, None), out)
    few = torch.empty(5, outputs, dtype=DTYPE, device=DEVICE)
    if form == "plain":
        linear(x[:5], weight, few, scratch_for(5, outputs, inputs))
        assert relative_error(few, x[:5].double() @ exact_weight(layer).double().T) < TOLERANCE

"""Quantised weights: every format's tensors mean what an independent reading of its definition says, bit for bit."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.checkpoint.quantization import Quantization, online_quantization, read_quantization
from engine.distributed.tensor_parallel import TensorParallel
from engine.layers.formats import ScaledWeight, build_method
from engine.layers.formats.slots import plain_slots
from engine.layers.linear import Linear
from engine.layers.moe import ExpertWeights
from engine.layers.parallel import ColumnParallelLinear, RowParallelLinear
from tests.support.quantized import FORMATS

CPU = torch.device("cpu")
PARTS = {"q_proj": 96, "k_proj": 32, "v_proj": 32}
INPUTS = 96


def quantization(name: str) -> Quantization:
    found = read_quantization({"quantization_config": FORMATS[name].config}, "config.json")
    assert found is not None
    return found


def rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def make_linear(name: str, parts: dict[str, int] = PARTS, inputs: int = INPUTS, cls=Linear, **settings) -> Linear:
    scheme = quantization(name).scheme("model.layers.0.self_attn.q_proj")
    parallel = settings.get("parallel", TensorParallel())
    column = cls is ColumnParallelLinear
    own = {part: rows // parallel.size if column else rows for part, rows in parts.items()}
    method = build_method(scheme, own, parallel.size)
    return cls(parts, inputs, bias=False, dtype=torch.float32, device=CPU, method=method, **settings)


def fill(layer: Linear, name: str, parts: dict[str, int] = PARTS, inputs: int = INPUTS) -> torch.Tensor:
    """Write made-up checkpoint tensors to the layer; return the weight that they stand for, in float32."""
    weights, slots, generator = [], layer.slots("m"), rng(name)
    seen = set()
    for part, rows in parts.items():
        tensors, weight = FORMATS[name].matrix(generator, rows, inputs)
        for last, tensor in tensors.items():
            slot = slots[f"m.{part}.{last}"]
            assert slot.problem(tensor) is None, (part, last)
            slot.write(tensor)
            seen.add(f"m.{part}.{last}")
        weights.append(torch.from_numpy(np.ascontiguousarray(weight)).float())
    for full, slot in slots.items():
        names = {full, *(f"{full.rpartition('.')[0]}.{other}" for other in slot.others)}
        assert not slot.required or names & seen, full
    return torch.cat(weights)


def dense(layer: Linear) -> torch.Tensor:
    return layer.method.dense(layer, torch.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_unpacked_weights_are_those_of_the_formats_definition(name: str) -> None:
    layer = make_linear(name)
    wanted = fill(layer, name)
    # the product of an integer, or of a small float, and a scale is rounded once in both
    assert torch.equal(dense(layer), wanted)
    x = torch.randn(5, INPUTS)
    assert torch.equal(layer(x), F.linear(x, wanted))


@pytest.mark.parametrize("name", FORMATS)
def test_checkpoint_tensors_are_read_back_as_they_were_written(name: str) -> None:
    layer, generator = make_linear(name), rng(name)
    fill(layer, name)
    slots = layer.slots("m")
    for part, rows in PARTS.items():
        tensors, _ = FORMATS[name].matrix(generator, rows, INPUTS)
        for last, tensor in tensors.items():
            slot = slots[f"m.{part}.{last}"]
            if not slot.is_kept:
                continue
            found = slot.read()
            assert torch.equal(found.float(), tensor.float().reshape(found.shape)), last


@pytest.mark.parametrize("rows", [40, 200])
@pytest.mark.parametrize("inputs", [80, 136])
@pytest.mark.parametrize("name", ["fp8-block", "modelopt-block", "ct-fp8-block", "ct-w8a16", "ct-int4-channel", "gptq"])
def test_shapes_need_not_be_multiples_of_the_block(name: str, rows: int, inputs: int) -> None:
    parts = {"gate_proj": rows, "up_proj": rows}
    layer = make_linear(name, parts, inputs)
    wanted = fill(layer, name, parts, inputs)
    assert torch.equal(dense(layer), wanted)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_store_their_parts_of_weights_and_scales(name: str, ranks: int) -> None:
    """Also where a rank's part begins within a block or a group."""
    inputs = 128 if "mxfp4" in name else INPUTS
    parts = {"gate_proj": 80, "up_proj": 80}
    down = {"down_proj": 40}
    whole = fill(make_linear(name, parts, inputs), name, parts, inputs)
    whole_down = fill(make_linear(name, down, inputs), name, down, inputs)
    for rank in range(ranks):
        parallel = TensorParallel(rank, ranks)
        column = make_linear(name, parts, inputs, ColumnParallelLinear, parallel=parallel)
        fill(column, name, parts, inputs)
        rows = [part.chunk(ranks)[rank] for part in whole.chunk(2)]
        assert torch.equal(dense(column), torch.cat(rows))
        row = make_linear(name, down, inputs, RowParallelLinear, parallel=parallel)
        fill(row, name, down, inputs)
        assert torch.equal(dense(row), whole_down.chunk(ranks, dim=1)[rank])


@pytest.mark.parametrize("name", FORMATS)
def test_experts_have_weights_and_scales_of_their_own(name: str) -> None:
    scheme, inputs, width = quantization(name).scheme("model.layers.0.mlp.experts.0.gate_proj"), 64, 32
    generator = rng(name)
    method = build_method(scheme, {"gate_proj": width, "up_proj": width})
    experts = ExpertWeights(3, 2 * width, inputs, dtype=torch.float32, device=CPU, method=method)
    down = ExpertWeights(3, inputs, 2 * width, dtype=torch.float32, device=CPU, method=method)
    wanted = []
    for expert in range(3):
        for start in (0, width):
            tensors, weight = FORMATS[name].matrix(generator, width, inputs)
            slots = method.slots(experts, start, width, expert)
            for last, tensor in tensors.items():
                slots[last].slot.write(tensor)
            wanted.append(torch.from_numpy(np.ascontiguousarray(weight)).float())
    assert torch.equal(experts.dense(torch.float32), torch.stack([*wanted]).view(3, 2 * width, inputs))
    tensors, weight = FORMATS[name].matrix(generator, inputs, 2 * width)
    slots = method.slots(down, 0, inputs, 1)
    for last, tensor in tensors.items():
        slots[last].slot.write(tensor)
    assert torch.equal(down.dense(torch.float32)[1], torch.from_numpy(np.ascontiguousarray(weight)).float())


def test_a_large_layer_is_dequantised_tile_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_linear("fp8-block")
    weight, x = fill(layer, "fp8-block"), torch.randn(3, INPUTS)
    monkeypatch.setitem(ScaledWeight.apply.__globals__, "TILE_ELEMENTS", 40 * INPUTS)
    assert torch.allclose(layer(x), F.linear(x, weight), atol=1e-6)
    layer.bias = torch.randn(160)
    assert torch.allclose(layer(x), F.linear(x, weight, layer.bias), atol=1e-6)


# The largest error of a rounded weight, in scales of its block: half a step; a magnitude of 448 has steps of 32, one of
# 6 steps of 2, and a symmetric integer range lacks half a step at its positive end.
STEPS = {"fp8": 16.01, "int8": 0.51, "int4": 0.51, "mxfp4": 2.0}


@pytest.mark.parametrize("name", [*FORMATS, "online-fp8", "online-int8", "online-int4"])
def test_a_plain_weight_is_quantised_in_place(name: str) -> None:
    """Within half a step, with all addresses kept, and without a change to the layer's other parts."""
    online = name.startswith("online-")
    found = online_quantization(name.removeprefix("online-")) if online else quantization(name)
    scheme = found.scheme("model.q_proj")
    method = build_method(scheme, PARTS)
    layer = Linear(PARTS, INPUTS, bias=False, dtype=torch.float32, device=CPU, method=method)
    plain = layer.slots("m") if online else plain_slots(layer.slots("m"))
    assert list(plain) == [f"m.{part}.weight" for part in PARTS]
    for index, part in enumerate(PARTS):
        plain[f"m.{part}.weight"].write(
            torch.randn(PARTS[part], INPUTS, generator=torch.Generator().manual_seed(index))
        )
    before, addresses = dense(layer), {key: value.data_ptr() for key, value in layer.named_buffers()}
    update = 0.3 * torch.randn(PARTS["k_proj"], INPUTS, generator=torch.Generator().manual_seed(9)) + 0.05
    slot = plain["m.k_proj.weight"]
    assert slot.shape == (PARTS["k_proj"], INPUTS)
    slot.write(update.bfloat16())
    after = dense(layer)
    assert {key: value.data_ptr() for key, value in layer.named_buffers()} == addresses
    assert torch.equal(after[:96], before[:96]) and torch.equal(after[128:], before[128:])
    _, scale, _ = method.quantize(update.bfloat16().float())
    rows, columns = scheme.block
    scale = method.element.decode_scale(scale)
    step = scale.repeat_interleave(rows or PARTS["k_proj"], 0).repeat_interleave(columns or INPUTS, 1)
    error = (after[96:128] - update.bfloat16().float()).abs() / step[: PARTS["k_proj"], :INPUTS]
    assert error.max() <= STEPS[scheme.element]
    assert error.max() > 0.2 * STEPS[scheme.element]  # the bound is tight: a wrong group would exceed it
    assert torch.equal(slot.read(), after[96:128])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["fp8-block", "fp8-tensor", "ct-int4-zeros", "gptq-desc-act", "ct-mxfp4"])
def test_ranks_quantise_a_plain_weight_as_one_rank_does(name: str, ranks: int) -> None:
    parts, update = {"down_proj": 48}, torch.randn(48, 128)
    single = make_linear(name, parts, 128)
    plain_slots(single.slots("m"))["m.down_proj.weight"].write(update)
    for cls, dim in ((ColumnParallelLinear, 0), (RowParallelLinear, 1)):
        for rank in range(ranks):
            layer = make_linear(name, parts, 128, cls, parallel=TensorParallel(rank, ranks))
            plain_slots(layer.slots("m"))["m.down_proj.weight"].write(update)
            assert torch.equal(dense(layer), dense(single).chunk(ranks, dim=dim)[rank])


@pytest.mark.parametrize("element", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_values_that_no_scale_fits(element: str, value: float) -> None:
    """A weight that is not finite is not hidden; one of zeros stays zero."""
    method = build_method(online_quantization(element).scheme("q"), {"q": 16})
    layer = Linear({"q": 16}, 256, bias=False, dtype=torch.float32, device=CPU, method=method)
    layer.slots("m")["m.q.weight"].write(torch.full((16, 256), value))
    assert torch.equal(dense(layer), torch.zeros(16, 256)) if value == 0 else not dense(layer).isfinite().any()


@pytest.mark.parametrize("name", ["awq", "gptq-desc-act", "ct-int4-zeros", "fp8-block", "ct-w8a16"])
def test_a_step_on_bfloat16_rounds_the_weight_once(name: str) -> None:
    layer = make_linear(name)
    weight, x = fill(layer, name), torch.eye(INPUTS).bfloat16()  # sums of one product have no order
    assert torch.equal(layer(x), weight.bfloat16().T)
    assert torch.equal(layer(x[:4]), weight.bfloat16().T[:4])


def test_storage_is_that_of_the_format() -> None:
    """No copy in another dtype: the bytes are those of the codes, and 4 for each scale."""
    for name, expected in (("fp8-block", 160 * 96), ("ct-int4-group", 160 * 48), ("ct-mxfp4", 160 * 48)):
        layer = make_linear(name)
        assert not list(layer.parameters())
        scales = layer.scale.nbytes
        assert sum(one.nbytes for one in layer.buffers()) == expected + scales
    assert make_linear("fp8-block", {"gate_proj": 256}, 384).scale.shape == (8, 8)


def test_compressed_tensors_itself_reads_the_same_weights() -> None:
    """Runs where the package is installed: its own packing, and its own dequantisation."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    for name, form in FORMATS.items():
        if form.config["quant_method"] != "compressed-tensors" or name == "ct-int4-g-idx":
            continue
        layer = make_linear(name, {"q_proj": 96})
        fill(layer, name, {"q_proj": 96})
        tensors, _ = form.matrix(rng(name), 96, INPUTS)
        group = form.config["config_groups"]["group_0"]
        compressor = BaseCompressor.get_value_from_registry(form.config["format"])
        found = compressor.decompress(dict(tensors), QuantizationScheme(**group))["weight"]
        assert torch.equal(dense(layer), found.float()), name


def test_compressed_tensors_reads_the_same_weights_from_awq() -> None:
    """Runs where the package is installed: its converter of AutoAWQ's checkpoints."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    layer = make_linear("awq", {"q_proj": 96})
    fill(layer, "awq", {"q_proj": 96})
    tensors, _ = FORMATS["awq"].matrix(rng("awq"), 96, INPUTS)
    codes, zeros = AutoAWQConverter.unpack_awq(tensors["qweight"], tensors["qzeros"], 4)
    codes, zeros = (one & 15 for one in AutoAWQConverter.reverse_awq_order(codes, zeros, 4))
    groups = torch.arange(INPUTS) // 16
    assert torch.equal(dense(layer), ((codes - zeros[groups]) * tensors["scales"].float()[groups]).T)


def test_transformers_reads_the_same_weights_from_block_fp8() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    layer = make_linear("fp8-block", {"q_proj": 96})
    fill(layer, "fp8-block", {"q_proj": 96})
    tensors, _ = FORMATS["fp8-block"].matrix(rng("fp8-block"), 96, INPUTS)
    name = "q_proj.weight"
    found = Fp8Dequantize(None).convert({name: [tensors["weight"]], f"{name}_scale_inv": [tensors["weight_scale_inv"]]})
    weight = found[name][0] if isinstance(found[name], list) else found[name]
    assert torch.equal(dense(layer), weight.float())


def test_transformers_reads_the_same_weights_from_mxfp4() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    layer = make_linear("mxfp4", {"q_proj": 96})
    fill(layer, "mxfp4", {"q_proj": 96})
    tensors, _ = FORMATS["mxfp4"].matrix(rng("mxfp4"), 96, INPUTS)
    blocks, scales = tensors["weight_blocks"].unsqueeze(0), tensors["weight_scales"].unsqueeze(0)
    found = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [1, inputs, outputs]
    assert torch.equal(dense(layer), found[0].T)

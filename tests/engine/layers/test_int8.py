"""8-bit layers on a CPU: the numbers of a Q8_0 file, exactly, for few rows and many; in-place writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Engine, EngineConfig
from engine.errors import ModelError
from engine.kernels.cpu_library import cpu_kernels_loaded
from engine.layers import int8
from engine.layers.int4 import DENSE_ABOVE
from engine.layers.int8 import Int8Weight
from engine.layers.int8_table import dequantize_int8
from engine.layers.linear import Linear
from engine.loader import cpu_formats
from engine.loader.cpu_formats import gguf_config, load_gguf
from tests.engine.checkpoint.gguf_samples import write_gguf

pytestmark = pytest.mark.skipif(not cpu_kernels_loaded(), reason="needs a C++ compiler and AVX2")


def layer_of(
    parts: dict[str, int], inputs: int, bias: bool, keep_dense: bool, group: int = 32
) -> tuple[Linear, torch.Tensor]:
    """Return a layer with random codes, and its weight in float32."""
    method, rows = Int8Weight(keep_dense=keep_dense, group=group), sum(parts.values())
    layer = Linear(parts, inputs, bias=bias, dtype=torch.bfloat16, device=torch.device("cpu"), method=method)
    if bias:
        layer.bias.copy_(torch.randn(rows))
    codes = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8)
    scales = (torch.rand(rows, inputs // group) * 0.01).half()
    int8.load_codes(layer, codes, scales)
    return layer, dequantize_int8(codes, scales)


@settings(max_examples=25, deadline=None)
@given(
    outputs=st.integers(1, 70), groups=st.integers(1, 5), rows=st.integers(1, 2 * DENSE_ABOVE), bias=st.booleans(),
    keep_dense=st.booleans(), group=st.sampled_from([16, 32]),
)  # fmt: skip
def test_products_are_right_for_every_shape(
    outputs: int, groups: int, rows: int, bias: bool, keep_dense: bool, group: int
) -> None:
    layer, weight = layer_of({"a": outputs}, 32 * groups, bias, keep_dense, group)
    x = torch.randn(rows, 32 * groups).bfloat16()
    wanted = x.double() @ weight.double().T + (layer.bias.double() if bias else 0)
    # one rounding of the product, and of each weight in the dense copy
    bound = wanted.abs() + x.double().abs() @ weight.double().abs().T
    assert bool(((layer(x).double() - wanted).abs() <= 2.0**-8 * bound + 1e-6).all())


@pytest.mark.parametrize("group", [16, 32])
def test_a_row_has_the_same_bits_in_every_batch(group: int) -> None:
    layer, _ = layer_of({"a": 48}, 96, bias=True, keep_dense=False, group=group)
    x = torch.randn(40, 96).bfloat16()
    whole = layer(x)
    for start, stop in ((0, 1), (3, 12), (17, 40)):
        assert torch.equal(layer(x[start:stop]), whole[start:stop])


@pytest.mark.parametrize("keep_dense", [True, False])
def test_parts_are_written_and_read_by_name(keep_dense: bool) -> None:
    layer, weight = layer_of({"q": 20, "k": 12}, 64, bias=False, keep_dense=keep_dense)
    address, slots = layer.table.codes.data_ptr(), layer.slots("m")
    assert slots["m.k.weight"].shape == (12, 64)
    assert torch.equal(slots["m.k.weight"].read(), weight[20:].bfloat16())
    update = torch.randn(12, 64)
    slots["m.k.weight"].write(update)
    assert (slots["m.k.weight"].read().float() - update).abs().max() < update.abs().max() / 127
    assert torch.equal(slots["m.q.weight"].read(), weight[:20].bfloat16())
    assert layer.table.codes.data_ptr() == address
    if keep_dense:
        assert torch.equal(layer.weight[20:], slots["m.k.weight"].read())
    with pytest.raises(ModelError, match="can't be stored in 8 bits"):
        slots["m.k.weight"].write(torch.full((12, 64), float("inf")))


def test_scales_of_larger_groups_are_repeated() -> None:
    layer, weight = layer_of({"q": 20, "k": 12}, 64, bias=False, keep_dense=True, group=16)
    codes, scales = torch.randint(-128, 128, (12, 64), dtype=torch.int8), torch.rand(12, 2).half()
    int8.load_codes(layer, codes, scales, start=20)
    wanted = torch.cat((weight[:20], dequantize_int8(codes, scales))).bfloat16()
    found = torch.cat([slot.read() for slot in layer.slots("m").values()])
    assert torch.equal(found, wanted) and torch.equal(layer.weight, wanted)


def methods(model) -> set[type]:
    return {type(part.method) for layer in model.layers for part in layer.modules() if isinstance(part, Linear)}


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_file_in_q8_0_keeps_its_codes(tmp_path: Path, architecture: str) -> None:
    weights = write_gguf(tmp_path / "m.gguf", architecture=architecture, matrices=Kind.Q8_0, embedding=Kind.Q8_0)
    path = str(tmp_path / "m.gguf")
    assert gguf_config(path)[1] == "int8"
    model = load_gguf(path, cpu_weight_format="int8")[1]
    assert methods(model) == {Int8Weight}
    for name, slot in model.weight_slots().items():
        assert torch.equal(slot.read().float(), weights[name].bfloat16().float()), name


def test_without_kernels_such_a_file_is_stored_in_16_bits(tmp_path: Path, monkeypatch) -> None:
    write_gguf(tmp_path / "m.gguf", matrices=Kind.Q8_0, embedding=Kind.Q8_0)
    monkeypatch.setattr(cpu_formats, "cpu_kernels_loaded", lambda: False)
    monkeypatch.setattr(cpu_formats, "has_fast_bf16", lambda: True)
    model = load_gguf(str(tmp_path / "m.gguf"))[1]
    assert Int8Weight not in methods(model) and model.dtype == torch.bfloat16


def test_an_engine_serves_a_file_in_q8_0(tmp_path: Path) -> None:
    """Its first tokens are those of the same numbers in bfloat16."""
    write_gguf(tmp_path / "m.gguf", matrices=Kind.Q8_0, embedding=Kind.Q8_0)
    found = {}
    for form in ("bf16", "auto"):
        config = EngineConfig(model=str(tmp_path / "m.gguf"), cpu_weight_format=form, max_num_seqs=2, max_model_len=64)
        with Engine(config) as engine:
            outputs = engine.generate(
                prompt_token_ids=[[5, 9, 44, 120], list(range(3, 40))],
                sampling_params={"max_tokens": 8, "temperature": 0.0, "ignore_eos": True},
            )
        assert [len(output.token_ids) for output in outputs] == [8, 8]
        found[form] = [output.token_ids[0] for output in outputs]
    assert found["auto"] == found["bf16"]

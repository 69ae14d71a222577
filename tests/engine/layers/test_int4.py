"""4-bit layers: exact for GGUF codes, bounded error for quantised weights, in-place writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gguf.constants import GGMLQuantizationType as Kind

from engine.attention.kv_cache import KVCache
from engine.errors import ConfigError, ModelError
from engine.layers.int4 import (
    DENSE_ABOVE,
    Int4Weight,
    dequantize,
    effective_weight,
    fits_int4,
    int4_available,
    load_codes,
    quantize,
    unpack_codes,
)
from engine.layers.linear import Linear
from engine.loader import cpu_formats
from engine.loader.cpu_formats import build_low_bit_model, choose_cpu_format, load_gguf
from tests.engine.checkpoint.gguf_samples import write_gguf
from tests.support.attention import prefill_attention

pytestmark = pytest.mark.skipif(not int4_available(), reason="this CPU or torch has no fast 4-bit kernel")

BF16_STEP = 2.0**-8
"""Relative spacing of bfloat16 numbers; the rounding error is at most half of it."""


def random_codes(rows: int, inputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, inputs), generator=rng, dtype=torch.uint8)
    scale = torch.rand(rows, inputs // 32, generator=rng) * 0.02
    zero = torch.randn(rows, inputs // 32, generator=rng) * 0.01
    return codes, scale, zero


def random_weight(rows: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)) * 0.05


def empty_layer(
    parts: dict[str, int],
    inputs: int,
    bias: bool = False,
    keep_dense: bool = False,
    dense_above: int = DENSE_ABOVE,
) -> Linear:
    method = Int4Weight(keep_dense=keep_dense, dense_above=dense_above)
    return Linear(parts, inputs, bias=bias, dtype=torch.bfloat16, device=torch.device("cpu"), method=method)


def layer_of(parts: dict[str, int], inputs: int, **settings) -> Linear:
    layer = empty_layer(parts, inputs, **settings)
    load_codes(layer, *random_codes(layer.outputs, inputs))
    return layer


def projections(model) -> list[Linear]:
    return [part for layer in model.layers for part in layer.modules() if isinstance(part, Linear)]


def assert_is_product(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Assert that out [T, N] equals x Wᵀ up to float32 summation and one rounding to bfloat16."""
    exact = x.double() @ weight.double().T
    allowed = exact.abs() * BF16_STEP + (x.double().abs() @ weight.double().abs().T) * 2.0**-18
    assert out.dtype == torch.bfloat16
    assert bool(((out.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("rows", [16, 48, 64, 160, 576])
@pytest.mark.parametrize("tokens", [1, 3, 8, 40])
def test_product_matches_the_dequantized_weight(rows: int, tokens: int) -> None:
    codes, scale, zero = random_codes(rows, 96)
    layer = empty_layer({"w": rows}, 96)
    load_codes(layer, codes, scale, zero)
    x = torch.randn(tokens, 96).bfloat16()
    assert_is_product(layer(x), x, dequantize(codes, scale.bfloat16(), zero.bfloat16()))


def test_bias_is_added() -> None:
    layer = layer_of({"w": 32}, 64, bias=True)
    layer.bias.copy_(torch.arange(32))
    with_bias, zero_in = layer(torch.zeros(2, 64, dtype=torch.bfloat16)), torch.arange(32).bfloat16()
    assert torch.equal(with_bias, zero_in.expand(2, 32))


def test_codes_are_read_back_exactly() -> None:
    codes, scale, zero = random_codes(160, 64)
    layer = empty_layer({"w": 160}, 64)
    load_codes(layer, codes, scale, zero)
    assert torch.equal(unpack_codes(layer), codes)
    assert torch.equal(effective_weight(layer), dequantize(codes, scale.bfloat16(), zero.bfloat16()))


def test_quantisation_error_is_at_most_half_a_step() -> None:
    weight = random_weight(64, 128)
    codes, scale, zero = quantize(weight)
    error = (dequantize(codes, scale, zero) - weight).view(64, 4, 32).abs().amax(dim=2)
    # rounding scale and zero to bfloat16 moves the ends of the range, which adds to half a step
    assert bool((error <= 0.5 * scale + BF16_STEP * (8 * scale + zero.abs())).all())
    assert codes.max() <= 15
    assert bool((error >= 0.2 * scale).any())  # the bound is tight: a wider format would fail


def test_quantisation_keeps_equal_values_and_zeros() -> None:
    weight = torch.cat((torch.full((16, 32), 0.25), torch.zeros(16, 32)), dim=1)
    assert torch.equal(dequantize(*quantize(weight)), weight)


@pytest.mark.parametrize(("parts", "name"), [
    ((96, 32, 32), "k_proj"), ((96, 32, 32), "v_proj"), ((128, 64, 64), "q_proj"), ((128, 64, 64), "k_proj"),
    ((128, 64, 32), "v_proj"), ((64, 32, 32), "q_proj"), ((160, 32, 32), "q_proj"),
])  # fmt: skip
def test_writing_one_part_leaves_the_others_and_all_addresses(parts: tuple[int, int, int], name: str) -> None:
    names = ("q_proj", "k_proj", "v_proj")
    layer = layer_of(dict(zip(names, parts, strict=True)), 64, keep_dense=True)
    start, rows = sum(parts[: names.index(name)]), parts[names.index(name)]
    end = start + rows
    before, dense_before = effective_weight(layer), layer.weight.clone()
    addresses = [tensor.data_ptr() for tensor in (layer.packed, layer.scales, layer.weight)]
    update = random_weight(rows, 64, seed=5)
    slot = layer.slots("self_attn")[f"self_attn.{name}.weight"]
    assert slot.shape == (rows, 64)
    slot.write(update)
    after = effective_weight(layer)
    assert [tensor.data_ptr() for tensor in (layer.packed, layer.scales, layer.weight)] == addresses
    assert torch.equal(after[:start], before[:start]) and torch.equal(after[end:], before[end:])
    assert torch.equal(after[start:end], dequantize(*quantize(update)))
    assert torch.equal(slot.read(), after[start:end].bfloat16())
    assert torch.equal(layer.weight[:start], dense_before[:start])
    assert torch.equal(layer.weight[start:end], after[start:end].bfloat16())


def test_few_rows_use_int4_and_many_rows_the_dense_copy() -> None:
    layer = layer_of({"w": 32}, 64, keep_dense=True, dense_above=4)
    layer.weight.zero_()
    x = torch.ones(5, 64, dtype=torch.bfloat16)
    assert layer(x[:4]).abs().sum() > 0
    assert layer(x).abs().sum() == 0


def test_without_a_dense_copy_many_rows_use_int4() -> None:
    layer = layer_of({"w": 32}, 64, dense_above=4)
    x = torch.randn(70, 64).bfloat16()
    assert_is_product(layer(x), x, effective_weight(layer))


@pytest.mark.parametrize(("rows", "inputs"), [(24, 64), (32, 48), (8, 32)])
def test_unsupported_shapes_are_rejected(rows: int, inputs: int) -> None:
    assert not fits_int4(rows, inputs)
    with pytest.raises(ModelError, match=f"{rows} x {inputs}.*bf16"):
        empty_layer({"w": rows}, inputs)


def hidden_of(model, token_ids: list[int]) -> torch.Tensor:
    config = model.config
    kv = KVCache(config.cache_specs(), 4, 16, model.dtype, "cpu")
    attention = prefill_attention(kv, [(0, len(token_ids))], [[1, 2]])
    return model(torch.tensor(token_ids), torch.arange(len(token_ids)), attention)


@torch.inference_mode()
def relative_distance(model, reference, token_ids: list[int]) -> float:
    found = model.compute_logits(hidden_of(model, token_ids)).float()
    wanted = reference.compute_logits(hidden_of(reference, token_ids)).float()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("architecture", "kind"), [("llama", Kind.Q4_1), ("qwen2", Kind.Q4_1), ("llama", Kind.Q4_0)])
def test_int4_gguf_is_about_as_accurate_as_bf16(tmp_path: Path, architecture: str, kind: Kind) -> None:
    path = str(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", architecture=architecture, matrices=kind, embedding=Kind.Q8_0)
    exact, bf16, int4 = (load_gguf(path, cpu_weight_format=name)[1] for name in ("fp32", "bf16", "int4"))
    assert [type(layer.method) for layer in projections(int4)] == [Int4Weight] * 8
    for ids in ([5, 9, 44], [5, 9, 44, 120, 7, 3, 200, 15, 8, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70]):
        # the scales add one rounding to bf16's error; a wrong permutation or group would give about 1
        assert relative_distance(int4, exact, ids) < 2 * relative_distance(bf16, exact, ids) < 0.04


def test_4_bit_and_dense_models_have_the_same_weights_by_name(tmp_path: Path) -> None:
    path = str(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", architecture="qwen2", matrices=Kind.Q4_1, embedding=Kind.Q8_0)
    dense, int4 = (load_gguf(path, cpu_weight_format=name)[1] for name in ("bf16", "int4"))
    int4_slots = int4.weight_slots()
    assert list(int4_slots) == list(dense.weight_slots())
    for name, slot in dense.weight_slots().items():
        assert int4_slots[name].shape == slot.shape, name
        assert (int4_slots[name].read().float() - slot.read().float()).abs().max() <= 0.01 * slot.read().abs().max()


def test_matrices_without_4_bit_codes_stay_dense(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", matrices=Kind.Q8_0)
    model = load_gguf(str(tmp_path / "m.gguf"), cpu_weight_format="int4")[1]
    assert not any(isinstance(layer.method, Int4Weight) for layer in projections(model))


def quantised_copy(model, **options):
    """Return a 4-bit model with the weights of a 16-bit one."""
    quantised = build_low_bit_model(model.config, model.dtype, **options)
    slots = quantised.weight_slots()
    for name, weight in model.named_weights():
        slots[name].write(weight)
    return quantised


def test_writing_dense_weights_quantises_them(tmp_path: Path) -> None:
    path = str(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", architecture="qwen2", tied=False)
    exact = load_gguf(path, cpu_weight_format="bf16")[1]
    model = quantised_copy(exact)
    ids = [5, 9, 44, 120, 7]
    assert all(isinstance(layer.method, Int4Weight) for layer in projections(model))
    assert 0.005 < relative_distance(model, exact, ids) < 0.3
    assert list(model.weight_slots()) == list(exact.weight_slots())


def test_dense_copies_are_kept_only_on_demand(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    exact = load_gguf(str(tmp_path / "m.gguf"), cpu_weight_format="bf16")[1]
    for keep in (True, False):
        assert (quantised_copy(exact, keep_dense=keep).layers[0].mlp.down.weight is not None) == keep


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("quantises", [True, False], ids=["quantised", "read"])
def test_the_head_of_a_4bit_model_is_stored_in_float32(tmp_path: Path, tied: bool, quantises: bool) -> None:
    """Its values, and those of an embedding that is tied to it, are those of the 16-bit model."""
    path = str(tmp_path / "m.gguf")
    write_gguf(tmp_path / "m.gguf", tied=tied)
    exact, model = (load_gguf(path, cpu_weight_format=form)[1] for form in ("bf16", "bf16" if quantises else "int4"))
    if quantises:
        model = quantised_copy(model)
    ids, hidden = torch.tensor([5, 9, 44]), random_weight(3, model.config.hidden_size).bfloat16()
    assert model.lm_head.weight.dtype == torch.float32
    assert model.embed(ids).dtype == torch.bfloat16 and torch.equal(model.embed(ids), exact.embed(ids))
    assert torch.equal(model.compute_logits(hidden), F.linear(exact.norm(hidden).float(), exact.lm_head.weight.float()))
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    slot, address = model.weight_slots()[name], model.lm_head.weight.data_ptr()
    assert slot.dtype == torch.bfloat16 and torch.equal(slot.read(), exact.weight_slots()[name].read())
    update = random_weight(*slot.shape, seed=1)
    slot.write(update)
    assert torch.equal(slot.read(), update.bfloat16()) and model.lm_head.weight.data_ptr() == address
    assert torch.equal(model.lm_head.weight, update.bfloat16().float())
    assert torch.equal(model.embed(ids), update[ids].bfloat16() if tied else exact.embed(ids))


def test_a_head_that_would_take_too_much_memory_stays_in_16_bits(tmp_path: Path, monkeypatch) -> None:
    write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr(cpu_formats, "FLOAT32_HEAD_BYTES", 1000)
    assert load_gguf(str(tmp_path / "m.gguf"), cpu_weight_format="int4")[1].lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(("requested", "dtype", "stored", "chosen"), [
    ("auto", "float32", "int4", "fp32"),
    ("auto", "bfloat16", None, "bf16"),
    ("bf16", "auto", "int4", "bf16"),
    ("fp32", "auto", "int8", "fp32"),
    ("int4", "bfloat16", None, "int4"),
    ("int8", "bfloat16", "int8", "int8"),
])  # fmt: skip
def test_format_follows_the_request(requested: str, dtype: str, stored: str | None, chosen: str) -> None:
    assert choose_cpu_format(requested, dtype, stored) == chosen


@pytest.mark.parametrize(("requested", "dtype"), [
    ("bf16", "float32"), ("int4", "float32"), ("fp32", "bfloat16"), ("auto", "float16"), ("q4", "auto"),
    ("int8", "auto"),
])  # fmt: skip
def test_contradictory_formats_are_rejected(requested: str, dtype: str) -> None:
    with pytest.raises(ConfigError, match=requested if requested in ("q4", "int8") else "dtype"):
        choose_cpu_format(requested, dtype)

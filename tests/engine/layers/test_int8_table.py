"""8-bit heads and embeddings: exact for GGUF codes, bounded error for written weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gguf.constants import GGMLQuantizationType as Kind

from engine.errors import ModelError
from engine.kernels.cpu_library import cpu_kernels_loaded
from engine.layers.float32_table import Float32Head
from engine.layers.int8_table import Int8Embedding, Int8Head, Int8Table, dequantize_int8, quantize_int8
from engine.loader import cpu_formats
from engine.loader.cpu_formats import load_gguf
from tests.engine.checkpoint.gguf_samples import write_gguf

needs_kernels = pytest.mark.skipif(not cpu_kernels_loaded(), reason="needs a C++ compiler and AVX2")


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_a_table_keeps_codes_and_addresses(rows: int, group: int) -> None:
    table = Int8Table(rows, 96, group)
    addresses = (table.codes.data_ptr(), table.scales.data_ptr())
    codes = torch.randint(-128, 128, (rows, 96), dtype=torch.int8)
    scales = torch.rand(rows, 96 // group).half()
    table.store(codes, scales)
    assert all(map(torch.equal, table.load(), (codes, scales)))
    assert (table.codes.data_ptr(), table.scales.data_ptr()) == addresses


def test_quantisation_error_is_at_most_half_a_step() -> None:
    weight = torch.randn(24, 96) * torch.logspace(-8, 2, 24).unsqueeze(1)
    weight[3] = 0
    codes, scales = quantize_int8(weight)
    found = dequantize_int8(codes, scales)
    # a rounded scale is too small for the largest code by up to 2^-11 of 127 codes
    allowed = scales.float().repeat_interleave(32, 1) * 0.57
    assert bool(((found - weight).abs() <= allowed).all())
    assert bool(((found - weight).abs() >= 0.2 * allowed).any())
    assert torch.equal(found[3], weight[3])


def test_quantising_dequantised_weights_is_exact() -> None:
    codes, scales = quantize_int8(torch.randn(16, 64))
    again = quantize_int8(dequantize_int8(codes, scales))
    assert torch.equal(dequantize_int8(*again), dequantize_int8(codes, scales))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e9])
def test_weights_beyond_the_range_are_refused(value: float) -> None:
    weight = torch.zeros(2, 32)
    weight[1, 7] = value
    with pytest.raises(ModelError, match="can't be stored in 8 bits"):
        quantize_int8(weight)


def test_a_width_that_is_not_a_multiple_of_a_group_is_refused() -> None:
    with pytest.raises(ModelError, match="10 x 48.*multiple of 32"):
        Int8Table(10, 48)


@needs_kernels
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_q8_0_head_keeps_the_numbers_of_the_file(tmp_path: Path, tied: bool) -> None:
    path = str(tmp_path / "m.gguf")
    weights = write_gguf(
        tmp_path / "m.gguf", tied=tied, matrices=Kind.Q8_0 if not tied else Kind.Q4_1, embedding=Kind.Q8_0
    )
    exact, model = (load_gguf(path, cpu_weight_format=form)[1] for form in ("bf16", "int4"))
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert isinstance(model.lm_head, Int8Head) and isinstance(model.embedding, Int8Embedding) == tied
    hidden = torch.randn(5, model.config.hidden_size).bfloat16()
    wanted = F.linear(hidden.double(), weights[name].double())
    assert (model.lm_head(hidden) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    ids = torch.tensor([5, 9, 44, 0, model.config.vocab_size - 1])
    assert torch.equal(model.embed(ids), exact.embed(ids))
    assert list(model.weight_slots()) == list(exact.weight_slots())
    assert model.lm_head.linear_weight.format == "cpu_int8"
    slot, address = model.weight_slots()[name], model.lm_head.table.codes.data_ptr()
    assert slot.shape == tuple(weights[name].shape) and torch.equal(slot.read(), weights[name].bfloat16())
    update = torch.randn(slot.shape)
    slot.write(update)
    assert (slot.read().float() - update).abs().max() < update.abs().max() / 127
    assert model.lm_head.table.codes.data_ptr() == address
    assert torch.equal(model.embed(ids), slot.read()[ids] if tied else exact.embed(ids))


@needs_kernels
def test_other_heads_and_other_machines_keep_float32(tmp_path: Path, monkeypatch) -> None:
    write_gguf(tmp_path / "q4.gguf", matrices=Kind.Q4_1, embedding=Kind.Q4_1)
    assert isinstance(load_gguf(str(tmp_path / "q4.gguf"), cpu_weight_format="int4")[1].lm_head, Float32Head)
    write_gguf(tmp_path / "q8.gguf", matrices=Kind.Q4_1, embedding=Kind.Q8_0)
    monkeypatch.setattr(cpu_formats, "cpu_kernels_loaded", lambda: False)
    assert isinstance(load_gguf(str(tmp_path / "q8.gguf"), cpu_weight_format="int4")[1].lm_head, Float32Head)

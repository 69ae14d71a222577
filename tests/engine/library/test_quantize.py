"""`quantize_folder` writes checkpoints that the engine, and compressed-tensors, read as the nearest weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.layers.formats.slots import plain_slots
from engine.library.quantize import quantize_folder
from engine.loader.weights import load_hf_folder
from tests.engine.lively import write_lively_model
from tests.support.qwen3_moe import write_lively_moe

BITS = {"fp8": 8, "int8": 8, "int4": 4}
ERRORS = {"fp8": 0.03, "int8": 0.01, "int4": 0.12}


@pytest.fixture(scope="module")
def dense(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    write_lively_model(tiny_model, folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def experts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain-moe")
    write_lively_moe(tiny_model, folder, moe_intermediate_size=32, intermediate_size=96)
    return folder


def used_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the plain weights that the engine computes with."""
    _, model = load_hf_folder(folder, torch.float32, "cpu")
    return {name: slot.read() for name, slot in plain_slots(model.weight_slots()).items()}


@pytest.mark.parametrize("element", BITS)
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_written_folder_holds_the_nearest_weights(request, tmp_path, element, kind):
    source = request.getfixturevalue(kind)
    written = quantize_folder(source, tmp_path / "out", element)
    before = load_file(source / "model.safetensors")
    found = used_weights(tmp_path / "out")
    assert written.matrices == len(found) == {"dense": 14, "experts": 63}[kind]
    _, plain = load_hf_folder(source, torch.float32, "cpu")
    originals = {name: slot.read() for name, slot in plain.weight_slots().items()}
    for name, tensor in found.items():
        assert 0 < (tensor - originals[name]).norm() < ERRORS[element] * originals[name].norm(), name
    stored = load_file(tmp_path / "out" / "model.safetensors")
    untouched = [name for name in before if name.endswith(("norm.weight", "embed_tokens.weight", "mlp.gate.weight"))]
    assert untouched and all(torch.equal(stored[name], before[name]) for name in untouched)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in (0, 2) if kind == "experts")]
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_a_folder_of_several_files_keeps_their_names(dense, tmp_path):
    tensors = load_file(dense / "model.safetensors")
    for path in dense.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    names = {f"model-0000{number}-of-00002.safetensors": list(tensors)[number - 1 :: 2] for number in (1, 2)}
    for file, part in names.items():
        save_file({name: tensors[name].bfloat16() for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in names.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    written = quantize_folder(tmp_path, tmp_path / "out", "int8")
    places = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(places.values()) == set(names) and written.bytes_after < 0.8 * written.bytes_before
    stored = load_file(tmp_path / "out" / places["model.layers.0.mlp.up_proj.weight_scale"])
    assert stored["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.bfloat16
    used_weights(tmp_path / "out")


def test_what_cannot_be_quantised_is_refused(dense, tiny_model, tmp_path):
    quantize_folder(dense, tmp_path / "once", "int8")
    with pytest.raises(ModelError, match=r"is quantised already \(compressed-tensors\)"):
        quantize_folder(tmp_path / "once", tmp_path / "twice", "int8")
    write_lively_moe(tiny_model, tmp_path / "narrow")
    with pytest.raises(ModelError, match="int4 needs inputs that are a multiple of 32 .*, found a common divisor of 8"):
        quantize_folder(tmp_path / "narrow", tmp_path / "out", "int4")
    tensors = load_file(dense / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    (tmp_path / "broken").mkdir()
    save_file(tensors, tmp_path / "broken" / "model.safetensors")
    (tmp_path / "broken" / "config.json").write_text((dense / "config.json").read_text())
    with pytest.raises(ModelError, match=r"model.layers.1.mlp.up_proj.weight contains NaN"):
        quantize_folder(tmp_path / "broken", tmp_path / "out", "fp8")
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("element", BITS)
def test_transformers_reads_the_written_folder(dense, tmp_path, element):
    """Runs where compressed-tensors is installed: the same weights as the engine's."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    quantize_folder(dense, tmp_path / "out", element)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    model.hf_quantizer.compressor.decompress_model(model)
    theirs = dict(model.named_parameters())
    for name, tensor in used_weights(tmp_path / "out").items():
        assert torch.allclose(theirs[name].float(), tensor, rtol=1e-6, atol=1e-8), name

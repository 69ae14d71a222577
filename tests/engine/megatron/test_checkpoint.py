"""Loading and saving Hugging Face checkpoints with a GPTModel: exact round trips, equal logits, atomic errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.errors import ModelError, WeightUpdateError
from engine.loader.weights import stage_update
from engine.megatron import checkpoint as weights_module
from engine.megatron.checkpoint import load_checkpoint, save_checkpoint
from engine.megatron.config import gpt_model_arguments, transformer_config_values
from engine.megatron.weight_layout import named_weights, weight_slots
from engine.models import config_from_dict, config_from_folder
from tests.engine.megatron.checkpoints import (
    CASES,
    LLAMA3,
    SIZES,
    TOLERANCE,
    checkpoint,
    copies,
    gpt_for,
    hf_config,
    same,
    stored,
)
from tests.support import megatron_models as models


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_weights_round_trip_bit_for_bit(case: str, tmp_path: Path) -> None:
    checkpoint(tmp_path / "from", case)
    model = gpt_for(tmp_path / "from")
    load_checkpoint(model, tmp_path / "from")
    save_checkpoint(model, tmp_path / "to", hf_config(tmp_path / "from"))
    assert same(stored(tmp_path / "from"), stored(tmp_path / "to"))
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "to")
    first = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "from")
    assert type(reloaded) is type(first) and same(first.state_dict(), reloaded.state_dict())


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    hf_model = checkpoint(tmp_path, case)
    megatron_gpt = gpt_for(tmp_path)
    load_checkpoint(megatron_gpt, tmp_path)
    ids, positions = models.tokens(3, length=48)
    found, wanted = megatron_gpt(ids, positions, None), hf_model(ids).logits
    assert 0.1 < wanted.std() < 20
    assert (found - wanted).abs().max() < TOLERANCE * max(1.0, wanted.abs().max())
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


@torch.no_grad()
def test_a_saved_model_keeps_its_own_dtype_not_the_original_checkpoints(tmp_path: Path) -> None:
    checkpoint(tmp_path / "from", "qwen3")
    model = gpt_for(tmp_path / "from", dtype=torch.bfloat16).bfloat16()
    load_checkpoint(model, tmp_path / "from")
    save_checkpoint(model, tmp_path / "to", hf_config(tmp_path / "from"))
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "to")
    rounded = {name: tensor.bfloat16() for name, tensor in stored(tmp_path / "from").items()}
    assert same(rounded, reloaded.state_dict())


@torch.no_grad()
def test_a_model_with_two_dtypes_is_saved_in_the_wider_one(tmp_path: Path) -> None:
    """Megatron's local norms are float32 beside bfloat16 matrices until Float16Module converts them."""
    checkpoint(tmp_path / "from", "qwen3")
    model = gpt_for(tmp_path / "from", dtype=torch.bfloat16)
    load_checkpoint(model, tmp_path / "from")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16, torch.float32}
    save_checkpoint(model, tmp_path / "to", hf_config(tmp_path / "from"))
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "to").state_dict()
    assert same({name: tensor.float() for name, tensor in named_weights(model)}, reloaded)


def test_a_large_checkpoint_is_read_and_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path / "from", shard="20KB")
    assert len(list((tmp_path / "from").glob("*.safetensors"))) > 2
    model = gpt_for(tmp_path / "from")
    load_checkpoint(model, tmp_path / "from")
    monkeypatch.setattr(weights_module, "SHARD_BYTES", 30_000)
    save_checkpoint(model, tmp_path / "to", hf_config(tmp_path / "from"))
    files = sorted((tmp_path / "to").glob("*.safetensors"))
    assert len(files) > 2 and all(path.stat().st_size < 35_000 for path in files)
    assert same(stored(tmp_path / "from"), stored(tmp_path / "to"))
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "to")
    assert same(stored(tmp_path / "from"), reloaded.state_dict())


@pytest.mark.parametrize("case", ["llama", "qwen3-tied"])
def test_vocabulary_padding_is_zeroed_on_load_and_untouched_afterwards(case: str, tmp_path: Path) -> None:
    checkpoint(tmp_path / "from", case)
    model = gpt_for(tmp_path / "from", vocab_size=128)
    load_checkpoint(model, tmp_path / "from")
    padded = {name: parameter for name, parameter in model.named_parameters() if parameter.shape[0] == 128}
    assert len(padded) == (1 if "tied" in case else 2)
    assert all(not parameter[96:].any() and parameter[:96].any() for parameter in padded.values())
    for parameter in padded.values():
        parameter.data[96:] = 3.0
    new = torch.randn(96, 32)
    weight_slots(model, 96)["model.embed_tokens.weight"].write(new)
    assert torch.equal(model.embedding.word_embeddings.weight[:96], new)
    assert all(bool((parameter[96:] == 3.0).all()) for parameter in padded.values())
    save_checkpoint(model, tmp_path / "to", hf_config(tmp_path / "from"))
    assert stored(tmp_path / "to")["model.embed_tokens.weight"].shape == (96, 32)


def test_a_vocabulary_larger_than_the_models_is_rejected(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    with pytest.raises(ModelError, match="too few for a vocabulary of 96"):
        load_checkpoint(gpt_for(tmp_path, vocab_size=64), tmp_path)


def test_a_tied_head_in_the_checkpoint_must_be_the_embedding(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama-tied")
    model, weights = gpt_for(tmp_path), {name: tensor.clone() for name, tensor in stored(tmp_path).items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    load_checkpoint(model, tmp_path)
    weights["lm_head.weight"][5, 5] += 1
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="lm_head.weight differs from model.embed_tokens.weight"):
        load_checkpoint(model, tmp_path)


def test_every_problem_of_a_folder_is_listed_and_nothing_is_written(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    model, weights = gpt_for(tmp_path), stored(tmp_path)
    k, gate, norm = (
        f"model.layers.1.{name}.weight" for name in ("self_attn.k_proj", "mlp.gate_proj", "input_layernorm")
    )
    weights[k], weights["model.layers.7.stray"] = weights[k][:8].clone(), torch.zeros(1)
    weights[norm] = weights[norm].to(torch.int32)
    del weights[gate]
    save_file(weights, tmp_path / "model.safetensors")
    before = copies(model)
    with pytest.raises(ModelError) as error:
        load_checkpoint(model, tmp_path)
    for text in (
        f"{k} has shape [8, 32], expected [16, 32]",
        f"{gate} is missing",
        f"{norm} has dtype torch.int32",
        "model.layers.7.stray is unexpected",
        str(tmp_path),
    ):
        assert text in str(error.value)
    assert same(before, copies(model))


def test_a_model_with_a_different_configuration_is_rejected_before_a_write(tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen3")
    model = gpt_for(tmp_path, layernorm_epsilon=1e-6, rotary_interleaved=True)
    model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq * 0.99
    before = copies(model)
    with pytest.raises(ModelError) as error:
        load_checkpoint(model, tmp_path)
    for text in (
        "layernorm_epsilon is 1e-06 in the model, 1e-05 is needed",
        "rotary_interleaved is True",
        "'rotary_base': 10000.0",
    ):
        assert text in str(error.value)
    assert same(before, copies(model))
    with pytest.raises(ModelError, match="layernorm_epsilon"):
        save_checkpoint(model, tmp_path / "to", hf_config(tmp_path))
    assert not (tmp_path / "to").exists()


def test_dropout_may_differ_from_the_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    load_checkpoint(gpt_for(tmp_path, attention_dropout=0.1, hidden_dropout=0.1), tmp_path)
    values = transformer_config_values(config_from_folder(tmp_path))
    assert values["attention_dropout"] == values["hidden_dropout"] == 0.0  # Megatron's default is 0.1


def test_a_folder_with_a_model_is_not_overwritten(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = gpt_for(tmp_path)
    with pytest.raises(ModelError, match="holds a model already"):
        save_checkpoint(model, tmp_path, hf_config(tmp_path))
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_partial_weight_update_uses_the_same_slots(tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen3")
    model = gpt_for(tmp_path)
    load_checkpoint(model, tmp_path)
    addresses = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    slots = weight_slots(model)
    name = "model.layers.0.self_attn.v_proj.weight"
    new = torch.randn(32, 32)
    assert stage_update(slots, [(name, new)]) == 1
    expected = stored(tmp_path) | {name: new}
    assert same(expected, {key: tensor.clone() for key, tensor in named_weights(model)})
    with pytest.raises(WeightUpdateError, match="the old weights still serve"):
        stage_update(slots, [(name, new + 1), ("model.norm.weight", torch.zeros(3))])
    assert same(expected, {key: tensor.clone() for key, tensor in named_weights(model)})
    assert addresses == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_wrapped_models_are_unwrapped(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module):
            super().__init__()
            self.module = module

    checkpoint(tmp_path)
    wrapped = Wrapper(Wrapper(gpt_for(tmp_path)))
    load_checkpoint(wrapped, tmp_path)
    save_checkpoint(wrapped, tmp_path / "to", hf_config(tmp_path))
    assert same(stored(tmp_path), stored(tmp_path / "to"))
    with pytest.raises(ModelError, match="Linear is not a Megatron-Core GPTModel"):
        weight_slots(nn.Linear(2, 2))


def test_parameters_without_a_counterpart_are_listed() -> None:
    model = models.gpt(normalization="LayerNorm")
    model.decoder.layers[1].mlp.adapter = nn.Linear(3, 3, bias=False)
    with pytest.raises(ModelError) as error:
        weight_slots(model)
    for name in (
        "decoder.layers.0.input_layernorm.bias",
        "decoder.final_layernorm.bias",
        "decoder.layers.1.mlp.adapter.weight",
    ):
        assert f"{name} has no counterpart" in str(error.value)


def test_tensor_subclass_parameters_are_rejected() -> None:
    class Quantised(Tensor):
        pass

    model = models.gpt()
    linear = model.decoder.layers[0].mlp.linear_fc2
    linear.weight = nn.Parameter(linear.weight.data.as_subclass(Quantised))
    with pytest.raises(ModelError, match="layers.0.mlp.linear_fc2.weight is a Quantised, a plain tensor is needed"):
        weight_slots(model)


def test_a_model_of_another_tp_size_is_rejected() -> None:
    with pytest.raises(ModelError, match=r"rank 0 of 2.*linear_qkv.weight has shape \[64, 32\], \[32, 32\] is needed"):
        weight_slots(models.gpt(), tp_size=2)
    with pytest.raises(ModelError, match="tp_rank 2"):
        weight_slots(models.gpt(), tp_rank=2, tp_size=2)


def test_every_unsupported_setting_is_listed() -> None:
    def error_for(**changes: Any) -> str:
        values = {"architectures": ["LlamaForCausalLM"], **SIZES, **changes}
        with pytest.raises(ModelError) as error:
            gpt_model_arguments(config_from_dict(values))
        return str(error.value)

    text = error_for(
        attention_bias=True, rope_parameters=LLAMA3 | {"high_freq_factor": 8.0, "original_max_position_embeddings": 32}
    )
    assert "biases on q, k and v and o only" in text
    assert "high_freq_factor 8.0, where it has 4.0 fixed" in text
    assert "original_max_position_embeddings 32, where it has 8192 fixed" in text
    assert "yarn" in error_for(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0})
    window = error_for(architectures=["MistralForCausalLM"], sliding_window=32, num_hidden_layers=2)
    assert "sliding window of 32 tokens" in window

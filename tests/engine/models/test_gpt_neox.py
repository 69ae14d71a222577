"""GPT-NeoX: names of old and headless checkpoints, keys of its rotary embedding, tied heads, and quantisation."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError, WeightUpdateError
from engine.library.quantize import quantize_folder
from engine.loader.weights import check_update, load_hf_folder
from engine.models import config_from_dict
from tests.support.attention import prefill_attention
from tests.support.families import load_reference, tiny_folder
from tests.support.parity import check_against, make_cache

PYTHIA = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
LAYER = "gpt_neox.layers.2.attention"


def test_a_published_config_is_read():
    config = config_from_dict(PYTHIA)
    assert (config.rotary_dim, config.rope_theta, config.head_dim, config.num_kv_heads) == (16, 1e4, 64, 8)
    assert config.attention_bias and config.output_bias and config.mlp_bias and config.parallel_block
    assert not config_from_dict(PYTHIA | {"use_parallel_residual": False}).parallel_block
    newer = {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}
    config = config_from_dict(PYTHIA | newer)
    assert (config.rotary_dim, config.rope_theta) == (32, 500.0)  # they go before the older keys


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_pct": 0.0}, "'rotary_pct' must be a number above 0"),
        ({"rope_parameters": {"partial_rotary_factor": 0}}, "'partial_rotary_factor' must be a number above 0"),
        ({"rotary_emb_base": "x"}, "'rotary_emb_base' must be"),
        ({"use_parallel_residual": 1}, "'use_parallel_residual' must be true or false"),
        ({"head_dim": 32}, "'hidden_size' must be num_attention_heads"),
        ({"rope_scaling": [1]}, "'rope_scaling' must be an object"),
        ({"hidden_act": "tanh"}, "'hidden_act' must be"),
    ],
)
def test_unsupported_values_are_rejected_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        config_from_dict(PYTHIA | changes)


@torch.no_grad()
def test_buffers_of_old_checkpoints_are_not_loaded(tmp_path):
    folder = tiny_folder("gpt_neox", tmp_path)
    reference = load_reference(folder)
    buffers = {
        f"{LAYER}.bias": torch.ones(1, 1, 64, 64).bool().tril(),
        f"{LAYER}.masked_bias": torch.tensor(-1e9),
        f"{LAYER}.rotary_emb.inv_freq": torch.ones(2),
    }
    save_file(load_file(folder / "model.safetensors") | buffers, folder / "model.safetensors")
    _, model = load_hf_folder(folder, torch.float32, "cpu", 128)
    check_against(reference, model)
    update = {f"{LAYER}.dense.bias": torch.ones(64), **buffers}
    assert check_update(model.weight_slots(), update.items(), names=model.config.names).keys() == {
        f"{LAYER}.dense.bias"
    }


def test_a_decoder_without_head_leaves_the_prefix_out(tmp_path):
    folder = tiny_folder("gpt_neox", tmp_path)
    weights = load_file(folder / "model.safetensors")
    kept = {name.removeprefix("gpt_neox."): tensor for name, tensor in weights.items() if "embed_out" not in name}
    save_file(kept, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"architectures": ["GPTNeoXModel"]}))
    config, model = load_hf_folder(folder, torch.float32, "cpu", 128)
    assert not config.has_lm_head
    exported = dict(model.named_weights())
    assert all(torch.equal(exported[f"gpt_neox.{name}"], tensor) for name, tensor in kept.items())


def test_another_head_than_the_tied_embedding_is_refused_by_its_name(tmp_path):
    folder = tiny_folder("gpt_neox-sequential-tied", tmp_path)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["gpt_neox.embed_in.weight"]
    save_file(weights | {"embed_out.weight": embedding.clone()}, folder / "model.safetensors")
    _, model = load_hf_folder(folder, torch.float32, "cpu", 128)
    slots, names = model.weight_slots(), model.config.names
    with pytest.raises(WeightUpdateError, match=r"embed_out\.weight differs from gpt_neox\.embed_in\.weight"):
        check_update(slots, [("embed_out.weight", embedding + 1)], names=names)
    save_file(weights | {"embed_out.weight": embedding + 1}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"embed_out\.weight differs from gpt_neox\.embed_in\.weight"):
        load_hf_folder(folder, torch.float32, "cpu", 128)


@torch.no_grad()
def test_a_quantised_checkpoint_keeps_embedding_and_head(tmp_path):
    folder = tiny_folder("gpt_neox", tmp_path / "plain")
    quantize_folder(folder, tmp_path / "int8", "int8")
    values = json.loads((tmp_path / "int8" / "config.json").read_text())
    assert values["quantization_config"]["ignore"] == ["embed_out"]
    tokens, positions = torch.arange(40) * 31 % 320, torch.arange(40)
    plain, found = (
        one.compute_logits(one(tokens, positions, prefill_attention(make_cache(one), [(0, 40)], [range(1, 6)])))
        for _, one in (load_hf_folder(path, torch.float32, "cpu", 128) for path in (folder, tmp_path / "int8"))
    )
    assert 0 < (found - plain).norm() < 0.08 * plain.norm()

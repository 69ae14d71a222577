"""Gemma 3 against transformers on the same weights, far beyond the window; and what its config.json may say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.cache_spec import FullAttentionSpec, SlidingWindowSpec
from engine.errors import ModelError
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RopeScaling
from engine.loader.weights import load_dummy, load_hf_folder
from engine.models import build_model, config_from_dict
from tests.support.attention import backend_for, prefill_metadata
from tests.support.gemma3 import SHAPES, WINDOW, reference_model
from tests.support.parity import check_against, make_cache, pages_per_group

LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
CASES = {
    "window-12": {},
    "scaled-rope-softcap": {"rope_parameters": LINEAR, "final_logit_softcapping": 3.0},
    "untied-biases-mqa": {"tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 1},
    "window-1-listed-layers": {
        "sliding_window": 1,
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
    },
    "sliding-layers-only": {"layer_types": ["sliding_attention"] * 5},
    "wide-heads": {"head_dim": 256, "num_hidden_layers": 3},
}
# as in google/gemma-3-1b-it, but for the sizes; transformers before version 5
PUBLISHED = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_logits_equal_transformers_in_prefill_and_decode(name: str, tmp_path: Path) -> None:
    reference = reference_model(**CASES[name])
    reference.save_pretrained(tmp_path)
    config, model = load_hf_folder(tmp_path, torch.float32, "cpu")
    check_against(reference, model)
    assert config.eos_token_ids == (2,)


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, which is not installed")
@pytest.mark.filterwarnings("default::DeprecationWarning")  # from Triton: Python's ast, numpy scalars
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.interpretable] if name == "wide-heads" else []) for name in CASES]
)
@torch.no_grad()
def test_logits_of_the_triton_backend_equal_transformers(name: str, device: torch.device, tmp_path: Path) -> None:
    reference = reference_model(**CASES[name])
    reference.save_pretrained(tmp_path)
    _, model = load_hf_folder(tmp_path, torch.float32, device)
    check_against(reference, model, "triton")


@torch.no_grad()
def test_bfloat16_rounds_as_transformers_does(tmp_path: Path) -> None:
    exact = reference_model(head_dim=32)
    exact.save_pretrained(tmp_path)
    _, model = load_hf_folder(tmp_path, torch.bfloat16, "cpu")
    text = torch.randint(0, 199, (30,), generator=torch.Generator().manual_seed(0))
    wanted = exact(text[None]).logits[0]
    reference = exact.bfloat16()
    assert torch.equal(model.embed(text), reference.model.embed_tokens(text))
    norm = reference.model.layers[1].pre_feedforward_layernorm
    ours = RMSNorm(48, norm.eps, torch.bfloat16, torch.device("cpu"), weight_offset=True)
    ours.weight.copy_(norm.weight)
    x = torch.randn(500, 48).bfloat16()
    assert float((ours(x) != norm(x)).float().mean()) < 1e-3
    cache = make_cache(model)
    metadata = prefill_metadata(cache, [(0, 30)], [[1, 2, 3, 4]])
    metadata = metadata._replace(page_tables=pages_per_group(cache, metadata.page_tables[0]))
    logits = model.compute_logits(model(text, torch.arange(30), backend_for(cache).prefill(metadata)))
    error, error_of_reference = ((found.float() - wanted).norm() for found in (logits, reference(text[None]).logits[0]))
    assert error < 1.3 * error_of_reference


def test_exported_weights_equal_the_checkpoint(tmp_path: Path) -> None:
    reference = reference_model()
    reference.save_pretrained(tmp_path)
    _, model = load_hf_folder(tmp_path, torch.float32, "cpu")
    exported, expected = dict(model.named_weights()), reference.state_dict()
    expected.pop("lm_head.weight")
    assert exported.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(exported[key], tensor), key


def test_a_published_config_is_read_with_the_layers_it_implies() -> None:
    config = config_from_dict(PUBLISHED)
    sliding = SlidingWindowSpec(kv_heads=1, head_dim=256, scale=1 / 16, size=512)
    full = FullAttentionSpec(kv_heads=1, head_dim=256, scale=1 / 16)
    assert config.cache_specs() == tuple(full if index % 6 == 5 else sliding for index in range(26))
    assert (config.rope_theta, config.rope_scaling, config.local_rope_theta) == (1e6, None, 1e4)
    assert config.tie_word_embeddings and config.eos_token_ids == (1, 106)
    assert config.context_length == 32768


def test_both_spellings_of_rope_are_read_alike() -> None:
    old = {"rope_theta": 50000, "rope_local_base_freq": 500, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    configs = [config_from_dict(PUBLISHED | old)]
    kept = {key: value for key, value in PUBLISHED.items() if not key.startswith("rope")}
    configs.append(config_from_dict(kept | {"rope_parameters": LINEAR}))
    assert configs[0] == configs[1]
    assert configs[0].rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert (configs[0].rope_theta, configs[0].local_rope_theta, configs[0].local_rope_scaling) == (5e4, 500, None)
    assert configs[0].context_length == 32768  # counts the scaling already


def test_absent_keys_have_the_values_of_transformers() -> None:
    config = config_from_dict({"architectures": ["Gemma3ForCausalLM"]})
    from transformers import Gemma3TextConfig

    wanted = Gemma3TextConfig()
    names = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings", "rms_norm_eps")
    for name in names:
        assert getattr(config, name) == getattr(wanted, name), name
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (26, 8, 4)
    assert [window or 0 for window in config.windows] == [
        wanted.sliding_window if kind == "sliding_attention" else 0 for kind in wanted.layer_types
    ]
    assert config.tie_word_embeddings == wanted.tie_word_embeddings
    assert config.attention_scale == wanted.query_pre_attn_scalar**-0.5
    assert json.loads(json.dumps(wanted.rope_parameters)) == {
        "full_attention": {"rope_type": "default", "rope_theta": config.rope_theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": config.local_rope_theta},
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' must be null.*found 50.0"),
        ({"use_bidirectional_attention": True}, "'use_bidirectional_attention' must be false"),
        ({"hidden_activation": "gelu"}, "'hidden_activation' must be 'gelu_pytorch_tanh', found 'gelu'"),
        ({"layer_types": ["sliding_attention"]}, "'layer_types' must be a list of 26"),
        ({"layer_types": ["chunked_attention"] * 26}, "'layer_types' must be a list of 26"),
        ({"sliding_window": 0}, "'sliding_window' must be a whole number from 1"),
        ({"query_pre_attn_scalar": -1}, "'query_pre_attn_scalar' must be a number above 0"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "full_attention: rope scaling 'yarn' is not supported",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' must be a number above 0, found nothing"),
        ({"rope_parameters": {"rope_type": "default"}}, "'rope_parameters' must be an object with the objects"),
        ({"quantization_config": {}}, "checkpoints quantised by 'None' are not supported"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration is not supported"),
    ],
)
def test_unsupported_values_are_rejected_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_from_dict(PUBLISHED | changes)


def test_fused_kernels_read_two_rotary_tables_and_four_norms_of_a_layer() -> None:
    model = build_model(config_from_dict({"architectures": ["Gemma3ForCausalLM"], **SHAPES}), torch.float32, "cpu")
    load_dummy(model)
    tensors = model.tensors()
    for index, spec in enumerate(model.cache_specs()):
        table = model.rotary if spec.window is None else model.local_rotary
        assert tensors.rotary(index) == (table.cos, table.sin)
        layer, own = tensors.layer(index), model.layers[index]
        assert layer.input_norm.weight is own.input_norm.weight and layer.mlp_out_norm.weight is own.mlp_out_norm.weight
        assert layer.post_norm.weight is own.post_norm.weight
        assert layer.attention_out_norm.weight is own.attn_out_norm.weight
    assert {spec.window for spec in model.cache_specs()} == {WINDOW, None}

"""Reading config.json: both layouts; unsupported values raise ModelError with a reason, never another error."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import ModelError
from engine.layers.rotary import RopeScaling, inverse_frequencies
from engine.models import ModelConfig, config_from_dict, config_from_folder, supported_architectures
from engine.models.config import MAX_CONTEXT

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def read(**changes: Any) -> ModelConfig:
    return config_from_dict({**BASE, **changes})


def test_basic_fields() -> None:
    config = read(bos_token_id=1, eos_token_id=[2, 5])
    assert not config.options().keys() - {"bos_token_id", "eos_token_ids"}
    assert (
        dataclasses.asdict(config).items()
        >= {
            "architecture": "LlamaForCausalLM",
            "vocab_size": 100,
            "hidden_size": 48,
            "num_layers": 3,
            "num_heads": 6,
            "num_kv_heads": 2,
            "head_dim": 8,
            "intermediate_size": 80,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 128,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "output_bias": False,
            "mlp_bias": False,
            "qk_norm": False,
            "windows": (),
            "bos_token_id": 1,
            "eos_token_ids": (2, 5),
            "dtype": "bfloat16",
        }.items()
    )
    assert config.eos_token_id == 2 and config.context_length == 128
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", **LLAMA3},
        {"type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 4.0},
        None,
    ],
)
def test_both_dialects_of_rope_read_the_same(scaling: dict[str, Any] | None) -> None:
    old = read(rope_theta=5e5, rope_scaling=scaling)
    new = read(rope_parameters={"rope_theta": 5e5, **(scaling or {"rope_type": "default"})})
    assert old == new and old.rope_theta == 5e5
    assert (old.rope_scaling is None) == (scaling is None)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "dynamic", "factor": 2.5},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "yarn",
            "factor": 6.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 0.3,
        },
        {
            "rope_type": "yarn",
            "factor": 6.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
            "attention_factor": 1.1,
        },
    ],
)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_frequencies_equal_transformers(scaling: dict[str, Any], head_dim: int) -> None:
    settings_ = {"rope_theta": 1e5, **scaling}
    values = {**BASE, "rope_parameters": dict(settings_), "head_dim": head_dim}
    config = config_from_dict(values)
    theirs = transformers.LlamaConfig(**{**values, "rope_parameters": dict(settings_)})
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, None)
    ours = inverse_frequencies(head_dim, config.rope_theta, config.rope_scaling)
    torch.testing.assert_close(ours, frequencies, atol=0, rtol=2e-6)
    assert config.rope_scaling is not None
    assert config.rope_scaling.attention_factor == pytest.approx(factor, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"attention_bias": False, "output_bias": False, "qk_norm": False, "head_dim": 8}),
        ({"attention_bias": True, "mlp_bias": True}, {"attention_bias": True, "output_bias": True, "mlp_bias": True}),
        ({"architectures": ["Qwen2ForCausalLM"]}, {"attention_bias": True, "output_bias": False}),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"attention_bias": False, "qk_norm": True, "head_dim": 128}),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, {"windows": (), "head_dim": 8}),
        ({"architectures": None, "model_type": "qwen3"}, {"architecture": "Qwen3ForCausalLM"}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 6}),
        ({"torch_dtype": None}, {"dtype": "float32"}),
        ({"dtype": "torch.float16"}, {"dtype": "float16"}),
    ],
)
def test_families_set_their_own_defaults(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    config = read(**changes)
    assert {name: getattr(config, name) for name in expected} == expected


MISTRAL, QWEN2 = {"architectures": ["MistralForCausalLM"]}, {"architectures": ["Qwen2ForCausalLM"]}
WINDOWS = {**QWEN2, "sliding_window": 64, "use_sliding_window": True}
LISTED = {"sliding_window": 64, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "rope_scaling": LONGROPE}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 64}, ()),  # Llama has none
        (MISTRAL, (4096,) * 3),
        ({**MISTRAL, "sliding_window": 64}, (64,) * 3),
        ({**MISTRAL, "sliding_window": 64, "layer_types": ["sliding_attention"] * 3}, (64,) * 3),
        ({**MISTRAL, "sliding_window": None}, ()),
        ({**QWEN2, "sliding_window": 64}, ()),
        ({**WINDOWS}, ()),  # max_window_layers defaults to 28
        ({**WINDOWS, "max_window_layers": 3}, ()),
        ({**WINDOWS, "max_window_layers": 2}, (None, None, 64)),
        ({**WINDOWS, "max_window_layers": 0}, (64,) * 3),
        ({**WINDOWS, "layer_types": ["full_attention"] * 3}, ()),
        ({**WINDOWS, "layer_types": ["sliding_attention"] * 3}, (64,) * 3),
        ({**WINDOWS, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (64, None, 64)),
        ({"architectures": ["Gemma2ForCausalLM"]}, (4096, None, 4096)),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 64, "sliding_window_pattern": 2}, (64, None, 64)),
        ({"architectures": ["Cohere2ForCausalLM"], "sliding_window": 64, "sliding_window_pattern": 3}, (64, 64, None)),
        ({"architectures": ["MinistralForCausalLM"], "sliding_window": 64}, (64,) * 3),
        ({"architectures": ["Phi3ForCausalLM"]}, ()),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": 64}, (64,) * 3),
        ({"architectures": ["SmolLM3ForCausalLM"], "sliding_window": 64}, ()),
    ],
)
def test_sliding_windows_apply_only_where_enabled(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = read(**changes)
    assert config.windows == windows
    assert config.context_length == 128
    # the context has 128 tokens, so a larger window is full attention
    assert [spec.window or 4096 for spec in config.cache_specs()] == [size or 4096 for size in windows or (None,) * 3]


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "linear", "factor": 2.0}, 256),
        ({"rope_type": "llama3", **LLAMA3}, 128),
        ({"rope_type": "linear", "factor": 1e12}, MAX_CONTEXT),
        ({"rope_type": "dynamic", "factor": 4.0}, 128),  # beyond it, the frequencies of a key depend on later tokens
        ({"rope_type": "longrope", **LONGROPE, "original_max_position_embeddings": 32}, 128),
    ],
)
def test_stretched_rope_stretches_the_context(scaling: dict[str, Any], length: int) -> None:
    assert read(rope_scaling=scaling).context_length == length


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["OPTForCausalLM"]}, "OPTForCausalLM is not supported; supported are LlamaForCausalLM"),
        ({"architectures": ["LlamaForTokenClassification"]}, "LlamaForTokenClassification is not supported"),
        ({"architectures": [], "model_type": None}, r"\(none named\) is not supported"),
        ({"rope_scaling": {"type": "axial"}}, "rope scaling 'axial'.*default, linear, llama3, yarn, dynamic, longrope"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling: 'factor' must be a number above 0, found nothing"),
        ({"rope_scaling": {"type": "su"}}, "'short_factor' must be a list of 4 numbers above 0, found nothing"),
        ({**PHI3, "rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "'long_factor' must be a list of 4 numbers"),
        (
            {**PHI3, "rope_scaling": {**LONGROPE, "long_factor": [1, 0, 1, 1]}},
            "long_factor: '1' must be a number above",
        ),
        ({**PHI3, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "'short_factor' must be a list"),
        ({**PHI3, "rope_scaling": None, "partial_rotary_factor": 0.4}, "'partial_rotary_factor' must be at most 1"),
        ({**PHI3, "rope_scaling": None, "partial_rotary_factor": 2.0}, "'partial_rotary_factor' must be at most 1"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: 'factor' must be a number above 0, found nothing"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "above low_freq_factor"),
        ({"rope_scaling": "yarn"}, "'rope_scaling' must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differs by layer type"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised by 'hqq' are not supported"),
        ({"hidden_act": "quick_gelu"}, "'hidden_act' must be 'silu' or 'gelu' or.*found 'quick_gelu'"),
        ({"hidden_act": ["silu"]}, "'hidden_act' must be"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "hidden_act": "gelu"}, "'hidden_act' must be 'silu', found 'gelu'"),
        ({**MISTRAL, "layer_types": ["full_attention"] * 3}, "'layer_types' must be null, or 3 times"),
        ({**WINDOWS, "layer_types": ["sliding_attention"]}, "'layer_types' must be a list of 3"),
        ({**WINDOWS, "layer_types": ["chunked_attention"] * 3}, "'layer_types' must be a list of 3"),
        ({**LISTED, **QWEN2, "use_sliding_window": False}, "'use_sliding_window' must be true, since 'layer_types'"),
        ({**LISTED, "architectures": ["SmolLM3ForCausalLM"]}, "'use_sliding_window' must be true, since"),
        (
            {**LISTED, "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 64, "moe_intermediate_size": 64},
            "'use_sliding_window' must be true, since",
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window_pattern": 3}, "pattern' must be 2 or left out; list"),
        ({"architectures": ["Olmo3ForCausalLM"], "sliding_window_pattern": "LLG"}, "must be 4 or left out; list"),
        ({"architectures": ["OlmoForCausalLM"], "clip_qkv": 0}, "'clip_qkv' must be a number above 0"),
        ({"architectures": ["Gemma3ForCausalLM"], "partial_rotary_factor": 0.5}, "'partial_rotary_factor' must be 1.0"),
        ({"architectures": ["StableLmForCausalLM"], "qk_layernorm": True}, "'qk_layernorm' must be false"),
        ({"architectures": ["SeedOssForCausalLM"], "attention_out_bias": True}, "'attention_out_bias' must be false"),
        (
            {"architectures": ["Cohere2ForCausalLM"], "position_embedding_type": "alibi"},
            "'position_embedding_type' must",
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": -1}, "'attn_logit_softcapping' must be"),
        ({"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True}, "must be false"),
        ({"architectures": ["GemmaForCausalLM"], "hidden_act": "relu"}, "'hidden_act' must be"),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]},
            "'no_rope_layers' must be a list of at least",
        ),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [2] * 3}, "'no_rope_layers' must be"),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "'logits_scaling' must be a number above 0"),
        ({"architectures": ["GraniteForCausalLM"], "residual_multiplier": "1"}, "'residual_multiplier' must be"),
        ({"architectures": ["CohereForCausalLM"], "use_qk_norm": 1}, "'use_qk_norm' must be true or false"),
        ({"architectures": ["Starcoder2ForCausalLM"], "use_bias": "no"}, "'use_bias' must be true or false"),
        (
            {"architectures": ["Olmo3ForCausalLM"], "rope_parameters": {"rope_type": "yarn"}},
            "an object with the objects",
        ),
        ({"num_key_value_heads": 4}, "a divisor of num_attention_heads"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_size": "48"}, "'hidden_size' must be a whole number from 1 to"),
        ({"hidden_size": None}, "'hidden_size' must be"),
        ({"hidden_size": True}, "'hidden_size' must be"),
        ({"vocab_size": -1}, "'vocab_size'.*found -1"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers'"),
        ({"max_position_embeddings": 10**9}, "'max_position_embeddings'"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a number above 0"),
        ({"rope_theta": 0}, "'rope_theta' must be a number above 0"),
        ({"rope_theta": 10**400}, "'rope_theta' must be a number above 0"),
        ({"rope_theta": 1}, "rope_theta 1.0 must be above 1"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false"),
        ({"eos_token_id": ["</s>"]}, "'eos_token_id' must be a token id"),
        ({"torch_dtype": "int8"}, "'torch_dtype' must be one of bfloat16"),
        ({**MISTRAL, "sliding_window": 0}, "'sliding_window' must be"),
    ],
)
def test_unsupported_values_are_rejected_by_field_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        config_from_dict({**BASE, **changes}, "somewhere/config.json")
    assert "somewhere/config.json" in str(caught.value)


PUBLISHED = {
    # as in public checkpoints, but for the sizes
    "Olmo3ForCausalLM": (
        {
            "max_position_embeddings": 65536,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "rope_theta": 500000.0,
            "sliding_window": 4096,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
        {"context_length": 65536, "local_rope_theta": 5e5, "local_rope_scaling": None, "windows": (4096, 4096, None)},
    ),
    "Phi3ForCausalLM": (
        {
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "long_factor": [1, 32.5] * 24, "short_factor": [1.0] * 48},
            "sliding_window": 262144,
            "tie_word_embeddings": True,
        },
        {"context_length": 131072, "rotary_dim": 96, "tie_word_embeddings": True},
    ),
    "GraniteForCausalLM": (
        {
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0,
            "logits_scaling": 16.0,
            "residual_multiplier": 0.22,
            "tie_word_embeddings": True,
        },
        {"attention_scale": 1 / 128, "embedding_scale": 12, "logit_scale": 1 / 16, "residual_scale": 0.22},
    ),
}


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_published_configs_are_read(architecture: str) -> None:
    changes, expected = PUBLISHED[architecture]
    config = read(architectures=[architecture], **changes)
    assert {name: getattr(config, name) for name in expected} == expected
    if architecture == "Phi3ForCausalLM":
        assert config.rope_scaling is not None and config.rope_scaling.kind == "longrope"
        assert config.rope_scaling.attention_factor == pytest.approx((1 + math.log(32) / math.log(4096)) ** 0.5)
        assert {spec.window for spec in config.cache_specs()} == {None}  # the window is wider than the context


def test_supported_architectures_are_named() -> None:
    names = supported_architectures()
    assert names[:4] == ("LlamaForCausalLM", "MistralForCausalLM", "MinistralForCausalLM", "Qwen2ForCausalLM")
    assert len(names) == len(set(names))


def test_an_unknown_scaling_kind_is_rejected() -> None:
    with pytest.raises(ValueError, match="'su' is not one of"):
        inverse_frequencies(8, 1e4, RopeScaling(kind="su"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json is missing"),
        (b"{", "can't be read as JSON"),
        (b"\xff\xfe\x00", "can't be read as JSON"),
        (b"[" * 100_000, "can't be read as JSON"),
        (b"[1, 2]", "has a JSON list"),
        (b"{}", r"\(none named\) is not supported"),
    ],
)
def test_a_malformed_config_file_raises_model_error(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        config_from_folder(tmp_path)
    with pytest.raises(ModelError, match="is not a folder"):
        config_from_folder(tmp_path / "nowhere")


def test_end_of_text_ids_of_the_generation_config_are_added(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert config_from_folder(tmp_path).eos_token_ids == (2, 7)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
KEYS = (
    *BASE,
    "head_dim",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "eos_token_id",
    "tie_word_embeddings",
    "use_sliding_window",
    "max_window_layers",
    "hidden_act",
    "original_max_position_embeddings",
    "sliding_window_pattern",
    "partial_rotary_factor",
    "no_rope_layers",
    "attn_logit_softcapping",
    "logits_scaling",
    "use_bias",
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3), st.sampled_from(supported_architectures()))
def test_any_value_is_read_or_raises_model_error(changes: dict[str, Any], architecture: str) -> None:
    try:
        config = config_from_dict({**BASE, "architectures": [architecture], **changes})
    except ModelError:
        return
    assert 1 <= config.context_length <= MAX_CONTEXT
    assert config.num_heads % config.num_kv_heads == 0 and config.head_dim % 2 == 0

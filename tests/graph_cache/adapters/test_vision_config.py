"""Settings of a vision encoder: Megatron Bridge's names, the maximum length, and every refusal."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from engine import EngineConfig
from engine.errors import ConfigError
from graph_cache.adapters.megatron.vision import vision_sequence_length
from graph_cache.errors import GraphConfigError


def config(**values):
    return EngineConfig(**{"mode": "training"} | values)


def test_megatrons_names_are_read_beside_the_language_models():
    source = SimpleNamespace(
        cuda_graph_impl="local",
        cuda_graph_modules=["attn"],
        vision_cuda_graph_impl="transformer_engine",
        vision_cuda_graph_scope=["attn", "mlp"],
        max_vision_cuda_graph_seq_length=784,
    )
    for one in (source, vars(source)):
        found = EngineConfig.from_megatron(one, mode="training", cuda_graph_warmup_steps=5)
        vision = found.vision_settings()
        assert (found.cuda_graph_impl, found.cuda_graph_modules) == ("local", ("attn",))
        assert (vision.graphs.cuda_graph_impl, vision.graphs.cuda_graph_modules) == (
            "transformer_engine",
            ("attn", "mlp"),
        )
        assert (vision.max_length, vision.graphs.cuda_graph_warmup_steps) == (784, 5)
    assert EngineConfig.from_megatron(source).cuda_graph_impl == "local"  # inference


def test_megatrons_defaults_capture_no_encoder():
    source = {"vision_cuda_graph_impl": "none", "vision_cuda_graph_scope": [], "max_vision_cuda_graph_seq_length": None}
    assert EngineConfig.from_megatron(source, mode="training") == EngineConfig.from_megatron({}, mode="training")


@pytest.mark.parametrize("scope", ["attn,mlp", ["attn", "mlp"], ("attn", "mlp")])
def test_the_scope_is_a_list_or_a_string(scope):
    assert config(vision_cuda_graph_scope=scope).vision_cuda_graph_scope == ("attn", "mlp")
    assert config(vision_cuda_graph_scope="full").vision_cuda_graph_scope == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vision_cuda_graph_impl": "locl"}, "vision_cuda_graph_impl is 'locl'.*did you mean 'local'"),
        ({"vision_cuda_graph_impl": "full_iteration"}, "vision_cuda_graph_impl='full_iteration' is not one of"),
        ({"vision_cuda_graph_scope": ["attention"]}, "vision_cuda_graph_scope has an unknown module 'attention'"),
        ({"vision_cuda_graph_scope": ["full", "mlp"]}, "vision_cuda_graph_scope has 'full'"),
        ({"vision_cuda_graph_scope": ["mamba"]}, "vision_cuda_graph_scope has mamba"),
        ({"vision_cuda_graph_scope": ["moe_router"]}, "vision_cuda_graph_scope has moe_router"),
        ({"max_vision_cuda_graph_seq_length": -1}, "max_vision_cuda_graph_seq_length=-1"),
        ({"max_vision_cuda_graph_seq_length": 7.5}, "max_vision_cuda_graph_seq_length=7.5"),
        ({"vision_token_budgets": []}, "vision_token_budgets=\\(\\)"),
        ({"vision_token_budgets": 64}, "vision_token_budgets=64 must be a list"),
        ({"vision_token_budgets": [128, 64]}, "ascending"),
        ({"vision_token_budgets": [64, 64]}, "ascending"),
        ({"vision_token_budgets": [64, "128"]}, "ascending"),
        ({"vision_token_budgets": [64], "max_vision_cuda_graph_seq_length": 128}, "leave one of them out"),
        ({"vision_max_images": 0}, "vision_max_images=0"),
        ({"vision_cuda_graph_impl": "local", "mode": "inference"}, "vision_cuda_graph_impl='local' is for training"),
        ({"vision_cuda_graph_impl": "local", "cuda_graph_impl": "full_iteration"}, "the encoder included"),
    ],
)
def test_what_is_invalid_is_refused_by_the_name_that_was_given(values, message):
    with pytest.raises((ConfigError, GraphConfigError), match=message):
        config(**values)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"explicit": 784, "num_position_embeddings": 2304, "spatial_merge_size": 2}, 784),
        ({"num_position_embeddings": 2304, "spatial_merge_size": 2}, 576),
        ({"explicit": 0, "num_position_embeddings": 2304, "spatial_merge_size": 2}, 576),
        ({"num_position_embeddings": 1024}, 1024),
        ({"num_position_embeddings": 1024, "spatial_merge_size": 0}, 1024),
        ({"num_position_embeddings": 0, "spatial_merge_size": 2}, 4096),
        ({"explicit": 0}, 4096),
        ({}, 4096),
        ({"default": 999}, 999),
    ],
)
def test_the_maximum_length(arguments, expected, caplog):
    with caplog.at_level(logging.WARNING):
        assert vision_sequence_length(**arguments) == expected
    derived = not arguments.get("explicit") and bool(arguments.get("num_position_embeddings"))
    assert ("derived" in caplog.text) == derived


@pytest.mark.parametrize(
    "arguments",
    [
        {"explicit": -1},
        {"explicit": True},
        {"explicit": "784"},
        {"default": 0},
        {"num_position_embeddings": 3, "spatial_merge_size": 2},
    ],
)
def test_an_invalid_length_is_refused(arguments):
    with pytest.raises(GraphConfigError):
        vision_sequence_length(**arguments)

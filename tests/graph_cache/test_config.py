"""The core's settings, and the hierarchy of its exceptions."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from graph_cache.config import GraphConfig
from graph_cache.errors import CaptureError, CaptureRefused, GraphConfigError, GraphError, SignatureMismatch


def test_by_default_steps_and_modules_are_captured():
    config = GraphConfig()
    assert (config.inference_scope, config.training_captures, config.modules) == ("block", "native", ())
    assert config.captures_inference and config.warmup_steps == 3
    assert not GraphConfig(inference_scope="none").captures_inference


def test_config_is_frozen_hashable_and_survives_replace_and_pickle():
    config = GraphConfig(modules=["attn", "mlp", "attn"])
    assert config.modules == ("attn", "mlp")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.modules = ()
    assert dataclasses.replace(config, warmup_steps=0).warmup_steps == 0
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(GraphConfig(modules=("attn", "mlp")))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"inference_scope": "blok"},
            "inference_scope is 'blok': give one of none, layer, block; did you mean 'block'",
        ),
        ({"inference_scope": None}, "inference_scope is None"),
        ({"training_captures": "local"}, "training_captures is 'local'"),
        ({"training_captures": []}, "training_captures is []"),
        ({"modules": "attn"}, "a sequence of names"),
        ({"modules": ["attn", 7]}, "a sequence of names"),
        ({"modules": [""]}, "a sequence of names"),
        ({"modules": None}, "a sequence of names"),
        ({"warmup_steps": -1}, "0 or more"),
        ({"warmup_steps": True}, "0 or more"),
    ],
)
def test_invalid_values_are_rejected(values, expected):
    with pytest.raises(GraphConfigError) as refused:
        GraphConfig(**values)
    assert expected in str(refused.value)


def test_a_signature_mismatch_keeps_its_differences_through_pickle():
    error = SignatureMismatch("x: dtype; y: shape", ["x: dtype", "y: shape"])
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.differences == error.differences != []


def test_error_class_hierarchy():
    assert issubclass(CaptureRefused, CaptureError) and issubclass(CaptureError, GraphError)
    assert issubclass(SignatureMismatch, ValueError) and issubclass(GraphConfigError, ValueError)

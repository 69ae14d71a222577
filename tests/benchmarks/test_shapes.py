"""Shapes of benchmarks: by name, and from any config.json."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.shapes import SHAPES, shape, shape_config, write_shape
from engine.models.registry import config_from_folder


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_model_that_the_engine_reads(name: str, tmp_path: Path) -> None:
    config = config_from_folder(write_shape(name, tmp_path))
    assert config.num_layers == SHAPES[name].get("num_hidden_layers")


def test_a_shape_may_be_the_path_of_a_config(tmp_path: Path) -> None:
    changed = SHAPES["tiny"] | {"num_hidden_layers": 7}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    for text in (str(tmp_path), str(tmp_path / "config.json")):
        assert shape_config(shape(text)) == changed
        assert config_from_folder(write_shape(text, tmp_path / "out")).num_layers == 7


def test_an_unknown_shape_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="qwen3-0.6b, .*nor a config.json"):
        shape("qwen3-0.7b")

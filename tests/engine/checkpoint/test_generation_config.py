"""Sampling parameters that a model recommends: from GGUF metadata, the default model and other folders."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import gguf
import pytest

from engine.checkpoint.default_model import SMOLLM2
from engine.checkpoint.generation_config import sampling_defaults
from engine.checkpoint.source import ModelSource
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError
from engine.protocol.sampling_params import SamplingParams


def gguf_source(path: Path, **sampling: Any) -> ModelSource:
    """Write a GGUF file with `general.sampling.*` keys and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in sampling.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_int32
        add(f"general.sampling.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelSource(str(path), "gguf", path.stem)


def folder_source(folder: Path, **values: Any) -> ModelSource:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return ModelSource(str(folder), "hf", "some/model")


def test_a_gguf_files_sampling_keys_are_read_in_single_precision(tmp_path: Path) -> None:
    source = gguf_source(tmp_path / "a.gguf", temp=0.6, top_k=20, top_p=0.95, min_p=0.0, penalty_repeat=1.05)
    assert sampling_defaults("auto", source) == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.05,
    }  # fmt: skip
    assert sampling_defaults("engine", source) == {}


def test_a_gguf_file_without_sampling_keys_has_no_defaults(tmp_path: Path) -> None:
    assert sampling_defaults("auto", gguf_source(tmp_path / "smollm2-135m-instruct.gguf")) == {}


def test_an_invalid_key_of_a_gguf_file_is_named(tmp_path: Path) -> None:
    source = gguf_source(tmp_path / "a.gguf", temp=-1.0)
    with pytest.raises(ModelError, match=r"a\.gguf: temp must be a number from 0 to 100; found -1\.0"):
        sampling_defaults("auto", source)


def test_the_default_model_has_the_values_of_its_model_card() -> None:
    source = ModelSource("unread.gguf", "gguf", SMOLLM2.name, SMOLLM2.generation_config)
    assert sampling_defaults("auto", source) == {"temperature": 0.2, "top_p": 0.9}
    assert sampling_defaults("engine", source) == {}


def test_another_folder_replaces_the_models_own_values(tmp_path: Path) -> None:
    source = folder_source(tmp_path, temperature=0.3, top_p=0.8)
    (tmp_path / "other").mkdir()
    folder_source(tmp_path / "other", min_p=0.1, top_k=-1, temperature=None)
    assert sampling_defaults(str(tmp_path / "other"), source) == {"min_p": 0.1, "top_k": 0}
    with pytest.raises(ConfigError, match="generation_config='vllm': there is no file"):
        sampling_defaults("vllm", source)


def test_every_key_has_the_name_of_its_sampling_parameter(tmp_path: Path) -> None:
    values = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": 1.2, "presence_penalty": 1.0,
        "frequency_penalty": -1.0, "max_new_tokens": 9, "skip_special_tokens": False,
    }  # fmt: skip
    found = sampling_defaults("auto", folder_source(tmp_path, **values, eos_token_id=2, do_sample=True))
    assert found == {"max_tokens" if name == "max_new_tokens" else name: value for name, value in values.items()}
    assert SamplingParams(**found).max_tokens == 9


def test_greedy_files_are_temperature_0(tmp_path: Path) -> None:
    assert sampling_defaults("auto", folder_source(tmp_path, do_sample=False)) == {"temperature": 0.0}
    assert sampling_defaults("auto", folder_source(tmp_path, do_sample=None, temperature=0.7)) == {"temperature": 0.7}


def test_keys_without_a_counterpart_are_named_once_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = folder_source(tmp_path, typical_p=0.9, num_beams=4, no_repeat_ngram_size=0, eos_token_id=2)
    with caplog.at_level(logging.INFO, "engine"):
        assert sampling_defaults("auto", source) == {}
    [record] = caplog.records
    assert record.getMessage().endswith(
        "generation_config.json also sets typical_p, num_beams, which have no effect here"
    )
    caplog.clear()
    assert sampling_defaults("auto", folder_source(tmp_path, num_beams=1, typical_p=1.0)) == {} and not caplog.records


@pytest.mark.parametrize("value", ["", None, 3])
def test_the_setting_is_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match="generation_config="):
        EngineConfig(generation_config=value)

"""EngineConfig refuses values of a wrong type, and names the setting."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from typing import Any

import pytest

from engine import EngineConfig
from engine.errors import ConfigError
from engine.training_config import TRAINING_ONLY, TrainingConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no' must be True or False"),
        ({"async_scheduling": 1}, "async_scheduling=1 must be True or False"),
        ({"seed": "1"}, "seed='1' must be a whole number"),
        ({"gpu_memory_utilization": "0.5"}, "gpu_memory_utilization='0.5' must be a number"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization=nan must be a number above 0"),
        ({"graph_buckets": 8}, "graph_buckets=8 must be a list of batch sizes"),
        ({"graph_buckets": "8"}, "graph_buckets='8' must be a list of batch sizes"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_unset_values_and_lists_are_accepted() -> None:
    config = EngineConfig(async_scheduling=None, gpu_memory_utilization=1, graph_buckets=[1, 2])
    assert config.graph_buckets == (1, 2)


@pytest.mark.parametrize("setting", ["cuda_graph_scope", "cuda_graph_modules"])
def test_full_iteration_inference_turns_no_graphs_on_for_megatrons_impl_none(setting):
    source = {"cuda_graph_impl": "none", setting: "full_iteration_inference"}
    with pytest.warns(DeprecationWarning, match="has no effect") as caught:
        config = EngineConfig.from_megatron(source)
    assert (config.cuda_graph_impl, config.inference_cuda_graph_scope) == ("none", "none")
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(DeprecationWarning, match="inference_cuda_graph_scope='block'"):
        config = EngineConfig.from_megatron(source | {"cuda_graph_impl": "local"})
    assert (config.cuda_graph_impl, config.inference_cuda_graph_scope) == ("local", "block")


@pytest.mark.parametrize("impl", [{}, {"cuda_graph_impl": "local"}, {"cuda_graph_impl": "none"}])
def test_full_iteration_inference_among_the_modules_selects_the_scope(impl):
    with pytest.warns(DeprecationWarning, match="full_iteration_inference"):
        config = EngineConfig(mode="training", cuda_graph_modules=["full_iteration_inference"], **impl)
    wanted = ("none", "none") if impl.get("cuda_graph_impl") == "none" else ("local", "block")
    assert (config.cuda_graph_impl, config.graph_config().inference_scope) == wanted
    assert config.cuda_graph_modules == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cuda_graph_modules", "full_iteration"),
        ("cuda_graph_warmup_steps", 2),
        ("cuda_graph_max_packed_seqs", 64),
        ("cuda_graph_moe_dropless", True),
        ("vision_cuda_graph_impl", "local"),
    ],
)
def test_settings_of_training_are_refused_by_name_in_an_inference_engine(name, value):
    message = f"{name}={value!r} is for training, found mode='inference'"
    for build in (EngineConfig, lambda **values: EngineConfig.from_dict(values)):
        with pytest.raises(ConfigError, match=message):
            build(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "cpu"),
        ("max_num_seqs", 4),
        ("enable_sleep_mode", True),
        ("kv_offloading_size", 1.0),
        ("tensor_parallel_size", 2),
        ("graph_buckets", (1, 2)),
    ],
)
def test_settings_of_inference_are_refused_by_name_in_a_training_engine(name, value):
    with pytest.raises(ConfigError, match=f"{name}={re.escape(repr(value))} is for inference, found mode='training'"):
        EngineConfig(mode="training", **{name: value})
    default = getattr(EngineConfig(), name)
    assert EngineConfig(mode="training", **{name: default}) == EngineConfig(mode="training")


def test_a_training_configuration_has_no_setting_of_inference():
    config = EngineConfig(mode="training", cuda_graph_warmup_steps=1, num_threads=2)
    assert isinstance(config, TrainingConfig) and (config.mode, config.num_threads) == ("training", 2)
    assert copy.copy(config) == pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, cuda_graph_warmup_steps=3).cuda_graph_warmup_steps == 3
    training, inference = ({field.name for field in dataclasses.fields(one)} for one in (TrainingConfig, EngineConfig))
    assert training - inference == set(TRAINING_ONLY)


@pytest.mark.parametrize("impl", [{}, {"cuda_graph_impl": "local"}, {"cuda_graph_impl": "none"}])
def test_full_iteration_among_the_modules_selects_the_impl(impl):
    with pytest.warns(DeprecationWarning, match="cuda_graph_impl='full_iteration'") as caught:
        config = EngineConfig(mode="training", cuda_graph_modules="full_iteration", **impl)
    assert (config.cuda_graph_impl, config.cuda_graph_modules) == ("full_iteration", ())
    assert len(caught) == 1
    assert config.graph_config().training_captures == "iteration"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cuda_graph_packed_seq": True}, "cuda_graph_packed_seq=True needs cuda_graph_max_packed_seqs"),
        ({"cuda_graph_packed_seq": "yes", "cuda_graph_max_packed_seqs": 4}, "cuda_graph_packed_seq='yes'"),
        ({"cuda_graph_max_packed_seqs": 0}, "cuda_graph_max_packed_seqs=0"),
        ({"cuda_graph_max_packed_seqs": 64, "cuda_graph_impl": "full_iteration"}, "captures whole batches"),
    ],
)
def test_invalid_options_of_packed_sequences_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"mode": "training"} | values)


@pytest.mark.parametrize(
    ("values", "documents"),
    [
        ({}, None),
        ({"cuda_graph_max_packed_seqs": 64}, 64),
        ({"cuda_graph_max_packed_seqs": 64, "cuda_graph_packed_seq": True}, 64),
        ({"cuda_graph_max_packed_seqs": 64, "cuda_graph_packed_seq": False}, None),
    ],
)
def test_packed_sequences_are_padded_unless_the_switch_is_off(values, documents):
    assert EngineConfig(mode="training", **values).packed_documents == documents


def test_megatrons_switch_decides_whether_its_number_counts():
    arguments = {"cuda_graph_impl": "local", "cuda_graph_max_packed_seqs": 2048}
    assert EngineConfig.from_megatron(arguments, mode="training").packed_documents is None
    off = arguments | {"cuda_graph_packed_seq": False}
    assert EngineConfig.from_megatron(off, mode="training").packed_documents is None
    on = arguments | {"cuda_graph_packed_seq": True}
    assert EngineConfig.from_megatron(on, mode="training").packed_documents == 2048
    assert isinstance(EngineConfig.from_megatron(on), EngineConfig)

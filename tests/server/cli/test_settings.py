"""Settings from a file, the environment and flags: precedence, names, types; unknown names are refused."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.cli import main as cli
from server.cli.flags import server_config
from server.cli.settings import NOT_OFFERED, PARSERS, parse, read_environment, read_file, setting_types
from server.config import ServerConfig, quota


@pytest.fixture
def write(tmp_path):
    def write_file(text):
        path = tmp_path / "encore.yaml"
        path.write_text(text)
        return str(path)

    return write_file


def built(*words, **environ):
    return server_config(cli.build_parser("serve").parse_args(["serve", *words]), environ)


def test_precedence_is_flag_environment_file_default(write):
    path = write("port: 1\nhost: 0.0.0.0\nmax-num-seqs: 4\nwarmup: full\nmax_waiting: 7\n")
    config = built("--config", path, "--port", "3", ENCORE_PORT="2", ENCORE_MAX_NUM_SEQS="5")
    assert (config.port, config.engine.max_num_seqs, config.engine.warmup) == (3, 5, "full")
    assert (config.host, config.max_waiting, config.log_level) == ("0.0.0.0", 7, "info")
    assert built("--config", path, ENCORE_PORT="2").port == 2
    assert built(ENCORE_CONFIG=path).port == 1
    assert built().port == ServerConfig().port


def test_every_setting_can_be_given_in_each_of_the_three_ways():
    types = setting_types()
    names = {field.name for kind in (ServerConfig, EngineConfig) for field in dataclasses.fields(kind)} - NOT_OFFERED
    assert set(types) == names
    assert all(kind.startswith("bool") or kind in PARSERS for kind in types.values())


def test_values_of_a_file_have_their_types(write):
    path = write(
        "served-model-name: [a, b]\ngraph_buckets: [1, 2]\nin_process: true\ndrain_seconds: 2\nmodel: x\n"
        "num_pages: null\nscore-tokens: no,yes\nseed: '3'\n--log-level: debug\n"
    )
    assert read_file(path) == {
        "served_model_name": ("a", "b"), "graph_buckets": (1, 2), "in_process": True, "drain_seconds": 2, "model": "x",
        "score_tokens": ("no", "yes"), "seed": 3, "log_level": "debug",
    }  # fmt: skip
    assert read_file(write("")) == {} and read_file(write("# nothing\n")) == {}
    assert read_file(write("graph_buckets: 8\n")) == {"graph_buckets": (8,)}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot: 1", "did you mean 'port'"),
        ("max-num-seq: 1", "did you mean 'max-num-seqs'"),
        ("max_num_seq: 1", "did you mean 'max_num_seqs'"),
        ("maxnumseqs: 1", "did you mean 'max-num-seqs'"),
        ("quux: 1", "unknown setting 'quux'"),
        ("3: 1", "unknown setting '3'"),
        ("port: many", "port"),
        ("port: [1]", "port"),
        ("port: true", "port"),
        ("port: 99999", "port"),
        ("port: 1.5", "port"),
        ("in_process: 1", "in_process"),
        ("in_process: maybe", "in_process"),
        ("model: 3", "model"),
        ("graph_buckets: [1, x]", "graph_buckets"),
        ("graph_buckets: 1,x", "graph_buckets"),
        ("served_model_name: {a: b}", "served_model_name"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "twice"),
        ("- a\n- b", "mapping"),
        ("a: [", "YAML"),
        ("\x00", "YAML"),
        ("port: !!python/object/apply:os.getpid []", "YAML"),
    ],
)
def test_an_invalid_file_is_refused_with_the_setting_named(write, text, named):
    with pytest.raises(ConfigError, match=named):
        built("--config", write(text))


def test_a_value_out_of_range_is_named_as_it_was_given(write):
    path = write("port: 70000\n")
    for words, environ, named in (
        (("--config", path), {}, f"{path}: port=70000: must be"),
        (("--config", path), {"ENCORE_PORT": "80000"}, "ENCORE_PORT=80000: must be"),
        (("--config", path, "--port", "90000"), {"ENCORE_PORT": "80000"}, "--port=90000: must be"),
        (("--drain-seconds", "-1"), {}, "--drain-seconds=-1.0: must be"),
    ):
        with pytest.raises(ConfigError) as caught:
            built(*words, **environ)
        assert str(caught.value).startswith(named)
    for key in ("drain-seconds", "drain_seconds"):
        path = write(f"{key}: -1\n")
        with pytest.raises(ConfigError, match=re.escape(f"{path}: {key}=-1: must be")):
            built("--config", path)


def test_kv_events_are_json_or_a_mapping_of_a_file(write):
    text = '{"enable_kv_cache_events": true, "topic": "kv@a@b"}'
    path = write("kv-events-config:\n  enable_kv_cache_events: true\n  topic: kv@a@b\n")
    found = [
        built("--kv-events-config", text), built(ENCORE_KV_EVENTS_CONFIG=text), built("--config", path),
        built("--config", write(f"kv_events_config: '{text}'")),
    ]  # fmt: skip
    assert {one.engine.kv_events_config.topic for one in found} == {"kv@a@b"}
    assert all(one.engine.kv_events_config.is_on for one in found)


@pytest.mark.parametrize(
    ("value", "message"),
    [("{", "--kv-events-config='{' is not valid JSON"), ('{"topics": ""}', "--kv-events-config: unknown key 'topics'")],
)
def test_invalid_kv_events_are_refused_by_the_flag(value, message):
    with pytest.raises(ConfigError, match=message):
        built("--kv-events-config", value)


def test_a_missing_file_is_one_line_and_status_2(capsys):
    assert cli.main(["serve", "--config", "/no/such/file.yaml"]) == 2
    shown = capsys.readouterr().err
    assert len(shown.splitlines()) == 1 and "/no/such/file.yaml" in shown


def test_environment_values_have_their_types():
    environ = {
        "ENCORE_IN_PROCESS": "True", "ENCORE_GRAPH_BUCKETS": "1, 2", "ENCORE_MODEL": "x", "ENCORE_HOST": "",
        "ENCORE_GPU_MEMORY_UTILIZATION": "0.5", "HOME": "/", "ENCORE_CACHE": "/c", "ENCORE_API_KEYS": "k",
    }  # fmt: skip
    assert read_environment(environ) == {
        "in_process": True, "graph_buckets": (1, 2), "model": "x", "gpu_memory_utilization": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("ENCORE_MAX_NUM_SEQ", "1", "did you mean 'ENCORE_MAX_NUM_SEQS'"),
        ("ENCORE_QUUX", "1", "ENCORE_QUUX"),
        ("ENCORE_PORT", "many", "ENCORE_PORT='many'"),
        ("ENCORE_IN_PROCESS", "perhaps", "true or false"),
        ("ENCORE_WARMUP", "warm", "^ENCORE_WARMUP='warm'"),
        ("ENCORE_PORT", "70000", "^ENCORE_PORT=70000: "),
        ("ENCORE_MAX_NUM_SEQS", "0", "^ENCORE_MAX_NUM_SEQS=0"),
    ],
)
def test_an_invalid_environment_is_refused(variable, value, named):
    with pytest.raises(ConfigError, match=named):
        built(**{variable: value})


@pytest.mark.parametrize(
    ("text", "processors"), [("max 100000", math.inf), ("400000 100000", 4), ("50000 100000", 0.5)]
)
def test_the_cgroup_cpu_quota_is_read(tmp_path, text, processors):
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert quota(tmp_path / "cpu.max") == processors
    assert quota(tmp_path / "none") == math.inf


def test_kubernetes_service_variables_are_ignored():
    environ = {
        "ENCORE_PORT": "tcp://10.0.0.1:8000", "ENCORE_SERVICE_HOST": "10.0.0.1", "ENCORE_SERVICE_PORT": "8000",
        "ENCORE_SERVICE_PORT_HTTP": "8000", "ENCORE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "ENCORE_PORT_8000_TCP_PROTO": "tcp", "ENCORE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "ENCORE_METRICS_SERVICE_HOST": "10.0.0.2", "ENCORE_METRICS_PORT": "tcp://10.0.0.2:9",
        "ENCORE_METRICS_PORT_9_TCP": "tcp://10.0.0.2:9",
    }  # fmt: skip
    assert read_environment(environ) == {}
    assert built(**environ).port == ServerConfig().port


def test_a_float_is_not_an_int():
    assert parse("x", "int", " 8 ") == 8
    with pytest.raises(ConfigError):
        parse("x", "int", "8.0")

"""Settings of replicas: what is refused, and the configuration for a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from engine.errors import ConfigError
from server.config import ServerConfig

pytest.importorskip("ray", reason="replicas run on Ray")
from ray.serve.schema import ServeDeploySchema  # noqa: E402

from server.http.errors import WireError  # noqa: E402
from server.replicas import application  # noqa: E402
from server.replicas.commands import Command, CommandLog, newer, refuse_unshared  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("http_workers", 2), ("max_connections", 5), ("header_seconds", 3.0), ("write_seconds", 3.0),
        ("keep_alive_seconds", 3.0), ("forwarded_allow_ips", ("10.0.0.1",)), ("device", "cuda:1"),
        ("kv_events_config", {"enable_kv_cache_events": True}),
    ],
)  # fmt: skip
def test_settings_that_replicas_cannot_have_are_refused_by_name(setting, value):
    with pytest.raises(ConfigError, match=setting):
        application.check(ServerConfig.from_dict({"replicas": 2, setting: value}))


@pytest.mark.parametrize(
    "settings", [{"replicas": 0}, {"replicas": 4, "max_replicas": 3}, {"max_replicas": 0}, {"target_requests": 0}]
)
def test_numbers_of_replicas_are_checked(settings):
    with pytest.raises(ConfigError, match=list(settings)[-1]):
        ServerConfig.from_dict(settings)


def test_the_shipped_configuration_is_valid_and_names_the_builder():
    found = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text("utf-8"))
    [app] = ServeDeploySchema.model_validate(found).applications
    assert app.import_path == f"{application.__name__}:{application.build.__name__}"
    config = ServerConfig.from_dict(app.args)
    assert config.is_replicated
    application.check(config)


def test_a_cluster_needs_keys_unless_it_is_open_on_purpose(monkeypatch):
    for name in ("ENCORE_API_KEYS", "ENCORE_ADMIN_KEYS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="allow_unauthenticated"):
        application.build({"replicas": 2})
    with pytest.raises(ConfigError, match="replica_count"):
        application.build({"replica_count": 2, "allow_unauthenticated": True})
    application.build({"replicas": 2, "allow_unauthenticated": True})
    monkeypatch.setenv("ENCORE_API_KEYS", "a-key")
    application.build({"replicas": 2})


def test_without_ray_the_command_says_what_to_install():
    code = "import sys; sys.modules['ray'] = None; from server.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", "--replicas", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert "--replicas" in done.stderr and "pip install 'encore-serve[ray]'" in done.stderr


def test_a_new_replica_repeats_the_last_command_of_each_kind_in_order():
    first, second = Command(1, "/weights/update", b"", b"1"), Command(5, "/weights/update", b"", b"2")
    pause, resume = Command(3, "/pause", b"mode=keep", b""), Command(7, "/resume", b"", b"")
    log = CommandLog()
    log.merge({"weights": second})
    log.merge({"pause": pause})
    latest = log.merge({"weights": first})  # late
    assert newer(latest, {}) == [("pause", pause), ("weights", second)]
    assert newer(latest, {"weights": second}) == [("pause", pause)]
    latest = log.merge({"pause": resume})
    assert newer(latest, {}) == [("weights", second)]  # there is no pause to end
    assert newer(latest, {"pause": pause, "weights": second}) == [("pause", resume)]
    assert newer(latest, {}, "another model") == []
    restarted = CommandLog()
    assert restarted.merge(latest) == latest


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/init_weight_transfer_engine", {}), ("/start_weight_update", None), ("/weight_checker", {"action": "reset"}),
        ("/update_weights", {"update_info": {"names": ["a"], "shapes": [[1]], "dtype_names": ["float32"]}}),
    ],
)  # fmt: skip
def test_weights_that_a_later_replica_cannot_repeat_are_refused(path, body):
    with pytest.raises(Exception, match=path) as refusal:
        refuse_unshared(path, body)
    assert refusal.value.status == 501


@pytest.mark.parametrize("body", [{"update_info": {"weight_dir": "/w"}}, {"weight_dir": "/w"}])
def test_weights_from_files_are_shared(body):
    refuse_unshared("/update_weights", body)


@pytest.mark.parametrize("path", ["/kv_blocks", "/kv_blocks/lookup", "/kv_blocks/export", "/kv_blocks/import"])
def test_blocks_of_the_kv_cache_need_the_name_of_a_replica(path):
    with pytest.raises(WireError, match=f"{path} over several replicas: .* X-Encore-Replica") as refused:
        refuse_unshared(path, {})
    assert refused.value.status == 501

"""Compose, Prometheus, Grafana and systemd files agree with each other and with the server's settings."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine.client.async_client import STOP_SECONDS
from server.cli.settings import NOT_SETTINGS, PREFIX, setting_types
from server.config import ServerConfig
from tests.deploy.files import DEPLOY, ROOT, load

SETTINGS = {PREFIX + name.upper() for name in setting_types()} | NOT_SETTINGS
COMPOSE = load("compose.yaml")
PROMETHEUS = load("prometheus/prometheus.yml")
SERVICES: dict[str, Any] = COMPOSE["services"]
UNIT = (DEPLOY / "systemd/encore.service").read_text(encoding="utf-8")


def directives(name: str) -> list[str]:
    """The values of a directive of the systemd unit, in order."""
    return re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)


def seconds(text: str) -> float:
    return float(re.match(r"(\d+)s?\b", text)[1])


def test_there_are_a_server_prometheus_and_grafana() -> None:
    assert set(SERVICES) == {"encore", "prometheus", "grafana"}
    assert set(load("compose.gpu.yaml")["services"]) <= set(SERVICES)


def test_compose_variables_are_settings_of_the_server() -> None:
    assert set(SERVICES["encore"]["environment"]) <= SETTINGS


def test_build_arguments_are_the_dockerfiles() -> None:
    known = re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(load("compose.gpu.yaml")["services"]["encore"]["build"]["args"]) <= set(known)


@pytest.mark.parametrize("name", SERVICES)
def test_mounted_paths_exist(name: str) -> None:
    for volume in SERVICES[name]["volumes"]:
        source = volume.split(":")[0]
        assert (DEPLOY / source).is_dir() if source.startswith(".") else source in COMPOSE["volumes"], source


def test_ports_are_published_to_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in service["ports"]]
    assert all(re.match(r"(\$\{HTTP_BIND:-)?127\.0\.0\.1:", port) for port in ports)


def test_prometheus_scrapes_the_server_by_its_name_in_compose() -> None:
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in PROMETHEUS["scrape_configs"]}
    port = re.search(r"ENCORE_PORT=(\d+)", (ROOT / "Dockerfile").read_text(encoding="utf-8"))[1]
    assert targets["encore"] == [f"encore:{port}"] and "encore" in SERVICES
    assert SERVICES["encore"]["ports"][0].endswith(f":{port}")
    folder = DEPLOY / "prometheus"
    assert all((folder / name).is_file() for name in PROMETHEUS["rule_files"])


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    mounts = dict(reversed(volume.removesuffix(":ro").split(":")) for volume in SERVICES["grafana"]["volumes"])
    provider = load("grafana/provisioning/dashboards/encore.yaml")["providers"][0]
    assert mounts[provider["options"]["path"]] == "./grafana/dashboards"
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/encore.json"
    source = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"][0]
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]


def test_compose_leaves_the_server_time_to_drain() -> None:
    server = SERVICES["encore"]
    drain = float(server["environment"]["ENCORE_DRAIN_SECONDS"])
    assert seconds(server["stop_grace_period"]) > drain + STOP_SECONDS


def test_the_unit_starts_the_server_and_leaves_it_time_to_drain() -> None:
    assert directives("ExecStart") == ["/opt/encore/bin/encore serve"]
    assert seconds(directives("TimeoutStopSec")[0]) > ServerConfig().drain_seconds + STOP_SECONDS
    assert directives("RestartPreventExitStatus") == ["2"]


def test_the_units_variables_are_settings_and_its_cache_is_writable() -> None:
    given = re.findall(r"\b(ENCORE_\w+)=", UNIT)
    assert given and set(given) <= SETTINGS
    assert directives("CacheDirectory") == ["encore"] and "ENCORE_CACHE=%C/encore" in UNIT


def test_the_unit_drops_privileges() -> None:
    for name in ("NoNewPrivileges", "DynamicUser", "ProtectHome", "PrivateTmp"):
        assert directives(name) == ["yes"], name
    assert directives("CapabilityBoundingSet") == [""]

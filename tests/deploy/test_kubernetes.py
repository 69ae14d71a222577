"""The Kubernetes objects are well-formed and agree with each other, the image and the server."""

from __future__ import annotations

import re
from copy import deepcopy
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from engine.client.async_client import STOP_SECONDS
from server.cli.settings import NOT_SETTINGS, PREFIX, setting_types
from tests.deploy.files import DEPLOY, ROOT, load
from tests.deploy.shapes import faults

OBJECTS = ("deployment", "service", "poddisruptionbudget", "networkpolicy", "servicemonitor")


def deployment() -> Any:
    return load("kubernetes/deployment.yaml")


def pod() -> Any:
    return deployment()["spec"]["template"]["spec"]


def container() -> Any:
    (only,) = pod()["containers"]
    return only


@pytest.mark.parametrize("name", OBJECTS)
def test_the_object_has_its_shape(name: str) -> None:
    assert faults(load(f"kubernetes/{name}.yaml")) == []


def test_a_misspelt_key_a_wrong_type_and_a_missing_key_are_found() -> None:
    broken = deepcopy(deployment())
    inner = broken["spec"]["template"]["spec"]["containers"][0]
    inner["readyProbe"] = inner.pop("readinessProbe")
    inner["resources"]["limits"]["cpu"] = 4
    broken["spec"]["replicas"] = True
    path = "Deployment.spec.template.spec.containers[0]"
    assert {fault.partition(" is needed")[0] for fault in faults(broken)} == {
        f"{path}.readyProbe: unknown", f"{path}.readinessProbe: missing", f"{path}.resources.limits.cpu: <class 'str'>",
        "Deployment.spec.replicas: <class 'int'>",
    }  # fmt: skip


def test_the_startup_probe_allows_a_warm_up_and_liveness_does_not_wait_for_it() -> None:
    start, ready, alive = (container()[f"{name}Probe"] for name in ("startup", "readiness", "liveness"))
    assert start["httpGet"]["path"] == ready["httpGet"]["path"] == "/ready"
    assert alive["httpGet"]["path"] == "/health"  # a pod that isn't ready must not be restarted
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800
    assert ready["periodSeconds"] * ready["failureThreshold"] <= 10


def test_a_pod_has_time_to_drain() -> None:
    drain = float(next(one["value"] for one in container()["env"] if one["name"] == "ENCORE_DRAIN_SECONDS"))
    pause = float(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] > pause + drain + STOP_SECONDS


def test_environment_variables_are_server_settings() -> None:
    names = {one["name"] for one in container()["env"]}
    assert names <= {PREFIX + name.upper() for name in setting_types()} | NOT_SETTINGS
    assert pod()["enableServiceLinks"] is False  # a Service called encore would set ENCORE_PORT to tcp://...


def test_selectors_and_ports_match() -> None:
    labels = deployment()["spec"]["template"]["metadata"]["labels"]
    service, budget = load("kubernetes/service.yaml"), load("kubernetes/poddisruptionbudget.yaml")
    monitor = load("kubernetes/servicemonitor.yaml")
    for selector in (
        deployment()["spec"]["selector"]["matchLabels"], service["spec"]["selector"],
        budget["spec"]["selector"]["matchLabels"],
    ):  # fmt: skip
        assert selector.items() <= labels.items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in container()["ports"]}
    assert monitor["spec"]["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert service["metadata"]["name"] == "encore"  # the job name that rules and dashboard use


def test_the_secret_with_the_keys_is_required() -> None:
    assert container()["envFrom"] == [{"secretRef": {"name": "encore-keys"}}]
    assert "ENCORE_ALLOW_UNAUTHENTICATED" not in {one["name"] for one in container()["env"]}


def test_the_network_policy_opens_the_http_port_to_clients_and_no_private_network_to_the_server() -> None:
    spec = load("kubernetes/networkpolicy.yaml")["spec"]
    labels = deployment()["spec"]["template"]["metadata"]["labels"]
    assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    names = {port["name"] for port in container()["ports"]}
    assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == names
    assert all(rule["from"] for rule in spec["ingress"])
    for rule in spec["egress"]:
        blocks = [ip_network(block["ipBlock"]["cidr"]) for block in rule.get("to", ())]
        if {port["port"] for port in rule["ports"]} == {53}:
            continue
        assert blocks, "a rule without addresses opens every one"
        closed = [ip_network(text) for peer in rule["to"] for text in peer["ipBlock"]["except"]]
        for address in ("10.1.2.3", "172.20.0.1", "192.168.1.1", "169.254.169.254", "127.0.0.1", "::1", "fd00::1"):
            found = ip_address(address)
            assert any(found in network for network in closed if network.version == found.version), address


def test_the_disruption_budget_keeps_one_pod() -> None:
    assert load("kubernetes/poddisruptionbudget.yaml")["spec"]["maxUnavailable"] < deployment()["spec"]["replicas"]


def test_the_pod_runs_as_the_image_does_with_its_folders_writable() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    user = int(re.search(r"^USER (\d+)", dockerfile, re.MULTILINE)[1])
    security = pod()["securityContext"]
    assert {security[name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {user}
    mounts = {mount["mountPath"]: mount["name"] for mount in container()["volumeMounts"]}
    assert set(mounts) == {re.search(r"ENCORE_CACHE=(\S+)", dockerfile)[1], "/tmp"}
    assert set(mounts.values()) == {volume["name"] for volume in pod()["volumes"]}


def test_requests_are_within_limits() -> None:
    units = {"Mi": 2**20, "Gi": 2**30, "": 1}
    resources = container()["resources"]

    def size(text: str) -> float:
        number, unit = re.fullmatch(r"(\d+)(\w*)", text).groups()
        return int(number) * units[unit]

    for name in ("cpu", "memory"):
        assert size(resources["requests"][name]) <= size(resources["limits"][name])


def test_kustomize_lists_files_that_exist() -> None:
    listed = load("kubernetes/kustomization.yaml")
    assert all((DEPLOY / "kubernetes" / name).is_file() for name in listed["resources"])
    assert listed["images"][0]["name"] == container()["image"]

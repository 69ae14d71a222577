"""Which hosts and origins are answered, and whose X-Forwarded-For is believed."""

from __future__ import annotations

import logging
import re

import pytest

from engine.errors import ConfigError
from server.config import ServerConfig
from server.http.hosts import host_name, listens_on_loopback
from tests.server.conftest import running, tiny_config

OWN = ["localhost", "localhost:1234", "LOCALHOST.", "127.0.0.1:80", "127.9.9.9", "[::1]:8000", "[::ffff:127.0.0.1]"]
FOREIGN = ["evil.example", "evil.example:80", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost",
           "10.0.0.1", "0.0.0.0", "169.254.169.254", "[fe80::1]", "2130706433", "127.1"]  # fmt: skip
COMPLETION = {"prompt": "red", "max_tokens": 1}


def status(server, host, path="/version", **headers):
    return server.http.get(path, headers={"Host": host} | headers).status_code


@pytest.fixture(scope="module")
def keyed(tiny_model, tmp_path_factory):
    """A server with API keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sk-one")
    with running(tiny_config(tiny_model, api_key_file=str(keys)), wait_ready=False) as handle:
        yield handle


@pytest.mark.parametrize("host", OWN)
def test_a_loopback_server_answers_to_loopback_names(server, host):
    assert status(server, host) == 200
    assert status(server, host, Origin=f"http://{host}") == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_a_loopback_server_without_keys_answers_to_no_other_name(server, host):
    for path in ("/", "/version", "/metrics", "/v1/models", "/none", "/chat/main.js", "/openapi.json"):
        assert status(server, host, path) == 400
    refused = server.http.post("/v1/completions", json=COMPLETION, headers={"Host": host})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["code"] == "host_not_allowed"
    assert f"Host: {host}" in error["message"] and f"--allowed-hosts {host_name(host)}" in error["message"]
    assert "x-request-id" in refused.headers


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "https://evil.example:8000", "null", "file://", "chrome-extension://abc", "x", ""]
)
def test_a_page_of_another_site_is_refused(server, origin):
    refused = server.http.post("/v1/messages", json={}, headers={"Origin": origin})
    assert refused.status_code == 400 and refused.json()["type"] == "error"  # Anthropic's format
    assert refused.json()["error"]["message"].startswith(f"Origin: {origin}")
    assert status(server, "localhost", Origin="http://localhost:3000") == 200


@pytest.mark.parametrize("host", [*OWN, "evil.example", "10.0.0.1:8000", "encore.default.svc:8000"])
def test_a_server_with_keys_answers_to_any_name(keyed, host):
    assert status(keyed, host) == 200
    assert status(keyed, host, Origin="https://app.example") == 200
    assert keyed.http.get("/v1/models", headers={"Host": host}).status_code == 401


def test_a_public_server_without_keys_answers_to_any_name_and_its_address(start_server):
    server = start_server(host="0.0.0.0", allow_unauthenticated=True, wait_ready=False)
    assert [status(server, host) for host in ("10.0.0.1", "llm.example.com", "localhost")] == [200, 200, 200]


def test_allowed_hosts_are_answered(start_server):
    server = start_server(allowed_hosts=("LLM.example.com", "*.internal", "10.1.2.3", "[fe80::1]"), wait_ready=False)
    for host in ("llm.example.com", "LLM.Example.Com.:443", "a.b.internal", "10.1.2.3:80", "[FE80::1]", "localhost"):
        assert status(server, host) == 200, host
        assert status(server, "localhost", Origin=f"https://{host}") == 200, host
    for host in ("example.com", "a.llm.example.com", "internal", "xinternal", "10.1.2.4"):
        assert status(server, host) == 400, host
        assert status(server, "localhost", Origin=f"https://{host}") == 400, host


def test_a_star_allows_every_host(start_server):
    server = start_server(allowed_hosts="*", wait_ready=False)
    assert status(server, "evil.example", Origin="null") == 200


def test_allowed_hosts_also_bind_a_public_server_with_keys(start_server, tmp_path):
    """Its own address is answered too, which is what the probes of Kubernetes send as Host. Keys protect origins."""
    (tmp_path / "keys").write_text("sk-one")
    server = start_server(
        host="127.0.0.5", api_key_file=str(tmp_path / "keys"), allowed_hosts="llm.example.com", wait_ready=False
    )
    assert [status(server, host) for host in ("llm.example.com", "127.0.0.5:80", "other.example")] == [200, 200, 400]
    assert status(server, "llm.example.com", Origin="https://app.example") == 200


@pytest.mark.parametrize(("host", "loopback"), [
    ("localhost", True), ("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("0", False), ("::", False),
    ("10.0.0.1", False), ("no-such-name.invalid", False),
])  # fmt: skip
def test_the_address_decides_whether_names_are_checked(host, loopback):
    assert listens_on_loopback(host) is loopback


@pytest.mark.parametrize(("name", "value"), [
    ("allowed_hosts", "http://llm.example.com"), ("allowed_hosts", "llm.example.com:8000"), ("allowed_hosts", "a b"),
    ("allowed_hosts", "*example.com"), ("allowed_hosts", "a.*.com"), ("allowed_hosts", ""),
    ("forwarded_allow_ips", "proxy"), ("forwarded_allow_ips", "10.0.0.1/8"), ("forwarded_allow_ips", "10.0.0.0/33"),
    ("forwarded_allow_ips", ""),
])  # fmt: skip
def test_a_wrong_setting_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}")):
        ServerConfig(**{name: value})


def logged_client(server, caplog, **headers):
    """The client that the access log shows for a request."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="encore.access"):
        server.http.get("/version", headers=headers)
        server.wait(lambda: any(record.name == "encore.access" for record in caplog.records), "the log's line")
    (record,) = [record for record in caplog.records if record.name == "encore.access"]
    return next(value for value in vars(record).values() if isinstance(value, dict) and "client" in value)["client"]


FORGED = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https", "Forwarded": "for=203.0.113.9",
          "X-Real-IP": "203.0.113.9"}  # fmt: skip


def test_no_proxy_is_trusted_by_default(server, caplog, monkeypatch):
    assert logged_client(server, caplog, **FORGED) == "127.0.0.1"


def test_an_environment_variable_of_uvicorn_trusts_no_proxy(start_server, caplog, monkeypatch):
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    assert logged_client(start_server(wait_ready=False), caplog, **FORGED) == "127.0.0.1"


@pytest.mark.parametrize(("trusted", "forwarded", "client"), [
    (("127.0.0.0/8",), "203.0.113.9", "203.0.113.9"),
    (("127.0.0.1", "10.0.0.0/8"), "198.51.100.1, 203.0.113.9, 10.0.0.7", "203.0.113.9"),  # what the client sent first
    (("10.0.0.0/8",), "203.0.113.9", "127.0.0.1"),
    (("*",), "203.0.113.9, 10.0.0.7", "203.0.113.9"),
])  # fmt: skip
def test_trusted_proxies_name_the_client(start_server, caplog, trusted, forwarded, client):
    server = start_server(forwarded_allow_ips=trusted, wait_ready=False)
    assert logged_client(server, caplog, **{"X-Forwarded-For": forwarded}) == client


def test_a_forwarded_host_is_not_believed(start_server):
    server = start_server(forwarded_allow_ips="*", wait_ready=False)
    assert status(server, "evil.example", **{"X-Forwarded-Host": "localhost"}) == 400

"""Without API keys the server refuses to bind an address that other machines can reach."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from engine.errors import ConfigError
from server.config import ServerConfig
from server.http.hosts import is_loopback
from server.keys import API_KEYS, Keys
from server.workers.http_server import open_listener

GUARDED, ADMIN_ONLY, OPEN = Keys(["sk-one"]), Keys([], ["admin"]), Keys()


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        probe.bind(("::1", 0))
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
PUBLIC = ["0.0.0.0", "0", pytest.param("::", marks=needs_ipv6), pytest.param("0::0", marks=needs_ipv6)]
LOOPBACK = ["127.0.0.1", "localhost", "127.1.2.3", pytest.param("::1", marks=needs_ipv6),
            pytest.param("::ffff:127.0.0.1", marks=needs_ipv6)]  # fmt: skip


@pytest.mark.parametrize("keys", [OPEN, ADMIN_ONLY], ids=["no keys", "admin keys only"])
@pytest.mark.parametrize("host", PUBLIC)
def test_a_public_address_without_api_keys_is_refused(host: str, keys: Keys) -> None:
    with pytest.raises(ConfigError) as refused:
        open_listener(ServerConfig(host=host, port=0), keys)
    for named in (f"--host {host}", "ENCORE_API_KEYS", "--api-key-file", "--allow-unauthenticated"):
        assert named in str(refused.value)


def test_a_name_of_a_public_address_is_refused_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = socket.socket.bind

    class Resolving(socket.socket):
        """Binds the name as the wildcard address, as if it resolved to that."""

        def bind(self, address: tuple) -> None:
            bind(self, ("0.0.0.0" if address[0] == "this-host.example" else address[0], address[1]))

    monkeypatch.setattr(socket, "socket", Resolving)
    with pytest.raises(ConfigError, match=r"--host this-host\.example \(0\.0\.0\.0\) can be reached"):
        open_listener(ServerConfig(host="this-host.example", port=0), OPEN)


@pytest.mark.parametrize("host", PUBLIC)
def test_api_keys_or_the_flag_permit_a_public_address(host: str, caplog: pytest.LogCaptureFixture) -> None:
    open_listener(ServerConfig(host=host, port=0), GUARDED).close()
    assert not caplog.records
    open_listener(ServerConfig(host=host, port=0, allow_unauthenticated=True), OPEN).close()
    assert "open to anyone" in caplog.text


@pytest.mark.parametrize("host", LOOPBACK)
def test_a_loopback_address_requires_no_keys(host: str, caplog: pytest.LogCaptureFixture) -> None:
    open_listener(ServerConfig(host=host, port=0), OPEN).close()
    assert not caplog.records


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.255.255.254", True), ("::1", True), ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("169.254.1.1", False), ("128.0.0.1", False),
        ("::ffff:0.0.0.0", False), ("::ffff:10.0.0.1", False), ("fe80::1%eth0", False), ("fc00::1", False),
    ],
)  # fmt: skip
def test_only_loopback_addresses_are_private(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_command_ends_with_one_line_and_status_2(workers: str) -> None:
    words = ["--host", "0.0.0.0", "--port", "0", "--http-workers", workers, "--model", "/no/such/model"]
    environment = {name: value for name, value in os.environ.items() if name != API_KEYS}
    done = subprocess.run(
        [sys.executable, "-m", "server.cli", "serve", *words], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("encore serve: error: --host 0.0.0.0") and "--allow-unauthenticated" in line

"""Which names a server answers to.

A page of another site can make a browser send requests to a loopback address: directly, or after its own name was
pointed there (DNS rebinding). The headers Host and Origin tell such requests apart.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.errors import WireError, error_response

ANY = "*"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+)(:\d*)?", re.ASCII)


def is_loopback(address: str) -> bool:
    """Return whether only this machine reaches the IP address. False for 0.0.0.0 and ::, which include all others."""
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def listens_on_loopback(host: str) -> bool:
    """Return whether a server that listens on `host`, an address or a name, is reached by this machine only."""
    try:
        return is_loopback(host if ":" in host else socket.gethostbyname(host))
    except (OSError, ValueError):  # the listener reports it
        return False


def is_valid_host(value: str) -> bool:
    """Return whether a Host header is a name or an address, with or without a port."""
    return _HOST.fullmatch(value) is not None


def host_name(value: str) -> str:
    """Return the name in a Host header, an authority or a setting, in the form in which names are compared."""
    found = _HOST.fullmatch(value)
    return (found[1] if found else value).strip("[]").removesuffix(".").lower()


class AllowedHosts:
    """ASGI middleware that answers 400 to requests for other hosts than `allowed`, loopback names and its own address.

    `allowed` has names, `*.example.com` for all names below one, and `*` for every name. With `checks_origin`, a
    request whose Origin has another host gets 400 too: keys protect from such requests, since a page doesn't know them.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], checks_origin: bool):
        self.app, self._checks_origin = app, checks_origin
        self._any = ANY in allowed
        self._names = {host_name(name) for name in allowed} | {"localhost"}
        self._suffixes = tuple(name.removeprefix("*").lower() for name in allowed if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._any:
            try:
                self._check(Headers(scope=scope), (scope.get("server") or ("",))[0])
            except WireError as refusal:
                await error_response(refusal, scope)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, headers: Headers, own_address: str) -> None:
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._allows(host_name(host), own_address):  # HTTP/1.0 has no Host: no browser
            raise _refusal("Host", host, host_name(host))
        if origin is not None and self._checks_origin:
            name = _host_of_origin(origin)
            if name is None or not self._allows(name, own_address):
                raise _refusal("Origin", origin, name)

    def _allows(self, name: str, own_address: str) -> bool:
        if name in self._names or name == own_address or name.endswith(self._suffixes):
            return True
        try:
            return is_loopback(name)
        except ValueError:
            return False


def _host_of_origin(origin: str) -> str | None:
    """Return the host of an origin; None for `null` and what is not an origin."""
    try:
        authority = urlsplit(origin).netloc
    except ValueError:
        return None
    return host_name(authority) if is_valid_host(authority) else None


def _refusal(header: str, value: str, name: str | None) -> WireError:
    remedy = "" if name is None else f", or start the server with --allowed-hosts {name[:100]}"
    return WireError(
        400, f"{header}: {value[:100]} is not a host that this server answers to: use localhost or the server's "
        f"address{remedy}",
        code="host_not_allowed",
    )  # fmt: skip

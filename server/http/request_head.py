"""Checks of a request's head beyond the HTTP parser's checks.

A proxy that reads one of these requests differently could be made to forward a request that it has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from server.http.hosts import host_name, is_valid_host


class InvalidHead(Exception):
    """A request that can be read in several ways, that HTTP/1.1 forbids, or whose header is too long.

    The message says why. `code` is the error's code.
    """

    def __init__(self, message: str, code: str = "invalid_http"):
        super().__init__(message)
        self.code = code


HEADER_BYTES = 64 * 1024


def check_head(version: str, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Check a parsed head. Names of `headers` are lower case. Raises InvalidHead.

    See RFC 9112, sections 2.3 (versions), 3.2 (Host and the request's target) and 6.1 (Transfer-Encoding).
    """
    if sum(len(name) + len(value) for name, value in headers) > HEADER_BYTES:
        raise header_too_long()
    if version not in ("1.0", "1.1"):
        raise InvalidHead(f"HTTP/{version} is not supported: send HTTP/1.1")
    hosts, encodings = [], []
    for name, value in headers:
        if name == b"host":
            hosts.append(value.decode("latin-1"))
        elif name == b"transfer-encoding":
            encodings.append(value.decode("latin-1"))
    _check_transfer_encoding(version, encodings)
    if len(hosts) > 1:
        raise InvalidHead(f"the request has {len(hosts)} Host headers: send one")
    if not hosts and version == "1.1":
        raise InvalidHead("the request has no Host header, which HTTP/1.1 requires")
    if hosts and not is_valid_host(hosts[0]):
        raise InvalidHead(f"Host: {hosts[0][:100]!r} is not a host name or an address")
    if not target.startswith((b"/", b"*")):
        _check_absolute(target.decode("latin-1"), hosts)


def header_too_long() -> InvalidHead:
    """Return the error of a header that is longer than HEADER_BYTES."""
    return InvalidHead(f"the header is longer than {HEADER_BYTES} bytes", "header_too_long")


def _check_transfer_encoding(version: str, encodings: list[str]) -> None:
    if encodings and version == "1.0":
        raise InvalidHead("HTTP/1.0 has no Transfer-Encoding: send Content-Length, or HTTP/1.1")
    if len(encodings) > 1 or any(encoding.strip().lower() != "chunked" for encoding in encodings):
        raise InvalidHead(f"Transfer-Encoding: {', '.join(encodings)[:100]!r} is not supported: send chunked")


def _check_absolute(target: str, hosts: list[str]) -> None:
    """Check a target such as `http://host/path`: its host counts, so another one in the Host header is an error."""
    try:
        found = urlsplit(target)
    except ValueError:
        raise InvalidHead("the request's target is not a valid URL") from None
    if found.scheme not in ("http", "https") or not is_valid_host(found.netloc):
        raise InvalidHead("the request's target is neither a path nor a URL of http or https")
    if hosts and host_name(found.netloc) != host_name(hosts[0]):
        raise InvalidHead(f"the request's target is on {found.netloc[:100]!r}, and Host is {hosts[0][:100]!r}")

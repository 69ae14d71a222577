"""Requests that a proxy might read differently are a 400 that ends the connection: no bytes after it are a request."""

from __future__ import annotations

import json
import re
import socket

import pytest

from tests.support.waiting import PATIENCE

BODY = b'{"prompt": "red", "max_tokens": 1}'
POST, GET, HOST = b"POST /v1/completions HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\n", b"Host: localhost\r\n"
JSON, END = b"Content-Type: application/json\r\n", b"Connection: close\r\n\r\n"
LENGTH, CHUNKED = b"Content-Length: %d\r\n" % len(BODY), b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


def statuses(server, request, piece=None):
    """Statuses and the last error of what a connection answers until it ends; sends `piece` bytes at a time."""
    host, port = server.url.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for start in range(0, len(request), piece or len(request)):
                connection.sendall(request[start : start + (piece or len(request))])
            while chunk := connection.recv(65536):
                received += chunk
        except ConnectionError:  # it was closed while the rest arrived
            pass
    found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", received)]
    _, _, last = received.rpartition(b"\r\n\r\n")
    return found, json.loads(last).get("error") if last.startswith(b"{") else None


def post(*headers, host=HOST, rest=BODY):
    return POST + host + JSON + b"".join(headers) + END + rest


HOSTS = {
    "two Host headers": (post(HOST, LENGTH), "2 Host headers"),
    "two different ones": (post(b"host: evil.example\r\n", LENGTH), "2 Host headers"),
    "none in HTTP/1.1": (post(LENGTH, host=b""), "no Host header"),
    "empty": (post(LENGTH, host=b"Host: \r\n"), "Host: ''"),
    "a list": (post(LENGTH, host=b"Host: localhost, evil.example\r\n"), "is not a host name"),
    "with a user": (post(LENGTH, host=b"Host: evil@localhost\r\n"), "is not a host name"),
    "with a path": (post(LENGTH, host=b"Host: localhost/v1\r\n"), "is not a host name"),
    "not ASCII": (post(LENGTH, host=b"Host: l\xf6calhost\r\n"), "is not a host name"),
    "two with an upgrade": (GET + HOST + HOST + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n", "2 Host headers"),
    "other than the target's": (GET.replace(b"/health", b"http://evil.example/health") + HOST + END, "evil.example"),
    "target with a user": (GET.replace(b"/health", b"http://a@localhost/health") + HOST + END, "neither a path"),
    "target of another scheme": (GET.replace(b"/health", b"ftp://localhost/health") + HOST + END, "neither a path"),
}
FRAMING = {
    "both lengths": (post(CHUNKED, LENGTH, rest=CHUNKS), ""),
    "both, length first": (post(LENGTH, CHUNKED, rest=CHUNKS), ""),
    "two lengths": (post(LENGTH, LENGTH), ""),
    "two different lengths": (post(LENGTH, b"Content-Length: 0\r\n"), ""),
    "list of lengths": (post(b"Content-Length: %d, %d\r\n" % (len(BODY), len(BODY))), ""),
    "signed length": (post(b"Content-Length: +%d\r\n" % len(BODY)), ""),
    "hexadecimal length": (post(b"Content-Length: 0x22\r\n"), ""),
    "huge length": (post(b"Content-Length: 18446744073709551650\r\n"), ""),
    "chunked in HTTP/1.0": (post(CHUNKED, rest=CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0"), "HTTP/1.0"),
    "chunked twice": (post(CHUNKED, CHUNKED, rest=CHUNKS), ""),
    "compressed chunks": (post(b"Transfer-Encoding: gzip, chunked\r\n", rest=CHUNKS), "send chunked"),
    "identity": (post(b"Transfer-Encoding: identity\r\n", rest=CHUNKS), "send chunked"),
    "unknown encoding": (post(b"Transfer-Encoding: xchunked\r\n", rest=CHUNKS), "send chunked"),
    "encoding with a control character": (post(b"Transfer-Encoding: \x0bchunked\r\n", rest=CHUNKS), ""),
    "space before the colon": (post(b"Transfer-Encoding : chunked\r\n", LENGTH), ""),
    "hexadecimal chunk": (post(CHUNKED, rest=b"0x" + CHUNKS), ""),
    "signed chunk": (post(CHUNKED, rest=b"+" + CHUNKS), ""),
    "chunk without a line end": (post(CHUNKED, rest=CHUNKS.replace(b"}\r\n", b"}")), ""),
    "chunk line with LF only": (post(CHUNKED, rest=CHUNKS.replace(b"\r\n", b"\n", 1)), ""),
    "chunk extension with LF": (post(CHUNKED, rest=CHUNKS.replace(b"\r\n", b";a\n", 1)), ""),
    "chunk size beyond 64 bits": (post(CHUNKED, rest=b"10000000000000022\r\n" + BODY), ""),
    "length in trailers": (post(CHUNKED, rest=CHUNKS[:-2] + b"Content-Length: 3\r\n\r\n"), ""),
}
LINES = {
    "folded header": (post(LENGTH, b"X-A: a\r\n b\r\n"), ""),
    "folded length": (post(b"Content-Length:\r\n %d\r\n" % len(BODY)), ""),
    "bare CR in a value": (post(b"X-A: a\rContent-Length: 3\r\n", LENGTH), ""),
    "bare LF after a header": (post(b"X-A: a\n", LENGTH), ""),
    "NUL in a value": (post(b"X-A: a\0b\r\n", LENGTH), ""),
    "space in a name": (post(b"X A: b\r\n", LENGTH), ""),
    "no colon": (post(b"X-A\r\n", LENGTH), ""),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", ""),
    "HTTP/2.0": (GET.replace(b"1.1", b"2.0") + HOST + END, "HTTP/2.0 is not supported"),
    "HTTP/0.9": (b"GET /health\r\n\r\n", "HTTP/0.9 is not supported"),
    "space in the target": (GET.replace(b"/health", b"/health HTTP/1.1 x") + HOST + END, ""),
}


@pytest.mark.parametrize("cases", [HOSTS, FRAMING, LINES], ids=["hosts", "framing", "lines"])
def test_an_ambiguous_request_is_one_400(server, cases):
    for name, (request, message) in cases.items():
        found, error = statuses(server, request + SMUGGLED)
        assert found == [400], name
        assert error["code"] == "invalid_http" and message in error["message"], name


@pytest.mark.parametrize("cases", [HOSTS, FRAMING, LINES], ids=["hosts", "framing", "lines"])
def test_an_ambiguous_request_in_pieces_is_never_answered(server, cases):
    for name, (request, _) in cases.items():
        assert statuses(server, request + SMUGGLED, 5)[0] in ([400], []), name  # [] where the end overtook the answer


def test_a_request_after_one_with_a_long_header_is_not_answered(server):
    found, error = statuses(server, GET + HOST + b"X-A: " + b"a" * 70_000 + b"\r\n\r\n" + SMUGGLED)
    assert found == [400] and error["code"] == "header_too_long"


@pytest.mark.parametrize(
    "request_",
    [
        post(LENGTH), post(CHUNKED, rest=CHUNKS), post(b"Transfer-Encoding: Chunked\r\n", rest=CHUNKS),
        post(CHUNKED, rest=CHUNKS.replace(b"\r\n", b';a="b c"\r\n', 1)),
        post(CHUNKED, rest=CHUNKS[:-2] + b"X-Trailer: a\r\n\r\n"),
        post(LENGTH, host=b"").replace(b"HTTP/1.1", b"HTTP/1.0"),
        post(LENGTH).replace(b"/v1", b"http://LOCALHOST:80/v1", 1),
        GET + HOST + b"Upgrade: websocket\r\nConnection: Upgrade, close\r\n\r\n",
        b"\r\n" + GET + HOST + END,
        GET.replace(b"/health", b"//evil.example/../health") + HOST + END,
    ],
)  # fmt: skip
def test_a_valid_request_is_answered(server, request_):
    found, _ = statuses(server, request_)
    assert found in ([200], [404])


def test_earlier_requests_of_a_connection_are_answered_before_the_400(server):
    first = POST + HOST + JSON + LENGTH + b"\r\n" + BODY
    found, error = statuses(server, first + post(HOST, LENGTH))
    assert found == [200, 400] and "2 Host headers" in error["message"]
    server.wait_idle()


@pytest.mark.parametrize("padding", [0, 300_000])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "cp1252"])
def test_a_body_in_another_encoding_than_utf_8_is_a_400(server, encoding, padding):
    content = json.dumps({"prompt": "café", "max_tokens": 1, "user": "x" * padding}, ensure_ascii=False).encode(
        encoding
    )
    for path in ("/v1/completions", "/v1/messages", "/tokenize"):
        answer = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and "the body is not valid" in answer.text, path


def test_a_surrogate_in_the_bytes_of_a_body_is_a_400_and_a_byte_order_mark_is_skipped(server):
    headers = {"Content-Type": "application/json; charset=utf-8"}
    lone = server.http.post("/v1/completions", content=BODY.replace(b"red", b"r\xed\xa0\x80d"), headers=headers)
    assert lone.status_code == 400 and "not valid UTF-8" in lone.text
    marked = server.http.post("/v1/completions", content=b"\xef\xbb\xbf" + BODY, headers=headers)
    assert marked.status_code == 200

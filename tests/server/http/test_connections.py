"""Connection limits: the number of connections, incomplete headers, long headers, chunk extensions and trailers."""

from __future__ import annotations

import json
import socket
import time
from contextlib import contextmanager

import pytest

from tests.server.conftest import running, tiny_config
from tests.support.waiting import PATIENCE


@pytest.fixture(scope="module")
def server(tiny_model):
    """A server whose connections stay open, also those of a client that waits for its turn on a busy machine."""
    with running(tiny_config(tiny_model, max_connections=3, header_seconds=60, keep_alive_seconds=60)) as handle:
        handle.http.close()  # its idle connection would count
        handle.wait(lambda: len(connections(handle)) == 0, "no connection")
        yield handle


@pytest.fixture(scope="module")
def impatient(tiny_model):
    """A server with a short time for headers and for idle connections."""
    with running(tiny_config(tiny_model, header_seconds=0.4, keep_alive_seconds=1)) as handle:
        yield handle


def connections(server):
    return [one for one in socket_table() if one == server.url.rpartition(":")[2]]


def socket_table():
    """Local ports of this machine's established IPv4 connections."""
    with open("/proc/net/tcp", encoding="ascii") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return [str(int(row[1].partition(":")[2], 16)) for row in rows if row[3] == "01"]


@contextmanager
def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        yield connection


def check_health(connection):
    """Read one complete response on a keep-alive connection."""
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    received = b""
    while not received.endswith(b'{"status":"ok"}'):
        chunk = connection.recv(65536)
        assert chunk, f"closed after {received!r}"
        received += chunk
    assert received.startswith(b"HTTP/1.1 200")


def answer_to(connection, request=b""):
    """Status, headers and JSON of the response, read until the server closes; None if it sends nothing."""
    connection.sendall(request)
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    if not received:
        return None
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode().lower(), json.loads(body) if b"application/json" in head else body


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"])
def test_incomplete_headers_are_a_408_in_time(impatient, begun):
    start = time.monotonic()
    with connect(impatient) as connection:
        status, head, body = answer_to(connection, begun)
    assert status == 408 and body["error"]["code"] == "header_timeout" and "connection: close" in head
    assert "within 0.4 seconds" in body["error"]["message"] and time.monotonic() - start > 0.3


def test_slow_headers_do_not_extend_the_timeout(impatient):
    with connect(impatient) as connection, pytest.raises(OSError):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        for _ in range(1000):
            connection.sendall(b"X-A: 1\r\n")
            time.sleep(0.05)


def test_a_second_request_has_its_own_header_timeout(start_server):
    server = start_server(header_seconds=0.4, keep_alive_seconds=60)
    with connect(server) as connection:
        for _ in range(2):
            check_health(connection)
            time.sleep(0.5)  # longer than the header timeout, shorter than the keep-alive timeout
        status, _, _ = answer_to(connection, b"GET /he")
        assert status == 408


def test_an_idle_connection_is_closed(impatient):
    with connect(impatient) as connection:
        check_health(connection)
        assert answer_to(connection) is None


def test_a_response_may_take_longer_than_the_header_timeout(impatient):
    body = json.dumps({"prompt": "red", "max_tokens": 240, "ignore_eos": True, "stream": True, "n": 8}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    with connect(impatient) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body))
        time.sleep(0.6)
        status, _, text = answer_to(connection, body)
    assert status == 200 and b"[DONE]" in text


def test_too_many_connections_are_a_503_but_probes_are_answered(server):
    with connect(server) as one, connect(server) as two, connect(server) as three:
        for kept in (one, two, three):
            check_health(kept)
        with connect(server) as surplus:
            status, head, body = answer_to(surplus, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status == 503 and "retry-after: 1" in head and body["error"]["code"] == "too_many_connections"
        with connect(server) as probe:
            status, _, body = answer_to(probe, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status == 200 and body == {"status": "ok"}
    server.wait(lambda: len(connections(server)) == 0, "the connections' end")
    with connect(server) as later:
        later.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert later.recv(65536).startswith(b"HTTP/1.1 200")


ENDLESS, WHOLE = b"a" * 100_000, b"a" * 70_000 + b"\r\nContent-Length: 5\r\n\r\nhello"


@pytest.mark.parametrize("rest", [ENDLESS, WHOLE, b"a" * 60_000 + b"\r\nX-B: " + b"b" * 9_000 + b"\r\n\r\n"])
def test_headers_that_are_too_long_are_a_400(server, rest):
    with connect(server) as connection:
        status, _, body = answer_to(connection, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-A: " + rest)
        assert status == 400 and body["error"]["code"] == "header_too_long"


def test_a_header_that_comes_in_pieces_is_cut_off_too(server):
    with connect(server) as connection, pytest.raises(ConnectionError):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: ")
        for _ in range(200):
            connection.sendall(b"a" * 5_000)
            time.sleep(0.001)


CHUNKED = b" HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
TRAILERS = (b"0\r\n", b"X-A: " + b"a" * 1_000 + b"\r\n")
ONE_TRAILER = (b"0\r\nX-A: ", b"a" * 1_000)
EXTENSIONS = (b"", b"1;name=" + b"a" * 1_000 + b"\r\n \r\n")
ONE_EXTENSION = (b"1;name=", b"a" * 1_000)
ENDLESS_FRAMING = [TRAILERS, ONE_TRAILER, EXTENSIONS, ONE_EXTENSION]


def sent_until_closed(connection, begun, piece, most=20_000_000):
    """Send `piece` repeatedly, up to `most` bytes; return how many bytes were sent before the server closed."""
    sent = 0
    try:
        connection.sendall(begun)
        while sent < most:
            connection.sendall(piece * 10)
            sent += len(piece) * 10
    except (ConnectionError, TimeoutError):
        pass
    return sent


@pytest.mark.parametrize(("begun", "piece"), ENDLESS_FRAMING)
@pytest.mark.parametrize("line", [b"GET /health", b"POST /v1/completions"])
def test_chunk_extensions_and_trailers_are_bounded(server, line, begun, piece):
    with connect(server) as connection:
        connection.sendall(line + CHUNKED)
        time.sleep(0.05)
        # The socket buffers of both ends hold some megabytes that the server never reads.
        assert sent_until_closed(connection, begun, piece) < 15_000_000
    server.wait(lambda: len(connections(server)) == 0, "the connection's end")


@pytest.mark.parametrize(("begun", "piece"), ENDLESS_FRAMING)
def test_long_chunk_extensions_and_trailers_are_a_431(server, begun, piece):
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions" + CHUNKED)
        time.sleep(0.05)  # the header and the body come in two pieces
        connection.sendall(begun + piece * 30)
        time.sleep(0.05)
        status, _, body = answer_to(connection, piece * 40)
    assert status == 431 and body["error"]["code"] == "trailers_too_long"
    assert "65536 bytes" in body["error"]["message"]


def test_a_body_in_small_chunks_with_extensions_and_trailers_is_read(server):
    body = json.dumps({"prompt": "red", "max_tokens": 1, "user": "x" * 30_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)  # five bytes of framing for each
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions" + CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        time.sleep(0.05)
        for start in range(0, len(chunks), 10_000):
            connection.sendall(chunks[start : start + 10_000])
            time.sleep(0.002)
        connection.sendall(b"0;name=value\r\n")
        status, _, answer = answer_to(connection, b"X-Checksum: 1\r\nContent-Type: text/plain\r\n\r\n")
    assert status == 200 and answer["object"] == "text_completion"


def test_a_long_body_is_not_a_long_header(server):
    body = json.dumps({"prompt": "red", "max_tokens": 1, "user": "x" * 500_000}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    with connect(server) as connection:
        status, _, answer = answer_to(connection, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert status == 200 and answer["object"] == "text_completion"

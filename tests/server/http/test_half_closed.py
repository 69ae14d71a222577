"""Clients that close their sending side, requests that can't be parsed, and upgrades."""

from __future__ import annotations

import json
import logging
import socket
import time
from contextlib import contextmanager

import pytest

from tests.support.waiting import PATIENCE

LONG = {"text": "red", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
SHORT = {"text": "red", "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}


@contextmanager
def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        yield connection


def request(body, path="/generate", version="1.1", headers=""):
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n{headers}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def rest(connection):
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return received


def responses(received):
    """Split into (status, head, body) of the final responses; interim responses are skipped."""
    found = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status == 100:
            assert head == b"HTTP/1.1 100 Continue"
            continue
        [length] = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line]
        found.append((status, head.lower(), received[:length]))
        received = received[length:]
    return found


@pytest.mark.parametrize("body", [SHORT, SHORT | {"sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}}])
def test_a_client_that_closes_its_sending_side_gets_its_answer(long_server, body):
    with connect(long_server) as connection:
        connection.sendall(request(body))
        connection.shutdown(socket.SHUT_WR)
        [(status, head, answer)] = responses(rest(connection))
    assert status == 200 and b"connection: close" in head
    wanted = body["sampling_params"]["max_new_tokens"]
    assert json.loads(answer)["meta_info"]["completion_tokens"] == wanted
    long_server.wait_idle()


def test_pipelined_requests_before_a_half_close_are_all_answered(long_server):
    with connect(long_server) as connection:
        connection.sendall(request(SHORT) * 3)
        connection.shutdown(socket.SHUT_WR)
        found = responses(rest(connection))
    assert [status for status, _, _ in found] == [200] * 3
    assert [b"connection: close" in head for _, head, _ in found] == [False, False, True]


def test_a_stream_to_a_half_closed_client_is_complete(long_server):
    with connect(long_server) as connection:
        connection.sendall(request(SHORT | {"stream": True}))
        connection.shutdown(socket.SHUT_WR)
        received = rest(connection)
    assert b"data: [DONE]" in received and received.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_both_sides_still_aborts_its_request(long_server, stream):
    generated = long_server.metric("encore_generation_tokens_total")
    with connect(long_server) as connection:
        connection.sendall(request(LONG | {"stream": stream}))
        long_server.wait(lambda: long_server.service.admission.in_flight == 1, "the request")
    long_server.wait_idle()
    assert long_server.metric("encore_generation_tokens_total") - generated < 3900


def test_a_half_closed_client_with_an_incomplete_request_is_closed(long_server):
    with connect(long_server) as connection:
        connection.sendall(request(SHORT)[:-5])
        connection.shutdown(socket.SHUT_WR)
        assert rest(connection) == b""


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"])
def test_a_request_that_can_not_be_parsed_gets_the_error_body(server, junk):
    with connect(server) as connection:
        connection.sendall(junk)
        [(status, head, body)] = responses(rest(connection))
    assert status == 400 and b"content-type: application/json" in head and b"connection: close" in head
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error" and error["code"] == "invalid_http" and error["message"]


CHUNKED = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
LONG_HEADER = b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 100_000 + b"\r\n\r\n"


@pytest.mark.parametrize("pause", [0, 0.05])
@pytest.mark.parametrize("half_closes", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("junk", "code"),
    [
        (b"GARBAGE\r\n\r\n", "invalid_http"),
        (b"GARBAGE\r\n\r\n" * 20_000, "invalid_http"),  # arrives in several pieces
        (b"CONNECT localhost:80 HTTP/1.1\r\n\r\n", "invalid_http"),
        (CHUNKED + b"no size\r\n", "invalid_http"),
        (LONG_HEADER, "header_too_long"),
    ],
)
def test_requests_before_one_that_can_not_be_parsed_are_answered(
    long_server, junk, code, count, half_closes, pause
):  # fmt: skip
    with connect(long_server) as connection:
        valid = request(SHORT | {"sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}) * count
        connection.sendall(valid if pause else valid + junk)
        if pause:
            time.sleep(pause)
            connection.sendall(junk)
        if half_closes:
            connection.shutdown(socket.SHUT_WR)
        *answers, (status, head, body) = responses(rest(connection))
    assert [json.loads(answer)["meta_info"]["completion_tokens"] for _, _, answer in answers] == [200] * count
    assert status == 400 and b"connection: close" in head and json.loads(body)["error"]["code"] == code
    long_server.wait_idle()


def test_junk_after_a_request_that_closes_the_connection_is_dropped(server):
    with connect(server) as connection:
        connection.sendall(request(SHORT, headers="Connection: close\r\n") + b"GARBAGE\r\n\r\n")
        [(status, head, _)] = responses(rest(connection))
    assert status == 200 and b"connection: close" in head


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_upgrades_are_ignored_without_a_warning(server, protocol, caplog):
    headers = f"Connection: Upgrade\r\nUpgrade: {protocol}\r\n"
    data = request(SHORT, headers=headers) + request(SHORT, headers="Connection: close\r\n")
    with caplog.at_level(logging.WARNING), connect(server) as connection:
        for start in range(0, len(data), 40):  # in pieces, so that the body comes after the header and with it
            connection.sendall(data[start : start + 40])
            time.sleep(0.002)
        found = responses(rest(connection))
    assert [status for status, _, _ in found] == [200, 200]
    for _, _, body in found:
        assert json.loads(body)["meta_info"]["completion_tokens"] == 20
    assert caplog.records == []


def test_an_upgrade_in_one_piece_keeps_its_body_and_the_connection(server):
    headers = "Connection: keep-alive, Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAA\r\n"
    with connect(server) as connection:
        connection.sendall(request(SHORT, headers=headers) * 2 + request(SHORT, headers="Connection: close\r\n"))
        found = responses(rest(connection))
    assert [json.loads(body)["meta_info"]["completion_tokens"] for _, _, body in found] == [20, 20, 20]


def test_connect_is_refused(server):
    with connect(server) as connection:
        connection.sendall(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        [(status, _, body)] = responses(rest(connection))
    assert status in (400, 404, 405) and json.loads(body)["error"]["message"]

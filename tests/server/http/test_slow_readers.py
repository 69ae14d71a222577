"""Clients that don't read: other clients are served, their buffers are bounded, and their connections are closed."""

from __future__ import annotations

import json
import select
import socket
import time
from contextlib import contextmanager

import pytest

from engine.client.output_queue import DELTA_BYTES, UNREAD_BYTES, UNREAD_BYTES_PER_SEQUENCE
from server.config import ServerConfig
from tests.support.waiting import PATIENCE


@contextmanager
def asked(server, path, body):
    """A connection that has sent a request. The client's receive buffer takes a few kilobytes without reading."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    size = f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect((host, int(port)))
        connection.sendall((head + size).encode() + content)
        yield connection


def whole(connection):
    """Read until the server closes the connection."""
    received = bytearray()
    while chunk := connection.recv(1 << 20):
        received += chunk
    return bytes(received)


def is_reset(connection):
    """Whether the server has aborted the connection, without reading."""
    poller = select.poll()
    poller.register(connection, 0)  # errors are always reported
    return any(found & select.POLLERR for _, found in poller.poll(0))


def generated(server):
    return server.service.client.stats().generation_tokens


def engine_is_idle(server):
    stats = server.service.client.stats()
    return not stats.num_running and not stats.num_waiting


# Each event of /generate holds the whole output so far: megabytes, more than any socket buffer.
STREAM = {"text": "red", "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}, "stream": True}
ALTERNATIVES = {"return_logprob": True, "top_logprobs_num": 20}


def test_unread_responses_do_not_hold_queue_capacity(start_server):
    server = start_server(max_num_seqs=2, max_waiting=2, max_model_len=2048, write_seconds=3600)
    with asked(server, "/generate", STREAM), asked(server, "/generate", STREAM):
        with asked(server, "/generate", STREAM), asked(server, "/generate", STREAM):
            server.wait(lambda: generated(server) == 4 * 1500 and engine_is_idle(server), "the engine's end")
            server.wait(lambda: server.service.admission.in_flight == 0, "the release of the queue capacity")
            assert server.service.admission.unanswered == 4  # no client has read its response
            assert len(server.answer("/generate", {"text": "blue"})["output_ids"]) > 0
    server.wait(lambda: server.service.admission.unanswered == 0, "their leaving")


@pytest.mark.parametrize("prompts", ["red", ["red", "blue"]])
def test_a_stream_that_is_read_too_slowly_is_aborted_with_an_error(start_server, prompts):
    server = start_server(max_model_len=4096, write_seconds=3600)
    wanted = {"max_new_tokens": 4000, "ignore_eos": True, "n": 2}
    with asked(server, "/generate", STREAM | ALTERNATIVES | {"text": prompts, "sampling_params": wanted}) as connection:
        server.wait(lambda: generated(server) > 0 and engine_is_idle(server), "the abort")
        server.wait(lambda: server.service.admission.in_flight == 0, "the release of the queue capacity")
        assert 0 < generated(server) < 4000  # of 8,000 or 16,000
        received = whole(connection)
    assert b'"code":"reader_too_slow"' in received and received.count(b"data: [DONE]") == 1
    server.wait_idle()


def test_the_buffer_of_an_unread_response_holds_thousands_of_tokens():
    assert 3_000 < (UNREAD_BYTES + UNREAD_BYTES_PER_SEQUENCE) / DELTA_BYTES < 5_000


@pytest.mark.parametrize("stream", [True, False])
def test_a_connection_that_reads_nothing_is_reset_in_time(start_server, stream):
    server = start_server(max_model_len=2048, write_seconds=0.5)
    wanted = {"max_new_tokens": 1200, "ignore_eos": True, "n": 8}
    with asked(
        server, "/generate", STREAM | ALTERNATIVES | {"sampling_params": wanted, "stream": stream}
    ) as connection:
        server.wait(lambda: generated(server) > 0 and engine_is_idle(server), "the engine's end")
        server.wait(lambda: is_reset(connection), "the reset")
        with pytest.raises(ConnectionResetError):
            whole(connection)
        server.wait(
            lambda: server.service.admission.unanswered == server.service.admission.in_flight == 0,
            "the end of the request",
        )


def test_a_slow_reader_that_makes_progress_gets_the_whole_response(start_server):
    server = start_server(max_model_len=2048, write_seconds=3)
    with asked(server, "/generate", STREAM) as connection:
        received, until = bytearray(), time.monotonic() + 4
        while time.monotonic() < until:
            received += connection.recv(65536)
            time.sleep(0.1)
        received += whole(connection)
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b'"length":1500' in received


def test_the_default_write_timeout_is_a_minute():
    assert ServerConfig().write_seconds == 60

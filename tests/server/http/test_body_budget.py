"""The limit of all request bodies together: stalled uploads hold no memory and stop nobody."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from server.http import body_budget
from tests.server.http.test_bodies import JSON, error_of
from tests.support.waiting import PATIENCE

MIB = 2**20
SMALL = {"text": "red", "sampling_params": {"max_new_tokens": 1}}


def upload(server, size, sent, stack):
    """Open a connection that sends `sent` of a body of `size` bytes."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=PATIENCE))
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n"
    with suppress(ConnectionError):  # it is refused before all is sent
        connection.sendall(head.encode() + b"\r\n" + b"a" * sent)
    return connection


def padded(size):
    """A good body of `size` bytes."""
    content = json.dumps(SMALL)
    return content + " " * (size - len(content))


def held(server):
    return server.metric("encore_request_body_bytes")


def whole_answer(connection):
    text = ""
    while not text.endswith("}}"):
        chunk = connection.recv(65536)
        assert chunk, f"closed after {text!r}"
        text += chunk.decode()
    return text


def has_answer(connection):
    """Return whether a response has begun."""
    return bool(select.select([connection], [], [], 0)[0])


def answered(connection):
    """Read one response and return its status and error code."""
    head, _, body = whole_answer(connection).partition("\r\n\r\n")
    assert "retry-after: 1" in head.lower() and "connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.fixture
def server(start_server):
    return start_server(max_body_bytes=MIB, max_total_body_bytes=4 * MIB)


def test_stalled_uploads_give_way_to_good_requests_and_to_nobody_else(server, monkeypatch):
    monkeypatch.setattr(body_budget, "GRACE_SECONDS", PATIENCE)
    with ExitStack() as stack:
        stalled = [upload(server, MIB, MIB - 1000, stack) for _ in range(4)]
        server.wait(lambda: held(server) == 4 * (MIB - 1000 - body_budget.UNCOUNTED_BYTES), "the uploads")
        assert server.answer("/generate", SMALL)  # small ones don't count
        full = error_of(server.http.post("/generate", content=padded(MIB), headers=JSON), 503)  # all are too young
        assert full["code"] == "too_many_body_bytes" and "--max-total-body-bytes" in full["message"]
        assert not any(map(has_answer, stalled))
        monkeypatch.setattr(body_budget, "GRACE_SECONDS", 0.0)
        for _ in range(5):
            assert server.http.post("/generate", content=padded(MIB), headers=JSON).status_code == 200
        server.wait(lambda: any(map(has_answer, stalled)), "the refusal")
        [refused] = filter(has_answer, stalled)  # one made room for all five
        assert answered(refused) == (503, "too_many_body_bytes")
    server.wait_idle()


def test_the_slowest_upload_gives_way(server):
    with ExitStack() as stack:
        slow = [upload(server, MIB, 200_000, stack)]
        fast = [upload(server, MIB, MIB - 1000, stack) for _ in range(4)]
        counted = 200_000 + 4 * (MIB - 1000) - 5 * body_budget.UNCOUNTED_BYTES
        server.wait(lambda: held(server) == counted, "the uploads")
        time.sleep(1.2)
        assert server.http.post("/generate", content=padded(MIB // 2), headers=JSON).status_code == 200
        assert answered(slow[0]) == (503, "too_many_body_bytes")
        assert sum(map(has_answer, fast)) <= 1


def test_a_hundred_unfinished_uploads_hold_no_more_than_the_limit(server):
    """Each of them had 60 s to hold 8 MiB."""
    with ExitStack() as stack:
        for _ in range(2):
            for _ in range(50):
                upload(server, MIB, MIB - 1000, stack)
            time.sleep(1.1)
        assert 0 < held(server) <= 4 * MIB
        assert server.answer("/generate", SMALL)
    server.wait(lambda: held(server) == 0, "the release")


def test_a_body_is_released_when_it_is_tokenized_not_when_it_is_answered(start_server):
    server = start_server(max_body_bytes=MIB, max_total_body_bytes=2 * MIB, max_model_len=4096)
    endless = json.dumps({"text": "red", "session_id": "x" * 900_000, "stream": True,
                          "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}})  # fmt: skip
    with ExitStack() as stack:
        for _ in range(6):
            response = stack.enter_context(server.http.stream("POST", "/generate", content=endless, headers=JSON))
            assert response.status_code == 200
        assert held(server) == 0


def test_many_uploads_at_once_are_answered_or_refused_and_leave_nothing(server):
    ready = threading.Barrier(12)

    def send(_):
        ready.wait()
        return server.http.post("/generate", content=padded(MIB), headers=JSON).status_code

    with ThreadPoolExecutor(12) as pool:
        statuses = list(pool.map(send, range(12)))
    assert set(statuses) <= {200, 503} and 200 in statuses
    server.wait(lambda: held(server) == 0, "the release")


def test_a_body_must_arrive_in_time(start_server):
    server = start_server(body_seconds=0.5)
    with ExitStack() as stack:
        connection = upload(server, 1000, 10, stack)
        answer = connection.makefile("rb").read().decode()  # the server closes the connection
        assert answer.startswith("HTTP/1.1 408 ") and "body_timeout" in answer and "--body-seconds" in answer

"""Limits on prompts per request and on strings, and long work that must not stall other requests."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from server.config import ServerConfig
from server.workers.http_server import freeze_memory
from tests.server.http.test_bodies import error_of

ONE = {"max_tokens": 1}
HELLO = [{"role": "user", "content": "red"}]


def sequences(path, prompts, n):
    if path == "/generate":
        return {"text": ["a"] * prompts, "sampling_params": {"max_new_tokens": 1, "n": n}}
    return {"prompt": ["a"] * prompts, "max_tokens": 1, "n": n}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_one_request_has_a_limited_number_of_sequences(start_server, path, stream):
    server = start_server(max_sequences_per_request=6, max_num_seqs=8)
    for prompts, n in ((6, 1), (3, 2)):
        server.post(path, sequences(path, prompts, n)).raise_for_status()
    for prompts, n in ((7, 1), (2, 4), (100_000, 1)):
        error = error_of(server.post(path, sequences(path, prompts, n) | {"stream": stream}), 400)
        assert "at most 6" in error["message"] and "--max-sequences-per-request" in error["message"]


def test_one_request_leaves_most_of_the_queue_to_others():
    default = ServerConfig()
    assert default.max_sequences_per_request <= default.max_waiting / 4


LONG = "a" * 150
TOOL = {"type": "function", "function": {"name": "f", "description": LONG}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", LONG]}, "prompt"),
        ("/generate", {"text": LONG}, "text"),
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "name": LONG}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", LONG: [{"a": "b"}]}]}, "messages"),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [TOOL]}, "messages"),
        ("/v1/chat/completions", {"messages": HELLO, "documents": [{"text": LONG}]}, "messages"),
        ("/v1/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"x": LONG}}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    ],
)
def test_a_text_longer_than_the_setting_is_refused(start_server, path, body, param):
    server = start_server(max_prompt_chars=140)
    error = error_of(server.post(path, body), 400)
    assert error["param"] == param and "--max-prompt-chars" in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_long_role_is_refused(server, path):
    error = error_of(server.post(path, {"messages": [{"role": "r" * 8_000_000, "content": "a"}]}), 400)
    assert error["param"] == "messages" and "64 characters" in error["message"]


class LongestTurn:
    """Longest turn of a server's event loop, in CPU seconds of its thread: no other request is answered during it.

    Unlike the latency of a request, it does not depend on what else the machine runs.
    """

    def __init__(self, server):
        self.seconds = 0.0
        self._loop = server.service.startup.get_loop()
        self._begun, self._ended = threading.Event(), threading.Event()

    def __enter__(self):
        freeze_memory()  # as a server does once it is ready; a test process has more objects
        self._runs = True
        self._loop.call_soon_threadsafe(self._begin)
        self._begun.wait()
        return self

    def __exit__(self, *_):
        gc.unfreeze()
        self._runs = False
        self._ended.wait()  # the turn that sent the answer may still run, or be unmeasured

    def _begin(self):
        self._last = time.thread_time()
        self._begun.set()
        self._tick()

    def _tick(self):
        now = time.thread_time()
        self.seconds, self._last = max(self.seconds, now - self._last), now
        if self._runs:
            self._loop.call_later(0.001, self._tick)
        else:
            self._ended.set()


MAX_TURN_SECONDS = 0.1


def test_many_prompts_do_not_stall_other_requests(start_server):
    """Prompts of up to 4,096 characters are tokenized on the event loop, some milliseconds each."""
    server = start_server(max_sequences_per_request=1000, max_waiting=1000, max_model_len=4096, in_process=False)
    prompts = [f"{number} red fox " * 300 for number in range(250)]
    with LongestTurn(server) as longest:
        refused = server.post("/v1/completions", {"prompt": [*prompts, "a " * 5000], "max_tokens": 1})
    assert error_of(refused, 400)["code"] == "context_length_exceeded"  # the last one, after all others were tokenized
    assert longest.seconds < MAX_TURN_SECONDS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_other_requests_are_answered_while_a_long_role_is_refused(server, path):
    with LongestTurn(server) as longest:
        server.post(path, {"messages": [{"role": "r" * 8_000_000, "content": "a"}]})
    assert longest.seconds < MAX_TURN_SECONDS

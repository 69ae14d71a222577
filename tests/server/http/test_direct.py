"""Deltas written to the connection where they arrive: the bytes are those of the response's own task, in order."""

from __future__ import annotations

import json
import re

import pytest

from server.http.direct import DirectBody
from tests.server.conftest import running, tiny_config
from tests.server.http.test_slow_readers import asked, engine_is_idle, whole

MESSAGES = [{"role": "user", "content": "the old king sleeps"}]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 24, "stream": True}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
BODIES = {
    "completions": ("/v1/completions", {"prompt": "red bird", **GREEDY}),
    "completions, usage in each chunk": ("/v1/completions", {"prompt": "red bird", **GREEDY, **USAGE}),
    "completions, token ids": ("/v1/completions", {"prompt": "red bird", **GREEDY, "return_token_ids": True}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, **GREEDY}),
    "chat, two choices": ("/v1/chat/completions", {"messages": MESSAGES, **GREEDY, "n": 2}),
    "chat, stop string": ("/v1/chat/completions", {"messages": MESSAGES, **GREEDY, "stop": ["zz"]}),
    "chat, tools": (
        "/v1/chat/completions",
        {"messages": MESSAGES, **GREEDY, "temperature": 1, "seed": 3, "tools": [TOOL]},
    ),
    "messages": ("/v1/messages", {"messages": MESSAGES, "model": "tiny", "max_tokens": 24, "stream": True}),
    "responses": ("/v1/responses", {"input": "the old king", "temperature": 0, "stream": True, "store": False}),
}
# Ids and times, and the boundaries of text deltas of Messages: tokens that arrive together are one.
NOT_REPEATED = re.compile(
    r'(_[0-9a-f]{48}|"(created|created_at|completed_at)":\d+|"output_tokens":\d+}}}|"}}\n\nevent: content_block_delta\n'
    r'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":")'
)


@pytest.fixture(scope="module")
def server(tiny_model):
    """A server that answers a repeated request with the same bytes, and parses tool calls."""
    with running(
        tiny_config(tiny_model, max_model_len=1024, enable_prefix_caching=False, tool_call_parser="hermes")
    ) as handle:
        yield handle


@pytest.fixture
def pieces(monkeypatch):
    """The pieces that are written directly."""
    found = []
    write = DirectBody.write
    monkeypatch.setattr(DirectBody, "write", lambda self, piece: (found.append(piece), write(self, piece)))
    return found


def stream(server, path, body):
    """Return a stream's text, without what differs between two requests."""
    response = server.post(path, body, headers={"X-Request-Id": "same"})
    assert response.status_code == 200, response.text
    return NOT_REPEATED.sub("", response.text)


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_has_the_same_bytes_as_without_direct_writes(server, pieces, monkeypatch, name):
    path, body = BODIES[name]
    if path == "/v1/messages":
        body = body | {"temperature": 0}
    if path == "/v1/responses":
        body = body | {"max_output_tokens": 24}
    found = stream(server, path, body)
    assert len(pieces) > 2, "nothing was written directly"
    count = len(pieces)
    monkeypatch.setattr(DirectBody, "is_ready", False)
    assert stream(server, path, body) == found and len(pieces) == count


def test_log_probabilities_are_not_written_directly(server, pieces):
    body = {"prompt": "red bird", **GREEDY, "logprobs": 1}
    assert stream(server, "/v1/completions", body).count('"top_logprobs"') >= 24 and not pieces


def test_prompts_of_one_request_keep_their_order(server, pieces):
    body = {"prompt": ["red bird", "old king"], **GREEDY}
    events = server.events("/v1/completions", body)
    answer = server.answer("/v1/completions", {**body, "stream": False})
    for choice in answer["choices"]:
        sent = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in sent) == choice["text"]
    assert not pieces  # their readers wait for each other's events


def test_a_client_that_pauses_gets_all_events_in_order(start_server, pieces):
    name = "m" * 6000  # in each event, so that the stream is larger than any socket buffer
    server = start_server(served_model_name=(name,), max_model_len=4096)
    body = {"prompt": "red bird", "temperature": 0, "ignore_eos": True, "max_tokens": 2000}
    expected = server.answer("/v1/completions", body)["choices"][0]["text"]
    with asked(server, "/v1/completions", body | {"stream": True}) as connection:
        server.wait(lambda: pieces and engine_is_idle(server), "the end of the generation")
        received = whole(connection).partition(b"\r\n\r\n")[2]
    chunks, rest = [], received
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    lines = b"".join(chunks).decode().split("\n\n")
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
    assert lines[-2:] == ["data: [DONE]", ""] and "".join(texts) == expected
    assert 0 < len(pieces) < 1999, "the client did not make the server wait"

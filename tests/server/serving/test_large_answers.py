"""Answers with many log-probabilities: they stall no other request, and their memory is bounded."""

from __future__ import annotations

import asyncio
import json
import socket
import threading

import httpx
import numpy as np
import pytest

from server.http.errors import WireError
from server.http.json_text import encoded
from server.serving.output_budget import OutputBudget, Share
from tests.server.conftest import running, tiny_config
from tests.server.http.test_bodies import error_of
from tests.server.http.test_request_sizes import MAX_TURN_SECONDS, LongestTurn
from tests.support.waiting import PATIENCE

PROMPT = "red fox " * 150
COMPLETION = {"prompt": [f"{number} {PROMPT}" for number in range(6)], "max_tokens": 1, "echo": True, "logprobs": 100,
              "temperature": 0}  # fmt: skip
GENERATE = {
    "text": COMPLETION["prompt"], "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 100,
    "return_text_in_logprobs": True, "sampling_params": {"max_new_tokens": 1},
}  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": PROMPT * 3}], "max_tokens": 1, "prompt_logprobs": 100}


@pytest.fixture(scope="module")
def server(tiny_model):
    with running(tiny_config(tiny_model, max_model_len=4096, in_process=False)) as handle:
        handle.answer("/v1/completions", COMPLETION | {"prompt": PROMPT})
        yield handle


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", COMPLETION), ("/v1/completions", COMPLETION | {"stream": True}), ("/generate", GENERATE),
     ("/generate", GENERATE | {"stream": True}), ("/v1/chat/completions", CHAT)],
    ids=["completions", "completions stream", "generate", "generate stream", "chat"],
)  # fmt: skip
def test_an_answer_of_megabytes_does_not_stall_others(server, path, body):
    with LongestTurn(server) as longest:
        answer = httpx.post(server.url + path, json=body, timeout=PATIENCE)
    assert answer.status_code == 200 and len(answer.content) > 1_000_000
    assert longest.seconds < MAX_TURN_SECONDS
    server.wait_idle()


def test_a_large_answer_is_what_its_parts_are(server):
    whole = server.answer("/v1/completions", COMPLETION)
    alone = [server.answer("/v1/completions", COMPLETION | {"prompt": prompt}) for prompt in COMPLETION["prompt"][:3]]
    for index, one in enumerate(alone):
        first, second = whole["choices"][index], one["choices"][0]
        assert first["text"] == second["text"] and first["index"] == index
        assert first["logprobs"]["tokens"] == second["logprobs"]["tokens"]
        assert len(first["logprobs"]["top_logprobs"]) == len(first["logprobs"]["tokens"])
        assert first["logprobs"]["text_offset"] == second["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    "value",
    [1, "é\u2028", None, [], {}, [1] * 1000, [[1, "a"]] * 200, {"a": [{"b": 1}] * 3, "c": {"d": {"e": [[[]]]}}},
     {str(number): {"x": [number, True]} for number in range(300)}, [[[[[[[[[1]]]]]]]], {}]],
)  # fmt: skip
def test_json_in_pieces_is_json(value):
    assert encoded(value).text == json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    assert encoded({"x": [encoded(value)] * 100}).text == encoded({"x": [value] * 100}).text


def test_the_request_with_most_logprobs_gives_way(start_server):
    """One request can't fail the others: it is aborted itself, and what it held is free again."""
    server = start_server(max_total_logprob_bytes=10_000_000, max_model_len=4096)
    small = {"prompt": "red", "max_tokens": 40, "logprobs": 5, "ignore_eos": True}
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(server.url + "/v1/completions", json=COMPLETION, timeout=PATIENCE))
    )
    thread.start()
    while thread.is_alive():
        assert server.answer("/v1/completions", small)
    thread.join()
    error = error_of(answers[0], 503)
    assert error["code"] == "too_many_logprobs" and "--max-total-logprob-bytes" in error["message"]
    server.wait_idle()
    assert server.answer("/v1/completions", COMPLETION | {"prompt": COMPLETION["prompt"][0]})
    with server.http.stream("POST", "/v1/completions", json=COMPLETION | {"stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert '"too_many_logprobs"' in lines[-2] and lines[-1] == "data: [DONE]"
    server.wait(lambda: server.service.admission.outputs.used == 0, "the release")


def test_an_answer_counts_until_it_is_read(server):
    """Else clients that read slowly would hold any number of answers."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(COMPLETION).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head = (head + f"Content-Length: {len(body)}\r\n\r\n").encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(head + body)
        assert client.recv(12) == b"HTTP/1.1 200"
        assert server.service.admission.outputs.used > 1_000_000 and server.service.admission.unanswered == 1
    server.wait(lambda: server.service.admission.outputs.used == 0, "the end of the answer")
    server.wait(lambda: server.service.admission.unanswered == 0, "the end of the request")


async def test_an_answer_that_is_being_sent_gives_no_way():
    aborted = []

    async def abort(name):
        aborted.append(name)

    budget, sent, running = OutputBudget(1000, abort), Share(), Share()
    sent.running.add("sent")
    running.running.add("running")
    budget.add_hidden_states(sent, [np.zeros((1, 20), np.float32)])
    sent.is_sent = True
    budget.add_hidden_states(running, [np.zeros((1, 10), np.float32)])
    await asyncio.sleep(0)
    assert aborted == ["running"] and sent.error is None and budget.used == sent.held > 0
    with pytest.raises(WireError, match="this request has most of them"):
        budget.add(running, [])

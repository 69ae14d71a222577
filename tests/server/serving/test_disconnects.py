"""Disconnecting clients, full queues, failed engines: every request ends and nothing leaks."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

LONG = {"max_new_tokens": 4000, "ignore_eos": True}
BODIES = {
    "/generate": {"text": "red", "sampling_params": LONG | {"n": 3}},
    "/v1/completions": {"prompt": ["red", "blue"], "max_tokens": 4000, "ignore_eos": True, "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "red"}], "ignore_eos": True},
}


@pytest.mark.parametrize("path", BODIES)
def test_disconnecting_from_a_stream_aborts_all_its_sequences(long_server, path):
    server = long_server
    aborted = server.metric("encore_request_success_total", finished_reason="abort")
    with httpx.Client(base_url=server.url) as http:
        with http.stream("POST", path, json=BODIES[path] | {"stream": True}) as response:
            lines = response.iter_lines()  # kept: httpx closes the connection with the iterator
            next(lines)
            assert server.service.admission.in_flight > 0
    server.wait_idle()
    server.wait(lambda: server.metric("encore_request_success_total", finished_reason="abort") > aborted, "the count")


@pytest.mark.parametrize("path", BODIES)
def test_disconnecting_before_the_response_aborts_the_request(long_server, path):
    server = long_server
    generated = server.metric("encore_generation_tokens_total")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + path, json=BODIES[path], timeout=0.05)
    server.wait_idle()
    assert server.metric("encore_generation_tokens_total") - generated < 4000


def test_a_full_queue_is_a_429_with_retry_after_and_the_next_one_is_served(start_server):
    server = start_server(max_num_seqs=1, max_waiting=1, max_model_len=4096)
    body = {"text": "red", "sampling_params": LONG}
    short = body | {"sampling_params": {"max_new_tokens": 2}}
    http = server.http
    with http.stream("POST", "/generate", json=body | {"stream": True}) as one:
        lines = one.iter_lines()  # kept: httpx closes the connection with the iterator
        next(lines)
        waiting = threading.Thread(target=server.post, args=("/generate", short))
        waiting.start()
        server.wait(lambda: server.service.admission.in_flight == 2, "the second request")
        for stream in (False, True):
            refused = httpx.post(server.url + "/generate", json=body | {"stream": stream})
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
        # Refused before tokenization: a prompt that would otherwise be a 400 is a 429.
        assert httpx.post(server.url + "/generate", json={"text": ""}).status_code == 429
    waiting.join()
    server.wait_idle()
    assert server.post("/generate", {"text": "red"}).status_code == 200


def test_a_429_counts_sequences_in_flight_and_those_of_the_request(start_server):
    server = start_server(max_num_seqs=1, max_waiting=3, max_model_len=4096)
    long = {"text": "red", "sampling_params": LONG, "stream": True}
    with server.http.stream("POST", "/generate", json=long) as one:
        lines = one.iter_lines()
        next(lines)
        for body in ({"prompt": "red", "n": 4}, {"prompt": ["red", "blue"], "n": 2}):
            refused = httpx.post(server.url + "/v1/completions", json=body)
            assert refused.status_code == 429
            assert refused.json()["error"]["message"] == (
                "the request asks for 4 sequences and 1 are in flight, but at most 4 can run and wait: retry later"
            )
        assert server.service.admission.in_flight == 1


def test_more_sequences_than_can_ever_wait_are_a_400(start_server):
    server = start_server(max_num_seqs=1, max_waiting=2)
    refused = server.post("/generate", {"text": "red", "sampling_params": {"n": 4}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"text": ["a"] * 4}, "text"),
        ("/generate", {"input_ids": [[5]] * 4}, "input_ids"),
        ("/v1/completions", {"prompt": ["a"] * 4}, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_more_prompts_than_can_ever_wait_are_a_400_that_names_their_field(start_server, path, body, param, stream):
    server = start_server(max_num_seqs=1, max_waiting=2)
    refused = server.post(path, body | {"stream": stream})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert refused.json()["error"]["message"] == (
        f"{param}: the request asks for 4 sequences, but at most 3 can run and wait"
    )


def test_a_million_prompts_with_parameters_each_are_refused_early(start_server):
    server = start_server(max_body_items=10**8)
    count = 1_100_000
    texts, params = ",".join(['""'] * count), ",".join(["{}"] * count)
    body = f'{{"text": [{texts}], "sampling_params": [{params}]}}'
    start = time.process_time()
    refused = server.http.post("/generate", content=body, headers={"Content-Type": "application/json"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "text"
    assert time.process_time() - start < 25  # it took 52 s, and 4 GB


def test_a_batch_that_exceeds_the_queue_is_a_429_before_its_parameters_are_read(start_server):
    server = start_server(max_num_seqs=1, max_waiting=1, max_model_len=4096)
    long = {"text": "red", "sampling_params": LONG, "stream": True}
    with server.http.stream("POST", "/generate", json=long) as one:
        lines = one.iter_lines()
        next(lines)
        wrong = {"text": ["red", "blue"], "sampling_params": [{"temperature": -1}] * 2}
        assert httpx.post(server.url + "/generate", json=wrong).status_code == 429
    server.wait_idle()
    assert server.post("/generate", wrong).status_code == 400


def test_a_model_that_cant_be_loaded_fails_readiness_with_the_reason(start_server, tmp_path):
    server = start_server(wait_ready=False, model=str(tmp_path / "missing"))
    server.wait(lambda: server.service.settled.is_set(), "the failure")
    ready = server.http.get("/ready")
    assert ready.status_code == 503 and "missing" in ready.json()["reasons"][0]
    assert server.http.get("/health").status_code == 503
    for path in BODIES:
        refused = server.post(path, BODIES[path])
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
    assert server.http.get("/metrics").status_code == 200


def test_a_request_that_the_kv_cache_can_never_hold_is_a_400(start_server):
    server = start_server(num_pages=6, page_size=16, max_num_seqs=2)
    for stream in (False, True):
        body = {"text": "red", "sampling_params": {"max_new_tokens": 200}, "stream": stream}
        refused = server.post("/generate", body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["code"] == "context_length_exceeded"

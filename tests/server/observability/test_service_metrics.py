"""The server's own metrics: readiness, limits, responses by route and status, and model info."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry

from server.observability.metrics import CountResponses, response_counts
from server.observability.shared_counters import SharedCounters
from server.version import version


def responses(server, **labels: str) -> float:
    try:
        return server.metric("encore_http_responses_total", **labels)
    except AssertionError:
        return 0.0


def test_responses_are_counted_by_route_and_status(server):
    completions = {"route": "/v1/completions"}
    before = [responses(server, **completions, status=status) for status in ("200", "400")]
    server.answer("/v1/completions", {"prompt": "red", "max_tokens": 1})
    list(server.events("/v1/completions", {"prompt": "red", "max_tokens": 2, "stream": True}))
    assert server.post("/v1/completions", {"prompt": "red", "max_tokens": -1}).status_code == 400
    after = [responses(server, **completions, status=status) for status in ("200", "400")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [2, 1]


def test_paths_without_a_route_share_one_series(server):
    before = responses(server, route="none", status="404")
    for path in ("/wp-admin", "/v1/nothing", "/%00"):
        assert server.http.get(path).status_code == 404
    assert responses(server, route="none", status="404") == before + 3
    assert "wp-admin" not in server.http.get("/metrics").text


def test_a_route_that_raises_counts_as_500_once():
    registry, app, counts = CollectorRegistry(), FastAPI(), response_counts(SharedCounters())
    registry.register(counts)
    app.add_middleware(CountResponses, counter=counts)

    @app.get("/broken/{name}")
    async def broken(name: str) -> None:
        raise RuntimeError(name)

    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.get("/broken/one").status_code == 500
    labels = {"route": "/broken/{name}", "status": "500"}
    assert registry.get_sample_value("encore_http_responses_total", labels) == 1


def test_limits_and_model_info_are_exported(server):
    assert server.metric("encore_ready") == 1
    assert server.metric("encore_queue_limit") == 64
    assert server.metric("encore_max_num_seqs") == 8
    server.wait(lambda: server.metric("encore_num_requests_in_flight") == 0, "the end of earlier requests")
    assert server.metric("encore_build_info", version=version()) == 1
    assert server.metric("encore_model_info", model="tiny", device="cpu", warmup="lazy") == 1


def test_a_server_without_a_model_is_not_ready_and_has_no_model_info(start_server, tmp_path):
    handle = start_server(wait_ready=False, model=str(tmp_path / "missing"))
    handle.wait(lambda: handle.service.settled.is_set(), "the start's end")
    assert handle.metric("encore_ready") == 0
    with pytest.raises(AssertionError, match="has no encore_model_info"):
        handle.metric("encore_model_info")


def test_steps_are_counted(server):
    before = server.metric("encore_engine_steps_total")
    server.answer("/v1/completions", {"prompt": "red", "max_tokens": 5, "ignore_eos": True})
    server.wait(lambda: server.metric("encore_engine_steps_total") == before + 5, "5 steps")
    assert server.metric("encore_cpu_threads") == 1  # num_threads of the fixture

"""Traces of requests arrive at a collector: one trace from the client's span to the engine's work."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from engine.errors import ConfigError
from server.config import ServerConfig
from server.observability.tracing import check_packages
from tests.server.conftest import running, tiny_config
from tests.support.collector import Collector, Span, collecting

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
BODY = {"prompt": "red", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def collector():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="traces need the extra otel")
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def server(collector: Collector, tiny_model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with running(tiny_config(tiny_model, otlp_traces_endpoint=collector.url)) as handle:
            yield handle


@pytest.fixture
def spans(collector: Collector):
    """The spans of the test, by name."""
    collector.spans.clear()

    def wait(count: int) -> dict[str, list[Span]]:
        found = collector.wait(lambda spans: len(spans) >= count)
        assert len(found) == count, [one.name for one in found]
        return {one.name: [other for other in found if other.name == one.name] for one in found}

    return wait


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_trace_from_its_client_to_its_last_token(server, spans, stream):
    before = time.time_ns()
    response = server.http.post("/v1/completions", json=BODY | {"stream": stream}, headers=HEADERS)
    assert response.status_code == 200, response.text
    after = time.time_ns()
    found = {name: one for name, (one,) in spans(5).items()}
    http, request = found["POST /v1/completions"], found["llm_request"]
    queue, prefill, decode = found["queue"], found["prefill"], found["decode"]
    assert {one.trace_id for one in found.values()} == {TRACE}
    assert http.parent_id == PARENT and request.parent_id == http.span_id
    assert {one.parent_id for one in (queue, prefill, decode)} == {request.span_id}
    assert http.scope == "encore.server" and request.scope == queue.scope == "encore.engine"
    assert {one.service for one in found.values()} == {"encore"}
    assert before <= http.start <= request.start == queue.start
    assert queue.start <= queue.end == prefill.start < prefill.end == decode.start < decode.end
    assert decode.end <= request.end <= after + 1e6  # clocks of two kinds
    assert http.attributes["http.response.status_code"] == 200
    assert http.attributes["http.route"] == "/v1/completions"
    assert http.attributes["encore.request_id"] == response.headers["x-request-id"]
    attributes = request.attributes
    assert attributes["gen_ai.usage.prompt_tokens"] == attributes["gen_ai.usage.input_tokens"] > 0
    assert attributes["gen_ai.usage.completion_tokens"] == attributes["gen_ai.usage.output_tokens"] == 6
    assert attributes["gen_ai.request.max_tokens"] == 6 and attributes["gen_ai.request.n"] == 1
    first = attributes["gen_ai.latency.time_to_first_token"]
    assert 0 <= attributes["gen_ai.latency.time_in_queue"] < first < attributes["gen_ai.latency.e2e"]
    assert abs(first * 1e9 - (prefill.end - request.start)) < 1e6


def test_each_sequence_and_prompt_has_its_spans(server, spans):
    server.answer("/v1/completions", BODY | {"prompt": ["red", "fox"], "n": 2, "temperature": 1.0})
    found = spans(1 + 2 * (1 + 2 * 3))
    assert len(found["llm_request"]) == 2 and len(found["decode"]) == 4
    for request in found["llm_request"]:
        mine = [one for one in found["queue"] if one.parent_id == request.span_id]
        assert sorted(one.attributes["encore.sequence"] for one in mine) == [0, 1]


def test_refusals_have_a_span_and_probes_have_none(server, spans):
    for path in ("/health", "/metrics", "/ready"):
        server.http.get(path)
    bad = {"traceparent": "00-zz-1-1", "tracestate": "," * 1000}
    assert server.http.post("/v1/completions", json=BODY | {"max_tokens": -1}, headers=bad).status_code == 400
    assert server.http.get("/v1/responses/resp_1").status_code == 404
    found = {name: one for name, (one,) in spans(2).items()}
    assert found["POST /v1/completions"].attributes["http.response.status_code"] == 400
    assert found["POST /v1/completions"].parent_id == "" and found["POST /v1/completions"].trace_id != TRACE
    assert found["GET /v1/responses/{response_id}"].attributes["http.response.status_code"] == 404


def test_a_client_that_does_not_sample_has_no_spans(server, spans, collector):
    server.http.post("/v1/completions", json=BODY, headers={"traceparent": HEADERS["traceparent"][:-1] + "0"})
    server.http.post("/v1/completions", json=BODY, headers=HEADERS)
    assert len({one.trace_id for one in sum(spans(5).values(), [])}) == 1


def test_a_collector_that_is_gone_fails_no_request(tiny_model, collector):
    with running(tiny_config(tiny_model, otlp_traces_endpoint="http://127.0.0.1:9")) as server:
        assert server.answer("/v1/completions", BODY)["usage"]["completion_tokens"] == 6


def test_without_the_setting_opentelemetry_is_not_imported():
    script = "import sys, server.app; sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize("endpoint", ["grpc://localhost:4317", "localhost:4317", "", 5, "http://"])
def test_other_addresses_are_refused_by_name(endpoint):
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint=.*http or https address of a collector"):
        ServerConfig.from_dict({"model": "x", "otlp_traces_endpoint": endpoint})


def test_what_is_missing_or_of_another_protocol_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint='http://c'.*pip install 'encore-serve\[otel\]'"):
        check_packages("http://c")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=grpc is not supported"):
        check_packages("http://c")

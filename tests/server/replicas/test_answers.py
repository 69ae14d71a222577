"""One answer from the answers of several replicas."""

from __future__ import annotations

import json

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from server.http.errors import WireError
from server.replicas.answers import Answer, broken_stream, merged, merged_metrics

TEXT = """\
# HELP encore_steps_total Steps.
# TYPE encore_steps_total counter
encore_steps_total{phase="decode",note="a } b \\" # 1"} %d.0
encore_steps_total{phase="prefill",note=""} 1.0
# HELP encore_up Whether it runs.
# TYPE encore_up gauge
encore_up 1.0
"""
LOST = WireError(503, "the replica has ended", type="service_unavailable_error", code="replica_lost")


def answer(body: object, status: int = 200) -> Answer:
    return Answer(status, [], json.dumps(body).encode())


def samples(text: str, parser=parse) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, sample.labels["replica"], sample.labels.get("phase", "")): sample.value
        for family in parser(text)
        for sample in family.samples
    }


def test_metrics_carry_the_replica_and_families_stay_together():
    text = merged_metrics({"a": TEXT % 5, "b": TEXT % 7})
    found = samples(text)
    assert found["encore_steps_total", "a", "decode"] == 5
    assert found["encore_steps_total", "b", "decode"] == 7
    assert found["encore_up", "a", ""] == found["encore_up", "b", ""] == 1
    assert len(found) == 6
    assert text.count("# TYPE") == 2
    lines = [line.split("{")[0] for line in text.splitlines() if not line.startswith("#")]
    assert lines == ["encore_steps_total"] * 4 + ["encore_up"] * 2


def test_openmetrics_keep_exemplars_and_their_end():
    text = (
        "# TYPE encore_seconds histogram\n"
        'encore_seconds_bucket{le="0.5"} 1.0 # {trace_id="x"} 0.3 1.0\nencore_seconds_bucket{le="+Inf"} 1.0\n'
        "encore_seconds_count 1.0\nencore_seconds_sum 0.3\n# EOF\n"
    )
    merged_text = merged_metrics({"a": text, "b": text})
    assert merged_text.count("# EOF") == 1
    assert len(samples(merged_text, parse_openmetrics)) >= 6


def test_equal_answers_are_one_and_counts_are_summed():
    assert merged({"a": answer({"is_paused": True}), "b": answer({"is_paused": True})}) == (200, {"is_paused": True})
    status = {"status": "aborted", "aborted": 2}
    assert merged({"a": answer(status), "b": answer(status)}) == (200, {"status": "aborted", "aborted": 4})


def test_different_answers_say_which_replica_gave_which():
    first, second = {"weight_version": "1", "pending": 3}, {"weight_version": "2", "pending": 4}
    status, found = merged({"a": answer(first), "b": answer(second)})
    assert status == 200
    assert found == {"weight_version": "1", "pending": 7, "replicas": {"a": first, "b": second}}


def test_a_failed_command_names_the_replicas_that_failed_and_that_did_it():
    error = {"error": {"message": "no such file", "type": "invalid_request_error", "param": None, "code": "x"}}
    status, found = merged({"a": answer({"updated": 3}), "b": answer(error, 400)})
    assert status == 400
    assert found["error"]["message"] == "no such file (replicas b failed; a succeeded)"
    assert (found["error"]["failed"], found["error"]["succeeded"]) == (["b"], ["a"])
    assert merged({"a": answer(error, 400), "b": answer(error, 400)})[1]["error"]["message"] == "no such file"


@pytest.mark.parametrize(
    ("path", "kind", "wanted"),
    [
        ("/v1/completions", "text/event-stream; charset=utf-8", b'data: {"error":{"message":"the replica has ended"'),
        ("/v1/messages", "text/event-stream", b"event: error\ndata: "),
        ("/v1/responses", "text/event-stream", b'event: error\ndata: {"type":"error","sequence_number":4'),
        ("/api/chat", "application/x-ndjson", b'{"error": "the replica has ended"}\n'),
    ],
)
def test_a_broken_stream_ends_with_an_error_in_its_format(path, kind, wanted):
    found = broken_stream({"path": path, "state": {}}, kind, 4, LOST)
    assert found is not None
    assert found.startswith(wanted)


def test_a_broken_json_body_has_no_place_for_an_error():
    assert broken_stream({"path": "/v1/completions", "state": {}}, "application/json", 0, LOST) is None

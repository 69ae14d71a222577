"""Logs: one record per request with tokens and latencies, as text or JSON, and never the users' input."""

from __future__ import annotations

import asyncio
import io
import json
import logging

import pytest

from server.observability.logs import FIELDS, JsonFormatter, TextFormatter, log_settings
from tests.support.waiting import PATIENCE

BODY = {"prompt": ["a secret prompt", "red"], "max_tokens": 6, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def records(server, caplog):
    """The access log records of the test's requests."""
    # The last record of the test before is written after its response: let the server's loop do what is ready.
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), server.service.startup.get_loop()).result(PATIENCE)
    caplog.clear()
    caplog.set_level(logging.INFO, logger="encore.access")
    return lambda: [getattr(record, FIELDS) for record in caplog.records if record.name == "encore.access"]


def formatted(formatter, message, *args, exc_info=None, **fields):
    record = logging.LogRecord("encore.access", logging.INFO, "x.py", 1, message, args, exc_info)
    if fields:
        setattr(record, FIELDS, fields)
    return formatter.format(record)


def test_a_request_is_one_record_with_tokens_times_and_buckets(server, records):
    server.answer("/v1/completions", BODY)  # captures the graphs
    answer = server.post("/v1/completions?key=hidden", BODY, headers={"X-Request-Id": "mine"}).json()
    server.wait(lambda: len(records()) == 2, "the records")  # written after the response is sent
    [_, record] = records()
    assert record["request_id"] == "mine" and record["method"] == "POST" and record["path"] == "/v1/completions"
    assert record["status"] == 200 and record["client"] == "127.0.0.1"
    assert record["prompt_tokens"] == answer["usage"]["prompt_tokens"] and record["completion_tokens"] == 12
    assert record["finish_reasons"] == {"length": 2}
    assert 0 < record["queue_seconds"] <= record["first_token_seconds"] <= record["seconds"]
    # Each sequence's first token comes from its prefill, which runs eager.
    assert record["graph_buckets"]["eager"] == 2 and sum(record["graph_buckets"].values()) == 12
    assert set(record["graph_buckets"]) <= {"eager", "1", "2"}
    assert "secret" not in str(records()) and "hidden" not in str(records())


def test_streams_refusals_and_unknown_routes_are_logged_with_their_outcome(server, records):
    def recorded(count):  # a record is written after its response, and possibly after the next request's record
        server.wait(lambda: len(records()) == count, "the records")

    server.events("/v1/completions", BODY | {"stream": True})
    recorded(1)
    server.post("/v1/completions", BODY | {"n": 0})
    recorded(2)
    server.http.get("/nothing%0Aforged")
    recorded(3)
    stream, refused, unknown = records()
    assert stream["completion_tokens"] == 12 and stream["status"] == 200
    assert refused["status"] == 400 and "completion_tokens" not in refused
    assert unknown["status"] == 404 and unknown["path"] == "/nothing%0Aforged"


def test_probes_are_not_logged_while_all_is_well(server, records):
    for path in ("/health", "/ready", "/metrics", "/graphs", "/"):
        assert server.http.get(path).status_code == 200
    assert server.http.post("/health").status_code == 405
    server.wait(lambda: records(), "the record")
    assert [(record["path"], record["status"]) for record in records()] == [("/health", 405)]


def test_json_lines_are_valid_for_any_value():
    line = json.loads(formatted(JsonFormatter(), "took %s\n", "café", tokens=3, what={1: object()}))
    assert line["message"] == "took café\n" and line["tokens"] == 3 and line["level"] == "info"
    assert line["time"].endswith("Z") and line["logger"] == "encore.access"
    try:
        raise ValueError("why")
    except ValueError as exc:
        failed = formatted(JsonFormatter(), "failed", exc_info=(type(exc), exc, exc.__traceback__))
    assert "\n" not in failed and "ValueError: why" in json.loads(failed)["exception"]


def test_text_lines_name_their_fields_and_leave_out_empty_ones():
    line = formatted(TextFormatter(), "request", status=200, seconds=0.25, queue_seconds=None, graph_buckets={"8": 2})
    assert line.endswith("INFO encore.access: request status=200 seconds=0.25 graph_buckets=8:2")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_settings_configure_the_logging_module(log_format, monkeypatch):
    settings = log_settings("warning", log_format)
    formatter = settings["formatters"]["line"]["()"]()
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(formatter)
    handler.handle(logging.LogRecord("encore", logging.WARNING, "x", 1, "hello", (), None))
    shown = handler.stream.getvalue()
    assert (json.loads(shown)["message"] == "hello") if log_format == "json" else shown.endswith("encore: hello\n")
    assert settings["loggers"]["encore"]["level"] == "WARNING"

"""The status page: its values, that it is self-contained, and that values are rendered as text."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import httpx
import pytest

from engine.protocol.messages import EngineStats
from engine.utils.processes.child import running_children
from server.observability.shared_counters import SharedCounters, SharedHistogram
from server.pages.status import DOCUMENT
from server.serving import status_board
from server.serving.status_board import HISTORY_STEPS, SERIES, History, graph_summary, quantile
from tests.support.waiting import PATIENCE

AS_JSON = {"Accept": "application/json"}
HOSTILE = '<img src=x onerror="alert(1)"></script>'


def shown(server) -> dict:
    response = server.http.get("/", headers=AS_JSON)
    assert response.status_code == 200 and response.headers["content-type"] == "application/json"
    return response.json()


def buckets(found: dict) -> list[dict]:
    return found["graphs"]["buckets"]


def test_the_page_is_self_contained_and_renders_values_as_text():
    assert not re.findall(r'(?:src|href)="(?:https?:)?//', DOCUMENT)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", DOCUMENT)
    assert not re.findall(r'\son\w+="|\sstyle="', DOCUMENT), "the policy would refuse inline handlers and styles"
    assert len(DOCUMENT) < 40_000


def test_elements_that_the_script_reads_are_in_the_page():
    ids = set(re.findall(r'\sid="([\w-]+)"', DOCUMENT))
    assert set(re.findall(r'\$\("([\w-]+)"\)', DOCUMENT)) <= ids


def test_the_page_shows_the_servers_values_after_traffic(start_server, monkeypatch):
    monkeypatch.setattr(status_board, "TABLE_TIMEOUT_SECONDS", PATIENCE)  # else a busy engine shows an earlier table
    server = start_server(served_model_name=(HOSTILE,), graph_buckets=(1, 4, 8), warmup="full", max_model_len=256)
    prompts = [[5, 6, 7], [8, 9], [10]]
    server.answer("/v1/completions", {"prompt": prompts, "max_tokens": 12, "ignore_eos": True, "temperature": 0})
    server.wait_idle()
    server.wait(lambda: shown(server)["history"]["output"], "a second of history")
    server.answer("/v1/completions", {"prompt": prompts, "max_tokens": 12, "ignore_eos": True, "temperature": 0})
    found = {}

    def is_complete() -> bool:
        found.update(shown(server))
        tokens, hits = found["engine"]["output_tokens"], sum(one["hits"] for one in buckets(found))
        return found["history"]["first_p50"][-1] is not None and tokens == 72 and hits >= 22

    server.wait(is_complete, "latencies in the history, and the table of graphs")
    assert found["state"] == "ready" and found["reasons"] == []
    assert found["model"]["name"] == HOSTILE and HOSTILE not in DOCUMENT
    assert found["queue"] == {"in_flight": 0, "limit": 64, "running": 0, "waiting": 0, "seats": 8}
    assert found["engine"]["output_tokens"] == 72 and found["engine"]["prompt_tokens"] == 12
    assert found["engine"]["ended"] == {"stop": 0, "length": 6, "abort": 0, "error": 0}
    graphs = found["graphs"]
    assert [one["bucket"] for one in graphs["buckets"]] == [1, 4, 8]
    assert sum(one["steps"] for one in graphs["buckets"]) == sum(one["hits"] for one in graphs["buckets"]) >= 22
    assert graphs["hit_rate"] == 1.0 and 0 < graphs["padding"] < 1 and graphs["pool_bytes"] > 0
    assert all(one["captured"] == one["wanted"] for one in graphs["buckets"])
    assert set(found["history"]) == {"step", *SERIES} and max(found["history"]["output"]) > 0
    json.dumps(found, allow_nan=False)


def test_a_failed_load_is_shown(start_server, tmp_path):
    server = start_server(wait_ready=False, model=str(tmp_path / "missing"))
    server.wait(lambda: server.service.settled.is_set(), "the failure")
    found = shown(server)
    assert found["state"] == "dead" and "missing" in found["reasons"][0] and found["model"] is None


def test_a_long_engine_step_does_not_block_the_page(start_server):
    others = running_children()  # of the servers that other tests share
    server = start_server(in_process=False)
    server.wait(lambda: buckets(shown(server)), "the table")
    [engine] = [child for child in running_children() if child not in others]
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        time.sleep(1.1)  # the cached table is outdated
        assert shown(server)["graphs"]["buckets"] and shown(server)["engine"]["silent"] > 0.5
    finally:
        os.kill(engine.pid, signal.SIGCONT)


def test_the_page_needs_no_key(server):
    assert httpx.get(server.url + "/").status_code == 200


# ---- history and summary --------------------------------------------------------------------------------------------


def test_history_turns_counts_into_rates_and_forgets_the_oldest():
    history, counters = History(), SharedCounters()
    first = SharedHistogram(counters, "first", "", (0.1, 0.2, 0.4))
    following = SharedHistogram(counters, "following", "", (0.01, 0.02))
    for second in range(HISTORY_STEPS + 10):
        if second > HISTORY_STEPS:
            first.observe(0.15)
        stats = EngineStats(generation_tokens=50 * second, prompt_tokens=10 * second, num_waiting=2)
        history.record(float(second), stats, first, following)
    columns = history.columns()
    assert {len(series) for series in columns.values()} == {HISTORY_STEPS}
    assert set(columns["output"]) == {50.0} and set(columns["prompt"]) == {10.0} and set(columns["waiting"]) == {2}
    assert columns["next_p50"][-1] is None and columns["first_p50"][0] is None
    assert 0.1 < columns["first_p50"][-1] < columns["first_p95"][-1] <= 0.2


@pytest.mark.parametrize(
    ("counts", "wanted", "expected"),
    [
        ([0, 0, 0], 0.5, None), ([4, 0, 0], 0.5, 0.5), ([4, 0, 0], 1.0, 1.0), ([2, 2, 0], 0.5, 1.0),
        ([2, 2, 0], 0.75, 1.5), ([0, 4, 0], 0.25, 1.25), ([0, 0, 3], 0.5, 2.0), ([1, 0, 1], 0.95, 2.0),
    ],
)  # fmt: skip
def test_quantiles_are_interpolated_within_their_bucket(counts, wanted, expected):
    assert quantile([1.0, 2.0, float("inf")], counts, wanted) == expected


def test_steps_fall_into_the_bucket_that_holds_them_and_layers_count_once():
    graphs = {
        "batch_rows": [(("decode", "decode", 3), 10), (("decode", "decode", 4), 2), (("decode", "decode", 1), 5),
                       (("decode", "decode", 9), 3), (("prefill", "prefill", 4), 100)],
        "replays": [(("decode", "layer", "decode", 4), 36)],
        "real_tokens": [(("prefill",), 400), (("decode",), 60)], "padded_tokens": [(("decode",), 20)],
        "fallbacks": [(("decode", "decode", "not_captured"), 8), (("prefill", "prefill", "phase_not_captured"), 1)],
        "pool_bytes": 7,
    }  # fmt: skip
    row = {"failure": None, "state": "captured", "bytes": 5, "graphs": 4, "phase": "decode"}
    failed = row | {"bucket": 1, "state": "failed", "failure": "no"}
    prefill = row | {"bucket": 4, "bytes": 99, "phase": "prefill", "state": "failed", "failure": "not a decode"}
    rows = [row | {"bucket": 4}, row | {"bucket": 4, "bytes": 6}, failed, prefill]
    found = graph_summary(graphs, (1, 4), rows)
    one, four = found["buckets"]
    assert (four["steps"], four["hits"], four["captured"], four["bytes"]) == (12, 9, 2, 6)
    assert four["padding"] == pytest.approx(10 / 48) and four["failed"] is None
    assert (one["steps"], one["hits"], one["padding"], one["failed"]) == (5, 0, None, "no")
    assert found["hit_rate"] == pytest.approx(9 / 20), "steps beyond the largest bucket count too"
    assert found["padding"] == pytest.approx(20 / 80) and found["eager"] == {"not_captured": 8}


def test_a_summary_without_steps_is_empty():
    assert graph_summary({}, (1, 2), [])["hit_rate"] is None
    assert graph_summary({}, (), [])["buckets"] == []

"""Health, readiness, version, metrics and the graph table."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import version

from tests.engine.lively import SAMPLING_VARIANTS
from tests.server.conftest import running, tiny_config

NAMES = """
num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total
num_preemptions_total prompt_tokens_total generation_tokens_total request_success_total
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket request_time_per_output_token_seconds_bucket
e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket graph_replays_total graph_captures_total
graph_capture_seconds_bucket graph_real_tokens_total graph_padded_tokens_total graph_cache_entries graph_pool_bytes
graph_warm_ratio graph_batch_rows_total
""".split()
BODY = {"prompt": "red bird", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


def test_health_and_version(server):
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/version").json() == {"version": version("encore-serve")}


def test_probes_may_ask_for_the_headers_only(server):
    for path in ("/health", "/ready", "/metrics"):
        response = server.http.head(path)
        assert response.status_code == 200 and response.content == b"", path
    assert server.http.head("/v1/completions").status_code == 405


def test_ready_reports_warm_up_progress(server):
    body = server.http.get("/ready").json()
    assert body["ready"] is True and body["reasons"] == []
    assert {"mode", "captured", "pending", "ratio"} <= set(body["warm"])


def test_the_first_ready_answer_reports_the_warm_up(start_server):
    server = start_server(wait_ready=False, warmup="lazy")
    while (ready := server.http.get("/ready")).status_code == 503:
        pass
    assert ready.json()["warm"]["mode"] == "lazy"


def test_a_full_warm_up_shows_its_progress_before_it_is_ready(start_server):
    server = start_server(wait_ready=False, warmup="full", max_num_seqs=32, graph_buckets=tuple(range(1, 33)))
    seen, told = [], {}
    wanted = 32 + 6 * SAMPLING_VARIANTS  # sampling has graphs at the powers of two only
    while (ready := server.http.get("/ready")).status_code == 503:
        [reason], warm = ready.json()["reasons"], ready.json()["warm"]
        seen += [warm["captured"]] if warm else []
        if not warm:
            assert reason == "the model is being loaded"
        elif warm["pending"]:
            assert reason == f"graphs are being captured: {warm['captured']} of {wanted} so far"
            told = told or server.post("/generate", {"text": "red"}).json()["error"]
    assert told["code"] == "loading" and f"of {wanted} so far; try again soon" in told["message"]
    assert seen == sorted(seen) and len(set(seen)) > 2
    assert ready.json()["warm"]["captured"] == wanted > seen[0]


def test_metrics_have_every_name_after_some_requests(server):
    server.answer("/v1/completions", BODY)
    server.answer("/v1/completions", BODY)
    server.wait_idle()
    text = server.http.get("/metrics").text
    missing = [name for name in NAMES if f"\nencore_{name}" not in text]
    assert not missing


def test_replays_and_tokens_are_counted(server):
    def counts():
        names = ("graph_replays_total", "generation_tokens_total", "prompt_tokens_total", "graph_real_tokens_total")
        return [server.metric(f"encore_{name}") for name in names]

    server.answer("/v1/completions", BODY)  # captures the graph if needed
    server.wait_idle()
    before = counts()
    requests = server.metric("encore_e2e_request_latency_seconds_count")
    answer = server.answer("/v1/completions", BODY)
    server.wait(lambda: counts()[1] - before[1] == 20, "20 tokens")
    server.wait_idle()
    replays, _, prompts, rows = (now - then for now, then in zip(counts(), before, strict=True))
    assert replays == 19  # the first token comes from the prefill
    assert prompts == answer["usage"]["prompt_tokens"] and rows >= 19
    assert server.metric("encore_e2e_request_latency_seconds_count") == requests + 1
    assert server.metric("encore_time_to_first_token_seconds_count") >= 1


def test_gaps_between_tokens_are_measured(server):
    def has_gaps():  # a loaded server may receive many tokens at once, and measures no gaps between them
        server.answer("/v1/completions", BODY)
        return server.metric("encore_inter_token_latency_seconds_count") > 0

    server.wait(has_gaps, "a gap between two tokens")


def test_the_graph_table_shows_the_bucket_that_replayed(server):
    server.answer("/v1/completions", BODY)
    server.wait_idle()
    body = server.http.get("/graphs").json()
    assert body["model"] == "tiny" and "warm" in body
    [row] = [row for row in body["graphs"] if row["bucket"] == 1 and row["phase"] == "decode"]
    assert row["state"] == "captured" and row["replays"] >= 19 and row["bytes"] > 0 and row["capture_seconds"] > 0
    assert {"site", "scope", "padded_rows"} <= set(row)


def test_a_browser_gets_the_graph_table_as_a_page(server):
    response = server.http.get("/graphs", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert response.headers["content-type"].startswith("text/html") and response.headers["vary"] == "Accept"
    assert "<table>" in response.text and "tiny" in response.text and "decode" in response.text


def test_openapi_describes_the_routes(server):
    paths = server.http.get("/openapi.json").json()["paths"]
    assert {"/generate", "/v1/completions", "/v1/chat/completions", "/v1/models", "/graphs"} <= set(paths)
    assert server.http.get("/redoc").status_code == 404


def test_a_folder_is_served_under_its_name_and_its_tokenizer_warns_once(tiny_model, tmp_path, caplog, monkeypatch):
    folder = tmp_path / "folder"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_prefix_space": True}))
    monkeypatch.chdir(tmp_path)
    with running(tiny_config("./folder", served_model_name=())) as server:  # engine and server load the tokenizer
        assert [one["id"] for one in server.http.get("/v1/models").json()["data"]] == ["folder", "./folder"]
    warnings = [record.getMessage() for record in caplog.records if "tokenizer.json decides" in record.getMessage()]
    assert len(warnings) == 1 and "add_prefix_space=True" in warnings[0]

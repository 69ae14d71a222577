"""An engine that is killed under a running server: clients, probes and metrics until it serves again."""

from __future__ import annotations

import threading

import httpx

from engine.utils.processes.child import running_children
from tests.server.conftest import RunningServer

LONG = {"max_new_tokens": 4000, "ignore_eos": True}
SHORT = {"text": "red", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True, "temperature": 0}}


def kill_engine() -> None:
    [engine] = [child for child in running_children() if child.name == "the engine process"]
    engine.kill()


def test_a_server_survives_its_engine(start_server):
    server: RunningServer = start_server(wait_ready=False, in_process=False, max_model_len=4096)
    for early in (server.post("/generate", SHORT), server.http.get("/ready")):
        assert early.status_code == 503 and "retry-after" in early.headers
    assert server.http.get("/health").status_code == 200
    server.wait(lambda: server.http.get("/ready").status_code == 200, "readiness")
    assert server.metric("encore_engine_up") == 1 and server.metric("encore_engine_restarts_total") == 0

    expected = server.answer("/generate", SHORT)["output_ids"]
    body = {"text": "red", "sampling_params": LONG | {"n": 2}}
    other: list[httpx.Response] = []
    with httpx.Client(base_url=server.url) as http:
        with http.stream("POST", "/generate", json=body | {"stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            thread = threading.Thread(target=lambda: other.append(server.post("/generate", body)))
            thread.start()
            server.wait(lambda: server.service.client.stats().num_running == 4, "the second request")
            server.wait(lambda: server.metric("encore_generation_tokens_total") > 100, "tokens")
            counted = {
                name: server.metric(name)
                for name in (
                    "encore_generation_tokens_total",
                    "encore_prompt_tokens_total",
                    "encore_graph_replays_total",
                )
            }
            kill_engine()
            server.wait(lambda: server.http.get("/ready").status_code == 503, "readiness to fail")
            rest = [line for line in lines if line]
    assert '"engine_dead"' in rest[-2] and rest[-1] == "data: [DONE]"
    thread.join()
    assert other[0].status_code == 503 and other[0].json()["error"]["code"] == "engine_dead"

    # Between the two processes: alive, not ready, and every error carries Retry-After.
    assert server.http.get("/health").status_code == 200
    assert "being restarted" in server.http.get("/ready").json()["reasons"][0]
    for refused in (server.post("/generate", SHORT), server.http.get("/graphs")):
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
        assert int(refused.headers["retry-after"]) >= 1
    assert server.service.admission.in_flight == 0
    assert server.metric("encore_engine_up") == 0 and server.metric("encore_engine_restarts_total") == 1
    assert server.metric("encore_num_requests_running") == 0 and server.metric("encore_kv_cache_usage_perc") == 0

    server.wait(lambda: server.http.get("/ready").status_code == 200, "the restart")
    assert server.answer("/generate", SHORT)["output_ids"] == expected
    assert server.metric("encore_engine_up") == 1
    server.wait(lambda: server.metric("encore_engine_heartbeat_age_seconds") < 1, "a heartbeat")
    for name, count in counted.items():
        assert server.metric(name) >= count, f"{name} went backwards"
    server.wait(lambda: server.metric("encore_request_success_total", finished_reason="error") == 4, "the counts")
    server.wait_idle()


def test_an_engine_thread_is_not_restarted(start_server, monkeypatch):
    """An engine in the server's own process is not restarted: liveness fails, so that the server gets restarted."""
    from engine.worker.model_runner import ModelRunner

    def broken(self, batch):
        raise RuntimeError("the device is gone")

    server: RunningServer = start_server(in_process=True)
    monkeypatch.setattr(ModelRunner, "execute", broken)

    def fail_a_step() -> bool:  # several that fail in a row end the loop
        server.post("/generate", SHORT)
        return server.http.get("/ready").status_code == 503

    server.wait(fail_a_step, "readiness to fail")
    assert server.http.get("/health").status_code == 503
    refused = server.post("/generate", SHORT)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
    assert server.metric("encore_engine_up") == 0

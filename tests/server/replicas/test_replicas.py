"""`encore serve --replicas 2` on a real Ray: routing, commands to all, metrics, and a replica that is killed."""

from __future__ import annotations

import importlib
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig
from tests.soak.serving import Serving, command_of, serving
from tests.support.collector import Collector, collecting
from tests.support.waiting import PATIENCE, descendants, wait, wait_for_end

pytest.importorskip("ray", reason="replicas run on Ray")
ADMIN = {"Authorization": "Bearer admin-key"}
FLAGS = ("--dtype", "float32", "--num-threads", "1", "--warmup", "lazy", "--max-num-seqs", "8", "--in-process")
REPLICA = "x-encore-replica"


@pytest.fixture(scope="module")
def admin_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "admin"
    path.write_text("admin-key\n")
    return path


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector | None]:
    """A collector of traces, if their packages are installed."""
    try:
        importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ModuleNotFoundError:
        yield None
        return
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, admin_keys: Path, collector: Collector | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """Two replicas, shared by the tests of this file. Every test leaves two running, with the same weights."""
    folder = tmp_path_factory.mktemp("replicas")
    flags = (*FLAGS, "--replicas", "2", "--max-model-len", "2048", "--admin-key-file", str(admin_keys))
    if collector is not None:
        flags = (*flags, "--otlp-traces-endpoint", collector.url)
    with serving(tiny_model, folder / "server.log", *flags) as handle:
        wait(lambda: len(replicas(handle)) == 2, "two replicas")
        yield handle


def replicas(server: Serving) -> set[str]:
    """The names of the replicas that are ready."""
    found = httpx.get(server.url + "/ready").json()["replicas"]
    return {name for name, one in found.items() if one.get("ready")}


def replica_pids(server: Serving) -> list[int]:
    """The processes of the replicas. Other tests of the machine may have some too."""
    pids = descendants(server.process.pid)
    return [pid for pid in pids if command_of(pid).startswith("ray::ServeReplica:encore:Replica")]


def complete(server: Serving, prompt: str, **fields: object) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields
    return httpx.post(server.url + "/v1/completions", json=body)


def test_replicas_answer_as_one_engine_does(server, tiny_model):
    prompts = [f"red fox {number}" for number in range(12)]
    with Engine(EngineConfig(model=str(tiny_model), dtype="float32", warmup="lazy", graph_manifest="none")) as engine:
        params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
        wanted = [output.text for output in engine.generate(prompts, params, use_tqdm=False)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: complete(server, prompt), prompts))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == wanted
    assert {answer.headers[REPLICA] for answer in answers} == replicas(server)
    assert all(len(answer.headers.get_list("x-request-id")) == 1 for answer in answers)
    again = [complete(server, prompt).headers[REPLICA] for prompt in prompts]
    assert again == [complete(server, prompt).headers[REPLICA] for prompt in prompts]


def test_all_replicas_take_new_admin_keys(server, admin_keys):
    def statuses(key: str) -> set[int]:
        headers = {"Authorization": f"Bearer {key}"}
        return {httpx.get(server.url + "/is_paused", headers=headers).status_code for _ in range(8)}

    assert statuses("admin-key") == {200} and statuses("new-key") == {401}
    admin_keys.write_text("admin-key\nnew-key\n")
    wait(lambda: statuses("new-key") == {200}, "the new key")
    assert statuses("admin-key") == {200}
    admin_keys.write_text("admin-key\n")
    wait(lambda: statuses("new-key") == {401}, "its end")


def test_a_stream_has_the_same_text_and_errors_keep_their_status(server):
    whole = complete(server, "lazy dog").json()["choices"][0]["text"]
    body = {"prompt": "lazy dog", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == whole
    for path, sent, status in (
        ("/v1/completions", {"prompt": "red", "max_tokens": -1}, 400),
        ("/v1/completions", {"prompt": "red", "model": "other"}, 404),
        ("/nowhere", {}, 404),
    ):
        answer = httpx.post(server.url + path, json=sent)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]
    answer = httpx.post(server.url + "/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400


def test_a_client_that_leaves_ends_its_request_in_the_engine(server):
    before = sum(gauge(server, "encore_generation_tokens_total").values())
    body = {"prompt": "red", "max_tokens": 1900, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait(lambda: sum(gauge(server, "encore_num_requests_running").values()) == 0, "the end of the request")
    assert sum(gauge(server, "encore_generation_tokens_total").values()) - before < 1900


def gauge(server: Serving, name: str) -> dict[str, float]:
    """The values of a metric by replica."""
    families = text_string_to_metric_families(server.get("/metrics"))
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {sample.labels["replica"]: sample.value for sample in samples}


def test_metrics_and_status_have_every_replica(server):
    assert set(gauge(server, "encore_num_requests_running")) == replicas(server)
    status = httpx.get(server.url + "/", headers={"accept": "application/json"}).json()
    assert set(status["replicas"]) == replicas(server)
    assert "<html" in httpx.get(server.url + "/", headers={"accept": "text/html"}).text
    for name in replicas(server):
        assert httpx.get(server.url + "/health", headers={REPLICA: name}).headers[REPLICA] == name
    lost = httpx.get(server.url + "/v1/models", headers={REPLICA: "nobody"})
    assert lost.status_code == 503
    assert "nobody" in lost.json()["error"]["message"]


def test_a_trace_has_the_gateway_the_replica_and_the_engine(server, collector):
    if collector is None:
        pytest.skip("traces need the extra otel")
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {"prompt": "red fox", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    headers = {"traceparent": f"00-{trace}-{parent}-01"}
    answer = httpx.post(server.url + "/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text

    def mine(spans):
        return [one for one in spans if one.trace_id == trace]

    spans = mine(collector.wait(lambda spans: len(mine(spans)) >= 6))
    by_scope = {(one.scope, one.name): one for one in spans}
    assert len(by_scope) == len(spans) == 6
    gateway = by_scope["encore.gateway", "POST"]
    replica = by_scope["encore.server", "POST /v1/completions"]
    request = by_scope["encore.engine", "llm_request"]
    assert (gateway.parent_id, replica.parent_id, request.parent_id) == (parent, gateway.span_id, replica.span_id)
    for name in ("queue", "prefill", "decode"):
        assert by_scope["encore.engine", name].parent_id == request.span_id
    assert gateway.attributes["encore.request_id"] == replica.attributes["encore.request_id"]
    assert gateway.start <= replica.start <= replica.end <= gateway.end


def test_every_replica_reads_stored_responses(server):
    first = httpx.post(server.url + "/v1/responses", json={"input": "red", "max_output_tokens": 4}).json()
    for name in replicas(server):
        url, headers = f"{server.url}/v1/responses", {REPLICA: name}
        assert httpx.get(f"{url}/{first['id']}", headers=headers).json()["id"] == first["id"]
        body = {"input": "fox", "max_output_tokens": 4, "previous_response_id": first["id"]}
        assert httpx.post(url, json=body, headers=headers).status_code == 200


def test_commands_reach_all_replicas_and_need_a_key(server):
    assert httpx.post(server.url + "/pause").status_code == 401
    answer = httpx.post(server.url + "/pause?mode=abort", headers=ADMIN)
    assert answer.status_code == 200, answer.text
    assert set(answer.headers["x-encore-replicas"].split(",")) == replicas(server)
    try:
        assert httpx.get(server.url + "/is_paused", headers=ADMIN).json() == {"is_paused": True}
        for name in replicas(server):
            found = httpx.get(server.url + "/is_paused", headers=ADMIN | {REPLICA: name})
            assert found.json() == {"is_paused": True}
        assert complete(server, "red").status_code == 503
    finally:
        assert httpx.post(server.url + "/resume", headers=ADMIN).status_code == 200
    assert httpx.get(server.url + "/is_paused", headers=ADMIN).json() == {"is_paused": False}
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    refused = httpx.post(server.url + "/init_weight_transfer_engine", json={"init_info": info}, headers=ADMIN)
    assert refused.status_code == 501
    assert "/init_weight_transfer_engine" in refused.json()["error"]["message"]


def test_a_killed_replica_fails_no_request_without_a_token_and_its_successor_has_the_new_weights(
    server, tiny_model, tmp_path
):
    torch.manual_seed(5)
    old = load_file(tiny_model / "model.safetensors")
    weights = {name: torch.randn_like(value) * 0.1 for name, value in old.items()}
    save_file(weights, tmp_path / "model.safetensors")
    body = {"path": str(tmp_path / "model.safetensors"), "version": "step-1"}
    answer = httpx.post(server.url + "/weights/update", json=body, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    assert answer.json()["weight_version"] == "step-1"
    wanted = complete(server, "red fox").json()["choices"][0]["text"]

    before = replicas(server)
    outcomes: Counter[str] = Counter()
    stop = threading.Event()

    def ask(number: int) -> None:
        while not stop.is_set():
            answer = complete(server, f"{number} dogs", max_tokens=100)
            outcomes["whole" if answer.status_code == 200 else f"failed: {answer.text}"] += 1

    def stream(number: int) -> None:
        sent = {"prompt": f"{number} foxes", "max_tokens": 200, "ignore_eos": True, "stream": True}
        while not stop.is_set():
            with httpx.stream("POST", server.url + "/v1/completions", json=sent) as response:
                lines = [line for line in response.iter_lines() if line]
            if response.status_code != 200 or lines[-1] != "data: [DONE]":
                outcomes[f"failed stream: {response.status_code} {lines[-1:]}"] += 1
            elif "error" in json.loads(lines[-2].removeprefix("data: ")):
                error = json.loads(lines[-2].removeprefix("data: "))["error"]
                had_tokens = len(lines) > 2
                outcomes[f"cut: {error['code']}" if had_tokens else "failed: cut without tokens"] += 1
            else:
                outcomes["streamed"] += 1

    with ThreadPoolExecutor(8) as pool:
        tasks = [pool.submit(ask, number) for number in range(4)] + [pool.submit(stream, number) for number in range(4)]
        wait(lambda: outcomes["whole"] > 8 and outcomes["streamed"] > 8, "load")
        os.kill(replica_pids(server)[0], signal.SIGKILL)
        wait(lambda: len(replicas(server) - before) == 1, "another replica")
        stop.set()
        for task in tasks:
            task.result()
    assert set(outcomes) <= {"whole", "streamed", "cut: replica_lost"}, outcomes
    assert outcomes["cut: replica_lost"] <= 4, outcomes

    assert len(replicas(server)) == 2
    info = httpx.get(server.url + "/weight_info", headers=ADMIN).json()
    assert info == {"weight_version": "step-1"}
    for name in replicas(server):
        sent = {"prompt": "red fox", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(server.url + "/v1/completions", json=sent, headers={REPLICA: name})
        assert answer.json()["choices"][0]["text"] == wanted, name


def test_sigterm_drains_running_requests(server):
    """Last: it ends the server."""
    pids = replica_pids(server)
    assert len(pids) == 2
    body = {"prompt": "red", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2], rest[-2:]
    assert server.process.wait(PATIENCE) == 0
    wait_for_end(pids)

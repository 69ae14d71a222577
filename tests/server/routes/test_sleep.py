"""The routes that release and restore the engine's memory, in vLLM's and SGLang's formats."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.protocol.sleep import MEMORY_PARTS
from server.schemas import answers as wire
from tests.server.conftest import running, tiny_config
from tests.server.http.test_bodies import error_of
from tests.server.observability.test_vllm_metrics import families
from tests.support.waiting import PATIENCE

ROUTE, IDS = "/inference/v1/generate", [40, 41, 42, 43]
LONG = {"temperature": 0.0, "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared(folders):
    config = tiny_config(
        folders["a"], admin_without_key="loopback", enable_sleep_mode=True, max_model_len=4096, max_num_seqs=4,
        compat="vllm",
    )  # fmt: skip
    with running(config) as handle:
        yield handle


@pytest.fixture
def server(shared, folders):
    """The shared server, awake, with the weights a; it must be idle after the test."""
    yield shared
    shared.post("/wake_up", None)
    shared.answer("/update_weights_from_disk", {"model_path": str(folders["a"]), "weight_version": "a"})
    shared.answer("/resume", None)
    shared.wait_idle()
    assert shared.service.client.stats().idle_check_failures == 0


@pytest.fixture
def threads():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def generate(server, **params):
    return server.post(ROUTE, {"token_ids": IDS, "sampling_params": LONG | params}, timeout=PATIENCE)


def tokens_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def states(server):
    """Return whether the engine sleeps, which parts are released, and vLLM's state of the weights."""
    found = families(server)
    parts = {sample.labels["part"]: sample.value for sample in found["encore_engine_sleeping"].samples}
    assert parts.keys() == set(MEMORY_PARTS)
    state = {sample.labels["sleep_state"]: sample.value for sample in found["vllm:engine_sleep_state"].samples}
    [name] = [name for name, value in state.items() if value]
    answer = server.http.get("/is_sleeping").json()
    wire.IsSleeping.model_validate(answer, strict=True)
    return answer["is_sleeping"], {part for part, value in parts.items() if value}, name


def wait_for(server, expected):
    server.wait(lambda: states(server) == expected, f"the state {expected}")


AWAKE = (False, set(), "awake")
ASLEEP = (True, set(MEMORY_PARTS), "weights_offloaded")


def test_vllm_clients_put_it_to_sleep_and_wake_it_up(server, references):
    expected = references["a"].greedy(IDS, 12)
    assert tokens_of(generate(server, max_tokens=12)) == expected
    captures = server.service.client.stats().graphs["captures"]
    for path, body in (("/sleep", None), ("/sleep?level=1", {}), ("/sleep", {"level": 1})):
        answer = server.answer(path, body)
        assert answer == {"status": "sleeping", "level": 1}
        wire.Sleeping.model_validate(answer, strict=True)
        wait_for(server, ASLEEP)
        refused = generate(server)
        error = error_of(refused, 503)
        assert error["code"] == "engine_paused" and "the engine sleeps: wake it up" in error["message"]
        assert refused.headers["retry-after"] == "1"
        assert "sleeps" in error_of(server.http.get("/health_generate"), 503)["message"]
        assert server.http.get("/health").status_code == 200
        assert server.answer("/wake_up", None) == {"status": "awake"}
        wait_for(server, AWAKE)
        assert tokens_of(generate(server, max_tokens=12)) == expected
    assert server.service.client.stats().graphs["captures"] == captures


def test_level_2_takes_new_weights_between_two_wake_ups(server, references, folders):
    tokens_of(generate(server, max_tokens=12))
    server.answer("/sleep?level=2", None)
    wait_for(server, (True, set(MEMORY_PARTS), "discard_all"))
    body = {"model_path": str(folders["b"]), "weight_version": "b"}
    error = error_of(server.post("/update_weights_from_disk", body), 400)
    assert error["code"] == "weight_update_refused" and "/wake_up?tags=weights" in error["message"]
    server.answer("/wake_up?tags=weights", None)
    wait_for(server, (True, {"cuda_graph", "kv_cache"}, "awake"))
    assert "discarded" in error_of(server.post("/weight_checker", {"action": "checksum"}), 400)["message"]
    server.answer("/update_weights_from_disk", body)
    assert error_of(generate(server), 503)["code"] == "engine_paused"
    server.answer("/wake_up?tags=kv_cache", None)
    wait_for(server, AWAKE)
    assert tokens_of(generate(server, max_tokens=12)) == references["b"].greedy(IDS, 12)


def test_after_level_2_requests_wait_for_the_weights(server, references, folders):
    server.answer("/sleep?level=2", None)
    server.answer("/wake_up", None)
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert "of them have not come since" in error_of(generate(server), 503)["message"]
    assert "of them have not come since" in error_of(server.post("/resume", None), 400)["message"]
    server.answer("/update_weights_from_disk", {"model_path": str(folders["b"]), "weight_version": "b"})
    assert tokens_of(generate(server, max_tokens=8)) == references["b"].greedy(IDS, 8)


def test_requests_that_are_kept_go_on_after_waking(server, references, threads):
    running_request = threads.submit(generate, server, max_tokens=1000)
    before = server.service.client.stats().generation_tokens
    server.wait(lambda: server.service.client.stats().generation_tokens > before + 20, "tokens")
    server.answer("/sleep?level=1&mode=keep", None)
    held = threads.submit(generate, server, max_tokens=4)
    server.wait(lambda: server.service.client.stats().num_waiting == 2, "the held request")
    server.answer("/wake_up?tags=weights&tags=kv_cache", None)
    assert tokens_of(held.result(PATIENCE)) == references["a"].greedy(IDS, 4)
    ids = tokens_of(running_request.result(PATIENCE))
    logits = references["a"].logits([*IDS, *ids])[len(IDS) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert len(ids) == 1000 and bool((chosen >= logits.max(dim=1).values - 1e-3).all())


def test_wait_answers_after_the_running_requests(server, references, threads):
    running_request = threads.submit(generate, server, max_tokens=60)
    server.wait(lambda: server.service.client.stats().num_running == 1 or running_request.done(), "the request")
    assert server.answer("/sleep", {"mode": "wait"}) == {"status": "sleeping", "level": 1}
    assert tokens_of(running_request.result(PATIENCE)) == references["a"].greedy(IDS, 60)
    wait_for(server, ASLEEP)


def test_an_update_in_parts_outlives_a_sleep(server, references, folders):
    server.answer("/start_weight_update", {})
    server.answer("/update_weights", {"weight_dir": str(folders["b"])})
    server.answer("/sleep", None)
    error = error_of(server.post("/finish_weight_update", {"weight_version": "b"}), 400)
    assert "the weights sleep" in error["message"]
    server.answer("/wake_up?tags=weights", None)
    assert server.answer("/finish_weight_update", {"weight_version": "b"})["weight_version"] == "b"
    server.answer("/wake_up", None)
    assert tokens_of(generate(server, max_tokens=8)) == references["b"].greedy(IDS, 8)


def test_the_kv_cache_alone_is_released(server, references):
    server.answer("/sleep?level=0&mode=keep", None)
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.answer("/release_kv_cache_memory", None) == {"status": "released"}
    wait_for(server, (True, {"kv_cache"}, "awake"))
    server.answer("/wake_up?tags=kv_cache", None)
    wait_for(server, AWAKE)
    assert tokens_of(generate(server, max_tokens=8)) == references["a"].greedy(IDS, 8)


def test_sglang_clients_release_and_resume(server, references, folders, threads):
    assert server.answer("/release_memory_occupation", {})["success"] is True
    wait_for(server, ASLEEP)
    held = threads.submit(generate, server, max_tokens=4)
    assert server.answer("/resume_memory_occupation", {"tags": ["weights"]})["success"] is True
    server.answer("/update_weights_from_disk", {"model_path": str(folders["b"]), "weight_version": "b"})
    server.answer("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert tokens_of(held.result(PATIENCE)) == references["b"].greedy(IDS, 4)
    wait_for(server, AWAKE)
    server.answer("/pause_generation", {"mode": "abort"})
    server.answer("/release_memory_occupation", {"tags": ["kv_cache"]})
    wait_for(server, (True, {"kv_cache"}, "awake"))
    server.answer("/resume_memory_occupation", None)
    assert server.http.get("/is_paused").json() == {"is_paused": True}
    server.answer("/continue_generation", {})
    assert tokens_of(generate(server, max_tokens=4)) == references["b"].greedy(IDS, 4)


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/sleep?level=3", None, "level", "level=3 must be 0"),
        ("/sleep?level=one", None, "level", "integer"),
        ("/sleep?mode=freeze", None, "mode", "abort"),
        ("/sleep?level=1", {"level": 2}, "level", "differ"),
        ("/sleep", {"levle": 1}, "levle", "did you mean 'level'"),
        ("/sleep?tags=weights", None, "tags", "not a known query parameter"),
        ("/wake_up?tags=weight", None, "tags", "did you mean 'weights'"),
        ("/wake_up?tags=weights", {"tags": ["kv_cache"]}, "tags", "differ"),
        ("/release_memory_occupation", {"tags": ["scheduling"]}, "tags", "must be of weights, cuda_graph, kv_cache"),
        ("/release_memory_occupation", {"tags": "weights"}, "tags", "list"),
    ],
)
def test_wrong_parameters_are_refused_by_name_and_nothing_sleeps(server, path, body, param, said):
    error = error_of(server.post(path, body), 400)
    assert error["param"] == param and said in error["message"], error
    assert server.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert server.http.get("/is_paused").json() == {"is_paused": False}


def test_graphs_are_not_dropped_during_a_sleep(server):
    server.answer("/sleep", None)
    for path in ("/graphs/invalidate", "/graphs/warm"):
        assert "the engine sleeps" in error_of(server.post(path, None), 400)["message"]


def test_without_the_setting_memory_stays(start_server):
    server = start_server(admin_without_key="loopback")
    for path in ("/sleep", "/sleep?level=2", "/release_kv_cache_memory", "/release_memory_occupation"):
        assert "--enable-sleep-mode" in error_of(server.post(path, None), 400)["message"]
    assert server.http.get("/is_paused").json() == {"is_paused": False}
    assert server.answer("/wake_up", None) == {"status": "awake"}
    server.answer("/sleep?level=0", None)
    assert error_of(generate(server, max_tokens=4), 503)["code"] == "engine_paused"
    server.answer("/wake_up", None)
    assert len(tokens_of(generate(server, max_tokens=4))) == 4

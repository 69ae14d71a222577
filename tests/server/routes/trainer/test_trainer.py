"""The routes with which trainers drive the server: pauses, aborts, weight updates, versions, and their keys."""

from __future__ import annotations

import hashlib
import os
import random
import time

import httpx
import pytest
import safetensors.torch
import torch

from server.schemas import answers as wire
from tests.server.http.test_bodies import error_of
from tests.server.schemas.test_tensor_handles import GPU, OnGpu, encoded
from tests.support.waiting import PATIENCE

ROUTE = "/inference/v1/generate"
IDS = [40, 41, 42, 43]
LONG = {"temperature": 0.0, "max_tokens": 3000, "ignore_eos": True}


def tokens_so_far(server):
    return server.service.client.stats().generation_tokens


def wait_for_tokens(server, count=20):
    before = tokens_so_far(server)
    server.wait(lambda: tokens_so_far(server) >= before + count, "tokens")


def generate(server, name="r", **params):
    body = {"token_ids": IDS, "sampling_params": LONG | params, "request_id": name}
    return server.post(ROUTE, body, timeout=PATIENCE)


def choice_of(response):
    assert response.status_code == 200, response.text
    answer = response.json()
    wire.TokenGenerated.model_validate(answer, strict=True)
    return answer["choices"][0]


def follows(reference, ids, start, end):
    """Return whether the tokens [start, end) are the reference's most likely ones, each after those before it."""
    logits = reference.logits([*IDS, *ids[:end]])[len(IDS) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(ids[:end])[:, None])[:, 0]
    return bool((chosen[start:] >= logits.max(dim=1).values[start:] - 1e-3).all())


# ---- pause and abort -----------------------------------------------------------------------------------------------


def test_abort_ends_requests_with_their_tokens_and_refuses_new_ones(server, references, threads):
    running_request = threads.submit(generate, server)
    wait_for_tokens(server)
    assert server.answer("/pause", None) == {"status": "paused"}
    choice = choice_of(running_request.result(PATIENCE))
    assert choice["finish_reason"] == "abort" and 10 < len(choice["token_ids"]) < 3000
    assert choice["weight_versions"][0]["end"] == len(choice["token_ids"])
    assert follows(references["a"], choice["token_ids"], 0, len(choice["token_ids"]))
    refused = generate(server)
    assert error_of(refused, 503)["code"] == "engine_paused" and refused.headers["retry-after"] == "1"
    stream = server.post(ROUTE, {"token_ids": IDS, "stream": True})
    assert error_of(stream, 503)["code"] == "engine_paused"
    assert error_of(server.http.get("/health_generate"), 503)["code"] == "engine_paused"
    assert server.http.get("/is_paused").json() == {"is_paused": True}
    assert server.answer("/resume", None) == {"status": "resumed"}
    assert server.http.get("/is_paused").json() == {"is_paused": False}
    assert choice_of(generate(server, max_tokens=4))["finish_reason"] == "length"


def test_wait_answers_when_running_requests_have_ended_and_holds_new_ones(server, threads):
    running_request = threads.submit(generate, server, max_tokens=150)
    wait_for_tokens(server)
    pause = threads.submit(server.post, "/pause?mode=wait", None)
    server.wait(lambda: server.http.get("/is_paused").json()["is_paused"], "the pause")
    held = threads.submit(generate, server, max_tokens=4)
    assert pause.result(PATIENCE).json() == {"status": "paused"}
    assert choice_of(running_request.result(PATIENCE))["finish_reason"] == "length"
    server.wait(lambda: server.service.client.stats().num_waiting == 1, "the held request")
    assert not held.done()
    server.answer("/resume", None)
    assert choice_of(held.result(PATIENCE))["finish_reason"] == "length"


def test_a_waiting_pause_that_is_ended_says_so(server, threads):
    threads.submit(generate, server)
    wait_for_tokens(server)
    pause = threads.submit(server.post, "/pause?mode=wait", None)
    server.wait(lambda: server.http.get("/is_paused").json()["is_paused"], "the pause")
    server.answer("/resume", None)
    assert "ended or changed" in error_of(pause.result(PATIENCE), 400)["message"]
    assert server.answer("/abort_requests", {})["aborted"] == 1


@pytest.mark.parametrize(
    ("pause", "resume"),
    [
        (("/pause?mode=keep&clear_cache=false", None), ("/resume", None)),
        (("/pause?mode=keep&clear_cache=true", None), ("/resume", {})),
        (("/pause", {"mode": "keep"}), ("/resume", None)),
        (("/pause_generation", {"mode": "in_place"}), ("/continue_generation", {})),
        (("/pause_generation", {"mode": "retract"}), ("/continue_generation", None)),
    ],
)
def test_an_update_between_two_halves_of_a_rollout_shows_in_its_spans(
    server, folders, references, threads, pause, resume
):
    running_request = threads.submit(generate, server, max_tokens=1200)
    wait_for_tokens(server)
    server.answer(*pause)
    held = threads.submit(generate, server, "held", max_tokens=4)
    time.sleep(0.2)
    assert not running_request.done() and not held.done()
    server.answer("/start_weight_update", {})
    part = {"update_info": {"weight_dir": str(folders["b"])}}
    assert server.answer("/update_weights", part)["updated"] == 0
    finished = server.answer("/finish_weight_update", {"weight_version": "b"})
    assert finished["weight_version"] == "b" and finished["updated"] > 10
    for path in ("/weight_info", "/weight_version", "/get_weight_version"):  # vLLM's, and both of SGLang's
        assert server.http.get(path).json() == {"weight_version": "b"}
    server.answer(*resume)
    choice = choice_of(running_request.result(PATIENCE))
    first, second = choice["weight_versions"]
    assert first["version"] != "b" and second == {"version": "b", "start": first["end"], "end": 1200}
    assert follows(references["a"], choice["token_ids"], 0, first["end"])
    assert follows(references["b"], choice["token_ids"], first["end"], 1200)
    assert choice_of(held.result(PATIENCE))["weight_versions"] == [{"version": "b", "start": 0, "end": 4}]


def test_an_update_without_a_pause_splits_a_stream(server, folders, references):
    body = {"token_ids": IDS, "sampling_params": LONG | {"max_tokens": 400}, "stream": True}
    ids, spans = [], None
    with server.http.stream("POST", ROUTE, json=body) as response:
        for number, line in enumerate(line for line in response.iter_lines() if line.startswith("data: {")):
            [choice] = httpx.Response(200, content=line.removeprefix("data: ")).json()["choices"]
            ids += choice["token_ids"]
            spans = choice["weight_versions"]
            if number == 5:
                with httpx.Client(base_url=server.url, headers=server.http.headers) as other:
                    update = {"model_path": str(folders["b"]), "weight_version": "b"}
                    assert other.post("/update_weights_from_disk", json=update).json()["success"] is True
    first, second = spans
    assert len(ids) == second["end"] == 400 and second["start"] == first["end"] and second["version"] == "b"
    assert follows(references["a"], ids, 0, first["end"]) and follows(references["b"], ids, first["end"], 400)


def test_sglangs_pause_aborts_running_requests_and_holds_new_ones(server, threads):
    rollout = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}, "rid": "mine"}
    running_request = threads.submit(server.post, "/generate", rollout)
    wait_for_tokens(server)
    assert server.answer("/pause_generation", {}) == {"message": "Generation paused successfully.", "status": "ok"}
    meta = running_request.result(PATIENCE).json()["meta_info"]
    assert meta["finish_reason"] == {"type": "abort"} and meta["completion_tokens"] > 10
    held = threads.submit(generate, server, max_tokens=4)
    time.sleep(0.2)
    assert not held.done()
    server.answer("/continue_generation", {})
    assert choice_of(held.result(PATIENCE))["finish_reason"] == "length"


def test_requests_are_aborted_by_any_of_their_ids(server, threads):
    headers = {"X-Request-Id": "from-header"}
    completion = {"prompt": IDS, "max_tokens": 3000, "ignore_eos": True, "n": 2}
    batch = {"input_ids": [IDS, IDS], "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}, "rid": "batch"}
    futures = {
        "mine": threads.submit(generate, server, "mine"),
        "from-header": threads.submit(server.post, "/v1/completions", completion, headers=headers),
        "batch": threads.submit(server.post, "/generate", batch),
    }
    server.wait(lambda: server.service.admission.in_flight == 5, "all sequences")
    wait_for_tokens(server)
    assert server.answer("/abort_requests", {"request_ids": ["unknown"]}) == {"status": "aborted", "aborted": 0}
    assert server.answer("/abort_requests", {"request_ids": ["mine", "from-header"]})["aborted"] == 2
    assert choice_of(futures["mine"].result(PATIENCE))["finish_reason"] == "abort"
    choices = futures["from-header"].result(PATIENCE).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
    assert not futures["batch"].done()
    assert server.answer("/abort_request", {"rid": "batch"})["aborted"] == 2
    assert [one["meta_info"]["finish_reason"]["type"] for one in futures["batch"].result(PATIENCE).json()] == [
        "abort"
    ] * 2
    assert server.answer("/abort_request", {"abort_all": True})["aborted"] == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"model": "tiny", "max_tokens": 3000, "messages": [{"role": "user", "content": "red"}]}),
        ("/v1/responses", {"input": "red", "max_output_tokens": 3000, "ignore_eos": True}),
        ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "red"}], "stream": False}),
    ],
)
def test_apis_without_a_finish_reason_for_aborts_answer_503(server, threads, path, body):
    server.answer("/pause?mode=keep", None)
    request = threads.submit(server.post, path, body)
    server.wait(lambda: server.service.client.stats().num_waiting == 1, "the request")
    assert server.answer("/abort_requests", {})["aborted"] == 1
    response = request.result(PATIENCE)
    assert response.status_code == 503 and "aborted" in response.text


def test_cached_prefixes_are_dropped(server):
    def cached():
        body = {"input_ids": list(range(40, 140)), "sampling_params": {"max_new_tokens": 1}}
        return server.answer("/generate", body)["meta_info"]["cached_tokens"]

    cached()
    for path, body in (("/reset_prefix_cache", {"reset_running_requests": False}), ("/flush_cache", None)):
        assert cached() > 0
        assert server.answer(path, body)["success"] is True
        assert cached() == 0
    assert cached() > 0 and server.http.get("/flush_cache").json()["success"] is True
    assert cached() == 0


# ---- weights -------------------------------------------------------------------------------------------------------


def checksum(tensor):
    """What the documentation says: SHA-256 of the contiguous bytes."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_checksums_are_those_of_the_trainers_tensors(server, folders):
    weights = safetensors.torch.load_file(folders["a"] / "model.safetensors")
    own = {name: checksum(tensor) for name, tensor in weights.items()}
    assert server.answer("/weight_checker", {"action": "checksum"}) == {"checksums": own}
    assert server.answer("/weight_checker", {"action": "compare", "baseline": own}) == {"match": True, "mismatches": []}
    server.answer("/update_weights_from_disk", {"model_path": str(folders["b"])})
    found = server.answer("/weight_checker", {"action": "compare", "baseline": own})
    assert not found["match"] and "lm_head.weight" in found["mismatches"]
    found = server.answer("/weight_checker", {"action": "compare", "baseline": {}})
    assert not found["match"] and len(found["mismatches"]) == len(own)
    reset = server.answer("/weight_checker", {"action": "reset"})
    assert reset["status"] == "reset" and reset["weight_version"].startswith("random-")
    now = server.answer("/weight_checker", {"action": "checksum"})["checksums"]
    assert now["lm_head.weight"] != own["lm_head.weight"]


def test_a_tensor_is_read_by_its_name(server, folders):
    weights = safetensors.torch.load_file(folders["a"] / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.1.self_attn.k_proj.weight"):
        body = {"name": name, "truncate_size": 3}
        assert server.answer("/get_weights_by_name", body) == weights[name][:3].tolist()
        assert server.http.request("GET", "/get_weights_by_name", json=body).json() == weights[name][:3].tolist()
    error = error_of(server.post("/get_weights_by_name", {"name": "model.norm.weigt"}), 400)
    assert error["param"] == "name" and "did you mean 'model.norm.weight'" in error["message"]


def test_an_update_in_parts_becomes_visible_at_its_end_all_or_nothing(server, folders, references, tmp_path):
    weights = safetensors.torch.load_file(folders["b"] / "model.safetensors")
    names = sorted(weights)
    for number, half in enumerate((names[::2], names[1::2])):
        safetensors.torch.save_file({name: weights[name] for name in half}, tmp_path / f"{number}.safetensors")
    before = choice_of(generate(server, max_tokens=8))["token_ids"]
    server.answer("/start_weight_update", None)
    server.answer("/update_weights", {"weight_dir": str(tmp_path / "0.safetensors")})
    server.answer("/start_weight_update", {})  # the trainer died, and begins again
    for number in (0, 1):
        server.answer("/update_weights", {"weight_dir": str(tmp_path / f"{number}.safetensors")})
        assert choice_of(generate(server, max_tokens=8))["token_ids"] == before
    finished = server.answer("/finish_weight_update", {"weight_version": "step-2"})
    assert finished["updated"] == len(weights) and finished["weight_version"] == "step-2"
    after = choice_of(generate(server, max_tokens=8))
    assert after["token_ids"] == references["b"].greedy(IDS, 8) != before
    assert after["weight_versions"] == [{"version": "step-2", "start": 0, "end": 8}]


def test_a_part_that_does_not_fit_refuses_the_whole_update(server, folders, tmp_path):
    weights = safetensors.torch.load_file(folders["b"] / "model.safetensors")
    safetensors.torch.save_file({"model.norm.weight": weights["model.norm.weight"][:-1].contiguous()}, tmp_path / "bad")
    before = server.answer("/weight_checker", {"action": "checksum"})
    version = server.http.get("/weight_info").json()
    server.answer("/start_weight_update", {})
    refused = server.post("/update_weights", {"weight_dir": "/nowhere"})
    assert error_of(refused, 400)["code"] == "weight_update_refused"
    server.answer("/update_weights", {"weight_dir": str(folders["b"])})
    server.answer("/update_weights", {"weight_dir": str(tmp_path / "bad")})
    assert "shape" in error_of(server.post("/finish_weight_update", {"weight_version": "bad"}), 400)["message"]
    assert server.answer("/weight_checker", {"action": "checksum"}) == before
    assert server.http.get("/weight_info").json() == version
    assert "/start_weight_update" in error_of(server.post("/finish_weight_update", None), 400)["message"]


def test_new_weights_without_a_name_get_one_and_can_be_renamed(server, folders):
    answer = server.answer("/update_weights", {"weight_dir": str(folders["b"])})
    assert answer["weight_version"].startswith("update-") and answer["updated"] > 10
    assert server.http.get("/weight_info").json()["weight_version"] == answer["weight_version"]
    answer = server.answer("/update_weight_version", {"new_version": "v8"})
    assert answer["success"] and answer["new_version"] == "v8"
    assert choice_of(generate(server, max_tokens=3))["weight_versions"] == [{"version": "v8", "start": 0, "end": 3}]
    server.answer("/start_weight_update", {})
    assert server.answer("/finish_weight_update", {"weight_version": "v9"})["updated"] == 0
    assert server.http.get("/get_model_info").json()["weight_version"] == "v9"


def test_the_server_describes_itself_to_trainers(server, folders):
    assert server.http.get("/get_world_size").json() == {"world_size": 1}
    model = server.http.get("/get_model_info").json()
    wire.ServedModel.model_validate(model, strict=True)
    assert model["model_path"] == str(folders["a"]) and model == server.http.get("/model_info").json()
    info = server.http.get("/server_info", params={"config_format": "json"}).json()
    assert info["vllm_config"]["weight_transfer_config"] is None
    assert info.keys() == server.http.get("/get_server_info").json().keys()


HANDLES = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
EVIL = encoded([{GPU: (os.system, ("true",))}])


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/pause?mode=freeze", None, "mode", "abort"),
        ("/pause?mod=keep", None, "mod", "did you mean 'mode'"),
        ("/pause", {"mod": "keep"}, "mod", "did you mean 'mode'"),
        ("/pause?mode=wait", {"mode": "keep"}, "mode", "differ"),
        ("/resume", {"mode": "keep"}, "mode", "not a known field"),
        ("/pause_generation", {"mode": "keep"}, "mode", "in_place"),
        ("/abort_requests", {"request_ids": "all"}, "request_ids", "list"),
        ("/abort_requests", {"rids": []}, "rids", "not a known field"),
        ("/abort_request", {}, "rid", "abort_all"),
        ("/update_weights", {}, "update_info", "missing"),
        ("/update_weights", {"update_info": {}}, "update_info", "weight_dir"),
        ("/update_weights", {"update_info": HANDLES | {"ipc_handles_pickled": "gASV"}}, "ipc_handles_pickled",
         "/update_weights_from_disk"),
        ("/update_weights", {"update_info": HANDLES | {"ipc_handles_pickled": EVIL}}, "ipc_handles_pickled",
         "nothing is unpickled: it calls posix.system"),
        ("/update_weights", {"update_info": HANDLES | {"ipc_handles": []}}, "ipc_handles", "as ipc_handles_pickled"),
        ("/update_weights", {"update_info": HANDLES | {"ipc_handles_pickled": EVIL, "sizes": [1]}}, "sizes", "known"),
        ("/update_weights", {"update_info": HANDLES | {"ipc_handles_pickled": EVIL, "names": []}}, "names", "1"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [EVIL]}, "serialized_named_tensors",
         "nothing is unpickled"),
        ("/collective_rpc", {"method": "save_sharded_state"}, "method", "skyrl_start_weight_update"),
        ("/collective_rpc", {"method": "skyrl_finish_weight_update", "args": [1]}, "args", "0"),
        ("/collective_rpc", {"method": "skyrl_finish_weight_update", "kwargs": {"a": 1}}, "kwargs", "not an argument"),
        ("/collective_rpc", {"method": "skyrl_start_weight_update", "kwargs": {"is_checkpoint_format": False}},
         "kwargs", "must be true"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format", "must be true"),
        ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]],
         "is_checkpoint_format": False}}, "is_checkpoint_format", "must be true"),
        ("/collective_rpc", {"method": "update_weights_ipc"}, "kwargs", "missing"),
        ("/collective_rpc", {"method": "update_weights_ipc", "kwargs": {"update_info": HANDLES | {"sizes": [7],
         "ipc_handles_pickled": encoded({GPU: OnGpu(shape=(6,)).reduced})}}}, "tensor_sizes", "has 12 bytes"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": []}, "serialized_named_tensors", "1"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": [EVIL], "load_format": "direct"}, "load_format",
         "flattened_bucket"),
        ("/update_weights", {"weight_dir": "/x", "update_info": {}}, "weight_dir", "not both"),
        ("/update_weights", {"weight_dir": "/x", "update_info": HANDLES | {"ipc_handles_pickled": EVIL}}, "weight_dir",
         "not both"),
        ("/update_weights", {"weight_dir": "/nowhere"}, None, "does not exist"),
        ("/finish_weight_update", {"weight_version": ""}, "weight_version", "at least 1"),
        ("/update_weight_version", {}, "new_version", "required"),
        ("/weight_checker", {"action": "sum"}, "action", "checksum"),
        ("/weight_checker", {"action": "compare"}, "baseline", "baseline"),
        ("/weight_checker", {"action": "compare", "baseline": {"a": 1}}, "baseline", "string"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, None, "does not exist"),
        ("/update_weights_from_disk", {"model_path": "/x", "load_format": "dummy"}, "load_format", "safetensors"),
        ("/update_weights_from_disk", {"model_path": "/x", "keep_pause": True}, "keep_pause", "/pause_generation"),
        ("/update_weights_from_disk", {"model_path": "/x", "weight_versoin": "1"}, "weight_versoin", "weight_version"),
        ("/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 0}, "truncate_size", "1"),
    ],
)  # fmt: skip
def test_a_wrong_body_is_refused_by_name_and_changes_nothing(server, path, body, param, said):
    version = server.http.get("/weight_info").json()
    error = error_of(server.post(path, body), 400)
    assert error["param"] == param and said in error["message"], error
    assert server.http.get("/weight_info").json() == version
    assert server.http.get("/is_paused").json() == {"is_paused": False}


def test_handles_of_gpu_memory_are_read_and_an_engine_on_a_cpu_says_that_it_has_none(server):
    assert server.answer("/init_weight_transfer_engine", {"init_info": {}})["message"]
    version = server.http.get("/weight_info").json()
    sglang = {"serialized_named_tensors": [encoded([("a", OnGpu())])], "flush_cache": True, "weight_version": "1"}
    vllm = {"update_info": HANDLES | {"ipc_handles_pickled": encoded([{GPU: OnGpu().reduced}]), "packed": False}}
    flat = {GPU: OnGpu(shape=(6,)).reduced}
    chunk = {"update_info": HANDLES | {"sizes": [6], "ipc_handles_pickled": encoded(flat)}}
    skyrl = {"method": "update_weights_ipc", "kwargs": chunk}
    for path, body in (("/update_weights_from_tensor", sglang), ("/update_weights", vllm), ("/collective_rpc", skyrl)):
        error = error_of(server.post(path, body), 400)
        assert error["message"] == "the weights are in the memory of a GPU, and this engine runs on cpu"
    assert server.http.get("/weight_info").json() == version


def test_sockets_that_carry_pickles_are_a_501_that_says_what_to_do(server):
    error = error_of(server.post("/update_weights_from_ipc", {"zmq_handles": {}}), 501)
    assert error["code"] == "not_implemented" and "not supported" in error["message"]
    assert "/update_weights_from_disk" in error["message"] and "/update_weights_from_tensor" in error["message"]


# ---- keys ----------------------------------------------------------------------------------------------------------

LOCAL = {"admin_without_key": "loopback"}


def test_all_routes_need_the_admin_key(shared):
    for path, method in (("/pause", "POST"), ("/is_paused", "GET"), ("/update_weights", "POST"), ("/sleep", "POST"),
                         ("/flush_cache", "GET"), ("/weight_info", "GET"), ("/is_sleeping", "GET")):  # fmt: skip
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert httpx.request(method, shared.url + path, headers=headers).status_code == 401


def test_a_switch_opens_them_to_clients_on_this_machine(start_server):
    server = start_server(**LOCAL)
    assert server.http.get("/server_info").status_code == 200
    assert server.http.get("/is_paused", headers={"Authorization": "Bearer EMPTY"}).status_code == 200
    port = server.url.rpartition(":")[2]
    for headers in ({"Origin": f"http://localhost:{port}"}, {"X-Forwarded-For": "10.0.0.1"}, {"Via": "1.1 proxy"},
                    {"Forwarded": "for=10.0.0.1"}):  # fmt: skip
        assert error_of(server.http.get("/is_paused", headers=headers), 403)["code"] == "admin_disabled", headers
    assert server.http.get("/is_paused", headers={"Host": "rebound.example"}).status_code in (400, 403)


def test_the_switch_leaves_keys_checked(start_server, tmp_path):
    (tmp_path / "key").write_text("one")
    server = start_server(**LOCAL, admin_key_file=str(tmp_path / "key"), api_key_file=str(tmp_path / "key"))
    assert server.http.get("/is_paused").status_code == 200
    assert server.http.get("/is_paused", headers={"Authorization": "Bearer two"}).status_code == 401
    assert server.http.get("/is_paused", headers={"Host": "rebound.example"}).status_code == 401
    assert server.http.get("/v1/models").status_code == 401


# ---- any order -----------------------------------------------------------------------------------------------------


def test_random_sequences_of_trainers_leak_nothing(server, folders, threads):
    """Rollouts that come and go while a trainer pauses, updates, aborts and resumes at random."""
    generator = random.Random(11)
    rollouts, calls = [], 0
    for step in range(60):
        for number in range(generator.randint(0, 2)):
            length = generator.randint(1, 150)
            rollouts.append(threads.submit(generate, server, f"r{step}-{number}", max_tokens=length))
        path, body = generator.choice([
            ("/pause?mode=abort", None), ("/pause?mode=keep", None), ("/pause_generation", {"mode": "retract"}),
            ("/resume", None), ("/resume", None), ("/continue_generation", {}),
            ("/abort_requests", {"request_ids": [f"r{step}-0", f"r{step - 1}-1"]}), ("/abort_requests", {}),
            ("/update_weights_from_disk", {"model_path": str(folders[generator.choice("ab")])}),
            ("/update_weight_version", {"new_version": f"v{step}"}), ("/flush_cache", None),
            ("/reset_prefix_cache", {"reset_running_requests": True}),
        ])  # fmt: skip
        server.answer(path, body)
        calls += 1
        time.sleep(generator.random() * 0.02)
    server.answer("/resume", None)
    ends = {"length": 0, "abort": 0, "refused": 0}
    for rollout in rollouts:
        response = rollout.result(PATIENCE)
        if response.status_code == 503:
            ends["refused"] += 1
            continue
        choice = choice_of(response)
        spans = choice["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans)][: len(spans)]
        assert (spans[-1]["end"] if spans else 0) == len(choice["token_ids"])
        ends[choice["finish_reason"]] += 1
    assert calls == 60 and all(ends.values()), ends

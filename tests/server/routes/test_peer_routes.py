"""Routes that users of vLLM and SGLang expect: /tokenizer_info, /load, /health_generate and /server_info."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from transformers import AutoTokenizer

from server.schemas import answers as wire
from server.serving import generation_probe
from tests.server.conftest import running, tiny_config
from tests.support.waiting import PATIENCE


@pytest.fixture(scope="module")
def guarded(tiny_model, tmp_path_factory):
    """A server with an API key and an admin key."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "api").write_text("api")
    (folder / "admin").write_text("admin")
    config = tiny_config(
        tiny_model, api_key_file=str(folder / "api"), admin_key_file=str(folder / "admin"), max_model_len=4096
    )
    with running(config) as handle:
        yield handle


def bearer(key):
    return {"headers": {"Authorization": f"Bearer {key}"}}


def test_tokenizer_info_is_the_tokenizers_configuration(server, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    response = server.http.get("/tokenizer_info")
    found = response.json()
    wire.TokenizerInfo.model_validate(found, strict=True)
    assert found["chat_template"] == tokenizer.chat_template and found["vocab_size"] == len(tokenizer)
    assert found["eos_token"] == tokenizer.eos_token and found["tokenizer_class"] == type(tokenizer).__name__
    index = tokenizer.convert_tokens_to_ids("<|im_end|>")
    token = found["added_tokens_decoder"][str(index)]
    assert token["content"] == "<|im_end|>" and token["special"] is True
    assert str(tiny_model) not in response.text


def test_load_counts_the_requests_in_progress(guarded):
    assert guarded.http.get("/load").json() == {"server_load": 0}
    body = {"prompt": "red", "n": 2, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(base_url=guarded.url, timeout=PATIENCE) as other,
        other.stream("POST", "/v1/completions", json=body, **bearer("api")) as response,
    ):
        next(response.iter_lines())
        assert guarded.http.get("/load").json() == {"server_load": 1}
    guarded.wait(lambda: guarded.http.get("/load").json() == {"server_load": 0}, "the end of the request")


def test_health_generate_generates_one_token_for_all_probes_of_a_second(guarded, monkeypatch):
    def generated():
        return guarded.service.client.stats().generation_tokens

    guarded.wait_idle()
    time.sleep(1.1)  # an earlier success is no longer valid
    monkeypatch.setattr(generation_probe, "FRESH_SECONDS", PATIENCE)  # the next one stays valid on a busy machine
    monkeypatch.setattr(generation_probe, "PROBE_SECONDS", PATIENCE)
    before = generated()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: httpx.get(guarded.url + "/health_generate"), range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    guarded.wait(lambda: generated() == before + 1, "a token")
    assert guarded.http.get("/health_generate").json() == {"status": "ok"}
    guarded.wait_idle()
    assert generated() == before + 1


def test_health_generate_fails_while_the_server_does_not_serve(start_server):
    server = start_server(wait_ready=False)
    while (response := server.http.get("/health_generate")).status_code == 503:
        assert response.json()["error"]["code"] == "loading"
    assert response.status_code == 200
    server.service.draining = True
    assert server.http.get("/health_generate").json()["error"]["code"] == "draining"


def test_server_info_needs_the_admin_key(guarded, server):
    assert guarded.http.get("/server_info").status_code == 401
    assert guarded.http.get("/server_info", **bearer("api")).status_code == 401
    assert server.http.get("/server_info").json()["error"]["code"] == "admin_disabled"


def test_server_info_has_the_names_of_vllm_and_sglang(guarded, tiny_model, monkeypatch):
    monkeypatch.setenv("ENCORE_API_KEYS", "a-secret")
    monkeypatch.setenv("ENCORE_PORT", "8000")
    response = guarded.http.get("/server_info", params={"config_format": "json"}, **bearer("admin"))
    found = response.json()
    wire.ServerInfo.model_validate(found, strict=True)
    config = found["vllm_config"]
    assert config["model_config"]["dtype"] == found["dtype"] == "float32"
    assert config["model_config"]["max_model_len"] == found["context_length"] == 4096
    assert config["scheduler_config"]["max_num_seqs"] == found["max_running_requests"] == 8
    cache = config["cache_config"]
    assert found["max_total_num_tokens"] == cache["block_size"] * cache["num_gpu_blocks"] > 0
    assert cache["enable_prefix_caching"] is True and config["scheduler_config"]["async_scheduling"] is False
    assert config["weight_transfer_config"] is None
    assert found["model_path"] == str(tiny_model) and found["served_model_name"] == "tiny"
    assert found["vllm_env"]["ENCORE_PORT"] == "8000" and "a-secret" not in response.text
    assert found["internal_states"][0]["num_waiting_reqs"] == 0
    as_text = guarded.http.get("/server_info", **bearer("admin")).json()["vllm_config"]
    assert json.loads(as_text)["model_config"] == config["model_config"]
    wrong = guarded.http.get("/server_info", params={"config_format": "yaml"}, **bearer("admin"))
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "config_format"


@pytest.mark.parametrize(("path", "status"), [("/load", 200), ("/health_generate", 200), ("/tokenizer_info", 401)])
def test_which_routes_need_a_key(guarded, path, status):
    assert guarded.http.get(path).status_code == status
    assert guarded.http.get(path, **bearer("api")).status_code == 200

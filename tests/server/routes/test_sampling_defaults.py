"""Sampling parameters of the model's generation_config.json, for fields that a request leaves out."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests.server.conftest import running, tiny_config

GREEDY = {"temperature": 0}
PROMPT = {"prompt": "red bird", "max_tokens": 12, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "red bird"}], "max_tokens": 12, "ignore_eos": True}
# Every token but the most likely one is cut off: the answer is greedy at any temperature above 0.
FILE = {"temperature": 0.6, "top_k": 1, "repetition_penalty": 1.3, "max_new_tokens": 7, "typical_p": 0.9}
APPLIED = {"temperature": 0.6, "top_k": 1, "repetition_penalty": 1.3, "max_tokens": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("recommended")
    (found / "generation_config.json").write_text(json.dumps(FILE))
    return found


@pytest.fixture(scope="module")
def recommended(tiny_model, folder):
    """A server whose model recommends sampling parameters."""
    (folder / "admin").write_text("admin")
    config = tiny_config(tiny_model, generation_config=str(folder), admin_key_file=str(folder / "admin"))
    with running(config) as handle:
        yield handle


def texts(server, own):
    """Return the text of each inference route, with further fields of the request."""
    chat = server.answer("/v1/chat/completions", CHAT | own)["choices"][0]["message"]["content"]
    message = server.answer("/v1/messages", {**CHAT, "model": "tiny", **own})["content"][0]["text"]
    body = {"input": "red bird", "max_output_tokens": 12, "ignore_eos": True, **own}
    response = server.answer("/v1/responses", body)["output"][0]["content"][0]["text"]
    completion = server.answer("/v1/completions", PROMPT | own)["choices"][0]["text"]
    sampling = {"max_new_tokens": 12, "ignore_eos": True, **own}
    generated = server.answer("/generate", {"text": "red bird", "sampling_params": sampling})["text"]
    return [chat, message, response, completion, generated]


def test_every_route_takes_what_a_request_leaves_out(recommended, server):
    wanted = texts(server, GREEDY | {"repetition_penalty": 1.3})
    assert texts(recommended, {}) == wanted
    assert texts(recommended, {"temperature": None, "top_k": None, "repetition_penalty": None}) == wanted


def test_a_requests_own_values_come_first(recommended, server):
    own = {"top_k": 20, "temperature": 1.5, "repetition_penalty": 1, "seed": 7}
    assert texts(recommended, own) == texts(server, own)
    assert texts(recommended, {"repetition_penalty": 1}) == texts(server, GREEDY)


def test_max_new_tokens_limits_requests_without_a_limit(recommended):
    chat = {"messages": CHAT["messages"], "ignore_eos": True}
    assert recommended.answer("/v1/chat/completions", chat)["usage"]["completion_tokens"] == 7
    assert recommended.answer("/v1/chat/completions", chat | {"min_tokens": 9})["usage"]["completion_tokens"] == 9
    assert recommended.answer("/v1/chat/completions", CHAT)["usage"]["completion_tokens"] == 12
    free = {"input": "red bird", "ignore_eos": True}
    assert recommended.answer("/v1/responses", free)["usage"]["output_tokens"] == 7
    long = [1] * 253  # the context of 256 has room for 3 more
    body = {"input_ids": long, "sampling_params": {"max_new_tokens": None, "ignore_eos": True}}
    assert recommended.answer("/generate", body)["meta_info"]["completion_tokens"] == 3
    body = {"prompt": "red", "max_tokens": None, "ignore_eos": True}
    assert recommended.answer("/v1/completions", body)["usage"]["completion_tokens"] == 16


def shown(server):
    return server.http.get("/v1/models").json()["data"][0]["sampling_defaults"]


def test_the_values_are_shown(recommended, server):
    assert shown(recommended) == APPLIED
    info = recommended.http.get("/server_info?config_format=json", headers={"Authorization": "Bearer admin"}).json()
    assert info["sampling_defaults"] == APPLIED == info["vllm_config"]["model_config"]["default_sampling_params"]
    answer = recommended.answer("/v1/responses", {"input": "red", "max_output_tokens": 1})
    assert answer["temperature"] == 0.6 and answer["top_p"] == 1.0
    assert shown(server) == {}


@pytest.fixture
def model_with(tiny_model, tmp_path):
    """Return a function that makes the tiny model with a generation_config.json."""

    def make(values):
        for file in tiny_model.iterdir():
            (tmp_path / file.name).unlink(missing_ok=True)
            (tmp_path / file.name).symlink_to(file)
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        return tmp_path

    return make


def test_the_models_own_file_applies_and_can_be_turned_off(model_with, start_server, caplog):
    model = str(model_with({"do_sample": False, "temperature": 0.7, "top_p": None}))
    with caplog.at_level(logging.INFO, "engine"):
        defaults = shown(start_server(model=model))
    assert defaults == {"temperature": 0.0}
    assert f"requests sample with temperature=0.0 unless they say otherwise, from {model}" in caplog.text
    plain = start_server(model=model, generation_config="engine")
    assert shown(plain) == {}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"top_p": 7}, "generation_config.json: top_p must be a number above 0 up to 1; found 7 (int); correct it, or"),
        ({"temperature": "0.7"}, "temperature must be a number from 0 to 100; found '0.7' (str)"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer"),
        ({"do_sample": "no"}, "do_sample must be true or false; found 'no'"),
    ],
)
def test_an_invalid_value_stops_the_start(model_with, start_server, values, words):
    server = start_server(wait_ready=False, model=str(model_with(values)))
    server.wait(lambda: server.service.startup_error is not None, "the refusal")
    assert words in str(server.service.startup_error)


def test_a_folder_without_the_file_stops_the_start(start_server, tmp_path):
    server = start_server(wait_ready=False, generation_config=str(tmp_path))
    server.wait(lambda: server.service.startup_error is not None, "the refusal")
    assert f"generation_config='{tmp_path}': there is no file" in str(server.service.startup_error)

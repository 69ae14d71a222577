"""Routed experts of POST /inference/v1/generate, in the form that verifiers and prime-rl read."""

from __future__ import annotations

import binascii

import numpy as np
import pytest

from server.schemas import answers as wire
from tests.engine.core.test_routed_experts import Routers
from tests.server.conftest import running, tiny_config
from tests.server.http.test_bodies import error_of
from tests.server.routes.test_token_generate import IDS, ROUTE, body
from tests.support.families import tiny_folder


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    return tiny_folder("qwen3_moe", tmp_path_factory.mktemp("moe") / "model", tiny_model, initializer_range=0.2)


@pytest.fixture(scope="module")
def server_of_experts(folder):
    settings = {"enable_return_routed_experts": True, "cpu_weight_format": "fp32", "in_process": False}
    with running(tiny_config(folder, **settings)) as handle:
        yield handle


def decoded(payload):
    """Decode as verifiers does."""
    raw = binascii.a2b_base64(payload["data"])
    return np.frombuffer(raw, np.dtype(payload.get("dtype", "uint8"))).reshape(payload["shape"])


def test_the_experts_equal_transformers(server_of_experts, folder):
    answer = server_of_experts.answer(ROUTE, body(n=2, temperature=1.0))  # vLLM's clients don't ask for them
    wire.TokenGenerated.model_validate(answer, strict=True)
    routers = Routers(folder)
    for choice in answer["choices"]:
        found = choice["routed_experts"]
        assert (found["dtype"], found["start"], list(found)[0]) == ("uint8", 0, "data")
        np.testing.assert_array_equal(np.sort(decoded(found)), routers([*IDS, *choice["token_ids"]][:-1]))


@pytest.mark.parametrize("where", ["sampling_params", "body"])
def test_leading_prompt_tokens_may_be_left_out(server_of_experts, where):
    whole = server_of_experts.answer(ROUTE, body())["choices"][0]["routed_experts"]
    asked = {"routed_experts_prompt_start": 3, "return_routed_experts": True}
    sent = body(**asked) if where == "sampling_params" else body() | asked
    part = server_of_experts.answer(ROUTE, sent)["choices"][0]["routed_experts"]
    assert part["start"] == 3
    np.testing.assert_array_equal(decoded(part), decoded(whole)[3:])


def test_they_are_left_out_of_streams_and_where_they_are_not_wanted(server_of_experts):
    refusing = body(return_routed_experts=False)
    assert "routed_experts" not in server_of_experts.answer(ROUTE, refusing)["choices"][0]
    events = server_of_experts.events(ROUTE, body(stream=True))
    assert events and all("routed_experts" not in one["choices"][0] for one in events)


@pytest.mark.parametrize(
    ("sent", "param", "said"),
    [
        (body(stream=True, return_routed_experts=True), "return_routed_experts", "not available with stream=true"),
        (body(return_routed_experts="yes"), "return_routed_experts", "true or false"),
        (body(routed_experts_prompt_start=4), "routed_experts_prompt_start", "below the 4 tokens"),
        (body(routed_experts_prompt_start=-1), "routed_experts_prompt_start", "below the 4 tokens"),
        (body(routed_experts_prompt_start=True), "routed_experts_prompt_start", "below the 4 tokens"),
    ],
)
def test_what_cannot_be_returned_is_refused(server_of_experts, sent, param, said):
    error = error_of(server_of_experts.post(ROUTE, sent), 400)
    assert error["param"] == param and said in error["message"], error


def test_a_server_that_records_none_refuses_the_request(server):
    error = error_of(server.post(ROUTE, body(return_routed_experts=True)), 400)
    assert error["param"] == "return_routed_experts" and "--enable-return-routed-experts" in error["message"]

"""POST /inference/v1/generate: token ids in, token ids out, in the format that vLLM's clients read."""

from __future__ import annotations

import math

import pytest

from server.schemas import answers as wire
from tests.server.conftest import running, tiny_config
from tests.server.http.test_bodies import error_of

ROUTE = "/inference/v1/generate"
IDS = [40, 41, 42, 43]
GREEDY = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}


def body(stream=False, **params):
    return {"token_ids": IDS, "sampling_params": GREEDY | params, "stream": stream}


def test_the_answer_has_token_ids_logprobs_and_weight_versions(server):
    answer = server.answer(ROUTE, {**body(logprobs=1), "request_id": "mine", "model": "tiny"})
    wire.TokenGenerated.model_validate(answer, strict=True)
    plain = {"prompt": IDS, **GREEDY, "logprobs": 1, "return_token_ids": True}
    [expected] = server.answer("/v1/completions", plain)["choices"]
    [choice] = answer["choices"]
    assert answer["request_id"] == "mine" and answer["prompt_logprobs"] is None
    assert choice["token_ids"] == expected["token_ids"] and choice["finish_reason"] == "length"
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{index}" for index in choice["token_ids"]]
    assert [one["logprob"] for one in content] == expected["logprobs"]["token_logprobs"]
    assert all(len(one["top_logprobs"]) == 1 and math.isfinite(one["logprob"]) for one in content)
    assert choice["weight_versions"] == [{"version": "initial", "start": 0, "end": 8}]
    assert answer["usage"]["completion_tokens"] == 8


def test_all_of_n_sequences_are_returned_with_the_prompts_logprobs(server):
    """The body that SkyRL sends for samples."""
    params = {"n": 3, "logprobs": 0, "output_kind": 2, "prompt_logprobs": 2, "temperature": 1.0, "seed": 5}
    answer = server.answer(ROUTE, body(**params) | {"return_token_ids": True})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) > 1
    assert answer["prompt_logprobs"][0] is None and answer["prompt_token_ids"] == IDS
    for token_id, found in zip(IDS[1:], answer["prompt_logprobs"][1:], strict=True):
        assert found[str(token_id)]["logprob"] < 0 and 2 <= len(found) <= 3
    for choice in answer["choices"]:
        assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert [one["top_logprobs"][0]["token"] for one in choice["logprobs"]["content"]]


CUT = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 3}


@pytest.mark.parametrize("where", ["sampling_params", "body"])
def test_the_ids_and_the_mass_that_sampling_kept_are_returned(server, where):
    asked = {"return_sampling_mask": True}
    sent = body(**CUT, **asked) if where == "sampling_params" else body(**CUT) | asked
    answer = server.answer(ROUTE, sent)
    wire.TokenGenerated.model_validate(answer, strict=True)
    [choice] = answer["choices"]
    assert len(choice["sampling_mask"]) == len(choice["kept_mass"]) == len(choice["token_ids"]) == 8
    whole = server.answer(ROUTE, body(**CUT, logprobs=60))["choices"][0]  # ids that were cut off have no logprob
    assert whole["token_ids"] == choice["token_ids"]
    for mask, mass, token, score in zip(
        choice["sampling_mask"], choice["kept_mass"], choice["token_ids"], whole["logprobs"]["content"], strict=True
    ):
        assert token in mask and len(set(mask)) == len(mask) <= 40 and -4 < mass < 0
        assert {f"token_id:{one}" for one in mask} == {top["token"] for top in score["top_logprobs"]}
    chunks = list(server.events(ROUTE, body(stream=True, **CUT, **asked)))
    assert [one for chunk in chunks for one in chunk["choices"][0]["sampling_mask"]] == choice["sampling_mask"]
    assert [one for chunk in chunks for one in chunk["choices"][0]["kept_mass"]] == choice["kept_mass"]


def test_without_a_cut_the_mask_is_null_and_the_mass_is_0(server):
    for params in ({"temperature": 1.0, "seed": 3}, {"temperature": 0.0}):
        [choice] = server.answer(ROUTE, body(**params, return_sampling_mask=True))["choices"]
        assert choice["sampling_mask"] is None and choice["kept_mass"] == [0.0] * 8
    [choice] = server.answer(ROUTE, body(**CUT, return_kept_mass=True))["choices"]
    assert "sampling_mask" not in choice and len(choice["kept_mass"]) == 8
    assert "kept_mass" not in server.answer(ROUTE, body(**CUT, logprobs=0))["choices"][0]


@pytest.mark.parametrize("options", [{}, {"n": 2, "temperature": 1.0, "seed": 3}, {"logprobs": 2}])
def test_a_stream_has_the_tokens_of_the_whole_answer(server, options):
    whole = server.answer(ROUTE, body(**options))
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last = server.events(ROUTE, body(stream=True, **options) | usage)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 8 * options.get("n", 1)
    for choice in whole["choices"]:
        own = [one["choices"][0] for one in chunks if one["choices"][0]["index"] == choice["index"]]
        assert [token for one in own for token in one["token_ids"]] == choice["token_ids"]
        assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + ["length"]
        assert [one["weight_versions"] for one in own] == [None] * (len(own) - 1) + [choice["weight_versions"]]
        if choice["logprobs"]:
            assert [one for part in own for one in part["logprobs"]["content"]] == choice["logprobs"]["content"]


def test_the_models_sampling_defaults_do_not_apply(tiny_model, tmp_path):
    """As in vLLM: parameters that are left out are neutral, so that log-probabilities are the model's."""
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.01, "top_k": 1, "do_sample": true}')
    with running(tiny_config(tiny_model, generation_config=str(tmp_path))) as server:
        texts = {
            path: {
                tuple(server.answer(path, request | {"seed": seed} if path != ROUTE else request(seed))["choices"][0][
                    "token_ids"
                ])
                for seed in range(4)
            }
            for path, request in (
                ("/v1/completions", {"prompt": IDS, "max_tokens": 8, "return_token_ids": True}),
                (ROUTE, lambda seed: {"token_ids": IDS, "sampling_params": {"max_tokens": 8, "seed": seed}}),
            )
        }  # fmt: skip
        assert len(texts["/v1/completions"]) == 1 and len(texts[ROUTE]) > 1


def test_without_max_tokens_the_context_limits_the_output(server):
    answer = server.answer(ROUTE, {"token_ids": IDS, "sampling_params": {"temperature": 0, "ignore_eos": True}})
    assert len(answer["choices"][0]["token_ids"]) == 256 - len(IDS)


def test_stop_strings_and_stop_tokens_end_the_output(server):
    ids = server.answer(ROUTE, body())["choices"][0]["token_ids"]
    stopped = server.answer(ROUTE, body(stop_token_ids=[ids[3]], detokenize=False))["choices"][0]
    assert stopped["finish_reason"] == "stop" and stopped["token_ids"] == ids[: ids.index(ids[3]) + 1]
    text = server.service.client.tokenizer.decode(ids)
    stopped = server.answer(ROUTE, body(stop=text[2:5], skip_special_tokens=False))["choices"][0]
    assert stopped["finish_reason"] == "stop" and 1 <= len(stopped["token_ids"]) < 8


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"token_ids": "red"}, "token_ids", "must be a list of token ids"),
        ({"token_ids": [1, "b"]}, "token_ids", "must be a list of token ids"),
        ({"token_ids": []}, "token_ids", "empty"),
        ({"token_ids": [10**6]}, "token_ids", "ids from 0 to"),
        ({"sampling_params": [1]}, "sampling_params", "object"),
        ({"sampling_params": {"temprature": 1}}, "temprature", "did you mean 'temperature'"),
        ({"sampling_params": {"max_tokens": -1}}, "max_tokens", "max_tokens must be"),
        ({"sampling_params": {"max_tokens": 10**6}}, "max_tokens", "context"),
        ({"sampling_params": {"return_sampling_mask": "yes"}}, "return_sampling_mask", "true or false"),
        ({"return_sampling_mask": 2}, "return_sampling_mask", "boolean"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, "extra_args", "plug-ins"),
        ({"features": {"mm_hashes": {}}}, "features", "not supported"),
        ({"output_mode": "text"}, "output_mode", "return_token_ids"),
        ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs", "stream"),
        ({"prompt": "red"}, "prompt", "not a known field"),
        ({"request_id": "x" * 200}, "request_id", "128"),
    ],
)
def test_an_invalid_body_is_refused_by_name(server, change, param, said):
    error = error_of(server.post(ROUTE, body() | change), 400)
    assert error["param"] == param and said in error["message"], error


@pytest.mark.parametrize(
    "params",
    [
        {"detokenize": False}, {"output_kind": 0}, {"output_kind": 1}, {"extra_args": None}, {"extra_args": {}},
        {"return_sampling_mask": False}, {"return_routed_experts": False}, {"routed_experts_prompt_start": 3},
        {"spaces_between_special_tokens": True},
        {"seed": None, "stop": None, "top_k": -1, "logit_bias": None},
    ],
)  # fmt: skip
def test_fields_of_trainers_that_change_nothing_are_accepted(server, params):
    assert server.answer(ROUTE, body(**params))["choices"] == server.answer(ROUTE, body())["choices"]


# ---- token ids and weight versions on the other routes -------------------------------------------------------------

SPANS = [{"version": "initial", "start": 0, "end": 8}]
CHAT = {"messages": [{"role": "user", "content": "red bird"}], **GREEDY}
COMPLETION = {"prompt": "red bird", **GREEDY}


@pytest.mark.parametrize(("path", "request_body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_completions_and_chats_have_weight_versions_on_request_and_with_token_ids(server, path, request_body):
    def found(**fields):
        whole = server.answer(path, request_body | fields)["choices"][0]
        chunks = server.events(path, request_body | fields | {"stream": True})
        streamed = [one["choices"][0]["weight_versions"] for one in chunks if "weight_versions" in one["choices"][0]]
        assert streamed == ([whole["weight_versions"]] if "weight_versions" in whole else [])
        return whole.get("weight_versions")

    assert found() is None
    assert found(return_weight_versions=True) == found(return_token_ids=True) == SPANS
    assert found(return_token_ids=True, return_weight_versions=False) is None


def test_generate_has_weight_versions(server):
    answer = server.answer("/generate", {"input_ids": IDS, "sampling_params": GREEDY})
    assert answer["meta_info"]["weight_versions"] == SPANS


def test_a_server_may_send_token_ids_to_every_client(start_server):
    server = start_server(return_token_ids=True, return_tokens_as_token_ids=True)
    for path, request_body in (("/v1/completions", COMPLETION | {"logprobs": 1}), ("/v1/chat/completions", CHAT)):
        choice = server.answer(path, request_body)["choices"][0]
        assert len(choice["token_ids"]) == 8 and choice["weight_versions"] == SPANS
        assert "token_ids" not in server.answer(path, request_body | {"return_token_ids": False})["choices"][0]

"""return_hidden_states of POST /generate: SGLang's format, sizes that are bounded, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from server.http.json_text import encoded
from tests.server.conftest import running, tiny_config
from tests.server.http.test_request_sizes import MAX_TURN_SECONDS, LongestTurn
from tests.support.waiting import PATIENCE

PROMPT = "the quick brown fox"
SAMPLING = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_model):
    settings = {"enable_return_hidden_states": True, "max_model_len": 4096, "in_process": False}
    with running(tiny_config(tiny_model, **settings)) as handle:
        yield handle


@pytest.fixture(scope="module")
def reference(tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def hidden(ids):
        return model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0].numpy()

    return hidden


def body(text=PROMPT, **options):
    return {"text": text, "sampling_params": SAMPLING, "return_hidden_states": True, **options}


def ids_of(server, text=PROMPT):
    return server.service.client.tokenizer.encode(text)


def assert_hidden(answer, ids, reference):
    """SGLang: one list of the prompt's vectors, then a vector for each generated token but the last."""
    prompt, *rest = answer["meta_info"]["hidden_states"]
    assert len(prompt) == len(ids) and len(rest) == len(answer["output_ids"]) - 1
    np.testing.assert_allclose(np.array([*prompt, *rest]), reference([*ids, *answer["output_ids"]][:-1]), atol=2e-4)


def test_an_answer_has_the_vectors_of_prompt_and_output(server, reference):
    assert_hidden(server.answer("/generate", body()), ids_of(server), reference)


def test_a_stream_has_them_in_its_last_event(server, reference):
    many = SAMPLING | {"max_new_tokens": 200}  # a busy machine sends a few tokens in one event
    *events, last = server.events("/generate", body(stream=True, sampling_params=many))
    assert events and all("hidden_states" not in event["meta_info"] for event in events)
    assert_hidden(last, ids_of(server), reference)


def test_each_prompt_may_ask_for_them(server, reference):
    texts = [PROMPT, "red bird", "blue"]
    answers = server.answer("/generate", body(texts, return_hidden_states=[True, False, True]))
    assert ["hidden_states" in answer["meta_info"] for answer in answers] == [True, False, True]
    assert_hidden(answers[0], ids_of(server), reference)
    assert_hidden(answers[2], ids_of(server, "blue"), reference)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_megabytes_does_not_stall_others(server, stream):
    text = "red fox " * 400
    with LongestTurn(server) as longest:
        response = server.post("/generate", body([text] * 3, stream=stream), timeout=PATIENCE)
    assert response.status_code == 200 and len(response.content) > 3_000_000
    assert longest.seconds < MAX_TURN_SECONDS
    server.wait_idle()


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("yes", "Input should be a valid boolean, or a list with one per prompt"),
        ([True, False], "return_hidden_states has 2 entries for 1 prompts"),
    ],
)
def test_a_wrong_value_names_the_field(server, wanted, said):
    assert "hidden_states" not in server.answer("/generate", body(return_hidden_states=None))["meta_info"]
    response = server.post("/generate", body(return_hidden_states=wanted))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "return_hidden_states" and said in error["message"]


@pytest.mark.parametrize(
    "options", [{}, {"text": ["red", PROMPT], "return_hidden_states": [False, True], "stream": True}]
)
def test_a_server_that_keeps_none_refuses_them(start_server, options):
    server = start_server()
    response = server.post("/generate", body(**options))
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "return_hidden_states"
    assert "--enable-return-hidden-states" in error["message"]
    assert "hidden_states" not in server.answer("/generate", body(return_hidden_states=False))["meta_info"]


def test_too_many_values_are_refused(server):
    asked = {"sampling_params": SAMPLING | {"max_new_tokens": 4000, "n": 17}}
    error = server.post("/generate", body(**asked)).json()["error"]
    assert error["param"] == "return_hidden_states" and "17 sequences of" in error["message"]
    within = {"sampling_params": SAMPLING | {"return_hidden_states": True}}
    error = server.post("/generate", body(**within)).json()["error"]
    assert "give it beside sampling_params" in error["message"]


def test_what_nobody_reads_counts_too(start_server):
    """Prompts of further sequences arrive while the first event is being written."""
    server = start_server(enable_return_hidden_states=True, max_total_logprob_bytes=2_000_000, max_model_len=4096)
    asked = {"sampling_params": SAMPLING | {"n": 8, "max_new_tokens": 1}, "stream": True}
    response = server.post("/generate", body("red fox " * 100, **asked))
    assert "hidden states of all running requests" in response.text
    server.wait(lambda: server.service.admission.outputs.used == 0, "the release")


def test_the_request_with_most_hidden_states_gives_way(start_server):
    server = start_server(enable_return_hidden_states=True, max_total_logprob_bytes=500_000, max_model_len=4096)
    response = server.post("/generate", body("red fox " * 400))
    assert response.status_code == 503 and "hidden states" in response.json()["error"]["message"]
    server.wait(lambda: server.service.admission.outputs.used == 0, "the release")
    assert server.post("/generate", body()).status_code == 200


def test_arrays_as_json():
    rows = np.array([[0.5, -1.0], [math.nan, math.inf]], np.float32)
    assert encoded({"a": [rows, rows[0], rows[1]]}).text == b'{"a":[[[0.5,-1.0],[null,null]],[0.5,-1.0],[null,null]]}'
    assert encoded([rows[0]] * 65).text == b"[" + b",".join([b"[0.5,-1.0]"] * 65) + b"]"
    assert encoded(rows[:0]).text == b"[]"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_openai_choices_have_the_vector_of_the_last_token(server, reference, path):
    messages = [{"role": "user", "content": PROMPT}]
    prompt = {"prompt": PROMPT} if path.endswith("v1/completions") else {"messages": messages}
    asked = prompt | {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "n": 2, "return_token_ids": True}
    answer = server.answer(path, asked | {"return_hidden_states": True})
    for choice in answer["choices"]:
        ids = choice.get("prompt_token_ids") or answer["prompt_token_ids"]
        expected = reference([*ids, *choice["token_ids"]][:-1])[-1]
        np.testing.assert_allclose(np.array(choice["hidden_states"]), expected, atol=2e-4)
    assert "hidden_states" not in server.answer(path, asked)["choices"][0]
    refused = server.post(path, asked | {"return_hidden_states": True, "stream": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "return_hidden_states"

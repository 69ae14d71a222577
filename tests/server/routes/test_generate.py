"""POST /generate: SGLang's format, streaming and not."""

from __future__ import annotations

import json

import pytest

PROMPT = "the quick brown fox"


def generate(server, text=PROMPT, stream=False, **options):
    sampling = {"max_new_tokens": 12, "temperature": 0} | options.pop("sampling", {})
    body = {"text": text, "sampling_params": sampling, "stream": stream, **options}
    return server.events("/generate", body) if stream else server.answer("/generate", body)


def test_answer_has_text_ids_and_meta_info(server):
    answer = generate(server, rid="mine")
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert len(answer["output_ids"]) == 12
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert meta["completion_tokens"] == 12
    assert meta["prompt_tokens"] == len(server.service.client.tokenizer.encode(PROMPT))
    assert meta["weight_version"]
    assert answer["text"] == server.service.client.tokenizer.decode(answer["output_ids"])


def test_input_ids_answer_as_their_text_does(server):
    ids = server.service.client.tokenizer.encode(PROMPT)
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
    assert server.answer("/generate", body)["output_ids"] == generate(server)["output_ids"]


def test_a_list_is_answered_with_a_list_in_order(server):
    one, other = generate(server, "red bird"), generate(server, "blue house")
    both = generate(server, ["red bird", "blue house"])
    assert [answer["output_ids"] for answer in both] == [one["output_ids"], other["output_ids"]]
    assert both[0]["meta_info"]["id"] != both[1]["meta_info"]["id"]
    assert isinstance(generate(server, ["red bird"]), list)


def test_each_prompt_of_a_list_takes_its_own_sampling_params(server):
    params = [{"max_new_tokens": count, "ignore_eos": True} for count in (2, 5)]
    body = {"text": ["red", "blue"], "sampling_params": params}
    assert [len(answer["output_ids"]) for answer in server.answer("/generate", body)] == [2, 5]


def test_n_above_one_is_answered_with_a_list(server):
    answers = generate(server, sampling={"n": 3, "temperature": 1.0, "sampling_seed": 5})
    assert len(answers) == 3
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1


def test_a_seed_makes_sampling_repeatable(server):
    options = {"sampling": {"temperature": 1.0, "sampling_seed": 7}}
    assert generate(server, **options)["output_ids"] == generate(server, **options)["output_ids"]


def test_stream_is_cumulative_and_ends_with_the_full_response(server):
    whole = generate(server)
    # A loaded server may send many tokens in one chunk; one that always does is broken.
    chunks = next(chunks for _ in range(20) if len(chunks := generate(server, stream=True)) > 1)
    for before, after in zip(chunks, chunks[1:], strict=False):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


def test_stream_of_a_list_numbers_its_chunks(server):
    chunks = generate(server, ["red bird", "blue house"], stream=True)
    last = {chunk["index"]: chunk["output_ids"] for chunk in chunks}
    assert last == {
        0: generate(server, "red bird")["output_ids"],
        1: generate(server, "blue house")["output_ids"],
    }


def test_stop_string_ends_the_text_before_it(server):
    text = generate(server, sampling={"max_new_tokens": 40})["text"]
    stop = text[10:14]
    answer = generate(server, sampling={"max_new_tokens": 40, "stop": [stop]})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == text[: text.index(stop)]
    kept = generate(server, sampling={"max_new_tokens": 40, "stop": stop, "no_stop_trim": True})
    assert kept["text"] == text[: text.index(stop)] + stop


def test_stop_token_id_is_named_in_the_finish_reason(server):
    ids = generate(server)["output_ids"]
    answer = generate(server, sampling={"stop_token_ids": [ids[4]]})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[4]}
    assert answer["output_ids"] == ids[: ids.index(ids[4]) + 1]


def test_logprobs_of_output_and_prompt(server):
    answer = generate(
        server, return_logprob=True, top_logprobs_num=2, logprob_start_len=0, return_text_in_logprobs=True
    )
    meta = answer["meta_info"]
    triples = meta["output_token_logprobs"]
    assert [token for _, token, _ in triples] == answer["output_ids"]
    assert all(logprob <= 0 for logprob, _, _ in triples)
    # Greedy: the sampled token is the most likely one and therefore the first alternative.
    assert [max(top)[1] for top in meta["output_top_logprobs"]] == answer["output_ids"]
    prompt = meta["input_token_logprobs"]
    assert [token for _, token, _ in prompt] == server.service.client.tokenizer.encode(PROMPT)
    assert prompt[0][0] is None and all(logprob <= 0 for logprob, _, _ in prompt[1:])
    assert "".join(text for _, _, text in prompt) == PROMPT
    later = generate(server, return_logprob=True, logprob_start_len=3)["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in later] == [token for _, token, _ in prompt[3:]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": "a", "sampling_params": {"logprobs": 2}}, "logprobs"),
        ({"text": "a", "return_logprob": True, "sampling_params": {"prompt_logprobs": 2}}, "prompt_logprobs"),
        ({"text": "a", "sampling_params": {"logprob_token_ids": [1]}}, "logprob_token_ids"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", ""]}, "text"),
        ({"text": 5}, "text"),
        ({"text": "a\ud800"}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": [1, "2"]}, "input_ids"),
        ({"input_ids": [1, True]}, "input_ids"),
        ({"input_ids": [1, -2]}, "input_ids"),
        ({"input_ids": [320]}, "input_ids"),
        ({"input_ids": [10**50]}, "input_ids"),
        ({"input_ids": [1] * 300}, "input_ids"),
        ({"text": "fox " * 3000}, "text"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 256}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 2**70}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"text": "a", "sampling_params": {"top_p": 10**400}}, "top_p"),
        ({"text": "a", "sampling_params": {"n": 1000000}}, "n"),
        ({"text": "a", "sampling_params": {"n": 100}}, "n"),
        ({"text": "a", "sampling_params": {"stop": [""]}}, "stop"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids"),
        ({"text": "a", "sampling_params": {"logit_bias": {"4000": 1.0}}}, "logit_bias"),
        ({"text": "a", "sampling_params": {"temperatur": 0.5}}, "temperatur"),
        ({"text": "a", "sampling_params": {"regex": "a("}}, "regex"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "sampling_params": 3}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "rid": 7}, "rid"),
        ({"text": "a", "rid": "x" * 129}, "rid"),
        ({"text": ["a", "b"], "rid": ["x", "x" * 129]}, "rid"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "priority": 2**40}, "priority"),
    ],
)
def test_bad_body_is_a_400_that_names_the_field(server, body, param):
    for stream in (False, True):
        content = json.dumps({"stream": stream} | body)
        response = server.http.post("/generate", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param and error["message"]
    server.wait_idle()


def test_two_names_of_one_parameter_are_refused_together(server):
    body = {"text": PROMPT, "sampling_params": {"seed": 1, "sampling_seed": 2, "max_new_tokens": 2}}
    answer = server.post("/generate", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "sampling_seed"

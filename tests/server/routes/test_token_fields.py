"""Fields of vLLM and SGLang about tokens: ids in the answer, prompt logprobs, truncation, best_of, cache salts."""

from __future__ import annotations

import pytest

from server.schemas import answers as wire

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
TEXT = "the old king sleeps under the tree by the river and the queen sings to the moon and the stars"
GREEDY = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": TEXT}]


def test_token_ids_of_a_completion(server):
    body = {"prompt": ["red", TEXT], **GREEDY, "return_token_ids": True}
    answer = server.answer(COMPLETIONS, body)
    wire.Completion.model_validate(answer, strict=True)
    for choice, prompt in zip(answer["choices"], body["prompt"], strict=True):
        assert choice["prompt_token_ids"] == server.answer("/tokenize", {"prompt": prompt})["tokens"]
        assert server.answer("/detokenize", {"tokens": choice["token_ids"]})["prompt"] == choice["text"]
    found = {0: [], 1: []}
    chunks = server.events(COMPLETIONS, body | {"stream": True})
    for chunk in chunks:
        wire.Completion.model_validate(chunk, strict=True)
        found[chunk["choices"][0]["index"]] += chunk["choices"][0]["token_ids"]
    assert list(found.values()) == [choice["token_ids"] for choice in answer["choices"]]
    prompts = [c["choices"][0]["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c["choices"][0]]
    assert sorted(prompts) == sorted(choice["prompt_token_ids"] for choice in answer["choices"])


def test_token_ids_of_a_chat(server):
    body = {"messages": MESSAGES, **GREEDY, "n": 2, "return_token_ids": True}
    answer = server.answer(CHAT, body)
    wire.ChatCompletion.model_validate(answer, strict=True)
    assert answer["prompt_token_ids"] == server.answer("/tokenize", {"messages": MESSAGES})["tokens"]
    chunks = server.events(CHAT, body | {"stream": True})
    assert [chunk.get("prompt_token_ids") for chunk in chunks][:1] == [answer["prompt_token_ids"]]
    assert sum("prompt_token_ids" in chunk for chunk in chunks) == 1
    for index, choice in enumerate(answer["choices"]):
        streamed = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [i for one in streamed for i in one.get("token_ids", [])] == choice["token_ids"]
        assert len(choice["token_ids"]) == 5


def test_tokens_as_ids(server):
    body = {"prompt": TEXT, **GREEDY, "logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = server.answer(COMPLETIONS, body)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{index}" for index in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
    body = {"messages": MESSAGES, **GREEDY, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    content = server.answer(CHAT, body)["choices"][0]["logprobs"]["content"]
    assert all(one["token"].startswith("token_id:") for one in content)
    assert server.events(CHAT, body | {"stream": True})[1]["choices"][0]["logprobs"]["content"] == content[:1]


def test_named_tokens_stand_for_the_most_likely_ones(server):
    ids = [7, 40, 41]
    fields = {**GREEDY, "n": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    body = {"prompt": TEXT, **fields, "logprobs": 100}
    whole = server.answer(COMPLETIONS, body)["choices"][0]
    found = server.answer(COMPLETIONS, body | {"logprobs": 1, "logprob_token_ids": ids})["choices"]
    assert [one["token_ids"] for one in found] == [whole["token_ids"]] * 2
    for sampled, top, named in zip(
        whole["token_ids"], whole["logprobs"]["top_logprobs"], found[1]["logprobs"]["top_logprobs"], strict=True
    ):
        assert set(named) == {f"token_id:{i}" for i in (*ids, sampled)}
        both = [name for name in named if name in top]
        assert both and [named[name] for name in both] == pytest.approx([top[name] for name in both], abs=1e-4)
    streamed = server.events(COMPLETIONS, body | {"n": 1, "logprobs": 1, "logprob_token_ids": ids, "stream": True})
    chunks = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    tops = [one for chunk in chunks if chunk for one in chunk["top_logprobs"]]
    for one, other in zip(tops, found[0]["logprobs"]["top_logprobs"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)  # the second prompt is cached


def test_named_tokens_of_a_chat(server):
    ids = [7, 40, 41]
    body = {"messages": MESSAGES, **GREEDY, "logprobs": True, "return_tokens_as_token_ids": True}
    body |= {"logprob_token_ids": ids}
    answer = server.answer(CHAT, body)
    wire.ChatCompletion.model_validate(answer, strict=True)
    content = answer["choices"][0]["logprobs"]["content"]
    for one in content:
        named = [entry["token"] for entry in one["top_logprobs"]]
        assert named == list(dict.fromkeys([one["token"], *(f"token_id:{i}" for i in ids)]))
        assert one["top_logprobs"][0]["logprob"] == one["logprob"]
    chunks = [chunk["choices"][0].get("logprobs") for chunk in server.events(CHAT, body | {"stream": True})]
    streamed = [one["top_logprobs"] for chunk in chunks if chunk for one in chunk["content"]]
    for one, other in zip(streamed, content, strict=True):
        assert [entry["token"] for entry in one] == [entry["token"] for entry in other["top_logprobs"]]


def test_named_tokens_in_the_format_of_sglang(server):
    prompts, params = ["red bird", TEXT], {"max_new_tokens": 3, "temperature": 0, "n": 2}
    body = {"text": prompts, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
    shared = server.answer(GENERATE, body | {"token_ids_logprob": [40, 7]})
    own = server.answer(GENERATE, body | {"token_ids_logprob": [[40, 7], [5]]})
    for number, (one, other) in enumerate(zip(shared, own, strict=True)):
        wire.Generated.model_validate(one, strict=True)
        meta, theirs = one["meta_info"], other["meta_info"]
        assert len(meta["output_token_ids_logprobs"]) == 3
        assert all([triple[1] for triple in entry] == [40, 7] for entry in meta["output_token_ids_logprobs"])
        assert len(meta["input_token_ids_logprobs"]) == meta["prompt_tokens"]
        assert meta["input_token_ids_logprobs"][0] is None and "output_top_logprobs" not in meta
        expected = [40, 7] if number < 2 else [5]
        assert all([triple[1] for triple in entry] == expected for entry in theirs["output_token_ids_logprobs"])
    last = server.events(GENERATE, body | {"text": TEXT, "token_ids_logprob": [40, 7], "stream": True})[-1]
    for one, other in zip(
        last["meta_info"]["output_token_ids_logprobs"], shared[2]["meta_info"]["output_token_ids_logprobs"], strict=True
    ):
        assert [triple[0] for triple in one] == pytest.approx([triple[0] for triple in other], abs=1e-4)


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (COMPLETIONS, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (CHAT, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (COMPLETIONS, {"logprobs": 0, "logprob_token_ids": list(range(129))}, "logprob_token_ids"),
        (COMPLETIONS, {"logprobs": 0, "logprob_token_ids": [9999]}, "logprob_token_ids"),
        (CHAT, {"logprobs": True, "logprob_token_ids": [-1]}, "logprob_token_ids"),
        (GENERATE, {"token_ids_logprob": [1]}, "token_ids_logprob"),
        (GENERATE, {"return_logprob": True, "token_ids_logprob": [9999]}, "token_ids_logprob"),
        (GENERATE, {"return_logprob": True, "token_ids_logprob": list(range(129))}, "token_ids_logprob"),
        (GENERATE, {"return_logprob": True, "token_ids_logprob": [[1], [2]]}, "token_ids_logprob"),
        (GENERATE, {"return_logprob": True, "token_ids_logprob": ["1"]}, "token_ids_logprob"),
        (GENERATE, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (CHAT, {"token_ids_logprob": [1]}, "token_ids_logprob"),
    ],
)
def test_invalid_named_tokens_are_refused_by_name(server, route, fields, param):
    bodies = {COMPLETIONS: {"prompt": "red"}, CHAT: {"messages": MESSAGES}, GENERATE: {"text": "red"}}
    response = server.post(route, bodies[route] | fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_prompt_logprobs_agree_with_echo(server):
    body = {"prompt": TEXT, **GREEDY, "prompt_logprobs": 3}
    found = server.answer(COMPLETIONS, body)["choices"][0]["prompt_logprobs"]
    echoed = server.answer(COMPLETIONS, {"prompt": TEXT, **GREEDY, "echo": True, "logprobs": 1, "prompt_logprobs": 3})
    [both] = echoed["choices"]
    assert both["prompt_logprobs"] == found and found[0] is None
    ids = server.answer("/tokenize", {"prompt": TEXT})["tokens"]
    for index, entry, logprob in zip(ids[1:], found[1:], both["logprobs"]["token_logprobs"][1:], strict=False):
        assert entry[str(index)]["logprob"] == logprob
        assert 3 <= len(entry) <= 4 and {1, 2, 3} <= {one["rank"] for one in entry.values()}
    assert all(len(top) <= 2 for top in both["logprobs"]["top_logprobs"][1:])
    chat = server.answer(CHAT, {"messages": MESSAGES, **GREEDY, "prompt_logprobs": 0})
    wire.ChatCompletion.model_validate(chat, strict=True)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    response = server.post(COMPLETIONS, body | {"stream": True})
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt_logprobs"


def test_a_prompt_is_truncated(server):
    ids = server.answer("/tokenize", {"prompt": TEXT})["tokens"]

    def kept(**fields):
        body = {"prompt": TEXT, **GREEDY, "return_token_ids": True, **fields}
        return server.answer(COMPLETIONS, body)["choices"][0]["prompt_token_ids"]

    assert kept(truncate_prompt_tokens=4) == ids[-4:]
    assert kept(truncate_prompt_tokens=4, truncation_side="right") == ids[:4]
    assert kept(truncate_prompt_tokens=10_000) == kept(truncate_prompt_tokens=-1) == ids
    long = TEXT * 8
    assert server.post(COMPLETIONS, {"prompt": long, **GREEDY}).status_code == 400
    assert len(kept(prompt=long, truncate_prompt_tokens=-1)) == 256 - GREEDY["max_tokens"]
    echoed = server.answer(COMPLETIONS, {"prompt": TEXT, "max_tokens": 0, "echo": True, "truncate_prompt_tokens": 3})
    assert echoed["choices"][0]["text"] == server.answer("/detokenize", {"tokens": ids[-3:]})["prompt"]
    chat = {"messages": MESSAGES, **GREEDY, "truncate_prompt_tokens": 7}
    assert server.answer(CHAT, chat)["usage"]["prompt_tokens"] == 7


def test_best_of_returns_the_most_likely(server):
    body = {"prompt": TEXT, "max_tokens": 4, "seed": 5, "ignore_eos": True}
    every = server.answer(COMPLETIONS, body | {"n": 6, "logprobs": 0})["choices"]
    means = {one["text"]: sum(one["logprobs"]["token_logprobs"]) / 4 for one in every}
    best = server.answer(COMPLETIONS, body | {"n": 2, "best_of": 6})
    assert [one["text"] for one in best["choices"]] == sorted(means, key=means.get, reverse=True)[:2]
    assert best["usage"]["completion_tokens"] == 24 and best["choices"][0]["logprobs"] is None
    assert [one["index"] for one in best["choices"]] == [0, 1]


def test_a_salt_isolates_cached_prefixes(server):
    def cached(route, **fields):
        answer = server.answer(route, fields)
        if route == GENERATE:
            return answer["meta_info"]["cached_tokens"]
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    body = {"prompt": TEXT + " salted", **GREEDY}
    cached(COMPLETIONS, **body)
    assert cached(COMPLETIONS, **body) > 0
    assert cached(COMPLETIONS, **body, cache_salt="a") == 0
    assert cached(COMPLETIONS, **body, cache_salt="a") > 0
    assert cached(COMPLETIONS, **body, cache_salt="b") == 0
    assert cached(COMPLETIONS, **body, extra_key="b") > 0
    sglang = {"text": TEXT + " salted", "sampling_params": {"max_new_tokens": 2}}
    assert cached(GENERATE, **sglang, cache_salt="a") > 0
    assert cached(GENERATE, **sglang, cache_salt="a", extra_key="b") == 0


def test_no_stop_trim_keeps_the_stop_string(server):
    plain = {"prompt": TEXT, **GREEDY}
    text = server.answer(COMPLETIONS, plain)["choices"][0]["text"]
    stop = text[1:3]
    for value, shown in ((True, text[: text.index(stop) + 2]), (False, text[: text.index(stop)])):
        body = plain | {"stop": stop, "no_stop_trim": value}
        assert server.answer(COMPLETIONS, body)["choices"][0]["text"] == shown


@pytest.mark.parametrize(
    ("route", "fields", "param"),
    [
        (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of"),
        (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of"),
        (COMPLETIONS, {"best_of": 10**6}, "best_of"),
        (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETIONS, {"cache_salt": ""}, "cache_salt"),
        (COMPLETIONS, {"cache_salt": "x" * 2000}, "cache_salt"),
        (COMPLETIONS, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (COMPLETIONS, {"truncation_side": "left"}, "truncation_side"),
        (COMPLETIONS, {"truncate_prompt_tokens": 3, "truncation_side": "middle"}, "truncation_side"),
        (COMPLETIONS, {"no_stop_trim": True, "include_stop_str_in_output": False}, "no_stop_trim"),
        (GENERATE, {"cache_salt": 5}, "cache_salt"),
        (CHAT, {"return_token_ids": 1}, "return_token_ids"),
    ],
)
def test_invalid_values_are_named(server, route, fields, param):
    bodies = {COMPLETIONS: {"prompt": "red"}, CHAT: {"messages": MESSAGES}, GENERATE: {"text": "red"}}
    response = server.post(route, bodies[route] | {"max_tokens": 1} | fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_stats_count_the_tokens_of_each_graph_bucket(start_server, path):
    server = start_server(graph_buckets=(1, 4), warmup="full")
    prompt = {"prompt": [TEXT]} if path == COMPLETIONS else {"messages": MESSAGES}
    body = {**prompt, **GREEDY, "n": 2, "return_stats": True}
    whole = server.answer(path, body)["stats"]
    for options in ({}, {"stream_options": {"include_usage": True}}):
        *chunks, last = server.events(path, body | {"stream": True} | options)
        (wire.Completion if path == COMPLETIONS else wire.ChatChunk).model_validate(last, strict=True)
        assert last["choices"] == [] and ("usage" in last) == bool(options)
        assert not any("stats" in chunk for chunk in chunks)
        for stats in (whole, last["stats"]):
            assert sum(stats["graph_buckets"].values()) == 10
            assert stats["graph_buckets"]["4"] >= 6 and stats["graph_buckets"]["eager"] >= 1
            # The second sample waits in the queue for the first one's prompt, maybe beyond the first token.
            assert 0 <= stats["queue_seconds"] < 10 and 0 <= stats["first_token_seconds"] < 10
    assert "stats" not in server.answer(path, {**prompt, **GREEDY})


def test_only_allowed_tokens_are_sampled(server):
    body = {"max_tokens": 6, "ignore_eos": True, "allowed_token_ids": [40, 41]}
    ids = server.answer(COMPLETIONS, {"prompt": TEXT, "return_token_ids": True, **body})["choices"][0]["token_ids"]
    assert len(ids) == 6 and set(ids) <= {40, 41}
    chat = server.answer(CHAT, {"messages": MESSAGES, "return_token_ids": True, **body})["choices"][0]["token_ids"]
    assert set(chat) <= {40, 41}
    sglang = {"text": TEXT, "sampling_params": {"allowed_token_ids": [40], "max_new_tokens": 3, "ignore_eos": True}}
    assert server.answer(GENERATE, sglang)["output_ids"] == [40] * 3


def test_bad_words_are_not_generated(server):
    letters = [server.answer("/tokenize", {"prompt": letter})["tokens"][0] for letter in "abc"]
    body = {"prompt": TEXT, **GREEDY, "max_tokens": 12, "allowed_token_ids": letters}
    free = server.answer(COMPLETIONS, body)["choices"][0]["text"]
    banned = server.answer(COMPLETIONS, body | {"bad_words": [free[0]]})["choices"][0]["text"]
    assert free[0] not in banned and len(banned) == 12
    chat = {"messages": MESSAGES, **body, "bad_words": ["a", "b"]}
    chat.pop("prompt")
    assert server.answer(CHAT, chat)["choices"][0]["message"]["content"] == "c" * 12


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [9999]}, "allowed_token_ids"),
        ({"allowed_token_ids": [0], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": ["5"]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "red"}, "bad_words"),
    ],
)
def test_invalid_rules_about_tokens_are_named(server, fields, param):
    for route, body in ((COMPLETIONS, {"prompt": "red"}), (CHAT, {"messages": MESSAGES})):
        response = server.post(route, body | {"max_tokens": 3} | fields)
        assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text

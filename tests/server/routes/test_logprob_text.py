"""Logprobs tell of each token its bytes and its place in the text, also where a character has several tokens."""

from __future__ import annotations

import pytest

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PROMPT = "the 😀 é"
OUTPUT = "red 😀 e\u0301 👨‍👩‍👧 sun"
CHOICE = {"structured_outputs": {"choice": [OUTPUT]}, "max_tokens": 100, "temperature": 0}
MESSAGES = [{"role": "user", "content": PROMPT}]


def joined(chunks):
    """Put the logprobs of a stream's chunks together."""
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    return {name: sum((part[name] for part in parts), []) for name in parts[0]}


def check_offsets(logprobs, text, pieces):
    """`pieces`: the tokens' bytes. Each token stands at its first character."""
    data = b""
    for offset, piece in zip(logprobs["text_offset"], pieces, strict=True):
        whole = data.decode(errors="ignore")
        assert offset == len(whole)
        data += piece
    assert text == data.decode()


def pieces_of(server, ids):
    return [server.service.tokens.bytes_of(token_id) for token_id in ids]


def test_bytes_of_a_chats_tokens_join_to_its_content(server):
    body = {"messages": MESSAGES, **CHOICE, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    [choice] = server.answer(CHAT, body)["choices"]
    tokens = choice["logprobs"]["content"]
    assert choice["message"]["content"] == OUTPUT
    data = b"".join(bytes(token["bytes"]) for token in tokens)
    assert data.decode().removesuffix("<|endoftext|>") == OUTPUT
    first = next(token for token in tokens if token["token"] == "\ufffd")
    assert first["bytes"] == [240]  # not those of U+FFFD
    chunks = server.events(CHAT, body | {"stream": True})
    streamed = [
        token for chunk in chunks if chunk["choices"][0]["logprobs"]
        for token in chunk["choices"][0]["logprobs"]["content"]
    ]  # fmt: skip
    assert streamed == tokens
    for token in tokens:
        for other in token["top_logprobs"]:
            if other["token"] == token["token"] and other["logprob"] == token["logprob"]:
                assert other["bytes"] == token["bytes"]
    as_ids = server.answer(CHAT, body | {"return_tokens_as_token_ids": True})["choices"][0]["logprobs"]["content"]
    whole = [bytes(token["bytes"]).decode("utf-8", "ignore") != "" for token in tokens]
    assert not all(whole)
    assert [token["bytes"] for token in as_ids] == [
        token["bytes"] if is_whole else None for token, is_whole in zip(tokens, whole, strict=True)
    ]
    assert [token["token"] for token in as_ids] == [f"token_id:{one}" for one in choice["token_ids"]]


def test_bytes_of_a_responses_tokens_join_to_its_text(server):
    body = {"input": PROMPT, "include": ["message.output_text.logprobs"], "top_logprobs": 1, "store": False}
    body |= {"structured_outputs": CHOICE["structured_outputs"], "max_output_tokens": 100}
    [part] = server.answer(RESPONSES, body)["output"][0]["content"]
    data = b"".join(bytes(token["bytes"]) for token in part["logprobs"])
    assert part["text"] == OUTPUT == data.decode().removesuffix("<|endoftext|>")


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_are_places_in_the_text(server, echo, as_ids):
    body = {"prompt": PROMPT, **CHOICE, "logprobs": 1, "echo": echo, "return_tokens_as_token_ids": as_ids}
    body |= {"return_token_ids": True}
    [choice] = server.answer(COMPLETIONS, body)["choices"]
    text = (PROMPT if echo else "") + OUTPUT
    assert choice["text"] == text
    ids = (choice["prompt_token_ids"] if echo else []) + choice["token_ids"]
    pieces = pieces_of(server, ids)
    check_offsets(choice["logprobs"], text, [b"" if piece == b"<|endoftext|>" else piece for piece in pieces])
    assert joined(server.events(COMPLETIONS, body | {"stream": True})) == choice["logprobs"]
    names = [f"token_id:{one}" for one in ids] if as_ids else [piece.decode("utf-8", "replace") for piece in pieces]
    assert choice["logprobs"]["tokens"] == names


def test_offsets_beside_special_tokens(server):
    """A skipped special token takes no room in the text; a shown one takes its length."""
    ids = {name: server.answer("/tokenize", {"prompt": name})["tokens"] for name in ("<|im_end|>", "a")}
    [end], [letter] = ids.values()
    for skip, offsets in ((True, [0, 0, 0]), (False, [0, 10, 20])):
        body = {"prompt": "the", "max_tokens": 3, "allowed_token_ids": [end], "logprobs": 0, "ignore_eos": True}
        [choice] = server.answer(COMPLETIONS, body | {"skip_special_tokens": skip})["choices"]
        assert choice["logprobs"]["text_offset"] == offsets and len(choice["text"]) == (0 if skip else 30)
    body = {"prompt": "<|im_end|>a", "max_tokens": 1, "allowed_token_ids": [letter], "logprobs": 0, "echo": True}
    for prompt in (body["prompt"], [end, letter]):
        [choice] = server.answer(COMPLETIONS, body | {"prompt": prompt})["choices"]
        assert choice["text"] == "<|im_end|>aa" and choice["logprobs"]["text_offset"] == [0, 10, 11]


def test_offsets_with_a_stop_string(server):
    """Tokens of the text that the stop string cut off keep their places; a stream has the same ones."""
    body = {"prompt": PROMPT, **CHOICE, "logprobs": 0, "stop": "👧 s"}
    [choice] = server.answer(COMPLETIONS, body)["choices"]
    assert choice["text"] == OUTPUT[: OUTPUT.index("👧")] and choice["finish_reason"] == "stop"
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets) and offsets[-1] >= len(choice["text"])
    assert joined(server.events(COMPLETIONS, body | {"stream": True})) == choice["logprobs"]


@pytest.mark.parametrize("greedy", [True, False])
def test_the_sampled_token_is_the_first_of_the_top_logprobs(server, greedy):
    body = {"prompt": PROMPT, "max_tokens": 12, "logprobs": 3, "ignore_eos": True, "echo": True, "seed": 1}
    body |= {"temperature": 0 if greedy else 2.0, "return_tokens_as_token_ids": True}
    logprobs = server.answer(COMPLETIONS, body)["choices"][0]["logprobs"]
    entries = list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))
    assert entries[0][1:] == (None, None)
    outside = 0
    for token, logprob, top in entries[1:]:
        (first, value), *others = top.items()
        assert (first, value) == (token, logprob)
        assert [one for _, one in others] == sorted((one for _, one in others), reverse=True)
        outside += len(top) == 4
        assert len(top) in (3, 4)
    assert outside  # one was not among the three most likely


def test_named_tokens_follow_the_sampled_one(server):
    body = {"prompt": PROMPT, "max_tokens": 2, "logprobs": 3, "ignore_eos": True, "logprob_token_ids": [40, 41]}
    logprobs = server.answer(COMPLETIONS, body | {"return_tokens_as_token_ids": True})["choices"][0]["logprobs"]
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert list(top)[0] == token and set(top) == {token, "token_id:40", "token_id:41"}


def test_parts_of_characters_do_not_hide_the_sampled_one(server):
    """Their texts are equal: the sampled token's own logprob stands under its text."""
    body = {"prompt": PROMPT, **CHOICE, "logprobs": 5}
    logprobs = server.answer(COMPLETIONS, body)["choices"][0]["logprobs"]
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob

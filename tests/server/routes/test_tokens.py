"""POST /tokenize and /detokenize."""

from __future__ import annotations

import pytest

from tests.server.http.test_bodies import error_of

TEXT = "the red bird 🙂"


def test_tokenize_and_detokenize_are_inverse(server):
    answer = server.answer("/tokenize", {"prompt": TEXT})
    assert answer["tokens"] == server.service.client.tokenizer.encode(TEXT)
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 256
    assert answer["token_strs"] is None
    assert server.answer("/detokenize", {"model": "tiny", "tokens": answer["tokens"]}) == {"prompt": TEXT}
    assert server.answer("/detokenize", {"tokens": []}) == {"prompt": ""}


def test_a_conversation_is_tokenized_as_a_chat_request_is(server):
    messages = [{"role": "user", "content": "red"}]
    count = server.answer("/tokenize", {"messages": messages})["count"]
    chat = server.answer("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert chat["usage"]["prompt_tokens"] == count
    assert server.answer("/tokenize", {"messages": messages, "add_generation_prompt": False})["count"] < count


def test_token_strs_are_vocabulary_entries(server):
    answer = server.answer("/tokenize", {"prompt": TEXT, "return_token_strs": True})
    assert answer["token_strs"] == server.service.client.tokenizer.convert_ids_to_tokens(answer["tokens"])
    assert any(entry.startswith("Ġ") for entry in answer["token_strs"]), "a space is spelt Ġ in this vocabulary"
    messages = [{"role": "user", "content": "red"}]
    strings = server.answer("/tokenize", {"messages": messages, "return_token_strs": True})["token_strs"]
    assert strings[0] == "<|im_start|>"


MESSAGES = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "required"),
        ("tools", [{"type": "function"}]),
        ("chat_template_kwargs", {"verbose": True}),
        ("documents", [{"text": "a"}]),
    ],
)
def test_tokenize_refuses_what_a_chat_refuses(server, field, value):
    for route, options in (("/tokenize", {}), ("/v1/chat/completions", {"max_tokens": 1})):
        response = server.post(route, {"messages": MESSAGES, field: value, **options})
        assert error_of(response, 400)["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tools", [{"type": "function"}]),
        ("documents", [{"text": "a"}]),
        ("continue_final_message", True),
        ("chat_template_kwargs", {"enable_thinking": True}),
        ("reasoning_effort", "low"),
        ("verbosity", "low"),
    ],
)
def test_fields_of_conversations_are_refused_with_a_prompt(server, field, value):
    assert error_of(server.post("/tokenize", {"prompt": "red", field: value}), 400)["param"] == field
    assert server.post("/tokenize", {"prompt": "red", field: None} if field != "continue_final_message" else
                       {"prompt": "red", field: False}).status_code == 200  # fmt: skip


def test_add_special_tokens_is_for_prompts(server):
    assert server.answer("/tokenize", {"prompt": "red", "add_special_tokens": True})["count"]
    plain = server.answer("/tokenize", {"messages": MESSAGES})
    assert server.answer("/tokenize", {"messages": MESSAGES, "add_special_tokens": False}) == plain


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "fox " * 3000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 300}, "tokens"),
    ],
)
def test_bad_input_is_a_400_that_names_the_field(server, path, body, param):
    import json

    response = server.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert error_of(response, 400)["param"] == param


def test_an_unknown_model_is_a_404(server):
    error_of(server.post("/tokenize", {"model": "other", "prompt": "a"}), 404)

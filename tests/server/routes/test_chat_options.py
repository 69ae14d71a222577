"""What the prompt of a chat is made of: tools, template variables, own templates, the message to continue."""

from __future__ import annotations

import json

import pytest

from engine.text.conversation import Conversation
from server.schemas.tools import MAX_NESTING, checked_tools

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "red"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}


def prompt_of(server, **fields):
    """Return the prompt of a conversation as text, the same for /tokenize and for a chat."""
    body = {"messages": MESSAGES, **fields}
    ids = server.answer("/tokenize", body)["tokens"]
    usage = server.answer(CHAT, body | {"max_tokens": 1})["usage"]
    assert usage["prompt_tokens"] == len(ids)
    return server.service.client.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def long(long_server):
    return long_server


def test_a_template_without_tools_gets_them_in_the_system_message(long):
    text = prompt_of(long, messages=[{"role": "developer", "content": "Be kind."}, *MESSAGES], tools=[TOOL])
    assert text.startswith("<|im_start|>system\nBe kind.\n\nYou may call") and '"name": "look"' in text
    assert prompt_of(long, tools=[TOOL]).startswith("<|im_start|>system\nYou may call")
    assert "look" not in prompt_of(long, tools=[TOOL], tool_choice="none")


def test_calls_and_results_of_a_conversation_are_in_the_prompt(long):
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "blue"}]},
    ]
    text = prompt_of(long, messages=messages)
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>' in text
    assert "<tool_response>\nblue\n</tool_response>" in text


def test_the_final_message_is_continued(server):
    messages = [*MESSAGES, {"role": "assistant", "content": "the sky is"}]
    text = prompt_of(server, messages=messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nthe sky is")
    assert prompt_of(server, messages=messages, add_generation_prompt=False).endswith("the sky is<|im_end|>\n")


@pytest.mark.parametrize(
    ("fields", "param", "needle"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
        ({"continue_final_message": True, "messages": [{"role": "assistant"}]}, "continue_final_message", "no text"),
        ({"chat_template_kwargs": {"verbose": 1}}, "chat_template_kwargs", "doesn't read 'verbose'"),
        ({"chat_template_kwargs": {"max_tokens": 1}}, "chat_template_kwargs", "doesn't read 'max_tokens'"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort", "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "can't set"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, "enable_thinking", "differ"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "boolean"}}}]},
            "tools", "tools[0].function.parameters.type must be \"object\"",
        ),
        ({"tools": [TOOL, {"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[1].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools", "twice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "{}"}}]}, "tools", "parameters"),
        ({"tools": "look"}, "tools", "list"),
        ({"tool_choice": "required"}, "tool_choice", "tools is empty"),
        ({"tool_choice": "sometimes"}, "tool_choice", "auto"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice", "custom"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "not among"),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages",
         "messages[1].tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages", "use tool_calls"),
    ],
)  # fmt: skip
def test_invalid_options_are_named(server, fields, param, needle):
    response = server.post(CHAT, {"messages": MESSAGES, "max_tokens": 1} | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and needle in error["message"], error


WARNING = "{} has no effect: the chat template doesn't read {}".format


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (CHAT, {"reasoning_effort": "high", "verbosity": "low"}, [("verbosity",) * 2, ("reasoning_effort",) * 2]),
        (CHAT, {"enable_thinking": True}, [("enable_thinking",) * 2]),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True, "thinking_budget": 9}},
         [(f"chat_template_kwargs.{name}", name) for name in ("enable_thinking", "thinking", "thinking_budget")]),
        ("/tokenize", {"reasoning_effort": "high"}, [("reasoning_effort",) * 2]),
        ("/v1/responses", {"reasoning": {"effort": "low"}}, [("reasoning", "reasoning_effort")]),
        ("/v1/responses", {"text": {"verbosity": "high"}}, [("text", "verbosity")]),
        ("/v1/responses", {"chat_template_kwargs": {"enable_thinking": True}},
         [("chat_template_kwargs.enable_thinking", "enable_thinking")]),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}, [("thinking", "enable_thinking")]),
        ("/v1/messages", {"output_config": {"effort": "max"}}, [("output_config", "reasoning_effort")]),
        ("/v1/messages/count_tokens", {"output_config": {"effort": "low"}}, [("output_config", "reasoning_effort")]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_hint_that_the_template_does_not_read_is_a_warning(server, path, fields, names, stream):
    body = {"messages": MESSAGES, "max_tokens": 1} if path != "/v1/responses" else {"input": "red"}
    body |= {"max_output_tokens": 1} if path == "/v1/responses" else {}
    body |= {"model": "tiny"} if "messages" in path else {}
    body |= {"stream": True} if stream else {}
    if path in ("/tokenize", "/v1/messages/count_tokens"):
        body = {name: value for name, value in body.items() if name not in ("max_tokens", "stream")}
    plain, hinted = server.post(path, body), server.post(path, body | fields)
    assert hinted.status_code == 200, hinted.text
    assert hinted.headers["x-encore-warning"] == "; ".join(WARNING(*pair) for pair in names)
    assert "x-encore-warning" not in plain.headers


def test_the_log_names_a_hint_without_effect_once(start_server, caplog):
    server = start_server(trust_request_chat_template=True)
    body = {"messages": MESSAGES, "max_tokens": 1}
    for fields in ({"reasoning_effort": "low"}, {"reasoning_effort": "high"}, {"enable_thinking": True}):
        server.answer(CHAT, body | fields)
    found = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert [text.split()[5] for text in found] == ["reasoning_effort", "enable_thinking"]
    own = body | {"chat_template": "{{ messages[0].content }} {{ enable_thinking }}", "enable_thinking": True}
    response = server.post(CHAT, own)
    assert response.status_code == 200 and "x-encore-warning" not in response.headers


def test_options_without_an_effect_are_accepted(server):
    plain = prompt_of(server)
    for fields in ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}, {"tools": []},
                   {"reasoning_effort": "none"}, {"tool_choice": "auto"}, {"documents": []}):  # fmt: skip
        assert prompt_of(server, **fields) == plain, fields


def nested(levels):
    value = {}
    for _ in range(levels):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ({"description": "\ud800"}, "tools[1] contains a lone surrogate"),
        ({"parameters": {"x": float("nan")}}, "tools[1] contains NaN or an infinite number"),
        ({"parameters": {"x": float("-inf")}}, "tools[1] contains NaN or an infinite number"),
        ({"parameters": nested(MAX_NESTING)}, f"tools[1] is nested more than {MAX_NESTING} levels"),
        ({"parameters": nested(900)}, f"tools[1] is nested more than {MAX_NESTING} levels"),
        ({"paramters": {"type": "object"}}, "tools[1].function.paramters is not a known field; did you mean"),
        ({"\ud800": 1}, "tools[1] contains a lone surrogate"),
        ({"zzzzzz": 1}, "tools[1].function.zzzzzz is not a known field; remove it"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_mistake_in_a_function_is_an_error_that_names_its_place(server, path, function, message):
    tools = [TOOL, {"type": "function", "function": {"name": "f", **function}}]
    content = json.dumps({"messages": MESSAGES, "tools": tools})
    response = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "tools" and error["code"] == "invalid_value" and message in error["message"], error


@pytest.mark.parametrize("key", ["strict", "parameters"])
def test_a_key_of_a_function_beside_it_is_an_error(server, key):
    tool = {**TOOL, key: {"strict": True, "parameters": {}}[key]}
    response = server.post(CHAT, {"messages": MESSAGES, "tools": [tool]})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "tools"
    assert error["message"] == f"tools[0].{key} has no effect: use tools[0].function.{key}"


@pytest.mark.parametrize(
    "function", [{"parameters": nested(MAX_NESTING - 10)}, {"return": {"type": "string"}}, {"paramters": None}]
)
def test_tools_that_a_template_can_take_are_accepted(function):
    tools = [{"type": "function", "function": {"name": "f", **function}}]
    assert checked_tools(tools) == tools


def test_own_templates_need_the_operators_consent(server, start_server):
    own = {
        "messages": MESSAGES,
        "chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}",
        "max_tokens": 1,
    }
    refused = server.post(CHAT, own)
    assert refused.status_code == 403 and refused.json()["error"]["param"] == "chat_template"
    handle = start_server(trust_request_chat_template=True)
    assert prompt_of(handle, chat_template=own["chat_template"]) == "[red]"
    for template, needle in (
        ("{{ 'x' * 10**10 }}", "exceed"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "exceed"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% nonsense %}", "nonsense"),
        ("{{ raise_exception('no') }}", "no"),
    ):
        error = handle.post(CHAT, own | {"chat_template": template}).json()["error"]
        assert error["param"] == "chat_template" and needle in error["message"].lower(), error


def test_a_conversation_of_a_template_with_tools_keeps_its_messages():
    messages = [{"role": "user", "content": "x"}]
    assert Conversation(messages=messages).as_text() == messages

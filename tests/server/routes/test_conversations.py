"""Tools in the prompts of templates that know none, and the calls of earlier messages, through each API."""

from __future__ import annotations

import json
import shutil

import pytest

from engine.errors import RequestError
from engine.text.conversation import Conversation
from tests.server.conftest import running, tiny_config

# As Gemma 2's and Mistral 0.1's: user and assistant in turn, and no system message.
IN_TURN = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
# A template that leaves the system message out without an error.
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}\n{% endif %}{% endfor %}"
)
FUNCTION = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


def call(number, arguments="{}"):
    return {"id": f"call_{number}", "type": "function", "function": {"name": "look", "arguments": arguments}}


def result(number, text):
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


USER = {"role": "user", "content": "red"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [call(1), call(2)]}
RESULTS = [result(1, "one"), result(2, "two")]
WRITTEN = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("in_turn") / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(NO_SYSTEM + IN_TURN)
    with running(tiny_config(folder, max_model_len=2048)) as handle:
        yield handle


def prompt_of(server, messages, **fields):
    ids = server.answer("/tokenize", {"messages": messages, **fields})["tokens"]
    return server.service.client.tokenizer.decode(ids, skip_special_tokens=False)


def render(template, messages, tools=(TOOL,)):
    """Return what a template makes of messages, like `Tokenizer.render`."""
    from jinja2 import Environment
    from jinja2.exceptions import TemplateError

    def raise_exception(message):
        raise TemplateError(message)

    def apply(plain):
        try:
            environment = Environment()
            environment.globals["raise_exception"] = raise_exception
            return environment.from_string(template).render(messages=plain)
        except TemplateError as error:
            raise RequestError(str(error), param="messages") from error

    return Conversation(messages=messages, tools=tools).render_as_text(apply)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (RESULTS, WRITTEN),
        ([*RESULTS, {"role": "user", "content": "and now?"}], WRITTEN + "\nand now?"),
        ([RESULTS[0], {"role": "user", "content": "hm"}, RESULTS[1]],
         "<tool_response>\none\n</tool_response>\nhm\n<tool_response>\ntwo\n</tool_response>"),
    ],
)  # fmt: skip
def test_results_and_text_after_them_are_one_turn_of_the_user(server, after, expected):
    text = prompt_of(server, [USER, CALLS, *after])
    assert text.endswith(f"<user>{expected}\n") and text.count("<user>") == 2


def test_text_and_calls_of_the_assistant_are_one_turn(server):
    messages = [USER, {"role": "assistant", "content": "I look."}, CALLS, *RESULTS]
    text = prompt_of(server, messages)
    assert '<assistant>I look.\n<tool_call>\n{"name": "look"' in text and text.count("<assistant>") == 1


def test_messages_of_the_user_in_a_row_are_left_to_the_template(server):
    answer = server.post("/v1/chat/completions", {"messages": [USER, USER], "max_tokens": 1})
    assert answer.status_code == 400 and "must alternate" in answer.json()["error"]["message"]


def test_each_api_serves_results_without_a_second_turn(server):
    chat = {"messages": [USER, CALLS, *RESULTS, USER], "tools": [TOOL], "max_tokens": 1}
    expected = server.answer("/v1/chat/completions", chat)["usage"]["prompt_tokens"]
    blocks = [{"type": "tool_use", "id": f"call_{number}", "name": "look", "input": {}} for number in (1, 2)]
    found = [
        {"type": "tool_result", "tool_use_id": f"call_{one}", "content": text} for one, text in ((1, "one"), (2, "two"))
    ]
    model = server.http.get("/v1/models").json()["data"][0]["id"]
    message = {
        "model": model, "max_tokens": 1,
        "tools": [{"name": "look", "description": "Look.", "input_schema": {"type": "object"}}],
        "messages": [USER, {"role": "assistant", "content": blocks},
                     {"role": "user", "content": [*found, {"type": "text", "text": "red"}]}],
    }  # fmt: skip
    usage = server.answer("/v1/messages", message)["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected
    calls = [{"type": "function_call", "call_id": f"call_{one}", "name": "look", "arguments": "{}"} for one in (1, 2)]
    outputs = [
        {"type": "function_call_output", "call_id": f"call_{one}", "output": text}
        for one, text in ((1, "one"), (2, "two"))
    ]
    items = [USER, *calls, *outputs, USER]
    body = {"input": items, "max_output_tokens": 1, "tools": [{"type": "function", **FUNCTION}]}
    assert server.answer("/v1/responses", body)["usage"]["input_tokens"] == expected


def test_tools_are_in_the_first_message_of_the_user_without_a_system_role(server):
    text = prompt_of(server, [USER], tools=[TOOL])
    assert text.startswith("<user>You may call") and text.endswith("\n\nred\n") and '"name": "look"' in text
    answer = server.post("/v1/chat/completions", {"messages": [USER, USER], "tools": [TOOL], "max_tokens": 1})
    assert "must alternate" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("template", "begin"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}", "<system>You may call"),
        (NO_SYSTEM + IN_TURN, "<user>You may call"),
        (DROPS_SYSTEM, "<user>You may call"),
    ],
)
def test_the_place_of_the_tools_is_what_the_template_shows(template, begin):
    assert render(template, [USER]).startswith(begin)


def test_a_system_message_of_the_request_is_left_to_the_template(server):
    messages = [{"role": "system", "content": "Be kind."}, USER]
    for fields in ({}, {"tools": [TOOL]}):
        answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, **fields})
        assert answer.status_code == 400 and "System role not supported" in answer.json()["error"]["message"]
    text = render(DROPS_SYSTEM, messages)
    assert "Be kind." not in text and text.startswith("<user>You may call")


def test_an_empty_list_of_calls_is_none(long_server):
    said = {"role": "assistant", "content": "hm"}
    for calls in ([], None):
        assert prompt_of(long_server, [USER, {**said, "tool_calls": calls}]) == prompt_of(long_server, [USER, said])


@pytest.mark.parametrize("arguments", ["", " ", "null", None, {}, "{}"])
def test_no_arguments_are_an_empty_object(long_server, arguments):
    text = prompt_of(long_server, [USER, {"role": "assistant", "tool_calls": [call(1, arguments)]}])
    assert '{"name": "look", "arguments": {}}' in text


@pytest.mark.parametrize(
    "arguments", ["[1]", "3", '"text"', "true", '{"a": 1', "{'a': 1}", [1], 3, True, "[" * 100_000]
)
def test_arguments_that_are_no_object_are_an_error_that_names_them(long_server, arguments):
    messages = [USER, {"role": "assistant", "tool_calls": [call(1), call(2, arguments)]}]
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = long_server.post(path, {"messages": messages})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == "messages", error
        assert error["message"].startswith("messages[1].tool_calls[1].function.arguments must be a JSON object"), error


@pytest.mark.parametrize("calls", [{}, "", 0, False, [3]])
def test_calls_that_are_no_list_are_an_error(long_server, calls):
    messages = [USER, {"role": "assistant", "content": "x", "tool_calls": calls}]
    error = long_server.post("/v1/chat/completions", {"messages": messages}).json()["error"]
    assert error["message"].startswith("messages[1].tool_calls must be a list")


def test_other_apis_name_their_fields(long_server):
    item = {"type": "function_call", "call_id": "call_1", "name": "look"}
    for arguments in ("[1]", '{"a": 1', "3"):
        body = {"input": [USER, {**item, "arguments": arguments}]}
        error = long_server.post("/v1/responses", body).json()["error"]
        assert error["param"] == "input" and error["message"].startswith("input[1].arguments must be a JSON object")
    long_server.answer("/v1/responses", {"input": [USER, {**item, "arguments": ""}], "max_output_tokens": 1})
    block = {"type": "tool_use", "id": "a", "name": "look", "input": [1]}
    body = {"model": long_server.http.get("/v1/models").json()["data"][0]["id"], "max_tokens": 1,
            "messages": [USER, {"role": "assistant", "content": [block]}]}  # fmt: skip
    message = json.dumps(long_server.post("/v1/messages", body).json())
    assert "messages[1].content[0].input must be an object" in message

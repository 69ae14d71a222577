"""Structured outputs over HTTP: each field of OpenAI, vLLM and SGLang that constrains the output, and its errors."""

from __future__ import annotations

import json
import re

import jsonschema
import openai
import pydantic
import pytest

CHAT = {"messages": [{"role": "user", "content": "red"}], "max_tokens": 200, "seed": 1}
COMPLETION = {"prompt": "red", "max_tokens": 200, "seed": 1}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 50},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


def text_of(answer):
    if "text" in answer:
        return answer["text"]
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        {"json_schema": json.dumps(SCHEMA)},
    ],
)
def test_a_schema_is_followed_on_every_route(server, path, fields):
    jsonschema.validate(json.loads(text_of(server.answer(path, PATHS[path] | fields))), SCHEMA)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3,5}"}}, "[ab]{3,5}"),
        ({"regex": "[ab]{3,5}"}, "[ab]{3,5}"),
        ({"structured_outputs": {"choice": ["red fox", "blue.", "a/b"]}}, r"red fox|blue\.|a/b"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]+ ("y" | "z")'}}, "x[0-9]+[yz]"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{1,3}/ ("y" | "z")'}}, "x[0-9]{1,3}[yz]"),
        ({"ebnf": 'root ::= "x" | "yy"'}, "x|yy"),
    ],
)
def test_a_pattern_is_followed(server, fields, pattern):
    assert re.fullmatch(pattern, text_of(server.answer("/v1/completions", COMPLETION | fields)))
    parameters = {"max_new_tokens": 200, "sampling_seed": 1} | fields
    if "regex" in fields or "ebnf" in fields:
        assert re.fullmatch(pattern, text_of(server.answer("/generate", {"text": "a", "sampling_params": parameters})))


def test_sglang_names_for_any_object_and_a_schema(server):
    for schema, kind in (("$$ANY$$", dict), (json.dumps({"type": "integer", "maximum": 99, "minimum": 10}), int)):
        parameters = {"max_new_tokens": 200, "json_schema": schema, "min_p": 0.02, "sampling_seed": 3}
        answer = server.answer("/generate", {"text": "a", "sampling_params": parameters})
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            assert isinstance(json.loads(answer["text"]), kind)


def test_a_stream_gives_the_same_text_as_the_whole_answer(server):
    body = CHAT | {"response_format": FORMAT}
    whole = text_of(server.answer("/v1/chat/completions", body))
    events = server.events("/v1/chat/completions", body | {"stream": True})
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == whole
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


DEEP_SCHEMA = '{"anyOf":[' * 100 + "{}" + "]}" * 100
LARGE_GRAMMAR = "\n".join([
    f"start: {' '.join(f'a{number}' for number in range(1200))}",
    *(f'a{number}: "x"{{0,1000}} | "y"{{0,1000}}' for number in range(1200)),
])  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", '"json_schema"'),
        ({"response_format": {"type": "json_schema"}}, "response_format", "response_format.json_schema must be"),
        ({"response_format": FORMAT, "regex": "a"}, "regex", "response_format and regex both constrain"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "json and regex"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "did you mean 'regex'"),
        ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs", "structured_outputs.regex: .*unclosed group"),
        ({"regex": "(?=a)b"}, "regex", "regex: .*look-around"),
        ({"ebnf": "root ::= missing"}, "ebnf", "ebnf: .*missing"),
        ({"regex": "("}, "regex", "^regex: invalid regular expression: unclosed group$"),
        ({"regex": r"\ba"}, "regex", "^regex: invalid regular expression: look-around and word boundaries are not"),
        ({"regex": r"[^\s\S]"}, "regex", "^regex: no output can follow it$"),
        ({"ebnf": 'start: a\na: "b" foo'}, "ebnf", '^ebnf: line 2: unknown name: "foo"$'),
        ({"ebnf": LARGE_GRAMMAR}, "ebnf", "^ebnf: t(oo large|akes too much memory).* to compile; simplify it$"),
        ({"json_schema": json.dumps({"$ref": "#"})}, "json_schema", "^json_schema: no output can follow it$"),
        ({"json_schema": DEEP_SCHEMA}, "json_schema", "^json_schema: nested too deeply; flatten it$"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, "structured_outputs",
         r"^structured_outputs\.whitespace_pattern: invalid regular expression: unclosed group$"),
        ({"structural_tag": {"format": {"type": "or", "elements": [{"type": "regex", "pattern": "a"},
                                                                   {"type": "regex", "pattern": "("}]}}},
         "structural_tag", r"^structural_tag\.format\.elements\[1\]\.pattern: invalid regular expression: unclosed"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "1 to 4096 strings"),
        ({"guided_regex": "a"}, "guided_regex", "use structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {
                "type": "object", "properties": {"list": {"type": "array", "items": {"not": {}}}}}}}},
            "response_format",
            r'response_format\.json_schema\.schema\.properties\.list\.items: .*"not"',
        ),
    ],
)  # fmt: skip
def test_an_invalid_constraint_is_a_400_that_names_it(server, fields, param, message, stream):
    response = server.post("/v1/chat/completions", CHAT | fields | {"stream": stream})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and re.search(message, error["message"]), error
    server.wait_idle()


def test_text_is_the_format_without_a_constraint(server):
    plain = server.answer("/v1/chat/completions", CHAT | {"max_tokens": 5})
    same = server.answer("/v1/chat/completions", CHAT | {"max_tokens": 5, "response_format": {"type": "text"}})
    assert same["choices"] == plain["choices"]


class Thing(pydantic.BaseModel):
    size: int = pydantic.Field(ge=0, le=50)
    kinds: list[bool] = pydantic.Field(max_length=2)


def test_openais_client_parses_into_a_model(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        request = {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 200, "seed": 2}
        parsed = client.chat.completions.parse(response_format=Thing, **request).choices[0].message.parsed
        assert isinstance(parsed, Thing)
        answer = client.chat.completions.create(response_format={"type": "json_object"}, **request).choices[0]
        assert answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), dict)
        with pytest.raises(openai.BadRequestError, match="regex"):
            client.chat.completions.create(extra_body={"structured_outputs": {"regex": "["}}, **request)

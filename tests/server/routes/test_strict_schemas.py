"""Closed objects over HTTP: where `strict` is set, and where --close-objects says so."""

from __future__ import annotations

import json

import pytest

from engine.errors import ConfigError
from server.config import ServerConfig
from server.schemas.requests import ChatBody
from server.serving.chat_formats import ChatFormats

SCHEMA = {"type": "object", "properties": {"result": {"const": 2}}, "required": ["result"]}
MESSAGES = {"messages": [{"role": "user", "content": "1+1"}], "max_tokens": 60, "seed": 1, "temperature": 2.0}


def response_format(**strict):
    return {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, **strict}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"response_format": response_format(strict=True)}),
        ("/v1/completions", {"response_format": response_format(strict=True)}),
    ],
)
def test_a_strict_schema_allows_only_its_properties(server, path, fields):
    body = {**MESSAGES, **fields} if "chat" in path else {**MESSAGES, **fields, "messages": None, "prompt": "1+1"}
    answer = server.answer(path, {name: value for name, value in body.items() if value is not None})
    [choice] = answer["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert choice["finish_reason"] == "stop" and json.loads(text) == {"result": 2}


@pytest.mark.parametrize(
    ("setting", "strict", "is_closed"),
    [("tools", True, True), ("tools", False, False), ("tools", None, False), ("strict", True, True),
     ("all", False, True), ("all", None, True)],
)  # fmt: skip
def test_the_setting_decides_for_schemas_that_are_not_strict(setting, strict, is_closed):
    body = ChatBody.model_validate({**MESSAGES, "response_format": response_format(strict=strict)})
    formats = ChatFormats(None, close_objects=setting)
    plan = formats.plan("", body.conversation(), None, body.sampling().structured_outputs)
    assert plan.constraint.disable_additional_properties is is_closed


def test_an_unknown_setting_is_refused():

    with pytest.raises(ConfigError, match="close_objects='some' is not one of strict, tools, all"):
        ServerConfig(close_objects="some")

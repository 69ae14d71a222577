"""Tool calls of Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from engine.text.parsing.call_schemas import resolved, types_of
from engine.text.parsing.formats import Block, Closed, Format
from engine.text.parsing.json_values import parse_json, to_json

_OPEN_FUNCTION, _CLOSE_FUNCTION, _CLOSE_CALL = "<function=", "</function>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=(?P<name>[^<>]{1,256})>(?P<body>.*)</function>\s*", re.DOTALL)
# A value may contain "</parameter>": it ends only before the next parameter, or at the end.
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<key>[^<>]{1,256})>(?P<value>.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)


class Qwen3Coder(Format):
    """Functions and parameters as tags; the tool's schema gives each value its type."""

    name = "qwen3_coder"
    openers = ("<tool_call>", _OPEN_FUNCTION)

    def block(self, opener: str) -> Block:
        return _TagBlock(self, is_bare=opener == _OPEN_FUNCTION)


class _TagBlock(Block):
    def __init__(self, owner: Qwen3Coder, is_bare: bool):
        self._owner = owner
        self._text = _OPEN_FUNCTION if is_bare else ""
        self._is_function = is_bare
        self._end = _CLOSE_FUNCTION if is_bare else _CLOSE_CALL
        self._searched = 0
        self._new: list[str] = []

    def feed(self, text: str) -> Closed | None:
        self._new.append(text)
        if not self._is_function:
            head = (self._text + "".join(self._new)).lstrip()
            if not head.startswith(_OPEN_FUNCTION[: len(head)]):
                return Closed(None, "".join(self._new))  # an opener may have begun in an earlier piece
            self._is_function = len(head) >= len(_OPEN_FUNCTION)
        # Look for the end only in what is new and may be one: a block of n characters costs n, not n².
        if self._end[-1] not in text:
            return None
        self._text, self._new = self._text + "".join(self._new), []
        while (at := self._text.find(self._end, self._searched)) >= 0:
            end = self._searched = at + len(self._end)
            inside = self._text[: end if self._end == _CLOSE_FUNCTION else at]
            if inside.rfind("<parameter=") > inside.rfind("</parameter>"):
                continue  # the end marker is part of a value
            return Closed(self._calls(inside), self._text[end:])
        self._searched = max(0, len(self._text) - len(self._end))
        return None

    def finish(self) -> list[tuple[str, str]] | None:
        return self._calls(self._text + "".join(self._new))

    def _calls(self, inside: str) -> list[tuple[str, str]] | None:
        found = _FUNCTION.fullmatch(inside)
        if found is None:
            return None
        name, body = found["name"].strip(), found["body"]
        schema = self._owner.tools.get(name, {})
        arguments: dict[str, Any] = {}
        at = 0
        while parameter := _PARAMETER.match(body, at):
            at = parameter.end()
            key = parameter["key"].strip()
            arguments[key] = _typed(_without_newlines(parameter["value"]), _types_of(schema, key))
        if body[at:].strip():
            return None
        try:
            return [(name, to_json(arguments))]
        except ValueError:
            return None


def _without_newlines(value: str) -> str:
    """Drop the newline after the opening and before the closing tag, which belong to the format."""
    return value.removeprefix("\n").removesuffix("\n")


def _types_of(schema: Mapping[str, Any], key: str) -> set[str]:
    """Return the JSON types of a function's parameter; empty if its schema names none."""
    properties = resolved(schema, schema).get("properties")
    return types_of(properties.get(key), schema) if isinstance(properties, Mapping) else set()


def _typed(text: str, types: set[str]) -> Any:
    """Return the value of a parameter: JSON if its schema allows other types than strings, else the text."""
    if types <= {"string"} and types:
        return text
    try:
        value = parse_json(text)
        to_json(value)
    except ValueError:
        lowered = text.strip().lower()
        if "boolean" in types and lowered in ("true", "false"):
            return lowered == "true"
        return text
    # Without a declared type, only objects and lists are read as JSON: "007" stays a string.
    return value if types or isinstance(value, (dict, list)) else text

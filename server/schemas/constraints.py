"""Constraints on the output as clients spell them: OpenAI's response_format, vLLM's and SGLang's fields."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from engine.errors import RequestError
from engine.protocol.structured_outputs import StructuredOutputs

SGLANG_NAMES = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""SGLang's name -> the name in StructuredOutputs."""

ANY_OBJECT = "$$ANY$$"  # SGLang's json_schema for any JSON object

_TEXT_OR_OBJECT = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}
_FORMAT = {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}
FIELD_SCHEMAS: dict[str, dict[str, Any]] = {
    "response_format": {"anyOf": [_FORMAT, {"type": "null"}]},
    "structured_outputs": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    "json_schema": _TEXT_OR_OBJECT,
    "regex": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "ebnf": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "structural_tag": _TEXT_OR_OBJECT,
}
"""JSON schemas of the fields, for /openapi.json."""


def constraint(fields: Mapping[str, Any]) -> StructuredOutputs | None:
    """Return the constraint in a request's fields. Fields that are not in FIELD_SCHEMAS are ignored.

    Raises RequestError, naming the field, for an invalid one and for two constraints.
    """
    found: dict[str, StructuredOutputs] = {}
    for name in FIELD_SCHEMAS:
        value = fields.get(name)
        if value is None:
            continue
        one = _from_field(name, value)
        if one is not None:
            found[name] = one
    if len(found) > 1:
        first, second = list(found)[:2]
        raise RequestError(
            f"{first} and {second} both constrain the output, which can follow only one: remove one", param=second
        )
    return next(iter(found.values()), None)


def _from_field(name: str, value: Any) -> StructuredOutputs | None:
    if name == "response_format":
        return _from_response_format(value)
    if name == "structured_outputs":
        return value if isinstance(value, StructuredOutputs) else StructuredOutputs.from_dict(value)
    if name == "json_schema" and value == ANY_OBJECT:
        return StructuredOutputs(json_object=True, field=name)
    return StructuredOutputs(**{SGLANG_NAMES[name]: value}, field=name)


def _from_response_format(value: Any) -> StructuredOutputs | None:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        _check_keys("response_format", value, {"type"})
        return None
    if kind == "json_object":
        _check_keys("response_format", value, {"type"})
        return StructuredOutputs(json_object=True, field="response_format")
    if kind == "structural_tag":
        return StructuredOutputs(structural_tag=dict(value), field="response_format")
    if kind != "json_schema":
        raise RequestError(
            'response_format must be an object whose type is "text", "json_object", "json_schema" or '
            f'"structural_tag"; found {reprlib.repr(value)}',
            param="response_format",
        )
    _check_keys("response_format", value, {"type", "json_schema"})
    return _from_json_schema(value.get("json_schema"))


def _from_json_schema(value: Any) -> StructuredOutputs:
    place = "response_format.json_schema"
    if not isinstance(value, Mapping) or not isinstance(value.get("schema"), Mapping):
        raise RequestError(
            f"{place} must be an object with the JSON schema as its key schema; found {reprlib.repr(value)}",
            param="response_format",
        )
    _check_keys(place, value, {"name", "description", "schema", "strict"})
    if not isinstance(value.get("strict"), bool | None):
        raise RequestError(
            f"{place}.strict must be true or false; found {reprlib.repr(value['strict'])}", param="response_format"
        )
    found = StructuredOutputs(json=dict(value["schema"]), field=f"{place}.schema")
    return found.closed() if value.get("strict") else found


def _check_keys(place: str, value: Mapping[str, Any], known: set[str]) -> None:
    for name in value:
        if name not in known and value[name] is not None:
            raise RequestError(
                f"{place} has an unknown key {reprlib.repr(name)}; known: {', '.join(sorted(known))}",
                param="response_format",
            )

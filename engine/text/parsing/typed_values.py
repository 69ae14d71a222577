"""Values of parameters that a call writes as plain text: JSON only where the parameter's schema allows its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.text.parsing.call_schemas import MAX_DEPTH, Schema, resolved, types_of
from engine.text.parsing.json_values import parse_json, to_json

_NO_JSON = object()
_WORDS = {"true": True, "false": False, "null": None, "none": None}  # as Python writes them, like some templates
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str, "boolean": bool, "integer": int, "number": (int, float), "array": list, "object": Mapping,
    "null": type(None),
}  # fmt: skip


def typed(text: str, schema: Any, root: Schema) -> Any:
    """Return the value of a parameter that is written as text. `root` holds the definitions that `schema` refers to.

    The text is read as JSON if the schema allows the value, and is a string otherwise. A schema of strings only keeps
    every text as it is; without a schema, only objects and arrays are read as JSON.
    """
    types = types_of(schema, root)
    if types == {"string"}:
        return text
    value = _read(text)
    if not types:
        return value if isinstance(value, (dict, list)) and allows(schema, root, value) else text
    if value is not _NO_JSON and allows(schema, root, value):
        return value
    if not allows(schema, root, text):  # what else it may mean
        word = text.strip().lower()
        if word in _WORDS and allows(schema, root, _WORDS[word]):
            return _WORDS[word]
        if isinstance(value, float) and value.is_integer() and allows(schema, root, int(value)):
            return int(value)
    return text


def _read(text: str) -> Any:
    try:
        value = parse_json(text)
        to_json(value)
    except ValueError:
        return _NO_JSON
    return value


def allows(schema: Any, root: Schema, value: Any) -> bool:
    """Whether a schema allows a value by its types, `enum`, `const`, and the schemas that it combines.

    Other keywords are not looked at, and types that JSON Schema doesn't know allow anything.
    """
    return _allows(schema, root, value, {}, MAX_DEPTH)


def _allows(schema: Any, root: Schema, value: Any, known: dict[int, bool], depth: int) -> bool:
    """Whether a schema allows a value; `known` has the answers so far: a schema may refer to itself many times."""
    if not isinstance(schema, Mapping) or not depth:
        return schema is not False
    if id(schema) not in known:
        known[id(schema)] = False  # for a schema that consists of itself
        known[id(schema)] = _follows(resolved(schema, root), root, value, known, depth)
    return known[id(schema)]


def _follows(schema: Schema, root: Schema, value: Any, known: dict[int, bool], depth: int) -> bool:
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if names and not any(_is_of(value, name) for name in names):
        return False
    if isinstance(values := schema.get("enum"), list) and not any(_equal(value, one) for one in values):
        return False
    if "const" in schema and not _equal(value, schema["const"]):
        return False
    for keyword, holds in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        parts = schema.get(keyword)
        if (
            isinstance(parts, list)
            and parts
            and not holds(_allows(one, root, value, known, depth - 1) for one in parts)
        ):
            return False
    return True


def _is_of(value: Any, name: Any) -> bool:
    kind = _TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        return True
    return isinstance(value, kind) and (not isinstance(value, bool) or name == "boolean")


def _equal(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)

"""Schemas of calls whose arguments are written one by one, as tags or keywords, and not as one JSON object.

Such a format follows `properties` and `required` of the parameters, and the schema of each of them. What it can't
follow is refused for strict functions, and ignored for others.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from typing import Any

from engine.errors import RequestError

Schema = Mapping[str, Any]
_MAX_REFERENCES = 8  # that lead from one to the next
MAX_DEPTH = 16  # of schemas that are combined within one another
_ROOT = "parameters"  # the name of the whole schema among the definitions of one parameter's schema
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id")
)
_DEFINITIONS = frozenset(("$defs", "definitions"))
_OF_AN_OBJECT = _ANNOTATIONS | _DEFINITIONS | {"type", "properties", "required", "additionalProperties", "strict"}
_VALUES = frozenset(("enum", "const", "default", "examples"))  # keywords whose values are no schemas
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def resolved(schema: Schema, root: Schema) -> Schema:
    """Return a schema with its `$ref` into `root` replaced by what it refers to, and an `allOf` of one by its element.

    Other references are kept.
    """
    for _ in range(_MAX_REFERENCES):
        reference, parts = schema.get("$ref"), schema.get("allOf")
        if isinstance(reference, str) and reference.startswith("#/"):
            target: Any = root
            for name in reference[2:].split("/"):
                target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
            dropped = "$ref"
        elif isinstance(parts, list) and len(parts) == 1:
            target, dropped = parts[0], "allOf"
        else:
            break
        if not isinstance(target, Mapping):
            break
        schema = {**target, **{name: value for name, value in schema.items() if name != dropped}}
    return schema


def types_of(schema: Any, root: Schema) -> set[str]:
    """Return the JSON types that a schema allows by name or by its values; empty if it tells none."""
    return _types_of(schema, root, set(), MAX_DEPTH)


def _types_of(schema: Any, root: Schema, seen: set[int], depth: int) -> set[str]:
    """Return the types; `seen` has the ids of the schemas so far, since a schema may refer to itself many times."""
    if not isinstance(schema, Mapping) or id(schema) in seen or not depth:
        return set()
    seen.add(id(schema))
    schema = resolved(schema, root)
    declared = schema.get("type")
    types = {one for one in (declared if isinstance(declared, list) else [declared]) if isinstance(one, str)}
    if types:
        return types
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {_TYPES.get(type(value), "null") for value in values}
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        for one in options if isinstance(options, list) else ():
            types |= _types_of(one, root, seen, depth - 1)
    return types


def declared_of(schema: Schema) -> dict[str, Any]:
    """Return the schemas of all parameters that a schema names, also within the schemas that it combines."""
    found: dict[str, Any] = {}
    _add_declared(found, schema, schema, set(), MAX_DEPTH)
    return found


def _add_declared(found: dict[str, Any], schema: Any, root: Schema, seen: set[int], depth: int) -> None:
    if not isinstance(schema, Mapping) or id(schema) in seen or not depth:
        return
    seen.add(id(schema))
    schema = resolved(schema, root)
    properties = schema.get("properties")
    for name, one in properties.items() if isinstance(properties, Mapping) else ():
        found.setdefault(name, one)
    for keyword_ in ("allOf", "anyOf", "oneOf"):
        parts = schema.get(keyword_)
        for part in parts if isinstance(parts, list) else ():
            _add_declared(found, part, root, seen, depth - 1)


def tells_nothing(schema: Schema) -> bool:
    """Whether a schema has annotations only."""
    return not set(schema) - _ANNOTATIONS - _DEFINITIONS


def choices_of(schema: Schema, root: Schema) -> list[str] | None:
    """Return the strings that a schema of strings allows; None if it does not list them."""
    schema = resolved(schema, root)
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        texts = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
        return texts or None
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        if isinstance(options, list) and all(isinstance(one, Mapping) for one in options):
            found = [choices_of(one, root) for one in options]
            return [text for one in found for text in one or ()] if all(found) else None
    return None


def required_of(schema: Schema) -> list[str]:
    """Return the names of the required parameters that have a schema."""
    root = resolved(schema, schema)
    names, properties = root.get("required"), properties_of(schema)
    return [name for name in names if name in properties] if isinstance(names, list) else []


def properties_of(schema: Schema) -> dict[str, Schema]:
    """Return the schemas of the parameters, each with the definitions that its references lead to."""
    properties = resolved(schema, schema).get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {
        key: _standalone(resolved(one, schema), schema) if isinstance(one, Mapping) else {}
        for key, one in properties.items()
        if isinstance(one, Mapping) or one is True
    }


def _standalone(schema: Schema, root: Schema) -> Schema:
    moved = _with_moved_references({name: value for name, value in schema.items() if name not in _DEFINITIONS})
    if moved == schema:
        return schema
    return {**moved, "$defs": {_ROOT: _with_moved_references(root)}}


def _with_moved_references(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_moved_references(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: f"#/$defs/{_ROOT}{one[1:]}"
        if name == "$ref" and isinstance(one, str) and (one == "#" or one.startswith("#/"))
        else one
        if name in _VALUES
        else _with_moved_references(one)
        for name, one in value.items()
    }


def fits_tag(name: str) -> bool:
    """Whether the name of a parameter can be written in a tag."""
    return bool(name) and name.strip() == name and not set("<>\n") & set(name)


def refuse_strict(function: str, schema: Schema, format_name: str, place: str) -> None:
    """Raise RequestError if calls of a strict function can't follow its schema in this format.

    `place`: the field of the caller's request that holds the schema.
    """
    if reason := _unfollowed(schema, format_name):
        raise RequestError(
            f"{place}: the function {function!r} is strict, and calls in the format {format_name} can't follow "
            f"{reason}: change its parameters, or leave out strict",
            param="tools",
        )


def _unfollowed(schema: Schema, format_name: str) -> str:
    root = resolved(schema, schema)
    for name in root:
        if name not in _OF_AN_OBJECT:
            return f"{name!r} of its parameters"
    properties = root.get("properties") or {}
    missing = [name for name in root.get("required") or () if name not in properties]
    if missing:
        return f"the required parameter {missing[0]!r}, which has no schema"
    for name, one in properties.items():
        if format_name == "pythonic" and (not name.isidentifier() or keyword.iskeyword(name)):
            return f"the parameter {name!r}, which is no name in Python"
        if format_name == "qwen3_coder" and not fits_tag(name):
            return f"the name of the parameter {name!r}"
        if one is False or not isinstance(one, (bool, Mapping)):
            return f"the parameter {name!r}, which allows no value"
        if format_name == "qwen3_coder" and isinstance(one, Mapping):
            if reason := _unfollowed_text(resolved(one, schema), schema):
                return f"{reason} of the parameter {name!r}"
    return ""


def _unfollowed_text(schema: Schema, root: Schema) -> str:
    """Return the keyword that a value between tags can't follow: a string has no quotes there."""
    types, keywords = types_of(schema, root), set(schema) - _ANNOTATIONS - _DEFINITIONS - {"type"}
    if types != {"string"}:
        return "" if types or not keywords else f"{min(keywords)!r} without a type"
    if choices_of(schema, root) is not None:
        others = keywords - {"enum", "const", "anyOf", "oneOf"}
    elif "pattern" in keywords:
        others = keywords - {"pattern"}
    else:
        others = keywords - {"minLength", "maxLength"}
    return f"{min(others)!r}" if others else ""

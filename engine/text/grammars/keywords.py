"""Rewrite a JSON schema into keywords that llguidance follows exactly.

- Keywords that allow every value, such as `uniqueItems: false`, are left out.
- Numbers and formats are rewritten (numbers.py, formats.py).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

from engine.text.grammars.formats import with_exact_format
from engine.text.grammars.numbers import KEYWORDS, with_exact_numbers
from engine.text.grammars.schemas import any_of_constants, reachable

ESCAPES = 'nrbtf\\"'
"""The escapes of JSON strings in which each text has one spelling: all but \\uXXXX, which can also spell a letter."""

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_OF_ARRAYS = ("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems")
_OF_OBJECTS = ("dependentRequired", "dependentSchemas", "dependencies", "propertyNames", "unevaluatedProperties")
_NEEDS_ESCAPE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # JSON spells these only as \uXXXX


class SchemaError(ValueError):
    """A part of a schema that can't be followed; the message begins with its path."""


def exact(schema: dict[str, Any], lenient: bool = False) -> dict[str, Any]:
    """Return a schema that llguidance follows exactly. Raises SchemaError, or if lenient drops the keywords."""
    schema = copy.deepcopy(schema)
    for path, one in list(reachable(schema)):
        try:
            found = _exact(one, lenient)
        except ValueError as error:
            raise SchemaError(f"{path}{error}") from error
        one.clear()
        one.update(found)
    return any_of_constants(schema)


def _exact(schema: dict[str, Any], lenient: bool) -> dict[str, Any]:
    schema = {name: value for name, value in schema.items() if not _is_neutral(name, value, schema)}
    for name in _COUNTS:
        if isinstance(schema.get(name), float) and schema[name].is_integer():
            schema[name] = int(schema[name])
    if not lenient:
        _check_distinct_names(schema)
    schema = with_exact_format(schema, lenient)
    try:
        return with_exact_numbers(schema)
    except ValueError:
        if not lenient:
            raise
        return {name: value for name, value in schema.items() if name not in KEYWORDS}


def _is_everything(value: Any) -> bool:
    return value is True or value == {}


_NEUTRAL: Mapping[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "uniqueItems": lambda value, schema: value is False or schema.get("maxItems", 2) in (0, 1),
    "contains": lambda value, schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    "minContains": lambda value, schema: "contains" not in schema or value == 0 and "maxContains" not in schema,
    "maxContains": lambda value, schema: "contains" not in schema,
    "not": lambda value, schema: value is False,
    "if": lambda value, schema: all(_is_everything(schema.get(name, True)) for name in ("then", "else")),
    "then": lambda value, schema: "if" not in schema or _is_everything(value),
    "else": lambda value, schema: "if" not in schema or _is_everything(value),
    "dependentRequired": lambda value, schema: isinstance(value, dict) and not any(value.values()),
    "dependentSchemas": lambda value, schema: isinstance(value, dict) and all(map(_is_everything, value.values())),
    "dependencies": lambda value, schema: value == {},
    "propertyNames": lambda value, schema: _is_everything(value) or value == {"type": "string"},
    "unevaluatedProperties": lambda value, schema: _is_everything(value),
    "unevaluatedItems": lambda value, schema: _is_everything(value),
    "$dynamicAnchor": lambda value, schema: True,  # without $dynamicRef, which is refused, it is only a name
}
"""Keyword -> whether it allows every value, given its value and its schema."""


def _is_neutral(name: str, value: Any, schema: Mapping[str, Any]) -> bool:
    types = schema.get("type")
    if types is not None:
        types = types if isinstance(types, list) else [types]
        if (name in _OF_ARRAYS and "array" not in types) or (name in _OF_OBJECTS and "object" not in types):
            return True
    return name in _NEUTRAL and _NEUTRAL[name](value, schema)


def _check_distinct_names(schema: Mapping[str, Any]) -> None:
    """Refuse a number of additional properties: a grammar can't tell that a name comes twice."""
    least, required = schema.get("minProperties"), schema.get("required")
    if not isinstance(least, int) or (
        schema.get("additionalProperties") is False and "patternProperties" not in schema
    ):
        return
    if least - (len(required) if isinstance(required, list) else 0) > 1:
        raise ValueError(
            f": minProperties {least} needs different additional properties, which a grammar can't count; list them "
            "in properties and required"
        )


def string_options(schema: dict[str, Any], lenient: bool = False) -> dict[str, Any]:
    """Return llguidance's options for the strings of JSON that follows a schema.

    llguidance compares the spelling of names. So names must have one spelling where an object has names with a schema
    and others: an additional property could otherwise be an escaped spelling of a declared one. Raises SchemaError for
    constants that can't be spelled then; if lenient, allows more spellings.
    """
    parts = list(reachable(schema))
    if not any(map(_has_open_names, (one for _, one in parts))):
        return {}
    for path, one in parts:
        for keyword in ("const", "enum"):
            if keyword in one and _needs_escape(one[keyword]):
                if lenient:
                    return {}
                raise SchemaError(
                    f"{path}: {keyword} has a control character, which needs an escape, and escapes are not allowed in "
                    "a schema whose objects have both declared and additional properties: set additionalProperties "
                    "to false"
                )
    return {"json_allowed_escapes": ESCAPES}


def _has_open_names(schema: Mapping[str, Any]) -> bool:
    if schema.get("patternProperties"):
        return True
    return bool(schema.get("properties") or schema.get("required")) and schema.get("additionalProperties") is not False


def _needs_escape(value: Any) -> bool:
    if isinstance(value, str):
        return _NEEDS_ESCAPE.search(value) is not None
    if isinstance(value, dict):
        return any(map(_needs_escape, value.values()))
    return isinstance(value, list) and any(map(_needs_escape, value))

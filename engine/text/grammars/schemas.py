"""Walk over the subschemas of a JSON schema, and over the parts of a structural tag."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

# Keywords by what they hold: a schema, a list of schemas, or an object of schemas by name.
_ONE = (
    "items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id")
) | {"$defs", "definitions"}
"""Keywords that say nothing about a value."""
_OBJECTS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")


def subschemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, schema) for the schema and all schemas in it that are objects, outer ones first.

    A path is "" for the schema itself, else such as ".properties.name.anyOf[1]".
    """
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword, value in schema.items():
        if keyword in _ONE and isinstance(value, dict):
            yield from subschemas(value, f"{path}.{keyword}")
        if keyword in _LISTS and isinstance(value, list):
            for index, one in enumerate(value):
                yield from subschemas(one, f"{path}.{keyword}[{index}]")
        if keyword in _OBJECTS and isinstance(value, dict):
            for name, one in value.items():
                yield from subschemas(one, f"{path}.{keyword}.{name}")


def reachable(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what `subschemas` yields, and the schemas in other places that references within the schema lead to."""
    seen: set[int] = set()
    waiting = [("", schema)]
    while waiting:
        start, part = waiting.pop()
        for path, one in subschemas(part, start):
            if id(one) in seen:
                continue
            seen.add(id(one))
            yield path, one
            target = referred(one.get("$ref"), schema)
            if target is not None and id(target) not in seen:
                waiting.append((one["$ref"].removeprefix("#").replace("/", "."), target))


def referred(reference: Any, root: Any) -> dict[str, Any] | None:
    """Return the object that a reference within the schema `root` leads to; None if it leads to none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


_PARTS = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}  # type of a part -> its key


def tag_parts(tag: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, part) for the JSON schemas, regular expressions and grammars in a structural tag.

    A path leads to the text or schema of the part, such as ".format.elements[1].pattern".
    """
    if isinstance(tag, list):
        for index, one in enumerate(tag):
            yield from tag_parts(one, f"{path}[{index}]")
    elif isinstance(tag, dict):
        key = _PARTS.get(str(tag.get("type")))
        if key is not None:
            yield f"{path}.{key}", tag
        elif "begin" in tag and "schema" in tag:
            yield f"{path}.schema", {"type": "json_schema", "json_schema": tag["schema"]}
        else:
            for name, one in tag.items():
                yield from tag_parts(one, f"{path}.{name}")


def without_unreadable(schema: Any, is_readable: Callable[[str], bool]) -> Any:
    """Return a copy without references to other documents, and without the regular expressions that aren't readable."""
    schema = copy.deepcopy(schema)
    for _, one in list(subschemas(schema)):
        reference, pattern, named = one.get("$ref"), one.get("pattern"), one.get("patternProperties")
        if isinstance(reference, str) and not reference.startswith("#"):
            del one["$ref"]
        if isinstance(pattern, str) and not is_readable(pattern):
            del one["pattern"]
        if isinstance(named, dict) and not all(map(is_readable, named)):
            del one["patternProperties"]
            one.pop("additionalProperties", None)  # the patterns no longer tell which properties are additional
    return schema


def any_of_constants(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in which `oneOf` is `anyOf` where its alternatives are different constants.

    The two are equal there, and llguidance supports only anyOf. Described enumerations have this form:
    `"oneOf": [{"const": "a", "title": "…"}, {"const": "b", "title": "…"}]`.
    """
    schema = copy.deepcopy(schema)
    for _, one in list(subschemas(schema)):
        alternatives = one.get("oneOf")
        if isinstance(alternatives, list) and "anyOf" not in one and _are_distinct(alternatives):
            one["anyOf"] = one.pop("oneOf")
    return schema


def _are_distinct(alternatives: list[Any]) -> bool:
    """Whether each alternative allows only constants that no other one has."""
    seen: list[str] = []
    for one in alternatives:
        if not isinstance(one, dict):
            return False
        values = [one["const"]] if "const" in one else one.get("enum")
        if not isinstance(values, list) or not all(isinstance(value, (str, bool, int)) for value in values):
            return False  # floats, lists and objects have several texts for one value
        seen += {json.dumps(value) for value in values}
    return len(seen) == len(set(seen))

"""Close the objects of a JSON schema: they allow no properties beyond those that the schema names.

An object's names may be spread over `allOf`, `anyOf`, `oneOf` and `$ref`, each part of which must allow the names of
the others. So the parts stay open, and the whole is closed, as `unevaluatedProperties: false` would.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

from engine.text.grammars.schemas import ANNOTATIONS, referred, subschemas

Closing = Literal["strict", "declared"]
"""Which objects are closed: all, or only those that declare `properties`. An explicit additionalProperties is kept."""
CLOSINGS: tuple[Closing, ...] = get_args(Closing)

_VALUES = ("items", "additionalItems", "additionalProperties", "contains", "unevaluatedItems", "unevaluatedProperties")
_VALUE_LISTS = ("prefixItems", "items")
_VALUE_OBJECTS = ("properties", "patternProperties", "$defs", "definitions")
_CHOICES = ("anyOf", "oneOf")
_EXPLICIT = ("additionalProperties", "unevaluatedProperties")


def close_objects(schema: dict[str, Any], closing: Closing, lenient: bool = False) -> dict[str, Any]:
    """Return a copy in which objects allow no properties beyond those that their schema names.

    Raises ValueError that begins with the path of an object that can't be closed; if lenient, it stays open.
    """
    return _Closer(schema, closing, lenient).whole()


class _Names(NamedTuple):
    """What an object may have: names, and patterns of names."""

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()

    def __or__(self, other: Any) -> _Names:
        return _Names(
            tuple(dict.fromkeys(self.names + other.names)), tuple(dict.fromkeys(self.patterns + other.patterns))
        )


class _Closer:
    def __init__(self, root: dict[str, Any], closing: Closing, lenient: bool):
        self._root, self._closing, self._lenient = root, closing, lenient
        self._inserted: list[int] = []  # the targets of references that are being copied to where they apply

    def whole(self) -> dict[str, Any]:
        try:
            return self._whole()
        except _CannotClose as error:
            if not self._lenient:
                raise ValueError(str(error)) from error
            return copy.deepcopy(self._root)

    def _whole(self) -> dict[str, Any]:
        closed = self._value(self._root, "")
        known = {id(one) for _, one in subschemas(self._root)}
        for reference in dict.fromkeys(_references(self._root)):  # such as #/components/schemas/NAME
            target, place = referred(reference, self._root), referred(reference, closed)
            if target is not None and place is not None and id(target) not in known:
                found = self._value(target, reference.removeprefix("#").replace("/", "."))
                place.clear()
                place.update(found)
        return closed

    def _value(self, schema: Any, path: str, beside: _Names | None = None) -> Any:
        """Return a schema of whole values, closed. `beside`: what other schemas of the same object allow."""
        if not isinstance(schema, dict):
            return schema
        try:
            return self._closed(schema, path, beside)
        except _CannotClose:
            if not self._lenient or self._inserted:
                raise
            return self._open(schema, path)

    def _closed(self, schema: dict[str, Any], path: str, beside: _Names | None) -> dict[str, Any]:
        if beside is None and "$ref" in schema and schema.keys() - ANNOTATIONS == {"$ref"}:
            return self._with_values(schema, path)  # what it refers to is closed in its place
        if _IN_PLACE & schema.keys() == {"allOf"} and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1:
            if not self._is_object(schema) and _names_of(schema) == _Names():  # the part is the whole
                found = self._with_values(schema, path)
                return found | {"allOf": [self._value(schema["allOf"][0], f"{path}.allOf[0]", beside)]}
        parts = list(self._parts(schema, path))
        if any(part.get(name, False) is not False for part in parts for name in _EXPLICIT):
            return self._open(schema, path)
        if any(name in part for part in parts for name in _EXPLICIT):  # closed by itself
            return self._open(schema, path)
        choices = [(part, name) for part in parts for name in _CHOICES if self._names_in(part.get(name), path)]
        own = beside if beside is not None else _Names()
        for part in parts:
            own |= _names_of(part)
        is_object = beside is not None or any(map(self._is_object, parts))
        if not choices:
            if not is_object:
                return self._open(schema, path)
            return _with_names(self._open(schema, path), own)
        if len(choices) > 1:
            raise _CannotClose(f"{path}: an object with two of anyOf and oneOf can't be closed; merge them")
        context = own if is_object or own != _Names() else None
        return self._with_closed_choice(schema, path, choices[0], context)

    def _with_closed_choice(
        self, schema: dict[str, Any], path: str, choice: tuple[dict[str, Any], str], context: _Names | None
    ) -> dict[str, Any]:
        part, name = choice
        if part is schema:
            rest = self._open({key: value for key, value in schema.items() if key != name}, path)
            branches = [self._value(one, f"{path}.{name}[{index}]", context) for index, one in enumerate(schema[name])]
            # In its place among the keywords: they decide on the order of properties.
            return {key: branches if key == name else rest[key] for key in schema if key == name or key in rest} | rest
        found = self._open(schema, path)
        branches = [self._value(one, path, context) for one in part[name]]
        return {**found, "allOf": [*found.get("allOf", ()), {"anyOf": branches}]}

    def _open(self, schema: Any, path: str) -> Any:
        """Return a schema that applies to an object beside others: only the values in the object are closed."""
        if not isinstance(schema, dict):
            return schema
        found = self._with_values(schema, path)
        for name in ("allOf", *_CHOICES):
            if isinstance(schema.get(name), list):
                found[name] = [self._open(one, f"{path}.{name}[{index}]") for index, one in enumerate(schema[name])]
        target = referred(schema.get("$ref"), self._root)
        if target is not None and any(self._is_object(one) for one in self._all_parts(schema, path)):
            if id(target) in self._inserted:
                raise _CannotClose(f"{path}: an object whose references are circular can't be closed")
            self._inserted.append(id(target))
            del found["$ref"]  # its place holds a closed schema
            found["allOf"] = [self._open(target, path), *found.get("allOf", ())]
            self._inserted.pop()
        return found

    def _with_values(self, schema: dict[str, Any], path: str) -> dict[str, Any]:
        """Return a schema with the schemas of values in it closed."""
        found = copy.deepcopy({name: value for name, value in schema.items() if name not in _HOLDERS})
        for name, value in schema.items():
            if name not in _HOLDERS:
                continue
            if name in _VALUE_OBJECTS and isinstance(value, dict):
                found[name] = {key: self._value(one, f"{path}.{name}.{key}") for key, one in value.items()}
            elif name in _VALUE_LISTS and isinstance(value, list):
                found[name] = [self._value(one, f"{path}.{name}[{index}]") for index, one in enumerate(value)]
            else:
                found[name] = self._value(value, f"{path}.{name}")
        return {name: found[name] for name in schema}

    def _parts(self, schema: Any, path: str, depth: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the schemas that a value of `schema` must follow: itself, and the schemas of allOf and $ref."""
        if depth > _MAX_DEPTH:
            raise _CannotClose(f"{path}: an object whose references are circular can't be closed")
        if not isinstance(schema, dict):
            return
        yield schema
        parts = schema.get("allOf")
        for one in parts if isinstance(parts, list) else ():
            yield from self._parts(one, path, depth + 1)
        yield from self._parts(referred(schema.get("$ref"), self._root), path, depth + 1)

    def _all_parts(self, schema: Any, path: str, depth: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the schemas that a value of `schema` may follow: `_parts`, and the schemas of anyOf and oneOf."""
        if depth > _MAX_DEPTH:
            raise _CannotClose(f"{path}: an object whose references are circular can't be closed")
        for part in self._parts(schema, path):
            yield part
            for name in _CHOICES:
                for one in part.get(name) or () if isinstance(part.get(name), list) else ():
                    yield from self._all_parts(one, path, depth + 1)

    def _names_in(self, branches: Any, path: str) -> bool:
        """Whether alternatives differ in what they allow in an object."""
        found = branches if isinstance(branches, list) else []
        return any(
            _names_of(part, with_required=False) != _Names() or self._is_object(part) or set(_EXPLICIT) & part.keys()
            for one in found
            for part in self._all_parts(one, path)
        )

    def _is_object(self, schema: dict[str, Any]) -> bool:
        """Whether a schema is closed for what it says itself."""
        if self._closing == "declared":
            return "properties" in schema
        types = schema.get("type")
        return "properties" in schema or "object" in (types if isinstance(types, list) else [types])


_IN_PLACE = {"$ref", "allOf", *_CHOICES}
_HOLDERS = {*_VALUES, *_VALUE_LISTS, *_VALUE_OBJECTS}
_MAX_DEPTH = 32


class _CannotClose(ValueError):
    """An object can't be closed; the message begins with its path."""


def _names_of(schema: dict[str, Any], with_required: bool = True) -> _Names:
    properties, patterns, required = (schema.get(name) for name in ("properties", "patternProperties", "required"))
    names = tuple(properties) if isinstance(properties, dict) else ()
    if with_required and isinstance(required, list):  # they have no schema, but must be there
        names += tuple(name for name in required if isinstance(name, str))
    return _Names(names, tuple(patterns) if isinstance(patterns, dict) else ())


def _with_names(schema: dict[str, Any], allowed: _Names) -> dict[str, Any]:
    """Return a schema closed to what is allowed."""
    properties = dict(schema.get("properties") or {})
    properties |= {name: True for name in allowed.names if name not in properties}
    patterns = dict(schema.get("patternProperties") or {})
    patterns |= {one: True for one in allowed.patterns if one not in patterns}
    found = {**schema, "properties": properties, "additionalProperties": False}
    return {**found, "patternProperties": patterns} if patterns else found


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for one in value.values():
            yield from _references(one)
    elif isinstance(value, list):
        for one in value:
            yield from _references(one)

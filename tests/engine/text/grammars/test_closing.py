"""Closed objects: only the names that a schema declares, wherever it declares them."""

from __future__ import annotations

import json

import jsonschema
import pytest

from engine.text.grammars.closing import close_objects
from tests.engine.text.grammars.json_samples import allows, matcher_of, refusal_of

INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
B = {"type": "object", "properties": {"b": INTEGER}, "required": ["b"]}
NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (A, ['{"a":1}'], ['{"a":1,"1+1":1}', '{"a":1,"b":1}']),
        ({"properties": {"o": A}}, ['{"o":{"a":1}}', "{}"], ['{"o":{"a":1,"b":1}}']),
        ({"type": "array", "items": A}, ['[{"a":1}]'], ['[{"a":1,"b":1}]']),
        ({"allOf": [A, B]}, ['{"a":1,"b":2}'], ['{"a":1}', '{"a":1,"b":2,"c":3}']),
        ({**A, "allOf": [{"allOf": [B]}]}, ['{"a":1,"b":2}'], ['{"a":1,"b":2,"c":3}']),
        ({"allOf": [A, {"$ref": "#/$defs/b"}], "$defs": {"b": B}}, ['{"a":1,"b":2}'], ['{"a":1,"b":2,"c":3}']),
        ({"allOf": [{"$ref": "#/$defs/b"}], "description": "d", "$defs": {"b": B}}, ['{"b":2}'], ['{"b":2,"c":3}']),
        ({"anyOf": [A, B]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', '{"a":1,"c":1}']),
        ({**A, "anyOf": [B, {"properties": {"c": INTEGER}, "required": ["c"]}]},
         ['{"a":1,"b":2}', '{"a":1,"c":2}'], ['{"a":1}', '{"a":1,"b":1,"c":1}', '{"a":1,"b":1,"d":1}']),
        ({"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
         ['{"a":1}', '{"b":1}'], ["{}", '{"a":1,"c":1}']),
        ({"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "$defs": {
            "x": {"type": "object", "properties": {"k": {"const": "x"}, "a": {}}, "required": ["k"]},
            "y": {"type": "object", "properties": {"k": {"const": "y"}, "b": {}}, "required": ["k"]}}},
         ['{"k":"x","a":1}', '{"k":"y","b":1}'], ['{"k":"x","b":1}', '{"k":"y","c":1}']),
        ({"$ref": "#/$defs/node", "$defs": {"node": NODE}},
         ['{"next":{"next":null}}'], ['{"next":{"a":1}}', '{"a":1}']),
        ({"$ref": "#/components/a", "components": {"a": {"items": A}}}, ['[{"a":1}]'], ['[{"a":1,"b":1}]']),
        ({"type": "object"}, ["{}"], ['{"a":1}']),
        ({"type": ["object", "null"], "properties": {"a": {}}}, ["null", '{"a":1}'], ['{"b":1}']),
        ({"type": "object", "required": ["x"]}, ['{"x":1}'], ['{"x":1,"y":1}']),
        ({"type": "object", "patternProperties": {"^x": INTEGER}}, ['{"x1":1}'], ['{"y":1}']),
        ({**A, "additionalProperties": True}, ['{"a":1,"b":2}'], ["{}"]),
        ({**A, "additionalProperties": INTEGER}, ['{"a":1,"b":2}'], ['{"a":1,"b":"x"}']),
        ({"allOf": [{**A, "additionalProperties": True}, {"required": ["b"]}]}, ['{"a":1,"b":2}'], ['{"a":1}']),
        ({"properties": {"default": {"default": {"properties": {}}, "type": "string"}}},
         ['{"default":"x"}'], ['{"x":1}']),
    ],
)  # fmt: skip
def test_a_closed_object_has_the_names_of_all_its_parts(schema, allowed, refused):
    matcher = matcher_of(schema, disable_additional_properties=True)
    assert [text for text in allowed if not allows(matcher, text)] == []
    assert [text for text in refused if allows(matcher, text)] == []
    for text in allowed:
        jsonschema.validate(json.loads(text), schema)


def test_only_objects_that_declare_properties_are_closed_for_arguments():
    schema = {"type": "object", "properties": {"a": A, "free": {"type": "object"}, "map": {"additionalProperties": {}}}}
    closed = close_objects(schema, "declared")
    assert closed["additionalProperties"] is False and closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["free"] == {"type": "object"}
    assert closed["properties"]["map"] == {"additionalProperties": {}}
    assert "additionalProperties" not in schema and "additionalProperties" not in schema["properties"]["a"]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"x": {"allOf": [{"anyOf": [A, B]}, {"anyOf": [A, B]}]}}}, ".properties.x: an object with two"),
        ({**A, "allOf": [{"$ref": "#"}]}, ": an object whose references are circular"),
    ],
)
def test_an_object_that_cannot_be_closed_is_refused_and_stays_open_where_lenient(schema, message):
    assert refusal_of(schema, disable_additional_properties=True).startswith(message)
    found = close_objects(schema, "strict", lenient=True)
    assert "additionalProperties" not in json.dumps(found.get("properties", {}).get("x", found))

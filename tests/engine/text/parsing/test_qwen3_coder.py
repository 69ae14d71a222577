"""Qwen3-Coder's calls: the type of each value by its schema, and closing tags that are left out."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.parsing.chat import ChatParser, joined, parse
from engine.text.parsing.parts import Content, ToolCall
from engine.text.parsing.tool_calls import ToolCallParser
from engine.text.parsing.typed_values import typed
from engine.text.parsing.xml_format import Qwen3Coder

STRING, NULL = {"type": "string"}, {"type": "null"}
TOOLS = {
    "f": {"type": "object", "properties": {"a": STRING, "b": STRING, "n": {"type": "integer"}}},
    "g": {"type": "object", "properties": {"b": {}}},
}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        (STRING, "90210", "90210"),
        (STRING, "null", "null"),
        (STRING, '"quoted"', '"quoted"'),
        ({"type": ["string", "null"]}, "90210", "90210"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": ["string", "null"], "enum": ["null", "x"]}, "null", "null"),
        ({"anyOf": [STRING, NULL]}, "90210", "90210"),
        ({"anyOf": [{"enum": ["1", "2"]}, NULL]}, "1", "1"),
        ({"anyOf": [{"const": "1"}, NULL]}, "1", "1"),
        ({"oneOf": [STRING, {"type": "object"}]}, "[1]", "[1]"),
        ({"oneOf": [STRING, {"type": "object"}]}, '{"x": 1}', {"x": 1}),
        ({"allOf": [{"type": ["string", "boolean"]}, STRING]}, "true", "true"),
        ({"$ref": "#/$defs/name"}, "90210", "90210"),
        ({"anyOf": [{"$ref": "#/$defs/name"}, {"type": "array"}]}, "null", None),
        ({"type": ["integer", "string"]}, "90210", 90210),
        ({"type": ["integer", "string"]}, "007", "007"),
        ({"type": ["integer", "string"]}, "5.0", "5.0"),
        ({"type": ["integer", "string"]}, "true", "true"),
        ({"type": ["integer", "string"], "enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", True]}, "1", "1"),
        ({"enum": [1, "auto"]}, "1", 1),
        ({"const": 3}, "3", 3),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "number"}, "5.0", 5.0),
        ({"type": ["number", "string"]}, "NaN", "NaN"),
        ({"type": "boolean"}, "False", False),
        ({"type": "array"}, '{"a": 1}', '{"a": 1}'),
        ({}, "007", "007"),
        ({}, "[7]", [7]),
        (None, "5", "5"),
    ],
)
def test_a_value_is_read_as_json_only_into_a_type_of_its_schema(schema, text, expected):
    root = {"$defs": {"name": {"type": ["string", "null"]}}}
    found = typed(text, schema, root)
    assert found == expected and type(found) is type(expected)


def test_schemas_that_refer_to_themselves_are_read_once():
    root = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"} for _ in range(40)]}}}
    assert typed("5", {"anyOf": [{"$ref": "#/$defs/A"}, STRING]}, root) == "5"


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({"additionalProperties": STRING}, '{"x": 1}'),
        ({"additionalProperties": {"type": "integer"}}, '{"x": 1}'),
        ({}, {"x": 1}),
        ({"allOf": [{"properties": {"a": STRING}}, {"properties": {"b": {}}}]}, '{"x": 1}'),
    ],
)
def test_the_schema_of_a_parameter_is_found_where_it_stands(properties, expected):
    parser = ChatParser(None, ToolCallParser(Qwen3Coder({"f": {"type": "object", **properties}})))
    [call] = parse(parser, '<function=f><parameter=a>{"x": 1}</parameter></function>')
    assert json.loads(call.arguments) == {"a": expected}


def parser():
    return ChatParser(None, ToolCallParser(Qwen3Coder(TOOLS)))


def in_pieces(text, cuts):
    one, parts = parser(), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += one.feed(text[start:end])
    return joined(parts + one.finish())


def shown(parts):
    return [(part.name, json.loads(part.arguments)) if isinstance(part, ToolCall) else part.text for part in parts]


def call(inside, name="f"):
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def given_(key, value):
    return f"<parameter={key}>\n{value}\n</parameter>\n"


A, B, OPEN_A, OPEN_B = given_("a", "1"), given_("b", "2"), "<parameter=a>\n1\n", "<parameter=b>\n2\n"
DUPLICATE = call(A + given_("a", "2"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (call(OPEN_A + B), [("f", {"a": "1", "b": "2"})]),
        (call("<parameter=a>1<parameter=b>2</parameter>"), [("f", {"a": "1", "b": "2"})]),
        (call(OPEN_A + OPEN_B + given_("n", "3")), [("f", {"a": "1", "b": "2", "n": 3})]),
        (call(A + OPEN_B), [("f", {"a": "1", "b": "2"})]),
        (call(OPEN_A) + "\n" + call(B), [("f", {"a": "1"}), ("f", {"b": "2"})]),
        (call(OPEN_A) + "\nAnd:\n" + call(B), [("f", {"a": "1"}), "And:", ("f", {"b": "2"})]),
        (call(OPEN_A) + "\nDone.", [("f", {"a": "1"}), "Done."]),
        (call(A).replace("</function>\n", "") + "\n" + call(B), [("f", {"a": "1"}), ("f", {"b": "2"})]),
        (call(A).replace("\n</tool_call>", "") + "\n" + call(B), [("f", {"a": "1"}), ("f", {"b": "2"})]),
        (call(OPEN_A).replace("</function>\n", "") + "\n" + call(B), [("f", {"a": "1"}), ("f", {"b": "2"})]),
        (call(A).partition("</function>")[0], [("f", {"a": "1"})]),
        ("<tool_call><function=f>" + A + "</function><function=g>" + B + "</function></tool_call> Yes",
         [("f", {"a": "1"}), ("g", {"b": "2"}), "Yes"]),
        (call("<parameter=a>\n" + A), [("f", {"a": "1"})]),
        (call(A + A), [("f", {"a": "1"})]),
        (DUPLICATE, [DUPLICATE]),
        (call(given_("a", "Example:\n" + call(given_("b", "Paris"))) + B),
         [("f", {"a": "Example:\n" + call(given_("b", "Paris")), "b": "2"})]),
        (call(given_("a", "use <parameter=n>3</parameter> like so")),
         [("f", {"a": "use <parameter=n>3</parameter> like so"})]),
        (call(given_("a", "use <parameter=other> too")), [("f", {"a": "use <parameter=other> too"})]),
        (call(given_("a", "the <function=x> tag") + B), [("f", {"a": "the <function=x> tag", "b": "2"})]),
        (call(given_("a", "x </function> y")), [("f", {"a": "x </function> y"})]),
    ],
)  # fmt: skip
def test_no_parameter_is_lost_where_a_tag_is_missing_or_in_a_value(text, expected):
    whole = parse(parser(), text)
    assert shown(whole) == expected
    for cut in range(1, len(text)):
        assert in_pieces(text, [cut]) == whole, text[:cut]
    assert in_pieces(text, range(1, len(text))) == whole


TAGS = ["<tool_call>", "</tool_call>", "<function=f>", "<function=g>", "</function>", "<parameter=a>", "<parameter=b>",
        "<parameter=z>", "</parameter>", "\n", "x", "<", "<par", A, B, call(A)]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(TAGS), max_size=20), st.data())
def test_any_order_of_tags_parses_alike_however_it_is_cut(pieces, data):
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    whole = parse(parser(), text)
    assert in_pieces(text, cuts) == whole and in_pieces(text, range(1, len(text))) == whole
    if not any(isinstance(part, ToolCall) for part in whole):
        assert whole == ([Content(text)] if text else [])

"""What each constraint allows, and how special tokens relate to their spelling."""

from __future__ import annotations

import json

import pytest

from engine.errors import RequestError
from engine.protocol.structured_outputs import MAX_GRAMMAR_CHARS, Reasoning, StructuredOutputs
from engine.text.grammars.checks import check

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("constraint", "allowed", "refused"),
    [
        ({"json": SCHEMA}, ['{"a":1}', '{ "a" : 1 }', '{\n  "a": 12\n}'], ['{"a":"x"}', "{}", '{"a":1,"b":2}', ""]),
        ({"json": json.dumps({"type": "boolean"})}, ["true", "false"], ["1", '"true"']),
        ({"json": True}, ["1", "[]", "null"], ["x"]),
        ({"json_object": True}, ["{}", '{"a": [1]}'], ["[]", "1"]),
        ({"json": SCHEMA, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}', '{\n"a":1}']),
        ({"json": SCHEMA, "whitespace_pattern": "[ ]?"}, ['{"a":1}', '{"a": 1}'], ['{"a":  1}', '{\n"a":1}']),
        ({"regex": "a+/[0-9]{2}"}, ["a/12", "aaa/00"], ["a/1", "/12", "a/123"]),
        ({"regex": "^ab$"}, ["ab"], ["abc", "a"]),
        ({"regex": r"\d\w"}, ["1a", "2_"], ["\u0663a", "1\u00e9"]),
        ({"choice": ["red", "red fox", 'a"/\\\n', "\u00e9\U0001f600", ""]},
         ["red", "red fox", 'a"/\\\n', "\u00e9\U0001f600", ""], ["re", "red f", "redred"]),
        ({"grammar": 'start: "a" b*\nb: "-" /[0-9]/'}, ["a", "a-1-2"], ["a-", "b"]),
        ({"grammar": 'root ::= "a" b*\nb ::= "-" [0-9]'}, ["a", "a-1-2"], ["a-", "b"]),
    ],
)  # fmt: skip
def test_a_constraint_allows_exactly_its_language(follows, constraint, allowed, refused):
    outputs = StructuredOutputs(**constraint)
    assert [text for text in allowed if not follows(outputs, text)] == []
    assert [text for text in refused if follows(outputs, text)] == []


@pytest.mark.parametrize(
    "keyword",
    [
        {"not": {"type": "array"}}, {"if": {"const": 1}, "then": {"const": 1}}, {"dependentRequired": {"a": ["b"]}},
        {"uniqueItems": True}, {"contains": {"const": 1}}, {"$ref": "https://example.com/other.json"},
        {"type": "string", "format": "color"}, {"type": "string", "pattern": "(?=a)a"},
        {"type": "string", "pattern": r"(a)\1"},
    ],
)  # fmt: skip
def test_a_keyword_that_cannot_be_followed_is_refused_with_its_path(vocabulary, keyword):
    schema = {"type": "object", "properties": {"ok": {"type": "integer"}, "bad": keyword}}
    matcher, _, refusal = check(StructuredOutputs(json=schema), vocabulary)
    assert matcher is None and refusal.reason.startswith(".properties.bad: ")


@pytest.mark.parametrize(
    "keyword",
    [
        {"minProperties": 1, "maxProperties": 2}, {"patternProperties": {"^a": {}}}, {"prefixItems": [{}, {}]},
        {"minItems": 1, "maxItems": 2}, {"exclusiveMinimum": 1, "exclusiveMaximum": 5}, {"multipleOf": 5},
        {"allOf": [{"type": "integer"}, {"minimum": 1}]}, {"$ref": "#/$defs/a"}, {"format": "date", "type": "string"},
        {"title": "t", "description": "d", "default": 1, "examples": [1]},
    ],
)  # fmt: skip
def test_a_keyword_that_the_documentation_names_is_supported(vocabulary, keyword):
    schema = {"type": "object", "properties": {"ok": keyword}, "$defs": {"a": {"type": "null"}}}
    matcher, _, refusal = check(StructuredOutputs(json=schema), vocabulary)
    assert matcher is not None, refusal


def test_one_of_different_constants_is_an_enumeration(follows, vocabulary):
    described = [{"const": "a", "title": "A"}, {"const": 1}, {"enum": [True, "b"]}]
    outputs = StructuredOutputs(json={"type": "array", "items": {"oneOf": described}})
    assert follows(outputs, '["a",1,true,"b"]') and not follows(outputs, "[2]")
    for overlapping in ([{"const": 1}, {"enum": [2, 1]}], [{"minimum": 1}, {"maximum": 2}], [{"const": 1}, {}]):
        matcher, _, refusal = check(StructuredOutputs(json={"items": {"oneOf": overlapping}}), vocabulary)
        assert matcher is None and refusal.reason.startswith(".items: oneOf is supported only where")


def test_closed_objects_allow_only_named_properties_at_any_depth(follows):
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": inner, "free": {"additionalProperties": {"type": "integer"}}}}
    open_, closed = StructuredOutputs(json=schema), StructuredOutputs(json=schema, disable_additional_properties=True)
    for text in ('{"x":1}', '{"a":{"x":1}}'):
        assert follows(open_, text) and not follows(closed, text)
    assert follows(closed, '{"a":{"b":1},"free":{"y":2}}')


def test_text_of_a_grammar_is_matched_by_its_spelling_and_never_by_a_special_token(follows):
    for outputs in (
        StructuredOutputs(choice=["<call>"]),
        StructuredOutputs(regex="<call>"),
        StructuredOutputs(grammar='start: "<call>"'),
    ):
        assert follows(outputs, "<call>") and not follows(outputs, "«<call>»")
    assert follows(StructuredOutputs(json={"const": "<call>"}), '"<call>"')
    assert not follows(StructuredOutputs(json={"type": "string"}), '"«<call>»"')
    named = StructuredOutputs(grammar='start: <call> "a"')
    assert follows(named, "«<call>»a") and not follows(named, "<call>a")


# ---- structural tags -----------------------------------------------------------------------------------------------


def tags(format_):
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": format_})


JSON = {"type": "json_schema", "json_schema": SCHEMA}
CALL = {"type": "tag", "begin": "<call>\n", "content": JSON, "end": "</call>"}
FUNCTION = {"type": "tag", "begin": "[f=a]", "content": JSON, "end": ["[/f]", "[end]"]}
CALLED = '«<call>»\n{"a":1}«</call>»'


@pytest.mark.parametrize(
    ("format_", "allowed", "refused"),
    [
        ({"type": "const_string", "value": "a<call>b"}, ["a«<call>»b"], ["a<call>b", "a"]),
        ({"type": "sequence", "elements": [{"type": "regex", "pattern": "[0-9]+"}, {"type": "grammar",
          "grammar": 'root ::= "z"'}]}, ["1z", "22z"], ["z", "1"]),
        ({"type": "or", "elements": [{"type": "const_string", "value": "a"}, JSON]}, ["a", '{"a":1}'], ["b", "{}"]),
        (CALL, [CALLED], ['<call>\n{"a":1}</call>', '«<call>»\n{"b":1}«</call>»', '«<call>»\n{"a":1}']),
        ({"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALL]},
         ["", "any text", CALLED, f"so {CALLED}and {CALLED} done"],
         ['«<call>»\n{"b":1}«</call>»', "spelled <call>", "«</call>»"]),
        ({"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALL], "at_least_one": True},
         [CALLED, f"a{CALLED}b"], ["", "any text"]),
        ({"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALL], "at_least_one": True,
          "stop_after_first": True}, [CALLED], [CALLED + CALLED, f"{CALLED}a"]),
        ({"type": "triggered_tags", "triggers": ["[f="], "tags": [FUNCTION]},
         ["", "[f", 'x[f=a]{"a":1}[/f]y', '[f=a]{"a":1}[end][f=a]{"a":2}[/f]'], ["x[f=b]", '[f=a]{"b":1}[/f]']),
        ({"type": "tags_with_separator", "tags": [FUNCTION], "separator": ", "},
         ["", '[f=a]{"a":1}[/f]', '[f=a]{"a":1}[/f], [f=a]{"a":2}[end]'], ['[f=a]{"a":1}[/f][f=a]{"a":2}[/f]']),
        ({"type": "sequence", "elements": [{"type": "tag", "begin": "", "content": {"type": "any_text"},
          "end": "</call>"}, {"type": "const_string", "value": "ok"}]}, ["hm«</call>»ok"], ["ok", "hm«</call>»no"]),
        ({"type": "any_text", "excludes": ["red"]}, ["a fox", ""], ["a red fox"]),
    ],
)  # fmt: skip
def test_a_structural_tag_allows_exactly_its_language(follows, format_, allowed, refused):
    outputs = tags(format_)
    assert [text for text in allowed if not follows(outputs, text)] == []
    assert [text for text in refused if follows(outputs, text)] == []


def test_a_structural_tag_of_structures_and_triggers(follows):
    structure = {"begin": "[f=a]", "schema": SCHEMA, "end": "[/f]"}
    outputs = StructuredOutputs(
        structural_tag={"type": "structural_tag", "structures": [structure], "triggers": ["[f="]}
    )
    assert follows(outputs, 'x[f=a]{"a":1}[/f]y') and not follows(outputs, "x[f=a]{}[/f]")


@pytest.mark.parametrize(
    ("format_", "message"),
    [
        (7, r".format must be an object; found 7"),
        ({"type": "xml"}, ".format.type must be one of const_string, "),
        ({"type": "sequence", "elements": []}, ".format.elements must be a non-empty list; found []"),
        ({"type": "sequence", "elements": [{"type": "regex"}]}, ".format.elements[0].pattern must be"),
        ({"type": "tag", "begin": "a", "content": JSON, "end": 7}, ".format.end must be a string or a list of strings"),
        ({"type": "any_text", "more": 1}, ".format has an unsupported key 'more'; supported: type, excludes"),
        ({"type": "triggered_tags", "triggers": ["<x>"], "tags": [CALL]}, ".format.tags[0].begin must start with one"),
    ],
)  # fmt: skip
def test_an_invalid_structural_tag_is_refused_with_its_path(vocabulary, format_, message):
    _, _, refusal = check(tags(format_), vocabulary)
    assert refusal.reason.startswith(message)


def test_deep_nesting_is_refused(vocabulary):
    format_ = JSON
    for _ in range(200):
        format_ = {"type": "sequence", "elements": [format_]}
    _, _, refusal = check(tags(format_), vocabulary)
    assert "nested more than 64 deep" in refusal.reason


# ---- reasoning -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("begin", "end"), [("<call>", "</call>"), ("<think>", "</think>")])
def test_a_constraint_begins_after_the_reasoning(follows, vocabulary, begin, end):
    is_special = len(vocabulary.tokenize_str(end, parse_special=True)) == 1
    first, last = (f"«{begin}»", f"«{end}»") if is_special else (begin, end)
    open_ = StructuredOutputs(choice=["yes"], reasoning=Reasoning(begin, end, is_open=True))
    assert follows(open_, f"hm{last}\n\nyes") and follows(open_, f"{last}yes")
    assert not follows(open_, "yes") and not follows(open_, f"hm{last}no")
    optional = StructuredOutputs(choice=["yes"], reasoning=Reasoning(begin, end, is_open=False))
    assert follows(optional, f"{first}hm{last}\n\nyes") and follows(optional, "yes")
    assert not follows(optional, f"hm{last}yes") and not follows(optional, f"{first}hm{last}no")


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "path", "cause"),
    [
        ({"type": "object", "properties": {"a": {"items": {"not": {}}}}}, ".properties.a.items", '"not"'),
        ({"anyOf": [{"type": "string"}, {"type": "array", "uniqueItems": True}]}, ".anyOf[1]", '"uniqueItems"'),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"y": {"pattern": "(?=a)"}}}}},
         ".$defs.x.properties.y", "look-around"),
        ({"type": "thing"}, "", "Invalid type: thing"),
        ({"properties": {"a": {"$ref": "#/missing"}}}, ".properties.a", "/missing"),
        ({"type": "string", "format": "color"}, "", "Unknown format: color"),
        (False, "", "no value satisfies"),
    ],
)  # fmt: skip
def test_the_part_of_a_schema_at_fault_is_named(vocabulary, schema, path, cause):
    _, _, refusal = check(StructuredOutputs(json=schema), vocabulary)
    assert refusal.reason.startswith(f"{path}: ") and cause in refusal.reason


def test_options_within_a_schema_do_not_switch_off_checks(vocabulary):
    options = {"x-guidance": {"lenient": True}, "not": {}}
    _, _, refusal = check(StructuredOutputs(json=options), vocabulary)
    assert '"not"' in refusal.reason


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "structured_outputs has no constraint"),
        ({"json": {}, "regex": "a"}, "structured_outputs has json and regex"),
        ({"json": 3}, "structured_outputs.json must be an object"),
        ({"json": "[1"}, "structured_outputs.json is not valid JSON"),
        ({"json": "[" * 100_000}, "structured_outputs.json is not valid JSON"),
        ({"json": {"minimum": float("nan")}}, "structured_outputs.json is not JSON"),
        ({"json": {"description": "x" * MAX_GRAMMAR_CHARS}}, "structured_outputs.json has 262162 characters"),
        ({"regex": ""}, "structured_outputs.regex must be a non-empty string"),
        ({"regex": "\ud800"}, "structured_outputs.regex contains a lone surrogate"),
        ({"choice": "red"}, "structured_outputs.choice must be a list of 1 to 4096 strings; found 'red'"),
        ({"choice": ["a", 1]}, "structured_outputs.choice must be a list"),
        ({"json_object": "yes"}, "structured_outputs.json_object must be true or false"),
        ({"regex": "a", "whitespace_pattern": "b"}, "structured_outputs.whitespace_pattern applies to json"),
        ({"json": {}, "whitespace_pattern": "b", "disable_any_whitespace": True}, "remove one of them"),
        ({"structural_tag": []}, "structured_outputs.structural_tag must be an object"),
    ],
)
def test_an_invalid_constraint_is_refused_at_construction(fields, message):
    with pytest.raises(RequestError) as refusal:
        StructuredOutputs(**fields)
    assert message in str(refusal.value) and refusal.value.param == "structured_outputs"
    assert len(str(refusal.value)) < 300


def test_errors_name_the_field_of_the_caller():
    with pytest.raises(RequestError, match=r"^response_format\.json_schema\.schema must be") as refusal:
        StructuredOutputs(json=3, field="response_format.json_schema.schema")
    assert refusal.value.param == "response_format"


def test_constraints_compare_by_what_they_allow():
    assert StructuredOutputs(regex="a", field="regex") == StructuredOutputs(regex="a")
    assert StructuredOutputs(json={"type": "string"}) == StructuredOutputs(json='{"type":"string"}')
    assert hash(StructuredOutputs(choice=["a"])) == hash(StructuredOutputs(choice=("a",)))

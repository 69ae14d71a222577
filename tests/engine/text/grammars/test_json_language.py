"""JSON that a schema's grammar allows satisfies the schema, by jsonschema and Python's parsers, and the converse."""

from __future__ import annotations

import json
import random
import re
from datetime import date, datetime
from decimal import Decimal
from ipaddress import IPv4Address, IPv6Address
from uuid import UUID

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.text.grammars.json_samples import allows, matcher_of, refusal_of, sample

# ---- names ---------------------------------------------------------------------------------------------------------

INTEGER = {"type": "integer"}
OPEN = {"type": "object", "properties": {"a": INTEGER}}


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (OPEN, r'{"\u0061":"x"}'),
        (OPEN, r'{"a":1,"\u0061":"x"}'),
        ({"properties": {"\n": INTEGER}}, r'{"\u000a":"x"}'),
        ({"properties": {"\n": INTEGER}}, r'{"\u000A":"x"}'),
        ({"properties": {"\x7f": INTEGER}}, r'{"\u007f":"x"}'),
        ({"properties": {"/": INTEGER}}, r'{"\/":"x"}'),
        ({"properties": {'"': INTEGER}}, r'{"\u0022":"x"}'),
        ({"properties": {"\U0001f600": INTEGER}}, r'{"\ud83d\ude00":"x"}'),
        ({"properties": {"\U0001f600": INTEGER}}, r'{"\uD83D\uDE00":"x"}'),
        ({"required": ["a"], "properties": {"a": INTEGER}}, r'{"a":1,"\u0061":"x"}'),
        ({"patternProperties": {"^a": INTEGER}}, r'{"\u0061b":"x"}'),
        ({"patternProperties": {"^\n": INTEGER}}, r'{"\u000ab":"x"}'),
        ({"items": OPEN}, r'[{"\u0061":"x"}]'),
        ({"$ref": "#/$defs/o", "$defs": {"o": OPEN}}, r'{"\u0061":"x"}'),
        ({"$ref": "#/components/o", "components": {"o": OPEN}}, r'{"\u0061":"x"}'),
        ({"allOf": [OPEN, {"properties": {"b": {}}}]}, r'{"\u0061":"x"}'),
        ({"anyOf": [OPEN, {"type": "null"}]}, r'{"\u0061":"x"}'),
    ],
)  # fmt: skip
def test_an_additional_property_is_no_escaped_spelling_of_a_declared_one(schema, text):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(text), schema)
    assert not allows(matcher_of(schema), text)


def test_names_without_escapes_stay_allowed():
    matcher = matcher_of(OPEN)
    for text in ('{"b":1}', '{"a":1,"\u00e9":2}', '{"\U0001f600":1}', r'{"\"\\\n":1}', "{}"):
        assert allows(matcher, text), text
    assert allows(matcher_of({"type": "string"}), r'"\u001b[0m"')  # without names, escapes are as before
    closed = {**OPEN, "additionalProperties": False, "properties": {"a": {"const": "\x1b"}}}
    assert allows(matcher_of(closed), r'{"a":"\u001b"}')


def test_a_constant_that_needs_an_escape_is_refused_where_escapes_are():
    assert refusal_of({"properties": {"a": {"const": "\x1b"}}}).startswith(".properties.a: const has a control char")


NAMES = st.sampled_from(["a", "ab", "b", "/", '"', "\n", "\u00e9", "\U0001f600"])
LEAVES = st.sampled_from([{}, INTEGER, {"type": "string", "maxLength": 2}, {"type": "null"}, {"const": {"a": 1}}])


def objects(values: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    names = st.dictionaries(NAMES, values, max_size=3)
    return st.fixed_dictionaries(
        {"type": st.just("object"), "properties": names},
        optional={
            "additionalProperties": values | st.booleans(),
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$"]), values, max_size=1),
            "required": st.lists(NAMES, max_size=2, unique=True),
            "minProperties": st.just(1),
        },
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda values: (
        objects(values)
        | st.builds(lambda one, two: {"allOf": [one, two]}, objects(values), objects(values))
        | st.builds(lambda one, two: {"anyOf": [one, two]}, values, values)
        | st.builds(lambda one: {"type": "array", "items": one, "maxItems": 2}, values)
    ),
    max_leaves=5,
)


@settings(max_examples=50, deadline=None)
@given(SCHEMAS, st.booleans(), st.integers(0, 2**32))
def test_what_a_grammar_allows_satisfies_its_schema(schema, is_closed, seed):
    if refusal_of(schema, disable_additional_properties=is_closed):
        return
    matcher = matcher_of(schema, disable_additional_properties=is_closed)
    rng = random.Random(seed)
    for _ in range(4):
        text = sample(matcher, rng, likely='\\u0061ab/"')
        if text is not None:
            jsonschema.validate(json.loads(text), schema)


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"maximum": 0.75}, ["0.7", "0.75", "0", "-1", "0.05"], ["0.76", "0.751", "1"]),
        ({"minimum": 0.7, "maximum": 0.75}, ["0.7", "0.71", "0.75"], ["0.69", "0.8", "0"]),
        ({"minimum": -0.75}, ["-0.7", "-0.75", "0", "3"], ["-0.76", "-1"]),
        ({"exclusiveMinimum": 0, "maximum": 0.75}, ["0.01", "0.7"], ["0", "-0", "0.0", "0.8"]),
        ({"minimum": -2, "exclusiveMaximum": 0}, ["-0.1", "-2"], ["0", "-0", "-0.0"]),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["1.1", "1.4"], ["1", "1.0", "1.5"]),
        ({"minimum": 0, "exclusiveMinimum": True}, ["0.5", "1"], ["0"]),
        ({"minimum": 1e-7}, ["0.0000001", "1"], ["0", "0.00000009"]),
        ({"maximum": 1.7976931348623157e308}, ["5"], []),
        ({"multipleOf": 0.25}, ["0.5", "0.25", "3", "-1.75"], ["0.3", "0.255"]),
        ({"multipleOf": 0.01, "maximum": 9.99}, ["9.9", "9.99", "9"], ["9.999", "10"]),
        ({"minimum": 9007199254740993}, ["9007199254740994"], ["9007199254740992"]),
        ({"type": "integer", "maximum": 9223372036854775807}, ["9223372036854775807"], []),
        ({"type": "integer", "minimum": -9223372036854775808}, ["-9223372036854774784", "5"], []),
        ({"type": "integer", "minimum": 0.5, "maximum": 2.5}, ["1", "2"], ["0", "3", "1.5"]),
        ({"type": ["number", "null"], "maximum": 0.75}, ["null", "0.7"], ["1", '"a"']),
        ({"type": ["integer", "number"], "minimum": 3}, ["3", "3.5"], ["0", "-87", "2.5"]),
        ({"type": ["number", "integer", "null"], "multipleOf": 0.5}, ["1", "0.5", "null"], ["0.3"]),
        ({"type": ["string", "integer"], "maximum": 3}, ["3", '"9"'], ["4", "2.5"]),
    ],
)  # fmt: skip
def test_bounds_on_numbers_are_exact(schema, allowed, refused):
    matcher = matcher_of({"type": "number", **schema})
    assert [text for text in allowed if not allows(matcher, text)] == []
    assert [text for text in refused if allows(matcher, text)] == []


def test_bounds_apply_to_numbers_only():
    matcher = matcher_of({"maximum": 0.75})
    assert all(allows(matcher, text) for text in ("0.7", '"text"', "null", "[2]", '{"a":2}')) and not allows(
        matcher, "2"
    )


def decimals(places: int = 6) -> st.SearchStrategy[Decimal]:
    return st.builds(
        lambda digits, scale: Decimal(digits).scaleb(-scale),
        st.integers(-(10**7), 10**7) | st.integers(-20, 20),
        st.integers(0, places),
    )


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["number", "integer"]), decimals(), decimals(), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from([None, None, 1, 3, 0.5, 0.25, 0.01]), st.lists(decimals(), min_size=5, max_size=5),
)  # fmt: skip
def test_a_number_is_allowed_if_and_only_if_it_is_within_its_bounds(
    kind, low, high, left, right, one_sided, step, more
):
    low, high = sorted((low, high))
    schema = {"type": kind, "exclusiveMinimum" if left else "minimum": float(low)}
    if not one_sided:
        schema["exclusiveMaximum" if right else "maximum"] = float(high)
    if step is not None:
        schema["multipleOf"] = step

    def is_valid(value: Decimal) -> bool:
        return (
            (value > low or (value == low and not left))
            and (one_sided or value < high or (value == high and not right))
            and (kind == "number" or value == int(value))
            and (step is None or value % Decimal(str(step)) == 0)
        )

    near = [
        bound.quantize(Decimal(1).scaleb(-places)) + Decimal(steps).scaleb(-places)
        for bound in (low, high, Decimal(0))
        for places in range(7)
        for steps in (-1, 0, 1)
    ]
    values = {*near, *more}
    reason = refusal_of(schema)
    if reason:
        assert "Unsatisfiable" in reason
        assert not any(map(is_valid, values))
        return
    matcher = matcher_of(schema)
    for value in values:
        text = format(value.normalize(), "f")
        assert allows(matcher, text) == is_valid(value), (schema, text)
        for other in (f"{text}e0", f"{text}.0", f"{text}0", "-0", "-0.0"):
            if re.fullmatch(r"-?\d+(\.\d+)?(e0)?", other) and allows(matcher, other):
                assert is_valid(Decimal(other)), (schema, other)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": 2**53 + 1}, ": the number 9007199254740993 can't be followed exactly"),
        ({"properties": {"a": {"enum": [1, 2**70]}}}, ".properties.a: the number 1180591620717411303424"),
        ({"minimum": 1e25}, ": minimum 1e+25 leaves no number of 64 bits"),
        ({"minimum": 1e-20}, ": minimum 1e-20 has more than 18 decimal places"),
        ({"maximum": "1"}, ": maximum must be a number; found '1'"),
    ],
)
def test_a_number_that_cannot_be_followed_exactly_is_refused_by_name(schema, message):
    assert refusal_of(schema).startswith(message)


# ---- formats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format_", "allowed", "refused"),
    [
        ("date", ["2023-02-28", "2024-02-29", "2000-02-29", "0004-02-29", "2023-12-31", "9999-01-01"],
         ["2023-02-29", "1900-02-29", "2100-02-29", "2023-02-30", "2023-04-31", "2023-13-01", "2023-00-10",
          "2023-01-00", "0000-01-01", "2023-1-1"]),
        ("date-time", ["2024-02-29T23:59:59Z", "2023-01-01t00:00:00.25+05:30", "1998-12-31T23:59:60Z",
                       "1990-12-31T15:59:60.1-08:00"],
         ["2023-02-29T00:00:00Z", "2023-01-01T24:00:00Z", "2023-01-01T12:00:60Z", "2023-01-01T00:00:00",
          "1998-12-31T23:58:60Z"]),
        ("time", ["23:59:60Z", "00:00:00z", "01:29:60+01:30", "23:29:60-00:30", "12:00:00.123-11:59"],
         ["12:00:60Z", "23:59:60+01:00", "24:00:00Z", "12:60:00Z", "12:00:61Z", "12:00:00"]),
        ("hostname", ["a", "a-b.example", "a" * 63], ["-a", "a-", "a" * 64, "a..b", "a_b", ".".join(["abc"] * 64)]),
        ("email", ["a.b+c@example.org"], ["a@b@c", "a", "@b", ".a@b", "a.@b", "a@-b", f"a@{'b' * 64}"]),
        ("ipv4", ["1.2.3.255", "0.0.0.0"], ["1.2.3", "256.1.1.1", "01.2.3.4"]),
        ("ipv6", ["::", "::1", "1:2:3:4:5:6:7:8", "fe80::1", "::ffff:192.0.2.128", "1:2:3:4:5:6:7::", "1::8",
                  "1:2:3:4:5:6:1.2.3.4", "1::7:8", "64:ff9b::192.0.2.33"],
         [":::", "1::2::3", "12345::", "1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7:1.2.3.4", "::256.1.1.1",
          "1:2:3:4:5:6:7:8::", "1:2:3:4:5:6:7", "fe80::1%0"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
        ("duration", ["P1Y2M3DT4H5M6S", "PT1H", "P2W"], ["P", "1Y", "PT", "P1Y2W", "P1D2Y"]),
        ("uri", ["https://example.org/a?b#c", "urn:a:b"], ["example.org", "http://[:::]/", "http://a b/"]),
    ],
)  # fmt: skip
def test_a_format_is_followed(format_, allowed, refused):
    matcher = matcher_of({"type": "string", "format": format_})
    assert [text for text in allowed if not allows(matcher, json.dumps(text))] == []
    assert [text for text in refused if allows(matcher, json.dumps(text))] == []


def _is_moment(text: str) -> datetime:
    return datetime.fromisoformat(re.sub(r":60(\D)", r":59\1", re.sub(r"\.\d+", "", text.upper())))


@pytest.mark.parametrize(
    ("format_", "parse", "likely"),
    [
        ("date", date.fromisoformat, "0239"),
        ("date-time", _is_moment, "02369:"),
        ("time", lambda text: _is_moment(f"2000-01-01T{text}"), "0269:"),
        ("ipv4", IPv4Address, ""),
        ("ipv6", IPv6Address, ":"),
        ("uuid", UUID, ""),
    ],
)
def test_what_a_format_allows_is_parsed_by_the_standard_library(format_, parse, likely):
    matcher, rng = matcher_of({"type": "string", "format": format_}), random.Random(36)
    texts = [text for text in (sample(matcher, rng, likely, 80) for _ in range(60)) if text is not None]
    assert len(texts) > 20
    for text in texts:
        parse(json.loads(text))


def test_a_format_combines_with_other_keywords():
    matcher = matcher_of({"type": "string", "format": "date", "pattern": "^2024", "enum": ["2024-02-29", "2023-01-01"]})
    assert allows(matcher, '"2024-02-29"') and not allows(matcher, '"2023-01-01"')
    assert allows(matcher_of({"format": "date"}), "7") and allows(
        matcher_of({"type": "integer", "format": "int64"}), "7"
    )
    assert refusal_of({"items": {"type": "string", "format": "unknown"}}).startswith(".items: Unknown format: unknown")


# ---- keywords that allow everything --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "neutral",
    [
        {"uniqueItems": False}, {"uniqueItems": True, "maxItems": 1}, {"uniqueItems": True, "type": "integer"},
        {"contains": {}, "minContains": 0}, {"minContains": 1}, {"maxContains": 1}, {"not": False}, {"if": {}},
        {"then": {"const": 2}}, {"else": {"const": 2}}, {"if": {"const": 1}, "then": True}, {"dependentRequired": {}},
        {"dependentRequired": {"a": []}}, {"dependentSchemas": {"a": {}}}, {"dependencies": {}},
        {"propertyNames": {}}, {"unevaluatedProperties": True}, {"unevaluatedItems": {}}, {"patternProperties": {}},
        {"required": []}, {"minProperties": 0}, {"minLength": 0}, {"minItems": 0}, {"minItems": 0.0}, {"pattern": ""},
        {"additionalProperties": True}, {"additionalItems": True}, {"items": True}, {"prefixItems": []},
        {"allOf": []}, {"anyOf": [{}]}, {"oneOf": [True]}, {"deprecated": True}, {"$anchor": "x"},
        {"$dynamicAnchor": "x"}, {"exclusiveMinimum": False}, {"contentSchema": {}}, {"nullable": True},
    ],
)  # fmt: skip
def test_a_keyword_that_allows_everything_is_accepted(neutral):
    assert allows(matcher_of({"properties": {"a": neutral}, "type": "object"}), '{"a":1}')
    assert allows(matcher_of({"type": "object", "properties": {"a": {"type": "integer"}}, **neutral}), '{"a":1}') or (
        neutral.get("type") == "integer"
    )


def test_a_number_of_additional_properties_is_refused():
    schema = {"additionalProperties": INTEGER, "minProperties": 2}
    assert "minProperties 2 needs different" in refusal_of(schema)
    closed = {"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "additionalProperties": False}
    assert not refusal_of({"type": "object", **closed, "minProperties": 2})
    assert not refusal_of({**schema, "minProperties": 1})


# ---- whitespace ----------------------------------------------------------------------------------------------------


def test_whitespace_is_a_space_or_a_line_break_with_its_indentation():
    matcher = matcher_of({"type": "object"})
    value = {"a": {"b": [1, {"c": []}]}, "d": [[["e"]]]}
    for _ in range(3):  # deeper and deeper
        value = {"f": value}
    for text in (json.dumps(value), json.dumps(value, separators=(",", ":")), json.dumps(value, indent=2)):
        assert allows(matcher, text), text
    assert allows(matcher, json.dumps(value, indent=4)) and allows(matcher, json.dumps(value, indent="\t"))
    assert allows(matcher, json.dumps(value, indent=2).replace("\n", "\r\n"))
    for text in ('{"a":\n\n1}', '{"a":  1}', "{\n\n}", '{"a":\t1}', '{"a":\n' + " " * 41 + "1}", '{"a":1 \n}'):
        assert not allows(matcher, text), text


def test_a_model_that_prefers_line_breaks_writes_one_at_a_place():
    matcher = matcher_of({"type": "object", "properties": {"a": INTEGER}, "required": ["a"]})
    ids = list(b'{"a":')
    assert matcher.try_consume_tokens(ids) == len(ids) and matcher.consume_token(10)
    assert matcher.try_consume_tokens([10]) == 0 and matcher.try_consume_tokens([32] * 41) == 40


def test_a_multiple_that_llguidance_cannot_read_is_refused_by_name():
    assert refusal_of({"type": "number", "multipleOf": 0.07}).startswith(": multipleOf 0.07 can't be followed exactly")
    matcher = matcher_of({"type": "number", "multipleOf": 0.015})
    assert allows(matcher, "0.3") and allows(matcher, "3") and not allows(matcher, "0.01")

"""Random JSON schemas in the kinds of JSONSchemaBench: API parameters, resources, events and configuration files.

Strings, arrays and whitespace are bounded, so that most answers of a random model end by themselves.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]

NAMES = ("id", "name", "kind", "größe", "a b", 'quo"te', "items", "url", "$ref!", "x", "metadata", "1st", "")
PATTERNS = (
    "^[a-z]{1,6}$", "^[A-Z][a-z]*-?[0-9]{2}$", "[0-9]{3}", "^(foo|bar)?$", r"^\d{4}-\d{2}$", r"^v\d+(\.\d+){0,2}$",
    "^[^/]{1,4}/[^/]{1,4}$", r"^\w{2,5}$", "^#[0-9a-fA-F]{6}$", r"^\S{1,3}\s\S{1,3}$", "^a|b$",
)  # fmt: skip
FORMATS = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname", "duration")
# Keywords that describe and don't constrain.
NOTES: st.SearchStrategy[Schema] = st.dictionaries(
    st.sampled_from(["title", "description", "$comment"]), st.text("abc é\n\"'", max_size=8), max_size=2
)
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**6), 10**6), st.sampled_from([0.5, -1.25, 1e-3]),
    st.text("ab\\\"/\n\té😀\x7f", max_size=5),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda value: st.lists(value, max_size=2) | st.dictionaries(st.sampled_from(NAMES), value, max_size=2),
    max_leaves=4,
)


@st.composite
def strings(draw: st.DrawFn) -> Schema:
    kind = draw(st.sampled_from(["length", "length", "pattern", "format"]))
    if kind == "pattern":
        return {"type": "string", "pattern": draw(st.sampled_from(PATTERNS)), "maxLength": 12}
    if kind == "format":
        return {"type": "string", "format": draw(st.sampled_from(FORMATS))}
    low = draw(st.integers(0, 4))
    return {"type": "string", "maxLength": low + draw(st.integers(0, 6))} | ({"minLength": low} if low else {})


@st.composite
def numbers(draw: st.DrawFn) -> Schema:
    """Both bounds are given: a random model may write digits for ever."""
    low = draw(st.integers(-200, 200))
    high = low + draw(st.integers(0, 2000))
    schema: Schema = {"type": draw(st.sampled_from(["integer", "integer", "number"]))}
    strict = draw(st.booleans()) and high > low + 1
    schema |= {"exclusiveMinimum" if strict else "minimum": low, "exclusiveMaximum" if strict else "maximum": high}
    if schema["type"] == "integer" and high - low >= 40 and draw(st.booleans()):
        schema["multipleOf"] = draw(st.sampled_from([1, 2, 5, 10]))
    return schema


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    low = draw(st.integers(0, 2))
    schema: Schema = {"type": "array", "maxItems": low + draw(st.integers(0, 2)), "items": draw(inner)}
    if low:
        schema["minItems"] = low
    if draw(st.integers(0, 4)) == 0:
        schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
        schema["items"] = draw(st.booleans()) and schema["items"]
        schema["maxItems"] = max(schema["maxItems"], len(schema["prefixItems"]))
        if not schema["items"]:
            schema["minItems"] = min(low, len(schema["prefixItems"]))
    return schema


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Schema]) -> Schema:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=4))
    schema: Schema = {"type": "object", "properties": properties}
    required = [name for name in properties if draw(st.booleans())]
    if required:
        schema["required"] = required
    extra = draw(st.sampled_from(["none", "none", "none", "schema", "pattern"]))
    if extra == "none":
        schema["additionalProperties"] = False
    elif extra == "schema":
        schema |= {"additionalProperties": draw(inner)}
    else:
        schema |= {"patternProperties": {"^x-[a-z]{1,3}$": draw(inner)}, "additionalProperties": False}
    return schema


def combinations(inner: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    several = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        several.map(lambda schemas: {"anyOf": schemas}),
        several.map(lambda schemas: {"oneOf": schemas}),
        st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(
            lambda values: {"oneOf": [{"const": value, "title": str(value)} for value in values]}
        ),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda schemas: {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"kind": {"const": str(number)}, "value": schema},
                        "required": ["kind"],
                        "additionalProperties": False,
                    }
                    for number, schema in enumerate(schemas)
                ]
            }
        ),
        st.tuples(strings(), st.integers(0, 3)).map(lambda pair: {"allOf": [pair[0], {"minLength": pair[1]}]}),
        inner.map(lambda schema: {"anyOf": [schema, {"type": "null"}]}),
    )


LEAVES: st.SearchStrategy[Schema] = st.one_of(
    strings(),
    numbers(),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}]),
    st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    VALUES.map(lambda value: {"const": value}),
    st.sampled_from(["leaf", "node"]).map(lambda name: {"$ref": f"#/$defs/{name}"}),
)
ANY = st.recursive(
    LEAVES, lambda inner: arrays(inner) | objects(inner) | objects(inner) | combinations(inner), max_leaves=6
)
DEFINITIONS: st.SearchStrategy[Schema] = st.fixed_dictionaries(
    {
        "leaf": strings() | numbers(),
        "node": st.just(
            {
                "type": "object",
                "properties": {
                    "v": {"type": "boolean"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["v"],
                "additionalProperties": False,
            }
        ),
    }
)
BODIES = st.one_of(objects(ANY), objects(ANY), arrays(ANY), combinations(ANY))


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    """Draw a whole schema: mostly an object, as tools and APIs have, with definitions it may refer to."""
    return draw(NOTES) | draw(BODIES) | {"$defs": draw(DEFINITIONS)}

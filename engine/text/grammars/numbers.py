"""Rewrite what a JSON schema says about numbers so that llguidance follows it exactly.

llguidance turns bounds into regular expressions of decimal numbers, which leave out some numbers and allow others:

- A number with fewer decimal places than the bound is left out: 0.7 below 0.75, 0.5 as a multiple of 0.25. A bound
  becomes a union of ranges, with the bound cut after each of its digits; `multipleOf` likewise.
- An excluded integer is allowed if the other bound has the same integer part: 0 in (0, 0.75]. It becomes the next
  number of MAX_DIGITS digits; 0 becomes 1e-18.
- A number of more than MAX_DIGITS digits is read inexactly. It is rounded towards the allowed side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_DOWN, ROUND_FLOOR, Context, Decimal
from typing import Any, NamedTuple

MAX_DIGITS = 15  # of a decimal fraction that llguidance reads exactly
MAX_PLACES = 18  # decimal places of a bound: llguidance reads them as one 64-bit number
MAX_INTEGER = 2**63 - 1024  # the largest double below 2**63: beyond, a bound excludes no number of 64 bits
LEAST = Decimal("1e-18")  # replaces an excluded 0

_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
KEYWORDS = (*_LOW, *_HIGH, "multipleOf")
_OTHERS = ["null", "boolean", "string", "array", "object"]


class _Bound(NamedTuple):
    """A bound, and whether it is excluded itself."""

    value: Decimal
    excluded: bool


def with_exact_numbers(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose numbers llguidance follows exactly.

    Raises ValueError for a bound or an integer constant that it can't follow.
    """
    _check_constants(schema)
    found = schema.get("type", ["number", *_OTHERS])
    types = found if isinstance(found, list) else [found]
    rest = {name: value for name, value in schema.items() if name not in KEYWORDS}
    if len(rest) == len(schema) or not {"number", "integer"} & set(map(str, types)):
        return rest
    low, high = _bound(schema, *_LOW, 1), _bound(schema, *_HIGH, -1)
    multiples = _multiples(schema)
    if "number" in types and "integer" in types:  # every integer is a number
        types = [one for one in types if one != "integer"]
        rest["type"] = types
    if "number" not in types:
        return rest | _written("minimum", low) | _written("maximum", high) | multiples[0]
    ranges = [_written("minimum", one) | _written("maximum", two) for one, two in _cut(low, high)]
    if len(types) == 1 and len(ranges) == len(multiples) == 1:
        return rest | ranges[0] | multiples[0]
    others = [{"type": [one for one in types if one != "number"]}] if len(types) > 1 else []
    unions = [
        {"anyOf": [*({"type": "number", **one} for one in union), *others]}
        for union in (ranges, multiples)
        if union != [{}]
    ]
    return {**rest, "allOf": [*rest.get("allOf", ()), *unions]} if unions else rest


def _check_constants(schema: dict[str, Any]) -> None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    for value in values if isinstance(values, list) else ():
        if isinstance(value, int) and not isinstance(value, bool) and (abs(value) >= 2**63 or float(value) != value):
            raise ValueError(f": the number {value} can't be followed exactly: it has more than 53 bits")


def _bound(schema: dict[str, Any], name: str, exclusive: str, sign: int) -> _Bound | None:
    """Return the tighter bound of two keywords, in the direction `sign` of the allowed values; None if none binds."""
    limit, other = schema.get(name), schema.get(exclusive)
    if isinstance(other, bool):  # draft 4: a flag for the other keyword
        limit, other = (None, limit) if other else (limit, None)
    found: _Bound | None = None
    for keyword, number, excluded in ((name, limit, False), (exclusive, other, True)):
        if number is None:
            continue
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            raise ValueError(f": {keyword} must be a number; found {number!r}")
        if sign * number <= -MAX_INTEGER:
            continue
        if sign * number > MAX_INTEGER:
            raise ValueError(f": {keyword} {number} leaves no number of 64 bits; remove it")
        value = _rounded(number, sign)
        one = _Bound(value, excluded and value == Decimal(repr(number)))
        if one.excluded and value == value.to_integral_value():
            one = _Bound(_beside(value, sign), False)
        if _places(one.value) > MAX_PLACES:
            raise ValueError(f": {keyword} {number} has more than {MAX_PLACES} decimal places; round it")
        if found is None or (sign * one.value, one.excluded) > (sign * found.value, found.excluded):
            found = one
    return found


def _rounded(number: float, sign: int) -> Decimal:
    """Return the nearest number on the allowed side that llguidance reads exactly."""
    value = Decimal(repr(number))
    if value == value.to_integral_value():
        nearest = float(value)
        inside = math.nextafter(nearest, sign * math.inf) if sign * Decimal(nearest) < sign * value else nearest
        return Decimal(inside)
    return Context(MAX_DIGITS, ROUND_CEILING if sign > 0 else ROUND_FLOOR).plus(value).normalize()


def _beside(value: Decimal, sign: int) -> Decimal:
    """Return the number of MAX_DIGITS digits beside an integer; the next integer if it has as many digits."""
    if not value:
        return sign * LEAST
    digits = len(str(abs(int(value))))
    return value + sign * Decimal(1).scaleb(min(0, digits - MAX_DIGITS))


def _written(name: str, bound: _Bound | None) -> dict[str, Any]:
    if bound is None:
        return {}
    value = int(bound.value) if bound.value == bound.value.to_integral_value() else float(bound.value)
    return {f"exclusive{name.capitalize()}" if bound.excluded else name: value}


def _cut(low: _Bound | None, high: _Bound | None) -> Iterator[tuple[_Bound | None, _Bound | None]]:
    """Yield ranges whose union is the range from `low` to `high`."""
    yield low, high
    zero = _Bound(Decimal(0), False)
    if high is not None and high.value > 0:
        start = zero if low is None or low.value < 0 else low
        for value in _shorter(high.value):
            if value > start.value or (value == start.value and not start.excluded):
                yield start, _Bound(value, False)
    if low is not None and low.value < 0:
        end = zero if high is None or high.value > 0 else high
        for value in _shorter(low.value):
            if value < end.value or (value == end.value and not end.excluded):
                yield _Bound(value, False), end


def _shorter(value: Decimal) -> Iterator[Decimal]:
    """Yield a number cut after each of its decimal places but the last."""
    for places in range(_places(value)):
        yield value.quantize(Decimal(1).scaleb(-places), rounding=ROUND_DOWN)


def _places(value: Decimal) -> int:
    """Return the number of decimal places of a number as it is written."""
    return max(0, -int(value.normalize().as_tuple().exponent))


def _multiples(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return schemas whose union is `multipleOf`: one for each number of decimal places."""
    step = schema.get("multipleOf")
    if not isinstance(step, (int, float)) or isinstance(step, bool) or not step > 0:
        return [{}] if step is None else [{"multipleOf": step}]
    value = Decimal(repr(step))
    if not _is_read_exactly(value):
        raise ValueError(
            f": multipleOf {step} can't be followed exactly; use one with fewer digits, such as 0.25 or 0.1"
        )
    found = [value]
    for places in range(_places(value)):  # the least common multiple with 1, 0.1, 0.01, …
        scale = _places(value)
        whole = math.lcm(int(value.scaleb(scale)), 10 ** (scale - places))
        found.append(Decimal(whole).scaleb(-scale))
    return [{"multipleOf": float(one)} for one in found if _is_read_exactly(one)]


def _is_read_exactly(value: Decimal) -> bool:
    """Whether llguidance, which multiplies a double by 10 until it is whole, finds all digits of a number."""
    number, places = float(value), 0
    while not number.is_integer():
        number, places = number * 10, places + 1
    return number < 2**32 and Decimal(int(number)).scaleb(-places) == value

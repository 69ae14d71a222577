"""A minimal PromQL reader: a tokenizer, and the selectors and labels of an expression.

It has no types and no evaluation; use promtool for those.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<range>\[[^\]]*\])
      | (?P<number>(?:\d+(?:\.\d+)?(?:[eE][+-]?\d+)?(?:ms|[smhdwy])?)+)
      | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
      | (?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^=<>(){},])""",
    re.VERBOSE,
)
LABEL_LISTS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
WORDS = LABEL_LISTS | {"and", "or", "unless", "bool", "offset", "inf", "nan"}


class PromqlError(ValueError):
    """Invalid PromQL."""


@dataclass
class Selector:
    """A metric name and its matchers as (label, operator, value)."""

    name: str
    matchers: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass
class Reads:
    """The selectors of an expression, and the labels that it groups or joins by."""

    selectors: list[Selector] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)


def tokens(expression: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of each token, without white space."""
    at = 0
    while at < len(expression):
        found = TOKEN.match(expression, at)
        if found is None:
            raise PromqlError(f"{expression!r}: what is {expression[at : at + 20]!r}, at {at}?")
        if found.lastgroup != "space":
            yield found.lastgroup, found.group()
        at = found.end()


def reads(expression: str) -> Reads:
    """Return the selectors and grouping labels of an expression. Raises PromqlError if it is invalid."""
    read, found = Reads(), list(tokens(expression))
    if [text for _, text in found].count("(") != [text for _, text in found].count(")"):
        raise PromqlError(f"{expression!r}: the parentheses don't match")
    at = 0
    while at < len(found):
        kind, text = found[at]
        following = found[at + 1][1] if at + 1 < len(found) else ""
        at += 1
        if kind != "name":
            continue
        if text in LABEL_LISTS:
            if following == "(":
                names, at = _until(found, at + 1, ")")
                read.labels.update(name for kind, name in names if kind == "name")
        elif text not in WORDS and following != "(" and not _aggregates(found, at):
            selector = Selector(text)
            if following == "{":
                inside, at = _until(found, at + 1, "}")
                selector.matchers = _matchers(expression, inside)
            read.selectors.append(selector)
    return read


def _aggregates(found: list[tuple[str, str]], at: int) -> bool:
    """Return whether the name before `at` is an aggregation: `sum by (...) (...)`."""
    return at < len(found) and found[at][1] in ("by", "without")


def _until(found: list[tuple[str, str]], start: int, end: str) -> tuple[list[tuple[str, str]], int]:
    for at in range(start, len(found)):
        if found[at][1] == end:
            return found[start:at], at + 1
    raise PromqlError(f"no {end!r} closes what {found[start - 1][1]!r} opens")


def _matchers(expression: str, inside: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    matchers = []
    for at in range(0, len(inside), 4):  # label, operator, value, comma
        part = inside[at : at + 3]
        if [kind for kind, _ in part] != ["name", "sign", "string"]:
            raise PromqlError(f"{expression!r}: {' '.join(text for _, text in part)!r} is no matcher")
        matchers.append((part[0][1], part[1][1], part[2][1][1:-1]))
    return matchers

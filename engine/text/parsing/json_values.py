"""JSON values inside text that arrives in pieces: where a value ends, and what call it stands for."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

_STRUCTURE = re.compile(r'[{}\[\]"]|[^\s0-9+\-.eEa-z:,]')  # brackets and quotes, or what JSON doesn't allow here
_IN_STRING = re.compile(r'["\\]')


class NotJson(ValueError):
    """The text is not JSON from `index` on."""

    def __init__(self, index: int):
        super().__init__(f"not JSON at {index}")
        self.index = index


class JsonScanner:
    """Finds the end of one JSON object or array in pieces of text. Each character is looked at once.

    It checks brackets and strings only; parse the whole value to know whether it is valid.

    Attributes:
        complete: Number of characters of an array up to the end of its last complete object; 0: there is none.
    """

    def __init__(self) -> None:
        self.complete = 0
        self._open: list[str] = []
        self._in_string = self._escaped = False
        self._size = 0  # of the pieces before

    def feed(self, text: str) -> int | None:
        """Return the index after the value's last character, or None if it goes on. Raises NotJson."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, at)
            if found is None:
                break
            at = found.end()
            character = found[0]
            if self._in_string:
                self._escaped = character == "\\"
                self._in_string = self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._open.append("}" if character == "{" else "]")
            elif not self._open or self._open.pop() != character:
                raise NotJson(found.start())
            elif not self._open:
                return at
            elif self._open == ["]"]:
                self.complete = self._size + at
        self._size += len(text)
        return None


def parse_json(text: str) -> Any:
    """Return the value of JSON text; strings may hold raw control characters.

    A number beyond float64, which a grammar allows, becomes the largest one. Raises ValueError, also for NaN.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_no_constant, parse_float=finite)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error


def to_json(value: Any) -> str:
    """Return JSON text that UTF-8 can encode. Raises ValueError for infinite numbers and deep nesting."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, written as an escape
        return json.dumps(value, allow_nan=False)
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error
    return text


def call_of(value: Any) -> tuple[str, str]:
    """Return (function name, arguments as JSON) of a call in JSON: name, and arguments or parameters.

    Raises ValueError if the value is no such call.
    """
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError("a call is an object with a name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ValueError("arguments must be an object")
    return value["name"], to_json(arguments)


def finite(text: str) -> float:
    """Return the number of a text; the largest one of float64 in place of a larger one."""
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")

"""Tool calls as a Python list of function calls: `[search(query="x", limit=3), now()]` (Llama 3.2, Llama 4)."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import Any, TypeVar

from engine.text.parsing.formats import Block, Closed, Format, shares_beginning
from engine.text.parsing.json_values import finite, to_json

T = TypeVar("T")

MAX_HEAD_CHARS = 512
_MAX_DEPTH = 100  # of values within values
_FUNCTION = re.compile(r"[\w.:/-]+")  # of all functions that a request can declare, such as get-time
_HEAD = re.compile(rf"\[\s*(?:{_FUNCTION.pattern}\s*(?:\(|$)|$)")  # also a beginning of it
_NEXT = re.compile(r"""[()\[\]{}"'\\]""")
_PAIRS = {")": "(", "]": "[", "}": "{"}
_NAMES = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"[^\W\d]\w*")
KEYWORD = re.compile(r"[\w$@.:/-]+")
"""The names of arguments that are read: Python's, and such as user-id."""
_NUMBER = re.compile(r"-?\s*(?:\d[\w.]*[eE][+-]\d\w*|\.?\d[\w.]*)")
_STRING = re.compile(
    r"""(?P<prefix>[rRuU]?)(?:"(?P<double>[^"\\]*(?:\\.[^"\\]*)*)"|'(?P<single>[^'\\]*(?:\\.[^'\\]*)*)')""", re.DOTALL
)
_ESCAPE = re.compile(r"\\(?:[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\}|.)", re.DOTALL)
_ESCAPED = {
    "\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
    "v": "\v",
}  # fmt: skip


class Pythonic(Format):
    """An answer that is a list of calls, with keyword arguments."""

    name = "pythonic"
    openers = ("<|python_start|>",)
    first_openers = ("[",)
    closers = ("<|python_end|>",)

    def block(self, opener: str) -> Block:
        return _ListBlock("[" if opener == "[" else "")

    def may_begin_call(self, text: str) -> bool:
        return shares_beginning(text, [f"[{name}(" for name in self.tools])


class _ListBlock(Block):
    def __init__(self, prefix: str):
        self._pieces = [prefix]
        self._size = len(prefix)
        self._open: list[str] = ["["] if prefix else []
        self._quote = ""
        self._escaped = False
        self._is_call = False
        self._complete = 0  # number of characters up to the end of the last complete call

    def feed(self, text: str) -> Closed | None:
        if not self._size:
            text = text.lstrip()
            if text and text[0] != "[":
                return Closed(None, text)
        if not self._is_call and text:
            head = "".join(self._pieces) + text
            found = _HEAD.match(head[:MAX_HEAD_CHARS])
            if found is None or (len(head) > MAX_HEAD_CHARS and not found[0].endswith("(")):
                return Closed(None, text)
            self._is_call = found[0].endswith("(")
        end = self._scan(text)
        self._pieces.append(text if end is None else text[:end])
        self._size += len(text)
        if end is None:
            return None
        try:
            return Closed(_CallReader("".join(self._pieces)).calls(), text[end:])
        except ValueError:
            return Closed(None, text[end:])

    def finish(self, is_cut: bool) -> Closed:
        """Return the calls of a cut list that are complete."""
        if not is_cut or not self._complete:
            return Closed(None)
        try:
            return Closed(_CallReader("".join(self._pieces)[: self._complete] + "]").calls())
        except ValueError:
            return Closed(None)

    def _scan(self, text: str) -> int | None:
        """Return the index after the list's closing bracket, or None if it goes on."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = _NEXT.search(text, at)
            if found is None:
                return None
            at = found.end()
            character = found[0]
            if self._quote:
                if character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._open.append(character)
            elif character in ")]}":
                if not self._open or self._open.pop() != _PAIRS[character]:
                    return at  # not Python: the parser says so
                if not self._open:
                    return at
                if self._open == ["["] and character == ")":
                    self._complete = self._size + at
        return None


class _CallReader:
    """Reads a list of calls with literals as keyword arguments. Its methods raise ValueError for anything else.

    It replaces `ast.parse`, which needs hundreds of bytes per character and warns of escapes that a model writes.
    """

    def __init__(self, source: str):
        self._source, self._at = source, 0

    def calls(self) -> list[tuple[str, str]]:
        """Return the calls as (name, arguments)."""
        self._expect("[")
        found, _ = self._until("]", self._call)
        if not found or self._at < len(self._source):
            raise ValueError("not a list of calls")
        return found

    def _call(self) -> tuple[str, str]:
        name = self._match(_FUNCTION)[0]
        self._expect("(")
        given, _ = self._until(")", self._keyword)
        arguments = dict(given)
        if len(arguments) < len(given):
            raise ValueError("an argument is given twice")
        return name, to_json(arguments)

    def _keyword(self) -> tuple[str, Any]:
        name = self._match(KEYWORD)[0]
        self._expect("=")
        return name, self._value(_MAX_DEPTH)

    def _value(self, depth: int) -> Any:
        if not depth:
            raise ValueError("the value is nested too deeply")
        if self._accepts("["):
            return self._until("]", lambda: self._value(depth - 1))[0]
        if self._accepts("("):
            items, is_tuple = self._until(")", lambda: self._value(depth - 1))
            return items if is_tuple or len(items) != 1 else items[0]
        if self._accepts("{"):
            return dict(self._until("}", lambda: self._entry(depth - 1))[0])
        if _STRING.match(self._source, self._at):
            return self._string()
        if found := _NUMBER.match(self._source, self._at):
            self._skip(found.end())
            return _number("".join(found[0].split()))
        name = self._match(_NAME)[0]
        if name not in _NAMES:
            raise ValueError("arguments are literals")
        return _NAMES[name]

    def _entry(self, depth: int) -> tuple[str, Any]:
        key = self._string()
        self._expect(":")
        return key, self._value(depth)

    def _until(self, closer: str, read: Callable[[], T]) -> tuple[list[T], bool]:
        """Read items that commas separate, up to the closer. Return them, and whether a comma follows the last."""
        items: list[T] = []
        has_comma = False
        while not self._accepts(closer):
            if items and not has_comma:
                raise ValueError(f"{closer} is missing")
            items.append(read())
            has_comma = self._accepts(",")
        return items, has_comma

    def _string(self) -> str:
        """Read a string, or several next to one another."""
        texts = [_text(self._match(_STRING))]
        while found := _STRING.match(self._source, self._at):
            self._skip(found.end())
            texts.append(_text(found))
        return "".join(texts)

    def _accepts(self, text: str) -> bool:
        if not self._source.startswith(text, self._at):
            return False
        self._skip(self._at + len(text))
        return True

    def _expect(self, text: str) -> None:
        if not self._accepts(text):
            raise ValueError(f"{text} is missing")

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self._source, self._at)
        if found is None:
            raise ValueError("not a call")
        self._skip(found.end())
        return found

    def _skip(self, at: int) -> None:
        """Go on after the white space and comments at `at`."""
        space = _SPACE.match(self._source, at)
        self._at = at if space is None else space.end()


def _number(text: str) -> int | float:
    try:
        return int(text, 0)
    except ValueError:
        if not set(".eE") & set(text):  # 007
            raise
        return finite(text)


def _text(found: re.Match[str]) -> str:
    """Return the value of a string literal."""
    body = found["double"] if found["single"] is None else found["single"]
    return body if found["prefix"] in ("r", "R") else _ESCAPE.sub(_character, body)


def _character(found: re.Match[str]) -> str:
    escape = found[0][1:]
    if escape in _ESCAPED:
        return _ESCAPED[escape]
    if escape[0] in "01234567":
        return chr(int(escape, 8))
    if escape[0] in "xuU" and len(escape) > 1:
        return chr(int(escape[1:], 16))
    if escape[0] == "N" and len(escape) > 1:
        try:
            return unicodedata.lookup(escape[2:-1])
        except KeyError as error:
            raise ValueError("there is no such character") from error
    if escape[0] in "xuUN":
        raise ValueError("an escape is not complete")
    return found[0]  # Python keeps an escape that it doesn't know

"""Tool calls of Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`.

Values have no escapes, so they may spell the markers themselves, and models leave closing tags out. These rules decide,
while the text arrives:

- A value ends at a `</parameter>` that a further parameter or the end of the function follows.
- `<parameter=KEY>` within a value begins a further parameter if the function has it, or if it begins a line, and no
  `</parameter>` within the value belongs to it: the closing tag before it is missing.
- A function within a value, from `<function=NAME>` to `</function>`, is text. After the end of a function within the
  value it is the next call: the closing tags before it are missing.
- A parameter that is given twice, with different values, makes the call malformed.
"""

from __future__ import annotations

import re
from typing import Any

from engine.text.parsing.call_schemas import declared_of, resolved
from engine.text.parsing.formats import Block, Closed, Format
from engine.text.parsing.json_values import to_json
from engine.text.parsing.markers import held_back
from engine.text.parsing.typed_values import typed

_OPEN_CALL, _CLOSE_CALL = "<tool_call>", "</tool_call>"
_OPEN_FUNCTION, _CLOSE_FUNCTION = "<function=", "</function>"
_OPEN_PARAMETER, _CLOSE_PARAMETER = "<parameter=", "</parameter>"
_MARKERS = (_OPEN_PARAMETER, _CLOSE_PARAMETER, _OPEN_FUNCTION, _CLOSE_FUNCTION, _OPEN_CALL, _CLOSE_CALL)
_ANY_MARKER = re.compile("|".join(_MARKERS))
_AFTER_VALUE = (_OPEN_PARAMETER, _CLOSE_FUNCTION, _CLOSE_CALL)
_NAME = re.compile(r"[^<>]{1,256}(?:(?P<end>>)|\Z)|\Z")  # also a beginning of one


class Qwen3Coder(Format):
    """Functions and parameters as tags; the tool's schema gives each value its type."""

    name = "qwen3_coder"
    openers = (_OPEN_CALL, _OPEN_FUNCTION)
    closers = (_CLOSE_CALL,)

    def block(self, opener: str) -> Block:
        return _FunctionBlock(self, opener)


class _Value:
    """The text of the open parameter, and of parameters within it whose closing tags may be missing."""

    def __init__(self, key: str):
        self.pieces: list[str] = []
        self.opened = [(key, 0, 0)]  # key, first piece of the opening tag, first piece of the text
        self.closed_at: int | None = None  # number of pieces before a </parameter> that may be the last
        self.ended_at: int | None = None  # number of pieces up to a </function> or </tool_call> that may be the end
        self.ended_before = 0  # and before it
        self.has_ended = False  # all closing tags of a call have come, so that text may follow it
        self.functions = self.parameters = 0  # open ones of a call that is text
        self.has_functions = False

    def texts(self, end: int) -> list[tuple[str, str]]:
        """Return the parameters of the first `end` pieces as (key, text)."""
        ends = [*(tag for _, tag, _ in self.opened[1:]), end]
        return [
            (key, "".join(self.pieces[start:until]).removeprefix("\n").removesuffix("\n"))
            for (key, _, start), until in zip(self.opened, ends, strict=True)
        ]


class _FunctionBlock(Block):
    """One function, with the `<tool_call>` before it. Each character is looked at a bounded number of times."""

    def __init__(self, owner: Qwen3Coder, opener: str):
        self._owner = owner
        self._is_bare = opener == _OPEN_FUNCTION
        self._text = _OPEN_FUNCTION if self._is_bare else ""  # not read yet
        self._function: str | None = None
        self._declared: dict[str, Any] = {}
        self._given: list[tuple[str, str]] = []
        self._value: _Value | None = None

    def feed(self, text: str) -> Closed | None:
        self._text += text
        while True:
            step = (
                self._head() if self._function is None
                else self._body() if self._value is None
                else self._after_close(self._value) if self._value.closed_at is not None
                else self._in_value(self._value)
            )  # fmt: skip
            if isinstance(step, Closed):
                return step
            if not step:
                return None

    def finish(self, is_cut: bool) -> Closed:
        value = self._value
        if is_cut or self._function is None:
            return Closed(None)
        if value is None:
            return Closed(self._calls() if self._given and not self._text else None, "")
        if value.closed_at is not None and not self._text:
            return Closed(self._calls_with(value.texts(value.closed_at)))
        if value.ended_at is not None and not value.has_functions:
            return self._ended(value, value.ended_at)
        return Closed(None)

    def _take(self, size: int) -> str:
        taken, self._text = self._text[:size], self._text[size:]
        return taken

    def _named(self, marker: str) -> tuple[str | None, int]:
        """Return the name in the tag that the text begins with, and the tag's length.

        The name is None if it is invalid; the length is 0 if the tag is not complete.
        """
        found = _NAME.match(self._text, len(marker))
        if found is None:
            return None, len(marker)
        if found["end"] is None:
            return None, 0
        return self._text[len(marker) : found.end() - 1].strip(), found.end()

    # The steps return the end of the block, or whether they went on; if not, they need more text.

    def _head(self) -> Closed | bool:
        self._text = self._text.lstrip()
        if not self._text.startswith(_OPEN_FUNCTION):
            return False if _OPEN_FUNCTION.startswith(self._text) else Closed(None, self._text)
        name, size = self._named(_OPEN_FUNCTION)
        if not size:
            return False
        if not name:
            return Closed(None, self._text[size:])
        self._take(size)
        self._function, self._declared = name, declared_of(self._owner.tools.get(name, {}))
        return True

    def _body(self) -> Closed | bool:
        """Read what stands between parameters."""
        self._text = self._text.lstrip()
        for end in (_CLOSE_FUNCTION, _CLOSE_CALL):
            if self._text.startswith(end):
                return Closed(self._calls(), self._text[len(end) :])
        if not self._text.startswith(_OPEN_PARAMETER):
            is_begun = any(marker.startswith(self._text) for marker in _AFTER_VALUE)
            return False if is_begun else Closed(None, self._text)
        key, size = self._named(_OPEN_PARAMETER)
        if not size:
            return False
        if not key:
            return Closed(None, self._text[size:])
        self._take(size)
        self._value = _Value(key)
        return True

    def _in_value(self, value: _Value) -> Closed | bool:
        """Read a value up to its next marker."""
        found = _ANY_MARKER.search(self._text)
        before = len(self._text) - held_back(self._text, _MARKERS) if found is None else found.start()
        if before:
            plain = self._take(before)
            value.pieces.append(plain)
            if plain.strip() and not value.has_ended:
                value.ended_at = None
        if found is None:
            return False
        match found[0]:
            case "<parameter=":
                return self._open_parameter(value)
            case "</parameter>":
                self._close_parameter(value)
            case "<function=" if value.ended_at is not None and not value.functions:
                return self._ended(value, value.ended_at)
            case "<function=":
                value.functions += 1
                value.has_functions = True
                value.pieces.append(self._take(len(_OPEN_FUNCTION)))
            case "</function>" if value.functions:
                value.functions -= 1
                value.parameters = value.parameters if value.functions else 0
                value.pieces.append(self._take(len(_CLOSE_FUNCTION)))
            case "</function>" | "</tool_call>" as marker if not value.functions:
                value.pieces.append(self._take(len(marker)))
                if value.ended_at is None:
                    value.ended_before, value.ended_at = len(value.pieces) - 1, len(value.pieces)
                    value.has_ended = self._is_bare and marker == _CLOSE_FUNCTION
                elif marker == _CLOSE_CALL:
                    value.has_ended = True
            case marker:
                value.pieces.append(self._take(len(marker)))
        return True

    def _open_parameter(self, value: _Value) -> bool:
        key, size = self._named(_OPEN_PARAMETER)
        if not size:
            return False
        begins_line = "".join(value.pieces[-1:]).endswith("\n") or len(value.pieces) == value.opened[-1][2]
        value.pieces.append(self._take(size))
        value.ended_at, value.has_ended = None, False
        if value.functions:
            value.parameters += key is not None
        elif key and (key in self._declared or begins_line or not self._declared):
            value.opened.append((key, len(value.pieces) - 1, len(value.pieces)))
        return True

    def _close_parameter(self, value: _Value) -> None:
        if value.parameters:  # of a function that is text
            value.parameters -= 1
        else:
            value.functions = 0
            value.closed_at = len(value.pieces)
        value.ended_at, value.has_ended = None, False
        value.pieces.append(self._take(len(_CLOSE_PARAMETER)))

    def _after_close(self, value: _Value) -> bool:
        """Decide by what follows a `</parameter>` whether it ends the value."""
        stripped = self._text.lstrip()
        if len(stripped) < len(self._text):
            value.pieces.append(self._take(len(self._text) - len(stripped)))
        if any(stripped.startswith(marker) for marker in _AFTER_VALUE):
            assert value.closed_at is not None
            self._given += value.texts(value.closed_at)
            self._value = None
        elif not any(marker.startswith(stripped) for marker in _AFTER_VALUE):
            value.closed_at = None
            if len(value.opened) > 1:  # it belongs to a tag that is text
                value.opened.pop()
        else:
            return False
        return True

    def _ended(self, value: _Value, end: int) -> Closed:
        """End the function within the open value, of which the closing tag is missing."""
        rest = "".join(value.pieces[end:]) + self._text
        return Closed(self._calls_with(value.texts(value.ended_before)), rest)

    def _calls_with(self, texts: list[tuple[str, str]]) -> list[tuple[str, str]] | None:
        self._given += texts
        return self._calls()

    def _calls(self) -> list[tuple[str, str]] | None:
        """Return the call, or None if it is malformed."""
        assert self._function is not None
        texts: dict[str, str] = {}
        for place, (key, text) in enumerate(self._given):
            if not text.strip() and self._given[place + 1 : place + 2] and self._given[place + 1][0] == key:
                continue  # a doubled opening tag
            if texts.setdefault(key, text) != text:
                return None
        schema = self._owner.tools.get(self._function, {})
        further = resolved(schema, schema).get("additionalProperties")
        try:
            arguments = {key: typed(text, self._declared.get(key, further), schema) for key, text in texts.items()}
            return [(self._function, to_json(arguments))]
        except ValueError:
            return None

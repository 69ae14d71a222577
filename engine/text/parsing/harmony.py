"""Harmony, the chat format of gpt-oss: messages with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

- analysis: reasoning.
- commentary with a recipient: a tool call, its arguments as JSON. The recipient may also precede the channel.
- final, and commentary without a recipient: content.

Format: https://developers.openai.com/cookbook/articles/openai-harmony.
"""

from __future__ import annotations

import re
from typing import Literal

from engine.text.parsing.formats import Block, Closed, Format, JsonBlock
from engine.text.parsing.json_values import parse_json, to_json
from engine.text.parsing.markers import held_back, without_cut_marker
from engine.text.parsing.parts import Content, Part, Reasoning
from engine.text.parsing.reasoning import ReasoningFormat, Splitter

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
ENDS = (END, CALL, RETURN, START, CHANNEL)
"""What ends the text of a message; START and CHANNEL begin the next one."""

RECIPIENT = "to=functions."
"""What an output begins with whose first message has its recipient before its channel."""

MAX_HEADER = 512
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.:/-]{1,256})")


class Harmony(Format):
    """Tool calls of gpt-oss: a message in the commentary channel, to `functions.NAME`."""

    name = "harmony"
    openers = (CHANNEL, START)
    closers = (CALL, END)
    inner_markers = (MESSAGE, CONSTRAIN, RETURN)
    answer_header = f"{CHANNEL}final{MESSAGE}"

    def block(self, opener: str) -> Block:
        return _CallMessage()


class _Arguments(JsonBlock):
    def __init__(self, function: str):
        super().__init__()
        self._function = function

    def calls(self, text: str) -> list[tuple[str, str]]:
        return [(self._function, to_json(parse_json(text)))]


class _CallMessage(Block):
    """A message: its header up to MESSAGE, then the arguments. A message without a recipient is no call."""

    def __init__(self) -> None:
        self._header = ""
        self._arguments: _Arguments | None = None

    def feed(self, text: str) -> Closed | None:
        if self._arguments is not None:
            return self._arguments.feed(text)
        header, marker, body = (self._header + text).partition(MESSAGE)
        if not marker and len(header) <= MAX_HEADER:
            self._header = header
            return None
        found = _RECIPIENT.search(header) if len(header) <= MAX_HEADER else None
        if found is None:
            return Closed(None, body if marker else header[MAX_HEADER:])
        self._arguments = _Arguments(found[1])
        return self._arguments.feed(body)

    def finish(self, is_cut: bool) -> Closed:
        return Closed(None) if self._arguments is None else self._arguments.finish(is_cut)


class HarmonyReasoning(ReasoningFormat):
    """The analysis channel. An answer begins with the header of the final channel."""

    def splitter(self, is_open: bool) -> HarmonySplitter:
        return HarmonySplitter(is_open)


HARMONY_REASONING = HarmonyReasoning(
    "harmony", f"{CHANNEL}analysis{MESSAGE}", f"{END}{START}assistant{Harmony.answer_header}"
)


class HarmonySplitter(Splitter):
    """Splits one output into the reasoning of its analysis messages and the content of the others.

    Headers are dropped, except the headers of messages with a recipient: they are content with their markers, for
    ToolCallParser. Text outside of any message is content. `is_open`: the prompt has opened an analysis message.
    """

    def __init__(self, is_open: bool):
        self._state: Literal["between", "header", "body"] = "body" if is_open else "between"
        self._kind: Literal["reasoning", "content", "call"] = "reasoning" if is_open else "content"
        self._at_start = not is_open
        self._pending = ""
        self._header = ""
        self._has: set[str] = set()  # kinds of which there was text
        self._is_new = False  # the message has had no text yet

    @property
    def is_reasoning(self) -> bool:
        return self._state == "body" and self._kind == "reasoning"

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        text, self._pending = self._pending + text, ""
        while text:
            if self._state == "between":
                text = self._between(text)
            elif self._state == "header":
                text = self._in_header(text, parts)
            else:
                text = self._in_body(text, parts)
        return parts

    def finish(self, is_cut: bool = False) -> list[Part]:
        parts: list[Part] = []
        rest = self._header + self._pending
        if self._state == "header":
            rest = "" if is_cut else rest
            self._kind = "content"
        elif is_cut:
            rest = without_cut_marker(rest)
        self._header = self._pending = ""
        self._add(rest, parts)
        return parts

    def _between(self, text: str) -> str:
        """Read what follows a message, or begins the output; return the rest."""
        stripped = text.lstrip()
        beginnings = (START, CHANNEL, RECIPIENT) if self._at_start else (START, CHANNEL)
        if any(stripped.startswith(one) for one in beginnings):
            self._state, self._header = "header", ""
            return stripped
        if len(text) <= MAX_HEADER and any(one.startswith(stripped) for one in beginnings):  # white space alone, too
            self._pending = text
            return ""
        self._state, self._kind, self._is_new = "body", "content", True
        return text

    def _in_header(self, text: str, parts: list[Part]) -> str:
        """Read the header of a message; return the rest."""
        self._at_start = False
        header, marker, rest = (self._header + text).partition(MESSAGE)
        if not marker and len(header) <= MAX_HEADER:
            self._header = header
            return ""
        self._state, self._header, self._is_new = "body", "", True
        if len(header) > MAX_HEADER:  # no header
            self._kind = "content"
            self._add(header + marker, parts)
            return rest
        channel = _CHANNEL.search(header)
        if _RECIPIENT.search(header):
            self._kind = "call"
            opener = "" if header.startswith((START, CHANNEL)) else f"{START}assistant "
            self._add(opener + header + marker, parts)
        else:
            self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
        return rest

    def _in_body(self, text: str, parts: list[Part]) -> str:
        """Read the text of a message; return the rest."""
        found = [(at, one) for one in ENDS if (at := text.find(one)) >= 0]
        if not found:
            held = held_back(text, ENDS)
            self._add(text[: len(text) - held], parts)
            self._pending = text[len(text) - held :]
            return ""
        at, marker = min(found)
        self._add(text[:at], parts)
        self._state = "between"
        if marker in (START, CHANNEL):
            return text[at:]
        if self._kind == "call":
            self._add(marker, parts)
        return text[at + len(marker) :]

    def _add(self, text: str, parts: list[Part]) -> None:
        if not text:
            return
        if self._is_new and self._kind in self._has:  # of another message
            text = "\n\n" + text if self._kind != "call" else text
        self._is_new = False
        self._has.add(self._kind)
        parts.append(Reasoning(text) if self._kind == "reasoning" else Content(text))

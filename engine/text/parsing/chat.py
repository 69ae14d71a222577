"""The parser of one chat output: reasoning first, then content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable

from engine.text.parsing.parts import Content, Part, Reasoning, ToolCall
from engine.text.parsing.reasoning import Splitter
from engine.text.parsing.tool_calls import ToolCallParser


class ChatParser:
    """Splits one output, which arrives in pieces, into its parts. Without a splitter and a parser all is content."""

    def __init__(self, reasoning: Splitter | None = None, tools: ToolCallParser | None = None):
        self._reasoning, self._tools = reasoning, tools

    def feed(self, text: str) -> list[Part]:
        """Return the parts that `text` completes. Takes time in proportion to the text."""
        parts: list[Part] = self._reasoning.feed(text) if self._reasoning else [Content(text)] if text else []
        return self._with_calls(parts)

    def finish(self, is_cut: bool = False) -> list[Part]:
        """Return the parts held back at the end of the output.

        `is_cut`: a limit or a stop string ended the output. An unfinished call or marker at its end is left out then;
        otherwise it is content.
        """
        parts = self._with_calls(self._reasoning.finish(is_cut)) if self._reasoning else []
        return parts + (self._tools.finish(is_cut) if self._tools else [])

    @property
    def is_reasoning(self) -> bool:
        """Whether the output so far ends inside the reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    @property
    def found_calls(self) -> bool:
        """Whether the output has a tool call so far."""
        return self._tools is not None and self._tools.found_calls

    def _with_calls(self, parts: list[Part]) -> list[Part]:
        if self._tools is None:
            return parts
        found: list[Part] = []
        for part in parts:
            found += self._tools.feed(part.text) if isinstance(part, Content) else [part]
        return found


def parse(parser: ChatParser, text: str, is_cut: bool = False) -> list[Part]:
    """Return the parts of a whole output, adjacent text of one kind joined."""
    return joined([*parser.feed(text), *parser.finish(is_cut)])


def joined(parts: Iterable[Part]) -> list[Part]:
    """Join adjacent parts of the same kind of text."""
    found: list[Part] = []
    texts: list[str] = []  # of the kind `kind`, not in `found` yet
    kind: type[Content] | type[Reasoning] = Content
    for part in parts:
        if texts and not isinstance(part, kind):
            found.append(kind("".join(texts)))
            texts = []
        if isinstance(part, ToolCall):
            found.append(part)
        else:
            kind = type(part)
            texts.append(part.text)
    return [*found, kind("".join(texts))] if texts else found

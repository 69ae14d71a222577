"""Find tool calls in text that arrives in pieces.

The result doesn't depend on how the text is cut. A call is returned when it is complete; a malformed one, or one of an
unknown function, stays in the content with its markers.
"""

from __future__ import annotations

from engine.text.parsing.formats import Block, Closed, Format
from engine.text.parsing.markers import held_back
from engine.text.parsing.parts import Content, Part, ToolCall


class ToolCallParser:
    """Splits one output into content and tool calls. Whitespace next to a call belongs to neither.

    `max_calls` limits the calls; text of further ones stays in the content.
    """

    def __init__(self, format_: Format, max_calls: int | None = None):
        self._format = format_
        self._max_calls = max_calls
        self._block: Block | None = None
        self._raw: list[str] = []  # the open block's text, with its opener
        self._pending = ""  # text that may become an opener or closer
        self._space = ""  # whitespace that belongs to the content if no call follows
        self._calls = 0
        self._at_start = True  # only whitespace so far
        self._after_call = False  # only whitespace since the last call
        self._may_close = False  # the last call's closer has not been seen

    def feed(self, text: str) -> list[Part]:
        """Return the parts that `text` completes."""
        parts: list[Part] = []
        while text:
            text = self._in_content(text, parts) if self._block is None else self._in_block(self._block, text, parts)
        return parts

    def finish(self) -> list[Part]:
        """Return the parts held back at the end of the output."""
        parts: list[Part] = []
        if self._block is not None:
            calls, raw = self._block.finish(), "".join(self._raw)
            self._block, self._raw = None, []
            if not self._add_calls(calls, parts):
                self._add_content(raw, parts)
        self._add_content(self._pending, parts)
        self._pending = ""
        if self._space and not self._calls:
            parts.append(Content(self._space))
        self._space = ""
        return parts

    @property
    def found_calls(self) -> bool:
        """Whether the output has a call so far."""
        return self._calls > 0

    def _in_content(self, text: str, parts: list[Part]) -> str:
        """Read content up to an opener; return the rest, which is in its block."""
        text, self._pending = self._pending + text, ""
        if self._may_close:
            stripped = text.lstrip()
            closer = next((one for one in self._format.closers if stripped.startswith(one)), None)
            if closer is not None:
                self._may_close = False
                return stripped[len(closer) :]
            if not stripped or any(one.startswith(stripped) for one in self._format.closers):
                self._pending = text
                return ""
            self._may_close = False
        at, opener = self._first_opener(text)
        if opener is not None:
            self._add_content(text[:at], parts)
            self._block, self._raw = self._format.block(opener), [opener]
            return text[at + len(opener) :]
        held = held_back(text, self._format.openers)
        self._add_content(text[: len(text) - held], parts)
        self._pending = text[len(text) - held :]
        return ""

    def _first_opener(self, text: str) -> tuple[int, str | None]:
        found: list[tuple[int, int, str]] = []
        if self._at_start or self._after_call:
            stripped = text.lstrip()
            start = len(text) - len(stripped)
            found += [(start, -len(one), one) for one in self._format.first_openers if stripped.startswith(one)]
        found += [(at, -len(one), one) for one in self._format.openers if (at := text.find(one)) >= 0]
        at, _, opener = min(found, default=(0, 0, None))
        return at, opener

    def _in_block(self, block: Block, text: str, parts: list[Part]) -> str:
        """Read a block; return the text after it."""
        closed: Closed | None = block.feed(text)
        if closed is None:
            self._raw.append(text)
            return ""
        raw = "".join(self._raw) + text
        raw = raw[: len(raw) - len(closed.rest)]
        self._block, self._raw = None, []
        if not self._add_calls(closed.calls, parts):
            self._add_content(raw, parts)
        return closed.rest

    def _add_calls(self, calls: list[tuple[str, str]] | None, parts: list[Part]) -> bool:
        """Add calls; return False if they are malformed or not allowed."""
        if not calls or any(name not in self._format.tools for name, _ in calls):
            return False
        if self._max_calls is not None and self._calls + len(calls) > self._max_calls:
            return False
        for name, arguments in calls:
            parts.append(ToolCall(self._calls, name, arguments))
            self._calls += 1
        self._space = ""
        self._at_start, self._after_call, self._may_close = False, True, bool(self._format.closers)
        return True

    def _add_content(self, text: str, parts: list[Part]) -> None:
        shown = text.rstrip()
        if not shown:
            self._space += text
            return
        before = "" if self._after_call else self._space
        content = before + (shown.lstrip() if self._after_call else shown)
        if parts and isinstance(parts[-1], Content):
            content = parts.pop().text + content  # type: ignore[union-attr]  # it is content
        parts.append(Content(content))
        self._space = text[len(shown) :]
        self._at_start = self._after_call = self._may_close = False

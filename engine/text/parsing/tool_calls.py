"""Find tool calls in text that arrives in pieces.

The result doesn't depend on how the text is cut. A call is returned when it is complete; a malformed one, or one of an
unknown function, stays in the content with its markers. The time is proportional to the text, whatever it holds.
"""

from __future__ import annotations

from engine.text.parsing.formats import Block, Closed, Format
from engine.text.parsing.markers import held_back, without_cut_marker
from engine.text.parsing.parts import Content, Part, ToolCall

MAX_PIECE_CHARS = 4096  # longer text is read in pieces: each block copies the rest of its piece


class ToolCallParser:
    """Splits one output into content and tool calls. Whitespace next to a call belongs to neither.

    `max_calls` limits the calls; text of further ones stays in the content.
    """

    def __init__(self, format_: Format, max_calls: int | None = None):
        self._format = format_
        self._max_calls = max_calls
        self._block: Block | None = None
        self._raw: list[str] = []  # the open block's text; its opener comes first
        self._pending = ""  # text that may become an opener or closer
        self._space: list[str] = []  # whitespace that belongs to the content if no call follows
        self._calls = 0
        self._at_start = True  # only whitespace so far
        self._after_call = False  # only whitespace since the last call
        self._may_close = False  # the last call's closer has not been seen

    def feed(self, text: str) -> list[Part]:
        """Return the parts that `text` completes."""
        parts: list[Part] = []
        for start in range(0, len(text), MAX_PIECE_CHARS):
            piece = text[start : start + MAX_PIECE_CHARS]
            while piece:
                block = self._block
                piece = self._in_content(piece, parts) if block is None else self._in_block(block, piece, parts)
        return parts

    def finish(self, is_cut: bool = False) -> list[Part]:
        """Return the parts held back at the end of the output.

        `is_cut`: a limit or a stop string ended the output. An unfinished call or marker at its end is left out.
        """
        parts: list[Part] = []
        while self._block is not None:
            closed, raw = self._block.finish(is_cut), "".join(self._raw)
            is_call = self._raw[0] not in self._format.first_openers or self._format.may_begin_call(raw)
            self._block, self._raw = None, []
            if self._add_calls(closed.calls, parts) or (is_cut and is_call):
                self._space = []
            else:
                self._add_content(raw[: len(raw) - len(closed.rest)], parts)
            parts += self.feed(closed.rest)
        pending, self._pending = self._pending, ""
        is_marker = pending and (self._after_call or not without_cut_marker(pending))
        if self._may_close or (is_cut and is_marker):
            self._space = []  # a part of a closer, or of an opener
        else:
            self._add_content(pending, parts)
        if any(self._space) and not self._calls:
            parts.append(Content("".join(self._space)))
        self._space = []
        return parts

    @property
    def found_calls(self) -> bool:
        """Whether the output has a call so far."""
        return self._calls > 0

    def _in_content(self, text: str, parts: list[Part]) -> str:
        """Read content up to an opener; return the rest, which is in its block."""
        text, self._pending = self._pending + text, ""
        if self._may_close:
            text = text.lstrip()
            closer = next((one for one in self._format.closers if text.startswith(one)), None)
            if closer is not None:
                self._may_close = False
                return text[len(closer) :]
            if any(one.startswith(text) for one in self._format.closers):
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
        self._space = []
        self._at_start, self._after_call, self._may_close = False, True, bool(self._format.closers)
        return True

    def _add_content(self, text: str, parts: list[Part]) -> None:
        shown = text.rstrip()
        if not shown:
            self._space.append(text)
            return
        if self._after_call:
            shown = shown.lstrip()
        else:
            parts += [Content(space) for space in self._space if space]
        parts.append(Content(shown))
        self._space = [text[len(text.rstrip()) :]]
        self._at_start = self._after_call = self._may_close = False

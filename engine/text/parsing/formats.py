"""What a tool-call format is: the markers that open its blocks, and the blocks themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from engine.text.parsing.json_values import JsonScanner, NotJson

Tools = Mapping[str, Mapping[str, Any]]
"""Function name -> JSON schema of its parameters."""

_HEAD_CHARS = 2048  # of an unfinished block: enough for the longest function name and white space


@dataclass(frozen=True, slots=True)
class Closed:
    """The end of a block: its calls as (name, arguments), or None if it is malformed; and the text after it."""

    calls: list[tuple[str, str]] | None
    rest: str = ""


class Block(ABC):
    """The text of one or more calls after their opening marker, which arrives in pieces."""

    @abstractmethod
    def feed(self, text: str) -> Closed | None:
        """Add text. Return the end of the block, or None if it goes on. Takes time in proportion to the text."""

    def finish(self, is_cut: bool) -> Closed:
        """Return the end of a block that the output ends in.

        `is_cut`: the output ended at a limit or a stop string, so only calls that are certainly complete count.
        """
        return Closed(None)


class Format(ABC):
    """A tool-call format.

    Attributes:
        openers: Markers that open a block anywhere.
        first_openers: Markers that open one only at the start of the output and after a call.
        closers: Markers that may follow a call and are dropped there.
        inner_markers: Markers within a block.
        answer_header: Text before an answer that isn't a call.
        short_ids: The model's template takes call ids of nine letters and digits only.
    """

    name: ClassVar[str]
    openers: ClassVar[tuple[str, ...]] = ()
    first_openers: ClassVar[tuple[str, ...]] = ()
    closers: ClassVar[tuple[str, ...]] = ()
    inner_markers: ClassVar[tuple[str, ...]] = ()
    answer_header: ClassVar[str] = ""
    short_ids: ClassVar[bool] = False

    def __init__(self, tools: Tools):
        self.tools = tools

    @abstractmethod
    def block(self, opener: str) -> Block:
        """Return the block that `opener` opens."""

    def may_begin_call(self, text: str) -> bool:
        """Whether unfinished text, which begins with one of `first_openers`, may go on as a call."""
        return True


def shares_beginning(text: str, heads: Iterable[str]) -> bool:
    """Whether text begins one of `heads`, or begins with one; white space doesn't count."""
    compact = "".join(text[:_HEAD_CHARS].split())
    return any(head.startswith(compact) or compact.startswith(head) for head in heads)


class JsonBlock(Block):
    """A block of one JSON object or array. `prefix` is the part of it that was read with the opener.

    Subclasses turn the complete text into calls with `calls`, which raises ValueError if it is malformed.
    """

    begins = "{"

    def __init__(self, prefix: str = ""):
        self._scanner = JsonScanner()
        self._pieces: list[str] = []
        if prefix:
            self._pieces.append(prefix)
            self._scanner.feed(prefix)

    @abstractmethod
    def calls(self, text: str) -> list[tuple[str, str]]:
        """Return the calls of the JSON text. Raises ValueError."""

    def feed(self, text: str) -> Closed | None:
        if not self._pieces:
            stripped = text.lstrip()
            if stripped and stripped[0] not in self.begins:
                return Closed(None, stripped)
            text = stripped
        try:
            end = self._scanner.feed(text)
        except NotJson as error:
            return Closed(None, text[error.index :])
        if end is None:
            if text:
                self._pieces.append(text)
            return None
        self._pieces.append(text[:end])
        try:
            return Closed(self.calls("".join(self._pieces)), text[end:])
        except ValueError:
            return Closed(None, text[end:])

    def finish(self, is_cut: bool) -> Closed:
        """Return the elements of a cut array that are complete."""
        if not is_cut or not self._scanner.complete:
            return Closed(None)
        try:
            return Closed(self.calls("".join(self._pieces)[: self._scanner.complete] + "]"))
        except ValueError:
            return Closed(None)

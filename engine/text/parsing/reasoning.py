"""Split the reasoning off a model's output that arrives in pieces. The result doesn't depend on how it is cut."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from engine.text.parsing.markers import held_back, without_cut_marker
from engine.text.parsing.parts import Content, Part, Reasoning


class Splitter(ABC):
    """Splits one output, which arrives in pieces, into reasoning and content."""

    @property
    @abstractmethod
    def is_reasoning(self) -> bool:
        """Whether the output so far ends inside the reasoning."""

    @abstractmethod
    def feed(self, text: str) -> list[Part]:
        """Return the parts that `text` completes."""

    @abstractmethod
    def finish(self, is_cut: bool = False) -> list[Part]:
        """Return the parts held back at the end of the output. A part of a marker is left out of a cut output."""


@dataclass(frozen=True)
class ReasoningFormat:
    """Markers around the reasoning. With `always`, the output begins with reasoning even without the first marker."""

    name: str
    begin: str
    end: str
    always: bool = False

    def opened_by(self, prompt: str) -> bool | None:
        """Whether the prompt's last marker opens (True) or closes (False) reasoning; None if it ends with neither."""
        tail = prompt.rstrip()
        return True if tail.endswith(self.begin) else False if tail.endswith(self.end) else None

    def splitter(self, is_open: bool) -> Splitter:
        """Return the splitter of one output; `is_open`: the prompt has opened the reasoning."""
        return ReasoningSplitter(self, is_open)


REASONING_FORMATS = {
    one.name: one
    for one in (
        ReasoningFormat("qwen3", "<think>", "</think>"),
        ReasoningFormat("deepseek_r1", "<think>", "</think>", always=True),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    )
}


class ReasoningSplitter(Splitter):
    """Splits one output into reasoning and content. Whitespace around the reasoning is dropped.

    `is_open`: the prompt has opened the reasoning. Reasoning that is never closed lasts to the end of the output.
    """

    def __init__(self, format_: ReasoningFormat, is_open: bool):
        self._format = format_
        self._is_reasoning = is_open
        self._may_begin = True  # the first marker may still come
        self._pending = ""
        self._lead: list[str] = []  # whitespace before a first marker that may still come
        self._space: list[str] = []  # whitespace within the reasoning, dropped at its end
        self._has_text = False  # the reasoning has begun with other than whitespace
        self._strip_content = False

    @property
    def is_reasoning(self) -> bool:
        return self._is_reasoning

    def feed(self, text: str) -> list[Part]:
        if not text:
            return []
        text, self._pending = self._pending + text, ""
        if self._may_begin:
            stripped = text.lstrip()
            if self._format.begin.startswith(stripped) and stripped != self._format.begin:
                self._lead.append(text[: len(text) - len(stripped)])
                self._pending = stripped
                return []
            if stripped.startswith(self._format.begin):
                self._is_reasoning = True
                text = stripped[len(self._format.begin) :]
            else:
                text = "".join(self._lead) + text
            self._may_begin, self._lead = False, []
        if not self._is_reasoning:
            return self._content(text)
        reasoning, marker, content = text.partition(self._format.end)
        if marker:
            self._is_reasoning, self._strip_content = False, True
            return [*self._reasoning(reasoning), *self._content(content)]
        held = held_back(text, (self._format.end,))
        self._pending = text[len(text) - held :]
        return self._reasoning(text[: len(text) - held])

    def finish(self, is_cut: bool = False) -> list[Part]:
        pending = without_cut_marker(self._pending) if is_cut else self._pending
        pending, self._pending, self._lead = "".join(self._lead) + pending, "", []
        return self._reasoning(pending) if self._is_reasoning else self._content(pending)

    def _reasoning(self, text: str) -> list[Part]:
        shown = text.rstrip() if self._has_text else text.strip()
        if not shown:
            if self._has_text:
                self._space.append(text)
            return []
        found = Reasoning("".join(self._space) + shown)
        self._space = [text[len(text.rstrip()) :]]
        self._has_text = True
        return [found]

    def _content(self, text: str) -> list[Part]:
        if self._strip_content:
            text = text.lstrip()
            self._strip_content = not text
        return [Content(text)] if text else []

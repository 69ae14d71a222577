"""The parts of a chat model's output: content, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call. `arguments` is a JSON object as text, `index` its place among the output's calls."""

    index: int
    name: str
    arguments: str


Part = Content | Reasoning | ToolCall

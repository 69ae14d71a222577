"""Outputs in the format of OpenAI's Responses API: output items, and the events of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from engine.text.parsing.parts import Content, Part, Reasoning, ToolCall
from server.routes.chat_outputs import call_id

Event = dict[str, Any]
Logprobs = list[dict[str, Any]]


class ResponseEvents:
    """Turns the parts of one output into the events of its output items, and collects the items.

    `output` has the items so far; an item is complete once its last event was returned. Adjacent text of one kind is
    one item, however it was cut. Events have no `sequence_number` yet.
    """

    def __init__(self, short_ids: bool = False):
        self._short_ids = short_ids
        self._is_open = False
        self._logprobs: Logprobs = []  # of tokens whose text is held back
        self.output: list[dict[str, Any]] = []

    def add(self, parts: Iterable[Part], logprobs: Logprobs = ()) -> list[Event]:  # type: ignore[assignment]
        """Return the events of further parts. `logprobs` are the logprobs of the tokens since the last call."""
        events: list[Event] = []
        self._logprobs += logprobs
        for part in parts:
            if isinstance(part, Content):
                events += self._content(part.text)
            elif isinstance(part, Reasoning):
                events += self._reasoning(part.text)
            else:
                events += self._call(part)
            self._logprobs = []
        return events

    def end(self, status: str = "completed") -> list[Event]:
        """Return the events that close the open item, if one is open."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.output[-1]
        part = item["content"][0]
        if item["type"] == "message":
            done = self._of_part("output_text.done", text=part["text"], logprobs=part["logprobs"])
        else:
            done = self._of_part("reasoning_text.done", text=part["text"])
        return [done, self._of_part("content_part.done", part=dict(part)), self._done(status)]

    def _content(self, text: str) -> list[Event]:
        events = []
        if not self._is_open or self.output[-1]["type"] != "message":
            events = self._open(
                {"id": _new_id("msg"), "type": "message", "role": "assistant"},
                {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
            )
        part = self.output[-1]["content"][0]
        part["text"] += text
        if self._logprobs:
            part["logprobs"] = [*part["logprobs"], *self._logprobs]
        return [*events, self._of_part("output_text.delta", delta=text, logprobs=self._logprobs)]

    def _reasoning(self, text: str) -> list[Event]:
        events = []
        if not self._is_open or self.output[-1]["type"] != "reasoning":
            item = {"id": _new_id("rs"), "type": "reasoning", "summary": []}
            events = self._open(item, {"type": "reasoning_text", "text": ""})
        self.output[-1]["content"][0]["text"] += text
        return [*events, self._of_part("reasoning_text.delta", delta=text)]

    def _call(self, call: ToolCall) -> list[Event]:
        """Return the events of a call, which is complete."""
        events = self.end()
        item = {
            "id": _new_id("fc"), "type": "function_call", "call_id": call_id(self._short_ids), "name": call.name,
            "arguments": "", "status": "in_progress",
        }  # fmt: skip
        self.output.append(item)
        events.append({"type": "response.output_item.added", "output_index": self._index, "item": dict(item)})
        item["arguments"] = call.arguments
        return [
            *events,
            self._of_item("function_call_arguments.delta", delta=call.arguments),
            self._of_item("function_call_arguments.done", name=call.name, arguments=call.arguments),
            self._done("completed"),
        ]

    def _open(self, item: dict[str, Any], part: dict[str, Any]) -> list[Event]:
        """Open an item with one part of text."""
        events = self.end()
        self._is_open = True
        item |= {"content": [], "status": "in_progress"}
        self.output.append(item)
        events.append({"type": "response.output_item.added", "output_index": self._index, "item": dict(item)})
        item["content"] = [part]
        return [*events, self._of_part("content_part.added", part=dict(part))]

    def _done(self, status: str) -> Event:
        item = self.output[-1]
        item["status"] = status
        return {"type": "response.output_item.done", "output_index": self._index, "item": dict(item)}

    @property
    def _index(self) -> int:
        return len(self.output) - 1

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return {
            "type": f"response.{kind}", "item_id": self.output[-1]["id"], "output_index": self._index, **fields
        }  # fmt: skip

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"

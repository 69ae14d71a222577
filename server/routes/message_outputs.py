"""Outputs in the format of Anthropic's Messages API: content blocks, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from engine.text.parsing.parts import Content, Part, Reasoning
from server.http.errors import aborted
from server.routes.chat_outputs import call_id
from server.serving.jobs import Job

Event = dict[str, Any]


class MessageEvents:
    """Turns the parts of one output into the events of its content blocks, and collects the blocks.

    `omits_thinking`: thinking blocks stay empty. `content` has the blocks so far, complete once `end` was called.
    Adjacent text of one kind is one block, however it was cut.
    """

    def __init__(self, short_ids: bool = False, omits_thinking: bool = False):
        self._short_ids, self._omits_thinking = short_ids, omits_thinking
        self._is_open = False
        self.content: list[dict[str, Any]] = []

    def add(self, parts: Iterable[Part]) -> list[Event]:
        """Return the events of further parts."""
        events: list[Event] = []
        for part in parts:
            if isinstance(part, Content):
                events += self._text("text", "text", "text_delta", part.text)
            elif isinstance(part, Reasoning):
                events += self._text("thinking", "thinking", "thinking_delta", part.text)
            else:
                name = "toolu_" + call_id()[5:] if not self._short_ids else call_id(short=True)
                events += self._open({"type": "tool_use", "id": name, "name": part.name, "input": {}})
                events.append(self._delta({"type": "input_json_delta", "partial_json": part.arguments}))
                self.content[-1]["input"] = json.loads(part.arguments)
                events += self.end()
        return events

    def end(self) -> list[Event]:
        """Return the event that closes the open block, if one is open."""
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]

    def _text(self, block: str, key: str, delta: str, text: str) -> list[Event]:
        events = []
        if not self._is_open or self.content[-1]["type"] != block:
            empty = {"type": block, key: ""} | ({"signature": ""} if block == "thinking" else {})
            events = self._open(empty)
        if block == "thinking" and self._omits_thinking:
            return events
        self.content[-1][key] += text
        return [*events, self._delta({"type": delta, key: text})]

    def _open(self, block: dict[str, Any]) -> list[Event]:
        events = self.end()
        self._is_open = True
        self.content.append(block)
        return [*events, {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def usage(job: Job) -> dict[str, int]:
    """Return the `usage` object of a job so far. Cached prompt tokens are counted apart, as in Anthropic's API."""
    return _usage(job, job.output.cached_tokens, 0)


def vllm_start_usage(job: Job) -> dict[str, int]:
    """Return the `usage` object of message_start as vLLM sends it: the whole prompt, and no output yet."""
    return {"input_tokens": job.prompt_tokens, "output_tokens": 0}


def vllm_usage(job: Job, page_size: int) -> dict[str, int]:
    """Return the `usage` object as vLLM sends it: tokens that the prompt added to the prefix cache count apart too.

    `page_size`: tokens per cached page; 0: nothing is cached.
    """
    cached = job.output.cached_tokens
    whole_pages = job.prompt_tokens // page_size * page_size if page_size else 0
    return _usage(job, cached, max(0, whole_pages - cached))


def _usage(job: Job, cached: int, created: int) -> dict[str, int]:
    return {
        "input_tokens": job.prompt_tokens - cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "output_tokens": len(job.output.token_ids),
    }


def stopped(job: Job, found_calls: bool, max_tokens: int) -> dict[str, str | None]:
    """Return `stop_reason` and `stop_sequence` of a finished job; `max_tokens` is the limit of the request.

    Raises WireError 503 for a job that was aborted, for which this API has no reason.
    """
    choice = job.choices[0]
    if choice.finish_reason == "abort":
        raise aborted()
    if choice.finish_reason == "length":
        reason = "max_tokens" if len(choice.token_ids) >= max_tokens else "model_context_window_exceeded"
    elif isinstance(choice.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
    else:
        reason = "tool_use" if found_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}

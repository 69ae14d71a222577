"""Chat outputs in OpenAI's format: message and deltas with content, reasoning and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from functools import partial
from typing import Any

from engine.protocol.outputs import CompletionOutput, OutputDelta
from engine.protocol.request import TokenLogprob
from engine.text.parsing.chat import ChatParser, joined, parse
from engine.text.parsing.parts import Content, Part, Reasoning, ToolCall
from server.routes import openai_answers as answers
from server.routes.chat_run import ChatRun
from server.serving.tokenization import INLINE_CHARS, Tokenization

_SHORT_ID_CHARS = string.ascii_letters + string.digits


def call_id(short: bool = False) -> str:
    """Return a new id of a tool call. Mistral's templates take ids of nine letters and digits only."""
    return "".join(secrets.choice(_SHORT_ID_CHARS) for _ in range(9)) if short else f"call_{secrets.token_hex(12)}"


class OutputStream:
    """The deltas of one output."""

    def __init__(self, owner: ChatOutputs, parser: ChatParser):
        self._owner, self._parser = owner, parser

    def deltas(self, delta: OutputDelta) -> list[dict[str, Any]]:
        """Return the deltas of the next piece of text; may be empty."""
        parts = self._parser.feed(delta.text_delta)
        if delta.finish_reason is not None:
            parts += self._parser.finish(delta.is_cut)
        return [found for part in joined(parts) if (found := self._owner.delta(part))]

    def finish_reason(self, reason: str) -> str:
        """Return OpenAI's finish reason."""
        return "tool_calls" if reason == "stop" and self._parser.found_calls else reason


class ChatOutputs:
    """Formats the outputs of one chat request, whose prompt is tokenized."""

    def __init__(
        self, run: ChatRun, tokens: Tokenization, logprobs: bool | None, include_reasoning: bool,
        as_ids: bool | None = False, return_ids: bool | None = False,
    ):  # fmt: skip
        self._run = run
        self._tokens, self._spelling = tokens, answers.Spelling(tokens, as_ids)
        self._logprobs, self._include_reasoning = logprobs, include_reasoning
        self.return_ids = bool(return_ids)
        self._parts: dict[int, list[Part]] = {}  # of whole outputs, by index

    @property
    def is_plain(self) -> bool:
        """Whether deltas have content only."""
        return self._run.make_parser is None and not self._logprobs and not self.return_ids

    def stream(self) -> OutputStream:
        """Return the formatter of one output of a stream."""
        return OutputStream(self, self._run.parser())

    def logprobs_of(self, found: Iterable[TokenLogprob] | None) -> dict[str, Any] | None:
        """Return the `logprobs` object of tokens; None if not requested."""
        return answers.chat_logprobs(self._spelling, found) if self._logprobs else None

    def delta(self, part: Part) -> dict[str, Any]:
        """Return the delta of one part; empty if it is left out of the answer."""
        if isinstance(part, Content):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            return {"reasoning": part.text, "reasoning_content": part.text} if self._include_reasoning else {}
        return {"tool_calls": [{"index": part.index, **self._call(part)}]}

    async def parse(self, choices: Iterable[CompletionOutput]) -> None:
        """Parse whole outputs, long ones in a thread. Call it before `choice`."""
        for choice in choices:
            work = partial(parse, self._run.parser(), choice.text, choice.is_cut)
            is_short = self._run.make_parser is None or len(choice.text) <= INLINE_CHARS
            self._parts[choice.index] = work() if is_short else await self._tokens.in_thread(work)

    def choice(self, choice: CompletionOutput) -> dict[str, Any]:
        """Return one entry of a chat completion's choices."""
        parts = self._parts.pop(choice.index)
        calls = [self._call(part) for part in parts if isinstance(part, ToolCall)]
        reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
        content = "".join(part.text for part in parts if isinstance(part, Content))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if not content and (calls or reasoning) else content,
            "refusal": None,
        }
        if reasoning and self._include_reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            message["tool_calls"] = calls
        entry = {
            "index": choice.index,
            "message": message,
            "logprobs": self.logprobs_of(choice.logprobs or ()),
            "finish_reason": "tool_calls" if calls and choice.finish_reason == "stop" else choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return entry | {"token_ids": choice.token_ids} if self.return_ids else entry

    def _call(self, part: ToolCall) -> dict[str, Any]:
        function = {"name": part.name, "arguments": part.arguments}
        return {"id": call_id(self._run.short_ids), "type": "function", "function": function}

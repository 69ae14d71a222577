"""Chunks of OpenAI streams: deltas as server-sent events.

A stream has thousands of events, and most differ only in their text. Their JSON frame is serialized once per choice,
and only the text is inserted for each event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json.encoder import encode_basestring
from typing import Any, Protocol

from engine.protocol.outputs import OutputDelta
from server.http.streaming import event
from server.routes import openai_answers as answers
from server.serving.service import Job
from server.serving.tokenization import Tokenization

Head = dict[str, Any]  # fields shared by a response and all its chunks: id, object, created, model
PLACEHOLDER = "\ue000the text\ue001"  # replaced by the text of each event


class ChunkChoices(Protocol):
    """Builds the entries of a chunk's `choices` for one type of stream."""

    def of(self, job: Job, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        """Return the entries for a delta of choice `number`, each for its own chunk; empty if nothing is to be sent."""

    def text_only(self, number: int, text: str) -> dict[str, Any] | None:
        """Return the entry for a text-only delta; None if this stream's deltas always need `of`."""


class ChunkWriter:
    """Write the chunks of one response.

    `shared` returns the fields that each chunk starts with; `is_fixed` promises that they never change.
    """

    def __init__(self, chunk_choices: ChunkChoices, shared: Callable[[], Head], is_fixed: bool):
        self._chunk_choices, self._shared, self._is_fixed = chunk_choices, shared, is_fixed
        self._frames: dict[int, tuple[str, str]] = {}  # (before, after) the text, per choice

    def of(self, job: Job, first: int, deltas: Sequence[OutputDelta]) -> bytes:
        """Return the events for a job's deltas. Its choices are numbered from `first`. May be empty."""
        written: list[str] = []
        for delta in deltas:
            number = first + delta.index
            frame = self._frames.get(number)
            if frame is not None and delta.finish_reason is None and delta.logprobs is None:
                if delta.text_delta:
                    written += (frame[0], encode_basestring(delta.text_delta), frame[1])
                continue
            for choice in self._chunk_choices.of(job, number, delta):
                written.append(event({**self._shared(), "choices": [choice]}))
            if frame is None and self._is_fixed:
                self._add_frame(number)
        return "".join(written).encode()

    def _add_frame(self, number: int) -> None:
        entry = self._chunk_choices.text_only(number, PLACEHOLDER)
        if entry is not None:
            before, _, after = event({**self._shared(), "choices": [entry]}).rpartition(encode_basestring(PLACEHOLDER))
            self._frames[number] = before, after


class CompletionChunkChoices:
    """Chunk choices of /v1/completions."""

    def __init__(self, tokens: Tokenization, echo: bool | None, logprobs: int | None):
        self._tokens, self._echo, self._logprobs = tokens, echo, logprobs
        self._builders: dict[int, answers.CompletionLogprobs] = {}

    def of(self, job: Job, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        choice, entries = job.choices[delta.index], []
        if number not in self._builders:
            builder = self._builders[number] = answers.CompletionLogprobs(self._tokens, self._logprobs or 0)
            if self._echo:
                entries.append(answers.completion_choice(number, *answers.echo(self._tokens, builder, job), None))
        ended, logprobs = delta.finish_reason is not None, None
        if self._logprobs is not None and delta.token_ids:
            logprobs = self._builders[number].of(delta.token_ids, delta.logprobs or [None] * len(delta.token_ids))
        if delta.text_delta or logprobs or ended:
            entries.append(answers.completion_choice(number, delta.text_delta, logprobs, choice if ended else None))
        return entries

    def text_only(self, number: int, text: str) -> dict[str, Any] | None:
        return answers.completion_choice(number, text, None, None) if self._logprobs is None else None


class ChatChunkChoices:
    """Chunk choices of /v1/chat/completions."""

    def __init__(self, tokens: Tokenization, logprobs: bool | None):
        self._tokens, self._logprobs = tokens, logprobs
        self._begun: set[int] = set()

    def of(self, job: Job, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        entries = []
        if number not in self._begun:
            self._begun.add(number)
            entries.append(answers.chat_chunk_choice(number, {"role": "assistant", "content": ""}, None))
        logprobs = answers.chat_logprobs(self._tokens, delta.logprobs) if self._logprobs and delta.logprobs else None
        if delta.text_delta or logprobs:
            entries.append(answers.chat_chunk_choice(number, {"content": delta.text_delta}, logprobs))
        if delta.finish_reason is not None:
            entries.append(answers.chat_chunk_choice(number, {}, None, job.choices[delta.index]))
        return entries

    def text_only(self, number: int, text: str) -> dict[str, Any] | None:
        return None if self._logprobs else answers.chat_chunk_choice(number, {"content": text}, None)

"""The events of OpenAI's streams: what a delta adds to a choice, as server-sent events.

Most events are one text in a frame that stays the same: the frame is made once a choice, and only the text is written
anew, since a stream has thousands of them. Knows no HTTP.
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

Head = dict[str, Any]  # the fields that a body and each of its chunks share: id, object, created, model
MARK = "\ue000the text\ue001"  # stands for the text while a frame is made


class Pieces(Protocol):
    """What a kind of stream makes of a delta: entries of the `choices` of the chunks that follow."""

    def of(self, job: Job, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        """The entries for a delta just added to choice `number` of the answer; none if there is nothing to tell."""

    def plain(self, number: int, text: str) -> dict[str, Any] | None:
        """The entry for a text and nothing else; None if this stream's deltas always need `of`."""


class Chunks:
    """Writes the chunks of one answer. `shared` gives a chunk's head; `is_fixed` says that it never changes."""

    def __init__(self, pieces: Pieces, shared: Callable[[], Head], is_fixed: bool):
        self._pieces, self._shared, self._is_fixed = pieces, shared, is_fixed
        self._frames: dict[int, tuple[str, str]] = {}  # of the choices that have begun

    def of(self, job: Job, first: int, deltas: Sequence[OutputDelta]) -> bytes:
        """The events for the deltas of a job whose choices are numbered from `first`; may be empty."""
        written: list[str] = []
        for delta in deltas:
            number = first + delta.index
            frame = self._frames.get(number)
            if frame is not None and delta.finish_reason is None and delta.logprobs is None:
                if delta.text_delta:
                    written += (frame[0], encode_basestring(delta.text_delta), frame[1])
                continue
            for choice in self._pieces.of(job, number, delta):
                written.append(event({**self._shared(), "choices": [choice]}))
            if frame is None and self._is_fixed:
                self._add_frame(number)
        return "".join(written).encode()

    def _add_frame(self, number: int) -> None:
        entry = self._pieces.plain(number, MARK)
        if entry is not None:
            before, _, after = event({**self._shared(), "choices": [entry]}).rpartition(encode_basestring(MARK))
            self._frames[number] = before, after


class CompletionPieces:
    """The pieces of /v1/completions."""

    def __init__(self, tokens: Tokenization, echo: bool | None, logprobs: int | None):
        self._tokens, self._echo, self._logprobs = tokens, echo, logprobs
        self._builders: dict[int, answers.CompletionLogprobs] = {}

    def of(self, job: Job, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        choice, found = job.choices[delta.index], []
        if number not in self._builders:
            builder = self._builders[number] = answers.CompletionLogprobs(self._tokens, self._logprobs or 0)
            if self._echo:
                found.append(answers.completion_choice(number, *answers.echo(self._tokens, builder, job), None))
        ended, logprobs = delta.finish_reason is not None, None
        if self._logprobs is not None and delta.token_ids:
            logprobs = self._builders[number].of(delta.token_ids, delta.logprobs or [None] * len(delta.token_ids))
        if delta.text_delta or logprobs or ended:
            found.append(answers.completion_choice(number, delta.text_delta, logprobs, choice if ended else None))
        return found

    def plain(self, number: int, text: str) -> dict[str, Any] | None:
        return answers.completion_choice(number, text, None, None) if self._logprobs is None else None


class ChatPieces:
    """The pieces of /v1/chat/completions."""

    def __init__(self, tokens: Tokenization, logprobs: bool | None):
        self._tokens, self._logprobs = tokens, logprobs
        self._begun: set[int] = set()

    def of(self, job: Job, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        found = []
        if number not in self._begun:
            self._begun.add(number)
            found.append(answers.chat_chunk_choice(number, {"role": "assistant", "content": ""}, None))
        logprobs = answers.chat_logprobs(self._tokens, delta.logprobs) if self._logprobs and delta.logprobs else None
        if delta.text_delta or logprobs:
            found.append(answers.chat_chunk_choice(number, {"content": delta.text_delta}, logprobs))
        if delta.finish_reason is not None:
            found.append(answers.chat_chunk_choice(number, {}, None, job.choices[delta.index]))
        return found

    def plain(self, number: int, text: str) -> dict[str, Any] | None:
        return None if self._logprobs else answers.chat_chunk_choice(number, {"content": text}, None)

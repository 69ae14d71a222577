"""Chunks of OpenAI streams: deltas as server-sent events.

A stream has thousands of events, and most differ only in their text. Their JSON frame is serialized once per choice,
and only the text is inserted for each event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json.encoder import encode_basestring
from typing import Any, Protocol

from engine.protocol.outputs import CompletionOutput, OutputDelta
from server.http.streaming import WriteEvent, event
from server.routes import openai_answers as answers
from server.routes.chat_outputs import ChatOutputs, OutputStream
from server.routes.vllm_keys import NullKeys
from server.schemas.requests import CompletionBody
from server.serving.jobs import Job
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

    `shared(unsent)` returns the fields that each chunk starts with, where `unsent` of the tokens so far come in later
    chunks; `is_fixed` promises that they never change. The first chunk has the fields `once` too.
    """

    def __init__(
        self, chunk_choices: ChunkChoices, shared: Callable[[int], Head], is_fixed: bool, once: Head | None = None
    ):
        self._chunk_choices, self._shared, self._is_fixed = chunk_choices, shared, is_fixed
        self._once = once or {}
        self._frames: dict[int, tuple[str, str]] = {}  # (before, after) the text, per choice

    def of(self, job: Job, first: int, deltas: Sequence[OutputDelta], write: WriteEvent = event) -> bytes:
        """Return the events for a job's deltas. Its choices are numbered from `first`. May be empty."""
        written: list[str] = []
        unsent = 0 if self._is_fixed else sum(len(delta.token_ids) for delta in deltas)
        for delta in deltas:
            number = first + delta.index
            frame = self._frames.get(number)
            if frame is not None and delta.finish_reason is None and delta.logprobs is None:
                if delta.text_delta:
                    written += (frame[0], encode_basestring(delta.text_delta), frame[1])
                continue
            unsent -= len(delta.token_ids)
            for choice in self._chunk_choices.of(job, number, delta):
                still = len(delta.token_ids) if "role" in choice.get("delta", ()) else 0  # it begins the choice
                written.append(write({**self._shared(unsent + still), "choices": [choice], **self._once}))
                self._once = {}
            if frame is None and self._is_fixed:
                self._add_frame(number)
        return "".join(written).encode()

    def _add_frame(self, number: int) -> None:
        entry = self._chunk_choices.text_only(number, PLACEHOLDER)
        if entry is not None:
            before, _, after = event({**self._shared(0), "choices": [entry]}).rpartition(encode_basestring(PLACEHOLDER))
            self._frames[number] = before, after


class CompletionChunkChoices:
    """Chunk choices of /v1/completions."""

    def __init__(self, tokens: Tokenization, body: CompletionBody, keys: NullKeys):
        self._tokens, self._body, self._keys = tokens, body, keys
        self._spelling = answers.Spelling(tokens, body.return_tokens_as_token_ids)
        self._builders: dict[int, answers.CompletionLogprobs] = {}

    def of(self, job: Job, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        choice, entries = job.choices[delta.index], []
        is_first, body = number not in self._builders, self._body
        if is_first:
            before = answers.echoed_text(self._tokens, job) if body.echo else ""
            self._builders[number] = answers.CompletionLogprobs(
                self._tokens, self._spelling, body.logprobs or 0, job, len(before)
            )
            if body.echo:
                entries.append(self._entry(number, before, self._of_prompt(job), None))
        ended, logprobs = delta.finish_reason is not None, None
        if body.logprobs is not None and delta.token_ids:
            logprobs = self._builders[number].of(delta.token_ids, delta.logprobs or [None] * len(delta.token_ids))
        if delta.text_delta or logprobs or ended or body.return_token_ids:
            entries.append(self._entry(number, delta.text_delta, logprobs, choice if ended else None))
            if body.return_token_ids:
                entries[-1]["token_ids"] = delta.token_ids
            if ended and body.has_weight_versions:
                entries[-1]["weight_versions"] = answers.weight_versions(choice)
        if body.return_token_ids and is_first:
            entries[0]["prompt_token_ids"] = job.output.prompt_token_ids
        return entries

    def _of_prompt(self, job: Job) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        return answers.echoed_logprobs(
            self._tokens, self._spelling, self._body.logprobs, job, self._body.add_special_tokens
        )

    def text_only(self, number: int, text: str) -> dict[str, Any] | None:
        if self._body.logprobs is not None or self._body.return_token_ids:
            return None
        return self._entry(number, text, None, None)

    def _entry(
        self, number: int, text: str, logprobs: dict[str, Any] | None, choice: CompletionOutput | None
    ) -> dict[str, Any]:
        return {**self._keys.chunk_choice, **answers.completion_choice(number, text, logprobs, choice)}


class ChatChunkChoices:
    """Chunk choices of /v1/chat/completions: content, reasoning and tool calls, each with its own chunk.

    `echoed` precedes the content. The finish reason comes in a separate chunk, as OpenAI sends it; with `joins_end`
    in the chunk of the last delta, as vLLM does. `with_versions`: whether that chunk has the weight versions of its
    choice.
    """

    def __init__(
        self, outputs: ChatOutputs, keys: NullKeys, echoed: str = "", joins_end: bool = False,
        with_versions: bool = False,
    ):  # fmt: skip
        self._outputs, self._keys, self._echoed, self._joins_end = outputs, keys, echoed, joins_end
        self._with_versions = with_versions
        self._streams: dict[int, OutputStream] = {}

    def of(self, job: Job, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        entries = []
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = self._outputs.stream()
            entries.append(self._entry(number, {"role": "assistant", "content": ""}, None))
            if self._echoed:
                entries.append(self._entry(number, {"content": self._echoed}, None))
        logprobs = self._outputs.logprobs_of(delta.logprobs) if delta.logprobs else None
        deltas = stream.deltas(delta)
        return_ids = self._outputs.return_ids and delta.token_ids
        if (logprobs or return_ids) and not deltas:
            deltas = [{"content": ""}]  # text is held back or left out, but its tokens are not
        for place, one in enumerate(deltas):
            entries.append(self._entry(number, one, logprobs if place == 0 else None))
            if place == 0 and return_ids:
                entries[-1]["token_ids"] = delta.token_ids
        if delta.finish_reason is not None:
            last = entries.pop() if self._joins_end and deltas else self._entry(number, {}, None)
            end = {"finish_reason": stream.finish_reason(delta.finish_reason), "stop_reason": delta.stop_reason}
            entries.append(last | end)
            if self._with_versions:
                entries[-1]["weight_versions"] = answers.weight_versions(job.choices[delta.index])
        return entries

    def text_only(self, number: int, text: str) -> dict[str, Any] | None:
        return self._entry(number, {"content": text}, None) if self._outputs.is_plain else None

    def _entry(self, number: int, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        # A client that asks for token ids collects them from the chunks that have them: no null then, as in vLLM.
        keys = {} if self._outputs.return_ids else self._keys.chunk_choice
        return {**keys, **answers.chat_chunk_choice(number, delta, logprobs)}

"""From the engine's token events to what a caller reads: text, stop strings, accumulated results.

Owns the caller's side of every running sequence. Runs where the caller runs, so it knows no tensors, no scheduler
and no HTTP; a tokenizer is optional.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.detokenizer import AnyDetokenizer, Decoder, Detokenizer, Detokenizers, StopStrings
from engine.errors import RequestError
from engine.request import FinishReason, SamplingParams, TokenEvent, TokenLogprob

__all__ = ["CompletionOutput", "Detokenizer", "OutputDelta", "OutputProcessor", "RequestOutput", "StopStrings"]


@dataclass(kw_only=True, slots=True)
class OutputDelta:
    """What one event adds to one of a request's sequences; the last one carries finish_reason."""

    request_id: str  # the caller's id
    child_id: str  # the engine's id of this sequence: may differ from the caller's
    index: int = 0  # which of the n
    text_delta: str = ""
    token_ids: list[int] = field(default_factory=list)  # new ones
    logprobs: list[TokenLogprob] | None = None  # parallel to token_ids
    prompt_logprobs: list[TokenLogprob | None] | None = None  # with the first delta only
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or the string that stopped it
    error: str | None = None
    abort: bool = False  # a stop string ended it here: tell the engine to abort child_id
    weight_version: str = ""
    cached_tokens: int = 0
    queue_time: float | None = None  # seconds, with the first delta only
    graph_bucket: int | None = None  # of the graph that gave the tokens; None: they came from an eager run

    def join(self, later: OutputDelta) -> bool:
        """Take the delta that came next of the same sequence in, unless its tokens have another origin; whether it did.

        What results is as if both had come in one event.
        """
        if later.graph_bucket != self.graph_bucket or later.weight_version != self.weight_version:
            return False
        self.text_delta += later.text_delta
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error
        self.abort = later.abort
        return True


@dataclass(kw_only=True)
class CompletionOutput:
    """One finished or growing sequence."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None  # parallel to token_ids
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    weight_version: str = ""  # of the weights that gave the last token

    def add(self, delta: OutputDelta) -> None:
        """Append a delta of this sequence."""
        self.text += delta.text_delta
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error
        self.weight_version = delta.weight_version or self.weight_version


@dataclass(kw_only=True)
class RequestOutput:
    """A request's prompt and all its sequences, filled by `add`; text, token_ids, … are those of the first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    outputs: list[CompletionOutput]
    cached_tokens: int = 0  # prompt tokens from the prefix cache, of the first sequence
    weight_version: str = ""

    @classmethod
    def empty(cls, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], n: int = 1) -> RequestOutput:
        """A request of n sequences that has no output yet."""
        return cls(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            outputs=[CompletionOutput(index=index) for index in range(n)],
        )

    def add(self, delta: OutputDelta) -> None:
        """Append a delta to the sequence that it names."""
        self.outputs[delta.index].add(delta)
        if self.prompt_logprobs is None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.index == 0:
            self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.weight_version = delta.weight_version or self.weight_version

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason


@dataclass(slots=True)
class _Sequence:
    request_id: str
    index: int
    params: SamplingParams
    detokenizer: AnyDetokenizer | None
    stops: StopStrings | None  # None: nothing is looked for
    num_tokens: int = 0


class OutputProcessor:
    """Turns the events of running sequences into deltas with text. Not thread-safe: one owner."""

    def __init__(self, tokenizer: Decoder | None):
        self._detokenizers = None if tokenizer is None else Detokenizers(tokenizer)
        self._sequences: dict[str, _Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def add(
        self,
        child_id: str,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        request_id: str | None = None,
        index: int = 0,
    ) -> None:
        """Expect events of the engine's request `child_id`, sequence `index` of the caller's `request_id`.

        Raises RequestError for an id that is in use, and for stop strings without a tokenizer to find them with.
        """
        if child_id in self._sequences:
            raise RequestError(f"request id {child_id!r} is in use by a running request: choose another", "request_id")
        if self._detokenizers is None and params.stop:
            raise RequestError(
                f"stop asks for {len(params.stop)} stop strings, but the model has no tokenizer: use stop_token_ids",
                param="stop",
            )
        detokenizer = stops = None
        if self._detokenizers is not None:
            detokenizer = self._detokenizers.make(prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
        if params.stop:
            stops = StopStrings(params.stop, include_in_output=params.include_stop_str_in_output)
        self._sequences[child_id] = _Sequence(request_id or child_id, index, params, detokenizer, stops)

    def remove(self, child_id: str) -> bool:
        """Expect no more of a sequence; whether it was known."""
        return self._sequences.pop(child_id, None) is not None

    def one(self, child_id: str, token_id: int, weight_version: str, graph_bucket: int | None) -> OutputDelta | None:
        """As `process`, of an event that is one token and nothing else: what most events are."""
        sequence = self._sequences.get(child_id)
        if sequence is None:
            return None
        if sequence.stops is not None:
            return self.process(
                TokenEvent(
                    request_id=child_id, token_ids=[token_id], weight_version=weight_version, graph_bucket=graph_bucket
                )
            )
        detokenizer = sequence.detokenizer
        return OutputDelta(
            request_id=sequence.request_id,
            child_id=child_id,
            index=sequence.index,
            text_delta="" if detokenizer is None else detokenizer.add_one(token_id),
            token_ids=[token_id],
            weight_version=weight_version,
            graph_bucket=graph_bucket,
        )

    def process(self, event: TokenEvent) -> OutputDelta | None:
        """The delta of an event; None for a sequence that has ended, was removed or was never added.

        A stop string ends the sequence with the token that completes it: later tokens of the event are dropped,
        finish_reason is "stop", stop_reason the string, and `abort` says whether the engine still runs it. The text
        of a token that itself ended the sequence is left out, unless include_stop_str_in_output.
        """
        sequence = self._sequences.get(event.request_id)
        if sequence is None:
            return None
        text, count, stop = _text_of(sequence, event)
        finish_reason = event.finish_reason if stop is None else "stop"
        if finish_reason is not None:
            del self._sequences[event.request_id]
        return OutputDelta(
            request_id=sequence.request_id,
            child_id=event.request_id,
            index=sequence.index,
            text_delta=text,
            token_ids=event.token_ids[:count],
            logprobs=event.logprobs[:count] if event.logprobs is not None else None,
            prompt_logprobs=event.prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=event.stop_reason if stop is None else stop,
            error=event.error if stop is None else None,
            abort=stop is not None and event.finish_reason is None,
            weight_version=event.weight_version,
            cached_tokens=event.cached_tokens,
            queue_time=event.queue_time,
            graph_bucket=event.graph_bucket,
        )


def _text_of(sequence: _Sequence, event: TokenEvent) -> tuple[str, int, str | None]:
    """The event's text, how many of its tokens belong to the output, and the stop string found."""
    total = len(event.token_ids)
    detokenizer, stops = sequence.detokenizer, sequence.stops
    if detokenizer is None:
        sequence.num_tokens += total
        return "", total, None
    silent = event.finish_reason == "stop" and not sequence.params.include_stop_str_in_output
    pieces = []
    for count, token_id in enumerate(event.token_ids, start=1):
        sequence.num_tokens += 1
        if silent and count == total:
            break
        text, stop = _shown(sequence, detokenizer.add_one(token_id))
        pieces.append(text)
        if stop is not None:
            return "".join(pieces), count, stop
    if event.finish_reason is None:
        return "".join(pieces), total, None
    text, stop = _shown(sequence, detokenizer.finish())
    pieces.append(text)
    if stop is None and stops is not None:
        pieces.append(stops.finish())
    return "".join(pieces), total, stop


def _shown(sequence: _Sequence, text: str) -> tuple[str, str | None]:
    """What of a new text can be shown, and the stop string found in it."""
    if sequence.stops is None:
        return text, None
    return sequence.stops.add(text, armed=sequence.num_tokens >= sequence.params.min_tokens)

"""From the engine's token events to what a caller reads: text, stop strings, accumulated results.

Owns the caller's side of every running sequence. Runs where the caller runs, so it knows no tensors, no scheduler
and no HTTP; a tokenizer is optional.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.protocol.request import FinishReason, TokenLogprob


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

"""Request outputs as the caller sees them: per-event deltas and accumulated results.

Used in the caller's process, so it depends on neither tensors nor the scheduler nor HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.protocol.logprobs import TokenLogprob, TokenLogprobs
from engine.protocol.request import FinishReason


def _is_cut(finish_reason: FinishReason | None, stop_reason: int | str | None) -> bool:
    return finish_reason is not None and (finish_reason != "stop" or stop_reason is not None)


class WeightSpan(NamedTuple):
    """The output tokens [start, end) of a sequence, which weights of one version produced."""

    version: str
    start: int
    end: int


@dataclass(kw_only=True, slots=True)
class OutputDelta:
    """The output that one event adds to one sequence of a request; the last delta carries finish_reason."""

    request_id: str  # the caller's id
    child_id: str  # the engine's id of this sequence; may differ from request_id
    index: int = 0  # among the request's n sequences
    text_delta: str = ""
    token_ids: list[int] = field(default_factory=list)  # new tokens
    logprobs: TokenLogprobs[TokenLogprob] | None = None  # parallel to token_ids
    prompt_logprobs: TokenLogprobs[TokenLogprob | None] | None = None  # with the first delta only
    hidden_state_parts: list[np.ndarray] = field(default_factory=list)  # see CompletionOutput
    routed_expert_parts: list[np.ndarray] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string
    error: str | None = None
    abort: bool = False  # a stop string matched: the engine must abort child_id
    weight_version: str = ""
    cached_tokens: int = 0
    queue_time: float | None = None  # seconds, with the first delta only
    graph_bucket: int | None = None  # bucket of the graph that produced the tokens; None: eager

    @property
    def is_cut(self) -> bool:
        """Whether something other than the model's end token ended the output."""
        return _is_cut(self.finish_reason, self.stop_reason)

    @property
    def is_plain(self) -> bool:
        """Whether it adds nothing but tokens with their text, and does not end the sequence."""
        return (
            self.finish_reason is None and self.logprobs is None and self.prompt_logprobs is None
            and not self.hidden_state_parts and not self.routed_expert_parts
        )  # fmt: skip

    def join(self, later: OutputDelta) -> bool:
        """Merge the sequence's next delta into this one, as if both had come in one event. Return whether it merged.

        Deltas with different graph buckets or weight versions are not merged.
        """
        if later.graph_bucket != self.graph_bucket or later.weight_version != self.weight_version:
            return False
        self.text_delta += later.text_delta
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = TokenLogprobs() if self.logprobs is None else self.logprobs
            self.logprobs += later.logprobs
        self.hidden_state_parts += later.hidden_state_parts
        self.routed_expert_parts += later.routed_expert_parts
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error
        self.abort = later.abort
        return True


@dataclass(kw_only=True)
class CompletionOutput:
    """The accumulated output of one sequence, finished or running."""

    index: int  # among the request's n sequences
    text: str = ""  # the text of token_ids, without the stop string or stop token
    token_ids: list[int] = field(default_factory=list)  # generated tokens, a stop token included
    logprobs: TokenLogprobs[TokenLogprob] | None = None  # parallel to token_ids; None unless they were asked for
    hidden_state_parts: list[np.ndarray] = field(default_factory=list)  # float32 [n, h], in order of the tokens
    routed_expert_parts: list[np.ndarray] = field(default_factory=list)  # int16 [n, L, k], in order of the tokens
    finish_reason: FinishReason | None = None  # stop, length, abort or error; None while it runs
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    error: str | None = None  # the message, if finish_reason is error
    weight_version: str = ""  # version of the weights that produced the last token
    weight_versions: list[WeightSpan] = field(default_factory=list)  # of all tokens, in order and without gaps

    @property
    def kept_mass(self) -> list[float] | None:
        """By token, the log of the probability that top-k, top-p and min-p left. None unless it was asked for.

        A token's logprob plus its kept mass is its logprob in the whole distribution.
        """
        return [one.kept_mass for one in self.logprobs or () if one.kept_mass is not None] or None

    @property
    def sampling_mask(self) -> list[list[int]] | None:
        """By token, the ids that top-k, top-p and min-p left, most likely first. None if all are left, or unasked."""
        return [one.kept_ids for one in self.logprobs or () if one.kept_ids is not None] or None

    @property
    def is_cut(self) -> bool:
        """Whether something other than the model's end token ended the output."""
        return _is_cut(self.finish_reason, self.stop_reason)

    def add(self, delta: OutputDelta) -> None:
        """Append a delta of this sequence."""
        self.text += delta.text_delta
        if delta.token_ids:
            self._add_tokens(delta.token_ids, delta.weight_version)
        if delta.logprobs is not None:
            self.logprobs = TokenLogprobs() if self.logprobs is None else self.logprobs
            self.logprobs += delta.logprobs
        self.hidden_state_parts += delta.hidden_state_parts
        self.routed_expert_parts += delta.routed_expert_parts
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error
        self.weight_version = delta.weight_version or self.weight_version

    def _add_tokens(self, token_ids: list[int], version: str) -> None:
        start = len(self.token_ids)
        self.token_ids += token_ids
        if self.weight_versions and self.weight_versions[-1].version == version:
            start = self.weight_versions.pop().start
        self.weight_versions.append(WeightSpan(version, start, len(self.token_ids)))

    @property
    def hidden_states(self) -> np.ndarray | None:
        """Float32 [T, h]: the hidden states of the prompt's tokens and of all generated ones but the last.

        They are those after the last layer and its norm. None unless return_hidden_states asked for them.
        """
        return np.concatenate(self.hidden_state_parts) if self.hidden_state_parts else None

    @property
    def routed_experts(self) -> np.ndarray | None:
        """Int16 [T, L, k]: the k experts of the prompt's tokens and of all generated ones but the last.

        L are the layers with experts, in order, and k experts are in the order of the router. None unless
        return_routed_experts asked for them.
        """
        return np.concatenate(self.routed_expert_parts) if self.routed_expert_parts else None


class Sample(NamedTuple):
    """A finished sequence: the position of its prompt among the prompts of the call, and its output."""

    prompt_index: int
    output: CompletionOutput


@dataclass(kw_only=True)
class RequestOutput:
    """A request's prompt and sequences, filled by `add`. `text`, `token_ids`, … are the first sequence's."""

    request_id: str  # the caller's id, or a generated one
    prompt: str | None  # None: the prompt was given as token ids
    prompt_token_ids: list[int]  # the tokens of the prompt
    prompt_logprobs: TokenLogprobs[TokenLogprob | None] | None = None  # of prompt_token_ids; None for the first token
    outputs: list[CompletionOutput]  # n sequences
    cached_tokens: int = 0  # prompt tokens from the prefix cache, for the first sequence
    weight_version: str = ""  # version of the weights that produced the last token

    @classmethod
    def empty(cls, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], n: int = 1) -> RequestOutput:
        """Return the output of a request with n sequences and no tokens yet."""
        return cls(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(prompt_token_ids),
            outputs=[CompletionOutput(index=index) for index in range(n)],
        )

    def add(self, delta: OutputDelta) -> None:
        """Append a delta to sequence `delta.index`."""
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
    def logprobs(self) -> TokenLogprobs[TokenLogprob] | None:
        return self.outputs[0].logprobs

    @property
    def hidden_states(self) -> np.ndarray | None:
        return self.outputs[0].hidden_states

    @property
    def routed_experts(self) -> np.ndarray | None:
        return self.outputs[0].routed_experts

    @property
    def weight_versions(self) -> list[WeightSpan]:
        return self.outputs[0].weight_versions

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason

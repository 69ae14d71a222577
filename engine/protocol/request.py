"""Engine requests and token events, as picklable plain data.

Defines EngineRequest (input), TokenEvent (output, one per request and step) and the split of a request into its n
sequences. Re-exports SamplingParams and TokenLogprob.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from engine.errors import EngineError, RequestError
from engine.protocol.logprobs import TokenLogprob, TokenLogprobs
from engine.protocol.sampling_params import MAX_TOKENS, SamplingParams, checked_token_ids

__all__ = [
    "Child",
    "EngineRequest",
    "FinishReason",
    "SamplingParams",
    "TokenEvent",
    "TokenLogprob",
    "check_prompt_ids",
    "mix64",
    "resolve_seed",
    "split_n",
]

FinishReason = Literal["stop", "length", "abort", "error"]

# The published constants of splitmix64: an odd increment that visits every 64-bit value, and two odd multipliers.
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK64 = 2**64 - 1


@dataclass(kw_only=True)
class EngineRequest:
    """One sequence to generate. params.n must be 1: the client splits a request with n > 1 (`split_n`)."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0  # lower values run first
    arrival_time: float = field(default_factory=time.monotonic)  # seconds, time.monotonic
    index: int = 0  # number of sequences of the same client request before it; they make way for other requests
    sender: str = ""  # who sent it, of all that share the engine: their slow grammars don't hold up each other's
    seed: int | None = None  # int64, set at construction: params.seed, else random
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # params.bad_words as tokens
    adapter: str = ""  # name of the adapter that computes it; empty: the model alone
    names: tuple[str, ...] = ()  # under which a client may abort it beside its siblings; need not be unique

    def __post_init__(self) -> None:
        if self.params.n != 1:
            raise RequestError(
                f"the engine takes one sequence per request, found n={self.params.n}: use split_n", param="n"
            )
        if self.seed is None:
            self.seed = resolve_seed(self.params)


@dataclass(kw_only=True)
class TokenEvent:
    """The output of one step for one request; the last event carries finish_reason."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)  # new this step
    logprobs: TokenLogprobs[TokenLogprob] | None = None  # parallel to token_ids
    prompt_logprobs: TokenLogprobs[TokenLogprob | None] | None = None  # with the first event only; entry 0 is None
    hidden_states: np.ndarray | None = None  # float32 [n, h], of the tokens computed since the last event
    routed_experts: np.ndarray | None = None  # int16 [n, L, k], of the same tokens
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id
    grammar_ended: bool = (
        False  # finish_reason is "stop" because a grammar is complete; the last token is no stop token
    )
    error: str | None = None
    refusal: EngineError | None = None  # why the request was not accepted
    weight_version: str = ""
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    queue_time: float | None = None  # seconds, with the first event only
    graph_bucket: int | None = None  # bucket of the graph that ran the decode; None: prefill or eager


@dataclass(frozen=True, kw_only=True)
class Child:
    """One of the n sequences of a request: id, index among the n, seed, and params with n=1."""

    request_id: str
    index: int
    params: SamplingParams
    seed: int


def resolve_seed(params: SamplingParams) -> int:
    """Return params.seed, or a random int64 from the operating system if it is None."""
    return params.seed if params.seed is not None else secrets.randbits(63)


def split_n(request_id: str, params: SamplingParams, base_seed: int) -> list[Child]:
    """Split a request into its n sequences. With n=1 the child keeps the id, otherwise child k gets the id "id#k".

    Child 0 uses base_seed, so that a larger n leaves the first choice unchanged. The seeds of the others are mixed
    from base_seed and their index.
    """
    if params.n == 1:
        return [Child(request_id=request_id, index=0, params=params, seed=base_seed)]
    single = dataclasses.replace(params, n=1)
    return [
        Child(request_id=f"{request_id}#{k}", index=k, params=single, seed=_child_seed(base_seed, k))
        for k in range(params.n)
    ]


def _child_seed(base_seed: int, index: int) -> int:
    return base_seed if index == 0 else mix64(base_seed + index * GOLDEN)


def check_prompt_ids(prompt_token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Return the prompt as a list of ints.

    Raises RequestError if it is not a list, is empty, or has an item that is not an integer in the vocabulary.
    """
    name = "prompt_token_ids"
    ids = list(checked_token_ids(name, prompt_token_ids, MAX_TOKENS))
    if not ids:
        raise RequestError("the prompt is empty: give at least one token", param=name)
    if max(ids) >= vocab_size:
        raise RequestError(
            f"{name} has token id {max(ids)}, but the model's vocabulary ends at {vocab_size - 1}", param=name
        )
    return ids


def mix64(value: int) -> int:
    """Hash an integer to an int64 with splitmix64's finalizer, a bijection of the value mod 2**64."""
    x = value & _MASK64
    x = ((x ^ (x >> 30)) * MIX_1) & _MASK64
    x = ((x ^ (x >> 27)) * MIX_2) & _MASK64
    x ^= x >> 31
    return x - 2**64 if x >> 63 else x

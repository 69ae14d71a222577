"""What the answers look like, for /openapi.json and for the tests that hold the routes to it.

Routes build plain dicts; nothing here runs when a request is answered. Every model refuses what it doesn't name.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "abort"]
StopReason = int | str | None


class Answer(BaseModel):
    """An answer that has these fields and no others."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Answer):
    """What was wrong, and which field of the body was at fault, where one was."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """The body of every answer of 400 and above."""

    error: ErrorDetail


class CachedTokens(Answer):
    """Prompt tokens that came from the prefix cache."""

    cached_tokens: int


class Usage(Answer):
    """Tokens in and out of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(Answer):
    """Parallel lists, one entry a token; the first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One continuation; `stop_reason` is the stop string or token id that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason


class Completion(Answer):
    """An answer of /v1/completions; a stream's chunks have the same shape."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TokenScore(Answer):
    """A token, its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenScore(TokenScore):
    """The chosen token, and the likeliest alternatives."""

    top_logprobs: list[TokenScore]


class ChatLogprobs(Answer):
    """One entry a token."""

    content: list[ChosenScore]
    refusal: None


class ChatMessage(Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    """One answer of the model."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason


class ChatCompletion(Answer):
    """An answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Answer):
    """What a chunk adds: the role first, then pieces of content."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Answer):
    """One choice's part of a chunk; the last one has its finish_reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason


class ChatChunk(Answer):
    """An event of a stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(Answer):
    """A name under which the model is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    """Every name under which the model is served."""

    object: Literal["list"]
    data: list[Model]


class GeneratedFinish(Answer):
    """Why a sequence ended: `matched` what stopped it, or `length` in tokens."""

    type: FinishReason
    length: int | None = None
    matched: StopReason = None


Triple = list[float | int | str | None]


class GeneratedMeta(Answer):
    """What else is known of an answer of /generate; log-probabilities as [logprob, token id, text or null]."""

    id: str
    finish_reason: GeneratedFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float
    output_token_logprobs: list[Triple] | None = None
    output_top_logprobs: list[list[Triple]] | None = None
    input_token_logprobs: list[Triple] | None = None
    input_top_logprobs: list[list[Triple] | None] | None = None


class Generated(Answer):
    """An answer of /generate, all of it so far; events of a list carry its `index`."""

    text: str
    output_ids: list[int]
    meta_info: GeneratedMeta
    index: int | None = None


class Tokenized(Answer):
    """A text's tokens; `token_strs` spells each, where that was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Answer):
    """The text of tokens."""

    prompt: str


class Health(Answer):
    """Whether the server lives; dead comes with 503."""

    status: Literal["ok", "dead"]


class Version(Answer):
    """The distribution's version."""

    version: str


class Ready(Answer):
    """Whether requests are answered, why not, and how far the warm-up has come."""

    ready: bool
    reasons: list[str]
    warm: dict[str, Any]


class Graphs(Answer):
    """The graph table: a row per graph that is wanted, captured or failed."""

    model: str
    warm: dict[str, Any]
    graphs: list[dict[str, Any]]


class Warming(Answer):
    """How many graphs will be captured."""

    pending: int


class Dropped(Answer):
    """How many graphs were dropped."""

    dropped: int


class Recapturing(Answer):
    """How many graphs were dropped, and how many will be captured."""

    dropped: int
    pending: int


class WeightsUpdated(Answer):
    """How many tensors were written, and the version that answers carry now."""

    updated: int
    weight_version: str


class Profiling(Answer):
    """A profile is being recorded."""

    profiling: Literal[True]


class Profiled(Answer):
    """The recorded profile's file, on the server's machine."""

    profiling: Literal[False]
    file: str = Field(description="a Chrome trace, for chrome://tracing or ui.perfetto.dev")

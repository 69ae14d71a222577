"""Response bodies of OpenAI's Responses API, for /openapi.json and for tests."""

from __future__ import annotations

from typing import Any, Literal

from server.schemas.answers import Answer, ChosenScore

ItemStatus = Literal["completed", "incomplete", "in_progress"]


class OutputText(Answer):
    """Text for the reader, and the logprobs of its tokens, if requested."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ChosenScore]


class ReasoningText(Answer):
    """Text of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(Answer):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]
    status: ItemStatus


class ReasoningItem(Answer):
    """The model's reasoning, as it is: there are no summaries."""

    id: str
    type: Literal["reasoning"]
    summary: list[dict[str, Any]]
    content: list[ReasoningText]
    status: ItemStatus


class FunctionCallItem(Answer):
    """A call of a function. `arguments` is JSON text."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class InputTokensDetails(Answer):
    """Prompt tokens found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokensDetails(Answer):
    """Tokens of the reasoning."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Answer):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Answer):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ResponseObject(Answer):
    """A response: its output items, and the settings of its request. `store`: whether it is stored."""

    id: str
    object: Literal["response"]
    created_at: float
    completed_at: float | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[MessageItem | ReasoningItem | FunctionCallItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: None


class ItemList(Answer):
    """A page of input items, as they were sent, with ids."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Answer):
    """A response that was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]

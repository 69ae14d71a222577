"""Response bodies of Anthropic's Messages API, for /openapi.json and for tests."""

from __future__ import annotations

from typing import Any, Literal

from server.schemas.answers import Answer


class TextBlock(Answer):
    """Text for the reader."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    """The model's reasoning. The signature is empty: nothing checks it when the block is sent back."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class ToolUseBlock(Answer):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    """Token counts. The prompt has the tokens of all three input counts.

    The two counts of cached tokens are absent where vLLM leaves them out, with `--compat vllm`.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int


class Message(Answer):
    """Response of /v1/messages, and with empty content the message of the event message_start."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Answer):
    """Response of /v1/messages/count_tokens."""

    input_tokens: int


class AnthropicErrorDetail(Answer):
    """The error."""

    type: str
    message: str


class AnthropicError(Answer):
    """The body of every response of 400 and above."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None

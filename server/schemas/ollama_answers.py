"""Response bodies of Ollama's API, for /openapi.json and for tests."""

from __future__ import annotations

from typing import Any, Literal

from server.schemas.answers import Answer


class OllamaError(Answer):
    """The body of every response of 400 and above, and the last line of a stream that failed."""

    error: str


class OllamaVersion(Answer):
    """Response of /api/version."""

    version: str


class OllamaFunction(Answer):
    """A called function. `index` counts the calls of the answer."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Answer):
    """A tool call."""

    id: str
    function: OllamaFunction


class OllamaAnswerMessage(Answer):
    """The message of the answer, or the next piece of it."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class OllamaLine(Answer):
    """Common fields of an answer, or of a line of its stream. The counts are in the last line. Durations are in ns."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    logprobs: list[dict[str, Any]] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChat(OllamaLine):
    """Response of /api/chat."""

    message: OllamaAnswerMessage


class OllamaGenerated(OllamaLine):
    """Response of /api/generate."""

    response: str
    thinking: str | None = None


class OllamaDetails(Answer):
    """Properties of a model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Answer):
    """A served model."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(Answer):
    """Response of /api/tags."""

    models: list[OllamaModel]


class OllamaLoadedModel(Answer):
    """A model in memory. It never expires."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaLoaded(Answer):
    """Response of /api/ps."""

    models: list[OllamaLoadedModel]


class OllamaShown(Answer):
    """Response of /api/show. `template` is the model's Jinja template."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str

"""Request bodies of Ollama's API, translated into chat requests."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from engine.errors import RequestError
from engine.protocol.structured_outputs import StructuredOutputs
from server.schemas.foreign_fields import OLLAMA_CHAT, OLLAMA_GENERATE, OPTIONS, refuse_foreign, refuse_unknown
from server.schemas.requests import FAIL_FAST, RANGES, ChatBody, Role, Text, Wire, is_objects
from server.schemas.tools import TOOL_CHOICE_SCHEMA, TOOLS_SCHEMA
from server.schemas.translation import chat_body, translated_errors

SENT_NAMES = {
    "repetition_penalty": "options.repeat_penalty", "max_tokens": "options.num_predict",
    "structured_outputs": "format", "enable_thinking": "think", "reasoning_effort": "think",
    **{
        name: f"options.{name}"
        for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "stop")
    },
}  # fmt: skip
"""Fields of a chat request -> the fields of this API that they are made of."""

OLLAMA_LAST_N = 64  # Ollama's default of repeat_last_n
MAX_TOP_LOGPROBS = 20
_EFFORTS = ("low", "medium", "high")
_MESSAGE_FIELDS = ("role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id")
_CALL = {
    "type": "object",
    "properties": {
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}},
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_CALLS = {"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]}
_IMAGES = {"anyOf": [{"type": "array", "items": {"type": "string"}, "maxItems": 0}, {"type": "null"}]}
_FORMAT = {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}, {"type": "null"}]}


def _range(name: str) -> Any:
    return Field(default=None, json_schema_extra=dict(RANGES[name]))


def _think(value: Any) -> Any:
    if isinstance(value, bool) or value in _EFFORTS:
        return value
    raise ValueError(f"must be true, false, {', '.join(_EFFORTS)}")


def _format(value: Any) -> Any:
    if value in ("", "json") or isinstance(value, dict):
        return value
    raise ValueError('must be "json" or a JSON schema as an object')


Think = Annotated[
    Any, BeforeValidator(_think), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": list(_EFFORTS)}]})
]
Format = Annotated[Any, BeforeValidator(_format), WithJsonSchema(_FORMAT)]


class OllamaOptions(Wire):
    """Sampling parameters. A number below 1 in num_predict stands for what the context holds."""

    place = OPTIONS

    temperature: float | None = _range("temperature")
    top_k: int | None = _range("top_k")
    top_p: float | None = _range("top_p")
    min_p: float | None = _range("min_p")
    repeat_penalty: float | None = _range("repetition_penalty")
    repeat_last_n: int | None = None
    presence_penalty: float | None = _range("presence_penalty")
    frequency_penalty: float | None = _range("frequency_penalty")
    seed: int | None = _range("seed")
    stop: Text | Annotated[list[Text], FAIL_FAST] | None = _range("stop")
    num_predict: int | None = None

    def refuse_unsupported(self) -> None:
        """Raise RequestError for an unknown option, and for one that would change the answer."""
        extra = self.model_extra or {}
        refuse_foreign(OPTIONS, extra, f"{OPTIONS}.")
        refuse_unknown(OPTIONS, extra, type(self).model_fields)
        if self.repeat_last_n not in (None, -1, 0, OLLAMA_LAST_N):
            raise RequestError(
                f"options.repeat_last_n={self.repeat_last_n} is not supported: penalties count all tokens; send -1, "
                "0 to turn them off, or remove it",
                param="options.repeat_last_n",
            )
        extra.clear()

    def fields(self, max_model_len: int) -> dict[str, Any]:
        """Return the fields of the chat request."""
        kept = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
        found = {name: value for name in kept if (value := getattr(self, name)) is not None}
        if self.repeat_penalty is not None:
            found["repetition_penalty"] = self.repeat_penalty
        if self.repeat_last_n == 0:
            found |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        if self.seed is not None and self.seed != -1:  # -1: random, the default
            found["seed"] = self.seed
        if self.stop:
            found["stop"] = self.stop
        if self.num_predict is not None:
            is_unlimited = self.num_predict in (0, -1, -2)
            found["max_tokens"] = max_model_len if is_unlimited else self.num_predict
        return found


class OllamaMessage(Wire):
    """One message of a conversation."""

    role: Role
    content: Text = ""
    thinking: Text | None = None
    images: Annotated[Any, WithJsonSchema(_IMAGES)] = None
    tool_calls: Annotated[Any, WithJsonSchema(_CALLS)] = None
    tool_name: Text | None = None
    tool_call_id: Text | None = None


class OllamaBody(Wire):
    """Fields of both inference routes."""

    model: Text
    format: Format = None
    options: OllamaOptions | None = None
    stream: bool = True
    think: Think = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, json_schema_extra={"minimum": 0, "maximum": MAX_TOP_LOGPROBS})

    def refuse_unsupported(self) -> None:
        """Raise RequestError for an unknown field, and for one that would change the answer."""
        super().refuse_unsupported()
        if self.options is not None:
            self.options.refuse_unsupported()
        top = self.top_logprobs
        if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
            raise RequestError(f"top_logprobs={top} must be from 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs")

    def chat(self, max_model_len: int) -> tuple[ChatBody, list[str]]:
        """Return the chat request, and the place in this body of each of its messages. Raises RequestError."""
        messages, places = self._messages()
        options = self.options if self.options is not None else OllamaOptions()
        fields = {"messages": messages, **options.fields(max_model_len), **self._shared_fields()}
        with translated_errors(SENT_NAMES, places):
            return chat_body(fields), places

    def _messages(self) -> tuple[list[dict[str, Any]], list[str]]:
        raise NotImplementedError

    def _shared_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.format == "json":
            fields["structured_outputs"] = StructuredOutputs(json_object=True, field="format")
        elif self.format:
            fields["structured_outputs"] = StructuredOutputs(json=self.format, field="format")
        if self.think is not None:
            fields["enable_thinking"] = self.think is not False
        if isinstance(self.think, str):
            fields["reasoning_effort"] = self.think
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return fields


class OllamaChatBody(OllamaBody):
    """Body of POST /api/chat. Without messages, the request only waits until the model is loaded.

    `tool_choice` is an extension, as in /v1/chat/completions.
    """

    place = OLLAMA_CHAT

    messages: Annotated[list[OllamaMessage], Field(max_length=10_000, fail_fast=True)] = []
    tools: Annotated[Any, WithJsonSchema(TOOLS_SCHEMA)] = None
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE_SCHEMA)] = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be generated."""
        return not self.messages

    def _messages(self) -> tuple[list[dict[str, Any]], list[str]]:
        calls = _CallIds()
        found = [_message(message, f"messages[{number}]", calls) for number, message in enumerate(self.messages)]
        return found, [f"messages[{number}]" for number in range(len(found))]

    def _shared_fields(self) -> dict[str, Any]:
        tools = {"tools": self.tools, "tool_choice": self.tool_choice}
        return super()._shared_fields() | {name: value for name, value in tools.items() if value is not None}


class OllamaGenerateBody(OllamaBody):
    """Body of POST /api/generate. Without a prompt, the request only waits until the model is loaded."""

    place = OLLAMA_GENERATE

    prompt: Text = ""
    system: Text = ""
    raw: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be generated."""
        return not self.prompt

    def refuse_unsupported(self) -> None:
        """Raise RequestError for fields that can't be served, or not together."""
        super().refuse_unsupported()
        for name in ("system", "think") if self.raw else ():
            if getattr(self, name):
                raise RequestError(f"{name} has no effect with raw=true: write it into the prompt", param=name)

    def _messages(self) -> tuple[list[dict[str, Any]], list[str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        places = [*(["system"] if system else []), "prompt"]
        return [*system, {"role": "user", "content": self.prompt}], places


class OllamaShowBody(Wire):
    """Body of POST /api/show. `name` is the earlier name of `model`."""

    model: Text | None = None
    name: Text | None = None
    verbose: bool = False

    @property
    def wanted(self) -> str:
        """The name of the model. Raises RequestError if there is none."""
        found = self.model or self.name
        if not found:
            raise RequestError("model is required", param="model")
        return found


class _CallIds:
    """Gives the calls of a conversation ids, which Ollama's messages may lack and chat templates may need.

    The ids have nine letters and digits, which all templates take.
    """

    def __init__(self) -> None:
        self._count = 0
        self._open: list[tuple[str, str]] = []  # id and name of the calls without a result

    def add(self, name: str, given: Any) -> str:
        """Return the id of a call."""
        self._count += 1
        found = given if isinstance(given, str) and given else f"call{self._count:05d}"
        self._open.append((found, name))
        return found

    def of_result(self, name: str | None) -> str | None:
        """Return the id of the first call without a result, of this function if it is named; None if there is none."""
        for index, (found, called) in enumerate(self._open):
            if name in (None, called):
                del self._open[index]
                return found
        return None

    def close(self, given: str) -> None:
        """Note that the call with this id has its result."""
        self._open = [one for one in self._open if one[0] != given]


def _message(message: OllamaMessage, place: str, calls: _CallIds) -> dict[str, Any]:
    """Return a message of the chat request."""
    for name, value in (message.model_extra or {}).items():
        if value is not None:
            raise RequestError(
                f"{place}.{name[:64]} is not a known field; known: {', '.join(_MESSAGE_FIELDS)}", param="messages"
            )
    if message.images:
        raise RequestError(f"{place}.images is not supported: the model takes text only; remove it", param="messages")
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking:
        found["reasoning"] = message.thinking
    if message.tool_calls:
        found["tool_calls"] = _tool_calls(message.tool_calls, f"{place}.tool_calls", calls)
    if message.role == "tool":
        if message.tool_call_id:
            calls.close(message.tool_call_id)
        call_id = message.tool_call_id or calls.of_result(message.tool_name)
        found |= {"tool_call_id": call_id, "name": message.tool_name}
    return {name: value for name, value in found.items() if value is not None}


def _tool_calls(given: Any, place: str, calls: _CallIds) -> list[dict[str, Any]]:
    if not is_objects(given):
        raise RequestError(f"{place} must be a list of tool calls", param="messages")
    found = []
    for number, call in enumerate(given):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{place}[{number}].function must be an object with a name", param="messages")
        kept = {"name": function["name"], "arguments": function.get("arguments")}
        found.append({"id": calls.add(function["name"], call.get("id")), "type": "function", "function": kept})
    return found

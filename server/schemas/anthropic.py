"""Request bodies of Anthropic's Messages API, translated into chat requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from engine.errors import RequestError
from engine.protocol.structured_outputs import StructuredOutputs
from server.schemas.foreign_fields import COUNT_TOKENS, MESSAGES
from server.schemas.requests import FAIL_FAST, RANGES, ChatBody, Text, Wire, is_objects
from server.schemas.tools import MAX_TOOLS
from server.schemas.translation import SamplingExtensions, chat_body, translated_errors

SENT_NAMES = {
    "stop": "stop_sequences", "thinking_token_budget": "thinking", "enable_thinking": "thinking",
    "reasoning_effort": "output_config", "continue_final_message": "messages", "parallel_tool_calls": "tool_choice",
    "function.parameters": "input_schema",
}  # fmt: skip
"""Fields of a chat request -> the fields of this API that they are made of."""

_BLOCKS = {"type": "array", "items": {"type": "object", "properties": {"type": {"type": "string"}}}}
_TEXT_OR_BLOCKS = {"anyOf": [{"type": "string"}, _BLOCKS]}
_OBJECT = {"anyOf": [{"type": "object"}, {"type": "null"}]}
_TOOL = {
    "type": "object",
    "properties": {
        "name": {"type": "string"}, "input_schema": {"type": "object"},
        "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "type": {"enum": ["custom", None]},
    },
    "required": ["name", "input_schema"],
}  # fmt: skip
_THREAD = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["create", "continue"]}, "previous_message_id": {"type": "string"}},
            "required": ["type"],
        },
        {"type": "null"},
    ]
}  # fmt: skip
# Keys of `thinking` beside type and budget_tokens -> the accepted values; None: any value, without effect.
_THINKING_KEYS: Mapping[str, tuple[Any, ...] | None] = {"display": ("summarized", "omitted"), "block_binding": None}
_TOOLS = {"anyOf": [{"type": "array", "maxItems": MAX_TOOLS, "items": _TOOL}, {"type": "null"}]}
_CHOICE = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["auto", "any", "tool", "none"]}, "name": {"type": "string"},
                "disable_parallel_tool_use": {"type": "boolean"},
            },
            "required": ["type"],
        },
        {"type": "null"},
    ]
}  # fmt: skip
# Keys of a tool -> the values without effect on the answer; None: any value.
_TOOL_KEYS: Mapping[str, tuple[Any, ...] | None] = {
    "cache_control": None, "eager_input_streaming": None, "defer_loading": (False,), "input_examples": ([],),
    "allowed_callers": ([], ["direct"]),
}  # fmt: skip


def _text_or_blocks(value: Any) -> Any:
    if isinstance(value, str) or is_objects(value):
        return value
    raise ValueError("must be a string or a list of content blocks")


Blocks = Annotated[Any, BeforeValidator(_text_or_blocks), WithJsonSchema(_TEXT_OR_BLOCKS)]


class AnthropicMessage(Wire):
    """One message: text, or a list of content blocks."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


AnthropicMessages = Annotated[
    list[AnthropicMessage], Field(max_length=10_000, fail_fast=True, json_schema_extra={"minItems": 1})
]


class CountTokensBody(Wire):
    """Body of POST /v1/messages/count_tokens: the fields of a message request that its prompt depends on."""

    place = COUNT_TOKENS

    model: Text
    messages: AnthropicMessages
    system: Blocks | None = None
    tools: Annotated[Any, WithJsonSchema(_TOOLS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = None
    thinking: Annotated[Any, WithJsonSchema(_OBJECT)] = None
    output_config: Annotated[Any, WithJsonSchema(_OBJECT)] = None
    output_format: Annotated[Any, WithJsonSchema(_OBJECT)] = None

    def chat(self, reasons: bool) -> tuple[ChatBody, list[str]]:
        """Return the chat request, and the place in this body of each of its messages. Raises RequestError.

        `reasons`: the model's reasoning has a known format, so that a budget can limit it.
        """
        self.refuse_unsupported()
        messages, places = self._chat_messages()
        fields = {
            "model": self.model, "messages": messages, **self._tool_fields(), **self._format_fields(),
            **self._reasoning_fields(reasons), **self._sampling_fields(),
        }  # fmt: skip
        if self.messages and self.messages[-1].role == "assistant" and messages[-1]["role"] == "assistant":
            fields["continue_final_message"] = not messages[-1].get("tool_calls")
        with translated_errors(SENT_NAMES, places):
            return chat_body(fields), places

    def _sampling_fields(self) -> dict[str, Any]:
        return {}

    def _chat_messages(self) -> tuple[list[dict[str, Any]], list[str]]:
        messages: list[dict[str, Any]] = []
        places: list[str] = []
        if self.system:
            messages.append({"role": "system", "content": _text_parts(self.system, "system")})
            places.append("system")
        for number, message in enumerate(self.messages):
            place = f"messages[{number}]"
            translate = _assistant_messages if message.role == "assistant" else _user_messages
            found = translate(message, f"{place}.content")
            messages += found
            places += [place] * len(found)
        return messages, places

    def _tool_fields(self) -> dict[str, Any]:
        if self.tools is not None and not is_objects(self.tools):
            raise RequestError("tools must be a list of tools", param="tools")
        tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(self.tools or [])]
        choice = self.tool_choice
        if choice is None:
            return {"tools": tools}
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind not in ("auto", "any", "tool", "none"):
            raise RequestError(
                f'tool_choice.type must be "auto", "any", "tool" or "none", found {str(kind)[:40]!r}',
                param="tool_choice",
            )
        single = choice.get("disable_parallel_tool_use")
        if not isinstance(single, bool | None):
            raise RequestError("tool_choice.disable_parallel_tool_use must be true or false", param="tool_choice")
        wanted: Any = {"auto": "auto", "any": "required", "none": "none"}.get(kind)
        if kind == "tool":
            if not isinstance(choice.get("name"), str):
                raise RequestError("tool_choice.name must be the name of a tool", param="tool_choice")
            wanted = {"type": "function", "function": {"name": choice["name"]}}
        return {"tools": tools, "tool_choice": wanted, "parallel_tool_calls": not single}

    def _reasoning_fields(self, reasons: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        kind = self.thinking.get("type") if isinstance(self.thinking, dict) else self.thinking
        if kind not in (None, "enabled", "disabled", "adaptive"):
            raise RequestError(
                f'thinking.type must be "enabled", "disabled" or "adaptive", found {str(kind)[:40]!r}', param="thinking"
            )
        if kind in ("enabled", "disabled"):
            fields["enable_thinking"] = kind == "enabled"
        for name, value in self.thinking.items() if isinstance(self.thinking, dict) else ():
            accepted = _THINKING_KEYS.get(name, ())
            if name not in ("type", "budget_tokens") and accepted is not None and value not in (None, *accepted):
                shown = str(value)[:40]
                raise RequestError(f"thinking.{name[:40]} {shown!r} is not supported; remove it", param="thinking")
        budget = self.thinking.get("budget_tokens") if isinstance(self.thinking, dict) else None
        if budget is not None and (type(budget) is not int or budget < 1):
            raise RequestError("thinking.budget_tokens must be a number of tokens, at least 1", param="thinking")
        if kind == "enabled" and reasons:
            fields["thinking_token_budget"] = budget
        fields["reasoning_effort"] = self._output_config("effort")
        return fields

    def _format_fields(self) -> dict[str, Any]:
        for name, value in (
            ("output_config.format", self._output_config("format")),
            ("output_format", self.output_format),
        ):
            if value is None:
                continue
            schema = value.get("schema") if isinstance(value, dict) and value.get("type") == "json_schema" else None
            if not isinstance(schema, dict):
                raise RequestError(
                    f'{name} must be {{"type": "json_schema", "schema": {{…}}}}', param=name.partition(".")[0]
                )
            return {"structured_outputs": StructuredOutputs(json=schema, field=f"{name}.schema").closed()}
        return {}

    def _output_config(self, name: str) -> Any:
        if not isinstance(self.output_config, dict | None):
            raise RequestError("output_config must be an object", param="output_config")
        for key in self.output_config or {}:
            if key not in ("effort", "format"):
                raise RequestError(f"output_config.{key[:40]} is not supported; remove it", param="output_config")
        return (self.output_config or {}).get(name)


class MessagesBody(CountTokensBody, SamplingExtensions):
    """Body of POST /v1/messages."""

    place = MESSAGES

    max_tokens: int = Field(json_schema_extra={"minimum": 1, "maximum": RANGES["max_tokens"]["maximum"]})
    stop_sequences: Annotated[list[Text], FAIL_FAST] | None = Field(default=None, json_schema_extra=RANGES["stop"])
    temperature: float | None = Field(default=None, json_schema_extra=RANGES["temperature"])
    top_p: float | None = Field(default=None, json_schema_extra=RANGES["top_p"])
    stream: bool | None = None
    thread: Annotated[Any, WithJsonSchema(_THREAD)] = None

    @property
    def continues_thread(self) -> bool:
        """Whether the server should know the messages before these. Raises RequestError for an unknown thread type."""
        kind = self.thread.get("type") if isinstance(self.thread, dict) else self.thread
        if kind not in (None, "create", "continue"):
            raise RequestError(f'thread.type must be "create" or "continue", found {str(kind)[:40]!r}', param="thread")
        return kind == "continue"

    @property
    def omits_thinking(self) -> bool:
        """Whether thinking blocks stay empty."""
        return isinstance(self.thinking, dict) and self.thinking.get("display") == "omitted"

    def _sampling_fields(self) -> dict[str, Any]:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens={self.max_tokens} must be at least 1", param="max_tokens")
        return {
            "max_tokens": self.max_tokens, "stop": self.stop_sequences or None, "temperature": self.temperature,
            "top_p": self.top_p, "stream": self.stream, **self.extensions(),
        }  # fmt: skip


def _text_parts(content: Any, place: str) -> Any:
    """Return text, or blocks of text only, as the content of a chat message."""
    if isinstance(content, str):
        return content
    for number, block in enumerate(content):
        if block.get("type") != "text":
            raise _unsupported(block, f"{place}[{number}]")
    return [_part(block, f"{place}[{number}]") for number, block in enumerate(content)]


def _part(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a text or image block as a part of a chat message."""
    kind = block.get("type")
    if kind == "text":
        if not isinstance(block.get("text"), str):
            raise RequestError(f"{place}.text must be a string", param=_param(place))
        return {"type": "text", "text": block["text"]}
    if kind != "image":
        raise _unsupported(block, place)
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif source.get("type") == "url":
        url = str(source.get("url"))
    else:
        raise RequestError(f'{place}.source.type must be "base64" or "url"', param=_param(place))
    return {"type": "image_url", "image_url": {"url": url}}


def _user_messages(message: AnthropicMessage, place: str) -> list[dict[str, Any]]:
    """Return the chat messages of a user's or system's message: results of calls are separate messages."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    found: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        inner = f"{place}[{number}]"
        if block.get("type") == "tool_result":
            found.append(_tool_result(block, inner))
            continue
        part = _part(block, inner)
        if found and found[-1]["role"] == message.role:
            found[-1]["content"].append(part)
        else:
            found.append({"role": message.role, "content": [part]})
    return found or [{"role": message.role, "content": ""}]


def _tool_result(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(block.get("tool_use_id"), str):
        raise RequestError(f"{place}.tool_use_id must be the id of a tool_use block", param="messages")
    content = block.get("content")
    if content is None or isinstance(content, str):
        parts: Any = content or ""
    elif is_objects(content):
        parts = [_part(one, f"{place}.content[{number}]") for number, one in enumerate(content)]
    else:
        raise RequestError(f"{place}.content must be a string or a list of content blocks", param="messages")
    if block.get("is_error"):
        parts = f"Error: {parts}" if isinstance(parts, str) else [{"type": "text", "text": "Error:"}, *parts]
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": parts}


def _assistant_messages(message: AnthropicMessage, place: str) -> list[dict[str, Any]]:
    """Return the chat message of an assistant's message: reasoning, text and calls."""
    if isinstance(message.content, str):
        return [{"role": "assistant", "content": message.content}]
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        inner, kind = f"{place}[{number}]", block.get("type")
        if kind == "tool_use":
            calls.append(_tool_call(block, inner))
        elif kind == "thinking":
            if not isinstance(block.get("thinking"), str):
                raise RequestError(f"{inner}.thinking must be a string", param="messages")
            thoughts.append(block["thinking"])
        elif kind == "text":
            texts.append(_part(block, inner))
        else:
            raise _unsupported(block, inner)
    found: dict[str, Any] = {"role": "assistant", "content": texts}
    if thoughts:
        found["reasoning"] = "\n".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    return [found]


def _tool_call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    for name, kind, shown in (("id", str, "a string"), ("name", str, "a string"), ("input", dict, "an object")):
        if not isinstance(block.get(name), kind):
            raise RequestError(f"{place}.{name} must be {shown}", param="messages")
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": block["id"], "type": "function", "function": function}


def _tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a tool in OpenAI's format. Raises RequestError for one that Anthropic's servers would run."""
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            f"{place}.type {str(tool['type'])[:40]!r} is not supported: only tools with an input_schema are",
            param="tools",
        )
    for key, neutral in _TOOL_KEYS.items():
        value = tool.get(key)
        if neutral is not None and value is not None and value not in neutral:
            raise RequestError(f"{place}.{key} is not supported; remove it", param="tools")
    if not isinstance(tool.get("input_schema"), dict):
        raise RequestError(f"{place}.input_schema must be a JSON schema as an object", param="tools")
    kept = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**kept, "parameters": tool["input_schema"]}}


def _unsupported(block: Mapping[str, Any], place: str) -> RequestError:
    kind = str(block.get("type"))[:40]
    return RequestError(f"{place} has a block of type {kind!r}, which is not supported here", param=_param(place))


def _param(place: str) -> str:
    return place.partition("[")[0]

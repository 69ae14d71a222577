"""Request bodies of OpenAI's Responses API, translated into chat requests."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from engine.errors import RequestError
from engine.protocol.structured_outputs import StructuredOutputs
from server.schemas.foreign_fields import RESPONSES
from server.schemas.requests import RANGES, ChatBody, Text, call_arguments, is_objects
from server.schemas.tools import MAX_TOOLS
from server.schemas.translation import SamplingExtensions, chat_body, translated_errors

SENT_NAMES = {
    "messages": "input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning",
    "enable_thinking": "reasoning", "verbosity": "text", "logprobs": "top_logprobs",
    "tool_choice.allowed_tools": "tool_choice",
}  # fmt: skip
"""Fields of a chat request -> the fields of this API that they are made of."""

LOGPROBS = "message.output_text.logprobs"
# Values of `include`; the others are about tools that OpenAI's servers run, or about encrypted reasoning: the reasoning
# is in the answer as it is.
INCLUDABLE = (
    LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip
MAX_ITEMS = 20_000

_OBJECTS = {"type": "array", "items": {"type": "object"}}
_INPUT = {"anyOf": [{"type": "string"}, {**_OBJECTS, "maxItems": MAX_ITEMS}, {"type": "null"}]}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"}, "name": {"type": "string"},
        "parameters": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["type", "name"],
}  # fmt: skip
_TOOLS = {"anyOf": [{"type": "array", "maxItems": MAX_TOOLS, "items": _TOOL}, {"type": "null"}]}
_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["function", "allowed_tools"]}, "name": {"type": "string"},
                "mode": {"enum": ["auto", "required"]}, "tools": _OBJECTS,
            },
            "required": ["type"],
        },
        {"type": "null"},
    ]
}  # fmt: skip
_TEXT_FIELD = {
    "type": "object",
    "properties": {
        "format": {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]}, "name": {"type": "string"},
                "schema": {"type": "object"},
            },
        },
        "verbosity": {"enum": ["low", "medium", "high", None]},
    },
}  # fmt: skip
_REASONING = {"type": "object", "properties": {"effort": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}
# Keys of a tool -> the values without effect on the answer; None: any value.
_TOOL_KEYS: Mapping[str, tuple[Any, ...] | None] = {
    "defer_loading": (False,), "allowed_callers": ([], ["direct"]), "output_schema": None,
}  # fmt: skip
# Keys of `reasoning` beside effort, likewise. The reasoning is returned as it is, never as a summary.
_REASONING_KEYS: Mapping[str, tuple[Any, ...] | None] = {
    "effort": None, "summary": None, "generate_summary": None, "context": ("auto",), "mode": ("standard",),
}  # fmt: skip


def _input(value: Any) -> Any:
    if value is None or isinstance(value, str) or (is_objects(value) and len(value) <= MAX_ITEMS):
        return value
    raise ValueError(f"must be a string or a list of at most {MAX_ITEMS} items")


def _nullable(schema: Mapping[str, Any]) -> Any:
    return WithJsonSchema({"anyOf": [dict(schema), {"type": "null"}]})


class ResponsesBody(SamplingExtensions):
    """Body of POST /v1/responses."""

    place = RESPONSES

    model: Text | None = None
    input: Annotated[Any, BeforeValidator(_input), WithJsonSchema(_INPUT)] = None
    instructions: Text | None = None
    previous_response_id: Text | None = None
    store: bool | None = None
    background: bool | None = None
    tools: Annotated[Any, WithJsonSchema(_TOOLS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    text: Annotated[Any, _nullable(_TEXT_FIELD)] = None
    reasoning: Annotated[Any, _nullable(_REASONING)] = None
    include: Annotated[list[str], Field(max_length=32)] | None = None
    max_output_tokens: int | None = Field(default=None, json_schema_extra=RANGES["max_tokens"])
    temperature: float | None = Field(default=None, json_schema_extra=RANGES["temperature"])
    top_p: float | None = Field(default=None, json_schema_extra=RANGES["top_p"])
    top_logprobs: int | None = Field(default=None, json_schema_extra=RANGES["logprobs"])
    metadata: Annotated[dict[str, str], Field(max_length=64)] | None = None
    stream: bool | None = None
    stream_options: Annotated[Any, _nullable({"type": "object"})] = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has the logprobs of its text."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def items(self) -> list[dict[str, Any]]:
        """Return the input as items with an id and a type each. Raises RequestError for an empty input."""
        if self.input is None or self.input in ("", []):
            raise RequestError("input is empty: provide a string or at least one item", param="input")
        if isinstance(self.input, str):
            return [_with_id({"type": "message", "role": "user", "content": self.input})]
        return [_with_id(item) for item in self.input]

    def chat(self, previous: list[dict[str, Any]], items: list[dict[str, Any]]) -> tuple[ChatBody, list[str]]:
        """Return the chat request that continues `previous` items with `items`, and the place of each of its messages.

        Raises RequestError.
        """
        self._check_small_fields()
        messages = _Messages()
        if self.instructions is not None:
            messages.add_instructions(self.instructions)
        messages.add_items(previous, lambda number: "previous_response_id")
        messages.add_items(items, lambda number: "input" if isinstance(self.input, str) else f"input[{number}]")
        fields = {
            "model": self.model, "messages": messages.found, "tools": [*self._tools()],
            "tool_choice": self._tool_choice(), "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self._effort(), "max_tokens": self.max_output_tokens, "temperature": self.temperature,
            "top_p": self.top_p, "stream": self.stream, **self.extensions(), **self._text_fields(),
        }  # fmt: skip
        if self.wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        with translated_errors(SENT_NAMES, messages.places):
            return chat_body(fields), messages.places

    def _check_small_fields(self) -> None:
        for name in self.include or ():
            if name not in INCLUDABLE:
                raise RequestError(f"include: {name[:80]!r} is not supported; remove it", param="include")
        if self.stream_options is not None and not isinstance(self.stream_options, dict):
            raise RequestError("stream_options must be an object", param="stream_options")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise RequestError(
                f"max_output_tokens={self.max_output_tokens} must be at least 1", param="max_output_tokens"
            )

    def _tools(self) -> Iterable[dict[str, Any]]:
        if self.tools is not None and not is_objects(self.tools):
            raise RequestError("tools must be a list of tools", param="tools")
        for number, tool in enumerate(self.tools or []):
            place, kind = f"tools[{number}]", tool.get("type")
            if kind != "function":
                raise RequestError(
                    f'{place}.type must be "function", found {str(kind)[:40]!r}; other tools are not supported',
                    param="tools",
                )
            _check_keys(tool, _TOOL_KEYS, place, "tools")
            kept = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
            yield {"type": "function", "function": kept}

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") == "function":
            if not isinstance(choice.get("name"), str):
                raise RequestError("tool_choice.name must be the name of a function", param="tool_choice")
            return {"type": "function", "function": {"name": choice.get("name")}}
        if choice.get("type") != "allowed_tools":
            return choice  # refused by name
        tools = choice.get("tools")
        if not is_objects(tools):
            raise RequestError("tool_choice.tools must be a list of tools", param="tool_choice")
        allowed = [{"type": "function", "function": {"name": tool.get("name")}} for tool in tools or ()]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": allowed}}

    def _effort(self) -> Any:
        if self.reasoning is None:
            return None
        if not isinstance(self.reasoning, dict):
            raise RequestError("reasoning must be an object", param="reasoning")
        for name in self.reasoning:
            if name not in _REASONING_KEYS:
                raise RequestError(f"reasoning.{name[:40]} is not supported; remove it", param="reasoning")
        _check_keys(self.reasoning, _REASONING_KEYS, "reasoning", "reasoning")
        return self.reasoning.get("effort")

    def _text_fields(self) -> dict[str, Any]:
        if self.text is None:
            return {}
        if not isinstance(self.text, dict):
            raise RequestError("text must be an object", param="text")
        for name in self.text:
            if name not in ("format", "verbosity"):
                raise RequestError(f"text.{name[:40]} is not supported; remove it", param="text")
        return {"verbosity": self.text.get("verbosity"), **self._format(self.text.get("format"))}

    def _format(self, found: Any) -> dict[str, Any]:
        found = found or {"type": "text"}
        kind = found.get("type") if isinstance(found, dict) else found
        if kind == "text":
            return {}
        if self.structured_outputs is not None:
            raise RequestError(
                "text.format and structured_outputs both constrain the output: remove one", param="structured_outputs"
            )
        if kind == "json_object":
            return {"structured_outputs": StructuredOutputs(json_object=True, field="text.format")}
        if kind != "json_schema":
            raise RequestError(
                f'text.format.type must be "text", "json_object" or "json_schema", found {str(kind)[:40]!r}',
                param="text",
            )
        if not isinstance(found.get("schema"), dict):
            raise RequestError("text.format.schema must be a JSON schema as an object", param="text")
        outputs = StructuredOutputs(json=found["schema"], field="text.format.schema")
        return {"structured_outputs": outputs.closed() if found.get("strict") else outputs}


class _Messages:
    """Chat messages made of items: what an assistant says and calls between two other items is one message."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.places: list[str] = []
        self._is_first = True  # no item yet

    def add_instructions(self, text: str) -> None:
        """Add the system message."""
        self._add({"role": "system", "content": [{"type": "text", "text": text}]}, "instructions")

    def add_items(self, items: Iterable[Mapping[str, Any]], place_of: Any) -> None:
        """Add items; `place_of` returns the place of an item in the request. Raises RequestError."""
        for number, item in enumerate(items):
            place = place_of(number)
            kind = item.get("type") or ("message" if "role" in item else None)
            if kind == "message":
                self._add_message(item, place)
            elif kind == "reasoning":
                self._add_reasoning(item, place)
            elif kind == "function_call":
                call = {name: _text(item, name, place) for name in ("call_id", "name", "arguments")}
                call_arguments(call["arguments"], f"{place}.arguments", _param(place))
                function = {"name": call["name"], "arguments": call["arguments"]}
                turn = self._turn(place)
                turn.setdefault("tool_calls", []).append(
                    {"id": call["call_id"], "type": "function", "function": function}
                )
            elif kind == "function_call_output":
                content = _parts(item.get("output"), f"{place}.output")
                self._add({"role": "tool", "tool_call_id": _text(item, "call_id", place), "content": content}, place)
            else:
                raise RequestError(f"{place}.type {str(kind)[:40]!r} is not supported", param=_param(place))
            self._is_first = False

    def _add_message(self, item: Mapping[str, Any], place: str) -> None:
        role, content = item.get("role"), _parts(item.get("content"), f"{place}.content")
        if role not in ("user", "assistant", "system", "developer"):
            raise RequestError(
                f'{place}.role must be "user", "assistant", "system" or "developer", found {str(role)[:40]!r}',
                param=_param(place),
            )
        if role == "assistant":
            last = self.found[-1] if self.found else {}
            if last.get("role") == "assistant" and last["content"] and not last.get("tool_calls"):
                self._add({"role": "assistant", "content": content}, place)  # two messages, not one
            else:
                self._turn(place)["content"] += content
        elif role in ("system", "developer") and self._is_first and self.found:
            self.found[-1]["content"] += content  # one system message: some templates refuse a second one
        else:
            self._add({"role": role, "content": content}, place)

    def _add_reasoning(self, item: Mapping[str, Any], place: str) -> None:
        texts = [
            _text(part, "text", f"{place}.{name}[{number}]")
            for name in ("content", "summary")
            for number, part in enumerate(_objects(item.get(name), f"{place}.{name}"))
        ]
        if not texts and item.get("encrypted_content"):
            raise RequestError(
                f"{place}.encrypted_content can't be read: send the content of the item", param=_param(place)
            )
        if texts:
            last = self.found[-1] if self.found else {}
            if last.get("role") == "assistant" and (last["content"] or last.get("tool_calls")):
                self._add({"role": "assistant", "content": []}, place)
            turn = self._turn(place)
            turn["reasoning"] = "\n".join([*([turn["reasoning"]] if "reasoning" in turn else []), *texts])

    def _turn(self, place: str) -> dict[str, Any]:
        """Return the assistant's message that is being put together."""
        if not self.found or self.found[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": []}, place)
        return self.found[-1]

    def _add(self, message: dict[str, Any], place: str) -> None:
        self.found.append(message)
        self.places.append(place)


def _with_id(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item with a type, an id, and a list as the content of a message, as /input_items returns it."""
    found = dict(item)
    kind = found.setdefault("type", "message" if "role" in found else None)
    if kind == "message" and isinstance(found.get("content"), str):
        part = "output_text" if found.get("role") == "assistant" else "input_text"
        extra: dict[str, Any] = {"annotations": []} if part == "output_text" else {}
        found["content"] = [{"type": part, "text": found["content"], **extra}]
    if not isinstance(found.get("id"), str):
        prefix = {"message": "msg", "function_call": "fc", "reasoning": "rs"}.get(str(kind), "item")
        found["id"] = f"{prefix}_{secrets.token_hex(24)}"
    return found


def _parts(content: Any, place: str) -> list[dict[str, Any]]:
    """Return the content of an item as parts of a chat message."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    found: list[dict[str, Any]] = []
    for number, part in enumerate(_objects(content, place)):
        inner, kind = f"{place}[{number}]", part.get("type")
        if kind in ("input_text", "output_text", "text"):
            found.append({"type": "text", "text": _text(part, "text", inner)})
        elif kind == "refusal":
            found.append({"type": "refusal", "refusal": _text(part, "refusal", inner)})
        elif kind == "input_image" and part.get("image_url") is not None:
            image: dict[str, str] = {"url": _text(part, "image_url", inner)}
            if part.get("detail") is not None:
                image["detail"] = _text(part, "detail", inner)
            found.append({"type": "image_url", "image_url": image})
        else:
            raise RequestError(f"{inner} has the type {str(kind)[:40]!r}, which is not supported", param=_param(place))
    return found


def _objects(value: Any, place: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not is_objects(value):
        raise RequestError(f"{place} must be a list of objects", param=_param(place))
    return value


def _text(value: Mapping[str, Any], name: str, place: str) -> str:
    found = value.get(name)
    if not isinstance(found, str):
        raise RequestError(f"{place}.{name} must be a string", param=_param(place))
    return found


def _check_keys(value: Mapping[str, Any], keys: Mapping[str, tuple[Any, ...] | None], place: str, param: str) -> None:
    for name, neutral in keys.items():
        found = value.get(name)
        if neutral is not None and found is not None and found not in neutral:
            raise RequestError(f"{place}.{name} is not supported; remove it", param=param)


def _param(place: str) -> str:
    return "previous_response_id" if place.startswith("previous_response_id") else "input"

"""Request bodies of the OpenAI, tokenize and weights routes, and their mapping to SamplingParams.

Types are strict: a string is never a number. SamplingParams checks the ranges; the schemas only document them. Unknown
fields of the OpenAI routes are ignored, since clients send many. Fields of other APIs that would change the output are
refused (foreign_fields.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from engine.errors import RequestError
from engine.protocol.request import SamplingParams
from engine.protocol.sampling_params import (
    INT64_MAX,
    INT64_MIN,
    MAX_BIASED_TOKENS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS,
)
from server.schemas.foreign_fields import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    STREAM_OPTIONS,
    TOKENIZE,
    json_schemas,
    refuse_foreign,
)

_TEXT = {"type": "string"}
_NULL = {"type": "null"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_LISTS_OF_IDS = {"type": "array", "items": _IDS, "minItems": 1}
_TEXTS_OR_IDS = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}, _IDS, _LISTS_OF_IDS]}
_IDS_OR_LISTS = {"anyOf": [_IDS, _LISTS_OF_IDS, _NULL]}
_TEXTS = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _NULL]}
_PARTS = {"type": "array", "items": {"type": "object", "additionalProperties": True}}
_TEXT_OR_PARTS = {"anyOf": [_TEXT, _PARTS, _NULL]}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _is_lists_of_ids(value: Any) -> bool:
    if not isinstance(value, list) or not set(map(type, value)) <= {list}:
        return False
    return set(map(type, chain.from_iterable(value))) <= {int}  # a Python loop takes seconds for a million ids


def is_objects(value: Any) -> bool:
    """Return whether the value is a list of JSON objects. Unlike pydantic, this does not copy it."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _encodable(value: Any) -> Any:
    """Refuse lone surrogates, which JSON can express and UTF-8 can't encode: no tokenizer accepts them."""
    for text in [value] if isinstance(value, str) else value if _is_texts(value) else ():
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise ValueError("the text contains a lone surrogate, which is not valid Unicode") from exc
    return value


# Scan a list of a million ids once and report one error: a pydantic union collects an error per item and type.
def _prompt(value: Any) -> Any:
    if isinstance(value, str) or _is_ids(value) or _is_texts(value):
        return _encodable(value)
    if _is_lists_of_ids(value):
        return value
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


def _input_ids(value: Any) -> Any:
    if value is None or _is_ids(value) or _is_lists_of_ids(value):
        return value
    raise ValueError("must be a list of token ids or a list of lists of token ids")


def _texts(value: Any) -> Any:
    if value is None or isinstance(value, str) or _is_texts(value):
        return _encodable(value)
    raise ValueError("must be a string or a list of strings")


def _check_bias_count(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"must be an object with at most {MAX_BIASED_TOKENS} token ids")
    return value


def _content(value: Any) -> Any:
    if value is None or isinstance(value, str) or is_objects(value):
        return _encodable(value)
    raise ValueError("Input should be a valid string")


def _tokens(value: Any) -> Any:
    if _is_ids(value):
        return value
    raise ValueError("must be a list of token ids")


Prompt = Annotated[Any, BeforeValidator(_prompt), WithJsonSchema(_TEXTS_OR_IDS)]
InputIds = Annotated[Any, BeforeValidator(_input_ids), WithJsonSchema(_IDS_OR_LISTS)]
Texts = Annotated[Any, BeforeValidator(_texts), WithJsonSchema(_TEXTS)]
Content = Annotated[Any, BeforeValidator(_content), WithJsonSchema(_TEXT_OR_PARTS)]
Text = Annotated[str, AfterValidator(_encodable)]
# An 8 MB body has millions of items. Only the first error is reported; building one per item would take 5 GB.
FAIL_FAST = Field(fail_fast=True)
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]


# Ranges for /openapi.json. SamplingParams checks them.
RANGES: Mapping[str, dict[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": MAX_TOKENS},
    "min_p": {"minimum": 0, "maximum": 1},
    "repetition_penalty": {"minimum": 0.01, "maximum": 100},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "logit_bias": {
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,18})$"}, "maxProperties": MAX_BIASED_TOKENS,
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "stop": {"minLength": 1, "maxLength": MAX_STOP_CHARS, "maxItems": MAX_STOP_STRINGS},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKEN_IDS},
    "max_tokens": {"minimum": 0, "maximum": MAX_TOKENS},
    "min_tokens": {"minimum": 0, "maximum": MAX_TOKENS},
    "n": {"minimum": 1, "maximum": MAX_N},
    "seed": {"minimum": INT64_MIN, "maximum": INT64_MAX},
    "logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
}  # fmt: skip


def _optional(name: str) -> Any:
    """Return an optional field, None by default, with the range of `name` in its schema."""
    return Field(default=None, json_schema_extra=dict(RANGES[name]))


def _add_foreign_fields(schema: dict[str, Any], model: type[Any]) -> None:
    if model.place is not None:
        schema.setdefault("properties", {}).update(json_schemas(model.place))


class Wire(BaseModel):
    """Base of request bodies: strict types, no NaN or infinity, and errors that don't repeat the input.

    `place`: where the body's fields of other APIs are listed in foreign_fields.py.
    """

    model_config = ConfigDict(
        strict=True,
        extra="allow",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        protected_namespaces=(),
        json_schema_extra=_add_foreign_fields,
    )

    place: ClassVar[str | None] = None

    def refuse_unsupported(self) -> None:
        """Raise RequestError if a field of another API has a value that would change the output."""
        if self.place is not None:
            refuse_foreign(self.place, self.model_extra or {})


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Make a RequestError raised inside name fields as the client sent them: `names` maps ours to the client's."""
    try:
        yield
    except RequestError as error:
        if not names:
            raise
        ours = "|".join(map(re.escape, names))
        message = re.sub(rf"(?<![\w'\"])(?:{ours})(?![\w'\"])", lambda found: names[found[0]], str(error))
        raise type(error)(message, param=names.get(error.param or "", error.param)) from error


class StreamOptions(Wire):
    """Options of a stream: usage in a final chunk, and with `continuous_usage_stats` in every chunk."""

    place = STREAM_OPTIONS

    include_usage: bool = False
    continuous_usage_stats: bool = False


class OpenAISampling(Wire):
    """Sampling fields shared by both OpenAI routes, including vLLM's extensions."""

    model: Text | None = None
    temperature: float | None = _optional("temperature")
    top_p: float | None = _optional("top_p")
    top_k: int | None = _optional("top_k")
    min_p: float | None = _optional("min_p")
    repetition_penalty: float | None = _optional("repetition_penalty")
    frequency_penalty: float | None = _optional("frequency_penalty")
    presence_penalty: float | None = _optional("presence_penalty")
    logit_bias: Annotated[dict[str, float], BeforeValidator(_check_bias_count)] | None = _optional("logit_bias")
    stop: Text | Annotated[list[Text], FAIL_FAST] | None = _optional("stop")
    stop_token_ids: Annotated[list[int], FAIL_FAST] | None = _optional("stop_token_ids")
    max_tokens: int | None = _optional("max_tokens")
    min_tokens: int | None = _optional("min_tokens")
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = _optional("n")
    seed: int | None = _optional("seed")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority = 0

    def sent_names(self) -> dict[str, str]:
        """Map names of sampling parameters to the names under which this body has them, where they differ."""
        return {}

    def _params(self, **overrides: Any) -> SamplingParams:
        names = SHARED_SAMPLING_FIELDS
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        with naming(self.sent_names()):
            return SamplingParams.from_dict(given | overrides)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of a stream carries the usage so far."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    def refuse_unsupported(self) -> None:
        """Raise RequestError for unsupported fields and for stream_options without stream=true."""
        super().refuse_unsupported()
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options requires stream=true", param="stream_options")


SHARED_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "logit_bias", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "n", "seed",
)  # fmt: skip


class CompletionBody(OpenAISampling):
    """Body of POST /v1/completions."""

    place = COMPLETIONS

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = _optional("logprobs")
    best_of: int | None = Field(default=None, description="must equal n")
    add_special_tokens: bool = True

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters. max_tokens defaults to 16, as in OpenAI's API."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of other than n is not supported; remove it", param="best_of")
        overrides: dict[str, Any] = {"logprobs": self.logprobs}
        if self.max_tokens is not None:
            overrides["max_tokens"] = self.max_tokens
        if self.echo and self.logprobs is not None:
            overrides["prompt_logprobs"] = self.logprobs
        return self._params(**overrides)


class Message(Wire):
    """One message of a conversation. `content` is text, or a list of text parts, which are joined by newlines."""

    role: Text
    content: Content = None

    def plain(self, index: int) -> dict[str, Any]:
        """Return the message for a chat template, with its content as one string."""
        fields = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        return {**fields, "role": self.role, "content": self._text(index)}

    def _text(self, index: int) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts = []
        for part in self.content:
            part_type, text = part.get("type"), part.get("text")
            if part_type != "text" or not isinstance(text, str):
                raise RequestError(
                    f"messages[{index}].content has a part of type {str(part_type)[:40]!r}; only text is supported",
                    param="messages",
                )
            texts.append(text)
        return "\n".join(texts)


Messages = Annotated[list[Message], Field(max_length=10_000, fail_fast=True, json_schema_extra={"minItems": 1})]


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """Return messages for a chat template. Raises RequestError for an empty list and for parts that aren't text."""
    if not messages:
        raise RequestError("messages is empty: provide at least one message", param="messages")
    return [message.plain(index) for index, message in enumerate(messages)]


class ChatBody(OpenAISampling):
    """Body of POST /v1/chat/completions."""

    place = CHAT

    messages: Messages
    max_completion_tokens: int | None = _optional("max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = _optional("logprobs")
    add_generation_prompt: bool = True

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters. Without a maximum, the output is limited by the context length."""
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs requires logprobs=true", param="top_logprobs")
        return self._params(max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    def sent_names(self) -> dict[str, str]:
        names = {"logprobs": "top_logprobs"}
        return names if self.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for a chat template."""
        return conversation(self.messages)


class TokenizeBody(Wire):
    """Body of POST /tokenize: a prompt, or a conversation."""

    place = TOKENIZE

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    def refuse_unsupported(self) -> None:
        """Raise RequestError for fields that a chat request refuses, which would change the ids."""
        super().refuse_unsupported()
        if self.messages is not None and self.add_special_tokens and "add_special_tokens" in self.model_fields_set:
            raise RequestError(
                "add_special_tokens is not supported with messages: the chat template writes the special tokens; "
                "remove it",
                param="add_special_tokens",
            )

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for a chat template."""
        return conversation(self.messages or [])


class DetokenizeBody(Wire):
    """Body of POST /detokenize."""

    place = DETOKENIZE

    model: Text | None = None
    tokens: Annotated[Any, BeforeValidator(_tokens), WithJsonSchema({**_IDS, "minItems": 0})]


class WeightsBody(Wire):
    """Body of POST /weights/update: a safetensors file or folder on the server's host, and the new weight version."""

    path: Annotated[Text, Field(min_length=1, max_length=4096)]
    version: Annotated[Text, Field(min_length=1, max_length=256)]

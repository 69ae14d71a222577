"""Request bodies of the OpenAI, tokenize and weights routes, and their mapping to SamplingParams.

Types are strict: a string is never a number. SamplingParams checks the ranges; the schemas only document them. Unknown
fields of the OpenAI routes are ignored, since clients send many. Fields of other APIs that would change the output are
refused (foreign_fields.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from engine.errors import RequestError
from engine.protocol.kv_blocks import MAX_HASHES
from engine.protocol.request import SamplingParams
from engine.protocol.sampling_params import (
    INT64_MAX,
    INT64_MIN,
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_N,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENS,
)
from engine.text.conversation import RESERVED, Conversation
from engine.text.parsing.tool_use import ToolUse
from server.schemas.constraints import FIELD_SCHEMAS, constraint
from server.schemas.descriptions import describe_fields
from server.schemas.foreign_fields import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    STREAM_OPTIONS,
    TOKENIZE,
    json_schemas,
    refuse_foreign,
    refuse_unknown,
)
from server.schemas.tools import TOOL_CHOICE_SCHEMA, TOOLS_SCHEMA, checked_tools, tool_use
from server.schemas.truncation import Truncation

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
BlockHash = Annotated[int, Field(ge=0, lt=2**64)]
Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS // 2 - 8), AfterValidator(_encodable)] | None
Role = Annotated[str, Field(max_length=64), AfterValidator(_encodable)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
NO_DEFAULTS: Mapping[str, Any] = {}
MAX_ID_CHARS = 128  # of a request id, which is repeated in each event of a stream


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
    "logprobs": {"minimum": -1, "maximum": MAX_TOKENS},
    "logprob_token_ids": {"maxItems": MAX_LOGPROB_TOKEN_IDS},
    "allowed_token_ids": {"minItems": 1, "maxItems": MAX_ALLOWED_TOKENS},
    "bad_words": {"maxItems": MAX_BAD_WORDS},
}  # fmt: skip


def _optional(name: str) -> Any:
    """Return an optional field, None by default, with the range of `name` in its schema."""
    return Field(default=None, json_schema_extra=dict(RANGES[name]))


def _constraint_field(name: str) -> Any:
    """Return an optional field that constrains the output; server/schemas/constraints.py checks it."""
    return Field(default=None, json_schema_extra=lambda schema: schema.update(FIELD_SCHEMAS[name]))


def _complete_schema(schema: dict[str, Any], model: type[Any]) -> None:
    """Add the descriptions of the fields, and the fields of other APIs."""
    describe_fields(schema.get("properties", {}), model.__name__)
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
        json_schema_extra=_complete_schema,
    )

    place: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        """Leave out the fields that are null, which stands for "not given" wherever a field may be left out."""
        if not isinstance(body, dict) or None not in body.values():
            return body
        fields = cls.model_fields
        return {
            name: value for name, value in body.items()
            if value is not None or name not in fields or fields[name].is_required()
        }  # fmt: skip

    def refuse_unsupported(self) -> None:
        """Raise RequestError for an unknown field, and for one of another API that would change the output.

        Drops the fields that have no effect: they may be megabytes, and the body lives as long as its request.
        """
        if self.place is not None:
            extra = self.model_extra or {}
            refuse_foreign(self.place, extra)
            refuse_unknown(self.place, extra, type(self).model_fields)
            extra.clear()


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Make a RequestError raised inside name fields as the client sent them: `names` maps ours to the client's."""
    try:
        yield
    except RequestError as error:
        if not names:
            raise
        ours = "|".join(map(re.escape, names))
        # A name within quotes is a value, and one after a hyphen part of a flag. chat_template_kwargs has the
        # template's names.
        outside = r"(?<![\w'\"-])(?<!chat_template_kwargs\.)"
        message = re.sub(rf"{outside}(?:{ours})(?![\w'\"])", lambda found: names[found[0]], str(error))
        raise type(error)(message, param=names.get(error.param or "", error.param)) from error


def salt_of(cache_salt: str | None, extra_key: str | None) -> str:
    """Return the salt of the prefix cache for vLLM's and SGLang's fields; "" without either."""
    if not cache_salt or not extra_key:
        return cache_salt or extra_key or ""
    return f"{len(cache_salt)} {cache_salt}{extra_key}"


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
    allowed_token_ids: Annotated[list[int], FAIL_FAST] | None = _optional("allowed_token_ids")
    bad_words: Annotated[list[Text], FAIL_FAST] | None = _optional("bad_words")
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = _optional("n")
    seed: int | None = _optional("seed")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority = 0
    response_format: Any = _constraint_field("response_format")
    structured_outputs: Any = _constraint_field("structured_outputs")
    json_schema: Any = _constraint_field("json_schema")
    regex: Any = _constraint_field("regex")
    ebnf: Any = _constraint_field("ebnf")
    structural_tag: Any = _constraint_field("structural_tag")
    cache_salt: Salt = None
    extra_key: Salt = None
    no_stop_trim: bool | None = None
    prompt_logprobs: int | None = _optional("logprobs")
    logprob_token_ids: Annotated[list[int], FAIL_FAST] | None = _optional("logprob_token_ids")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_stats: bool | None = None
    return_hidden_states: bool | None = None

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has logprobs of its tokens."""
        raise NotImplementedError

    @property
    def has_weight_versions(self) -> bool:
        """Whether the choices say which weights produced which tokens; by default if they have the token ids."""
        asked = self.return_weight_versions
        return bool(self.return_token_ids if asked is None else asked)

    def sent_names(self) -> dict[str, str]:
        """Map names of sampling parameters to the names under which this body has them, where they differ."""
        return {}

    def _params(self, defaults: Mapping[str, Any], **overrides: Any) -> SamplingParams:
        names = SHARED_SAMPLING_FIELDS
        given = {name: value for name, value in defaults.items() if name in names}
        given |= {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.logprob_token_ids and not self.has_logprobs:
            raise RequestError("logprob_token_ids requires logprobs", param="logprob_token_ids")
        given["structured_outputs"] = constraint({name: getattr(self, name) for name in FIELD_SCHEMAS})
        given["cache_salt"] = salt_of(self.cache_salt, self.extra_key)
        if self.prompt_logprobs is not None:
            if self.stream:
                raise RequestError("prompt_logprobs is not available with stream=true", param="prompt_logprobs")
            both = self.prompt_logprobs, overrides.get("prompt_logprobs") or 0
            overrides["prompt_logprobs"] = min(both) if min(both) < 0 else max(both)  # -1: the whole vocabulary
        if self.return_hidden_states:
            if self.stream:
                raise RequestError(
                    "return_hidden_states is not available with stream=true here: use /generate",
                    param="return_hidden_states",
                )
            given["return_hidden_states"] = True
        if self.no_stop_trim is not None:
            if self.include_stop_str_in_output not in (None, self.no_stop_trim):
                raise RequestError(
                    "no_stop_trim and include_stop_str_in_output differ: send only one", param="no_stop_trim"
                )
            given["include_stop_str_in_output"] = self.no_stop_trim
        with naming(self.sent_names()):
            return SamplingParams.from_dict(given | overrides)

    @property
    def truncation(self) -> Truncation | None:
        """How to shorten a prompt that is too long; None if it is refused."""
        if self.truncate_prompt_tokens is None:
            if self.truncation_side is not None:
                raise RequestError("truncation_side requires truncate_prompt_tokens", param="truncation_side")
            return None
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens=0 leaves nothing of the prompt: give at least 1, or -1 to keep what fits",
                param="truncate_prompt_tokens",
            )
        return Truncation(self.truncate_prompt_tokens, self.truncation_side == "right")

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
        if self.stream_options is not None:
            self.stream_options.refuse_unsupported()
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options requires stream=true", param="stream_options")
        if self.stream_options is not None and self.stream_options.continuous_usage_stats and not self.include_usage:
            raise RequestError(
                "stream_options.continuous_usage_stats requires include_usage=true",
                param="stream_options.continuous_usage_stats",
            )


SHARED_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "logit_bias", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "n", "seed", "allowed_token_ids", "bad_words", "logprob_token_ids",
)  # fmt: skip


class CompletionBody(OpenAISampling):
    """Body of POST /v1/completions."""

    place = COMPLETIONS

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = _optional("logprobs")
    best_of: int | None = Field(default=None, json_schema_extra=dict(RANGES["n"]))
    add_special_tokens: bool = True

    def sampling(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
        """Return the sampling parameters; `defaults` has the model's for fields that were left out.

        max_tokens defaults to 16, as in OpenAI's API.
        """
        overrides: dict[str, Any] = {"logprobs": self.logprobs}
        if self.chooses_best:
            assert self.best_of is not None
            if self.best_of < (self.n or 1):
                raise RequestError(f"best_of={self.best_of} is less than n={self.n or 1}: raise it", param="best_of")
            if self.stream:
                raise RequestError("best_of other than n is not available with stream=true", param="best_of")
            overrides |= {"n": self.best_of, "logprobs": self.logprobs or 0}
        if self.max_tokens is not None:
            overrides["max_tokens"] = self.max_tokens
        if self.echo and self.logprobs is not None:
            overrides["prompt_logprobs"] = self.logprobs
        return self._params(defaults, **overrides)

    @property
    def has_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def chooses_best(self) -> bool:
        """Whether more sequences are generated than returned."""
        return self.best_of is not None and self.best_of != (self.n or 1)

    def sent_names(self) -> dict[str, str]:
        return {"n": "best_of"} if self.chooses_best else {}


class Message(Wire):
    """One message of a conversation. `content` is text, or a list of text parts, which are joined by newlines."""

    role: Role
    content: Content = None

    def plain(self, index: int) -> dict[str, Any]:
        """Return the message for a chat template: its content as one string, arguments of tool calls as objects.

        Templates know the role "developer" as "system", and the reasoning as `reasoning_content`.
        """
        place = f"messages[{index}]"
        fields = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        if "function_call" in fields:
            raise RequestError(f"{place}.function_call is not supported; use tool_calls", param="messages")
        if "tool_calls" in fields:
            fields["tool_calls"] = _tool_calls(f"{place}.tool_calls", fields["tool_calls"])
            if not fields["tool_calls"]:
                del fields["tool_calls"]  # some templates take a list without calls for one with calls
        if "reasoning" in fields:
            fields.setdefault("reasoning_content", fields["reasoning"])
        role = "system" if self.role == "developer" else self.role
        return {**fields, "role": role, "content": self._text(place)}

    def _text(self, place: str) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts = []
        for number, part in enumerate(self.content):
            part_type = part.get("type")
            if part_type not in ("text", "refusal"):
                raise RequestError(
                    f"{place}.content has a part of type {str(part_type)[:40]!r}; only text is supported",
                    param="messages",
                )
            text = part.get(part_type)
            if not isinstance(text, str):
                raise RequestError(
                    f"{place}.content[{number}].{part_type} must be a string, found {type(text).__name__}",
                    param="messages",
                )
            texts.append(text)
        return "\n".join(texts)


def _tool_calls(place: str, calls: Any) -> list[dict[str, Any]]:
    """Return tool calls for a chat template: arguments that are a JSON object as text become an object."""
    if not is_objects(calls):
        raise RequestError(f"{place} must be a list of tool calls", param="messages")
    found = []
    for number, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{place}[{number}].function must be an object with a name", param="messages")
        arguments = call_arguments(function.get("arguments"), f"{place}[{number}].function.arguments", "messages")
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def call_arguments(arguments: Any, place: str, param: str) -> dict[str, Any]:
    """Return the arguments of an earlier call as the object that chat templates take: {} for none, "" and "null".

    Raises RequestError naming `place`, a part of the field `param`.
    """
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise RequestError(
                f"{place} must be a JSON object as text, found {arguments[:80]!r}: {reason}; leave out a call that was "
                "cut off",
                param=param,
            ) from error
    if value is not None and not isinstance(value, dict):
        raise RequestError(
            f"{place} must be a JSON object, found {str(arguments)[:80]!r}: send an object with the arguments by name",
            param=param,
        )
    return value or {}


Messages = Annotated[list[Message], Field(max_length=10_000, fail_fast=True, json_schema_extra={"minItems": 1})]
Tools = Annotated[Any, WithJsonSchema(TOOLS_SCHEMA)]
ToolChoice = Annotated[Any, WithJsonSchema(TOOL_CHOICE_SCHEMA)]
MAX_CONVERSATIONS = 1024
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ConversationFields(Wire):
    """Fields that the text of a conversation depends on."""

    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Literal[EFFORTS] | None = None  # type: ignore[valid-type]
    verbosity: Literal["low", "medium", "high"] | None = None
    documents: Annotated[list[dict[str, Any]], FAIL_FAST] | None = None

    @cached_property
    def checked_tools(self) -> list[dict[str, Any]]:
        """The valid tools of the request. Raises RequestError. Megabytes of them take tens of milliseconds, once."""
        return checked_tools(self.tools)

    def tool_use(self) -> ToolUse | None:
        """Return how the output may use tools. Raises RequestError."""
        return tool_use(self.checked_tools, self.tool_choice, self.parallel_tool_calls)

    def conversation_of(self, messages: list[Message]) -> Conversation:
        """Return what the chat template renders. Raises RequestError for invalid messages and combinations."""
        if not messages:
            raise RequestError("messages is empty: provide at least one message", param="messages")
        continues = self.continue_final_message
        if continues and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: drop one",
                param="continue_final_message",
            )
        plain = [message.plain(index) for index, message in enumerate(messages)]
        if continues and not plain[-1]["content"].strip():
            raise RequestError(
                "continue_final_message: the last message has no text to continue", param="continue_final_message"
            )
        self.tool_use()
        return Conversation(
            messages=plain,
            tools=[] if self.tool_choice == "none" else self.checked_tools,
            variables=self._variables(),
            documents=self.documents or [],
            add_generation_prompt=not continues and self.add_generation_prompt is not False,
            continue_final_message=continues,
            template=self.chat_template,
        )

    def _variables(self) -> dict[str, Any]:
        variables = dict(self.chat_template_kwargs or {})
        for name in variables:
            if name in RESERVED or not name.isidentifier():
                raise RequestError(f"chat_template_kwargs can't set {name[:80]!r}", param="chat_template_kwargs")
        own: dict[str, Any] = {"enable_thinking": self.enable_thinking, "verbosity": self.verbosity}
        if self.reasoning_effort == "none":
            own = {"enable_thinking": False} | {name: value for name, value in own.items() if value is not None}
        else:
            own["reasoning_effort"] = self.reasoning_effort
        for name, value in own.items():
            if value is not None and variables.setdefault(name, value) != value:
                raise RequestError(f"{name} and chat_template_kwargs.{name} differ: send only one", param=name)
        return variables


class ChatBody(ConversationFields, OpenAISampling):
    """Body of POST /v1/chat/completions."""

    place = CHAT

    messages: Messages
    max_completion_tokens: int | None = _optional("max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = _optional("logprobs")
    echo: bool | None = None
    add_special_tokens: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None

    def sampling(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
        """Return the sampling parameters; `defaults` has the model's for fields that were left out.

        Without a maximum, the output is limited by the context length.
        """
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if self.max_tokens not in (None, limit):
            raise RequestError(
                f"max_completion_tokens={limit} and max_tokens={self.max_tokens} differ: send only one",
                param="max_completion_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs requires logprobs=true", param="top_logprobs")
        return self._params(defaults, max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    @property
    def has_logprobs(self) -> bool:
        return bool(self.logprobs)

    def sent_names(self) -> dict[str, str]:
        names = {"logprobs": "top_logprobs"}
        return names if self.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}

    def conversation(self) -> Conversation:
        """Return what the chat template renders."""
        return self.conversation_of(self.messages)


class BatchChatBody(ChatBody):
    """Body of POST /v1/chat/completions/batch: that of a chat, with a list of conversations as its messages."""

    messages: Annotated[list[Messages], Field(max_length=MAX_CONVERSATIONS, fail_fast=True)]  # type: ignore[assignment]

    def conversations(self) -> list[ChatBody]:
        """Return a chat for each conversation. Raises RequestError for what several of them can't have."""
        if not self.messages:
            raise RequestError("messages is empty: provide at least one conversation", param="messages")
        refused = {
            "stream": self.stream, "tools": self.tools and self.tool_choice != "none",
            "prompt_logprobs": self.prompt_logprobs is not None,
        }  # fmt: skip
        for name in (name for name, is_given in refused.items() if is_given):
            raise RequestError(f"{name} is not available for several conversations: remove it", param=name)
        if self.n not in (None, 1):
            raise RequestError(f"n={self.n} must be 1 for several conversations", param="n")
        return [self.model_copy(update={"messages": messages}) for messages in self.messages]


_OF_CONVERSATIONS = (
    "tools", "documents", "chat_template", "chat_template_kwargs", "continue_final_message", "enable_thinking",
    "reasoning_effort", "verbosity",
)  # fmt: skip


class TokenizeBody(ConversationFields):
    """Body of POST /tokenize: a prompt, or a conversation."""

    place = TOKENIZE

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    def refuse_unsupported(self) -> None:
        """Raise RequestError for fields that a chat request refuses, which would change the ids."""
        super().refuse_unsupported()
        self.tool_use()  # a mistake in the tools is one, whatever they are used for
        for name in _OF_CONVERSATIONS if self.messages is None else ():
            is_unused = name == "tools" and self.tool_choice == "none"
            if getattr(self, name) not in (None, False, [], {}) and not is_unused:
                raise RequestError(f"{name} has no effect on a prompt: send messages, or remove it", param=name)

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the tokenizer adds its special tokens. By default not to messages: the chat template writes them."""
        is_given = "add_special_tokens" in self.model_fields_set
        return self.add_special_tokens if is_given else self.messages is None

    def conversation(self) -> Conversation:
        """Return what the chat template renders."""
        return self.conversation_of(self.messages or [])


class DetokenizeBody(Wire):
    """Body of POST /detokenize."""

    place = DETOKENIZE

    model: Text | None = None
    tokens: Annotated[Any, BeforeValidator(_tokens), WithJsonSchema({**_IDS, "minItems": 0})]


class WeightsBody(Wire):
    """Body of POST /weights/update: a safetensors file or folder on the server's host, and the new weight version."""

    path: Annotated[Text, Field(min_length=1, max_length=4096)]
    version: Annotated[Text, Field(min_length=1, max_length=256)]


class KVBlocksBody(Wire):
    """Body of POST /kv_blocks/lookup and /kv_blocks/export: hashes of blocks, as KV events publish them."""

    model_config = ConfigDict(extra="forbid")

    block_hashes: Annotated[list[BlockHash], Field(min_length=1, max_length=MAX_HASHES), FAIL_FAST]

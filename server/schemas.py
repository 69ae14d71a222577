"""Wire types of the inference routes: what a body may hold, and how it maps to SamplingParams.

Types are strict: a string is never a number. Ranges are SamplingParams' to check. An unknown field of the OpenAI
routes is ignored, as their clients send many; one that would change the answer and isn't supported is refused. An
unknown sampling parameter of /generate is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from engine.errors import RequestError
from engine.request import SamplingParams

_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}}
_TEXTS_OR_IDS = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _IDS, {"type": "array", "items": _IDS}]}
_IDS_OR_LISTS = {"anyOf": [_IDS, {"type": "array", "items": _IDS}]}
_TEXTS = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}
_ID_OR_IDS = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, {"type": "null"}]}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _sendable(value: Any) -> Any:
    """Refuse lone surrogates, which JSON can spell and UTF-8 can't: no tokenizer takes them."""
    for text in [value] if isinstance(value, str) else value if _is_texts(value) else ():
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise ValueError("the text holds a lone surrogate, which is not valid Unicode") from exc
    return value


# One look over a list of a million ids, and one message: a pydantic union would collect an error per item and member.
def _prompt(value: Any) -> Any:
    if isinstance(value, str) or _is_ids(value) or _is_texts(value):
        return _sendable(value)
    if isinstance(value, list) and all(_is_ids(item) for item in value):
        return value
    raise ValueError("a string, a list of strings, a list of token ids, or a list of such lists is needed")


def _input_ids(value: Any) -> Any:
    if value is None or _is_ids(value) or (isinstance(value, list) and all(_is_ids(item) for item in value)):
        return value
    raise ValueError("a list of token ids, or a list of such lists is needed")


def _texts(value: Any) -> Any:
    if value is None or isinstance(value, str) or _is_texts(value):
        return _sendable(value)
    raise ValueError("a string or a list of strings is needed")


Prompt = Annotated[Any, BeforeValidator(_prompt), WithJsonSchema(_TEXTS_OR_IDS)]
InputIds = Annotated[Any, BeforeValidator(_input_ids), WithJsonSchema(_IDS_OR_LISTS)]
Texts = Annotated[Any, BeforeValidator(_texts), WithJsonSchema(_TEXTS)]
TextsOrNone = Annotated[Any, BeforeValidator(_texts), WithJsonSchema(_ID_OR_IDS)]
Text = Annotated[str, AfterValidator(_sendable)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class Wire(BaseModel):
    """A body: strict types, no NaN or infinity, and errors that don't repeat what was sent."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=()
    )

    # Fields that would change the answer if they were known, with the values that ask for nothing.
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def refuse_unsupported(self) -> None:
        """RequestError for a field that asks for what isn't there."""
        for name, harmless in self.unsupported.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in harmless:
                raise RequestError(f"{name} is not supported here; leave it out", param=name)


class StreamOptions(Wire):
    """Options of a stream."""

    include_usage: bool = False


class OpenAISampling(Wire):
    """Sampling fields that both OpenAI routes share, vLLM's further ones among them."""

    model: Text | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Priority = 0

    def _params(self, **chosen: Any) -> SamplingParams:
        names = SHARED_SAMPLING_FIELDS
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams.from_dict(given | chosen)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def refuse_unsupported(self) -> None:
        """As for every body; also refuses stream options without a stream."""
        super().refuse_unsupported()
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options are only possible with stream=true", param="stream_options")


SHARED_SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "logit_bias", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "n", "seed",
)  # fmt: skip


class CompletionBody(OpenAISampling):
    """Body of POST /v1/completions."""

    unsupported = {
        "suffix": ("",), "prompt_embeds": (), "use_beam_search": (False,), "response_format": ({"type": "text"},)
    }  # fmt: skip

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    def sampling(self) -> SamplingParams:
        """The parameters; max_tokens is 16 unless given, as OpenAI has it."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of other than n is not supported; leave it out", param="best_of")
        chosen: dict[str, Any] = {"logprobs": self.logprobs}
        if self.max_tokens is not None:
            chosen["max_tokens"] = self.max_tokens
        if self.echo and self.logprobs is not None:
            chosen["prompt_logprobs"] = self.logprobs
        return self._params(**chosen)


class Message(Wire):
    """One message of a conversation; `content` is text, or a list of text parts that are joined."""

    role: Text
    content: Text | list[dict[str, Any]] | None = None

    def plain(self, index: int) -> dict[str, Any]:
        """The message with its content as one string, which is what chat templates take."""
        fields = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        return {**fields, "role": self.role, "content": self._text(index)}

    def _text(self, index: int) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts = []
        for part in self.content:
            kind, text = part.get("type"), part.get("text")
            if kind != "text" or not isinstance(text, str):
                raise RequestError(
                    f"messages[{index}].content has a part of type {str(kind)[:40]!r}; only text parts are taken",
                    param="messages",
                )
            texts.append(text)
        return "\n".join(texts)


class ChatBody(OpenAISampling):
    """Body of POST /v1/chat/completions."""

    unsupported = {
        "tools": ([],), "functions": ([],), "function_call": ("none", "auto"), "tool_choice": ("none", "auto"),
        "response_format": ({"type": "text"},), "audio": (), "modalities": (["text"],), "web_search_options": (),
        "chat_template": (), "chat_template_kwargs": ({},), "continue_final_message": (False,), "echo": (False,),
    }  # fmt: skip

    messages: Annotated[list[Message], Field(max_length=10_000)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True

    def sampling(self) -> SamplingParams:
        """The parameters; without a maximum the answer may go on up to the context."""
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is only possible with logprobs=true", param="top_logprobs")
        return self._params(max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them."""
        if not self.messages:
            raise RequestError("messages is empty: give at least one message", param="messages")
        return [message.plain(index) for index, message in enumerate(self.messages)]


class GenerateBody(Wire):
    """Body of POST /generate, in SGLang's shape."""

    unsupported = {
        "image_data": ([],), "audio_data": ([],), "video_data": ([],), "input_embeds": (), "lora_path": (),
        "session_params": (), "custom_logit_processor": (), "return_hidden_states": (False,),
    }  # fmt: skip

    text: TextsOrNone = None
    input_ids: InputIds = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: Texts = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int | None = None
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    priority: Priority = 0

    def prompts(self) -> tuple[list[str | list[int]], bool]:
        """The prompts, and whether they came as a list and are answered with one."""
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("give either text or input_ids, and only one of them", param="text")
        if self.text is not None:
            return ([self.text], False) if isinstance(self.text, str) else (list(self.text), True)
        single = not self.input_ids or type(self.input_ids[0]) is int
        return ([self.input_ids], False) if single else (list(self.input_ids), True)

    def sampling(self, count: int) -> list[SamplingParams]:
        """One SamplingParams for each of `count` prompts."""
        given = self.sampling_params or {}
        if isinstance(given, dict):
            return [self._one(given)] * count
        if len(given) != count:
            raise RequestError(
                f"sampling_params has {len(given)} entries for {count} prompts; give one for all, or one for each",
                param="sampling_params",
            )
        return [self._one(each) for each in given]

    def ids(self, count: int, fallback: str) -> list[str]:
        """The public id of each prompt: the caller's rid, else made from `fallback`."""
        if isinstance(self.rid, list):
            if len(self.rid) != count:
                raise RequestError(f"rid has {len(self.rid)} entries for {count} prompts; give one each", param="rid")
            return list(self.rid)
        base = self.rid or fallback
        return [base] if count == 1 else [f"{base}-{index}" for index in range(count)]

    def _one(self, given: Mapping[str, Any]) -> SamplingParams:
        values: dict[str, Any] = {"max_tokens": 128}
        for name, value in given.items():
            if name in _SGLANG_IGNORED or (name in _SGLANG_UNSUPPORTED and value is None):
                continue
            if name in _SGLANG_UNSUPPORTED:
                raise RequestError(f"sampling_params.{name} is not supported here; leave it out", param=name)
            if value is not None or name in ("max_new_tokens", "max_tokens"):
                values[_SGLANG_NAMES.get(name, name)] = value
        if self.return_logprob:
            values["logprobs"] = self.top_logprobs_num
            if self.logprob_start_len is not None and self.logprob_start_len >= 0:
                values["prompt_logprobs"] = self.top_logprobs_num
        return SamplingParams.from_dict(values)


_SGLANG_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_SGLANG_IGNORED = frozenset({"spaces_between_special_tokens", "stream_interval"})
_SGLANG_UNSUPPORTED = frozenset({"json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "custom_params"})

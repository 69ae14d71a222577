"""Request body of POST /generate in SGLang's format, and the mapping of SGLang's names to SamplingParams.

Unknown body fields are ignored. Fields of other APIs that would change the output are refused (foreign_fields.py).
Unknown sampling parameters are refused too, since a misspelt one would silently change the output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from engine.errors import RequestError
from engine.protocol.request import SamplingParams
from engine.protocol.sampling_params import MAX_LOGPROB_TOKEN_IDS, MAX_SALT_CHARS, MAX_TOKENS
from server.schemas.constraints import FIELD_SCHEMAS, SGLANG_NAMES, constraint
from server.schemas.descriptions import describe_fields
from server.schemas.foreign_fields import FOREIGN_FIELDS, GENERATE, SAMPLING, json_schemas, refuse_foreign
from server.schemas.requests import (
    MAX_ID_CHARS,
    NO_DEFAULTS,
    RANGES,
    InputIds,
    Priority,
    Salt,
    Texts,
    Wire,
    is_objects,
    naming,
    salt_of,
)

_SGLANG_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}


def _sampling_schema() -> dict[str, Any]:
    numbers = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
    whole = ("top_k", "max_tokens", "min_tokens", "n", "seed", "logprobs")
    flags = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "show_markers", "no_stop_trim")
    known = {name: {"type": "number", **RANGES[name]} for name in numbers}
    known |= {name: {"type": "integer", **RANGES[name]} for name in whole}
    known |= {name: {"type": "boolean"} for name in flags}
    text = {"type": "string", "minLength": 1, "maxLength": RANGES["stop"]["maxLength"]}
    known["stop"] = {"anyOf": [text, {"type": "array", "items": text, "maxItems": RANGES["stop"]["maxItems"]}]}
    known["stop_token_ids"] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    known["allowed_token_ids"] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    known["logprob_token_ids"] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    known["bad_words"] = {"type": "array", "items": {"type": "string", "minLength": 1}}
    known["logit_bias"] = {"type": "object", **RANGES["logit_bias"]}
    known["prompt_logprobs"] = known["logprobs"]
    known["cache_salt"] = {"type": "string", "maxLength": MAX_SALT_CHARS}
    known |= {alias: known[name] for alias, name in _SGLANG_NAMES.items()}
    nullable = {name: {"anyOf": [schema, {"type": "null"}]} for name, schema in known.items()} | json_schemas(SAMPLING)
    nullable |= {name: dict(FIELD_SCHEMAS[name]) for name in ("structured_outputs", *SGLANG_NAMES)}
    describe_fields(nullable, "SamplingOptions")
    one = {"type": "object", "properties": nullable, "additionalProperties": False}
    return {"anyOf": [one, {"type": "array", "items": one}, {"type": "null"}]}


def _sampling(value: Any) -> Any:
    if value is None or isinstance(value, dict) or is_objects(value):
        return value
    raise ValueError("Input should be a valid dictionary")


def _flags(value: Any) -> Any:
    if value is None:
        return False
    if isinstance(value, bool) or (isinstance(value, list) and all(isinstance(one, bool) for one in value)):
        return value
    raise ValueError("Input should be a valid boolean, or a list with one per prompt")


_ID = {"type": "string", "maxLength": MAX_ID_CHARS}
_IDS = {"anyOf": [_ID, {"type": "array", "items": _ID}, {"type": "null"}]}


def _check_id_length(value: Any) -> Any:
    longest = max(map(len, [value] if isinstance(value, str) else value or [""]), default=0)
    if longest > MAX_ID_CHARS:
        raise ValueError(f"an id has {longest} characters; at most {MAX_ID_CHARS} are allowed")
    return value


_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_LOGPROB_TOKEN_IDS}
_LOGPROB_IDS = {"anyOf": [_TOKEN_IDS, {"type": "array", "items": _TOKEN_IDS}, {"type": "null"}]}
LogprobIds = Annotated[InputIds, WithJsonSchema(_LOGPROB_IDS)]
_FLAG = {"type": "boolean"}
Flags = Annotated[Any, BeforeValidator(_flags), WithJsonSchema({"anyOf": [_FLAG, {"type": "array", "items": _FLAG}]})]
Sampling = Annotated[Any, BeforeValidator(_sampling), WithJsonSchema(_sampling_schema())]


class GenerateBody(Wire):
    """Body of POST /generate, in SGLang's format."""

    place = GENERATE

    text: Texts = None
    input_ids: InputIds = None
    sampling_params: Sampling = None
    rid: Annotated[Texts, AfterValidator(_check_id_length), WithJsonSchema(_IDS)] = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    token_ids_logprob: LogprobIds = None
    return_text_in_logprobs: bool = False
    return_hidden_states: Flags = False
    cache_salt: Salt = None
    extra_key: Salt = None
    priority: Priority = 0

    def prompts(self) -> tuple[list[str | list[int]], bool]:
        """Return the prompts, and whether they were sent as a list (the response is then a list too)."""
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("provide exactly one of text and input_ids", param="text")
        if self.text is not None:
            return ([self.text], False) if isinstance(self.text, str) else (list(self.text), True)
        single = not self.input_ids or type(self.input_ids[0]) is int
        return ([self.input_ids], False) if single else (list(self.input_ids), True)

    def sampling(self, count: int, defaults: Mapping[str, Any] = NO_DEFAULTS) -> list[SamplingParams]:
        """Return one SamplingParams per prompt, for `count` prompts.

        `defaults` has the model's for parameters that were left out.
        """
        given = self.sampling_params or {}
        for one in [given] if isinstance(given, dict) else given:
            _refuse_outside_names(one)
        if isinstance(given, dict):
            with naming(self.sent_names(0)):
                shared = [self._params(given, ids, defaults) for ids in self._logprob_ids(count)]
            _drop_ignored(given)
            return self._with_hidden_states(shared * (count // len(shared)))
        if len(given) != count:
            raise RequestError(
                f"sampling_params has {len(given)} entries for {count} prompts; provide one for all or one per prompt",
                param="sampling_params",
            )
        params = []
        logprob_ids = self._logprob_ids(count)
        for number, each in enumerate(given):
            with naming(self.sent_names(number)):
                params.append(self._params(each, logprob_ids[number % len(logprob_ids)], defaults))
            _drop_ignored(each)
        return self._with_hidden_states(params)

    def _with_hidden_states(self, params: list[SamplingParams]) -> list[SamplingParams]:
        """Return these SamplingParams, with hidden states for the prompts that ask for them."""
        wanted = self.return_hidden_states
        if isinstance(wanted, bool):
            wanted = [wanted] * len(params)
        if len(wanted) != len(params):
            raise RequestError(
                f"return_hidden_states has {len(wanted)} entries for {len(params)} prompts; provide one for all or one "
                "per prompt",
                param="return_hidden_states",
            )
        return [
            dataclasses.replace(one, return_hidden_states=True) if flag else one
            for one, flag in zip(params, wanted, strict=True)
        ]

    def sent_names(self, number: int) -> dict[str, str]:
        """Map names of the sampling parameters of prompt `number` to those that the body has, where they differ."""
        given = self.sampling_params or {}
        given = given if isinstance(given, dict) else given[number]
        names = {ours: theirs for theirs, ours in _SGLANG_NAMES.items() if given.get(theirs) is not None}
        if self.token_ids_logprob:
            names["logprob_token_ids"] = "token_ids_logprob"
        return names | ({"logprobs": "top_logprobs_num"} if self.return_logprob else {})

    def _logprob_ids(self, count: int) -> list[list[int]]:
        """Return the ids of token_ids_logprob: one list for all `count` prompts, or one per prompt."""
        found = self.token_ids_logprob or []
        if not found or type(found[0]) is int:
            return [found]
        if len(found) != count:
            raise RequestError(
                f"token_ids_logprob has {len(found)} lists for {count} prompts; provide one for all or one per prompt",
                param="token_ids_logprob",
            )
        return list(found)

    def ids(self, count: int, fallback: str) -> list[str]:
        """Return the public id of each prompt: from the client's rid, else from `fallback`."""
        if isinstance(self.rid, list):
            if len(self.rid) != count:
                raise RequestError(
                    f"rid has {len(self.rid)} entries for {count} prompts; provide one per prompt", param="rid"
                )
            return list(self.rid)
        base = self.rid or fallback
        return [base] if count == 1 else [f"{base}-{index}" for index in range(count)]

    def _params(self, given: Mapping[str, Any], logprob_ids: list[int], defaults: Mapping[str, Any]) -> SamplingParams:
        refuse_foreign(SAMPLING, given, "sampling_params.")
        if self.top_logprobs_num and not self.return_logprob:
            raise RequestError("top_logprobs_num requires return_logprob=true", param="top_logprobs_num")
        values: dict[str, Any] = {**defaults, "max_tokens": 128, "cache_salt": salt_of(self.cache_salt, self.extra_key)}
        for name, value in given.items():
            if name in FOREIGN_FIELDS[SAMPLING] or name in SGLANG_NAMES:
                continue
            ours = _SGLANG_NAMES.get(name, name)
            if ours != name and value is not None and given.get(ours) is not None:
                raise RequestError(
                    f"sampling_params has {name!r} and {ours!r}, which are aliases; provide only one", param=name
                )
            if value is not None or name in ("max_new_tokens", "max_tokens"):
                values[ours] = value
        if logprob_ids:
            if not self.return_logprob:
                raise RequestError("token_ids_logprob requires return_logprob=true", param="token_ids_logprob")
            values["logprob_token_ids"] = logprob_ids
        if self.return_logprob:
            values["logprobs"] = self.top_logprobs_num
            if self.logprob_start_len is not None and self.logprob_start_len >= 0:
                values["prompt_logprobs"] = self.top_logprobs_num
        constraints = {name: given.get(name) for name in ("structured_outputs", *SGLANG_NAMES)}
        return SamplingParams.from_dict(values | {"structured_outputs": constraint(constraints)})


# Sampling parameters of the OpenAI routes that SGLang's format has beside sampling_params, under other names.
_OUTSIDE_SAMPLING = {
    "logprobs": "return_logprob and top_logprobs_num",
    "prompt_logprobs": "return_logprob and logprob_start_len",
    "logprob_token_ids": "token_ids_logprob",
}


def _refuse_outside_names(given: Mapping[str, Any]) -> None:
    for name, place in _OUTSIDE_SAMPLING.items():
        if given.get(name) is not None:
            raise RequestError(f"{name!r} in sampling_params is not read: use {place} beside it", param=name)


def _drop_ignored(given: dict[str, Any]) -> None:
    """Drop the parameters without effect: they may be megabytes, and the body lives as long as its request."""
    for name in FOREIGN_FIELDS[SAMPLING]:
        given.pop(name, None)

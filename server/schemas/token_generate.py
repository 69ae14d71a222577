"""Request body of POST /inference/v1/generate, vLLM's route from token ids to token ids.

Sampling parameters follow vLLM's SamplingParams. Unlike on the other routes, the model's defaults do not apply to
parameters that are left out, as in vLLM: a trainer's log-probabilities would silently describe another distribution.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from engine.errors import RequestError
from engine.protocol.request import SamplingParams
from graph_cache.utils.validation import did_you_mean
from server.schemas.constraints import FIELD_SCHEMAS, constraint
from server.schemas.descriptions import describe_fields
from server.schemas.foreign_fields import FOREIGN_FIELDS, TOKEN_SAMPLING, TOKENS, json_schemas, refuse_foreign
from server.schemas.requests import (
    MAX_ID_CHARS,
    OpenAISampling,
    Priority,
    Salt,
    StreamOptions,
    Text,
    Wire,
    salt_of,
)

# vLLM's sampling parameters that are served, by the names that SamplingParams has too.
SERVED_SAMPLING = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs",
    "logprob_token_ids", "skip_special_tokens", "include_stop_str_in_output", "structured_outputs", "logit_bias",
    "allowed_token_ids", "bad_words",
)  # fmt: skip
# Parameters of Encore's; SGLang has the last two beside its sampling parameters.
OWN_SAMPLING = ("return_kept_mass", "return_sampling_mask", "return_routed_experts")
EXPERTS_START = "routed_experts_prompt_start"  # vLLM's, of the answer


def _sampling_schema() -> dict[str, Any]:
    """Return the schema of the OpenAI routes' parameters, and of vLLM's other parameters that change nothing."""
    fields = OpenAISampling.model_json_schema()["properties"]
    known: dict[str, Any] = {name: dict(fields[name]) for name in SERVED_SAMPLING if name in fields}
    known |= {name: {"type": "boolean", "default": False} for name in OWN_SAMPLING}
    known[EXPERTS_START] = {"type": "integer", "minimum": 0, "default": 0}
    known["logprobs"] = dict(known["prompt_logprobs"])
    known["structured_outputs"] = dict(FIELD_SCHEMAS["structured_outputs"])
    known |= json_schemas(TOKEN_SAMPLING)
    describe_fields(known, "TokenSampling")
    return {"type": "object", "properties": known, "additionalProperties": False}


def _sampling(value: Any) -> Any:
    if isinstance(value, dict):
        return value
    raise ValueError("Input should be an object of sampling parameters")


def _token_ids(value: Any) -> Any:
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        return value
    raise ValueError("must be a list of token ids")


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


class TokenGenerateBody(Wire):
    """Body of POST /inference/v1/generate."""

    place = TOKENS

    model: Text | None = None
    token_ids: Annotated[Any, BeforeValidator(_token_ids), WithJsonSchema(_IDS)]
    sampling_params: Annotated[Any, BeforeValidator(_sampling), WithJsonSchema(_sampling_schema())] = Field(
        default_factory=dict
    )
    request_id: Annotated[Text, Field(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt = None
    priority: Priority = 0
    return_token_ids: bool | None = None
    return_sampling_mask: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] | None = None

    def refuse_unsupported(self) -> None:
        """Raise RequestError for unknown and unsupported fields, in the sampling parameters too."""
        super().refuse_unsupported()
        refuse_foreign(TOKEN_SAMPLING, self.sampling_params, "sampling_params.")
        for name in FOREIGN_FIELDS[TOKEN_SAMPLING]:
            self.sampling_params.pop(name, None)
        for name, value in self.sampling_params.items():
            known = (*SERVED_SAMPLING, *OWN_SAMPLING, EXPERTS_START)
            if name not in known and value is not None:
                hint = did_you_mean(name, known) or "; remove it"
                raise RequestError(f"sampling_params.{name[:64]} is not a known field{hint}", param=name[:64])
        if self.stream_options is not None:
            self.stream_options.refuse_unsupported()

    def sampling(self, records_experts: bool = False) -> SamplingParams:
        """Return the sampling parameters. Without max_tokens, the context length limits the output.

        With `records_experts` the experts of tokens are returned, unless the body says otherwise, or streams.
        """
        given = {name: value for name, value in self.sampling_params.items() if value is not None}
        given.pop(EXPERTS_START, None)
        if self.return_routed_experts is not None:
            given["return_routed_experts"] = self.return_routed_experts
        if self.stream and given.get("return_routed_experts"):
            raise RequestError("return_routed_experts is not available with stream=true", param="return_routed_experts")
        given.setdefault("return_routed_experts", records_experts and not self.stream)
        if self.stream and given.get("prompt_logprobs") is not None:
            raise RequestError("prompt_logprobs is not available with stream=true", param="prompt_logprobs")
        if self.return_sampling_mask:
            given["return_sampling_mask"] = True
        values = {"max_tokens": None, **given, "cache_salt": salt_of(self.cache_salt, None)}
        structured = constraint({"structured_outputs": given.get("structured_outputs")})
        return SamplingParams.from_dict(values | {"structured_outputs": structured})

    def experts_start(self) -> int:
        """Return the first token whose experts are wanted. Raises RequestError unless it is one of the prompt's."""
        start = self.sampling_params.get(EXPERTS_START)
        start = (self.routed_experts_prompt_start or 0) if start is None else start
        if type(start) is not int or not 0 <= start <= max(0, len(self.token_ids) - 1):
            raise RequestError(
                f"{EXPERTS_START}={start!r:.40} must be a whole number below the {len(self.token_ids)} tokens of the "
                "prompt",
                param=EXPERTS_START,
            )
        return start

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every event of a stream has the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

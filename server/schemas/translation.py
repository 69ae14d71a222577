"""What the APIs share that are translated into chats: further sampling fields, and errors in their terms."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import Field, ValidationError

from engine.errors import RequestError
from server.schemas.constraints import FIELD_SCHEMAS
from server.schemas.field_paths import field_path
from server.schemas.requests import RANGES, ChatBody, Wire, naming


def _extension(kind: str, **schema: Any) -> Any:
    """Return an optional field, of which ChatBody checks the value; the schema is for /openapi.json."""
    return Field(default=None, json_schema_extra={"anyOf": [{"type": kind, **schema}, {"type": "null"}]})


class SamplingExtensions(Wire):
    """Fields of /v1/chat/completions that these APIs don't have themselves."""

    top_k: Any = _extension("integer", **RANGES["top_k"])
    min_p: Any = _extension("number", **RANGES["min_p"])
    repetition_penalty: Any = _extension("number", **RANGES["repetition_penalty"])
    frequency_penalty: Any = _extension("number", **RANGES["frequency_penalty"])
    presence_penalty: Any = _extension("number", **RANGES["presence_penalty"])
    logit_bias: Any = _extension("object", **RANGES["logit_bias"])
    stop_token_ids: Any = _extension("array", items={"type": "integer"}, **RANGES["stop_token_ids"])
    min_tokens: Any = _extension("integer", **RANGES["min_tokens"])
    ignore_eos: Any = _extension("boolean")
    seed: Any = _extension("integer", **RANGES["seed"])
    priority: Any = _extension("integer")
    cache_salt: Any = _extension("string", minLength=1)
    structured_outputs: Any = Field(default=None, json_schema_extra=FIELD_SCHEMAS["structured_outputs"])
    chat_template_kwargs: Any = _extension("object")

    def extensions(self) -> dict[str, Any]:
        """Return the fields of this class that were sent."""
        return {name: value for name in SamplingExtensions.model_fields if (value := getattr(self, name)) is not None}


def chat_body(fields: Mapping[str, Any]) -> ChatBody:
    """Return the chat request with these fields. Raises RequestError."""
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = str(first["loc"][0])
        raise RequestError(
            f"{field_path(first['loc'])}: {first['msg'].removeprefix('Value error, ')}", param=place
        ) from error


@contextmanager
def translated_errors(names: Mapping[str, str], places: Sequence[str] = ()) -> Iterator[None]:
    """Make a RequestError of the chat request name fields as the client sent them.

    `names` maps a field of the chat request to the client's, `places` each message to its place in the client's body.
    """

    def place(found: re.Match[str]) -> str:
        number = int(found[1])
        return places[number] if number < len(places) else found[0]

    try:
        with naming(names):
            yield
    except RequestError as error:
        message = re.sub(r"\bmessages\[(\d+)\]", place, str(error)).replace(".function.", ".")
        raise type(error)(message, param=error.param) from error

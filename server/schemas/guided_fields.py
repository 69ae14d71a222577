"""vLLM's former names of the fields that constrain an output, which --compat vllm accepts."""

from __future__ import annotations

from engine.errors import RequestError
from engine.protocol.structured_outputs import StructuredOutputs
from server.schemas.constraints import FIELD_SCHEMAS, constraint
from server.schemas.requests import OpenAISampling

GUIDED_NAMES = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
}  # fmt: skip
"""Former name -> the name in `structured_outputs`."""
WHITESPACE = "guided_whitespace_pattern"


def adopt_guided_fields(body: OpenAISampling) -> None:
    """Move the constraint of a `guided_*` field to `structured_outputs`.

    Raises RequestError, naming the field, for an invalid constraint and for a second one.
    """
    extra = body.model_extra or {}
    found = {name: value for name in (*GUIDED_NAMES, WHITESPACE) if (value := extra.pop(name, None)) is not None}
    whitespace = found.pop(WHITESPACE, None)
    if not found and whitespace is None:
        return
    if "guided_json" not in found and whitespace is not None:
        raise RequestError(f"{WHITESPACE} requires guided_json", param=WHITESPACE)
    first, *others = found
    for name in (*others, *(name for name in FIELD_SCHEMAS if constraint({name: getattr(body, name)}) is not None)):
        raise RequestError(
            f"{first} and {name} both constrain the output, which can follow only one: remove one", param=name
        )
    fields = {GUIDED_NAMES[first]: found[first], "whitespace_pattern": whitespace}
    body.structured_outputs = StructuredOutputs(**fields, field=first)

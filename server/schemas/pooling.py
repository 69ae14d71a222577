"""Request bodies of /v1/embeddings, /pooling, /v1/score and /v1/rerank, as vLLM, OpenAI, Jina and Cohere have them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from engine.errors import RequestError
from server.schemas.foreign_fields import EMBEDDINGS, POOLING, RERANK, SCORE
from server.schemas.requests import Priority, Prompt, Salt, Text, Texts, Wire, is_objects
from server.schemas.truncation import Truncation

PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Names of the two sides of /v1/score, of which a body has one pair."""

_TEXT = {"type": "string"}
_DOCUMENT = {"type": "object", "properties": {"text": _TEXT}, "required": ["text"], "additionalProperties": False}
_DOCUMENTS = {"type": "array", "items": {"anyOf": [_TEXT, _DOCUMENT]}, "minItems": 1}


def _documents(value: Any) -> Any:
    """Return the documents as texts; objects have `text` only."""
    if isinstance(value, list):
        value = [one["text"] if is_objects([one]) and one.keys() == {"text"} else one for one in value]
        if all(isinstance(one, str) for one in value):
            return _encodable(value)
    raise ValueError("must be a list of texts, or of objects with text")


def _encodable(texts: list[str]) -> list[str]:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise ValueError("the text contains a lone surrogate, which is not valid Unicode") from error
    return texts


Documents = Annotated[Any, BeforeValidator(_documents), WithJsonSchema(_DOCUMENTS)]


class PoolingFields(Wire):
    """Fields of all four bodies. An input that is too long is cut at its end, or with truncation_side at its start."""

    model: Text | None = None
    priority: Priority = 0
    cache_salt: Salt = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    use_activation: bool | None = None

    def truncation_at(self, side: str | None) -> Truncation | None:
        """Return how to shorten an input that is too long; None if it is refused."""
        if self.truncate_prompt_tokens is None:
            if side is not None:
                raise RequestError("truncation_side requires truncate_prompt_tokens", param="truncation_side")
            return None
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens=0 leaves nothing of the input: give at least 1, or -1 to keep what fits",
                param="truncate_prompt_tokens",
            )
        return Truncation(self.truncate_prompt_tokens, side != "left")


class InputFields(PoolingFields):
    """Fields of the bodies with an input."""

    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, json_schema_extra={"minimum": 1})
    normalize: bool | None = None
    prompt_name: Text | None = None
    add_special_tokens: bool = True
    truncation_side: Literal["left", "right"] | None = None

    @property
    def truncation(self) -> Truncation | None:
        """See truncation_at."""
        return self.truncation_at(self.truncation_side)

    @property
    def inputs(self) -> list[str | list[int]]:
        """The inputs as a list. A string or a flat list of token ids is one input."""
        if isinstance(self.input, str):
            return [self.input]
        if not self.input:
            raise RequestError("input is empty: provide at least one text", param="input")
        return [self.input] if type(self.input[0]) is int else self.input

    @property
    def normalizes(self) -> bool | None:
        """Whether to normalise, which vLLM calls use_activation; None: as the model's folder says."""
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise RequestError("normalize and use_activation differ: send only one", param="normalize")
        return self.use_activation if self.normalize is None else self.normalize


class EmbeddingBody(InputFields):
    """Body of POST /v1/embeddings."""

    place = EMBEDDINGS


class PoolingBody(InputFields):
    """Body of POST /pooling."""

    place = POOLING

    task: Literal["embed", "token_embed", "classify"] | None = None


class ScoredFields(PoolingFields):
    """Fields of the bodies with queries and documents."""

    max_tokens_per_query: Annotated[int, Field(ge=0, lt=2**31)] = 0
    max_tokens_per_doc: Annotated[int, Field(ge=0, lt=2**31)] = 0
    instruction: Text | None = None


class ScoreBody(ScoredFields):
    """Body of POST /v1/score: queries and documents, under one of four pairs of names."""

    place = SCORE

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    items: Texts = None
    data_1: Texts = None
    data_2: Texts = None

    def sides(self) -> tuple[tuple[str, str], list[str], list[str]]:
        """Return the names of the two sides and their texts. Raises RequestError unless there is one pair of names."""
        given = {name for names in PAIRS for name in names if getattr(self, name) is not None}
        for names in PAIRS:
            if given == set(names):
                first, second = (getattr(self, name) for name in names)
                return (
                    names,
                    [first] if isinstance(first, str) else first,
                    [second] if isinstance(second, str) else second,
                )
        known = "; ".join(" and ".join(names) for names in PAIRS)
        raise RequestError(
            f"found {', '.join(sorted(given)) or 'no texts'}: send one of {known}",
            param=min(given, default="text_1"),
        )


class RerankBody(ScoredFields):
    """Body of POST /v1/rerank."""

    place = RERANK

    query: Text
    documents: Documents
    top_n: int | None = Field(default=None, json_schema_extra={"minimum": 0})
    return_documents: bool = True

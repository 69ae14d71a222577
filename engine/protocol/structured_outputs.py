"""The constraint on a request's output: a JSON schema, a regular expression, a list of choices, a grammar or tags."""

from __future__ import annotations

import dataclasses
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError
from graph_cache.utils.validation import did_you_mean

MAX_GRAMMAR_CHARS = 2**18  # of a schema or grammar as text: OpenAI's limit is 120,000
MAX_CHOICES = 4096
MAX_WHITESPACE_CHARS = 256

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True)
class Reasoning:
    """The markers around the reasoning that may precede a constrained output, which begins after `end`.

    is_open: the output begins within the reasoning; otherwise the reasoning is optional and begins with `begin`.
    budget: Its maximum number of tokens, after which `end` follows.
    """

    begin: str
    end: str
    is_open: bool
    budget: int | None = None


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the output, with vLLM's names; frozen, hashable, and checked at construction.

    Exactly one of these:

    - json: a JSON schema, as an object or as JSON text. Kept as text.
    - regex: a regular expression that the whole output matches (the syntax of Rust's `regex`, without look-around).
    - choice: the output is one of these strings.
    - grammar: a context-free grammar in Lark syntax, or in GBNF (EBNF) with a rule `root`.
    - json_object: the output is any JSON object.
    - structural_tag: text in which tags begin structured parts, as an object or as JSON text. Kept as text.

    The others change how a JSON schema is followed:

    - disable_any_whitespace: JSON without spaces and line breaks between its tokens.
    - disable_additional_properties: objects whose schema does not mention `additionalProperties` allow none.
    - whitespace_pattern: a regular expression for the whitespace between JSON tokens, which is optional in any case.
      Without it: a space, or a line break with an indentation of up to 40 spaces or 10 tabs.

    reasoning: what may precede the constrained part; the server sets it for a model that reasons.

    `field` is the field of the caller's request that holds the constraint, if that is not structured_outputs: error
    messages name it. It takes no part in comparisons. Raises RequestError.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    reasoning: Reasoning | None = None
    field: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.json_object is False:
            self._set("json_object", None)
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                self._set(name, self._json_text(name))
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                self._check_text(name, MAX_GRAMMAR_CHARS)
        if self.whitespace_pattern is not None:
            self._check_text("whitespace_pattern", MAX_WHITESPACE_CHARS)
        if self.choice is not None:
            self._set("choice", self._choices())
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise self._invalid(name, "true or false")
        if self.json_object is not None and self.json_object is not True:
            raise self._invalid("json_object", "true or false")
        self._check_combination()

    @classmethod
    def from_dict(cls, values: Any) -> StructuredOutputs:
        """Build from decoded JSON; nulls count as unset. Raises RequestError for an unknown key."""
        field = "structured_outputs"
        known = [one.name for one in dataclasses.fields(cls) if one.name not in ("reasoning", "field")]
        if not isinstance(values, Mapping):
            allowed = f"an object with one of {', '.join(KINDS)}"
            raise RequestError(f"{field} must be {allowed}; found {reprlib.repr(values)}", param=field)
        given = {name: value for name, value in values.items() if value is not None}
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
                raise RequestError(f"unknown key {reprlib.repr(name)} in {field}{hint}", param=field)
        return cls(**given)

    @property
    def kind(self) -> str:
        """The name of the constraint that is set, one of KINDS."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def closed(self) -> StructuredOutputs:
        """Return this constraint with `disable_additional_properties`, if it is a JSON schema."""
        return dataclasses.replace(self, disable_additional_properties=True) if self.kind == "json" else self

    def error(self, message: str, place: str = "") -> RequestError:
        """Return a RequestError; `message` follows the name of the caller's field: `place`, or the constraint's."""
        place = place or self.place_of(self.kind)
        return RequestError(f"{place}{message}", param=re.split(r"[.\[]", place)[0])

    def place_of(self, name: str) -> str:
        return self.field or f"structured_outputs.{name}"

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _param(self) -> str:
        return (self.field or "structured_outputs").partition(".")[0]

    def _invalid(self, name: str, allowed: str, found: Any = None) -> RequestError:
        value = getattr(self, name) if found is None else found
        return RequestError(
            f"{self.place_of(name)} must be {allowed}; found {reprlib.repr(value)}", param=self._param()
        )

    def _json_text(self, name: str) -> str:
        value = getattr(self, name)
        if isinstance(value, str):
            self._check_text(name, MAX_GRAMMAR_CHARS)
            text = value
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{self.place_of(name)} is not valid JSON: {error}", param=self._param()) from error
        else:
            try:
                text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise RequestError(f"{self.place_of(name)} is not JSON: {error}", param=self._param()) from error
        is_schema = isinstance(value, Mapping) or (name == "json" and isinstance(value, bool))
        if not is_schema:
            raise self._invalid(name, "an object, or its JSON as a string", value)
        self._check_length(name, text, MAX_GRAMMAR_CHARS)
        return text

    def _check_text(self, name: str, max_chars: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, str) or not value:
            raise self._invalid(name, "a non-empty string", value)
        self._check_length(name, value, max_chars)
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise RequestError(
                f"{self.place_of(name)} contains a lone surrogate, which is not valid Unicode", param=self._param()
            )

    def _check_length(self, name: str, text: str, max_chars: int) -> None:
        if len(text) > max_chars:
            raise RequestError(
                f"{self.place_of(name)} has {len(text)} characters, and at most {max_chars} are allowed: shorten it",
                param=self._param(),
            )

    def _choices(self) -> tuple[str, ...]:
        value = self.choice
        allowed = f"a list of 1 to {MAX_CHOICES} strings"
        if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_CHOICES:
            raise self._invalid("choice", allowed)
        for one in value:
            if not isinstance(one, str):
                raise self._invalid("choice", allowed, one)
            if any("\ud800" <= char <= "\udfff" for char in one):
                raise self._invalid("choice", "a list of valid Unicode texts", one)
        self._check_length("choice", "".join(value), MAX_GRAMMAR_CHARS)
        return tuple(value)

    def _check_combination(self) -> None:
        field = self.field or "structured_outputs"
        given = [name for name in KINDS if getattr(self, name) is not None]
        if not given:
            raise RequestError(f"{field} has no constraint: give one of {', '.join(KINDS)}", param=self._param())
        if len(given) > 1:
            raise RequestError(
                f"{field} has {' and '.join(given)}, and an output can follow only one: remove the others",
                param=self._param(),
            )
        options = [
            name
            for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
            if getattr(self, name)
        ]
        if options and given[0] not in ("json", "json_object"):
            raise RequestError(
                f"{field}.{options[0]} applies to json and json_object, not to {given[0]}: remove it",
                param=self._param(),
            )
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise RequestError(
                f"{field} has disable_any_whitespace and whitespace_pattern: remove one of them", param=self._param()
            )

"""Translate a StructuredOutputs to a grammar of llguidance."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llguidance import LLTokenizer

from engine.protocol.structured_outputs import StructuredOutputs
from engine.text.grammars.closing import Closing
from engine.text.grammars.lark import GrammarBuilder, escaped
from engine.text.grammars.structural_tags import tag_rule

_AFTER_REASONING = r"/[ \n]{0,4}/"


class BudgetError(ValueError):
    """The reasoning can't have a budget of tokens."""


def translate(outputs: StructuredOutputs, tokenizer: LLTokenizer) -> str:
    """Return the grammar of a constraint as llguidance's JSON text.

    Raises BudgetError, and ValueError with the reason, which begins with the path of the part at fault if it has one.
    """
    builder = GrammarBuilder(tokenizer)
    start = _EXPRESSIONS[outputs.kind](outputs, builder)
    reasoning = outputs.reasoning
    if reasoning is not None:
        if reasoning.budget is None:
            before = f"{builder.free_text_until(reasoning.end)} {_AFTER_REASONING}"
        else:
            before = f"{_limited(reasoning.end, reasoning.budget, builder)} {_AFTER_REASONING}"
        if not reasoning.is_open:
            before = f"({builder.text(reasoning.begin)} {before})?"
        start = f"{before} {start}"
    return builder.build(start)


def _limited(end: str, budget: int, builder: GrammarBuilder) -> str:
    try:
        return builder.tokens_until(end, budget)
    except ValueError as error:
        raise BudgetError(f"{error}; remove the budget") from error


def _json(outputs: StructuredOutputs, builder: GrammarBuilder) -> str:
    return _schema(json.loads(outputs.json), outputs, builder)


def _json_object(outputs: StructuredOutputs, builder: GrammarBuilder) -> str:
    return _schema({"type": "object"}, outputs, builder)


def _schema(schema: Any, outputs: StructuredOutputs, builder: GrammarBuilder) -> str:
    closing: Closing | None = "strict" if outputs.disable_additional_properties else None
    return builder.schema(schema, closing, **whitespace_options(outputs))


def whitespace_options(outputs: StructuredOutputs) -> dict[str, Any]:
    """Return llguidance's options for the whitespace between JSON tokens."""
    if outputs.disable_any_whitespace:
        return {"whitespace_flexible": False, "whitespace_pattern": None}
    return {} if outputs.whitespace_pattern is None else {"whitespace_pattern": outputs.whitespace_pattern}


def _regex(outputs: StructuredOutputs, builder: GrammarBuilder) -> str:
    assert outputs.regex is not None
    return builder.regex(outputs.regex)


def _choice(outputs: StructuredOutputs, builder: GrammarBuilder) -> str:
    assert outputs.choice is not None
    return f"/{'|'.join(map(escaped, dict.fromkeys(outputs.choice)))}/"


def _grammar(outputs: StructuredOutputs, builder: GrammarBuilder) -> str:
    assert outputs.grammar is not None
    return builder.grammar(outputs.grammar)


def _structural_tag(outputs: StructuredOutputs, builder: GrammarBuilder) -> str:
    return tag_rule(builder, json.loads(outputs.structural_tag))


_EXPRESSIONS: dict[str, Callable[[StructuredOutputs, GrammarBuilder], str]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}

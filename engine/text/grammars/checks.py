"""Check a constraint with llguidance, and find the part of a JSON schema that it refuses."""

from __future__ import annotations

import json
import time
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.protocol.structured_outputs import StructuredOutputs
from engine.text.grammars.lark import GrammarBuilder
from engine.text.grammars.schemas import subschemas
from engine.text.grammars.translation import translate

MAX_ERROR_CHARS = 400
SEARCH_SECONDS = 1.0  # to find the subschema at fault
# llguidance's texts that name its own options, and what to tell the caller instead.
_EXPLAINED = {
    "oneOf constraints are not supported": "oneOf is supported only where its alternatives exclude each other by type, "
    "by constants, or by constants of a required property; use anyOf",
}


def parser_limits() -> LLParserLimits:
    """Return the limits of one grammar: what a step may cost its neighbours, and what its states may take.

    A mask takes about 5 ms at most (`step_*`), and the states of a matcher about 40 MB.
    """
    return LLParserLimits(
        step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=20_000, verbose_errors=False
    )  # fmt: skip


def check(outputs: StructuredOutputs, tokenizer: LLTokenizer) -> tuple[LLMatcher | None, str, str]:
    """Return the compiled constraint, its grammar and "", or None, "" and the reason why it is refused.

    The reason is text to follow the field's name.
    """
    try:
        grammar = translate(outputs, tokenizer)
    except RecursionError:
        return None, "", " is nested too deeply"
    except ValueError as refusal:
        reason = _short(str(refusal))
        return None, "", reason if reason.startswith(".") else f": {reason}"
    matcher = _compiled(grammar, tokenizer)
    if not matcher.is_error():
        return matcher, grammar, ""
    error = matcher.get_error()
    path = _failing_path(json.loads(outputs.json), error, tokenizer) if outputs.kind == "json" else ""
    return None, "", f"{path}: {_short(error)}"


def _compiled(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a grammar and compute the first mask, where some limits show. The matcher has the error, if any."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _failing_path(schema: Any, error: str, tokenizer: LLTokenizer) -> str:
    """Return the path of the innermost subschema that is refused with the same error by itself.

    A subschema without references is preferred to one that may refer to the one at fault. Ends after SEARCH_SECONDS.
    """
    found, best = "", (False, 0)
    wanted, until = _cause(error), time.monotonic() + SEARCH_SECONDS
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema}
    for path, part in subschemas(schema):
        if time.monotonic() > until:
            break
        rank = ('"$ref"' not in json.dumps(part), path.count(".") + path.count("["))
        if rank > best:
            builder = GrammarBuilder(tokenizer)
            alone = builder.build(builder.schema({**shared, **part}))
            if _cause(_compiled(alone, tokenizer).get_error()) == wanted:
                found, best = path, rank
    return found


def _cause(error: str) -> str:
    return error.partition("while processing")[0].strip()


def _short(error: str) -> str:
    text = " ".join(_cause(error.replace("<non-verbose/>", "")).split())
    text = next((reason for start, reason in _EXPLAINED.items() if text.startswith(start)), text)
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}…"

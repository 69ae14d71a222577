"""Check a constraint with llguidance, and find the part of a JSON schema or structural tag that it refuses."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import time
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.protocol.structured_outputs import StructuredOutputs
from engine.text.grammars.lark import GrammarBuilder
from engine.text.grammars.schemas import subschemas, tag_parts, without_unreadable
from engine.text.grammars.structural_tags import PartError
from engine.text.grammars.translation import BudgetError, translate, whitespace_options

MAX_ERROR_CHARS = 400
SEARCH_SECONDS = 1.0  # to find the part at fault
_UNSUPPORTED_REGEX = ("not supported", "unrecognized escape sequence")  # in errors of valid regular expressions
# llguidance's texts that name its own parts and options -> what to tell the caller instead.
_PLAIN = [
    (re.compile(pattern, re.DOTALL), text)
    for pattern, text in (
        (r"<non-verbose/>|\n\s*\d+ \| .*", ""),  # the lines of a grammar around the error
        (r'invalid regex ".*" \(in regex\): ', "invalid regular expression: "),
        (r"(invalid regular expression: )?regex parse error:\n.*\nerror: ", "invalid regular expression: "),
        (r"lookarounds not supported yet.*", "look-around and word boundaries are not supported"),
        (
            r"^oneOf constraints are not supported.*",
            "oneOf is supported only where its alternatives exclude each other by type, by constants, or by constants "
            "of a required property; use anyOf",
        ),
        (r"^NoExtensionBias.*", "no output can follow it"),
        (r"^panic: .*", "too large or too complex to compile; simplify it"),
        (r"^recursion limit exceeded.*", "nested too deeply; flatten it"),
        (r"^Resource .*", "references to other documents are not supported; use $defs"),
    )
]
_POSITION = re.compile(r"^(?:at )?(\d+)\(\d+\): ")  # a line and column of a grammar


class Refusal(NamedTuple):
    """Why a constraint is refused: `reason` follows the name of the caller's field `place`, "" for the constraint's."""

    reason: str
    place: str = ""


def parser_limits() -> LLParserLimits:
    """Return the limits of one grammar: what a step may cost its neighbours, and what its states may take.

    A mask takes about 5 ms at most (`step_*`), and the states of a matcher about 40 MB.
    """
    return LLParserLimits(
        step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=20_000, verbose_errors=False
    )  # fmt: skip


def check(outputs: StructuredOutputs, tokenizer: LLTokenizer) -> tuple[LLMatcher | None, str, Refusal | None]:
    """Return the compiled constraint and its grammar, or why it is refused."""
    try:
        matcher, grammar = _built(outputs, tokenizer)
        if matcher.is_error() and (relaxed := _relaxed(outputs, tokenizer)) != outputs:
            outputs = relaxed
            matcher, grammar = _built(outputs, tokenizer)
    except RecursionError:
        return None, "", Refusal(" is nested too deeply")
    except BudgetError as error:
        return None, "", Refusal(f": {error}", "thinking_token_budget")
    except PartError as error:
        return None, "", Refusal(explained(str(error)), error.place)
    except ValueError as error:
        reason = explained(str(error))
        return None, "", Refusal(reason if reason.startswith((".", ":")) else f": {reason}")
    if matcher.is_error():
        return None, "", _refusal(outputs, matcher.get_error(), tokenizer)
    return matcher, grammar, None


def explained(error: str, grammar: str = "") -> str:
    """Return an error of llguidance for the caller. `grammar`: the caller's, in which the error has a line."""
    is_lark = grammar and "::=" not in grammar  # another one was converted
    text = _POSITION.sub(r"line \1: " if is_lark else "", _cause(error))
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    text = " ".join(text.split())
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}…"


def _built(outputs: StructuredOutputs, tokenizer: LLTokenizer) -> tuple[LLMatcher, str]:
    grammar = translate(outputs, tokenizer)
    return _compiled(grammar, tokenizer), grammar


def _compiled(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a grammar and compute the first mask, where some limits show. The matcher has the error, if any."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _schema_error(schema: Any, tokenizer: LLTokenizer, **options: Any) -> str:
    """Return the error of a JSON schema by itself; "" without one."""
    builder = GrammarBuilder(tokenizer)
    try:
        return _compiled(builder.build(builder.schema(schema, **options)), tokenizer).get_error()
    except ValueError as error:
        return str(error)


def _relaxed(outputs: StructuredOutputs, tokenizer: LLTokenizer) -> StructuredOutputs:
    """Return a structural tag whose lenient schemas are without what llguidance can't follow and refuses anyway."""
    if outputs.kind != "structural_tag":
        return outputs

    @functools.cache
    def is_readable(pattern: str) -> bool:
        error = _schema_error({"type": "string", "pattern": pattern}, tokenizer)
        return not any(reason in error for reason in _UNSUPPORTED_REGEX)

    tag = json.loads(outputs.structural_tag)
    for _, part in tag_parts(tag):
        if part.get("lenient"):
            part["json_schema"] = without_unreadable(part["json_schema"], is_readable)
    return dataclasses.replace(outputs, structural_tag=tag)


def _refusal(outputs: StructuredOutputs, error: str, tokenizer: LLTokenizer) -> Refusal:
    """Return why a constraint is refused that `error` is about, with the path of the part at fault."""
    if outputs.kind == "structural_tag":
        return _refusal_of_part(outputs, tokenizer) or Refusal(f": {explained(error)}")
    if outputs.whitespace_pattern is not None:
        if found := _schema_error({}, tokenizer, **whitespace_options(outputs)):
            return Refusal(f": {explained(found)}", outputs.place_of("whitespace_pattern"))
    path = _failing_path(json.loads(outputs.json), error, tokenizer) if outputs.kind == "json" else ""
    return Refusal(f"{path}: {explained(error, outputs.grammar or '')}")


def _refusal_of_part(outputs: StructuredOutputs, tokenizer: LLTokenizer) -> Refusal | None:
    """Return why the first part of a structural tag that is refused by itself is refused."""
    until = time.monotonic() + SEARCH_SECONDS
    for path, part in tag_parts(json.loads(outputs.structural_tag)):
        if time.monotonic() > until:
            break
        matcher, _ = _built(StructuredOutputs(structural_tag={"format": part}), tokenizer)
        if not matcher.is_error():
            continue
        error, inner = matcher.get_error(), ""
        if part["type"] == "json_schema":
            inner = _failing_path(part["json_schema"], error, tokenizer, lenient=part.get("lenient", False))
        place = part.get("place", "")
        return Refusal(f"{'' if place else path}{inner}: {explained(error, part.get('grammar', ''))}", place)
    return None


def _failing_path(schema: Any, error: str, tokenizer: LLTokenizer, lenient: bool = False) -> str:
    """Return the path of the innermost subschema that is refused with the same error by itself.

    A subschema without references is preferred to one that may refer to the one at fault. Ends after SEARCH_SECONDS.
    """
    if "recursion limit" in error:  # of the whole schema
        return ""
    found, best = "", (False, 0)
    wanted, until = _cause(error), time.monotonic() + SEARCH_SECONDS
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema}
    for path, part in subschemas(schema):
        if time.monotonic() > until:
            break
        rank = ('"$ref"' not in json.dumps(part), path.count(".") + path.count("["))
        if rank > best:
            if _cause(_schema_error({**shared, **part}, tokenizer, **({"lenient": True} if lenient else {}))) == wanted:
                found, best = path, rank
    return found


def _cause(error: str) -> str:
    return error.partition("while processing")[0].strip()

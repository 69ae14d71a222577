"""Build a grammar for llguidance from expressions in its Lark dialect.

Tokens that continue a forced text are not chosen for the model (`no_forcing`): a mask allows every token that the
grammar does, so that sampling follows the model's own distribution over them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llguidance import LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from engine.text.grammars.closing import Closing, close_objects
from engine.text.grammars.keywords import exact, string_options

WHITESPACE = r"(\x20|\x0D?\x0A(\x20{0,40}|\x09{0,10}))?"
"""Whitespace between JSON tokens: nothing, a space, or a line break and an indentation of up to ten levels of 4.

A weak model may otherwise write line breaks to max_tokens.
"""

_HEADER = '%llguidance {"no_forcing": true}'
# Digits and word characters are ASCII, as in JavaScript and JSON schemas.
_ASCII_CLASSES = "dw"
_FREE_TEXT = r"/(.|\n)*/"


class GrammarBuilder:
    """Collects the parts of one grammar. Its methods return Lark expressions; `build` joins them.

    `tokenizer` tells special tokens from text.
    """

    def __init__(self, tokenizer: LLTokenizer):
        self._tokenizer = tokenizer
        self._rules: list[str] = []
        self._named: list[dict[str, Any]] = []

    def build(self, start: str) -> str:
        """Return the grammar of an expression as llguidance's JSON text."""
        lines = [_HEADER, f"start: {start}", *self._rules]
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *self._named]})

    def literal(self, text: str) -> str:
        """Match `text` by ordinary tokens, whatever its characters are."""
        return f"/{escaped(text)}/" if text else '""'

    def text(self, text: str) -> str:
        """Match `text`, in which the spelling of a special token stands for the token."""
        parts: list[str] = []
        run = bytearray()
        for token_id in self._tokenizer.tokenize_str(text, parse_special=True) if text else ():
            if self._tokenizer.is_special_token(token_id):
                parts += [self.literal(run.decode())] if run else []
                parts.append(f"<[{token_id}]>")
                run.clear()
            else:
                run += self._tokenizer.decode_bytes([token_id])
        if run or not parts:
            parts.append(self.literal(run.decode()))
        return f"({' '.join(parts)})" if len(parts) > 1 else parts[0]

    def regex(self, regex: str) -> str:
        """Match a regular expression."""
        return f"/{regex_to_lark(regex, _ASCII_CLASSES)}/"

    def schema(self, schema: Any, closing: Closing | None = None, lenient: bool = False, **options: Any) -> str:
        """Match JSON that follows a schema. `options`: llguidance's x-guidance.

        `lenient`: leave out keywords that can't be followed. Raises ValueError with the path of such a part otherwise,
        and for false.
        """
        if schema is False:
            raise ValueError(": the schema is false, which no value satisfies")
        schema = {} if schema is True else schema
        if closing is not None:
            schema = close_objects(schema, closing, lenient)
        schema = exact(schema, lenient)
        options = {"whitespace_pattern": WHITESPACE, "lenient": lenient, **string_options(schema, lenient), **options}
        # The caller's own x-guidance could switch off the refusal of unsupported keywords.
        return self._name({"json_schema": {**schema, "x-guidance": options}})

    def grammar(self, text: str) -> str:
        """Match a grammar in Lark or GBNF. Raises ValueError if it is neither."""
        try:
            return self._name({"lark_grammar": any_to_lark(text)})
        except RecursionError as error:
            raise ValueError("the grammar is nested too deeply") from error
        except Exception as error:  # the converter raises bare Exceptions for errors of the grammar
            raise ValueError(f"the grammar is neither Lark (with a rule `start`) nor GBNF: {error}") from error

    def free_text(self, excluded: Sequence[str] = ()) -> str:
        """Match any text of ordinary tokens in which none of the `excluded` texts is spelled."""
        if not excluded:
            return _FREE_TEXT
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: {_FREE_TEXT} & ~/(.|\\n)*({'|'.join(map(escaped, excluded))})(.|\\n)*/")
        return name

    def starts_special(self, text: str) -> bool:
        """Whether `text` begins with the spelling of a special token."""
        ids = self._tokenizer.tokenize_str(text, parse_special=True)
        return bool(ids) and self._tokenizer.is_special_token(ids[0])

    def free_text_until(self, end: str, excluded: Sequence[str] = ()) -> str:
        """Match the shortest text of ordinary tokens that ends with `end`, which may begin with a special token.

        The text before a special token spells none of the `excluded` texts.
        """
        if self.starts_special(end):
            return f"({self.free_text(excluded)} {self.text(end)})"
        ids = self._tokenizer.tokenize_str(end, parse_special=True)
        if any(map(self._tokenizer.is_special_token, ids)):
            raise ValueError(f"{end!r} has a special token after text; only at its beginning can it be searched for")
        name = f"until_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: /(.|\\n)*{escaped(end)}/")
        return name

    def tokens_until(self, end: str, limit: int) -> str:
        """Match at most `limit` ordinary tokens and then the token `end`. Raises ValueError if it isn't one token."""
        ids = self._tokenizer.tokenize_str(end, parse_special=True)
        if len(ids) != 1:
            raise ValueError(f"{end} is {len(ids)} tokens of the model, and must be one")
        excluded = [index for index in range(self._tokenizer.vocab_size) if self._tokenizer.is_special_token(index)]
        ranges, start = [], 0
        for stop in [*sorted({*excluded, ids[0]}), self._tokenizer.vocab_size]:
            if stop > start:
                ranges.append(f"{start}-{stop - 1}")
            start = stop + 1
        return f"(<[{','.join(ranges)}]>{{0,{limit}}} <[{ids[0]}]>)"

    def _name(self, grammar: dict[str, Any]) -> str:
        name = f"part{len(self._named)}"
        self._named.append({"name": name, **grammar})
        return f"@{name}"


def escaped(text: str) -> str:
    """Return `text` as a regular expression that needs no further escapes."""
    return "".join(f"\\x{{{ord(char):X}}}" for char in text)

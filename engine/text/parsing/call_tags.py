"""Tool calls as structural tags, in each of the formats that the parsers read: what makes calls follow their schemas.

A structural tag is a JSON value with vLLM's and xgrammar's names (engine/text/grammars/structural_tags.py).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.errors import RequestError
from engine.protocol.structured_outputs import Reasoning, StructuredOutputs
from engine.text.grammars.schemas import tag_parts
from engine.text.parsing.call_schemas import (
    choices_of,
    fits_tag,
    properties_of,
    refuse_strict,
    required_of,
    tells_nothing,
    types_of,
)
from engine.text.parsing.formats import Format
from engine.text.parsing.pythonic import KEYWORD
from engine.text.parsing.tool_use import ToolUse

Tag = dict[str, Any]
ANY_TEXT: Tag = {"type": "any_text"}


def constrained(
    format_: type[Format] | None, use: ToolUse | None, answer: StructuredOutputs | None, reasoning: Reasoning | None,
    has_special: Callable[[str], bool], closes_arguments: bool = True,
) -> StructuredOutputs | None:  # fmt: skip
    """Return the constraint of a chat output; None if there is nothing to enforce.

    Calls are enforced if they are required or a function is strict. Otherwise the output may be `answer`, or any text,
    or calls. `has_special` says whether a marker is a special token. `closes_arguments`: the arguments of functions
    that aren't strict have declared properties only, too. Raises RequestError.
    """
    if format_ is None or use is None or (answer is None and not use.required and not use.strict):
        if answer is not None:
            return _with_reasoning(answer, reasoning)
        if reasoning is None or reasoning.budget is None:
            return None
        tag, field = ANY_TEXT, "thinking_token_budget"
    else:
        calls = CallTags(use, has_special, closes_arguments)
        header, field = format_.answer_header, "tools"
        if use.required:
            tag = calls.only(format_)
        elif answer is None:
            tag = calls.within_text(format_)
        else:
            own = _sequence([_text(header), _as_tag(answer)]) if header else _as_tag(answer)
            tag, field = {"type": "or", "elements": [calls.only(format_), own]}, answer.field or "tools"
        if reasoning is not None and header:  # a call has another header than an answer
            reasoning = dataclasses.replace(reasoning, end=reasoning.end.removesuffix(header))
    return StructuredOutputs(structural_tag={"format": tag}, reasoning=reasoning, field=field)


class CallTags:
    """The structural tags of one request's calls."""

    def __init__(self, use: ToolUse, has_special: Callable[[str], bool], closes_arguments: bool = True):
        self._use, self._has_special, self._closes_arguments = use, has_special, closes_arguments

    def only(self, format_: type[Format]) -> Tag:
        """Return the format of an output that is one call or more. Raises RequestError."""
        self._refuse_unfollowed(format_)
        return _ONLY[format_.name](self)

    def _refuse_unfollowed(self, format_: type[Format]) -> None:
        if format_.name in ("qwen3_coder", "pythonic"):
            for name in sorted(self._use.strict & self._use.functions.keys()):
                refuse_strict(name, self._use.functions[name], format_.name, self._place(name))

    def within_text(self, format_: type[Format]) -> Tag:
        """Return the format of text that may hold calls."""
        self._refuse_unfollowed(format_)
        if format_.answer_header:  # every message has a header
            return {"type": "or", "elements": [self.only(format_), _sequence([_text(format_.answer_header), ANY_TEXT])]}
        if format_.first_openers:  # the whole output is calls, or text that doesn't begin like them
            first, anywhere = format_.first_openers[0], re.escape(format_.openers[0])
            text: Tag = {"type": "regex", "pattern": rf"[^\s\{first}](.|\n)*"}
            if not self._has_special(format_.openers[0]):  # free text holds no special tokens, but may spell others
                start, within = rf"/[^\s\{first}](.|\n)*/", f"/(.|\\n)*{anywhere}(.|\\n)*/"
                text = {"type": "grammar", "grammar": f"start: TEXT\nTEXT: {start} & ~{within}\n"}
            return {"type": "or", "elements": [self.only(format_), text, _text("")]}
        return {
            "type": "triggered_tags", "triggers": list(format_.openers), "tags": _TAGS[format_.name](self),
            "stop_after_first": self._use.max_calls == 1,
        }  # fmt: skip

    def _separated(self, tags: list[Tag], separator: str) -> Tag:
        return {
            "type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": True,
            "stop_after_first": self._use.max_calls == 1,
        }  # fmt: skip

    def _place(self, function: str) -> str:
        return self._use.places.get(function, "tools")

    def _place_of(self, function: str, parameter: str) -> str:
        return f"{self._place(function)}.properties.{parameter}"

    def _value(self, function: str, schema: Mapping[str, Any], place: str) -> Tag:
        """Return the format of a JSON value: all of its schema is followed if the function is strict."""
        is_lenient = function not in self._use.strict
        tag = {"type": "json_schema", "json_schema": dict(schema), "lenient": is_lenient, "place": place}
        if is_lenient and not self._closes_arguments:
            return tag
        return {**tag, "closed": "declared" if is_lenient else "strict"}

    def _arguments(self, function: str) -> Tag:
        schema = self._use.functions[function]
        if "type" not in schema and "$ref" not in schema:
            schema = {"type": "object", **schema}
        if not _IN_PLACE & schema.keys():
            schema = {"properties": {}, **schema}  # without properties, a function has no parameters
        return self._value(function, schema, self._place(function))

    def _json_tags(self, before: str, key: str, after: str) -> list[Tag]:
        return [
            {
                "type": "tag", "begin": f'{before}{{"name": {json.dumps(name)}, "{key}": ',
                "content": self._arguments(name), "end": "}" + after,
            }
            for name in self._use.functions
        ]  # fmt: skip

    def hermes(self) -> list[Tag]:
        """Return the tags of Hermes' calls."""
        return self._json_tags("<tool_call>\n", "arguments", "\n</tool_call>")

    def mistral(self) -> list[Tag]:
        """Return the tags of Mistral's calls: by name in models that know [ARGS], else in lists of one."""
        if not self._has_special("[ARGS]"):
            return self._json_tags("[TOOL_CALLS][", "arguments", "]")
        return [
            {"type": "tag", "begin": f"[TOOL_CALLS]{name}[ARGS]", "content": self._arguments(name), "end": ""}
            for name in self._use.functions
        ]

    def qwen3_coder(self) -> list[Tag]:
        """Return the tags of Qwen3-Coder's calls. Parameters come in the order of their schema."""
        return self._qwen3_tags("<tool_call>\n", "\n</tool_call>")

    def qwen3_coder_within_text(self) -> list[Tag]:
        """Return the tags of Qwen3-Coder's calls, which its models also write without `<tool_call>`."""
        return [*self.qwen3_coder(), *self._qwen3_tags("", "")]

    def _qwen3_tags(self, before: str, after: str) -> list[Tag]:
        return [
            {
                "type": "tag", "begin": f"{before}<function={name}>\n",
                "content": {"type": "sequence", "elements": self._parameters(name)},
                "end": f"</function>{after}",
            }
            for name in self._use.functions
        ]  # fmt: skip

    def only_hermes(self) -> Tag:
        """Return the format of an output of Hermes' calls."""
        return self._separated(self.hermes(), "\n")

    def only_mistral(self) -> Tag:
        """Return the format of an output of Mistral's calls."""
        if self._has_special("[ARGS]"):
            return self._separated(self.mistral(), "")
        calls = self._separated(self._json_tags("", "arguments", ""), ", ")
        return _sequence([_text("[TOOL_CALLS]["), calls, _text("]")])

    def only_llama3(self) -> Tag:
        """Return the format of an output of Llama 3's calls."""
        return self._separated(self._json_tags("", "parameters", ""), "; ")

    def only_qwen3_coder(self) -> Tag:
        """Return the format of an output of Qwen3-Coder's calls."""
        return self._separated(self.qwen3_coder(), "\n")

    def only_harmony(self) -> Tag:
        """Return the format of an output of Harmony's calls: one, after which the model stops."""
        header = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
        tags = [
            {"type": "tag", "begin": header.format(name), "content": self._arguments(name), "end": ""}
            for name in self._use.functions
        ]
        return {"type": "or", "elements": tags}

    def only_pythonic(self) -> Tag:
        """Return the format of an output that is a list of Python calls."""
        tags = [
            {"type": "tag", "begin": f"{name}(", "content": self._keywords(name), "end": ")"}
            for name in self._use.functions
        ]
        return _sequence([_text("["), self._separated(tags, ", "), _text("]")])

    def _parameters(self, function: str) -> list[Tag]:
        required = required_of(self._use.functions[function])
        elements = [_text("")]
        for key, schema in properties_of(self._use.functions[function]).items():
            if not fits_tag(key):
                continue
            tag = {
                "type": "tag", "begin": f"<parameter={key}>\n", "content": self._untagged(function, key, schema),
                "end": "\n</parameter>\n",
            }  # fmt: skip
            elements.append(tag if key in required else {"type": "or", "elements": [tag, _text("")]})
        return elements

    def _untagged(self, function: str, key: str, schema: Mapping[str, Any]) -> Tag:
        """Return the format of a value between tags: strings are written without quotes."""
        place = self._place_of(function, key)
        if tells_nothing(schema):  # the parser reads objects and arrays as JSON, and the rest as a string
            return ANY_TEXT
        if types_of(schema, schema) != {"string"}:
            return self._value(function, schema, place)
        choices = choices_of(schema, schema)
        if choices is not None:
            return {"type": "or", "elements": [_text(one) for one in choices]}
        is_strict = function in self._use.strict
        if is_strict and isinstance(schema.get("pattern"), str):
            return {"type": "regex", "pattern": _unanchored(schema["pattern"]), "place": f"{place}.pattern"}
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if _is_length(low) and (high is None or _is_length(high)) and (low or high is not None):
            return {"type": "regex", "pattern": f"[^<]{{{low},{'' if high is None else high}}}", "place": place}
        return ANY_TEXT

    def _keywords(self, function: str) -> Tag:
        """Return the format of keyword arguments: the required ones in order, then the optional ones that are given.

        Leaves out parameters whose names can't be written as keywords.
        """
        schema = self._use.functions[function]
        required = required_of(schema)
        written = {
            key: _sequence([_text(f"{key}="), self._value(function, value, self._place_of(function, key))])
            for key, value in properties_of(schema).items()
            if KEYWORD.fullmatch(key)
        }
        first = [one for key, one in written.items() if key in required]
        others = [one for key, one in written.items() if key not in required]
        if first:
            elements = [first[0]]
            for one in first[1:]:
                elements += [_text(", "), one]
            return _sequence(elements + [_optional(_sequence([_text(", "), one])) for one in others])
        starts = [
            _sequence([one, *(_optional(_sequence([_text(", "), other])) for other in others[place + 1 :])])
            for place, one in enumerate(others)
        ]
        return {"type": "or", "elements": [*starts, _text("")]}


def _unanchored(pattern: str) -> str:
    """Return a pattern that matches the whole text where the given one finds a part that reaches to its anchors."""
    end = len(pattern) - len(pattern.rstrip("$"))
    escapes = len(pattern.rstrip("$")) - len(pattern.rstrip("$").rstrip("\\"))
    return (pattern[:-1] if end and not (end == 1 and escapes % 2) else pattern).removeprefix("^")


_IN_PLACE = {"$ref", "allOf", "anyOf", "oneOf"}


def _is_length(value: Any) -> bool:
    return type(value) is int and value >= 0


def _with_reasoning(answer: StructuredOutputs, reasoning: Reasoning | None) -> StructuredOutputs:
    return answer if reasoning is None else dataclasses.replace(answer, reasoning=reasoning)


def _as_tag(answer: StructuredOutputs) -> Tag:
    """Return a constraint as a structural tag, to be one of several possible outputs."""
    if answer.disable_any_whitespace or answer.whitespace_pattern:
        raise RequestError(
            "whitespace options of structured_outputs can't be combined with tools: remove them",
            param="structured_outputs",
        )
    place = answer.place_of(answer.kind)
    match answer.kind:
        case "json":
            closed = {"closed": "strict"} if answer.disable_additional_properties else {}
            return {"type": "json_schema", "json_schema": json.loads(answer.json), "place": place, **closed}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": answer.regex, "place": place}
        case "choice":
            return {"type": "or", "elements": [_text(one) for one in answer.choice or ()]}
        case "grammar":
            return {"type": "grammar", "grammar": answer.grammar, "place": place}
    tag = json.loads(answer.structural_tag)
    if "format" not in tag:
        raise RequestError("a structural tag without format can't be combined with tools", param="structured_outputs")
    for path, part in tag_parts(tag):
        part["place"] = f"{place}{path}"
    return tag["format"]


def _text(value: str) -> Tag:
    return {"type": "const_string", "value": value}


def _sequence(elements: Sequence[Tag]) -> Tag:
    return {"type": "sequence", "elements": list(elements)}


def _optional(tag: Tag) -> Tag:
    return {"type": "or", "elements": [tag, _text("")]}


_TAGS: Mapping[str, Callable[[CallTags], list[Tag]]] = {
    "hermes": CallTags.hermes,
    "mistral": CallTags.mistral,
    "qwen3_coder": CallTags.qwen3_coder_within_text,
}
_ONLY: Mapping[str, Callable[[CallTags], Tag]] = {
    "hermes": CallTags.only_hermes,
    "llama3_json": CallTags.only_llama3,
    "pythonic": CallTags.only_pythonic,
    "mistral": CallTags.only_mistral,
    "qwen3_coder": CallTags.only_qwen3_coder,
    "harmony": CallTags.only_harmony,
}

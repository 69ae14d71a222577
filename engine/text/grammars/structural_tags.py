"""Translate a structural tag, as vLLM and xgrammar define it, to rules of a Lark grammar.

In the texts of a tag, the spelling of a special token stands for the token itself: a parser of the output looks for the
token. Free text holds no special tokens.

Tags of tool calls have more keys. `lenient`: keywords of the schema that can't be followed are ignored. `closed`: which
objects allow only the properties that they name, "strict" or "declared" (closing.py). `place`: the field of the
caller's request that a part is made of, for error messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.text.grammars.closing import CLOSINGS
from engine.text.grammars.lark import GrammarBuilder

MAX_DEPTH = 64


class PartError(ValueError):
    """A JSON schema in a tag can't be followed. The message follows `place`, or begins with the path in the tag."""

    def __init__(self, message: str, place: str):
        super().__init__(message)
        self.place = place


def tag_rule(builder: GrammarBuilder, tag: Mapping[str, Any]) -> str:
    """Return the Lark expression of a structural tag: {"format": …}, or {"structures": […], "triggers": […]}.

    Raises ValueError that begins with the path of what is invalid, such as ".format.tags[0].begin must be …".
    """
    return _Tags(builder).top(tag)


class _Tags:
    def __init__(self, builder: GrammarBuilder):
        self._builder = builder
        self._formats: dict[str, Callable[[Mapping[str, Any], str, int], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def top(self, tag: Mapping[str, Any]) -> str:
        if tag.get("type", "structural_tag") != "structural_tag":
            raise ValueError(f'.type must be "structural_tag"; found {tag["type"]!r}')
        if "format" in tag:
            _known(tag, "", ("type", "format"))
            return self._format(tag["format"], ".format", 0)
        _known(tag, "", ("type", "structures", "triggers"))
        structures = _list(tag, "structures", "")
        tags = []
        for number, structure in enumerate(structures):
            path = f".structures[{number}]"
            _object(structure, path)
            _known(structure, path, ("begin", "schema", "end"))
            content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
            tags.append({"type": "tag", "begin": structure.get("begin"), "content": content, "end": structure["end"]
                         if "end" in structure else ""})  # fmt: skip
        return self._triggered_tags({"triggers": tag.get("triggers"), "tags": tags}, "", 0, name="structures")

    def _format(self, value: Any, path: str, depth: int) -> str:
        _object(value, path)
        if depth > MAX_DEPTH:
            raise ValueError(f"the tag is nested more than {MAX_DEPTH} deep")
        kind = value.get("type")
        if kind not in self._formats:
            raise ValueError(f"{path}.type must be one of {', '.join(self._formats)}; found {kind!r}")
        return self._formats[kind](value, path, depth + 1)

    # ---- single parts ----------------------------------------------------------------------------------------------

    def _const_string(self, value: Mapping[str, Any], path: str, depth: int) -> str:
        _known(value, path, ("type", "value"))
        return self._builder.text(_text(value, "value", path, may_be_empty=True))

    def _json_schema(self, value: Mapping[str, Any], path: str, depth: int) -> str:
        _known(value, path, ("type", "json_schema", "lenient", "closed", "place"))
        schema = value.get("json_schema")
        if not isinstance(schema, (dict, bool)):
            raise ValueError(f"{path}.json_schema must be a JSON schema; found {schema!r}")
        closing, place = value.get("closed"), value.get("place", "")
        if closing not in (None, *CLOSINGS):
            raise ValueError(f"{path}.closed must be one of {', '.join(CLOSINGS)}; found {closing!r}")
        try:
            return self._builder.schema(schema, closing, _flag(value, "lenient", path))
        except ValueError as error:
            raise PartError(f"{'' if place else f'{path}.json_schema'}{error}", place) from error

    def _regex(self, value: Mapping[str, Any], path: str, depth: int) -> str:
        _known(value, path, ("type", "pattern", "place"))
        return self._builder.regex(_text(value, "pattern", path))

    def _grammar(self, value: Mapping[str, Any], path: str, depth: int) -> str:
        _known(value, path, ("type", "grammar", "place"))
        return self._builder.grammar(_text(value, "grammar", path))

    def _any_text(self, value: Mapping[str, Any], path: str, depth: int) -> str:
        _known(value, path, ("type", "excludes"))
        return self._builder.free_text(self._excludes(value, path))

    def _excludes(self, value: Mapping[str, Any], path: str) -> list[str]:
        found = value.get("excludes", [])
        if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
            raise ValueError(f"{path}.excludes must be a list of non-empty strings; found {found!r}")
        return found

    # ---- combinations ----------------------------------------------------------------------------------------------

    def _sequence(self, value: Mapping[str, Any], path: str, depth: int) -> str:
        _known(value, path, ("type", "elements"))
        return f"({' '.join(self._elements(value, path, depth))})"

    def _or(self, value: Mapping[str, Any], path: str, depth: int) -> str:
        _known(value, path, ("type", "elements"))
        return f"({' | '.join(self._elements(value, path, depth))})"

    def _elements(self, value: Mapping[str, Any], path: str, depth: int) -> list[str]:
        elements = _list(value, "elements", path)
        return [self._format(one, f"{path}.elements[{number}]", depth) for number, one in enumerate(elements)]

    def _tag(self, value: Mapping[str, Any], path: str, depth: int) -> str:
        return self._tag_after(value, path, depth, "")

    def _tag_after(self, value: Mapping[str, Any], path: str, depth: int, trigger: str) -> str:
        """Return a tag's expression without the `trigger` that it begins with."""
        _object(value, path)
        _known(value, path, ("type", "begin", "content", "end"))
        if value.get("type", "tag") != "tag":
            raise ValueError(f'{path}.type must be "tag"; found {value["type"]!r}')
        begin = self._builder.text(_text(value, "begin", path, may_be_empty=True).removeprefix(trigger))
        ends = value.get("end", "")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(one, str) for one in ends):
            raise ValueError(f"{path}.end must be a string or a list of strings; found {value.get('end')!r}")
        content: Any = value.get("content")
        _object(content, f"{path}.content")
        if content.get("type") == "any_text" and any(ends):
            _known(content, f"{path}.content", ("type",))
            rest = " | ".join(self._builder.free_text_until(one) for one in ends)
            return f"({begin} ({rest}))"
        end = " | ".join(self._builder.text(one) for one in ends)
        return f"({begin} {self._format(content, f'{path}.content', depth)} ({end}))"

    def _triggered_tags(self, value: Mapping[str, Any], path: str, depth: int, name: str = "tags") -> str:
        _known(value, path, ("type", "triggers", "tags", "at_least_one", "stop_after_first"))
        triggers, tags = _list(value, "triggers", path), _list(value, "tags", path)
        # A parser of the output would take the spelling of a marker for the marker.
        spelled = [one for one in triggers if isinstance(one, str) and one and self._builder.starts_special(one)]
        rules: list[str] = []
        for number, tag in enumerate(tags):
            place = f"{path}.{name}[{number}]"
            _object(tag, place)
            begin = _text(tag, "begin", place)
            matching = [one for one in triggers if isinstance(one, str) and one and begin.startswith(one)]
            if not matching:
                raise ValueError(f"{place}.begin must start with one of the triggers; found {begin!r}")
            head = self._builder.free_text_until(matching[0], spelled)
            rules.append(f"({head} {self._tag_after(tag, place, depth, matching[0])})")
        return self._repeated(value, path, " | ".join(rules), self._builder.free_text(triggers))

    def _repeated(self, value: Mapping[str, Any], path: str, one: str, text: str) -> str:
        at_least_one, only_one = _flag(value, "at_least_one", path), _flag(value, "stop_after_first", path)
        if only_one:
            return f"({one})" if at_least_one else f"({one} | {text})"
        return f"(({one}){'+' if at_least_one else '*'} {text})"

    def _tags_with_separator(self, value: Mapping[str, Any], path: str, depth: int) -> str:
        _known(value, path, ("type", "tags", "separator", "at_least_one", "stop_after_first"))
        tags = _list(value, "tags", path)
        one = " | ".join(self._tag(tag, f"{path}.tags[{number}]", depth) for number, tag in enumerate(tags))
        separator = self._builder.text(_text(value, "separator", path, may_be_empty=True))
        at_least_one = _flag(value, "at_least_one", path)
        many = f"({one})" if _flag(value, "stop_after_first", path) else f"(({one}) ({separator} ({one}))*)"
        return many if at_least_one else f'({many} | "")'


def _known(value: Mapping[str, Any], path: str, known: Sequence[str]) -> None:
    for name in value:
        if name not in known:
            raise ValueError(f"{path} has an unsupported key {name!r}; supported: {', '.join(known)}")


def _object(value: Any, path: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{path} must be an object; found {value!r}")


def _list(value: Mapping[str, Any], name: str, path: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{path}.{name} must be a non-empty list; found {found!r}")
    return found


def _text(value: Mapping[str, Any], name: str, path: str, may_be_empty: bool = False) -> str:
    found = value.get(name)
    if not isinstance(found, str) or not (found or may_be_empty):
        raise ValueError(f"{path}.{name} must be a {'' if may_be_empty else 'non-empty '}string; found {found!r}")
    return found


def _flag(value: Mapping[str, Any], name: str, path: str) -> bool:
    found = value.get(name, False)
    if not isinstance(found, bool):
        raise ValueError(f"{path}.{name} must be true or false; found {found!r}")
    return found

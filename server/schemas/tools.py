"""The fields `tools` and `tool_choice` of chat requests: checks, and what they allow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import RequestError
from engine.text.parsing.tool_use import ToolUse
from graph_cache.utils.validation import did_you_mean

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256
MAX_NESTING = 200  # levels of objects and lists in a tool; chat templates fail at some hundreds
_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_NAME_CHARS}}}")

_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
        "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "parameters": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["name"],
}
_TEMPLATE_KEYS = ("return", "response")  # of a function, which some chat templates read
_FUNCTION_KEYS = (*_FUNCTION["properties"], *_TEMPLATE_KEYS)
_NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
_CHOICE_OBJECT = {
    "type": "object",
    "properties": {
        "type": {"enum": ["function", "allowed_tools"]}, "function": _NAMED,
        "allowed_tools": {
            "type": "object",
            "properties": {"mode": {"enum": ["auto", "required"]}, "tools": {"type": "array", "items": _NAMED}},
        },
    },
    "required": ["type"],
}  # fmt: skip
TOOLS_SCHEMA = {
    "anyOf": [
        {
            "type": "array", "maxItems": MAX_TOOLS,
            "items": {
                "type": "object", "properties": {"type": {"const": "function"}, "function": _FUNCTION},
                "required": ["type", "function"],
            },
        },
        {"type": "null"},
    ]
}  # fmt: skip
TOOL_CHOICE_SCHEMA = {
    "anyOf": [{"enum": ["none", "auto", "required"]}, _CHOICE_OBJECT, {"type": "null"}],
}


def checked_tools(value: Any) -> list[dict[str, Any]]:
    """Return the tools of a request, in OpenAI's format. Raises RequestError that names the place of a mistake."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise RequestError(f"tools must be a list of at most {MAX_TOOLS} tools", param="tools")
    seen: set[str] = set()
    for index, tool in enumerate(value):
        _check_values(f"tools[{index}]", tool)
        name = _checked_function(f"tools[{index}]", tool)
        if name in seen:
            raise RequestError(f"tools[{index}].function.name {name!r} is used twice: rename one", param="tools")
        seen.add(name)
    return value


def _checked_function(place: str, tool: Any) -> str:
    if not isinstance(tool, dict):
        raise RequestError(f"{place} must be an object with a type and a function", param="tools")
    if tool.get("type") != "function":
        found = str(tool.get("type"))[:40]
        raise RequestError(
            f'{place}.type must be "function", found {found!r}; other tools are not supported', param="tools"
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{place}.function must be an object with a name", param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{place}.function.name must be 1 to {MAX_NAME_CHARS} letters, digits and any of _.:/-", param="tools"
        )
    _check_keys(place, tool)
    for key, kind, shown in (("description", str, "a string"), ("parameters", dict, "a JSON schema as an object"),
                             ("strict", bool, "true or false")):  # fmt: skip
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise RequestError(f"{place}.function.{key} must be {shown}", param="tools")
    kind = (function.get("parameters") or {}).get("type", "object")
    if kind != "object":
        raise RequestError(
            f'{place}.function.parameters.type must be "object", found {str(kind)[:40]!r}: arguments have names',
            param="tools",
        )
    return name


def _check_keys(place: str, tool: Mapping[str, Any]) -> None:
    """Refuse unknown keys of a function, and its keys beside it, where they would be ignored."""
    for key, found in tool["function"].items():
        if found is not None and key not in _FUNCTION_KEYS:
            hint = did_you_mean(key, _FUNCTION_KEYS) or "; remove it"
            raise RequestError(f"{place}.function.{key[:64]} is not a known field{hint}", param="tools")
    for key in _FUNCTION["properties"]:
        if tool.get(key) is not None:
            raise RequestError(f"{place}.{key} has no effect: use {place}.function.{key}", param="tools")


def _check_values(place: str, tool: Any) -> None:
    """Refuse what Python's JSON parser reads and a chat template, a grammar or UTF-8 can't take."""
    depth, level = 0, [tool] if isinstance(tool, (dict, list)) else []
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise RequestError(f"{place} is nested more than {MAX_NESTING} levels deep: flatten it", param="tools")
        level = [part for one in level for part in _parts(one)]
    try:
        json.dumps(tool, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{place} contains a lone surrogate, which is not valid Unicode", param="tools") from error
    except ValueError as error:
        raise RequestError(f"{place} contains NaN or an infinite number, which is not JSON", param="tools") from error


def _parts(value: dict[str, Any] | list[Any]) -> Iterator[Any]:
    """Return the objects and lists in an object or list."""
    values = value.values() if isinstance(value, dict) else value
    return (one for one in values if isinstance(one, (dict, list)))


def tool_use(tools: list[dict[str, Any]], choice: Any, parallel: bool | None) -> ToolUse | None:
    """Return how the output may use `tools`; None if it may not. Raises RequestError for an invalid choice."""
    functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    places = {tool["function"]["name"]: f"tools[{index}].function.parameters" for index, tool in enumerate(tools)}
    strict = frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict"))
    max_calls = 1 if parallel is False else None
    required = False
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "function":
            name = _name_of(choice, "tool_choice")
            functions, required, max_calls = _only(functions, [name]), True, 1
        elif kind == "allowed_tools":
            allowed = choice.get("allowed_tools")
            if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
                raise RequestError("tool_choice.allowed_tools needs a list of tools", param="tool_choice")
            functions = _only(functions, [_name_of(one, "tool_choice.allowed_tools.tools") for one in allowed["tools"]])
            required = _mode(allowed.get("mode", "auto"), ("auto", "required"), "tool_choice.allowed_tools.mode")
        else:
            raise RequestError(
                f'tool_choice.type must be "function" or "allowed_tools", found {str(kind)[:40]!r}', param="tool_choice"
            )
    elif choice == "none":
        return None
    elif choice is not None:
        required = _mode(choice, ("none", "auto", "required"), "tool_choice")
    if required and not functions:
        raise RequestError("tool_choice requires a call, but tools is empty: list the tools", param="tool_choice")
    if not functions:
        return None
    return ToolUse(
        functions=functions, places=places, strict=strict & functions.keys(), required=required, max_calls=max_calls
    )


def _mode(value: Any, allowed: tuple[str, ...], place: str) -> bool:
    if not isinstance(value, str) or value not in allowed:
        raise RequestError(f"{place} must be {', '.join(allowed)} or an object", param="tool_choice")
    return value == "required"


def _name_of(value: Any, place: str) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(f"{place} needs the name of a function: function.name", param="tool_choice")
    return name


def _only(functions: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    unknown = [name for name in names if name not in functions]
    if unknown:
        raise RequestError(f"tool_choice names {unknown[0][:80]!r}, which is not among tools", param="tool_choice")
    return {name: functions[name] for name in names}

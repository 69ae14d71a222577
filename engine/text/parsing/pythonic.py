"""Tool calls as a Python list of function calls: `[search(query="x", limit=3), now()]` (Llama 3.2, Llama 4)."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from engine.text.parsing.formats import Block, Closed, Format
from engine.text.parsing.json_values import to_json

MAX_HEAD_CHARS = 512
MAX_CHARS = 1_000_000  # Python's parser needs hundreds of bytes per character
_HEAD = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*(?:\(|$)|$)")  # also a beginning of it
_NEXT = re.compile(r"""[()\[\]{}"'\\]""")
_PAIRS = {")": "(", "]": "[", "}": "{"}
_JSON_NAMES = {"true": True, "false": False, "null": None}


class Pythonic(Format):
    """An answer that is a list of calls, with keyword arguments."""

    name = "pythonic"
    openers = ("<|python_start|>",)
    first_openers = ("[",)
    closers = ("<|python_end|>",)

    def block(self, opener: str) -> Block:
        return _ListBlock("[" if opener == "[" else "")


class _ListBlock(Block):
    def __init__(self, prefix: str):
        self._pieces = [prefix]
        self._size = len(prefix)
        self._open: list[str] = ["["] if prefix else []
        self._quote = ""
        self._escaped = False
        self._is_call = False

    def feed(self, text: str) -> Closed | None:
        if not self._size:
            text = text.lstrip()
            if text and text[0] != "[":
                return Closed(None, text)
        if not self._is_call and text:
            head = "".join(self._pieces) + text
            found = _HEAD.match(head[:MAX_HEAD_CHARS])
            if found is None or (len(head) > MAX_HEAD_CHARS and not found[0].endswith("(")):
                return Closed(None, text)
            self._is_call = found[0].endswith("(")
        end = self._scan(text)
        self._pieces.append(text if end is None else text[:end])
        self._size += len(text)
        if end is None:
            return Closed(None, "") if self._size > MAX_CHARS else None
        try:
            return Closed(_calls("".join(self._pieces)), text[end:])
        except ValueError:
            return Closed(None, text[end:])

    def _scan(self, text: str) -> int | None:
        """Return the index after the list's closing bracket, or None if it goes on."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = _NEXT.search(text, at)
            if found is None:
                return None
            at = found.end()
            character = found[0]
            if self._quote:
                if character == "\\":
                    self._escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._open.append(character)
            elif character in ")]}":
                if not self._open or self._open.pop() != _PAIRS[character]:
                    return at  # not Python: the parser says so
                if not self._open:
                    return at
        return None


def _calls(source: str) -> list[tuple[str, str]]:
    """Return the calls of a Python list. Raises ValueError if it is anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes in the model's strings
            tree = ast.parse(source.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise ValueError("a list of calls is required")
        return [_call(node) for node in tree.elts]
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"not Python: {error}") from error


def _call(node: ast.AST) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("calls have keyword arguments only")
    arguments = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
    return _dotted(node.func), to_json(arguments)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    raise ValueError("a function is a name")


def _value(node: ast.AST) -> Any:
    """Return the JSON value of a literal. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError("arguments are literals")


def _key(node: ast.AST | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("keys are strings")

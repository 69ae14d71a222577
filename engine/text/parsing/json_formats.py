"""Tool calls as JSON: Hermes and Qwen, Llama 3, Mistral."""

from __future__ import annotations

import json
import re

from engine.text.parsing.formats import Block, Closed, Format, JsonBlock, shares_beginning
from engine.text.parsing.json_values import call_of, parse_json, to_json

_MISTRAL_HEAD = re.compile(r"\s*(?P<name>[\w.:/-]{1,256})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s*(?={)")
_MISTRAL_HEAD_CHARS = 512
_LLAMA_HEADS = ('{"type":"function"', '{"function":{', '{"parameters":{', '{"arguments":{')


class _OneCall(JsonBlock):
    """A block with one call: {"name", "arguments"}."""

    def calls(self, text: str) -> list[tuple[str, str]]:
        return [call_of(parse_json(text))]


class Hermes(Format):
    """Hermes, Qwen 2.5, Qwen 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

    name = "hermes"
    openers = ("<tool_call>",)
    closers = ("</tool_call>",)

    def block(self, opener: str) -> Block:
        return _OneCall()


class Llama3Json(Format):
    """Llama 3: an answer that is `{"name": …, "parameters": {…}}`, several separated by semicolons."""

    name = "llama3_json"
    openers = ("<|python_tag|>",)
    first_openers = ("{",)
    closers = (";",)

    def block(self, opener: str) -> Block:
        return _OneCall("{") if opener == "{" else _OneCall()

    def may_begin_call(self, text: str) -> bool:
        return shares_beginning(text, [*_LLAMA_HEADS, *(f'{{"name":{json.dumps(name)}' for name in self.tools)])


class Mistral(Format):
    """Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}` since version 11."""

    name = "mistral"
    openers = ("[TOOL_CALLS]",)
    inner_markers = ("[ARGS]", "[CALL_ID]")
    short_ids = True

    def block(self, opener: str) -> Block:
        return _MistralBlock()


class _MistralList(JsonBlock):
    begins = "[{"

    def calls(self, text: str) -> list[tuple[str, str]]:
        value = parse_json(text)
        return [call_of(one) for one in (value if isinstance(value, list) else [value])]


class _MistralArguments(JsonBlock):
    def __init__(self, function: str):
        super().__init__()
        self._function = function

    def calls(self, text: str) -> list[tuple[str, str]]:
        return [(self._function, to_json(parse_json(text)))]


class _MistralBlock(Block):
    """Decides between a list of calls and a name followed by arguments, then reads on with the block for it."""

    def __init__(self) -> None:
        self._head = ""
        self._inner: JsonBlock | None = None

    def feed(self, text: str) -> Closed | None:
        if self._inner is not None:
            return self._inner.feed(text)
        head = self._head = (self._head + text).lstrip()
        if not head:
            return None
        if head[0] in "[{":
            self._inner = _MistralList()
            return self._inner.feed(head)
        if found := _MISTRAL_HEAD.match(head):
            self._inner = _MistralArguments(found["name"])
            return self._inner.feed(head[found.end() :])
        if "{" in head:
            return Closed(None, head[head.index("{") :])
        if len(head) > _MISTRAL_HEAD_CHARS:
            return Closed(None, head[_MISTRAL_HEAD_CHARS:])
        return None

    def finish(self, is_cut: bool) -> Closed:
        return Closed(None) if self._inner is None else self._inner.finish(is_cut)

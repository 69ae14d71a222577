"""Parsers of tool calls and reasoning: what each format gives, and that it doesn't depend on how the text is cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.parsing.chat import ChatParser, joined, parse
from engine.text.parsing.parts import Content, Reasoning, ToolCall
from engine.text.parsing.reasoning import REASONING_FORMATS, ReasoningSplitter
from engine.text.parsing.selection import TOOL_FORMATS
from engine.text.parsing.tool_calls import ToolCallParser

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": ["boolean", "null"]},
        "tags": {"type": "array"}, "unit": {"enum": ["C", "F"]}, "free": {},
    },
}  # fmt: skip
TOOLS = {"weather": SCHEMA, "now": {}, "a.b": {}, "get-time": {}, "ns/1.find:all": {}}


def parser(name, reasoning=None, is_open=False, max_calls=None):
    splitter = ReasoningSplitter(REASONING_FORMATS[reasoning], is_open) if reasoning else None
    tools = ToolCallParser(TOOL_FORMATS[name](TOOLS), max_calls) if name else None
    return ChatParser(splitter, tools)


def shown(parts):
    """Parts as plain values, with arguments as objects."""
    plain = []
    for part in parts:
        if isinstance(part, ToolCall):
            plain.append((part.index, part.name, json.loads(part.arguments)))
        else:
            plain.append((type(part).__name__.lower(), part.text))
    return plain


PARIS = (0, "weather", {"city": "Paris"})
NOW = (1, "now", {})
QWEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CODER = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"

CASES = [
    ("hermes", QWEN, [PARIS]),
    ("hermes", f"Let me see.\n\n{QWEN}\n", [("content", "Let me see."), PARIS]),
    ("hermes", QWEN + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', [PARIS, NOW]),
    ("hermes", QWEN + "\nDone.", [PARIS, ("content", "Done.")]),
    ("hermes", '<tool_call>{"name": "now"}', [(0, "now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [(0, "now", {})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', [(0, "now", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call> \\" {"}}</tool_call>',
     [(0, "weather", {"city": '</tool_call> " {'})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "two\nlines"}}</tool_call>',
     [(0, "weather", {"city": "two\nlines"})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>',
     [(0, "weather", {"city": "\ud800"})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"x": 1e999, "y": -8E9999, "z": 1e5}}</tool_call>',
     [(0, "now", {"x": 1.7976931348623157e308, "y": -1.7976931348623157e308, "z": 1e5})]),
    ("hermes", "no call, but <tool_ and a < b  ", [("content", "no call, but <tool_ and a < b  ")]),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Paris"}}', [PARIS]),
    ("llama3_json", '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', [PARIS]),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
     [PARIS, NOW]),
    ("llama3_json", '{"type": "function", "function": {"name": "now", "parameters": {}}}', [(0, "now", {})]),
    ("llama3_json", 'I say {"name": "now"}', [("content", 'I say {"name": "now"}')]),
    ("llama3_json", '{"answer": 42} ', [("content", '{"answer": 42} ')]),
    ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
     [PARIS, NOW]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]abc123456[ARGS]{}', [PARIS, NOW]),
    ("mistral", 'Hm. [TOOL_CALLS]weather{"city": "Paris"}', [("content", "Hm."), PARIS]),
    ("pythonic", '[weather(city="Paris"), now()]', [PARIS, NOW]),
    ("pythonic", '[a.b(x=-1, y=[1, 2.5, (true, None)], z={"k": "]\\")"})]',
     [(0, "a.b", {"x": -1, "y": [1, 2.5, [True, None]], "z": {"k": ']")'}})]),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", [(0, "now", {})]),
    ("pythonic", "[a.b(s='a' \"b\", t='\\n\\x41\\u00e9\\d', u=(1,), v=(2), w=-0x1F, n=1_000, x=2.5e-1, )]",
     [(0, "a.b", {"s": "ab", "t": "\nA\u00e9\\d", "u": [1], "v": 2, "w": -31, "n": 1000, "x": 0.25})]),
    ("pythonic", "[now(  # why\n  from='two\nlines'\n)]", [(0, "now", {"from": "two\nlines"})]),
    ("pythonic", "[get-time(), ns/1.find:all(user-id=1, $ref='x')]",
     [(0, "get-time", {}), (1, "ns/1.find:all", {"user-id": 1, "$ref": "x"})]),
    ("pythonic", "[now(x=1e999, y=-8E9999)]",
     [(0, "now", {"x": 1.7976931348623157e308, "y": -1.7976931348623157e308})]),
    ("pythonic", "[1] is a footnote", [("content", "[1] is a footnote")]),
    ("qwen3_coder", CODER, [PARIS]),
    ("qwen3_coder", f"I look.\n{CODER}\n{CODER.replace('Paris', 'Rome')}",
     [("content", "I look."), PARIS, (1, "weather", {"city": "Rome"})]),
    ("qwen3_coder", "<function=weather>\n<parameter=city>\na\n\nb</parameter> < 3\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n<parameter=exact>True</parameter><parameter=tags>[1, \"x\"]</parameter>"
     "<parameter=unit>C</parameter><parameter=free>007</parameter></function>",
     [(0, "weather", {"city": "a\n\nb</parameter> < 3", "days": 3, "exact": True, "tags": [1, "x"], "unit": "C",
                      "free": "007"})]),
    ("qwen3_coder", "<tool_call><function=weather><parameter=city></tool_call></parameter></function></tool_call>",
     [(0, "weather", {"city": "</tool_call>"})]),
    ("qwen3_coder", "<function=now>\n</function>", [(0, "now", {})]),
]  # fmt: skip
MALFORMED = [
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": }}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Par'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3}</tool_call> and on'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes", "<tool_call>" + '{"name":' * 50_000),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"x": ' + "[" * 20_000 + "]" * 20_000 + "}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"x": ' + "1" * 5000 + "}}</tool_call>"),
    ("hermes", "<tool_call>what</tool_call>"),
    ("hermes", "<tool_call>"),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("llama3_json", "{ok}"),
    ("mistral", "[TOOL_CALLS]" + "x" * 2000),
    ("mistral", "[TOOL_CALLS]not a name{}"),
    ("mistral", '[TOOL_CALLS][{"name": "now"}, 3]'),
    ("pythonic", "[now(1)]"),
    ("pythonic", "[now(x=open('f'))]"),
    ("pythonic", "[now(" + "(" * 5000 + ")" * 5000 + ")]"),
    ("pythonic", "[now(x=1, x=2)]"),
    ("pythonic", "[now(x=1 y=2)]"),
    ("pythonic", "[now(x='\\x4')]"),
    ("pythonic", "[now(x=f'{a}')]"),
    ("pythonic", "[now(x=1j)]"),
    ("pythonic", "[now(x=007)]"),
    ("pythonic", r"[now(x='\d')"),
    ("pythonic", "[" + "a" * 2000),
    ("qwen3_coder", "<tool_call><function=now>text</function></tool_call>"),
    ("qwen3_coder", "<tool_call>plain</tool_call>"),
    ("qwen3_coder", "<tool_call><function=now><parameter=x>1"),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_and_content_of_each_format(name, text, expected):
    assert shown(parse(parser(name), text)) == expected


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_a_malformed_call_is_content_without_a_loss(name, text):
    assert parse(parser(name), text) == [Content(text)]


def in_pieces(one, text, cuts):
    parts = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += one.feed(text[start:end])
    return joined(parts + one.finish())


@pytest.mark.parametrize(("name", "text"), [(n, t) for n, t, *_ in CASES + MALFORMED if len(t) < 400])
def test_a_cut_at_any_character_changes_nothing(name, text):
    whole = parse(parser(name), text)
    for cut in range(len(text) + 1):
        assert in_pieces(parser(name), text, [cut]) == whole, text[:cut]
    assert in_pieces(parser(name), text, list(range(1, len(text)))) == whole


PIECES = ["<tool_call>", "</tool_call>", "{", "}", '"', "\\", "[", "]", '"name": "now"', '"arguments": {', ", ", ";",
          "[TOOL_CALLS]", "[ARGS]", "now", "(", ")", "x=1", "<function=now>", "</function>", "<parameter=city>",
          "</parameter>", "<|python_tag|>", "<think>", "</think>", " ", "\n", "é", "<", "text", QWEN, CODER,
          "[now()]", '{"name": "now"}', '[TOOL_CALLS]now{}']  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(TOOL_FORMATS)), st.sampled_from([None, *REASONING_FORMATS]), st.booleans(),
    st.lists(st.sampled_from(PIECES), max_size=14), st.data(),
)  # fmt: skip
def test_any_text_parses_alike_however_it_is_cut(name, reasoning, is_open, pieces, data):
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    whole = parse(parser(name, reasoning, is_open), text)
    assert in_pieces(parser(name, reasoning, is_open), text, cuts) == whole
    assert in_pieces(parser(name, reasoning, is_open), text, list(range(1, len(text)))) == whole
    if not any(isinstance(part, ToolCall) for part in whole) and reasoning is None:
        assert whole == ([Content(text)] if text else [])


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(max_size=6), st.recursive(
    st.none() | st.booleans() | st.integers(-10**6, 10**6) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6,
), max_size=4), st.data())  # fmt: skip
def test_arguments_survive_the_way_through_each_json_format(arguments, data):
    call = json.dumps({"name": "now", "arguments": arguments}, ensure_ascii=data.draw(st.booleans()))
    for name, text in (
        ("hermes", f"<tool_call>{call}</tool_call>"), ("llama3_json", call), ("mistral", f"[TOOL_CALLS][{call}]"),
    ):  # fmt: skip
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
        assert shown(in_pieces(parser(name), text, cuts)) == [(0, "now", arguments)]


@pytest.mark.parametrize(
    ("reasoning", "is_open", "text", "expected"),
    [
        ("qwen3", False, "<think>\nhm \n</think>\n\nyes", [Reasoning("hm"), Content("yes")]),
        ("qwen3", False, "yes <think>", [Content("yes <think>")]),
        ("qwen3", True, "hm\n</think>\n\nyes", [Reasoning("hm"), Content("yes")]),
        ("qwen3", True, "<think>hm</think>yes", [Reasoning("hm"), Content("yes")]),
        ("qwen3", True, "never closed </thi", [Reasoning("never closed </thi")]),
        ("qwen3", False, "<think></think>", []),
        ("deepseek_r1", True, "hm</think>yes", [Reasoning("hm"), Content("yes")]),
        ("mistral", False, "[THINK]hm[/THINK]yes", [Reasoning("hm"), Content("yes")]),
    ],
)
def test_reasoning_is_split_off(reasoning, is_open, text, expected):
    assert parse(parser(None, reasoning, is_open), text) == expected
    for cut in range(len(text) + 1):
        assert in_pieces(parser(None, reasoning, is_open), text, [cut]) == expected


def test_a_call_within_the_reasoning_is_reasoning():
    text = f"<think>{QWEN}</think>{QWEN}"
    assert shown(parse(parser("hermes", "qwen3"), text)) == [("reasoning", QWEN), PARIS]


def test_calls_beyond_the_limit_are_content():
    parts = parse(parser("hermes", max_calls=1), f"{QWEN}\n{QWEN}")
    assert shown(parts) == [PARIS, ("content", QWEN)]


def test_a_call_is_returned_as_soon_as_it_is_complete():
    one = parser("hermes")
    assert one.feed(QWEN[: QWEN.rindex("\n")]) == [ToolCall(0, "weather", '{"city": "Paris"}')]


def test_a_long_call_takes_linear_time():
    text = '<tool_call>{"name": "weather", "arguments": {"city": "' + "x > y, " * 40_000 + '"}}</tool_call>'
    one = parser("hermes")
    parts = [part for start in range(0, len(text), 4) for part in one.feed(text[start : start + 4])] + one.finish()
    assert len(parts) == 1 and isinstance(parts[0], ToolCall)


def test_an_opener_after_a_stray_one_is_found_however_it_is_cut():
    function = "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
    text = f"<tool_call><tool_call>\n{function}\n</tool_call>"
    whole = in_pieces(parser("qwen3_coder", None, False), text, [])
    assert [type(part).__name__ for part in whole] == ["Content", "ToolCall"]
    for cut in range(1, len(text)):
        assert in_pieces(parser("qwen3_coder", None, False), text, [cut]) == whole

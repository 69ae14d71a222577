"""Outputs that a limit or a stop string cuts: no markup is left in the content, however the text arrives."""

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

TOOLS = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}}, "now": {}}
MARKUP = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>", '{"name"'),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "pythonic": ("<|python_start|>", "<|python_end|>", "[weather(", "[now("),
    "qwen3_coder": ("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
}
# Of each format: texts of calls to weather, with the city as JSON and as it is, and to now.
CALLS = {
    "hermes": [('<tool_call>\n{{"name": "weather", "arguments": {{"city": {json}}}}}\n</tool_call>',
                '\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>')],
    "llama3_json": [('{{"name": "weather", "parameters": {{"city": {json}}}}}', '; {{"name": "now"}}'),
                    ('<|python_tag|>{{"name": "weather", "parameters": {{"city": {json}}}}}', "")],
    "mistral": [('[TOOL_CALLS][{{"name": "weather", "arguments": {{"city": {json}}}}}, ',
                 '{{"name": "now", "arguments": {{}}}}]'),
                ('[TOOL_CALLS]weather[ARGS]{{"city": {json}}}', "[TOOL_CALLS]now[ARGS]{{}}")],
    "pythonic": [("[weather(city={json}), ", "now()]"),
                 ("<|python_start|>[weather(city={json}), ", "now()]<|python_end|>")],
    "qwen3_coder": [("<tool_call>\n<function=weather>\n<parameter=city>\n{plain}\n</parameter>\n</function>\n"
                     "</tool_call>", "\n<tool_call>\n<function=now>\n</function>\n</tool_call>")],
}  # fmt: skip
CITIES = ["Paris", "東京", 'a "b" {[(', "</tool_call> x", "\\"]
ANYWHERE = ("hermes", "mistral", "qwen3_coder")  # formats whose calls may follow text


def parser(name, reasoning=None):
    splitter = None if reasoning is None else ReasoningSplitter(REASONING_FORMATS[reasoning], False)
    return ChatParser(splitter, ToolCallParser(TOOL_FORMATS[name](TOOLS)))


def cut_in_pieces(one, text, cuts):
    parts = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += one.feed(text[start:end])
    return joined(parts + one.finish(is_cut=True))


def content_of(parts):
    return "".join(part.text for part in parts if isinstance(part, Content))


def check_cut(name, text, size, before, reasoning=None, cuts=()):
    parts = parse(parser(name, reasoning), text[:size], is_cut=True)
    assert cut_in_pieces(parser(name, reasoning), text[:size], cuts) == parts
    content = content_of(parts)
    shown = content[:-1] if content.endswith(("<", "[")) else content  # one character may be text
    assert before.strip().startswith(shown.strip()), (text[:size], parts)
    if size > len(before) + 1 and reasoning is None:  # nothing of a call, whitespace before it included
        assert content == before.rstrip(), text[:size]
    for marker in MARKUP[name]:
        assert not any(content.endswith(marker[:length]) for length in range(2, len(marker) + 1)), text[:size]
    return parts


@pytest.mark.parametrize("name", sorted(CALLS))
def test_no_cut_leaves_markup_in_the_content(name):
    for first, second in CALLS[name]:
        for before in ("", "I look.\n") if name in ANYWHERE else ("",):
            one = before + first.format(json=json.dumps("Paris"), plain="Paris")
            text = one + second.format()
            whole = [part for part in parse(parser(name), text) if isinstance(part, ToolCall)]
            assert [call.name for call in whole] == (["weather", "now"] if second else ["weather"])
            for size in range(len(text) + 1):
                parts = check_cut(name, text, size, before, cuts=range(1, size))
                calls = [part for part in parts if isinstance(part, ToolCall)]
                assert calls == whole[: len(calls)]
                if size >= len(one):  # a complete call stays
                    assert calls


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_cut_in_any_pieces_leaves_no_markup(data):
    name = data.draw(st.sampled_from(sorted(CALLS)))
    first, second = data.draw(st.sampled_from(CALLS[name]))
    city = data.draw(
        st.sampled_from(CITIES) | st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=9)
    )
    before = data.draw(st.sampled_from(["", "Well.\n\n"])) if name in ANYWHERE else ""
    reasoning = data.draw(st.sampled_from([None, "qwen3"]))
    text = before + first.format(json=json.dumps(city, ensure_ascii=False), plain=city) + second.format()
    thought = "" if reasoning is None else "<think>\nhm\n</think>\n\n"
    size = data.draw(st.integers(0, len(thought + text)))
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=8)))
    parts = check_cut(name, thought + text, size, before, reasoning, cuts)
    shown = "".join(part.text for part in parts if isinstance(part, Reasoning))
    assert "hm".startswith(shown) or shown == "hm\n<"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"answer": 4'),
        ("llama3_json", '{"name": "Bob", "age": 3'),
        ("pythonic", "[1, 2"),
        ("pythonic", "[other(x=1"),
        ("hermes", "if a <"),
        ("hermes", "<tool_call>not a call"),
        ("mistral", "see [1"),
    ],
)
def test_cut_text_that_is_no_call_stays(name, text):
    assert parse(parser(name), text, is_cut=True) == [Content(text)]


@pytest.mark.parametrize("cut", ["</tool_call", "\n</tool", "</", "<"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_part_of_the_closing_tag_is_no_content(cut, is_cut):
    parts = parse(parser("hermes"), '<tool_call>\n{"name": "now"}' + cut, is_cut)
    assert parts == [ToolCall(0, "now", "{}")]


def test_a_part_of_a_reasoning_marker_is_left_out():
    assert parse(parser("hermes", "qwen3"), "<thin", is_cut=True) == []
    assert parse(parser("hermes", "qwen3"), "<think>a</thi", is_cut=True) == [Reasoning("a")]


@pytest.mark.parametrize("name", sorted(CALLS))
def test_what_the_model_ended_itself_stays_in_the_content(name):
    first, _ = CALLS[name][-1]
    text = first.format(json='"Paris"', plain="Paris")[:30]
    assert parse(parser(name), text) == [Content(text)]

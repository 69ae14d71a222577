"""Harmony: reasoning, content and calls of its messages, however they arrive; and what constrains them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.structured_outputs import Reasoning as ReasoningMarkers
from engine.protocol.structured_outputs import StructuredOutputs
from engine.text.parsing.call_tags import constrained
from engine.text.parsing.chat import ChatParser, joined, parse
from engine.text.parsing.parts import Content, Reasoning, ToolCall
from engine.text.parsing.selection import MARKERS, reasoning_format, tool_format
from engine.text.parsing.tool_calls import ToolCallParser
from engine.text.parsing.tool_use import ToolUse
from tests.engine.text.parsing.test_call_tags import FUNCTIONS, accepts, vocabulary

TOOLS = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}}, "now": {}}
THOUGHT = "<|channel|>analysis<|message|>I think.\n<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is **warm**."
CALL = '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}'
PARIS = ToolCall(0, "weather", '{"city": "Paris"}')
THINK = Reasoning("I think.\n")
TEMPLATE = "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>"


def parser(with_tools: bool = True, is_open: bool = False) -> ChatParser:
    splitter, tools = reasoning_format("harmony", None), tool_format("harmony", None)
    assert splitter is not None and tools is not None
    return ChatParser(splitter.splitter(is_open), ToolCallParser(tools(TOOLS)) if with_tools else None)


CASES = {
    "final": ("<|channel|>final<|message|>Hi<|return|>", [Content("Hi")]),
    "thought-and-final": (f"{THOUGHT}{FINAL}<|return|>", [THINK, Content("It is **warm**.")]),
    "thought-and-call": (f"{THOUGHT}{CALL}<|call|>", [THINK, PARIS]),
    "stopped-at-the-call-token": (f"{THOUGHT}{CALL}", [THINK, PARIS]),
    "two-thoughts": (
        f"{THOUGHT}<|start|>assistant{THOUGHT}{FINAL}",
        [Reasoning("I think.\n\n\nI think.\n"), Content("It is **warm**.")],
    ),
    "preamble": (
        f"{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>{CALL}<|call|>",
        [THINK, Content("I look."), PARIS],
    ),
    "recipient-before-the-channel": (
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        [PARIS],
    ),
    "recipient-in-the-next-header": (
        f"{THOUGHT}<|start|>assistant to=functions.now<|channel|>commentary<|message|>{{}}<|call|>",
        [THINK, ToolCall(0, "now", "{}")],
    ),
    "call-in-the-analysis-channel": (
        '<|channel|>analysis to=functions.weather code<|message|>{"city": "Paris"}<|call|>',
        [PARIS],
    ),
    "two-calls": (
        f"{THOUGHT}{CALL}<|call|>{CALL.replace('Paris', 'Rome')}<|call|>",
        [THINK, PARIS, ToolCall(1, "weather", '{"city": "Rome"}')],
    ),
    "no-end-of-the-thought": (f"{THOUGHT.removesuffix('<|end|>')}{FINAL}", [THINK, Content("It is **warm**.")]),
    "no-header": ("just text, a < b", [Content("just text, a < b")]),
    "unclosed-thought": ("<|channel|>analysis<|message|>hm", [Reasoning("hm")]),
    "markers-in-arguments": (
        CALL.replace("Paris", "a <|channel|").removeprefix("<|start|>assistant"),
        [ToolCall(0, "weather", '{"city": "a <|channel|"}')],
    ),
    "empty": ("", []),
}
MALFORMED = {
    "unknown-function": CALL.replace("weather", "other"),
    "other-recipient": "<|start|>assistant<|channel|>commentary to=browser.open<|message|>{}",
    "broken-arguments": CALL.removesuffix("}"),
    "no-object": CALL.replace('{"city": "Paris"}', "Paris"),
}


@pytest.mark.parametrize("case", CASES)
def test_messages_become_parts_however_they_are_cut(case: str) -> None:
    text, expected = CASES[case]
    assert parse(parser(), text) == expected
    for cut in range(len(text) + 1):
        one = parser()
        assert joined([*one.feed(text[:cut]), *one.feed(text[cut:]), *one.finish()]) == expected, text[:cut]
    one = parser()
    assert joined([part for char in text for part in one.feed(char)] + one.finish()) == expected


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_call_is_content_with_its_markers(case: str) -> None:
    assert parse(parser(), THOUGHT + MALFORMED[case]) == [THINK, Content(MALFORMED[case])]


def test_without_tools_a_call_is_content() -> None:
    assert parse(parser(with_tools=False), f"{CALL}<|call|>") == [Content(f"{CALL}<|call|>")]


def test_an_analysis_message_that_the_prompt_has_opened() -> None:
    assert parse(parser(is_open=True), f"so<|end|>{FINAL}") == [Reasoning("so"), Content("It is **warm**.")]
    one = reasoning_format("harmony", None)
    assert one is not None and one.opened_by(f"<|start|>assistant{one.begin}")
    assert one.opened_by("<|start|>assistant") is None


@pytest.mark.parametrize("case", CASES)
def test_a_cut_output_has_no_part_of_a_marker(case: str) -> None:
    text, whole = CASES[case]
    calls = [part for part in whole if isinstance(part, ToolCall)]
    for size in range(len(text)):
        parts = parse(parser(), text[:size], is_cut=True)
        found = [part for part in parts if isinstance(part, ToolCall)]
        assert found == calls[: len(found)]
        shown = "".join(part.text for part in parts if isinstance(part, (Content, Reasoning)))
        if case not in ("no-header", "markers-in-arguments"):
            assert "<|" not in shown and "functions" not in shown, (text[:size], parts)


PIECES = [
    "<|start|>",
    "assistant",
    "<|channel|>",
    "analysis",
    "final",
    "commentary",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    " to=functions.now",
    "to=functions.weather ",
    "<|constrain|>json",
    "{}",
    '{"city": "x"}',
    "text",
    " ",
    "<",
    "<|",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=16), st.data())
def test_any_text_parses_alike_however_it_is_cut(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    one, found = parser(), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += one.feed(text[start:end])
    assert joined(found + one.finish()) == parse(parser(), text)


def test_a_template_with_channels_selects_it() -> None:
    tools, reasoning = tool_format("auto", TEMPLATE), reasoning_format("auto", TEMPLATE)
    assert tools is not None and reasoning is not None and tools.name == reasoning.name == "harmony"
    assert tool_format("openai", None) is tools and reasoning_format("openai_gptoss", None) is reasoning
    special = {"<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"}
    assert special <= MARKERS


WORDS = vocabulary("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")


def constraint(use: ToolUse | None, answer: StructuredOutputs | None = None) -> StructuredOutputs:
    format_, reasoning = tool_format("harmony", None), reasoning_format("harmony", None)
    assert reasoning is not None
    before = ReasoningMarkers(reasoning.begin, reasoning.end, is_open=False)
    found = constrained(format_, use, answer, before, WORDS[1].__contains__)
    assert found is not None
    return found


NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
ASIDE = "<|channel|>analysis<|message|>hm, <<|end|><|start|>assistant"


def test_an_answer_is_constrained_in_the_final_channel() -> None:
    answer = StructuredOutputs(json={"enum": [1, 2]}, field="response_format.json_schema.schema")
    outputs = constraint(None, answer)
    assert accepts(outputs, f"{ASIDE}<|channel|>final<|message|>1", WORDS)
    assert not accepts(outputs, f"{ASIDE}<|channel|>final<|message|>3", WORDS)
    either = constraint(ToolUse(functions=FUNCTIONS), answer)
    assert accepts(either, f"{ASIDE}<|channel|>final<|message|>1", WORDS) and accepts(either, ASIDE + NOW, WORDS)
    assert not accepts(either, f"{ASIDE}<|channel|>final<|message|>3", WORDS)


def test_required_and_strict_calls_follow_their_schema() -> None:
    required = constraint(ToolUse(functions=FUNCTIONS, required=True))
    assert accepts(required, ASIDE + NOW, WORDS) and accepts(required, NOW, WORDS)
    assert not accepts(required, f"{ASIDE}<|channel|>final<|message|>text", WORDS)
    strict = constraint(ToolUse(functions=FUNCTIONS, strict=frozenset(FUNCTIONS)))
    assert accepts(strict, f"{ASIDE}<|channel|>final<|message|>text", WORDS) and accepts(strict, ASIDE + NOW, WORDS)
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    assert accepts(strict, ASIDE + call + json.dumps({"unit": "C", "days": 3}), WORDS)
    assert not accepts(strict, ASIDE + call + json.dumps({"unit": "K", "days": 3}), WORDS)

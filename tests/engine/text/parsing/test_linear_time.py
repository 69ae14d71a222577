"""The time of the parsers is proportional to the output, whatever it holds and however it arrives."""

from __future__ import annotations

import time

import pytest

from engine.text.parsing.chat import ChatParser
from engine.text.parsing.selection import REASONING, TOOL_FORMATS
from engine.text.parsing.tool_calls import ToolCallParser

FACTOR, MAX_RATIO = 8, 20  # a quadratic parser has 64
SIZES = {1: 8_000, 10**9: 64_000}  # size of the pieces -> characters
MAX_SECONDS = 1.0  # of CPU time for each; measured 0.05
TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}
# Beginnings, and what is repeated after each of them.
ATTACKS = {
    "hermes": (["", "<tool_call>", '<tool_call>{"name": "f", "arguments": {"x": ', '<tool_call>{"name": "f"}'],
               ["<tool_call>", '<tool_call>{"', '<tool_call>{"name": "f"}</tool_call>', "</tool_call>", "<"]),
    "llama3_json": (["", '{"name": "f", "parameters": {"x": ', '{"name": "f"}'],
                    ["{", "<|python_tag|>", '{"name": "f"};', "<|python_tag|>{"]),
    "mistral": (["", "[TOOL_CALLS]", '[TOOL_CALLS][{"name": "f", "arguments": {"x": '],
                ["[TOOL_CALLS]", "[TOOL_CALLS]f{}", "[TOOL_CALLS][", "[TOOL_CALLS]n"]),
    "pythonic": (["", "[", "[f(x=", "[f(x='"],
                 ["[f()]", "<|python_start|>", "<|python_start|>[f(x=", "f(", "'a' ", "f'{a}'", "1,", "("]),
    "harmony": (["", "<|channel|>commentary to=functions.f<|message|>", "<|channel|>"],
                ["<|channel|>", "<|start|>", "<|message|>", "<|end|>", "to=functions.f", "<|call|>",
                 "<|channel|>commentary to=functions.f<|message|>{}<|call|>", "<|"]),
    "qwen3_coder": (["", "<tool_call>", "<function=f><parameter=a>", "<function=f><parameter=a>x</parameter>"],
                    ["<tool_call>", "<function=f>", "<function=f><parameter=a>", "<parameter=a>", "</parameter>",
                     "</parameter>\n", "a</parameter>", "</function>", "<function=f><parameter=a></function>"]),
}  # fmt: skip
ANY = ["[", "}", '"', "\\", " ", "\n", "[[],"]


def seconds(name, text, piece, reasoning="qwen3"):
    """Return the CPU time of one parse."""
    reasoning = REASONING[reasoning].splitter(False)
    one = ChatParser(reasoning, ToolCallParser(TOOL_FORMATS[name](TOOLS)))
    begun = time.thread_time()
    for start in range(0, len(text), piece):
        one.feed(text[start : start + piece])
    one.finish()
    return time.thread_time() - begun


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_parsing_takes_linear_time(name):
    beginnings, repeated = ATTACKS[name]
    for piece, chars in SIZES.items():
        for begin in beginnings:
            for unit in (*repeated, *ANY) if begin else repeated:
                small, large = (begin + unit * (size // len(unit)) for size in (chars // FACTOR, chars))
                taken = seconds(name, large, piece)
                if taken > 0.06:  # shorter times are no danger, and their ratios noise
                    taken = min(taken, *(seconds(name, large, piece) for _ in range(3)))
                    ratio = taken / max(min(seconds(name, small, piece) for _ in range(3)), 1e-4)
                    assert ratio < MAX_RATIO, (begin, unit, piece)
                assert taken < MAX_SECONDS, (begin, unit, piece)


@pytest.mark.parametrize("text", ["\n", "<think>\n", "<think>a\n"])
@pytest.mark.parametrize("unit", ["\n", "<", "</thin", "<think>"])
def test_splitting_off_the_reasoning_takes_linear_time(text, unit):
    assert seconds("hermes", text + unit * (16_000 // len(unit)), 1) < MAX_SECONDS


@pytest.mark.parametrize("text", ["", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>"])
@pytest.mark.parametrize("unit", [" ", "<|", "<|end|>", "<|channel|>", "<|start|>assistant", "<|message|>", "to="])
def test_splitting_harmonys_messages_takes_linear_time(text, unit):
    assert seconds("harmony", text + unit * (16_000 // len(unit)), 1, "harmony") < MAX_SECONDS

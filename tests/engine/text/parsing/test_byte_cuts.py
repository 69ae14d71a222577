"""Tool calls of streamed outputs: the same whatever bytes an event ends with, also within a character."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.request import SamplingParams, TokenEvent
from engine.text.output_processor import OutputProcessor
from engine.text.parsing.chat import ChatParser, joined, parse
from engine.text.parsing.selection import TOOL_FORMATS
from engine.text.parsing.tool_calls import ToolCallParser
from engine.text.tokenizer import Tokenizer

TOOLS = {"weather": {"type": "object", "properties": {"city": {"type": "string"}}}, "now": {}}
WRITTEN = {
    "hermes": '<tool_call>\n{{"name": "weather", "arguments": {{"city": {city}}}}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{{"name": "weather", "parameters": {{"city": {city}}}}}',
    "mistral": '[TOOL_CALLS]weather[ARGS]{{"city": {city}}}',
    "pythonic": "[weather(city={city})]",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\n{plain}\n</parameter>\n</function></tool_call>",
}
CITIES = ["Paris", "Zürich", "東京", "Ḿ🌍\u0301", 'a "b" </tool_call>']


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer.load(str(tiny_model))


def byte_ids(tokenizer, text):
    """Return the token of each byte of a text."""
    backend = tokenizer.backend
    return [backend.token_to_id(char) for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text) for char in piece]


def written(name, city):
    return WRITTEN[name].format(city=json.dumps(city, ensure_ascii=False), plain=city)


def parser(name):
    return ChatParser(None, ToolCallParser(TOOL_FORMATS[name](TOOLS), None))


def streamed(tokenizer, name, text, cuts):
    """Parse the text of events that end after these numbers of bytes."""
    ids = byte_ids(tokenizer, text)
    assert len(ids) == len(text.encode())
    processor, one, parts = OutputProcessor(tokenizer), parser(name), []
    processor.add("s", SamplingParams(max_tokens=None), [0], request_id="r", index=0)
    ends = [*sorted(set(cuts) - {0, len(ids)}), len(ids)]
    for start, end in zip([0, *ends], ends, strict=False):
        reason = "length" if end == len(ids) else None
        delta = processor.process(TokenEvent(request_id="s", token_ids=ids[start:end], finish_reason=reason))
        parts += one.feed(delta.text_delta if delta is not None else "")
    return joined(parts + one.finish())


@pytest.mark.parametrize("city", CITIES)
@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_a_cut_after_any_byte_changes_nothing(tokenizer, name, city):
    text = f"Ich sage: {written(name, city)}" if name not in ("llama3_json", "pythonic") else written(name, city)
    whole = parse(parser(name), text)
    assert any(getattr(part, "name", "") == "weather" for part in whole)
    size = len(text.encode())
    for cut in range(size + 1):
        assert streamed(tokenizer, name, text, [cut]) == whole, cut
    assert streamed(tokenizer, name, text, range(size)) == whole


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_cuts_of_any_calls_change_nothing(tokenizer, data):
    name = data.draw(st.sampled_from(sorted(WRITTEN)))
    cities = data.draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=8), min_size=1, max_size=3))
    before = data.draw(st.text(st.characters(codec="utf-8"), max_size=5))
    text = before + "\n".join(written(name, city) for city in cities)
    cuts = data.draw(st.lists(st.integers(0, len(text.encode())), max_size=12))
    assert streamed(tokenizer, name, text, cuts) == parse(parser(name), text)

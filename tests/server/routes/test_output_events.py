"""Events of /v1/responses and /v1/messages: the same answer, however the model's text is cut; and reasoning."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from engine.text.parsing.chat import ChatParser, joined
from engine.text.parsing.json_formats import Hermes
from engine.text.parsing.reasoning import REASONING_FORMATS, ReasoningSplitter
from engine.text.parsing.tool_calls import ToolCallParser
from server.routes.message_outputs import MessageEvents
from server.routes.responses_api_outputs import ResponseEvents
from server.schemas import anthropic_answers, responses_api_answers
from tests.server.conftest import running, tiny_config

CALL = '<tool_call>\n{"name": "weather", "arguments": {"unit": "°C", "days": 1}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TEXTS = {
    "all kinds": f"<think>\nhm, ½ <tool_call>\n</think>\n\nI look.\n{CALL}\n{NOW} Done.",
    "text only": "the sky is blue <",
    "malformed call": f"I <tool_call>nothing</tool_call>\n{CALL}",
    "unfinished": f"<think>a</think>{CALL}<tool_call>\n{{",
    "nothing": "",
}


def parts_of(pieces):
    """Yield the parts of each piece, as a request's parser finds them."""
    tools = ToolCallParser(Hermes({"weather": {}, "now": {}}), None)
    parser = ChatParser(ReasoningSplitter(REASONING_FORMATS["qwen3"], False), tools)
    for piece in pieces:
        yield joined(parser.feed(piece))
    yield joined(parser.finish())


def cuts(text):
    yield [text]
    yield list(text)
    yield from ([text[:place], text[place:]] for place in range(1, len(text)))


def without_ids(items):
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def response_of(pieces):
    """Return the output items of pieces, after checking that the events add up to them."""
    output = ResponseEvents()
    events = [event for parts in parts_of(pieces) for event in output.add(parts)] + output.end()
    texts = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output.output
    for item in done:
        assert texts[item["id"]] == item.get("arguments", item.get("content", [{}])[0].get("text"))
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert added == list(range(len(done)))
    return without_ids(done)


def message_of(pieces):
    """Return the content blocks of pieces, after checking that the events add up to them."""
    output = MessageEvents()
    events = [event for parts in parts_of(pieces) for event in output.add(parts)] + output.end()
    blocks = []
    for event in events:
        assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            key, text = next((key, value) for key, value in delta.items() if key != "type")
            if key == "partial_json":
                blocks[-1]["input"] = json.loads(text)
            else:
                blocks[-1][key] += text
    assert blocks == output.content
    kinds = [event["type"] for event in events]
    assert kinds.count("content_block_stop") == len(blocks)
    assert all(after == "content_block_start" for kind, after in pairwise(kinds) if kind == "content_block_stop")
    return without_ids(blocks)


@pytest.mark.parametrize("build", [response_of, message_of])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_streams_cut_anywhere_are_the_same_answer(build, text):
    found = [build(pieces) for pieces in cuts(text)]
    assert all(one == found[0] for one in found)


def test_items_and_blocks_of_an_output_of_all_kinds():
    items, blocks = response_of([TEXTS["all kinds"]]), message_of([TEXTS["all kinds"]])
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call", "message"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "hm, ½ <tool_call>"}]
    assert [item["content"][0]["text"] for item in items if item["type"] == "message"] == ["I look.", "Done."]
    assert json.loads(items[2]["arguments"]) == {"unit": "°C", "days": 1}
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert blocks[0] == {"type": "thinking", "thinking": "hm, ½ <tool_call>", "signature": ""}
    assert blocks[2] == {"type": "tool_use", "name": "weather", "input": {"unit": "°C", "days": 1}}


def test_reasoning_of_a_response(tiny_model):
    with running(tiny_config(tiny_model, reasoning_parser="deepseek_r1")) as handle:
        body = {"input": "the old king sleeps", "max_output_tokens": 30, "seed": 1, "ignore_eos": True}
        response = handle.answer("/v1/responses", body)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": body["input"]}], "max_tokens": 30}
        message = handle.answer("/v1/messages", chat | {"seed": 1, "ignore_eos": True})
        hidden = chat | {"seed": 1, "ignore_eos": True, "thinking": {"type": "adaptive", "display": "omitted"}}
        omitted = handle.answer("/v1/messages", hidden)
    responses_api_answers.ResponseObject.model_validate(response, strict=True)
    anthropic_answers.Message.model_validate(message, strict=True)
    [item], [block] = response["output"], message["content"]
    assert item["type"] == "reasoning" and item["status"] == "incomplete" and block["type"] == "thinking"
    assert item["content"][0]["text"] == block["thinking"]
    assert omitted["content"] == [{"type": "thinking", "thinking": "", "signature": ""}]
    assert omitted["usage"]["output_tokens"] == 30
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 30


def test_reasoning_and_text_of_a_message(tiny_model):
    text = "<think>\nhm, hm\n</think>\n\nyes"
    with running(tiny_config(tiny_model, max_model_len=1024, reasoning_parser="qwen3")) as handle:
        messages = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "I:"}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 200, "structured_outputs": {"choice": [text]}}
        message = handle.answer("/v1/messages", body)
        back = [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "blue"}]
        assert handle.answer("/v1/messages", body | {"messages": [messages[0], *back], "max_tokens": 1})
    assert without_ids(message["content"]) == [
        {"type": "thinking", "thinking": "hm, hm", "signature": ""},
        {"type": "text", "text": "yes"},
    ]
    assert message["stop_reason"] == "end_turn"

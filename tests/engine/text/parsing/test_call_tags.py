"""Grammars of tool calls: the outputs that they allow are those that the parsers read."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from engine.errors import RequestError
from engine.protocol.structured_outputs import Reasoning, StructuredOutputs
from engine.text.grammars.translation import translate
from engine.text.parsing.call_tags import constrained
from engine.text.parsing.chat import ChatParser, parse
from engine.text.parsing.parts import ToolCall
from engine.text.parsing.reasoning import REASONING_FORMATS, ReasoningSplitter
from engine.text.parsing.selection import TOOL_FORMATS
from engine.text.parsing.tool_calls import ToolCallParser
from engine.text.parsing.tool_use import ToolUse

SCHEMA = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "note": {"type": "string", "maxLength": 3}, "at": {"$ref": "#/$defs/place"},
    },
    "required": ["unit", "days"], "additionalProperties": False, "$defs": {"place": {"enum": ["x", "y"]}},
}  # fmt: skip
FUNCTIONS = {"weather": SCHEMA, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
SPECIAL = ["<|endoftext|>", "</think>"]


def vocabulary(*special):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[*SPECIAL, *special], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(["weather unit"], trainer)
    return LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size(), eos_token=[0]), {*SPECIAL, *special}


PLAIN = vocabulary()
MISTRAL = vocabulary("[TOOL_CALLS]", "[ARGS]")


def constraint(name, use, words=PLAIN, answer=None, reasoning=None):
    return constrained(TOOL_FORMATS[name], use, answer, reasoning, words[1].__contains__)


def matcher(outputs, words=PLAIN):
    found = LLMatcher(words[0], translate(outputs, words[0]), log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def accepts(outputs, text, words=PLAIN):
    one, ids = matcher(outputs, words), words[0].tokenize_str(text, parse_special=True)
    return one.try_consume_tokens(ids) == len(ids) and one.is_accepting()


def walk(outputs, words, seed, limit=400):
    """Return the text of a random walk through the grammar, and whether it came to an end."""
    one, rng, ids = matcher(outputs, words), random.Random(seed), []
    for _ in range(limit):
        allowed = np.unpackbits(np.frombuffer(one.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
        if one.is_accepting() and (0 in allowed or not len(allowed)):
            return words[0].decode_str(ids), True
        ids.append(int(rng.choice([index for index in allowed if index != 0])))
        one.consume_token(ids[-1])
    return words[0].decode_str(ids), False


def parsed(name, text, use, reasoning=None):
    splitter = ReasoningSplitter(REASONING_FORMATS["qwen3"], True) if reasoning else None
    return parse(ChatParser(splitter, ToolCallParser(TOOL_FORMATS[name](use.functions), use.max_calls)), text)


@pytest.mark.parametrize("words", [PLAIN, MISTRAL], ids=["plain", "special"])
@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("max_calls", [None, 1])
def test_random_walks_through_required_calls_parse_and_follow_the_schema(name, words, max_calls):
    import jsonschema

    use = ToolUse(functions=FUNCTIONS, strict=frozenset(FUNCTIONS), required=True, max_calls=max_calls)
    outputs, ended = constraint(name, use, words), 0
    for seed in range(8):
        text, is_complete = walk(outputs, words, seed)
        ended += is_complete
        if is_complete:
            parts = parsed(name, text, use)
            assert parts and all(isinstance(part, ToolCall) for part in parts), text
            assert max_calls is None or len(parts) == 1
            for part in parts:
                jsonschema.validate(json.loads(part.arguments), FUNCTIONS[part.name])
    assert ended >= 4


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("function", ["get-time", "ns/find.all:1", "2fast"])
def test_calls_with_unusual_names_are_read(name, function):
    """Of functions, all that a request can declare; parameters that a format can't write are left out."""
    names = ["user-id", "$ref", "in", "a b", "", "<x>", "x=", 'a"b']
    schema = {"type": "object", "properties": dict.fromkeys(names, {"type": "boolean"}), "required": names[:4]}
    use, ended = ToolUse(functions={function: schema}, required=True), 0
    for seed in range(4):
        text, is_complete = walk(constraint(name, use), PLAIN, seed)
        ended += is_complete
        for part in parsed(name, text, use) if is_complete else ():
            assert isinstance(part, ToolCall) and part.name == function, text
            found = json.loads(part.arguments)
            assert {"user-id", "$ref", "in"} <= found.keys() <= set(names)
    assert ended


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_text_may_hold_strict_calls_only():
    use = ToolUse(functions=FUNCTIONS, strict=frozenset(FUNCTIONS))
    outputs = constraint("hermes", use)
    for text in ("", "Just text, a < b.", f"I look. {CALL}", f"{CALL}\n{CALL}", f"{CALL} done"):
        assert accepts(outputs, text), text
    for text in ("<tool_call>no</tool_call>", CALL.replace("now", "never"), f"{CALL} <tool_call>"):
        assert not accepts(outputs, text), text


@pytest.mark.parametrize(
    ("name", "text"), [("llama3_json", '{"name": "now", "parameters": {}}'), ("pythonic", "[now()]")]
)
def test_an_output_that_is_a_call_or_text(name, text):
    outputs = constraint(name, ToolUse(functions=FUNCTIONS, strict=frozenset(FUNCTIONS)))
    assert accepts(outputs, text) and accepts(outputs, "some text") and accepts(outputs, "")
    assert not accepts(outputs, text[0] + "x")


def test_nothing_is_enforced_without_strict_functions():
    assert constraint("hermes", ToolUse(functions=FUNCTIONS)) is None


def test_an_answer_in_a_format_or_calls():
    answer = StructuredOutputs(json={"enum": [1, 2]}, field="response_format.json_schema.schema")
    outputs = constraint("hermes", ToolUse(functions=FUNCTIONS), answer=answer)
    assert accepts(outputs, "1") and accepts(outputs, CALL)
    assert not accepts(outputs, "3") and not accepts(outputs, "text")
    required = constraint("hermes", ToolUse(functions=FUNCTIONS, required=True), answer=answer)
    assert not accepts(required, "1") and accepts(required, CALL)


def test_calls_come_after_the_reasoning_and_its_budget_is_kept():
    use = ToolUse(functions=FUNCTIONS, required=True)
    free = constraint("hermes", use, reasoning=Reasoning("<think>", "</think>", is_open=True))
    assert accepts(free, f"hm, {CALL} hm</think>\n\n{CALL}") and not accepts(free, CALL)
    may = constraint("hermes", use, reasoning=Reasoning("<think>", "</think>", is_open=False))
    assert accepts(may, CALL) and accepts(may, f"<think>hm</think>{CALL}")
    short = constraint("hermes", use, reasoning=Reasoning("<think>", "</think>", True, budget=3))
    assert accepts(short, f"hm!</think>{CALL}") and not accepts(short, f"hmm!</think>{CALL}")
    alone = constrained(None, None, None, Reasoning("<think>", "</think>", True, budget=3), bool)
    assert accepts(alone, "hm</think>any text") and not accepts(alone, "hmmm</think>")
    with pytest.raises(ValueError, match="tokens of the model, and must be one"):
        translate(constrained(None, None, None, Reasoning("<t>", "</t>", True, budget=3), bool), PLAIN[0])


def test_keywords_that_can_not_be_followed_are_refused_for_strict_functions_only():
    functions = {"f": {"type": "object", "properties": {"a": {"type": "integer", "unheardOf": 1, "not": {}}}}}
    lax = constraint("hermes", ToolUse(functions=functions, required=True))
    matcher(lax)
    strict = constraint("hermes", ToolUse(functions=functions, required=True, strict=frozenset("f")))
    assert LLMatcher(PLAIN[0], translate(strict, PLAIN[0]), log_level=0).is_error()
    with pytest.raises(RequestError, match="tools"):
        raise strict.error(": x")


def of_parameter(schema, **root):
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False} | root


FOLLOWED = {
    "constant": of_parameter({"const": "abc"}),
    "constants": of_parameter({"oneOf": [{"const": "red"}, {"enum": ["blue"]}]}),
    "numbers": of_parameter({"enum": [1, 2, 3]}),
    "mixed": of_parameter({"enum": ["1", 2]}),
    "all_of_one": of_parameter({"allOf": [{"$ref": "#/$defs/c"}], "title": "x"}, **{"$defs": {"c": {"enum": ["p"]}}}),
    "escaped_reference": of_parameter({"$ref": "#/$defs/a~1b"}, **{"$defs": {"a/b": {"type": "boolean"}}}),
    "other_parameter": {
        "type": "object", "properties": {"b": {"type": "boolean"}, "a": {"$ref": "#/properties/b"}}, "required": ["a"],
    },
    "recursion": {"type": "object", "properties": {"kids": {"type": "array", "maxItems": 1, "items": {"$ref": "#"}}},
                  "required": ["kids"], "additionalProperties": False},
    "root_reference": {"$ref": "#/$defs/o", "$defs": {"o": of_parameter({"type": "boolean"})}},
    "dollar": of_parameter({"type": "string", "pattern": "^[0-9]\\$$"}),
    "anything": of_parameter(True),
}  # fmt: skip


@pytest.mark.parametrize("required", [True, False], ids=["required", "auto"])
@pytest.mark.parametrize("case", FOLLOWED)
@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_arguments_written_one_by_one_follow_their_schema(name, case, required):
    import jsonschema

    use = ToolUse(functions={"f": FOLLOWED[case]}, strict=frozenset("f"), required=required)
    outputs, calls = constraint(name, use), 0
    for seed in range(12):
        text, is_complete = walk(outputs, PLAIN, seed, limit=250)
        for part in parsed(name, text, use) if is_complete else ():
            if isinstance(part, ToolCall):
                jsonschema.validate(json.loads(part.arguments), FOLLOWED[case])
                calls += 1
            elif required:
                pytest.fail(f"no call: {text!r}")
    assert calls or not required or case in ("anything", "recursion")


NOT_FOLLOWED = {
    "'anyOf' of its parameters": {"type": "object", "anyOf": [{"required": ["a"]}]},
    "'minProperties' of its parameters": {"type": "object", "properties": {"a": {}}, "minProperties": 1},
    "required parameter 'b'": {"type": "object", "properties": {}, "required": ["b"]},
    "'a', which allows no value": of_parameter(False),
}
NOT_FOLLOWED_BETWEEN_TAGS = {
    "'maxLength' of the parameter 'a'": of_parameter({"type": "string", "pattern": "a", "maxLength": 3}),
    "'format' of the parameter 'a'": of_parameter({"type": "string", "format": "date"}),
    "'not' without a type": of_parameter({"not": {"type": "string"}}),
    "name of the parameter 'a>b'": {"type": "object", "properties": {"a>b": {"type": "string"}}},
}


@pytest.mark.parametrize("reason", [*NOT_FOLLOWED, *NOT_FOLLOWED_BETWEEN_TAGS])
@pytest.mark.parametrize("required", [True, False])
def test_schemas_that_a_format_can_not_follow_are_refused_for_strict_functions_only(reason, required):
    schema = (NOT_FOLLOWED | NOT_FOLLOWED_BETWEEN_TAGS)[reason]
    for name in ("qwen3_coder", "pythonic") if reason in NOT_FOLLOWED else ("qwen3_coder",):
        with pytest.raises(RequestError, match=f"tools: the function 'f' is strict, .* {name} can't follow .*{reason}"):
            constraint(name, ToolUse(functions={"f": schema}, strict=frozenset("f"), required=required))
        if required:
            matcher(constraint(name, ToolUse(functions={"f": schema}, required=True)))


def test_keywords_of_python_calls_are_names():
    use = ToolUse(functions={"f": {"properties": {"a-b": {"type": "string"}}}}, strict=frozenset("f"), required=True)
    with pytest.raises(RequestError, match="'a-b', which is no name in Python"):
        constraint("pythonic", use)


@pytest.mark.parametrize(("name", "text"), [
    ("qwen3_coder", "hi <function=f>\n<parameter=b>\n5\n</parameter>\n</function>"),
    ("llama3_json", 'hi <|python_tag|>{"name": "f", "parameters": {"b": 5}}'),
    ("pythonic", "hi <|python_start|>[f(b=5)]"),
])  # fmt: skip
def test_free_text_holds_no_opener_of_a_call(name, text):
    use = ToolUse(functions={"f": of_parameter({"type": "boolean"})}, strict=frozenset("f"))
    outputs = constraint(name, use)
    assert any(isinstance(part, ToolCall) for part in parsed(name, text, use))
    assert not accepts(outputs, text) and accepts(outputs, "hi <there>, |all|")
    if name == "qwen3_coder":
        assert accepts(outputs, "hi <function=f>\n<parameter=a>\ntrue\n</parameter>\n</function>")


# ---- arguments that the schema doesn't name ------------------------------------------------------------------------

OPEN = {"type": "object", "properties": {"a": {"type": "integer"}, "o": {"type": "object", "properties": {"b": {}}}}}


def hermes(arguments):
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("closes", [True, False])
def test_arguments_are_closed_unless_the_setting_opens_those_of_functions_that_are_not_strict(is_strict, closes):
    def allows(schema, arguments):
        use = ToolUse(functions={"f": schema}, strict=frozenset(["f"] if is_strict else []), required=True)
        outputs = constrained(TOOL_FORMATS["hermes"], use, None, None, PLAIN[1].__contains__, closes_arguments=closes)
        return accepts(outputs, hermes(arguments))

    is_open = not is_strict and not closes
    assert allows(OPEN, '{"a":1,"o":{"b":2}}')
    assert allows(OPEN, '{"a":1,"x":2}') == allows(OPEN, '{"o":{"x":2}}') == is_open
    for without in ({}, {"type": "object"}, {"type": "object", "properties": {}}):
        assert allows(without, "{}") and allows(without, '{"x":2}') == is_open
    free = {"type": "object", "properties": {"headers": {"type": "object"}}}
    assert allows(free, '{"headers":{"x":2}}') == (not is_strict)  # a map: it declares no properties
    for explicit in ({**OPEN, "additionalProperties": True}, {"type": "object", "additionalProperties": {}}):
        assert allows(explicit, '{"x":2}')
    whole = {"allOf": [OPEN, {"properties": {"c": {"type": "integer"}}}]}
    assert allows(whole, '{"a":1,"c":2}') and allows(whole, '{"x":2}') == is_open


def test_an_answer_that_is_closed_stays_closed_beside_tools():
    answer = StructuredOutputs(json={"properties": {"result": {"type": "integer"}}}).closed()
    outputs = constraint("hermes", ToolUse(functions=FUNCTIONS), answer=answer)
    assert accepts(outputs, '{"result": 2}') and not accepts(outputs, '{"1+1": 1}')


def test_whitespace_in_arguments_is_bounded():
    outputs = constraint("hermes", ToolUse(functions={"f": OPEN}, required=True))
    assert accepts(outputs, hermes('{\n  "a": 1\n}')) and not accepts(outputs, hermes('{\n\n"a": 1}'))

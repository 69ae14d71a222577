"""Fields of OpenAI, vLLM and SGLang that are not implemented: refused by name, or accepted without effect."""

from __future__ import annotations

import inspect
import json
from importlib.machinery import SourceFileLoader
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

from server.schemas.anthropic import CountTokensBody, MessagesBody
from server.schemas.foreign_fields import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    EMBEDDINGS,
    FOREIGN_FIELDS,
    GENERATE,
    MESSAGES,
    OLLAMA_CHAT,
    OLLAMA_GENERATE,
    OPTIONS,
    POOLING,
    RERANK,
    RESPONSES,
    SAMPLING,
    SCORE,
    STREAM_OPTIONS,
    TOKEN_SAMPLING,
    TOKENIZE,
    TOKENS,
    Ignored,
    Refused,
)
from server.schemas.generate import GenerateBody
from server.schemas.ollama import OllamaChatBody, OllamaGenerateBody, OllamaOptions
from server.schemas.pooling import EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from server.schemas.requests import ChatBody, CompletionBody, DetokenizeBody, StreamOptions, TokenizeBody
from server.schemas.responses_api import ResponsesBody
from server.schemas.token_generate import EXPERTS_START, SERVED_SAMPLING, TokenGenerateBody

OLLAMA_OPTIONS = {"num_predict": 3, "temperature": 0}
BODIES = {
    COMPLETIONS: {"prompt": "red", "max_tokens": 3, "temperature": 0},
    CHAT: {"messages": [{"role": "user", "content": "red"}], "max_tokens": 3, "temperature": 0},
    GENERATE: {"text": "red", "sampling_params": {"max_new_tokens": 3, "temperature": 0}},
    TOKENS: {"token_ids": [40, 41], "sampling_params": {"max_tokens": 3, "temperature": 0}},
    TOKENIZE: {"messages": [{"role": "user", "content": "red"}]},
    DETOKENIZE: {"tokens": [5, 6]},
    MESSAGES: {"model": "tiny", "messages": [{"role": "user", "content": "red"}], "max_tokens": 3, "temperature": 0},
    RESPONSES: {"input": "red", "max_output_tokens": 3, "temperature": 0},
    EMBEDDINGS: {"input": "red"},
    POOLING: {"input": "red"},
    SCORE: {"text_1": "red", "text_2": "blue"},
    RERANK: {"query": "red", "documents": ["blue"]},
    COUNT_TOKENS: {"model": "tiny", "messages": [{"role": "user", "content": "red"}]},
    OLLAMA_CHAT: {
        "model": "tiny", "messages": [{"role": "user", "content": "red"}], "stream": False, "options": OLLAMA_OPTIONS,
    },
    OLLAMA_GENERATE: {"model": "tiny", "prompt": "red", "stream": False, "options": OLLAMA_OPTIONS},
}  # fmt: skip
MODELS = {
    COMPLETIONS: CompletionBody, CHAT: ChatBody, GENERATE: GenerateBody, TOKENIZE: TokenizeBody,
    DETOKENIZE: DetokenizeBody, TOKENS: TokenGenerateBody, STREAM_OPTIONS: StreamOptions,
    RESPONSES: ResponsesBody, MESSAGES: MessagesBody, COUNT_TOKENS: CountTokensBody,
    EMBEDDINGS: EmbeddingBody, POOLING: PoolingBody, SCORE: ScoreBody, RERANK: RerankBody,
    OLLAMA_CHAT: OllamaChatBody, OLLAMA_GENERATE: OllamaGenerateBody, OPTIONS: OllamaOptions,
}  # fmt: skip
ROOT = Path(__file__).parents[3]
# Names of every request field of each API, by place, read from its source at the version in the file.
FIELDS = json.loads(Path(__file__).with_name("request_fields.json").read_text())
OTHERS = [(api, place) for api, places in FIELDS.items() for place in places if place != "version"]
VALUE = {"an": "effect"}  # of no field's type, and neutral for none
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def sent(place, name, value):
    """Return the route and body of a request with one more field."""
    if place in (SAMPLING, TOKEN_SAMPLING):
        route = GENERATE if place == SAMPLING else TOKENS
        body = BODIES[route]
        return route, body | {"sampling_params": body["sampling_params"] | {name: value}}
    if place == STREAM_OPTIONS:
        return CHAT, BODIES[CHAT] | {"stream": True, "stream_options": {name: value}}
    if place == OPTIONS:
        return OLLAMA_CHAT, BODIES[OLLAMA_CHAT] | {"options": OLLAMA_OPTIONS | {name: value}}
    return place, BODIES[place] | {name: value}


def message_of(error):
    return error if isinstance(error, str) else error["message"]


def param_of(error, otherwise):
    return otherwise if isinstance(error, str) else error.get("param", otherwise)


def entries(kind):
    found = FOREIGN_FIELDS.items()
    return [(place, name) for place, known in found for name, entry in known.items() if isinstance(entry, kind)]


def openai_fields():
    from openai.types import completion_create_params as completion
    from openai.types import embedding_create_params as embedding
    from openai.types.chat import chat_completion_stream_options_param as stream_options
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    names = lambda *types: {name for one in types for name in inspect.get_annotations(one)}  # noqa: E731
    return {
        COMPLETIONS: names(completion.CompletionCreateParamsBase, completion.CompletionCreateParamsStreaming),
        CHAT: names(chat.CompletionCreateParamsBase, chat.CompletionCreateParamsStreaming),
        RESPONSES: names(responses.ResponseCreateParamsBase, responses.ResponseCreateParamsStreaming),
        EMBEDDINGS: names(embedding.EmbeddingCreateParams),
        STREAM_OPTIONS: names(stream_options.ChatCompletionStreamOptionsParam),
    }


def anthropic_fields():
    from anthropic.types import message_count_tokens_params as count
    from anthropic.types import message_create_params as create
    from anthropic.types.beta import message_count_tokens_params as beta_count
    from anthropic.types.beta import message_create_params as beta_create

    names = lambda *types: {name for one in types for name in inspect.get_annotations(one)}  # noqa: E731
    return {
        MESSAGES: names(create.MessageCreateParamsBase, beta_create.MessageCreateParamsBase) | {"stream"},
        COUNT_TOKENS: names(count.MessageCountTokensParams, beta_count.MessageCountTokensParams),
    }


def unaccounted(place, names):
    return sorted(set(names) - set(MODELS[place].model_fields) - set(FOREIGN_FIELDS[place]))


def test_every_field_of_openai_is_implemented_refused_or_listed_as_without_effect():
    found = openai_fields()
    assert {"user", "stop", "stream"} <= found[COMPLETIONS] and {"messages", "store"} <= found[CHAT]
    assert {place: unaccounted(place, names) for place, names in found.items()} == dict.fromkeys(found, [])


def test_every_field_of_anthropic_is_implemented_refused_or_listed_as_without_effect():
    found = anthropic_fields()
    assert {"max_tokens", "container"} <= found[MESSAGES] and {"system", "tools"} <= found[COUNT_TOKENS]
    assert {place: unaccounted(place, names) for place, names in found.items()} == dict.fromkeys(found, [])


@pytest.mark.parametrize(("api", "place"), [one for one in OTHERS if one[1] not in (SAMPLING, TOKEN_SAMPLING)])
def test_every_field_of_vllm_and_sglang_is_implemented_refused_or_listed_as_without_effect(api, place):
    assert FIELDS[api]["version"] and len(FIELDS[api][place]) >= 2
    assert unaccounted(place, FIELDS[api][place]) == []


def test_every_sampling_parameter_of_sglang_is_implemented_refused_or_listed_as_without_effect(server):
    """Here unknown names are refused too."""
    for name in FIELDS["SGLang"][SAMPLING]:
        value = 7 if name == "json_schema" else VALUE  # a schema may have keywords that say nothing
        response = server.post(*sent(SAMPLING, name, value))
        if isinstance(FOREIGN_FIELDS[SAMPLING].get(name), Ignored):
            assert response.status_code == 200, name
        else:
            assert response.status_code == 400 and response.json()["error"]["param"] == name, response.text


def test_every_sampling_parameter_of_vllms_route_for_tokens_is_accounted_for():
    found = set(FIELDS["vLLM"][TOKEN_SAMPLING])
    served = {*SERVED_SAMPLING, EXPERTS_START}
    assert found - served == found & FOREIGN_FIELDS[TOKEN_SAMPLING].keys()
    assert served <= found


def test_no_field_is_both_implemented_and_in_the_table():
    for place, model in MODELS.items():
        assert not set(model.model_fields) & set(FOREIGN_FIELDS[place]), place


@pytest.mark.parametrize(("place", "name"), entries(Refused))
def test_a_field_that_would_change_the_answer_is_refused_by_name(server, place, name):
    route, body = sent(place, name, VALUE)
    response = server.post(route, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert param_of(error, name) == name and f"{name} is not supported" in message_of(error)
    for neutral in (None, *FOREIGN_FIELDS[place][name].neutral):
        route, body = sent(place, name, neutral)
        response = server.post(route, body)
        assert response.status_code == 200, (neutral, response.text)


@pytest.mark.parametrize(("place", "name"), entries(Ignored))
def test_a_field_that_can_not_change_the_answer_is_accepted(server, place, name):
    route, body = sent(place, name, VALUE)
    if place == STREAM_OPTIONS:
        assert server.events(route, body)
        return
    plain = server.answer(route, BODIES[route])
    found = server.answer(route, body)
    assert text_of(found) == text_of(plain) and set(found) == set(plain)


def text_of(answer):
    if "choices" in answer:
        choice = answer["choices"][0]
        return choice.get("text") or choice.get("message") or choice["token_ids"]
    if "output" in answer:
        return [item["content"] for item in answer["output"]]
    if "data" in answer or "results" in answer:
        found = json.dumps(answer.get("data") or answer["results"])  # batches round differently
        return json.loads(found, parse_float=lambda digits: round(float(digits), 4))
    names = ("tokens", "content", "input_tokens", "text", "message", "response")
    return next(answer[name] for name in names if name in answer)


@pytest.mark.parametrize("place", MODELS)
def test_an_unknown_field_is_refused_with_the_nearest_name(server, place):
    names = ("temperature", "include_usage", "prompt", "messages", "tokens", "token_ids", "instruction", "input")
    nearest = next(name for name in names
                   if name in MODELS[place].model_fields or (place == GENERATE and name == "tokens"))  # fmt: skip
    misspelt = "texts" if place == GENERATE else f"{nearest[:-1]}z"
    hint = "text" if place == GENERATE else nearest
    response = server.post(*sent(place, misspelt, 1))
    assert response.status_code == 400, response.text
    message = message_of(response.json()["error"])
    assert f"{misspelt} is not a known field; did you mean '{hint}'?" in message
    assert server.post(*sent(place, misspelt, None)).status_code == 200
    response = server.post(*sent(place, "z" * 10_000, 1))
    assert response.status_code == 400 and len(response.text) < 500 and "remove it" in response.text


def test_booleans_are_no_numbers_in_neutral_values(server):
    assert server.post(COMPLETIONS, BODIES[COMPLETIONS] | {"length_penalty": True}).status_code == 400
    assert server.post(COMPLETIONS, BODIES[COMPLETIONS] | {"length_penalty": 1.0}).status_code == 200
    assert server.post(COMPLETIONS, BODIES[COMPLETIONS] | {"return_token_ids": 0}).status_code == 400


@pytest.mark.parametrize("place", [COMPLETIONS, CHAT, TOKENIZE])
def test_tools_with_tool_choice_none_are_served_as_if_none_were_listed(server, place):
    plain, tools = server.answer(place, BODIES[place]), {"tools": [TOOL]}
    found = server.answer(place, BODIES[place] | tools | {"tool_choice": "none", "parallel_tool_calls": True})
    counts = [{k: v for k, v in one.get("usage", {}).items() if k != "prompt_tokens_details"} for one in (plain, found)]
    assert text_of(found) == text_of(plain) and counts[0] == counts[1]


def test_completions_refuse_tools(server):
    for choice in (None, "auto", "required", {"type": "function", "function": {"name": "f"}}):
        response = server.post(COMPLETIONS, BODIES[COMPLETIONS] | {"tools": [TOOL], "tool_choice": choice})
        assert response.status_code == 400 and response.json()["error"]["param"] in ("tools", "tool_choice")


def test_the_refusal_of_another_name_says_which_name_to_use(server):
    response = server.post(COMPLETIONS, BODIES[COMPLETIONS] | {"max_new_tokens": 5})
    assert response.json()["error"]["message"] == "max_new_tokens is not supported; use max_tokens"
    response = server.post(GENERATE, BODIES[GENERATE] | {"sampling_params": {"stop_regex": "a+"}})
    assert response.json()["error"]["message"] == "sampling_params.stop_regex is not supported; remove it"


def test_the_schema_lists_the_fields(server):
    schemas = server.http.get("/openapi.json").json()["components"]["schemas"]
    for place, model in MODELS.items():
        properties = schemas[model.__name__]["properties"]
        assert set(FOREIGN_FIELDS[place]) <= set(properties)
    assert schemas["ChatBody"]["properties"]["logits_processors"]["enum"] == [None, []]
    one = schemas["GenerateBody"]["properties"]["sampling_params"]["anyOf"][0]
    assert one["properties"]["custom_params"]["enum"] == [None, {}]


@pytest.fixture(scope="module")
def page():
    """scripts/compatibility as a module."""
    loader = SourceFileLoader("compatibility", str(ROOT / "scripts" / "compatibility"))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def test_the_documentation_lists_every_field_and_what_happens(page):
    assert page.PAGE.read_text() == page.document(), "run: .venv/bin/python scripts/compatibility"
    assert list(page.APIS) == list(FIELDS)
    for api, places in page.APIS.items():
        assert {*places, "version"} == set(FIELDS[api])


@pytest.mark.parametrize(("api", "place"), OTHERS)
def test_the_fields_documented_as_served_are_those_of_the_schemas(page, api, place):
    served = {name for name in FIELDS[api][place] if page.what_happens(place, name)[0] == "served"}
    if place in (SAMPLING, TOKEN_SAMPLING):
        model = GenerateBody if place == SAMPLING else TokenGenerateBody
        schema = model.model_json_schema()["properties"]["sampling_params"]
        schema = (schema["anyOf"][0] if place == SAMPLING else schema)["properties"]
        assert served == set(FIELDS[api][place]) & (schema.keys() - FOREIGN_FIELDS[place].keys())
    else:
        assert served == set(FIELDS[api][place]) & set(MODELS[place].model_fields)


def test_the_listed_fields_are_those_of_the_installed_clients():
    """A newer client may have more, which the tests above report."""
    for api, found in (("OpenAI", openai_fields()), ("Anthropic", anthropic_fields())):
        for place, names in found.items():
            assert set(FIELDS[api][place]) <= names or FIELDS[api]["version"] != version(api.lower())

"""/openapi.json is correct: every response of every route has the documented shape."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from server.app import create_app
from server.config import ServerConfig
from server.http.middleware import BINARY_PATHS
from server.http.openapi import ADMIN_REFUSALS, REFUSALS, Document
from server.schemas import answers as answers
from server.schemas.requests import RANGES
from tests.server.http.test_request_sizes import LongestTurn
from tests.support.waiting import PATIENCE

PROMPT = "the old king sleeps"


@pytest.fixture(scope="module")
def schema(server):
    return server.http.get("/openapi.json").json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("options", [{}, {"logprobs": 2, "echo": True, "n": 2, "max_tokens": 0}, {"stop": "e"}])
def test_completions(server, options, stream):
    body = {"prompt": [PROMPT, "red"], "max_tokens": 6, "logprobs": 0, **options, "stream": stream}
    found = server.events("/v1/completions", body) if stream else [server.answer("/v1/completions", body)]
    for one in found:
        answers.Completion.model_validate(one, strict=True)


@pytest.mark.parametrize("options", [{}, {"logprobs": True, "top_logprobs": 2, "n": 2}, {"stop": ["zzzz"]}])
def test_chats(server, options):
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "ignore_eos": True, **options}
    answers.ChatCompletion.model_validate(server.answer("/v1/chat/completions", body), strict=True)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.events("/v1/chat/completions", body | {"stream": True, "stream_options": usage})
    for one in chunks:
        answers.ChatChunk.model_validate(one, strict=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 6 * body.get("n", 1)


def test_generate_and_the_small_routes(server):
    body = {
        "text": [PROMPT, "red"], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True,
        "top_logprobs_num": 2, "logprob_start_len": 0, "return_text_in_logprobs": True,
    }  # fmt: skip
    for one in [*server.answer("/generate", body), *server.events("/generate", body | {"stream": True})]:
        answers.Generated.model_validate(one, strict=True)
    for path, model in {
        "/health": answers.Health, "/ready": answers.Ready, "/version": answers.Version, "/graphs": answers.Graphs,
        "/v1/models": answers.ModelList, "/v1/models/tiny": answers.Model, "/nothing": answers.ErrorAnswer,
    }.items():  # fmt: skip
        model.model_validate(server.http.get(path).json(), strict=True)


def test_every_request_body_has_an_example_that_is_answered(server, schema):
    bodies = {path: one["post"]["requestBody"] for path, one in schema["paths"].items()
              if "requestBody" in one.get("post", {})}  # fmt: skip
    assert len(bodies) >= 11
    for path, body in bodies.items():
        if path in BINARY_PATHS:
            continue
        example = body["content"]["application/json"]["example"]
        if schema["paths"][path]["post"]["security"] == [{"admin_key": []}]:  # off here
            assert server.post(path, example).json()["error"]["code"] == "admin_disabled"
        else:
            server.answer(path, example)


def test_each_route_documents_its_errors_and_no_422(schema):
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            promised = set(operation["responses"])
            assert "200" in promised and "422" not in promised
            if operation.get("security") == [{"admin_key": []}]:
                assert {str(status) for status in ADMIN_REFUSALS} <= promised, path
            elif operation.get("security"):
                assert {str(status) for status in REFUSALS} <= promised, path
    assert "HTTPValidationError" not in schema["components"]["schemas"]


def test_statuses_that_a_connection_sends_before_any_route_are_documented(schema, start_server):
    host, port = start_server(header_seconds=2, wait_ready=False).url.removeprefix("http://").split(":")
    start = b"POST /v1/completions HTTP/1.1\r\n"
    trailers = b"Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: " + b"b" * 300_000
    for status, request in ((400, b"no HTTP\r\n\r\n"), (408, start), (431, start + trailers)):
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(request)
            assert connection.recv(65536).startswith(b"HTTP/1.1 %d " % status)
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                assert not operation.get("security") or str(status) in operation["responses"], path


def test_ranges_of_the_schema_are_those_that_are_checked(schema):
    """Each bound of the schema is accepted, and one step beyond it is refused."""
    from engine.errors import RequestError
    from engine.protocol.request import SamplingParams

    fields = schema["components"]["schemas"]["CompletionBody"]["properties"]
    assert fields["temperature"]["maximum"] == RANGES["temperature"]["maximum"]
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
                 "top_k", "n", "seed", "logprobs", "max_tokens", "min_tokens"):  # fmt: skip
        bounds = RANGES[name]
        assert set(bounds) <= set(fields[name])
        for key, beyond in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
            if key not in bounds:
                continue
            if key != "exclusiveMinimum":
                SamplingParams(**{"max_tokens": None, name: bounds[key]})
            with pytest.raises(RequestError) as caught:
                SamplingParams(**{"max_tokens": None, name: bounds[key] + beyond})
            assert caught.value.param == name


def test_descriptions_of_request_fields_are_in_the_schema(schema):
    from server.schemas.descriptions import COMMON, OF_BODY

    bodies = {name: one["properties"] for name, one in schema["components"]["schemas"].items() if "properties" in one}
    bodies["SamplingOptions"] = bodies["GenerateBody"]["sampling_params"]["anyOf"][0]["properties"]
    bodies["TokenSampling"] = bodies["TokenGenerateBody"]["sampling_params"]["properties"]
    requests = [name for name in bodies if name.endswith(("Body", "Options"))]
    plain = [(body, name) for body in requests for name, field in bodies[body].items() if "description" not in field]
    assert plain == [], "fields without a description"
    used = {name for fields in bodies.values() for name in fields}
    assert set(COMMON) <= used, "described, but no field of a request"
    for body, descriptions in OF_BODY.items():
        for name, text in descriptions.items():
            assert bodies[body][name]["description"] == text
    for name in ("temperature", "max_tokens", "stream", "n", "seed", "stop"):
        assert bodies["ChatBody"][name]["description"] == COMMON[name]


def test_no_page_holds_the_event_loop_at_its_first_request(start_server):
    """The schema takes 0.2 s to build. Other pages are here because whatever they build first must not stall either."""
    server = start_server(compat="vllm")
    for path in ("/openapi.json", "/", "/chat", "/chat/main.js", "/metrics", "/graphs", "/load", "/v1/models", "/none"):
        with LongestTurn(server) as longest:
            server.http.get(path)
        assert longest.seconds < 0.05, path


def test_requests_during_the_first_build_get_the_same_complete_document(start_server):
    server = start_server(wait_ready=False)
    with ThreadPoolExecutor(8) as threads:
        first = list(threads.map(lambda _: server.http.get("/openapi.json"), range(8)))
    assert {answer.headers["content-type"] for answer in first} == {"application/json"}
    assert {answer.content for answer in first} == {server.http.get("/openapi.json").content}
    assert {"/v1/chat/completions", "/health"} <= set(first[0].json()["paths"])
    assert "servers" not in first[0].json()


async def test_the_schema_names_the_prefix_of_a_proxy():
    document = Document(create_app(object(), ServerConfig()))
    assert json.loads(await document.text("/llm"))["servers"] == [{"url": "/llm"}]
    assert "servers" not in json.loads(await document.text(""))

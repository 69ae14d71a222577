"""Request bodies: size, encoding, JSON, content type, method and route. Bad input never causes a 500."""

from __future__ import annotations

import gzip
import json
import socket
import time

import pytest
from pydantic import ValidationError

from server.config import ServerConfig
from server.http.body_route import LARGE_BYTES
from server.schemas import requests as schemas
from server.schemas.generate import GenerateBody
from tests.support.waiting import PATIENCE

JSON = {"Content-Type": "application/json"}
POSTS = ("/generate", "/v1/completions", "/v1/chat/completions")


def error_of(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"text": "a", }',
        b'{"text": "\xff\xfe"}',
        b"\xff\xfe\x00",
        b'{"prompt": ' + b"[" * 100_000,
        b'{"max_tokens": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "a", "text": "a", "temperature": NaN, "sampling_params": {"temperature": NaN}, "messages": []}',
    ],
)
def test_an_invalid_json_object_is_a_400(server, path, content):
    assert error_of(server.http.post(path, content=content, headers=JSON), 400)["code"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": ' + b"[" * 2000 + b"]" * 2000 + b"}", "too many nested objects and lists"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "an integer of more than 4300 digits"),
        (b'{"prompt": "caf\xe9"}', "not valid UTF-8: invalid continuation byte at byte 15"),
        (b'{"prompt": "a", "\\ud800": 1}', "the name of a field contains a lone surrogate"),
    ],
)
@pytest.mark.parametrize("padding", [0, LARGE_BYTES])
def test_a_body_that_cannot_be_read_is_a_400_that_says_why(server, content, message, padding):
    body = content + b" " * padding
    error = error_of(server.http.post("/v1/completions", content=body, headers=JSON), 400)
    assert message in error["message"] and error["code"] == "invalid_value"


@pytest.mark.parametrize("path", POSTS)
def test_a_body_of_10_mb_is_a_413(server, path):
    body = json.dumps({"prompt": "a" * 10_000_000, "text": "a" * 10_000_000})
    assert error_of(server.http.post(path, content=body, headers=JSON), 413)["code"] == "body_too_large"


def test_a_chunked_body_of_10_mb_is_a_413(server):
    def chunks():
        yield b'{"text": "'
        for _ in range(100):
            yield b"a" * 100_000
        yield b'"}'

    assert error_of(server.http.post("/generate", content=chunks(), headers=JSON), 413)["code"] == "body_too_large"


CHUNK = b"1000\r\n" + b"a" * 4096 + b"\r\n"


@pytest.mark.parametrize(
    ("header", "begun", "rest"),
    [
        (b"Transfer-Encoding: chunked", CHUNK, CHUNK * 200 + b"0\r\n\r\n"),
        (b"Content-Length: 1000000", b"a" * 4096, b"a" * (1_000_000 - 4096)),
    ],
    ids=["chunked", "declared"],
)
def test_a_413_doesnt_wait_for_the_end_of_the_body(start_server, header, begun, rest):
    server = start_server(max_body_bytes=2048)
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + header + b"\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(head + begun)
        answer = b""
        while not answer.endswith(b"}}"):
            answer += connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413 ") and b"\r\nconnection: close\r\n" in answer.lower()
        connection.sendall(rest)  # the rest is read and dropped, not reset
        assert connection.recv(65536) == b""


def test_a_declared_size_above_the_limit_is_refused_before_any_of_the_body_arrives(start_server):
    server = start_server(max_body_bytes=2048)
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2049\r\n"
    for expect in (b"", b"Expect: 100-continue\r\n"):
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            connection.sendall(head + expect + b"\r\n")
            answer = b""
            while not answer.endswith(b"}}"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 413 ") and b"--max-body-bytes" in answer
    server.wait_idle()


def test_a_body_at_the_limit_is_read_and_one_byte_more_is_not(start_server):
    server = start_server(max_body_bytes=2048)
    text = "a" * (2048 - len('{"text": ""}'))
    # 2,036 characters are more than the context's 256 tokens: read, and refused for that.
    read = server.http.post("/generate", content=json.dumps({"text": text}), headers=JSON)
    assert error_of(read, 400)["code"] == "context_length_exceeded"
    assert error_of(server.http.post("/generate", content=json.dumps({"text": text + "a"}), headers=JSON), 413)


def test_a_text_just_under_the_limit_is_refused_for_its_length_without_stopping_the_server(server):
    body = json.dumps({"text": "fox " * (ServerConfig().max_body_bytes // 4 - 8)})
    error = error_of(server.http.post("/generate", content=body, headers=JSON), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "text"
    assert "characters" in error["message"]  # refused before it was tokenised, which takes ten seconds


def test_a_million_ids_with_one_wrong_are_refused_with_a_short_message(start_server):
    server = start_server(max_body_items=2_000_000)
    body = json.dumps({"prompt": [1] * 1_000_000 + ["x"]})
    error = error_of(server.http.post("/v1/completions", content=body, headers=JSON), 400)
    assert error["param"] == "prompt" and len(error["message"]) < 300


BODIES = (
    schemas.CompletionBody, schemas.ChatBody, schemas.TokenizeBody, schemas.DetokenizeBody, schemas.WeightsBody,
    GenerateBody,
)  # fmt: skip
WHOLE = {
    "prompt": "a", "text": "a", "tokens": [1], "path": "/a", "version": "a",
    "messages": [{"role": "user", "content": "a"}],
}  # fmt: skip
FIELDS = [(kind, name) for kind in BODIES for name in kind.model_fields]
MANY = 5_000
WRONG = {
    "numbers": [1.5] * MANY,
    "flags": [True] * MANY,
    "texts": ["a"] * MANY,
    "surrogates": ["\ud800"] * MANY,
    "nulls": [None] * MANY,
    "lists": [[]] * MANY,
    "lists of texts": [["a"]] * MANY,
    "objects": [{}] * MANY,
    "object of texts": {str(number): "a" for number in range(MANY)},
    "object of lists": {str(number): [] for number in range(MANY)},
}


def faults(kind, body):
    """Number of errors that pydantic builds for a body."""
    try:
        kind.model_validate(body)
    except ValidationError as found:
        return found.error_count()
    return 0


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_a_field_with_thousands_of_wrong_items_builds_few_errors(kind, name):
    own = {field: value for field, value in WHOLE.items() if field in kind.model_fields}
    assert faults(kind, own) == 0
    for what, wrong in WRONG.items():
        assert faults(kind, own | {name: wrong}) < 10, what


@pytest.mark.parametrize("name", schemas.Message.model_fields)
@pytest.mark.parametrize("count", [1, 1000])
def test_a_message_with_thousands_of_wrong_items_builds_few_errors(name, count):
    for what, wrong in WRONG.items():
        messages = [{"role": "user", "content": "a", name: wrong}] * count
        assert faults(schemas.ChatBody, {"messages": messages}) < 10, what


@pytest.mark.parametrize(
    ("path", "before", "item", "after", "message"),
    [
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": [', "1", "]}]}",
         "messages[0].content: Input should be a valid string"),
        ("/v1/chat/completions", '{"messages": [], "stop": [', "1", "]}", "stop: Input should be a valid string"),
        ("/v1/completions", '{"prompt": "a", "stop_token_ids": [', '"a"', "]}",
         "stop_token_ids[0]: Input should be a valid integer"),
        ("/generate", '{"text": "a", "sampling_params": [', "[]", "]}",
         "sampling_params: Input should be a valid dictionary"),
    ],
)  # fmt: skip
def test_8_mb_of_wrong_items_are_refused_fast_with_the_first_error(start_server, path, before, item, after, message):
    server = start_server(max_body_items=10**8)
    count = (ServerConfig().max_body_bytes - len(before + after)) // (len(item) + 1)
    content = before + ",".join([item] * count) + after
    start = time.process_time()
    assert error_of(server.http.post(path, content=content, headers=JSON), 400)["message"] == message
    assert time.process_time() - start < 10  # it took 17 s to 100 s, and 6 GB


ITEMS = {
    "numbers": "1,",
    "texts": '"",',
    "lists": "[],",
    "objects": "{},",
    "members": '{"":0},',
}


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
def test_a_body_of_too_many_items_is_a_413_before_it_is_parsed(server, item):
    """Parsing 8 MB of short items stalls every stream for up to a second."""
    limit = ServerConfig().max_body_items
    many = item * ((limit - 20) // sum(item.count(one) for one in ',:"[{'))
    error = error_of(server.http.post("/generate", content='{"text": "a", "x": [' + many, headers=JSON), 400)
    assert "not valid JSON" in error["message"]  # as many items are parsed, and the body has no end
    over = error_of(server.http.post("/generate", content='{"text": "a", "x": [' + many + item * 20, headers=JSON), 413)
    assert over["code"] == "too_many_body_items" and "--max-body-items" in over["message"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_body_that_is_not_declared_as_json_is_a_415(server, kind):
    response = server.http.post("/generate", content=b'{"text": "a"}', headers={"Content-Type": kind})
    assert "application/json" in error_of(response, 415)["message"]


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_a_compressed_body_is_a_415(server, encoding):
    content = gzip.compress(b'{"text": "a"}')
    response = server.http.post("/generate", content=content, headers=JSON | {"Content-Encoding": encoding})
    assert f"content encoding is {encoding}" in error_of(response, 415)["message"]


def test_the_content_encoding_identity_is_accepted(server):
    body = {"text": "red", "sampling_params": {"max_new_tokens": 1}}
    server.post("/generate", body, headers={"Content-Encoding": "Identity"}).raise_for_status()


def test_an_unknown_route_is_a_404_with_the_error_body(server):
    assert error_of(server.http.get("/v1/nothing"), 404)["code"] == "route_not_found"
    assert error_of(server.http.post("/nothing", json={}), 404)
    assert error_of(server.http.get("/%ff%fe"), 404)


def test_a_wrong_method_is_a_405_that_names_the_right_one(server):
    response = server.http.get("/generate")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    assert error_of(server.http.post("/health"), 405)


def test_a_valid_request_id_is_echoed_and_an_invalid_one_replaced(server):
    for path in ("/health", "/nothing"):
        assert server.http.get(path, headers={"X-Request-Id": "abc-1.2:3"}).headers["x-request-id"] == "abc-1.2:3"
    for bad in ("", "a b", "<script>", "x" * 129, b"caf\xe9"):
        echoed = server.http.get("/health", headers={"X-Request-Id": bad}).headers["x-request-id"]
        assert len(echoed) == 24 and int(echoed, 16) >= 0
    refused = server.http.post("/generate", content=b"{", headers=JSON | {"X-Request-Id": "mine"})
    assert refused.status_code == 400 and refused.headers["x-request-id"] == "mine"


def test_the_request_id_is_part_of_the_response_id(server):
    body = {"prompt": "red", "max_tokens": 1}
    answer = server.post("/v1/completions", body, headers={"X-Request-Id": "mine"}).json()
    assert answer["id"] == "cmpl-mine"


def test_two_requests_may_carry_the_same_id_at_once(server):
    prompts = {"text": ["red", "blue"], "rid": ["same", "same"], "sampling_params": {"max_new_tokens": 4}}
    assert [answer["meta_info"]["id"] for answer in server.answer("/generate", prompts)] == ["same", "same"]


def test_an_interrupted_upload_leaks_nothing(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
    server.wait_idle()
    assert server.http.get("/health").status_code == 200


def test_the_server_still_answers_after_all_bad_bodies(server):
    answer = server.answer("/generate", {"text": "red", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}})
    assert len(answer["output_ids"]) == 3

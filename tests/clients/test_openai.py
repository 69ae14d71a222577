"""The official OpenAI client: sync and async, streamed and not, every choice of tools, and its errors."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

openai = pytest.importorskip("openai")

from tests.clients.answers import MAX_TOKENS, MESSAGES, TOOLS, Sum, Weather  # noqa: E402
from tests.support.waiting import wait  # noqa: E402

PROMPT = "the old king sleeps"
ARGUMENTS = {"weather": Weather, "add": Sum}


@pytest.fixture
def client(endpoint):
    with openai.OpenAI(base_url=endpoint.openai, api_key=endpoint.key, max_retries=0) as one:
        yield one


@pytest.fixture
def greedy(endpoint):
    return {"model": endpoint.model, "max_tokens": 10, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def agent(endpoint):
    """Parameters of a request whose answer may use tools or must follow a grammar."""
    return {"model": endpoint.model, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "seed": 1}


def checked(calls):
    """Return the names of tool calls, whose arguments must be valid."""
    for call in calls:
        assert call.type == "function" and call.id
        ARGUMENTS[call.function.name].model_validate_json(call.function.arguments)
    return [call.function.name for call in calls]


def test_models(client, endpoint):
    model = client.models.list().data[0]
    assert model.id == endpoint.model and model.model_extra["max_model_len"] >= 1024
    assert client.models.retrieve(endpoint.model) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_completion_and_its_stream_agree(client, greedy):
    whole = client.completions.create(prompt=PROMPT, n=2, logprobs=2, **greedy)
    assert [choice.index for choice in whole.choices] == [0, 1] and whole.usage.completion_tokens == 20
    assert len(whole.choices[0].logprobs.token_logprobs) == 10
    texts, usage = {0: "", 1: ""}, None
    with client.completions.create(
        prompt=PROMPT, n=2, stream=True, stream_options={"include_usage": True}, **greedy
    ) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            usage = chunk.usage or usage
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert usage.total_tokens == whole.usage.total_tokens


def test_completion_of_token_ids_and_of_lists(client, greedy):
    texts = client.completions.create(prompt=["red bird", "blue house"], **greedy)
    ids = client.completions.create(prompt=[[5, 6, 7], [8, 9]], **greedy)
    assert len(texts.choices) == len(ids.choices) == 2
    assert client.completions.create(prompt=[5, 6, 7], **greedy).choices[0].text == ids.choices[0].text


def test_echo_with_logprobs(client, greedy):
    choice = client.completions.create(prompt=PROMPT, echo=True, logprobs=1, **greedy).choices[0]
    assert choice.text.startswith(PROMPT) and len(choice.text) > len(PROMPT)
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.token_logprobs[1] < 0
    assert "".join(choice.logprobs.tokens) == choice.text
    assert len(choice.logprobs.top_logprobs) == len(choice.logprobs.text_offset) == len(choice.logprobs.tokens)


def test_stop(client, greedy):
    whole = client.completions.create(prompt=PROMPT, **greedy).choices[0]
    stop = whole.text[3:5]
    stopped = client.completions.create(prompt=PROMPT, stop=[stop], **greedy).choices[0]
    assert stopped.text == whole.text[: whole.text.index(stop)] and stopped.finish_reason == "stop"
    assert whole.finish_reason == "length"


def test_seed_and_logit_bias(client, greedy):
    sampled = greedy | {"temperature": 1}
    one, two = (client.completions.create(prompt=PROMPT, seed=7, **sampled).choices[0].text for _ in range(2))
    assert one == two != client.completions.create(prompt=PROMPT, seed=8, **sampled).choices[0].text
    ids = greedy | {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
    [choice] = client.completions.create(prompt=PROMPT, logit_bias={"5": 100}, **ids).choices
    assert choice.token_ids == [5] * 10


def test_chat_with_every_common_parameter(client, endpoint):
    answer = client.chat.completions.create(
        messages=[{"role": "system", "content": "be short"}, *MESSAGES], model=endpoint.model,
        max_completion_tokens=8, temperature=0.7, top_p=0.9, n=2, seed=3, stop=["\n\n\n\n"], presence_penalty=0.1,
        frequency_penalty=0.1, logit_bias={"5": -1}, logprobs=True, top_logprobs=2, user="someone",
        metadata={"a": "b"}, store=False, extra_body={"top_k": 20, "min_p": 0.01, "ignore_eos": True},
    )  # fmt: skip
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert [len(choice.logprobs.content) for choice in answer.choices] == [8, 8]
    # Tokens of probability 0, after top_p, top_k and min_p, are left out.
    assert all(1 <= len(token.top_logprobs) <= 2 for token in answer.choices[0].logprobs.content)
    assert answer.usage.completion_tokens == 16


def test_chat_stream_agrees_with_the_response_and_may_be_closed_early(client, endpoint, greedy):
    whole = client.chat.completions.create(messages=MESSAGES, **greedy)
    with client.chat.completions.create(messages=MESSAGES, stream=True, **greedy) as stream:
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content
    with client.chat.completions.stream(messages=MESSAGES, **greedy) as helper:
        helper.until_done()
        final = helper.current_completion_snapshot
    assert final.choices[0].message.content == whole.choices[0].message.content
    endless = greedy | {"max_tokens": 900}
    with client.chat.completions.create(messages=MESSAGES, stream=True, **endless) as stream:
        next(iter(stream))
    wait(lambda: not httpx.get(endpoint.url + "/load").json()["server_load"], "the end of the closed stream's request")


def test_async_client_streams_side_by_side(endpoint, greedy):
    def messages(number):
        return [{"role": "user", "content": f"bird {number}"}]

    async def streamed(client, number):
        stream = await client.chat.completions.create(messages=messages(number), stream=True, **greedy)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def whole(client, number):
        answer = await client.chat.completions.create(messages=messages(number), **greedy)
        return answer.choices[0].message.content

    async def check():
        async with openai.AsyncOpenAI(base_url=endpoint.openai, api_key=endpoint.key, max_retries=0) as client:
            first = await asyncio.gather(*(streamed(client, number) for number in range(4)))
            assert [bool(text) for text in first] == [True] * 4
            assert len(await asyncio.gather(*(whole(client, number) for number in range(4)))) == 4
            completion = await client.completions.create(prompt="red", **greedy)
            assert completion.choices[0].finish_reason == "length"

    asyncio.run(check())


def test_json_object(client, agent):
    schema_less = agent | {"temperature": 0, "max_tokens": 200, "stop": None}
    answer = client.chat.completions.create(response_format={"type": "json_object"}, **schema_less).choices[0]
    assert answer.message.content.lstrip().startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)


def test_json_schema(client, agent):
    schema = {"name": "weather", "strict": True, "schema": Weather.model_json_schema()}
    answer = client.chat.completions.create(response_format={"type": "json_schema", "json_schema": schema}, **agent)
    Weather.model_validate_json(answer.choices[0].message.content)


def test_parse(client, agent):
    [choice] = client.chat.completions.parse(response_format=Weather, **agent).choices
    assert isinstance(choice.message.parsed, Weather) and choice.message.refusal is None
    with client.chat.completions.stream(response_format=Weather, **agent) as stream:
        stream.until_done()
        [final] = stream.get_final_completion().choices
    assert isinstance(final.message.parsed, Weather)


def test_parse_of_tools(client, agent):
    tool = openai.pydantic_function_tool(Weather)
    [choice] = client.chat.completions.parse(tools=[tool], tool_choice="required", **agent).choices
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Weather)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("choice", ["none", "auto", "required", "named"])
def test_each_choice_of_tools(client, agent, choice, streamed):
    named = {"type": "function", "function": {"name": "add"}}
    request = agent | {"tools": TOOLS, "tool_choice": named if choice == "named" else choice}
    request |= {"max_tokens": 40} if choice in ("none", "auto") else {}
    if streamed:
        with client.chat.completions.stream(**request) as stream:
            stream.until_done()
            [found] = stream.current_completion_snapshot.choices  # the final one raises if it was cut off
    else:
        [found] = client.chat.completions.create(**request).choices
    names = checked(found.message.tool_calls or ())
    if choice == "none":
        assert not names
    elif choice == "required":
        assert names and found.finish_reason == "tool_calls"
    elif choice == "named":
        assert names == ["add"] and found.finish_reason == "tool_calls"


def test_parallel_calls(client, agent, endpoint):
    answers = client.chat.completions.create(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **agent)
    assert len(checked(answers.choices[0].message.tool_calls)) == 1
    calls = [{"name": "add", "arguments": {"first": 1, "second": number}} for number in (3, 4)]
    said = "I look." + "".join(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    forced = agent | {"extra_body": {"structured_outputs": {"choice": [said]}}, "tools": TOOLS}
    forced["logit_bias"] = {str(bracket(endpoint)): -100}  # what the model says begins with text
    [choice] = client.chat.completions.create(**forced).choices
    assert choice.message.content == "I look." and checked(choice.message.tool_calls) == ["add", "add"]
    with client.chat.completions.stream(**forced) as stream:
        stream.until_done()
        [streamed] = stream.get_final_completion().choices
    assert [call.function.arguments for call in streamed.message.tool_calls] == [
        call.function.arguments for call in choice.message.tool_calls
    ]
    assert streamed.finish_reason == choice.finish_reason == "tool_calls"


def bracket(endpoint):
    """Return the id of the token "<"."""
    headers = {"Authorization": f"Bearer {endpoint.key}"}
    return httpx.post(endpoint.url + "/tokenize", json={"prompt": "<"}, headers=headers).json()["tokens"][-1]


def test_a_tools_result_is_part_of_the_conversation(client, agent):
    [choice] = client.chat.completions.create(tools=TOOLS, tool_choice="required", **agent).choices
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": '{"ok": true}'} for call in choice.message.tool_calls
    ]
    conversation = [*MESSAGES, choice.message.model_dump(exclude_none=True), *results]
    answer = client.chat.completions.create(
        **agent | {"messages": conversation, "max_tokens": 10}, tools=TOOLS, tool_choice="none"
    )
    assert answer.choices[0].message.tool_calls is None and answer.usage.prompt_tokens > 20


def test_raw_headers(client, greedy):
    raw = client.chat.completions.with_raw_response.create(
        messages=MESSAGES, extra_headers={"X-Request-Id": "mine"}, **greedy
    )
    assert raw.headers["x-request-id"] == "mine" and raw.headers["content-type"] == "application/json"
    assert raw.parse().id == "chatcmpl-mine" and raw.parse()._request_id == "mine"  # noqa: SLF001
    with client.chat.completions.with_streaming_response.create(messages=MESSAGES, stream=True, **greedy) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert list(response.iter_lines())[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "other"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"max_tokens": 50_000_000}, openai.BadRequestError),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, openai.BadRequestError),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError),
        ({"tool_choice": "required"}, openai.BadRequestError),
    ],
)
def test_errors_raise_the_clients_own_exceptions(client, greedy, change, error):
    with pytest.raises(error) as caught:
        client.chat.completions.create(messages=MESSAGES, **greedy | change)
    assert caught.value.param == next(iter(change)) and caught.value.request_id


def test_a_wrong_key_is_an_authentication_error(client):
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="sk-wrong").models.list()
    assert caught.value.code == "invalid_api_key" and "sk-wrong" not in str(caught.value)

"""The official OpenAI client against a real server: sync and async, streaming and not, and its errors."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.server.conftest import running, tiny_config

KEY = "sk-for-the-client"
MESSAGES = [{"role": "user", "content": "the old king sleeps"}]
GREEDY = {"model": "tiny", "max_tokens": 10, "temperature": 0}


@pytest.fixture(scope="module")
def guarded(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("client") / "keys"
    path.write_text(KEY)
    with running(tiny_config(tiny_model, api_key_file=str(path), max_model_len=1024)) as handle:
        yield handle


@pytest.fixture
def client(guarded):
    with openai.OpenAI(base_url=guarded.url + "/v1", api_key=KEY, max_retries=0) as one:
        yield one


@pytest.fixture
async def async_client(guarded):
    async with openai.AsyncOpenAI(base_url=guarded.url + "/v1", api_key=KEY, max_retries=0) as one:
        yield one


def test_models(client):
    [model] = client.models.list().data
    assert model.id == "tiny" and model.model_extra["max_model_len"] == 1024
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_completion_and_its_stream_agree(client):
    whole = client.completions.create(prompt="the old king", n=2, logprobs=2, **GREEDY)
    assert [choice.index for choice in whole.choices] == [0, 1] and whole.usage.completion_tokens == 20
    assert len(whole.choices[0].logprobs.token_logprobs) == 10
    texts, usage = {0: "", 1: ""}, None
    with client.completions.create(
        prompt="the old king", n=2, stream=True, stream_options={"include_usage": True}, **GREEDY
    ) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            usage = chunk.usage or usage
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert usage.total_tokens == whole.usage.total_tokens


def test_completion_of_token_ids_and_of_lists(client):
    texts = client.completions.create(prompt=["red bird", "blue house"], **GREEDY)
    ids = client.completions.create(prompt=[[5, 6, 7], [8, 9]], **GREEDY)
    assert len(texts.choices) == len(ids.choices) == 2
    assert client.completions.create(prompt=[5, 6, 7], **GREEDY).choices[0].text == ids.choices[0].text


def test_chat_with_every_common_parameter(client):
    answer = client.chat.completions.create(
        messages=[{"role": "system", "content": "be short"}, *MESSAGES], model="tiny", max_completion_tokens=8,
        temperature=0.7, top_p=0.9, n=2, seed=3, stop=["\n\n\n"], presence_penalty=0.1, frequency_penalty=0.1,
        logit_bias={"5": -1}, logprobs=True, top_logprobs=2, user="someone", metadata={"a": "b"}, store=False,
        extra_body={"top_k": 20, "min_p": 0.01, "ignore_eos": True},
    )  # fmt: skip
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert [len(choice.logprobs.content) for choice in answer.choices] == [8, 8]
    assert all(len(token.top_logprobs) == 2 for token in answer.choices[0].logprobs.content)
    assert answer.usage.completion_tokens == 16


def test_chat_stream_agrees_with_the_response_and_may_be_closed_early(client, guarded):
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    with client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY) as stream:
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == whole.choices[0].message.content
    with client.chat.completions.stream(messages=MESSAGES, **GREEDY) as helper:
        helper.until_done()
        final = helper.current_completion_snapshot
    assert final.choices[0].message.content == whole.choices[0].message.content
    endless = {"model": "tiny", "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(messages=MESSAGES, stream=True, **endless) as stream:
        next(iter(stream))
    guarded.wait_idle()


async def test_async_client_streams_side_by_side(async_client):
    async def one(number):
        stream = await async_client.chat.completions.create(
            messages=[{"role": "user", "content": f"bird {number}"}], stream=True, **GREEDY
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def whole(number):
        messages = [{"role": "user", "content": f"bird {number}"}]
        answer = await async_client.chat.completions.create(messages=messages, **GREEDY)
        return answer.choices[0].message.content

    streamed = await asyncio.gather(*map(one, range(8)))
    assert streamed == await asyncio.gather(*map(whole, range(8)))
    completion = await async_client.completions.create(prompt="red", **GREEDY)
    assert completion.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model": "other"}, openai.NotFoundError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"max_tokens": 5000}, openai.BadRequestError),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError),
    ],
)
def test_errors_raise_the_clients_own_exceptions(client, change, error):
    with pytest.raises(error) as caught:
        client.chat.completions.create(messages=MESSAGES, **GREEDY | change)
    assert caught.value.param == next(iter(change)) and caught.value.request_id


def test_a_wrong_key_is_an_authentication_error(client):
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="sk-wrong").models.list()
    assert caught.value.code == "invalid_api_key" and "sk-wrong" not in str(caught.value)

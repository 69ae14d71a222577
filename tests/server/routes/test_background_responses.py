"""Background responses with the official OpenAI client: they run on, are read, streamed from any event, cancelled."""

from __future__ import annotations

import asyncio
import json
import time

import openai
import pytest

from server.schemas import responses_api_answers as wire
from server.serving.background_runs import BackgroundRuns
from server.serving.response_store import ResponseStore
from tests.server.conftest import running, tiny_config
from tests.support.waiting import PATIENCE

KEY, OTHER_KEY = "sk-for-the-client", "sk-for-another-client"
GREEDY = {"model": "tiny", "input": "the old king sleeps", "max_output_tokens": 10, "temperature": 0}
LONG = GREEDY | {"max_output_tokens": 4000, "extra_body": {"ignore_eos": True}}
ENDED = ("completed", "incomplete", "failed", "cancelled")


@pytest.fixture(scope="module")
def guarded(tiny_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("client") / "keys"
    path.write_text(f"{KEY}\n{OTHER_KEY}")
    config = tiny_config(
        tiny_model, api_key_file=str(path), max_model_len=4096, response_store_bytes=2**20, response_store_entries=10
    )
    with running(config) as handle:
        yield handle
        handle.wait_idle()


@pytest.fixture
def client(guarded):
    with openai.OpenAI(base_url=guarded.url + "/v1", api_key=KEY, max_retries=0) as one:
        yield one


def checked(response):
    body = response.model_dump(exclude_unset=True)
    wire.ResponseObject.model_validate(body, strict=True)
    return response


def ended(client, name, seconds=PATIENCE):
    """Poll a response until it has ended, as OpenAI's guide does."""
    end = time.monotonic() + seconds
    while (response := client.responses.retrieve(name)).status not in ENDED:
        checked(response)
        assert response.background and response.output == [] and time.monotonic() < end
        time.sleep(0.02)
    return checked(response)


def content(response):
    return [(item.type, item.content[0].text) for item in response.output]


def test_a_background_response_is_the_same_as_another(client, guarded):
    whole = client.responses.create(**GREEDY)
    queued = checked(client.responses.create(**GREEDY, background=True))
    assert queued.status == "queued" and queued.background and queued.output == [] and queued.usage is None
    found = ended(client, queued.id)
    assert found.status == whole.status == "incomplete" and content(found) == content(whole)
    assert found.usage.total_tokens == whole.usage.total_tokens and found.background and not whole.background
    assert [item.type for item in client.responses.input_items.list(queued.id)] == ["message"]
    following = client.responses.create(**GREEDY | {"previous_response_id": queued.id})
    assert following.previous_response_id == queued.id
    guarded.wait_idle()


def test_a_stream_goes_on_after_its_connection_and_from_any_event(client):
    events = []
    with client.responses.create(**GREEDY | {"max_output_tokens": 60}, background=True, stream=True) as stream:
        for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                break
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.response.status for event in events[:3]] == ["queued", "queued", "in_progress"]
    name = events[0].response.id
    final = ended(client, name)
    rest = list(client.responses.retrieve(name, stream=True, starting_after=events[-1].sequence_number))
    every = list(client.responses.retrieve(name, stream=True))
    assert [event.sequence_number for event in every] == list(range(len(every)))
    assert [event.model_dump() for event in [*events, *rest]] == [event.model_dump() for event in every]
    assert every[-1].type == "response.incomplete" and every[-1].response.output == final.output
    text = "".join(event.delta for event in every if event.type == "response.output_text.delta")
    assert text == final.output_text
    last = every[-1].sequence_number
    assert list(client.responses.retrieve(name, stream=True, starting_after=last)) == []


def test_a_stream_is_joined_while_it_runs(client):
    with client.responses.create(**GREEDY | {"max_output_tokens": 150}, background=True, stream=True) as stream:
        name = next(iter(stream)).response.id
    every = list(client.responses.retrieve(name, stream=True))
    assert every[-1].type in ("response.incomplete", "response.completed")
    assert [event.sequence_number for event in every] == list(range(len(every)))


@pytest.mark.parametrize("streams", [False, True])
def test_a_running_response_can_be_cancelled(client, guarded, streams):
    created = client.responses.create(**LONG, background=True, stream=streams)
    if streams:
        events = iter(created)
        name = next(events).response.id
        while next(events).type != "response.output_text.delta":
            pass
    else:
        name = created.id
    cancelled = checked(client.responses.cancel(name))
    assert cancelled.status == "cancelled" and cancelled.id == name
    guarded.wait_idle()  # the engine's request has ended, long before its 4,000 tokens
    assert client.responses.retrieve(name).status == "cancelled"
    assert client.responses.cancel(name) == cancelled  # a second time
    if streams:
        assert all(event.type == "response.output_text.delta" for event in events)
        created.close()
    with pytest.raises(openai.BadRequestError, match="cancelled"):
        client.responses.create(**GREEDY | {"previous_response_id": name})


def test_an_ended_response_is_not_cancelled(client):
    done = ended(client, client.responses.create(**GREEDY, background=True).id)
    assert client.responses.cancel(done.id) == done
    other = client.responses.create(**GREEDY)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(other.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_unknown")


def test_deleting_a_running_response_ends_it(client, guarded):
    name = client.responses.create(**LONG, background=True).id
    client.responses.delete(name)
    guarded.wait_idle()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(name)


def test_a_running_response_is_not_continued(client, guarded):
    name = client.responses.create(**LONG, background=True).id
    with pytest.raises(openai.BadRequestError, match="continue a completed response") as raised:
        client.responses.create(**GREEDY | {"previous_response_id": name})
    assert raised.value.param == "previous_response_id"
    client.responses.cancel(name)
    guarded.wait_idle()


def test_another_key_sees_nothing_of_it(client, guarded):
    name = client.responses.create(**LONG, background=True).id
    with openai.OpenAI(base_url=guarded.url + "/v1", api_key=OTHER_KEY, max_retries=0) as other:
        for attempt in (
            lambda: other.responses.retrieve(name),
            lambda: other.responses.cancel(name),
            lambda: other.responses.delete(name),
            lambda: list(other.responses.retrieve(name, stream=True)),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
    assert client.responses.retrieve(name).status in ("queued", "in_progress")
    client.responses.cancel(name)
    guarded.wait_idle()


def test_a_run_that_makes_room_for_others_ends(client, guarded):
    """The store is bounded: the oldest entry goes, and its run with it."""
    name = client.responses.create(**LONG, background=True).id
    for _ in range(10):
        client.responses.create(**GREEDY | {"max_output_tokens": 1})
    guarded.wait_idle()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(name)


def test_a_response_that_outgrows_the_store_fails(client, guarded):
    """Its events take more than an eighth of the store. A stream ends with the failure."""
    created = client.responses.create(**LONG, background=True, stream=True)
    name = next(iter(created)).response.id
    created.close()
    found = ended(client, name, 60)
    assert found.status == "failed" and "--response-store-bytes" in found.error.message
    assert [event.type for event in client.responses.retrieve(name, stream=True)] == ["response.failed"]
    guarded.wait_idle()


@pytest.mark.parametrize(
    ("change", "param", "needle"),
    [
        ({"store": False}, "background", "remove store"),
        ({"background": "yes"}, "background", "boolean"),
        ({"input": ""}, "input", "empty"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", ""),
        ({"input": "red " * 5000}, "input", ""),
        ({"input": [{"role": "king", "content": "x"}]}, "input", "input[0].role"),
        ({"tools": [{"type": "function", "name": "f", "description": "x" * 200_000}]}, "background", "too large"),
        ({"background_options": {"a": 1}}, "background_options", "not supported"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streams", [False, True])
def test_what_is_wrong_is_refused_at_once(guarded, change, param, needle, streams):
    body = GREEDY | {"background": True, "stream": streams, "tool_choice": "none"} | change
    response = guarded.post("/v1/responses", body, headers={"Authorization": f"Bearer {KEY}"})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == param and needle in error["message"], error
    guarded.wait_idle()


@pytest.mark.parametrize(
    ("query", "param"),
    [({"stream": "maybe"}, "stream"), ({"starting_after": 3}, "starting_after"),
     ({"stream": True, "starting_after": -1}, "starting_after"), ({"stream": True}, "stream")],
)  # fmt: skip
def test_invalid_reads_are_refused(client, guarded, query, param):
    name = ended(client, client.responses.create(**GREEDY, background=True).id).id
    response = guarded.http.get(f"/v1/responses/{name}", params=query, headers={"Authorization": f"Bearer {KEY}"})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_a_server_without_store_has_no_background(start_server):
    server = start_server(response_store_entries=0)
    error = server.post("/v1/responses", GREEDY | {"background": True}).json()["error"]
    assert error["param"] == "background" and "--response-store-entries 0" in error["message"]


def test_a_server_that_stops_does_not_wait_for_a_run(tiny_model):
    with running(tiny_config(tiny_model, max_model_len=4096)) as handle:
        body = LONG | {"background": True, "ignore_eos": True}
        body.pop("extra_body")
        name = handle.answer("/v1/responses", body)["id"]
        handle.wait(lambda: handle.http.get(f"/v1/responses/{name}").json()["status"] == "in_progress", "its begin")
        before = handle.service.client.stats().generation_tokens
    assert handle.service.client.stats().generation_tokens - before < 3000


async def test_a_run_is_cancelled_by_another_worker_through_the_store(tmp_path):
    own, other = (ResponseStore(str(tmp_path / "file"), 10, 100_000, 60) for _ in range(2))
    runs = BackgroundRuns(own)
    tasks = {}
    for name in ("a", "b", "c"):
        assert await own.begin(name, "me", [])
        assert await own.publish(name, {"status": "queued", "output": [], "background": True})
        tasks[name] = asyncio.create_task(asyncio.sleep(3600))
        runs.add(name, tasks[name])
    assert json.loads(await other.cancel("a", "me"))["status"] == "cancelled"
    assert await other.cancel("b", "another") is None and await other.delete("b", "me")
    await asyncio.wait({tasks["a"], tasks["b"]}, timeout=PATIENCE)
    assert tasks["a"].cancelled() and tasks["b"].cancelled() and not tasks["c"].done()
    assert not await own.finish("a", {"status": "completed"}) and not await own.append("a", [(0, b"x")])
    await runs.close()
    assert tasks["c"].cancelled()
    for store in (own, other):
        await store.close()

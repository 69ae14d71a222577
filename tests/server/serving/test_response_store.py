"""The store of responses: its limits, its owners, and a file that two processes share."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from engine.errors import RequestError
from server.http.errors import WireError
from server.serving.response_store import LOST_SECONDS, MEMORY, ResponseStore
from tests.support.waiting import until

ITEMS = [{"type": "message", "id": "msg_1", "role": "user", "content": "x" * 100}]
RESPONSE = {"id": "resp_1", "output": [{"type": "message", "id": "msg_2"}]}


@pytest.fixture
async def make_store():
    made = []

    def make(path=MEMORY, entries=10, size=10_000, seconds=60.0):
        made.append(ResponseStore(path, entries, size, seconds))
        return made[-1]

    yield make
    for store in made:
        await store.close()


async def add(store, name, owner="me", items=ITEMS, response=RESPONSE):
    return await store.begin(name, owner, items) and await store.finish(name, response)


async def held(store, names, owner="me"):
    return [name for name in names if await store.response(name, owner) is not None]


async def test_an_entry_is_readable_once_it_is_complete(make_store):
    store = make_store()
    assert await store.begin("a", "me", ITEMS)
    assert await store.conversation("a", "me") is None and not await store.delete("a", "me")
    assert await store.finish("a", RESPONSE)
    assert json.loads(await store.response("a", "me")) == RESPONSE and await store.items("a", "me") == ITEMS
    assert await store.conversation("a", "me") == [*ITEMS, *RESPONSE["output"]]
    assert await held(store, ["a"], "another") == [] and not await store.delete("a", "another")
    assert await store.delete("a", "me") and store.usage() == (0, 0)


async def test_the_oldest_entries_make_room(make_store):
    store = make_store(entries=3)
    for name in "abcde":
        assert await add(store, name)
    assert await held(store, "abcde") == ["c", "d", "e"]
    store = make_store(size=2000, entries=100)
    names = [f"{number}" for number in range(20)]
    for name in names:
        assert await add(store, name)
        assert store.usage()[1] <= 2000
    left = await held(store, names)
    assert left == names[-len(left) :] and 1 < len(left) < 20


async def test_an_owner_makes_room_for_itself(make_store):
    store = make_store(entries=4)
    assert await add(store, "small", "another")
    for number in range(20):
        assert await add(store, f"big{number}")
    assert await held(store, ["small"], "another") == ["small"]


async def test_what_is_too_large_is_not_stored(make_store):
    store = make_store(size=8000)
    assert not await store.begin("a", "me", [{"text": "x" * 1000}]) and store.usage() == (0, 0)
    assert await store.begin("b", "me", ITEMS) and not await store.finish("b", {"output": ["x" * 990]})
    assert store.usage() == (0, 0) and not await store.finish("b", RESPONSE)
    with pytest.raises(RequestError) as caught:
        await store.begin("c", "me", [{"text": float("nan")}])
    assert caught.value.param == "input"


async def test_entries_expire(make_store, monkeypatch):
    store, now = make_store(seconds=3600.0), time.time()
    assert await add(store, "a") and await held(store, ["a"]) == ["a"]
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    assert await held(store, ["a"]) == []
    monkeypatch.undo()
    store = make_store(seconds=0.3)
    store.begin_expiry()
    assert await store.begin("a", "me", ITEMS)
    await until(lambda: store.usage() == (0, 0), "its end without a request")


async def test_two_processes_share_a_file(make_store, tmp_path):
    path = str(tmp_path / "responses.sqlite")
    one, other = make_store(path), make_store(path)
    names = [f"{number}" for number in range(10)]
    stored = await asyncio.gather(*(add((one, other)[int(name) % 2], name) for name in names))
    assert stored == [True] * 10 and await held(one, names) == names == await held(other, names)
    one.drop("3")
    assert await other.response("3", "me") is None


async def test_a_closed_store_refuses(make_store):
    store = make_store()
    await store.close()
    store.drop("a")
    with pytest.raises(WireError) as caught:
        await add(store, "a")
    assert caught.value.status == 503


async def test_a_background_response_is_readable_while_it_runs(make_store):
    store = make_store(size=4000)
    assert await store.begin("a", "me", ITEMS)
    assert await store.publish("a", RESPONSE | {"status": "queued"}) and await store.still_running(["a", "b"]) == {"a"}
    assert json.loads(await store.response("a", "me"))["status"] == "queued"
    assert await store.append("a", [(0, b"zero"), (1, b"one")]) and await store.append("a", [(2, b"two")])
    assert await store.events("a", "me", -1) == ([(0, b"zero"), (1, b"one"), (2, b"two")], True)
    assert await store.events("a", "me", 1) == ([(2, b"two")], True) and await store.events("a", "another", 1) is None
    assert await store.finish("a", RESPONSE | {"status": "completed"})
    assert await store.events("a", "me", 2) == ([], False) and await store.still_running(["a"]) == set()
    assert not await store.append("a", [(3, b"x")]) and not await store.publish("a", RESPONSE)
    assert await store.delete("a", "me") and store.usage() == (0, 0) and not await store.has_events("a")


async def test_events_count_in_the_bytes_of_an_entry(make_store):
    store = make_store(size=8000)
    assert await store.begin("a", "me", ITEMS) and await store.publish("a", RESPONSE | {"status": "in_progress"})
    before = store.usage()[1]
    assert await store.append("a", [(0, b"x" * 300)]) and store.usage()[1] == before + 300
    with pytest.raises(WireError, match="--response-store-bytes"):
        await store.append("a", [(1, b"x" * 900)])
    assert store.usage()[1] == before and not await store.has_events("a")
    failed = {"status": "failed", "output": []}
    assert not await store.finish("a", RESPONSE | {"text": "x" * 2000}, if_too_large=failed)
    assert json.loads(await store.response("a", "me")) == failed and await store.still_running(["a"]) == set()


async def test_a_cancelled_response_stays_cancelled(make_store):
    store = make_store()
    for name in "ab":
        assert await store.begin(name, "me", ITEMS) and await store.publish(name, RESPONSE | {"status": "in_progress"})
    assert await store.cancel("a", "another") is None and await store.cancel("c", "me") is None
    assert json.loads(await store.cancel("a", "me"))["status"] == "cancelled"
    assert not await store.finish("a", RESPONSE | {"status": "completed"})
    assert json.loads(await store.response("a", "me"))["status"] == "cancelled"
    for name, status in (("a", "cancelled"), ("b", "in_progress")):
        with pytest.raises(RequestError, match=status):
            await store.conversation(name, "me")
    done = RESPONSE | {"status": "completed"}
    assert await store.finish("b", done) and json.loads(await store.cancel("b", "me")) == done


async def test_a_response_whose_worker_has_ended_fails(make_store, monkeypatch):
    store = make_store()
    for name in "ab":
        assert await store.begin(name, "me", ITEMS) and await store.publish(name, RESPONSE | {"status": "in_progress"})
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + LOST_SECONDS + 1)
    assert await store.still_running(["b"]) == {"b"}  # its worker lives
    assert json.loads(await store.response("a", "me"))["status"] == "failed"
    assert json.loads(await store.response("b", "me"))["status"] == "in_progress"
    assert await store.events("a", "me", -1) == ([], False)

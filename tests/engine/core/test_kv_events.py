"""KV events over ZeroMQ: a subscriber knows what an engine caches, and never delays it."""

import itertools
import json
import random
import threading
import time

import pytest
import safetensors.torch

from engine import EngineConfig
from engine.core.kv_event_publisher import KVEventPublisher
from engine.errors import ConfigError
from engine.kv_events_config import KVEventsConfig
from tests.engine.lively import drain, greedy, request
from tests.support.kv_subscriber import Subscriber, decode, msgspec, subscribed, zmq
from tests.support.waiting import PATIENCE, wait

numbers = itertools.count()
CLEARED = {"type": "AllBlocksCleared"}


@pytest.fixture
def addresses(tmp_path):
    return {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replays"}


@pytest.fixture
def publisher(addresses):
    made = []

    def make(**settings):
        config = KVEventsConfig.of({"enable_kv_cache_events": True, **addresses, **settings})
        made.append(KVEventPublisher(config))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def subscribe(addresses):
    made = []

    def make(topic=""):
        made.append(Subscriber(addresses["endpoint"], topic, addresses["replay_endpoint"]))
        return made[-1]

    yield make
    for one in made:
        one.close()


# ---- an engine and a router ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_router_knows_what_is_cached_through_evictions_aborts_and_updates(
    make_engine, addresses, subscribe, other_model, async_scheduling
):
    """Random prompts that begin alike, in a cache of 15 pages; compared with look-ups in the cache itself."""
    settings = {"enable_kv_cache_events": True, "topic": "kv@pod@model", **addresses}
    engine = make_engine(
        kv_events_config=settings, num_pages=16, page_size=8, max_num_seqs=4, graph_buckets=(4,),
        async_scheduling=async_scheduling, max_model_len=96,
    )  # fmt: skip
    loop, router, generator = engine.loop, subscribe("kv@pod"), random.Random(3)
    weights = safetensors.torch.load_file(other_model / "model.safetensors")
    prefixes = [[generator.randrange(3, 300) for _ in range(40)] for _ in range(4)]
    known = most = 0

    for turn in range(40):
        prompts = [
            generator.choice(prefixes)[: generator.randint(5, 40)] + [turn + 3] * generator.randint(0, 9)
            for _ in range(4)
        ]
        salt = generator.choice(("", "tenant"))
        for prompt in prompts:
            loop.add(request(f"{next(numbers)}", prompt, greedy(generator.randint(1, 30), cache_salt=salt)))
        if turn % 7 == 3:
            loop.step()
            loop.abort([str(next(numbers) - 1)])
        drain(loop)
        version = f"v{turn}"
        if turn % 13 == 6:
            loop.update_weights(weights.items(), version)
        elif turn % 13 == 9:
            loop.rename_weights(version)
        elif turn % 13 == 12:
            loop.reset_prefix_cache()
        router.receive_all(0.05)
        router.receive_until(lambda: len(router.view.blocks) == len(loop.prefix_cache))
        for prompt in [*prompts, *prefixes]:
            for one in ("", "tenant"):
                salted = repr((loop.weight_version, "", one)) if one else loop.weight_version
                found = len(loop.prefix_cache.lookup(loop.prefix_cache.chain(salted), prompt)[0])
                assert router.view.match(prompt, 8, one) == found
                known, most = known + found, max(most, found)
    assert known > 100 and most >= 4 and loop.prefix_cache.evictions > 50

    replayed = router.replay()
    router.receive_until(lambda: router.next >= len(replayed))
    assert [number for number, _ in replayed] == list(range(router.next))
    assert {batch.data_parallel_rank for _, batch in replayed} == {0}
    assert abs(replayed[-1][1].ts - time.time()) < 60


def test_tokens_are_the_same_with_and_without_events(make_engine, addresses):
    prompts = [[5, 9, 200, 31, 7] * 5, list(range(3, 40))]
    plain = make_engine().generate(prompt_token_ids=prompts, sampling_params=greedy(20))
    with_events = make_engine(kv_events_config={"enable_kv_cache_events": True, **addresses})
    assert with_events.loop.prefix_cache.events is not None
    found = with_events.generate(prompt_token_ids=prompts, sampling_params=greedy(20))
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]


def test_nothing_is_recorded_without_the_setting(make_engine):
    for setting in (None, {}, {"enable_kv_cache_events": True, "publisher": "null"}):
        assert make_engine(kv_events_config=setting).loop.prefix_cache.events is None


# ---- the publisher -------------------------------------------------------------------------------------------------


def test_a_message_has_a_topic_a_number_and_a_batch(publisher, addresses):
    sender = publisher(topic="kv@a@b")
    socket = subscribed(addresses["endpoint"], "kv@")
    try:
        for number in range(2):
            sender.publish([CLEARED])
            assert socket.poll(1000 * PATIENCE)
            topic, frame, payload = socket.recv_multipart()
            assert (topic, frame) == (b"kv@a@b", number.to_bytes(8, "big"))
            raw = msgspec.msgpack.decode(payload)
            assert isinstance(raw[0], float) and raw[1:] == [[CLEARED], 0]
            assert len(decode(payload).events) == 1
    finally:
        socket.close(linger=0)


def test_a_replay_begins_at_the_requested_number_and_keeps_the_last_batches(publisher, subscribe):
    sender, router = publisher(buffer_steps=5), subscribe()
    for _ in range(12):
        sender.publish([CLEARED])
    for _ in range(12):
        assert router.receive()
    assert [number for number, _ in router.replay(9)] == [9, 10, 11]
    assert [number for number, _ in router.replay(0)] == [7, 8, 9, 10, 11]
    assert router.replay(12) == []


def test_a_long_replay_is_complete(publisher, subscribe):
    sender, router = publisher(), subscribe()
    for _ in range(3000):
        sender.publish([CLEARED])
    for _ in range(3000):
        assert router.receive()
    assert len(router.replay(0)) == 3000


def test_an_invalid_request_for_a_replay_does_not_end_the_publisher(publisher, subscribe, addresses, caplog):
    sender, router = publisher(), subscribe()
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(addresses["replay_endpoint"])
    for frames in ((b"",), (b"", b"short"), (b"x", bytes(8)), (b"", bytes(8), b"more")):
        socket.send_multipart(frames)
    wait(lambda: caplog.text.count("needs an empty frame and 8 bytes") == 4, "the refusals")
    socket.close(linger=0)
    sender.publish([CLEARED])
    assert router.receive() and len(router.replay()) == 1


def test_a_subscriber_that_never_reads_delays_nothing(publisher, subscribe):
    sender, router = publisher(hwm=2, max_queue_size=4), subscribe()
    event = {"type": "BlockRemoved", "block_hashes": list(range(2**40, 2**40 + 2000)), "medium": "GPU"}
    accepted = sum(sender.publish([event]) for _ in range(5000))  # a blocked thread would wait for ever
    assert accepted >= 4
    wait(lambda: sender.publish([CLEARED]), "a place in the queue")  # the thread goes on
    assert router.next == 0


def test_a_full_queue_loses_a_batch_and_does_not_wait(publisher, caplog):
    sender, found = publisher(max_queue_size=4), []
    sender.close()  # the thread takes no more batches
    caller = threading.Thread(
        target=lambda: found.extend(sender.publish([CLEARED]) for _ in range(6)), daemon=True
    )  # fmt: skip
    caller.start()
    caller.join(PATIENCE)
    assert found == [True] * 4 + [False] * 2
    assert caplog.text.count("batches are dropped") == 1


def test_after_a_lost_batch_subscribers_are_told_to_forget(make_engine, addresses, subscribe, monkeypatch):
    loop = make_engine(kv_events_config={"enable_kv_cache_events": True, **addresses}, page_size=8).loop
    router = subscribe()

    def generate(prompt):
        loop.add(request(f"{next(numbers)}", prompt, greedy(2)))
        drain(loop)

    generate(list(range(3, 40)))
    with monkeypatch.context() as patch:
        patch.setattr(KVEventPublisher, "publish", lambda self, events: False)  # a full queue
        generate(list(range(50, 90)))
    generate(list(range(100, 140)))
    router.receive_until(lambda: router.view.match(list(range(100, 140)), 8) == 4)
    assert router.view.match(list(range(3, 40)), 8) == router.view.match(list(range(50, 90)), 8) == 0


# ---- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must be a JSON object"),
        (5, "must be a JSON object"),
        ({"enable_kv_cache_event": True}, "unknown key 'enable_kv_cache_event'.*enable_kv_cache_events"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events='yes' must be true or false"),
        ({"publisher": "zmq"}, "publishes nothing without"),
        ({"publisher": "kafka"}, "publisher='kafka' must be null or zmq"),
        ({"endpoint": "localhost:5557"}, "endpoint='localhost:5557' must be an address"),
        ({"endpoint": None}, "endpoint=None must be an address"),
        ({"replay_endpoint": "tcp://*:5557"}, "another address than endpoint"),
        ({"buffer_steps": 0}, "buffer_steps=0 must be"),
        ({"hwm": 0}, "hwm=0 must be"),
        ({"max_queue_size": True}, "max_queue_size=True must be"),
        ({"topic": 3}, "topic=3 must be a string"),
    ],
)
def test_invalid_settings_are_refused_by_name(value, message):
    with pytest.raises(ConfigError, match=f"kv_events_config.*{message}"):
        EngineConfig(kv_events_config=value)


def test_settings_are_read_from_json_mappings_and_objects():
    text = '{"enable_kv_cache_events": true, "topic": "kv@a@b"}'
    found = EngineConfig(kv_events_config=text).kv_events_config
    assert found == EngineConfig(kv_events_config=json.loads(text)).kv_events_config
    assert found == EngineConfig(kv_events_config=found).kv_events_config
    assert (found.publisher, found.endpoint, found.buffer_steps) == ("zmq", "tcp://*:5557", 10_000)


def test_events_need_a_prefix_cache(config, addresses):
    with pytest.raises(ConfigError, match="kv_events_config.*enable_prefix_caching=False"):
        config(kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False)


def test_an_address_in_use_is_refused_before_the_model_loads(publisher, make_engine, addresses):
    publisher(endpoint="inproc://taken")
    with pytest.raises(ConfigError, match="kv_events_config: endpoint='inproc://taken' can't be used"):
        make_engine(kv_events_config={"enable_kv_cache_events": True, "endpoint": "inproc://taken"})

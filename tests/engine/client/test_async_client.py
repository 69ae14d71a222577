"""EngineClient over a thread and over a process: streams, aborts, and engines that fail to start, hang or die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from contextlib import aclosing, asynccontextmanager

import pytest
import pytest_asyncio

from engine import SamplingParams
from engine.client.async_client import EngineClient, make_client
from engine.client.supervisor import RestartPolicy, Supervisor
from engine.client.transport import ProcessTransport, ThreadTransport
from engine.config import EngineConfig
from engine.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    EnginePaused,
    ModelError,
    PromptTooLong,
    RequestError,
)
from engine.protocol.messages import Ready
from engine.text.tokenizer import Tokenizer
from tests.engine.lively import PROMPTS, SETTINGS, greedy
from tests.support.waiting import PATIENCE, is_alive, until, wait_for_end

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = SETTINGS | {"max_model_len": 4096}
ENDLESS = greedy(4000)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["thread", "process"])
async def client(request, lively_model):
    """A shared client per transport. Every test must leave it idle."""
    async with started(EngineConfig(model=str(lively_model), **LONG), in_process=request.param == "thread") as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def idle_afterwards(request):
    yield
    if "client" in request.fixturenames:
        await idle(request.getfixturevalue("client"))


@asynccontextmanager
async def serving(client: EngineClient):
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def started(config: EngineConfig, **options):
    return serving(make_client(config, **options))


def supervised(config: EngineConfig, restarts: RestartPolicy | None = None) -> tuple[EngineClient, Supervisor]:
    """Create what `make_client` does, and the supervisor, which knows the engine's process id."""
    supervisor = Supervisor(lambda: ProcessTransport(config), restarts)
    return EngineClient(config, supervisor), supervisor


async def idle(client: EngineClient) -> None:
    """Wait until nothing runs and all pages are free, then check for leaks."""

    def is_idle() -> bool:
        stats = client.stats()
        return (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)

    await until(is_idle, "idleness")
    assert await client.ask("idle_check") is None
    assert client.num_pending == 0


async def collect(client: EngineClient, name: str, prompt, params: SamplingParams) -> list:
    return [delta async for delta in client.generate(name, prompt_token_ids=list(prompt), params=params)]


def tokens(deltas, index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


# ---- streams -------------------------------------------------------------------------------------------------------


async def test_a_stream_yields_tokens_in_order_and_finishes_once(client, reference):
    deltas = await collect(client, "a", PROMPTS[0], greedy(30, logprobs=0))
    assert tokens(deltas) == reference.greedy(PROMPTS[0], 30)
    assert [entry.token_id for delta in deltas for entry in delta.logprobs] == tokens(deltas)
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert {delta.request_id for delta in deltas} == {"a"} and {delta.weight_version for delta in deltas} == {"initial"}
    assert deltas[0].queue_time is not None and all(delta.queue_time is None for delta in deltas[1:])


async def test_a_text_prompt_streams_text(client, reference):
    text = "the quick brown fox"
    params = greedy(12, skip_special_tokens=False)
    deltas = [delta async for delta in client.generate("a", prompt=text, params=params)]
    ids = client.tokenizer.encode(text)
    assert tokens(deltas) == reference.greedy(ids, 12)
    whole = client.tokenizer.decode(ids + tokens(deltas), skip_special_tokens=False)
    assert text + "".join(delta.text_delta for delta in deltas) == whole


async def test_n_sequences_stream_concurrently_and_all_finish(client):
    params = SamplingParams(max_tokens=15, seed=3, n=4, ignore_eos=True)
    deltas = await collect(client, "a", PROMPTS[0], params)
    assert sorted(delta.index for delta in deltas if delta.finish_reason) == [0, 1, 2, 3]
    texts = [tokens(deltas, index) for index in range(4)]
    assert [len(one) for one in texts] == [15] * 4 and len(set(map(tuple, texts))) == 4
    single = await collect(client, "b", PROMPTS[0], SamplingParams(max_tokens=15, seed=3, ignore_eos=True))
    assert tokens(single) == texts[0]


async def test_fifty_concurrent_requests_get_their_own_answers(client, reference):
    prompts = [[5 + i, 6 + i, 7 + 2 * i] for i in range(10)]
    found = await asyncio.gather(*(collect(client, f"r{i}", prompts[i % 10], greedy(10 + i % 3)) for i in range(50)))
    for i, deltas in enumerate(found):
        assert tokens(deltas) == reference.greedy(prompts[i % 10], 10 + i % 3)
        assert {delta.request_id for delta in deltas} == {f"r{i}"}


async def test_a_stop_string_ends_the_stream_and_aborts_the_request(client):
    whole = "".join([d.text_delta async for d in client.generate("a", prompt="the old king", params=greedy(60))])
    params = greedy(4000, stop=(whole[9:12],))
    deltas = [delta async for delta in client.generate("b", prompt="the old king", params=params)]
    assert "".join(delta.text_delta for delta in deltas) == whole[: whole.index(whole[9:12])]
    assert deltas[-1].finish_reason == "stop" and deltas[-1].stop_reason == whole[9:12]


async def test_invalid_requests_raise_the_same_errors_and_name_the_field(client):
    cases = [
        (PromptTooLong, {"prompt_token_ids": [5] * 4096, "params": greedy(1)}),
        (PromptTooLong, {"prompt_token_ids": [5] * 4000, "params": greedy(500)}),
        (RequestError, {"prompt_token_ids": [320], "params": greedy(1)}),
        (RequestError, {"prompt_token_ids": [], "params": greedy(1)}),
        (RequestError, {"prompt_token_ids": [5], "params": greedy(1, allowed_token_ids=(320,))}),
    ]
    for error, arguments in cases:
        with pytest.raises(error) as raised:
            async for _ in client.generate("a", **arguments):
                pass
        assert raised.value.param, raised.value


# ---- ends ----------------------------------------------------------------------------------------------------------


async def test_closing_a_stream_early_aborts_all_its_children(client):
    before = (await client.ask("stats")).ended.get("abort", 0)
    async with aclosing(client.generate("a", prompt_token_ids=[5, 6], params=greedy(4000, n=3))) as stream:
        await anext(stream)
        await until(lambda: client.stats().kv_cache_usage > 0, "a snapshot with the requests")
    await idle(client)
    assert (await client.ask("stats")).ended["abort"] == before + 3


async def test_cancelling_the_reader_aborts_the_request(client):
    task = asyncio.create_task(collect(client, "a", [5, 6], ENDLESS))
    await until(lambda: client.stats().num_running == 1, "the request")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await idle(client)


async def test_abort_ends_a_stream_with_reason_abort_and_no_other(client, reference):
    await client.abort("unknown")
    one = asyncio.create_task(collect(client, "one", [5, 6], greedy(4000, n=2)))
    other = asyncio.create_task(collect(client, "other", PROMPTS[0], greedy(30)))
    await until(lambda: client.stats().num_running >= 2, "the requests")
    await client.abort("one")
    assert [delta.finish_reason for delta in await one if delta.finish_reason] == ["abort"] * 2
    assert tokens(await other) == reference.greedy(PROMPTS[0], 30)


async def test_a_request_id_is_rejected_while_in_use_and_reusable_afterwards(client, reference):
    async with aclosing(client.generate("a", prompt_token_ids=[5, 6], params=ENDLESS)) as stream:
        await anext(stream)
        with pytest.raises(RequestError, match="in use") as raised:
            await collect(client, "a", PROMPTS[0], greedy(3))
        assert raised.value.param == "request_id"
        assert (await anext(stream)).finish_reason is None
    # At once, while the first request's last events are still on their way.
    assert tokens(await collect(client, "a", PROMPTS[0], greedy(20))) == reference.greedy(PROMPTS[0], 20)


async def test_the_engine_knows_a_request_by_its_new_id(client):
    """A name that looks like an id is no id."""
    ids = [client.new_id(), client.new_id()]
    running = asyncio.create_task(collect(client, ids[0], [5, 6], greedy(4000, n=2)))
    named = asyncio.create_task(collect(client, str(ids[1]), PROMPTS[0], greedy(9)))
    await until(lambda: client.stats().num_running >= 2, "the requests")
    await client.abort(ids[0])
    assert {delta.child_id for delta in await running} == {f"{ids[0]}#0", f"{ids[0]}#1"}
    children = {delta.child_id for delta in await named}
    assert len(children) == 1 and not children & set(ids)


async def test_an_id_that_looks_like_another_requests_child_is_independent(client, reference):
    many = asyncio.create_task(collect(client, "a", PROMPTS[0], greedy(60, n=2)))
    await asyncio.sleep(0.01)
    assert tokens(await collect(client, "a#0", PROMPTS[1], greedy(9))) == reference.greedy(PROMPTS[1], 9)
    deltas = await asyncio.wait_for(many, PATIENCE)
    assert tokens(deltas, 0) == tokens(deltas, 1) == reference.greedy(PROMPTS[0], 60)


async def test_drain_waits_for_running_requests(client):
    assert await client.drain(0)
    task = asyncio.create_task(collect(client, "a", [5, 6], greedy(300)))
    await until(lambda: client.num_pending, "the request")
    assert not await client.drain(0)
    assert await client.drain(PATIENCE)
    assert len(tokens(await task)) == 300
    task = asyncio.create_task(collect(client, "b", [5, 6], ENDLESS))
    await asyncio.sleep(0)
    assert not await client.drain(0.05)
    await client.abort("b")
    await task


async def test_stats_graphs_and_health_describe_the_engine(client):
    before = client.stats().generation_tokens
    await collect(client, "a", [5, 6], greedy(9))
    await until(lambda: client.stats().generation_tokens == before + 9, "the count")
    assert (client.health().alive, client.health().ready, client.health().reason) == (True, True, "")
    assert client.health().warm["captured"] >= 1
    rows = await client.graphs()
    assert any(row["state"] == "captured" and row["replays"] for row in rows)
    assert client.info().vocab_size == 320 and client.info().max_model_len == 4096
    with pytest.raises(RequestError, match="unknown command 'no_such_method': use one of graphs, stats"):
        await client.ask("no_such_method")


# ---- starts and captures -------------------------------------------------------------------------------------------


async def test_background_warm_up_completes_while_serving(lively_model, reference):
    settings = SETTINGS | {"model": str(lively_model), "warmup": "background", "graph_buckets": (1, 2, 4, 8)}
    async with started(EngineConfig(**settings), in_process=True) as client:
        found = await asyncio.gather(*(collect(client, f"{i}", prompt, greedy(20)) for i, prompt in enumerate(PROMPTS)))
        assert [tokens(deltas) for deltas in found] == [reference.greedy(prompt, 20) for prompt in PROMPTS]
        await until(lambda: client.stats().warm.get("pending") == 0, "the last capture")
        graphs = 4 + 4 * 6  # decode, and sampling in each of its variants
        assert client.health().warm == {"mode": "background", "captured": graphs, "pending": 0, "ratio": 1.0}


@pytest.mark.parametrize(
    "settings, error, words",
    [
        ({"max_model_len": 5000}, ConfigError, "5000"),
        ({"max_num_batched_tokens": 4}, ConfigError, "max_num_batched_tokens"),
        ({"num_pages": 1}, ConfigError, "num_pages"),
        ({"device": "tpu"}, ConfigError, "tpu"),
        ({"model": "/nowhere/at/all"}, ModelError, "nowhere"),
    ],
)
async def test_a_rejected_start_raises_the_engines_error(lively_model, settings, error, words):
    client = make_client(EngineConfig(**{"model": str(lively_model)} | LONG | settings), in_process=True)
    with pytest.raises(error, match=words):
        await client.start()
    assert not client.health().alive and not client.health().ready
    with pytest.raises(EngineDead):
        await collect(client, "a", [5], greedy(1))
    await client.close()


async def test_a_start_error_keeps_its_type_across_processes(lively_model):
    client, supervisor = supervised(EngineConfig(**{"model": str(lively_model)} | LONG | {"max_model_len": 5000}))
    with pytest.raises(ConfigError, match="5000"):
        await client.start()
    assert not client.health().alive
    assert not is_alive(supervisor.pid)


# ---- death ---------------------------------------------------------------------------------------------------------


async def test_a_killed_engine_fails_every_stream_and_closing_leaves_no_process(lively_model):
    client, supervisor = supervised(EngineConfig(model=str(lively_model), **LONG), RestartPolicy(max_restarts=0))
    async with serving(client):
        pid = supervisor.pid
        tasks = [asyncio.create_task(collect(client, f"{i}", [5 + i], greedy(4000, n=1 + i % 2))) for i in range(4)]
        await until(lambda: client.stats().num_running == 6, "the requests")
        asking = asyncio.create_task(client.ask("graphs"))
        os.kill(pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*tasks, asking, return_exceptions=True), PATIENCE)
        await until(lambda: not client.health().alive, "the Dead report")
        assert all(isinstance(result, EngineDead) for result in results[:4])
        assert isinstance(results[4], (EngineDead, list))  # it may have answered before the kill
        assert not client.health().ready and "-9" in client.health().reason
        for call in (collect(client, "late", [5], greedy(1)), client.graphs()):
            with pytest.raises(EngineDead):
                await call
        assert await client.drain(0)
    assert not is_alive(pid)


async def test_a_hung_engine_fails_readiness_and_its_requests_when_killed(lively_model):
    restarts = RestartPolicy(max_restarts=0)
    client, supervisor = supervised(EngineConfig(model=str(lively_model), **LONG), restarts)
    async with serving(client):
        pid = supervisor.pid
        waiting = asyncio.create_task(collect(client, "a", [5], ENDLESS))
        await until(lambda: client.stats().num_running == 1, "the request")
        assert client.health().ready
        os.kill(pid, signal.SIGSTOP)
        # More than a pipe holds: the client must not block until the engine reads it.
        flood = [asyncio.create_task(collect(client, f"flood-{i}", [5] * 30_000, greedy(1))) for i in range(20)]
        await until(lambda: client.num_pending >= 2 * (1 + len(flood)), "all requests")
        assert is_alive(pid) and client.health().alive
        client.hang_seconds = 0.5
        await until(lambda: not client.health().ready, "the hang to show")
        assert client.health().alive and "not reported" in client.health().reason
        assert is_alive(pid) and not any(task.done() for task in (waiting, *flood))
        object.__setattr__(restarts, "kill_seconds", 0.5)  # only now: a busy machine makes an engine silent too
        for task in (waiting, *flood):
            with pytest.raises(EngineDead, match="hung"):
                await asyncio.wait_for(task, PATIENCE)
        wait_for_end([pid])


async def test_a_thread_that_hangs_fails_readiness_until_it_reports_again(lively_model, monkeypatch, reference):
    from engine.core.loop import EngineLoop

    entered, release = threading.Event(), threading.Event()

    def hold(self):
        entered.set()
        release.wait(PATIENCE)

    monkeypatch.setattr(EngineLoop, "graphs", hold)
    async with started(EngineConfig(model=str(lively_model), **LONG), in_process=True) as client:
        held = asyncio.create_task(client.ask("graphs"))
        waiting = asyncio.create_task(collect(client, "a", PROMPTS[0], greedy(9)))
        await until(entered.is_set, "the hang")
        assert client.health().ready
        client.hang_seconds = 0.6
        await until(lambda: not client.health().ready, "the hang to show")
        assert client.health().alive and "not reported" in client.health().reason
        release.set()
        await until(lambda: client.health().ready, "readiness")
        await held
        assert tokens(await waiting) == reference.greedy(PROMPTS[0], 9)
        await idle(client)


async def test_a_failed_sequence_fails_its_whole_request(lively_model, monkeypatch, caplog):
    from engine.worker.model_runner import ModelRunner

    launch, calls = ModelRunner.execute, []

    def flaky(self, batch):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the device coughed")
        return launch(self, batch)

    monkeypatch.setattr(ModelRunner, "execute", flaky)
    async with started(EngineConfig(model=str(lively_model), **LONG), in_process=True) as client:
        with pytest.raises(EngineError, match="coughed"):
            await collect(client, "a", [5, 6], greedy(100, n=2))
        assert len(tokens(await collect(client, "b", [5, 6], greedy(5)))) == 5
        await idle(client)
        assert client.health().ready and "coughed" in client.stats().last_error


CLIENT_SCRIPT = """
import asyncio, sys
from engine import SamplingParams
from engine.client.async_client import make_client
from engine.config import EngineConfig

async def main():
    client = make_client(EngineConfig(model=sys.argv[1], dtype="float32", num_threads=1, graph_manifest="none"))
    await client.start()
    async for _ in client.generate("a", prompt_token_ids=[5], params=SamplingParams(max_tokens=4000, ignore_eos=True)):
        print(client._transport.pid, flush=True)

if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_the_engine_exits_when_its_client_process_is_killed(lively_model, tmp_path):
    script = tmp_path / "client.py"
    script.write_text(CLIENT_SCRIPT)
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        script,
        lively_model,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
    )
    pid = int(await asyncio.wait_for(client.stdout.readline(), PATIENCE))
    assert is_alive(pid)
    client.kill()
    await client.wait()
    await until(lambda: not is_alive(pid), "the engine's end")


# ---- pause ---------------------------------------------------------------------------------------------------------


async def test_a_pause_freezes_holds_and_refuses_the_requests_of_every_client(client):
    async def run(name, count, **options):
        found = []
        params = greedy(count)
        async for deltas in client.stream(name, prompt_token_ids=PROMPTS[0], params=params, **options):
            found += deltas
        return found

    before = client.stats().generation_tokens
    running = asyncio.create_task(run("running", 4000, names=["a", "group"]))
    while client.stats().generation_tokens < before + 10:
        await asyncio.sleep(0.01)
    await client.pause("keep")
    held = asyncio.create_task(run("held", 5, names=["b", "group"]))
    await asyncio.sleep(0.3)
    assert await client.is_paused() and not running.done() and not held.done()
    await until(lambda: client.stats().pause == "keep" and client.stats().num_waiting == 1, "a snapshot of the pause")
    assert await client.abort_requests(["a"]) == 1
    deltas = await running
    assert deltas[-1].finish_reason == "abort" and sum(len(delta.token_ids) for delta in deltas) >= 10
    waiting = asyncio.create_task(client.pause("wait"))
    await asyncio.wait_for(waiting, PATIENCE)
    assert not held.done()
    await client.pause("abort")
    assert [delta.finish_reason for delta in await held] == ["abort"]
    with pytest.raises(EnginePaused, match="takes no new requests"):
        await run("refused", 5)
    with pytest.raises(RequestError, match="abort, wait, keep"):
        await client.pause("stop")
    await client.resume()
    assert not await client.is_paused()
    assert (await run("again", 5))[-1].finish_reason == "length"


async def test_what_chats_need_is_prepared_while_the_model_loads(tiny_model):
    """Else the first chat would wait for it, a second of imports."""

    class Waits(ThreadTransport):
        def start(self, on_report):
            def report(one):
                if isinstance(one, Ready):
                    assert prepared.wait(PATIENCE)
                on_report(one)

            super().start(report)

    prepared = threading.Event()
    prepare_chat = Tokenizer.prepare_chat

    def prepare(tokenizer):
        prepared.set()
        return prepare_chat(tokenizer)

    config = EngineConfig(model=str(tiny_model), **LONG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "prepare_chat", prepare)
        client = EngineClient(config, Waits(config))
        async with serving(client):  # its engine is ready only when chats are being prepared
            assert prepared.is_set()

"""Several clients on one engine: their own answers each, a front that hangs up, an engine that is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest

from engine.client.async_client import EngineClient
from engine.client.router import EngineRouter, RouterTransport
from engine.client.supervisor import RestartPolicy, Supervisor
from engine.client.transport import ProcessTransport
from engine.errors import EngineDead, ModelError
from engine.protocol.messages import Dead, Lost, Ready
from engine.protocol.request import SamplingParams

LONG = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.0)
SHORT = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)


async def until(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {seconds} s"
        await asyncio.sleep(0.02)


async def tokens_of(client: EngineClient, name: str, params: SamplingParams = SHORT, prompt: int = 9) -> list[int]:
    return [token async for delta in client.generate(name, prompt_token_ids=[5, prompt, 200], params=params)
            for token in delta.token_ids]  # fmt: skip


@asynccontextmanager
async def hub_of(config):
    supervisor = Supervisor(lambda: ProcessTransport(config, routed=True), RestartPolicy(first_delay=0.05))
    hub, heard = EngineRouter(supervisor), []
    hub.start(heard.append)
    try:
        yield hub, supervisor, heard
    finally:
        await asyncio.to_thread(hub.stop, 10.0)


async def merge_deltas(hub: EngineRouter, config, number: int) -> EngineClient:
    client = EngineClient(config, RouterTransport(hub.connect(number)), client=number)
    await client.start()
    return client


async def test_fronts_share_an_engine_and_each_gets_its_own_answers(config):
    async with hub_of(config(max_model_len=4096)) as (hub, _, heard):
        one, two = await asyncio.gather(*(merge_deltas(hub, config(), number) for number in (0, 1)))
        alone = [await tokens_of(one, "a", prompt=prompt) for prompt in (9, 10)]
        # The same ids on both, at once; the engine keeps them apart.
        found = await asyncio.gather(*(tokens_of(client, "same", prompt=prompt) for client, prompt in
                                       ((one, 9), (two, 10))))  # fmt: skip
        assert found == alone and alone[0] != alone[1]
        rows = await asyncio.gather(one.graphs(), two.graphs(), one.graphs())
        assert rows[0] == rows[1] == rows[2]
        await until(lambda: one.stats().ended.get("length") == 4 == two.stats().ended.get("length"), "the counts")

        other = asyncio.create_task(tokens_of(two, "b", LONG))
        left = asyncio.create_task(tokens_of(one, "b", LONG))
        await until(lambda: two.stats().num_running == 2, "both")
        await one.close()
        with pytest.raises(EngineDead):
            await left
        assert len(await other) == 3000
        await until(lambda: two.stats().ended.get("abort") == 1, "the abort of what the first had under way")
        # A front that comes later is told at once what the others know.
        late = await asyncio.wait_for(merge_deltas(hub, config(), 2), 2)
        assert late.info() == two.info() and late.stats().ended == two.stats().ended
        assert await tokens_of(late, "a") == alone[0]
        assert [type(report) for report in heard if not hasattr(report, "stats")] == [Ready]
        await asyncio.gather(two.close(), late.close())


async def test_an_engine_that_is_replaced_is_told_to_all_and_to_who_comes_meanwhile(config):
    async with hub_of(config(max_model_len=4096)) as (hub, supervisor, heard):
        one, two = await asyncio.gather(*(merge_deltas(hub, config(), number) for number in (0, 1)))
        expected = await tokens_of(one, "a")
        await until(lambda: two.stats().generation_tokens == 30, "the count")
        running = [asyncio.create_task(tokens_of(client, "b", LONG)) for client in (one, two)]
        await until(lambda: two.stats().num_running == 2, "both")
        os.kill(supervisor.pid, signal.SIGKILL)
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert [type(one) for one in ended] == [EngineDead, EngineDead]
        late = await merge_deltas(hub, config(), 2)  # waits for the next engine
        for client in (one, two, late):
            await until(lambda client=client: client.health().ready, "the restart")
            assert client.health().restarts == 1
            assert await tokens_of(client, "a") == expected
        await until(lambda: late.stats().generation_tokens >= 30 + 90, "the counts of both engines")
        # A report reaches one front after the other.
        await until(lambda: len({client.stats().prompt_tokens for client in (one, two, late)}) == 1, "the same counts")
        assert late.stats().prompt_tokens == one.stats().prompt_tokens == two.stats().prompt_tokens
        assert [type(report) for report in heard if not hasattr(report, "stats")] == [Ready, Lost, Ready]
        await asyncio.gather(*(client.close() for client in (one, two, late)))


async def test_a_refused_start_reaches_every_front_with_its_type(config, tmp_path):
    broken = config(model=str(tmp_path))
    async with hub_of(broken) as (hub, _, heard):
        await until(lambda: bool(heard), "the refusal")
        assert isinstance(heard[0], Dead) and isinstance(heard[0].refused, ModelError)
        client = EngineClient(config(), RouterTransport(hub.connect(0)))
        with pytest.raises(ModelError):
            await client.start()
        await client.close()


async def test_without_the_hub_a_front_has_no_engine(config):
    async with hub_of(config(max_model_len=4096)) as (hub, _, _):
        client = await merge_deltas(hub, config(), 0)
        running = asyncio.create_task(tokens_of(client, "a", LONG))
        await until(lambda: client.stats().num_running == 1, "the request")
        await asyncio.to_thread(hub.stop, 10.0)
        assert len(await running) < 3000  # aborted, as at any engine's stop
        await until(lambda: not client.health().alive, "the news")
        await client.close()

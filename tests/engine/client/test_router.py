"""EngineRouter: separate answers per client, a client that disconnects, an engine that is restarted."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest

from engine.client.async_client import EngineClient
from engine.client.router import EngineRouter, RouterTransport
from engine.client.supervisor import RestartPolicy, Supervisor
from engine.client.transport import ProcessTransport
from engine.errors import EngineDead, ModelError
from engine.protocol.messages import Dead, Lost, Ready
from engine.protocol.request import SamplingParams
from tests.support.waiting import PATIENCE, until

LONG = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.0)
SHORT = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)


async def tokens_of(client: EngineClient, name: str, params: SamplingParams = SHORT, prompt: int = 9) -> list[int]:
    return [token async for delta in client.generate(name, prompt_token_ids=[5, prompt, 200], params=params)
            for token in delta.token_ids]  # fmt: skip


@asynccontextmanager
async def running_router(config):
    supervisor = Supervisor(lambda: ProcessTransport(config, routed=True), RestartPolicy(first_delay=0.05))
    router, reports = EngineRouter(supervisor), []
    router.start(reports.append)
    try:
        yield router, supervisor, reports
    finally:
        await asyncio.to_thread(router.stop, 10.0)


async def connect_client(router: EngineRouter, config, number: int) -> EngineClient:
    client = EngineClient(config, RouterTransport(router.connect(number)), client=number)
    await client.start()
    return client


async def test_clients_share_an_engine_and_each_gets_its_own_answers(config):
    async with running_router(config(max_model_len=4096)) as (router, _, reports):
        first, second = await asyncio.gather(*(connect_client(router, config(), number) for number in (0, 1)))
        expected = [await tokens_of(first, "a", prompt=prompt) for prompt in (9, 10)]
        # Both clients use the same request id at once; the engine must not mix them up.
        answers = await asyncio.gather(*(tokens_of(client, "same", prompt=prompt) for client, prompt in
                                       ((first, 9), (second, 10))))  # fmt: skip
        assert answers == expected and expected[0] != expected[1]
        rows = await asyncio.gather(first.graphs(), second.graphs(), first.graphs())
        assert rows[0] == rows[1] == rows[2]
        await until(lambda: first.stats().ended.get("length") == 4 == second.stats().ended.get("length"), "the counts")

        other = asyncio.create_task(tokens_of(second, "b", LONG))
        interrupted = asyncio.create_task(tokens_of(first, "b", LONG))
        await until(lambda: second.stats().num_running == 2, "both")
        await first.close()
        with pytest.raises(EngineDead):
            await interrupted
        assert len(await other) == 3000
        await until(lambda: second.stats().ended.get("abort") == 1, "the abort of the first client's request")
        # A client that connects later gets the current state at once.
        reconnected = await asyncio.wait_for(connect_client(router, config(), 2), PATIENCE)
        assert reconnected.info() == second.info() and reconnected.stats().ended == second.stats().ended
        assert await tokens_of(reconnected, "a") == expected[0]
        assert [type(report) for report in reports if not hasattr(report, "stats")] == [Ready]
        await asyncio.gather(second.close(), reconnected.close())


async def test_a_restart_is_reported_to_all_clients_and_to_one_that_connects_meanwhile(config):
    async with running_router(config(max_model_len=4096)) as (router, supervisor, reports):
        first, second = await asyncio.gather(*(connect_client(router, config(), number) for number in (0, 1)))
        expected = await tokens_of(first, "a")
        await until(lambda: second.stats().generation_tokens == 30, "the count")
        running = [asyncio.create_task(tokens_of(client, "b", LONG)) for client in (first, second)]
        await until(lambda: second.stats().num_running == 2, "both")
        os.kill(supervisor.pid, signal.SIGKILL)
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert [type(error) for error in ended] == [EngineDead, EngineDead]
        reconnected = await connect_client(router, config(), 2)  # waits for the restarted engine
        for client in (first, second, reconnected):
            await until(lambda client=client: client.health().ready, "the restart")
            assert client.health().restarts == 1
            assert await tokens_of(client, "a") == expected
        await until(lambda: reconnected.stats().generation_tokens >= 30 + 90, "the counts of both engines")
        # A report reaches the clients one after the other.
        await until(
            lambda: len({client.stats().prompt_tokens for client in (first, second, reconnected)}) == 1,
            "the same counts",
        )
        assert reconnected.stats().prompt_tokens == first.stats().prompt_tokens == second.stats().prompt_tokens
        assert [type(report) for report in reports if not hasattr(report, "stats")] == [Ready, Lost, Ready]
        await asyncio.gather(*(client.close() for client in (first, second, reconnected)))


async def test_a_failed_start_reaches_every_client_with_its_error_type(config, tmp_path):
    broken = config(model=str(tmp_path))
    async with running_router(broken) as (router, _, reports):
        await until(lambda: bool(reports), "the rejection")
        assert isinstance(reports[0], Dead) and isinstance(reports[0].refused, ModelError)
        client = EngineClient(config(), RouterTransport(router.connect(0)))
        with pytest.raises(ModelError):
            await client.start()
        await client.close()


async def test_stopping_the_router_disconnects_its_clients(config):
    async with running_router(config(max_model_len=4096)) as (router, _, _):
        client = await connect_client(router, config(), 0)
        running = asyncio.create_task(tokens_of(client, "a", LONG))
        await until(lambda: client.stats().num_running == 1, "the request")
        await asyncio.to_thread(router.stop, 10.0)
        assert len(await running) < 3000  # aborted, as whenever an engine stops
        await until(lambda: not client.health().alive, "the Dead report")
        await client.close()

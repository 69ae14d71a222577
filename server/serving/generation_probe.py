"""A health check that generates a token: it passes only if the whole path to the model works."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from engine.errors import EngineDead, EnginePaused
from engine.protocol.request import SamplingParams
from server.serving.service import Service

PROBE_SECONDS = 20.0  # a step of a loaded engine may take seconds, and this one waits for it
FRESH_SECONDS = 1.0  # a success is valid for this long, so that probes cost at most one token a second
FIRST = -(2**31)  # the highest priority


class GenerationProbe:
    """Generates one token with the highest priority. Checks at the same time share it."""

    def __init__(self, service: Service):
        self._service = service
        self._running: asyncio.Task[None] | None = None
        self._passed_at = float("-inf")

    async def check(self) -> None:
        """Return once a token was generated, now or up to FRESH_SECONDS ago.

        A busy engine passes if it processed any token meanwhile. Raises WireError or EngineError if the server isn't
        ready, EngineDead if the engine doesn't generate within PROBE_SECONDS.
        """
        self._service.check_serving()
        stats = self._service.client.stats()
        if stats.released:
            raise EnginePaused("the engine sleeps, and generates nothing until it is woken up")
        if stats.pause:
            raise EnginePaused("the engine is paused, and generates nothing until it is resumed")
        if time.monotonic() - self._passed_at < FRESH_SECONDS:
            return
        if self._running is None:
            self._running = asyncio.create_task(self._run())
            self._running.add_done_callback(_retrieve)  # every caller may have left
        await asyncio.shield(self._running)

    async def _run(self) -> None:
        before = self._processed()
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._generate()
        except TimeoutError as error:
            if self._processed() == before:
                raise EngineDead(f"the engine has generated no token within {PROBE_SECONDS:g} s") from error
        finally:
            self._running = None
        self._passed_at = time.monotonic()

    async def _generate(self) -> None:
        client, params = self._service.client, SamplingParams(max_tokens=1, temperature=0.0)
        if not client.info().generates_text:
            params = SamplingParams(max_tokens=0, temperature=0.0, pooling="last")
        deltas = client.stream(client.new_id(), prompt_token_ids=[0], params=params, priority=FIRST)
        async with aclosing(deltas):
            async for _ in deltas:
                pass

    def _processed(self) -> int:
        stats = self._service.client.stats()
        return stats.prompt_tokens + stats.generation_tokens


def _retrieve(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()

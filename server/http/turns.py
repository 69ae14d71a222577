"""Start requests in turns: a burst of them shares the event loop with probes and streams that run."""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

STARTS = 16  # per iteration of the event loop; each takes about a millisecond until it waits for its engine


class Turns:
    """Let at most STARTS requests with a body begin in an iteration of the event loop, first come, first served.

    An event loop runs all that is ready before it reads again: the first work of a thousand requests that arrive
    together would take a second, during which no probe is answered.
    """

    def __init__(self, app: ASGIApp):
        self.app = app
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._begun = 0  # in this iteration

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            await self._turn()
        await self.app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if self._begun == STARTS:
            waiter = loop.create_future()
            self._waiting.append(waiter)
            await waiter
            return
        if not self._begun:
            loop.call_soon(self._next_iteration)
        self._begun += 1

    def _next_iteration(self) -> None:
        """Wake the requests that begin in the iteration after this one."""
        self._begun = 0
        while self._waiting and self._begun < STARTS:
            waiter = self._waiting.popleft()
            if not waiter.done():  # else its client left
                waiter.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next_iteration)

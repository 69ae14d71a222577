"""The responses that an API worker generates in the background, after their request was answered."""

from __future__ import annotations

import asyncio
from typing import Any

from server.serving.response_store import ResponseStore

WATCH_SECONDS = 0.25  # another API worker may cancel a response, or delete its entry


class BackgroundRuns:
    """The tasks of running background responses. A response that ends in the store is cancelled here."""

    def __init__(self, store: ResponseStore):
        self._store = store
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._watcher: asyncio.Task[None] | None = None

    def add(self, response_id: str, task: asyncio.Task[Any]) -> None:
        """Keep the task of a response, which is in the store as running."""
        self._tasks[response_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(response_id, None))
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())

    def cancel(self, response_id: str) -> None:
        """Cancel the task of a response, if this API worker has it."""
        if response_id in self._tasks:
            self._tasks[response_id].cancel()

    async def close(self) -> None:
        """Cancel all tasks and wait for their end."""
        tasks = [*self._tasks.values(), *([self._watcher] if self._watcher is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self) -> None:
        while self._tasks:
            await asyncio.sleep(WATCH_SECONDS)
            watched = list(self._tasks)
            running = await self._store.still_running(watched)
            for response_id in watched:
                if response_id not in running:
                    self.cancel(response_id)

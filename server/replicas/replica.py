"""One replica: the HTTP application with its engine, called by the gateway through Ray Serve instead of a socket."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import Message, Scope

from engine.client.async_client import make_client
from engine.errors import EngineDead
from server.app import create_app
from server.config import ServerConfig
from server.keys import Keys
from server.observability.logs import set_up_logging
from server.replicas.commands import Command, newer
from server.replicas.router import Target
from server.serving.response_store import MEMORY
from server.serving.service import Service

log = logging.getLogger("encore.server")
SYNC_SECONDS = 1.0  # between two looks for commands that this replica has missed
FIRST_SYNC_SECONDS = 60.0  # for the command log's own start
MAX_WAITING_MESSAGES = 256  # of a response, before its application waits for the gateway


@dataclass(frozen=True)
class HttpCall:
    """A request as the gateway passes it on: the ASGI scope's plain values, and the whole body.

    `kind` and `sequence` belong to a command that a later replica repeats.
    """

    scope: dict[str, Any]
    body: bytes
    kind: str | None = None
    sequence: int = 0

    def command(self, model: str) -> Command:
        """Return the command of this request, to replicas of `model`."""
        return Command(self.sequence, self.scope["path"], self.scope["query_string"], self.body, model)


@dataclass(frozen=True)
class Part:
    """Some ASGI messages of a response. `has_tokens`: tokens were generated before the last of them was sent."""

    messages: list[Message]
    has_tokens: bool


class Replica:
    """The HTTP application of one replica. Serve counts it as running once its model is loaded.

    `response_store` is the path of a store that all replicas share; ":memory:": each has its own.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ServerConfig, keys: Keys, commands: DeploymentHandle, response_store: str = MEMORY
    ) -> None:
        set_up_logging(config.log_level, config.log_format)
        self.name = serve.get_replica_context().replica_id.unique_id
        self._model = config.engine.model
        self._commands, self._applied = commands, {}  # type: ignore[var-annotated]
        self._key = secrets.token_urlsafe()  # for the commands that this replica repeats
        client = make_client(config.engine, in_process=config.in_process)
        self._app = create_app(client, config, keys=keys.with_admin(self._key), response_store=response_store)
        self._service: Service = self._app.state.service
        self._open = AsyncExitStack()
        await self._open.enter_async_context(self._app.router.lifespan_context(self._app))
        try:
            await self._service.settled.wait()
            if self._service.startup_error is not None:
                raise self._service.startup_error
            async with asyncio.timeout(FIRST_SYNC_SECONDS):
                await self._sync()
        except BaseException:
            await self._open.aclose()
            raise
        log.info("replica %s serves %s", self.name, self._service.model_names()[0])
        self._syncing = asyncio.create_task(self._sync_again())

    async def __del__(self) -> None:
        """Abort what still runs, and stop the engine. Serve waits for running requests before."""
        if hasattr(self, "_syncing"):
            self._syncing.cancel()
            await self._open.aclose()

    async def check_health(self) -> None:
        """Raise EngineDead if the engine has ended for good; Serve then replaces this replica."""
        health = self._service.client.health()
        if not health.alive:
            raise EngineDead(f"the engine of replica {self.name} has ended: {health.reason}")

    async def whoami(self) -> str:
        """Return this replica's name."""
        return self.name

    async def call(self, request: HttpCall, *, target: Target) -> AsyncGenerator[Any, None]:
        """Answer a request: yield this replica's name, then Parts. Closing the generator aborts the request.

        Yields nothing after the name if the request is for another replica, which has ended.
        """
        yield self.name
        if target.replica not in (None, self.name):
            return
        response = _Response(request)
        task = asyncio.create_task(self._run(response))
        try:
            while (part := await response.next_part()) is not None:
                yield part
            await task  # raises what the application raised
        finally:
            response.disconnect()
            await asyncio.gather(task, return_exceptions=True)
        if request.kind is not None and response.status < 400:
            self._applied[request.kind] = request.command(self._model)

    async def _run(self, response: _Response) -> None:
        try:
            await self._app(response.scope, response.receive, response.send)
        finally:
            response.end()

    # ---- commands that this replica has missed -----------------------------------------------------------------------

    async def _sync(self) -> None:
        """Run the commands that others have run and this replica has not. Raises EngineDead if one fails."""
        latest: Mapping[str, Command] = await self._commands.merge.remote(self._applied)
        for kind, command in newer(latest, self._applied, self._model):
            await self._repeat(command)
            self._applied[kind] = command
            log.info("replica %s has repeated %s", self.name, command.path)

    async def _sync_again(self) -> None:
        while True:
            await asyncio.sleep(SYNC_SECONDS)
            try:
                await self._sync()
            except Exception as error:  # the log is being restarted, or a file of weights is gone
                log.error("replica %s can't repeat what the others have run: %s", self.name, error)

    async def _repeat(self, command: Command) -> None:
        """Send a command to the application, as the gateway has done for the other replicas."""
        sent = {
            "host": "localhost", "authorization": f"Bearer {self._key}", "content-type": "application/json",
            "content-length": str(len(command.body)),
        }  # fmt: skip
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": command.path, "raw_path": command.path.encode(), "query_string": command.query, "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
            "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0),
        }  # fmt: skip
        response = _Response(HttpCall(scope, command.body))
        await self._app(response.scope, response.receive, response.send)
        if response.status >= 400:
            raise EngineDead(f"{command.path} answers {response.status}")


class _Response:
    """The ASGI side of one request: what the application receives, and the messages that it has sent."""

    def __init__(self, request: HttpCall):
        self.scope: Scope = {**request.scope, "state": {}}
        self.status = 0
        self._body: bytes | None = request.body
        self._messages: list[Message] = []
        self._changed, self._taken, self._disconnected = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._has_ended = self._has_tokens = False

    async def receive(self) -> Message:
        """Return the body, then wait for the client to leave."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Keep a message for the gateway; wait while it has not taken the ones before."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self._messages.append(message)
        self._changed.set()
        while len(self._messages) >= MAX_WAITING_MESSAGES and not self._disconnected.is_set():
            self._taken.clear()
            await self._taken.wait()

    def end(self) -> None:
        """Note that the application has returned."""
        self._has_ended = True
        self._changed.set()

    def disconnect(self) -> None:
        """Tell the application that its client has left."""
        self._disconnected.set()
        self._taken.set()

    async def next_part(self) -> Part | None:
        """Wait for messages and return all that there are; None at the end."""
        while not self._messages:
            if self._has_ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        messages, self._messages = self._messages, []
        self._taken.set()
        jobs = () if self._has_tokens else self.scope["state"].get("jobs", ())
        self._has_tokens |= any(choice.token_ids for job in jobs for choice in job.choices)
        return Part(messages, self._has_tokens)

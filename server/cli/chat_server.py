"""Where `encore chat` and `encore run` send their requests: a running server, or an engine in this process.

Both speak the OpenAI routes, so that the commands don't know which one it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Coroutine, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from engine.errors import EngineError
from server.cli.json_object import json_object

if TYPE_CHECKING:
    from server.config import ServerConfig

T = TypeVar("T")
GET_SECONDS = 30.0  # for an answer that is not generated
DATA = b"data: "


class AnswerError(EngineError):
    """A request that was refused or failed."""


class ChatServer(Protocol):
    """Answers requests of the OpenAI routes."""

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON of a GET request. Raises AnswerError."""

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON of a POST request. Raises AnswerError."""

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        """Yield the events of a streamed answer. Closing the iterator stops the answer. Raises AnswerError."""

    def close(self) -> None:
        """Release everything."""


class RemoteServer:
    """A server at a URL, with or without /v1 at its end. `key` is its API key, if it needs one."""

    def __init__(self, url: str, key: str | None = None):
        self._url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def get(self, path: str) -> dict[str, Any]:
        with self._open(path, None, GET_SECONDS) as answer:
            return json_object(answer.read(), self._url + path, AnswerError)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        with self._open(path, json.dumps(body).encode(), GET_SECONDS) as answer:
            return json_object(answer.read(), self._url + path, AnswerError)

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        with self._open(path, json.dumps({**body, "stream": True}).encode(), None) as answer:
            try:
                yield from _events(answer)
            except (OSError, http.client.HTTPException) as error:
                raise AnswerError(f"the connection to {self._url} broke: {error}") from error

    def close(self) -> None:
        pass

    def _open(self, path: str, body: bytes | None, timeout: float | None) -> Any:
        url = self._url + path
        try:
            request = urllib.request.Request(url, body, self._headers)
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            with error:
                raise AnswerError(_message(error.read(), f"{url} returned {error.code}")) from error
        except urllib.error.URLError as error:
            raise AnswerError(f"can't reach {url} ({error.reason}): is the server running?") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise AnswerError(f"can't read {url}: {error}") from error


class InProcessServer:
    """A server's application without a socket, with an engine in this process. Its event loop runs in a thread.

    Raises the engine's error if the model can't be loaded.
    """

    def __init__(self, config: ServerConfig):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="encore-chat")
        self._thread.start()
        self._open = contextlib.AsyncExitStack()
        try:
            self._app = self._call(self._start(config))
        except BaseException:
            self.close()  # after Ctrl-C, this waits for the model to be loaded
            raise

    async def _start(self, config: ServerConfig) -> Any:
        from engine.client.async_client import make_client
        from server.app import create_app

        app = create_app(make_client(config.engine, in_process=True), config)
        await self._open.enter_async_context(app.router.lifespan_context(app))
        await app.state.service.settled.wait()
        if app.state.service.startup_error is not None:
            raise app.state.service.startup_error
        return app

    def get(self, path: str) -> dict[str, Any]:
        return json_object(b"".join(self._request("GET", path, b"")), path, AnswerError)

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return json_object(b"".join(self._request("POST", path, json.dumps(body).encode())), path, AnswerError)

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[dict[str, Any]]:
        chunks = self._request("POST", path, json.dumps({**body, "stream": True}).encode())
        with contextlib.closing(chunks):
            yield from _events(_lines(chunks))

    def close(self) -> None:
        self._call(self._open.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # after Ctrl-C
            raise

    def _request(self, method: str, path: str, body: bytes) -> Generator[bytes]:
        """Yield the body of the application's response. Closing the iterator disconnects. Raises AnswerError."""
        arrived: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        gone = asyncio.Event()
        answer = asyncio.run_coroutine_threadsafe(self._exchange(method, path, body, arrived, gone), self._loop)
        try:
            status = 0
            while (message := arrived.get()) is not None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                elif status >= 400:
                    raise AnswerError(_message(message["body"], f"{path} returned {status}"))
                elif message.get("body"):
                    yield message["body"]
            answer.result()
        finally:
            self._loop.call_soon_threadsafe(gone.set)

    async def _exchange(
        self, method: str, path: str, body: bytes, arrived: queue.SimpleQueue[Any], gone: asyncio.Event
    ) -> None:
        """Call the application as an ASGI server does, and put its messages and then None into `arrived`."""
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
            "client": None, "server": None, "state": {},
        }  # fmt: skip
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Mapping[str, Any]:
            if pending:
                return pending.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Mapping[str, Any]) -> None:
            arrived.put(message)

        try:
            await self._app(scope, receive, send)
        finally:
            arrived.put(None)


def open_server(url: str | None, key: str | None, settings: Mapping[str, Any]) -> ChatServer:
    """Return the server at `url`, or without one a server in this process with these engine settings."""
    if url is not None:
        return RemoteServer(url, key)
    from engine.config import EngineConfig
    from server.config import ServerConfig

    engine = EngineConfig.from_dict(dict(settings))
    return InProcessServer(ServerConfig(engine=engine, in_process=True, response_store_entries=0))


def model_entry(server: ChatServer, name: str | None) -> dict[str, Any]:
    """Return the entry of /v1/models of a served model; without a name, of the first. Raises AnswerError."""
    entries = server.get("/v1/models").get("data") or []
    found = next((entry for entry in entries if name in (None, entry["id"])), None)
    if found is None:
        raise AnswerError(f"{name!r} is not served; served models: {', '.join(entry['id'] for entry in entries)}")
    return found


def _events(lines: Iterable[bytes]) -> Generator[dict[str, Any]]:
    for line in lines:
        if not line.startswith(DATA) or line.rstrip() == DATA + b"[DONE]":
            continue
        found = json_object(line.removeprefix(DATA), "the stream", AnswerError)
        if "error" in found:
            raise AnswerError(_message(line.removeprefix(DATA), "the stream failed"))
        yield found


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    yield rest


def _message(body: bytes, otherwise: str) -> str:
    """Return the message of an error's body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return otherwise

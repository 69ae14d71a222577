"""The gateway: takes HTTP requests, and passes each to a replica, or to all.

A request whose replica dies or refuses it goes to another one, as long as the client has no token of it. Admin requests
go to all replicas.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.config import ServerConfig
from server.http.body_budget import BodyBudget
from server.http.body_route import LARGE_BYTES
from server.http.errors import WireError, error_response
from server.http.keys import KeyMiddleware
from server.http.middleware import BodyLimit, CloseWhenDraining, RequestIds
from server.http.root_path import RootPath
from server.http.streaming import ClientDisconnected, until_disconnect
from server.keys import Keys
from server.observability.logs import set_up_logging
from server.observability.shared_counters import SharedCounters
from server.observability.tracing import TraceRequests, Tracing
from server.pages import page
from server.replicas.affinity import affinity_of
from server.replicas.answers import RESPONSES_PATH, Answer, broken_stream, merged, merged_metrics
from server.replicas.commands import KINDS, is_command, refuse_unshared
from server.replicas.replica import HttpCall, Part
from server.replicas.router import Target

log = logging.getLogger("encore.server")
REPLICA_HEADER, REPLICAS_HEADER = "X-Encore-Replica", "X-Encore-Replicas"
MAX_TRIES = 3  # of one request; one that kills its replica must not kill them all
RETRIED_STATUSES = (429, 503)
ASSIGN_SECONDS = 60.0  # for a replica to take a request, while none is running
NAMES_SECONDS = 5.0  # for all replicas to tell their names
_SCOPE_KEYS = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers",
    "client", "server",
)  # fmt: skip
_COUNTED_ROUTES = ("/load", "/graphs")  # open routes whose answers are merged as the answers of admin routes are


class Gateway:
    """The ASGI application in front of the replicas. A deployment of Ray Serve.

    `shares_store`: all replicas have one store of responses, so that any of them finds each response.
    """

    def __init__(
        self, config: ServerConfig, keys: Keys, replicas: DeploymentHandle, commands: DeploymentHandle,
        shares_store: bool,
    ):  # fmt: skip
        set_up_logging(config.log_level, config.log_format)
        self._config, self._keys, self._shares_store = config, keys, shares_store
        self._replicas = Replicas(replicas)
        self._commands = commands
        self._is_draining = False
        self._unanswered = 0
        endpoint = config.otlp_traces_endpoint
        self._tracing = None if endpoint is None else Tracing(endpoint, "gateway")
        self._app = self._with_middleware()

    async def __del__(self) -> None:
        """Send the spans that are left. Serve calls it."""
        tracing = getattr(self, "_tracing", None)  # missing if __init__ has failed
        if tracing is not None:
            await tracing.close()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application for Serve's proxy."""
        return self._app

    async def post(self, path: str, body: Mapping[str, Any], key: str = "") -> tuple[int, Any]:
        """Answer a POST request of a program that has Serve's handle, as over HTTP. Return its status and its JSON.

        `key`: an API key, if requests need one. A streamed response is not JSON: leave `stream` out of the body.
        """
        content = json.dumps(body).encode()
        sent = {"host": "localhost", "content-type": "application/json", "content-length": str(len(content))}
        if key:
            sent["authorization"] = f"Bearer {key}"
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": self._config.root_path + path, "raw_path": (self._config.root_path + path).encode(),
            "query_string": b"", "root_path": "", "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0),
            "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
        }  # fmt: skip
        messages = [{"type": "http.request", "body": content, "more_body": False}]
        whole = _Whole()

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()  # the caller does not leave
            raise AssertionError("unreachable")

        await self._app(scope, receive, whole.send)
        answer = whole.answer()
        return answer.status, json.loads(answer.body)

    def _with_middleware(self) -> ASGIApp:
        """Return the application with the middleware that it shares with a server of one process."""
        config = self._config
        app: ASGIApp = self._answer
        app = BodyLimit(
            app, max_bytes=config.max_body_bytes, max_items=config.max_body_items, seconds=config.body_seconds,
            budget=BodyBudget(config.total_body_bytes, SharedCounters()),
        )  # fmt: skip
        app = KeyMiddleware(app, keys=self._keys, local_admin=config.admin_without_key == "loopback")
        app = RequestIds(app)
        if self._tracing is not None:
            app = TraceRequests(app, self._tracing)
        app = CloseWhenDraining(_leave_request_id_out(app), is_draining=lambda: self._is_draining)
        return RootPath(app, prefix=config.root_path) if config.root_path else app

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait up to `seconds` for running ones. Returns whether all have been answered."""
        self._is_draining, until = True, time.monotonic() + seconds
        while self._unanswered and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return not self._unanswered

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        request = Request(scope, receive)
        relay = Relay(scope, send)
        self._unanswered += 1
        try:
            body = await request.body()
            response = await until_disconnect(request, self._route(_plain(scope), body, relay))
            if response is not None:
                await response(scope, receive, send)
        except ClientDisconnected:
            return
        except WireError as error:
            await relay.fail(error)
        finally:
            self._unanswered -= 1

    # ---- one request -------------------------------------------------------------------------------------------------

    async def _route(self, scope: dict[str, Any], body: bytes, relay: Relay) -> Response | None:
        """Pass a request on. Returns its response where the gateway makes it; else the relay has sent it."""
        path, method, headers = scope["path"], scope["method"], Headers(raw=scope["headers"])
        if self._is_draining and method == "POST":
            raise WireError(
                503, "the server is shutting down", type="service_unavailable_error", code="draining", retry_after=5
            )
        chosen = headers.get(REPLICA_HEADER)
        if chosen is not None:
            await self._pass_on(HttpCall(scope, body), Target(replica=chosen), relay)
        elif path == "/health":
            return JSONResponse({"status": "ok"})
        elif path == "/ready":
            return await self._ready(scope)
        elif path == "/metrics":
            return await self._metrics(scope)
        elif path == "/" and _accepts_json(headers):
            return await self._status(scope)
        elif is_command(method, path) or (path in _COUNTED_ROUTES and "text/html" not in headers.get("accept", "")):
            return await self._command(scope, body)
        elif path.startswith(RESPONSES_PATH + "/") and not self._shares_store:
            response_id = path.removeprefix(RESPONSES_PATH).split("/")[1]
            await self._pass_on(HttpCall(scope, body), Target(replica=await self._find(scope, response_id)), relay)
        else:
            sent = await _json(body) if method == "POST" else None
            target = Target(affinity_of(sent))
            if path == RESPONSES_PATH and isinstance(sent, Mapping) and not self._shares_store:
                previous = sent.get("previous_response_id")
                if isinstance(previous, str):
                    target = Target(target.affinity, replica=await self._find(scope, previous))
            await self._pass_on(HttpCall(scope, body), target, relay)
        return None

    async def _pass_on(self, call: HttpCall, target: Target, relay: Relay) -> None:
        """Send a request to a replica and relay its response; to another one if that is possible and needed."""
        avoided: frozenset[str] = frozenset()
        for number in range(1, MAX_TRIES + 1):
            is_last = number == MAX_TRIES or target.replica is not None
            try:
                await self._replicas.relay(call, Target(target.affinity, target.replica, avoided), relay, is_last)
                return
            except Refused:
                log.info("replica %s refuses a request: trying another one", relay.replica)
            except RayActorError as error:
                if relay.has_begun or is_last:
                    raise _lost(relay.replica) from error
                log.warning("replica %s has ended: its request goes to another one", relay.replica)
            avoided |= {relay.replica}
            relay.forget()

    async def _find(self, scope: Mapping[str, Any], response_id: str) -> str | None:
        """Return the replica that has a stored response; None if none has, so that any of them can say so."""
        look = HttpCall({**scope, "method": "GET", "path": f"{RESPONSES_PATH}/{response_id}", "query_string": b""}, b"")
        answers = await self._replicas.ask_all(look)
        return next((name for name, answer in answers.items() if answer.status != 404), None)

    # ---- all replicas ------------------------------------------------------------------------------------------------

    async def _command(self, scope: dict[str, Any], body: bytes) -> Response:
        """Send an admin request to all replicas, and merge their answers."""
        path, is_change = scope["path"], scope["method"] == "POST"
        refuse_unshared(path, await _json(body))
        kind = KINDS.get(path) if is_change else None
        call = HttpCall(scope, body, kind, time.time_ns())
        answers = await self._replicas.ask_all(call)
        if kind is not None and any(answer.status < 400 for answer in answers.values()):
            await self._commands.merge.remote({kind: call.command(self._config.engine.model)})
        status, found = merged(answers)
        headers = {**page.HEADERS, REPLICAS_HEADER: ",".join(answers)}
        return JSONResponse(found, status_code=status, headers=headers)

    async def _ready(self, scope: dict[str, Any]) -> Response:
        """Ready if a replica is."""
        try:
            answers = await self._replicas.ask_all(HttpCall(scope, b""))
        except WireError as error:
            return _not_ready({"ready": False, "reasons": [str(error)], "warm": {}, "replicas": {}})
        bodies = {name: json.loads(answer.body) for name, answer in answers.items() if answer.body}
        first = next((one for one in bodies.values() if one.get("ready")), None)
        if first is not None and not self._is_draining:
            return JSONResponse({**first, "replicas": bodies})
        reasons = [f"{name}: {reason}" for name, one in bodies.items() for reason in one.get("reasons", ())]
        reasons = ["shutting down"] if self._is_draining else reasons
        return _not_ready({"ready": False, "reasons": reasons, "warm": {}, "replicas": bodies})

    async def _metrics(self, scope: dict[str, Any]) -> Response:
        answers = await self._replicas.ask_all(HttpCall(scope, b""))
        good = {name: one for name, one in answers.items() if one.status == 200}
        kinds = [value for one in good.values() for key, value in one.headers if key == b"content-type"]
        text = merged_metrics({name: one.body.decode() for name, one in good.items()})
        return Response(text, headers={"Content-Type": kinds[0].decode() if kinds else "text/plain"})

    async def _status(self, scope: dict[str, Any]) -> Response:
        """The status of the first replica, and that of each under "replicas"."""
        answers = await self._replicas.ask_all(HttpCall(scope, b""))
        bodies = {name: json.loads(one.body) for name, one in answers.items() if one.status == 200}
        short = {
            name: {key: value for key, value in body.items() if key not in ("history", "graphs")}
            for name, body in bodies.items()
        }
        return JSONResponse(next(iter(bodies.values()), {}) | {"replicas": short}, headers=page.HEADERS)


class Refused(Exception):
    """A replica answered 429 or 503 and another one may take the request."""


class Replicas:
    """Calls of the deployment of replicas."""

    def __init__(self, handle: DeploymentHandle):
        self._handle = handle.options(stream=True)

    async def names(self) -> list[str]:
        """Return the names of the running replicas, sorted. Raises WireError 503 if there are none."""
        asked = self._handle.broadcast("whoami")
        try:
            found = await asked.results_async(timeout_s=NAMES_SECONDS, return_exceptions=True)
        except (TimeoutError, RayServeException):  # none has started, or all are too busy
            found = []
        names = sorted(name for name in found if isinstance(name, str))
        if not names:
            raise WireError(
                503, "no replica is running; try again soon", type="service_unavailable_error", code="loading",
                retry_after=2,
            )  # fmt: skip
        return names

    async def ask_all(self, call: HttpCall) -> dict[str, Answer]:
        """Send a request to all replicas and return their answers by name. One that ends meanwhile answers 503."""
        names = await self.names()
        answers = await asyncio.gather(*(self._ask(call, name) for name in names))
        return dict(zip(names, answers, strict=True))

    async def _ask(self, call: HttpCall, name: str) -> Answer:
        whole = _Whole()
        try:
            await self.relay(call, Target(replica=name), Relay(call.scope, whole.send), is_last=True)
        except RayActorError:
            response = error_response(_lost(name), call.scope)
            return Answer(503, list(response.raw_headers), bytes(response.body))
        except WireError as error:
            response = error_response(error, call.scope)
            return Answer(error.status, list(response.raw_headers), bytes(response.body))
        return whole.answer()

    async def relay(self, call: HttpCall, target: Target, relay: Relay, is_last: bool) -> None:
        """Relay the response of the replica that takes the request.

        Raises Refused if it refuses and this is not the last try, RayActorError if it dies, and WireError for errors.
        """
        # Without the context of Serve's request, whose id its calls share: Serve's router would mix them up.
        parts = contextvars.Context().run(self._handle.call.remote, call, target=target)
        items = aiter(parts)
        try:
            async with asyncio.timeout(ASSIGN_SECONDS):
                relay.replica = await anext(items)
            if target.replica not in (None, relay.replica):
                raise _lost(str(target.replica))
            async for part in items:
                may_retry = not is_last and relay.replica not in target.avoided  # else no other replica is free
                if may_retry and not relay.has_begun and _status(part) in RETRIED_STATUSES:
                    raise Refused
                await relay.take(part)
            await relay.finish()
        except TimeoutError as error:
            raise WireError(
                503, f"no replica takes the request within {ASSIGN_SECONDS:g} s", type="service_unavailable_error",
                code="loading", retry_after=5,
            ) from error  # fmt: skip
        except RayActorError:
            raise
        except (RayTaskError, RayError, RayServeException) as error:
            log.error("replica %s failed to answer: %s", relay.replica, error)
            raise WireError(
                500, "internal error while handling this request; see the replica's log", type="server_error",
                code="internal_error",
            ) from error  # fmt: skip
        finally:
            parts.cancel()


class Relay:
    """Sends a replica's response to the client. Messages are held back until the response has a token or ends.

    So the client has nothing of a response yet if its replica dies before the first token.
    """

    def __init__(self, scope: Mapping[str, Any], send: Send):
        self._scope, self._send = dict(scope), send
        self._holds = scope["method"] == "POST"
        self._held: list[Message] = []
        self._content_type, self._num_events = "", 0
        self.has_begun = False  # the client has a part of the response
        self.replica = ""

    async def take(self, part: Part) -> None:
        """Send a part of the response, or hold it back."""
        self._held += part.messages
        if self.has_begun or part.has_tokens or not self._holds:
            await self.finish()

    async def finish(self) -> None:
        """Send what is held back."""
        held, self._held = self._held, []
        for message in held:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REPLICA_HEADER] = self.replica
                self._content_type = headers.get("content-type", "")
            else:
                self._num_events += message.get("body", b"").count(b"\n\n")
            self.has_begun = True
            await self._send(message)

    def forget(self) -> None:
        """Drop what is held back, for another replica's response."""
        self._held = []

    async def fail(self, error: WireError) -> None:
        """End the response with an error. Raises it if the response has begun and its format has no place for one."""
        self.forget()
        if not self.has_begun:
            await error_response(error, self._scope)(self._scope, _no_body, self._send)
            return
        end = broken_stream(self._scope, self._content_type, self._num_events, error)
        if end is None:
            raise error  # the connection is closed, so that the client sees a cut response
        await self._send({"type": "http.response.body", "body": end, "more_body": False})


class _Whole:
    """Collects a response."""

    def __init__(self) -> None:
        self._start: Message = {"status": 500, "headers": []}
        self._parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self._parts.append(message.get("body", b""))

    def answer(self) -> Answer:
        return Answer(self._start["status"], list(self._start["headers"]), b"".join(self._parts))


def _plain(scope: Scope) -> dict[str, Any]:
    """Return the values of a scope that can be sent to another process, with the request's id as a header."""
    plain = {key: scope[key] for key in _SCOPE_KEYS if key in scope}
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"] if name != b"x-request-id"]
    plain["headers"] = [*headers, (b"x-request-id", scope["state"]["request_id"].encode())]
    return plain


def _status(part: Part) -> int:
    """Return the status in the first message of a response; 0 in later parts."""
    return part.messages[0].get("status", 0)


def _lost(replica: str) -> WireError:
    return WireError(
        503, f"the replica {replica} that handled this request has ended; send the request again",
        type="service_unavailable_error", code="replica_lost", retry_after=1,
    )  # fmt: skip


def _not_ready(body: dict[str, Any]) -> Response:
    return JSONResponse(body, status_code=503, headers={"Retry-After": "2"})


def _accepts_json(headers: Headers) -> bool:
    accepted = headers.get("accept", "")
    return "application/json" in accepted and "text/html" not in accepted


async def _json(body: bytes) -> Any:
    """Parse a body; None if it is empty or invalid, which a replica then refuses."""
    if not body:
        return None
    try:
        return json.loads(body) if len(body) <= LARGE_BYTES else await asyncio.to_thread(json.loads, body)
    except (ValueError, RecursionError):
        return None


def _leave_request_id_out(app: ASGIApp) -> ASGIApp:
    """Return an application without the header X-Request-Id in its responses: Serve's proxy adds it, with the same id.

    The proxy also makes an id for requests without one.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["X-Request-Id"]
            await send(message)

        await app(scope, receive, send_without_id)

    return answer


async def _no_body() -> Message:
    return {"type": "http.disconnect"}


async def _lifespan(receive: Receive, send: Send) -> None:
    for event in ("startup", "shutdown"):
        await receive()
        await send({"type": f"lifespan.{event}.complete"})

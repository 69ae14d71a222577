"""Long-running endpoints: what they hold, and when it is let go."""

from __future__ import annotations

import asyncio
import gc
from contextlib import contextmanager

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.middleware import Middleware

from engine.errors import RequestError
from server.http.body_route import BodyRoute
from server.http.errors import install_error_handlers
from server.http.long_running import hold, long_running
from server.http.middleware import RequestIds
from server.http.streaming import EventStream
from tests.support.waiting import PATIENCE, until

UNREAD = "a field that no model has"


class Body(BaseModel):
    kind: str


def objects_of_json() -> int:
    """Number of parsed bodies in memory."""
    return sum(type(one) is dict and UNREAD in one for one in gc.get_objects())


@pytest.fixture
def log():
    return []


@pytest.fixture
def app(log):
    """An application whose endpoint holds a context, and then does what its body says."""
    router = APIRouter(route_class=BodyRoute)

    @contextmanager
    def place():
        log.append("held")
        try:
            yield
        finally:
            log.append("left")

    @router.post("/")
    @long_running
    async def endpoint(body: Body, request: Request) -> Response:
        """Say what is done."""
        hold(request, place())
        log.append(objects_of_json())
        if body.kind == "refuse":
            raise RequestError("no", param="kind")
        if body.kind == "wait":
            await asyncio.sleep(3600)

        async def events():
            yield b"data: {}\n\n"
            log.append("sent")
            if body.kind == "stream and wait":
                await asyncio.sleep(3600)

        return EventStream(events()) if body.kind.startswith("stream") else JSONResponse({})

    @router.post("/short")
    async def short(body: Body) -> Response:
        log.append(objects_of_json())
        return JSONResponse({})

    app = FastAPI(middleware=[Middleware(RequestIds)])
    install_error_handlers(app)
    app.include_router(router)
    return app


async def status_of(app, kind, path="/"):
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = f'{{"kind": "{kind}", "{UNREAD}": [1]}}'
        return (await client.post(path, content=body, headers={"content-type": "application/json"})).status_code


@pytest.mark.parametrize(
    ("kind", "status", "between"), [("answer", 200, []), ("stream", 200, ["sent"]), ("refuse", 400, [])]
)
async def test_the_json_is_gone_at_the_start_and_a_place_is_held_until_the_end(app, log, kind, status, between):
    assert await status_of(app, kind) == status
    assert log == ["held", 0, *between, "left"]
    log.clear()
    await status_of(app, kind, "/short")
    assert log == [1], "FastAPI lets go of the JSON by itself"


@pytest.mark.parametrize(("kind", "sent"), [("wait", []), ("stream and wait", [200])])
async def test_a_client_that_leaves_cancels_the_endpoint_or_its_response(app, log, kind, sent):
    gone, messages = asyncio.Event(), []

    async def receive():
        if not messages:
            messages.append("body")
            return {"type": "http.request", "body": f'{{"kind": "{kind}", "{UNREAD}": 1}}'.encode()}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        messages.append(message)

    scope = {
        "type": "http", "method": "POST", "path": "/", "raw_path": b"/", "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "server": ("test", 80), "http_version": "1.1",
    }  # fmt: skip
    answering = asyncio.create_task(app(scope, receive, send))
    await until(lambda: ("sent" if sent else "held") in log, "the endpoint")
    gone.set()
    await asyncio.wait_for(answering, PATIENCE)
    assert log[0] == "held" and log[-1] == "left"
    statuses = [message["status"] for message in messages[1:] if message["type"] == "http.response.start"]
    assert statuses == (sent or [499])


def test_the_schema_of_a_long_running_endpoint_is_its_own(app):
    operation = app.openapi()["paths"]["/"]["post"]
    assert operation["summary"] == "Endpoint" and operation["description"] == "Say what is done."
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/Body"}

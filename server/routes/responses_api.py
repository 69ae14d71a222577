"""OpenAI's Responses API: /v1/responses, served as chats, and a store of responses."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from json.encoder import encode_basestring
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from engine.errors import RequestError
from engine.protocol.outputs import OutputDelta
from engine.text.parsing.chat import ChatParser, joined
from engine.text.parsing.parts import Part
from server.http.body_route import BodyRoute
from server.http.direct import direct_writer
from server.http.errors import WireError, aborted, body_of
from server.http.long_running import hold, long_running
from server.http.openapi import REFUSALS, answered_by
from server.http.streaming import EventStream, JSONAnswer, log_if_severe, named_event
from server.routes import openai_answers as answers
from server.routes.chat_run import ChatRun
from server.routes.responses_api_outputs import Event, Logprobs, ResponseEvents
from server.schemas import responses_api_answers as wire
from server.schemas.responses_api import SENT_NAMES, ResponsesBody
from server.serving.admission import Reservation
from server.serving.background_runs import BackgroundRuns
from server.serving.jobs import Job
from server.serving.response_store import ResponseStore, too_large
from server.serving.service import Service

FLUSH_SECONDS = 0.1  # between writes of a background response's events to the store
POLL_SECONDS = 0.05  # between reads of them
TEXT_DELTAS = ("response.output_text.delta", "response.reasoning_text.delta")
PLACEHOLDER = "\ue000the text\ue001"  # replaced by the text of each delta

router = APIRouter(prefix="/v1/responses", tags=["openai"], responses=REFUSALS, route_class=BodyRoute)


@router.post("", responses=answered_by(wire.ResponseObject, "text/event-stream"))
@long_running
async def create(body: ResponsesBody, request: Request) -> Response:
    """Generate a response to an input of text or items, and store it unless the request says otherwise."""
    body.refuse_unsupported()
    store: ResponseStore | None = request.app.state.response_store
    if store is None and (body.store or body.background or body.previous_response_id is not None):
        param = "background" if body.background else "store" if body.store else "previous_response_id"
        raise RequestError(
            f"{param} is not available: this server stores no responses (--response-store-entries 0)", param=param
        )
    if body.background and body.store is False:
        raise RequestError("background can only be used when `store` is true: remove store", param="background")
    previous: list[dict[str, Any]] = []
    if store is not None and body.previous_response_id is not None:
        found = await store.conversation(body.previous_response_id, request.state.owner)
        if found is None:
            raise WireError(
                400, f"previous_response_id: {_unknown(body.previous_response_id)}",
                param="previous_response_id", code="previous_response_not_found",
            )  # fmt: skip
        previous = found
    run = _ResponseRun(request, body, previous, store if body.store is not False else None)
    if body.background and store is not None:
        background = _BackgroundRun(run, store, request.state.owner, request.app.state.background_runs)
        response = await background.start(bool(body.stream))
        return EventStream(background.stream(), run.failed, last=b"") if body.stream else JSONAnswer(response)
    reservation = hold(request, run.service.admission.reserve(1))
    job = await run.chat.tokenize()
    if body.stream:
        return EventStream(run.stream(job, reservation), run.failed, last=b"")
    return JSONAnswer(await run.answer(job, reservation))


@router.get("/{response_id}", responses=answered_by(wire.ResponseObject, "text/event-stream"))
@long_running
async def retrieve(
    response_id: str, request: Request, stream: bool = False, starting_after: Annotated[int | None, Query(ge=0)] = None
) -> Response:
    """Return a stored response; with `stream` the events of a background response, after event `starting_after`."""
    store = _store(request, response_id)
    found = await store.response(response_id, request.state.owner)
    if found is None:
        raise _not_found(response_id)
    if not stream:
        if starting_after is not None:
            raise RequestError("starting_after requires stream=true", param="starting_after")
        return Response(found, media_type="application/json")
    if not await store.has_events(response_id):
        raise RequestError(
            f"stream: {response_id[:80]} has no events: it was not created with background=true and stream=true",
            param="stream",
        )
    after = -1 if starting_after is None else starting_after
    return EventStream(_stored_events(store, response_id, request.state.owner, after), last=b"")


@router.get("/{response_id}/input_items", responses=answered_by(wire.ItemList))
async def input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """Return the input items of a stored response and of the responses that it continues."""
    items = await _store(request, response_id).items(response_id, request.state.owner)
    if items is None:
        raise _not_found(response_id)
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise RequestError(f"after: the response has no input item {after[:80]!r}", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(items) > limit})


@router.delete("/{response_id}", responses=answered_by(wire.DeletedResponse))
async def delete(response_id: str, request: Request) -> dict[str, Any]:
    """Delete a stored response. Responses that continue it keep their own copy of the conversation.

    A background response that runs is cancelled.
    """
    if not await _store(request, response_id).delete(response_id, request.state.owner):
        raise _not_found(response_id)
    request.app.state.background_runs.cancel(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/{response_id}/cancel", responses=answered_by(wire.ResponseObject))
async def cancel(response_id: str, request: Request) -> Response:
    """Cancel a background response, and return it. One that has ended is returned as it is."""
    found = await _store(request, response_id).cancel(response_id, request.state.owner)
    if found is None:
        raise _not_found(response_id)
    if not json.loads(found)["background"]:
        raise RequestError(
            "Cannot cancel a synchronous response. Only background responses can be cancelled; close the connection of "
            "another request instead",
            param="response_id",
        )
    request.app.state.background_runs.cancel(response_id)
    return Response(found, media_type="application/json")


async def _stored_events(store: ResponseStore, response_id: str, owner: str, after: int) -> AsyncGenerator[bytes, None]:
    """Yield the events of a background response that follow event `after`, until it has ended."""
    is_running = True
    while is_running:
        found = await store.events(response_id, owner, after)
        if found is None:  # deleted, or no room for it
            return
        events, is_running = found
        if events:
            after = events[-1][0]
            yield b"".join(data for _, data in events)
        elif is_running:
            await asyncio.sleep(POLL_SECONDS)


class _ResponseRun:
    """One request: its chat, and its answer as events or as a whole. `store`: where to keep it; None: nowhere."""

    def __init__(
        self, request: Request, body: ResponsesBody, previous: list[dict[str, Any]], store: ResponseStore | None
    ):
        self._request = request
        self.service: Service = request.app.state.service
        items = body.items()
        chat, places = body.chat(previous, items)
        self._items = [*previous, *items]
        self._store, self._owner, self.scope = store, request.state.owner, request.scope
        _ = self.service.tokens  # raises 503 until the model is loaded
        self._is_background = bool(body.background)
        self._response = _in_progress(
            body, body.model or self.service.model_names()[0], store is not None, self.service.sampling_defaults()
        )
        self.chat = ChatRun(self.service, request, chat, self._response["id"], SENT_NAMES, places)
        self._spelling = answers.Spelling(self.service.tokens) if body.wants_logprobs else None
        self._events = ResponseEvents()
        self._numbers = 0
        self._frame = ("", "", "")  # the item of the last text delta, and the JSON before and after its text
        self._reasoning_tokens = 0

    async def stream(self, job: Job, reservation: Reservation) -> AsyncGenerator[bytes, None]:
        """Run the job and yield the events of the answer."""
        async with aclosing(self.pieces(job, reservation, streams=True)) as pieces:
            async for events in pieces:
                if events:
                    yield self._written(events)

    async def answer(self, job: Job, reservation: Reservation) -> dict[str, Any]:
        """Run the job and return the whole response."""
        async with aclosing(self.pieces(job, reservation)) as pieces:
            async for _ in pieces:
                pass
        return self._response

    def failed(self, exc: Exception) -> bytes:
        """Return the last event of a stream that fails."""
        response = self.failed_response(exc) | {"output": self._events.output, "store": False}
        return self._written([{"type": "response.failed", "response": response}])

    def failed_response(self, exc: Exception) -> dict[str, Any]:
        """Return the response to a request that fails, without output."""
        status, body, _ = body_of(exc)
        code = "server_error" if status >= 500 else "invalid_prompt"
        error = {"code": code, "message": body["error"]["message"]}
        return self._response | {"status": "failed", "completed_at": None, "error": error, "output": [], "usage": None}

    @property
    def response(self) -> dict[str, Any]:
        """The response as it is so far."""
        return self._response

    def numbered(self, events: list[Event]) -> list[tuple[int, bytes]]:
        """Return events as they are sent, with their numbers."""
        found = []
        for event in events:
            found.append((self._numbers, self._text(event).encode()))
            self._numbers += 1
        return found

    def _text(self, event: Event) -> str:
        """Return an event with its number. Text deltas of one item differ in text and number only: the rest is kept."""
        if event["type"] not in TEXT_DELTAS or event.get("logprobs"):
            return named_event(event["type"], event | {"sequence_number": self._numbers})
        if event["item_id"] != self._frame[0]:
            framed = named_event(event["type"], event | {"delta": PLACEHOLDER, "sequence_number": 0})
            before, _, after = framed.partition(encode_basestring(PLACEHOLDER))
            self._frame = event["item_id"], before, after.removesuffix("0}\n\n")
        _, before, after = self._frame
        return f"{before}{encode_basestring(event['delta'])}{after}{self._numbers}}}\n\n"

    async def pieces(self, job: Job, reservation: Reservation, streams: bool = False) -> AsyncGenerator[list[Event]]:
        """Run the job and yield the events of each piece of the output; after the last, the response is complete.

        Events of a stream to the client that were written directly are left out.
        The first piece of a background response comes once it is stored, before it runs. The caller stores the rest.
        """
        with self.chat.translated():
            self._events = ResponseEvents(self.chat.short_ids)
            items, self._items = self._items, []
            stores = self._store is not None and await self._store.begin(self._response["id"], self._owner, items)
            del items
            try:
                if self._is_background:
                    yield await self._queue(stores)
                parser = self.chat.parser()
                direct = None
                if streams:
                    direct = direct_writer(self._request, lambda delta: self._written(self._of_delta(parser, delta)))
                has_begun = False
                async with aclosing(self.service.jobs.run(job, reservation, direct)) as arrivals:
                    async for deltas in arrivals:
                        found = [event for delta in deltas for event in self._of_delta(parser, delta)]
                        if not has_begun:
                            found = [*await self._begin(), *found]
                            has_begun = True
                        yield found
                last = self._complete(job)
                if self._store is not None and not self._is_background:
                    self._response["store"] = stores
                    self._response["store"] = stores and await self._store.finish(self._response["id"], self._response)
                    stores = False
            finally:
                if stores and self._store is not None and not self._is_background:
                    self._store.drop(self._response["id"])
            yield [*last, {"type": f"response.{self._response['status']}", "response": self._response}]

    async def _queue(self, has_input: bool) -> list[Event]:
        """Store a background response before it runs. Raises RequestError if there is no room for it."""
        assert self._store is not None
        self._response |= {"status": "queued", "background": True}
        if not has_input or not await self._store.publish(self._response["id"], self._response):
            self._store.drop(self._response["id"])
            raise RequestError(
                "background: the request is too large to be stored (--response-store-bytes): send it without",
                param="background",
            )
        return [{"type": f"response.{kind}", "response": dict(self._response)} for kind in ("created", "queued")]

    async def _begin(self) -> list[Event]:
        kinds = ["response.created", "response.in_progress"]
        if self._is_background and self._store is not None:
            self._response["status"] = "in_progress"
            await self._store.publish(self._response["id"], self._response)
            kinds = kinds[1:]
        return [{"type": kind, "response": dict(self._response)} for kind in kinds]

    def _of_delta(self, parser: ChatParser, delta: OutputDelta) -> list[Event]:
        was_reasoning = parser.is_reasoning
        parts: list[Part] = parser.feed(delta.text_delta)
        if was_reasoning or parser.is_reasoning:
            self._reasoning_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            parts += parser.finish(delta.is_cut)
        logprobs: Logprobs = []
        if self._spelling is not None and delta.logprobs:
            logprobs = answers.chat_logprobs(self._spelling, delta.logprobs)["content"]
        return self._events.add(joined(parts), logprobs)

    def _complete(self, job: Job) -> list[Event]:
        """Complete the response and return the events that close its last item."""
        reason = job.choices[0].finish_reason
        if reason == "abort":
            raise aborted()
        is_whole = reason != "length"
        events = self._events.end("completed" if is_whole else "incomplete")
        self._response |= {
            "status": "completed" if is_whole else "incomplete",
            "completed_at": int(time.time()) if is_whole else None,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": self._events.output,
            "usage": _usage(job, self._reasoning_tokens),
        }
        return events

    def _written(self, events: list[Event]) -> bytes:
        return b"".join(data for _, data in self.numbered(events))


class _BackgroundRun:
    """A request that is answered once its response is stored, and runs on in a task.

    The task stores the response when it begins and ends, and its events if they are streamed, so that any API worker
    can return them. It ends early if the response is cancelled or deleted.
    """

    def __init__(self, run: _ResponseRun, store: ResponseStore, owner: str, runs: BackgroundRuns):
        self._run, self._store, self._owner, self._runs = run, store, owner, runs
        self._streams = False
        self._events: list[tuple[int, bytes]] = []  # not yet stored
        self._last_flush = 0.0

    async def start(self, streams: bool) -> dict[str, Any]:
        """Start the task, and return the response once it is stored. Raises what keeps it from being stored."""
        self._streams = streams
        stored: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._work(stored))
        both: set[asyncio.Future[Any]] = {task, stored}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not stored.done():  # nobody would learn the response's id
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if not stored.done():
            task.result()  # raises
        return stored.result()

    def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the events as they are stored. Closing it does not end the run."""
        return _stored_events(self._store, self._run.response["id"], self._owner, after=-1)

    async def _work(self, stored: asyncio.Future[dict[str, Any]]) -> None:
        run = self._run
        try:
            with run.service.admission.reserve(1) as reservation:
                job = await run.chat.tokenize()
                async with aclosing(run.pieces(job, reservation)) as pieces:
                    async for events in pieces:
                        await self._add(run.numbered(events), is_urgent=not stored.done())
                        if not stored.done():
                            self._runs.add(run.response["id"], asyncio.current_task())  # type: ignore[arg-type]
                            stored.set_result(dict(run.response))
            await self._add([], is_urgent=True)
            response = run.response
        except Exception as exc:
            if not stored.done():
                raise
            log_if_severe(exc, run.scope)
            response = run.failed_response(exc)
            self._events += run.numbered([{"type": "response.failed", "response": response}])
            with suppress(WireError):
                await self._add([], is_urgent=True)
        await self._store.finish(response["id"], response, if_too_large=run.failed_response(too_large()))

    async def _add(self, events: list[tuple[int, bytes]], is_urgent: bool) -> None:
        """Store events: now, or a moment later with those that follow."""
        if not self._streams:
            return
        self._events += events
        now = asyncio.get_running_loop().time()
        if self._events and (is_urgent or now - self._last_flush >= FLUSH_SECONDS):
            events, self._events, self._last_flush = self._events, [], now
            await self._store.append(self._run.response["id"], events)


def _in_progress(body: ResponsesBody, model: str, is_stored: bool, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response object before its output: the request's settings, else the model's `defaults`.

    Raises RequestError.
    """
    echoed = {
        "metadata": body.metadata or {}, "tools": body.tools or [], "tool_choice": body.tool_choice or "auto",
        "reasoning": {"effort": None, "summary": None} | (body.reasoning or {}),
        "text": {"format": {"type": "text"}} | {key: value for key, value in (body.text or {}).items() if value},
    }  # fmt: skip
    for name, value in echoed.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name} has a value that is not valid JSON or Unicode: {error}", param=name) from error
    return {
        "id": f"resp_{secrets.token_hex(24)}", "object": "response", "created_at": int(time.time()),
        "status": "in_progress", "background": False, "completed_at": None, "error": None, "incomplete_details": None,
        "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "max_tool_calls": None,
        "model": model, "output": [], "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id, "service_tier": "default", "store": is_stored,
        "temperature": defaults.get("temperature", 1.0) if body.temperature is None else body.temperature,
        "top_p": defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
        "top_logprobs": body.top_logprobs or 0, "truncation": "disabled", "usage": None, "user": None, **echoed,
    }  # fmt: skip


def _usage(job: Job, reasoning_tokens: int) -> dict[str, Any]:
    total = answers.usage([job])
    return {
        "input_tokens": total["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": job.output.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": total["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": total["total_tokens"],
    }


def _store(request: Request, response_id: str) -> ResponseStore:
    store: ResponseStore | None = request.app.state.response_store
    if store is None:
        raise _not_found(response_id)
    return store


def _unknown(response_id: str) -> str:
    # OpenAI's words come first, here and where else a client may look for them.
    return f"Response with id {response_id[:80]!r} not found. It may have expired, or made room for newer ones"


def _not_found(response_id: str) -> WireError:
    return WireError(404, _unknown(response_id), type="not_found_error", param="response_id", code="response_not_found")

"""OpenAI's Responses API: /v1/responses, served as chats, and a store of responses."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from engine.errors import RequestError
from engine.protocol.outputs import OutputDelta
from engine.text.parsing.chat import ChatParser, joined
from engine.text.parsing.parts import Part
from server.http.body_route import BodyRoute
from server.http.errors import WireError, body_of
from server.http.openapi import REFUSALS, answered_by
from server.http.streaming import EventStream, JSONAnswer, named_event
from server.routes import openai_answers as answers
from server.routes.chat_run import ChatRun
from server.routes.response_outputs import Event, Logprobs, ResponseEvents
from server.schemas import openai_response_objects as wire
from server.schemas.openai_responses import SENT_NAMES, ResponsesBody
from server.schemas.translation import translated_errors
from server.serving.response_store import ResponseStore
from server.serving.service import Job, Service

router = APIRouter(prefix="/v1/responses", tags=["openai"], responses=REFUSALS, route_class=BodyRoute)


@router.post("", responses=answered_by(wire.ResponseObject, "text/event-stream"))
async def create(body: ResponsesBody, request: Request) -> Response:
    """Generate a response to an input of text or items, and store it unless the request says otherwise."""
    body.refuse_unsupported()
    store: ResponseStore | None = request.app.state.response_store
    if store is None and (body.store or body.previous_response_id is not None):
        param = "store" if body.store else "previous_response_id"
        raise RequestError(
            f"{param} is not available: this server stores no responses (--response-store-entries 0)", param=param
        )
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
    if body.stream:
        return EventStream(run.stream(), run.failed, last=b"")
    return JSONAnswer(run.answer)


@router.get("/{response_id}", responses=answered_by(wire.ResponseObject))
async def retrieve(response_id: str, request: Request, stream: bool = False) -> Response:
    """Return a stored response."""
    if stream:
        raise RequestError("stream is not supported here; remove it", param="stream")
    found = await _store(request, response_id).response(response_id, request.state.owner)
    if found is None:
        raise _not_found(response_id)
    return Response(found, media_type="application/json")


@router.get("/{response_id}/input_items", responses=answered_by(wire.ItemList))
async def input_items(
    response_id: str,
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """Return the input items of a stored response, those of the responses that it continues included."""
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
    """Delete a stored response. Responses that continue it keep their own copy of the conversation."""
    if not await _store(request, response_id).delete(response_id, request.state.owner):
        raise _not_found(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.post("/{response_id}/cancel", responses=answered_by(wire.ResponseObject))
async def cancel(response_id: str) -> dict[str, Any]:
    """Refuse: only background responses can be cancelled, and there are none."""
    raise RequestError(
        f"{response_id[:80]} can't be cancelled: only background responses can, and background is not supported; close "
        "the connection of a running request instead"
    )


class _ResponseRun:
    """One request: its chat, and its answer as events or as a whole. `store`: where to keep it; None: nowhere."""

    def __init__(
        self, request: Request, body: ResponsesBody, previous: list[dict[str, Any]], store: ResponseStore | None
    ):
        self._service: Service = request.app.state.service
        items = body.items()
        chat, self._places = body.chat(previous, items)
        self._items = [*previous, *items]
        self._store, self._owner = store, request.state.owner
        _ = self._service.tokens  # raises 503 until the model is loaded
        self._response = _in_progress(
            body, body.model or self._service.model_names()[0], store is not None, self._service.sampling_defaults()
        )
        with translated_errors(SENT_NAMES, self._places):
            self._run = ChatRun(self._service, request, chat, self._response["id"], SENT_NAMES)
        self._spelling = answers.Spelling(self._service.tokens) if body.wants_logprobs else None
        self._events = ResponseEvents()
        self._numbers = 0
        self._reasoning_tokens = 0

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of the answer."""
        async with aclosing(self._pieces()) as pieces:
            async for events in pieces:
                if events:
                    yield self._written(events)

    async def answer(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the whole response."""
        async with aclosing(self._pieces()) as pieces:
            async for _ in pieces:
                pass
        yield self._response

    def failed(self, exc: Exception) -> bytes:
        """Return the last event of a stream that fails."""
        status, body, _ = body_of(exc)
        code = "server_error" if status >= 500 else "invalid_prompt"
        ended = {"status": "failed", "error": {"code": code, "message": body["error"]["message"]}}
        response = self._response | ended | {"output": self._events.output, "store": False}
        return self._written([{"type": "response.failed", "response": response}])

    async def _pieces(self) -> AsyncGenerator[list[Event], None]:
        """Yield the events of each piece of the output; after the last, the response is complete."""
        with translated_errors(SENT_NAMES, self._places), self._service.admission(1) as reservation:
            job = await self._run.submit()
            self._events = ResponseEvents(self._run.short_ids)
            items, self._items = self._items, []
            stores = self._store is not None and await self._store.begin(self._response["id"], self._owner, items)
            del items
            try:
                parser = self._run.make_parser() if self._run.make_parser is not None else ChatParser()
                has_begun = False
                async with aclosing(self._service.run(job, reservation)) as arrivals:
                    async for deltas in arrivals:
                        found = [event for delta in deltas for event in self._of_delta(parser, delta)]
                        if not has_begun:
                            found = [*self._begin(), *found]
                            has_begun = True
                        yield found
                last = self._complete(job)
                if self._store is not None:
                    self._response["store"] = stores
                    self._response["store"] = stores and await self._store.finish(self._response["id"], self._response)
                    stores = False
            finally:
                if stores and self._store is not None:
                    self._store.drop(self._response["id"])
            yield [*last, {"type": f"response.{self._response['status']}", "response": self._response}]

    def _begin(self) -> list[Event]:
        kinds = ("response.created", "response.in_progress")
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
            raise WireError(503, "the server is shutting down", type="service_unavailable_error", code="draining")
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
        written = []
        for event in events:
            written.append(named_event(event["type"], event | {"sequence_number": self._numbers}))
            self._numbers += 1
        return "".join(written).encode()


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
    return f"there is no stored response {response_id[:80]!r}; it may have expired, or made room for newer ones"


def _not_found(response_id: str) -> WireError:
    return WireError(404, _unknown(response_id), type="not_found_error", param="response_id", code="response_not_found")

"""Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens, served as chats."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.protocol.outputs import OutputDelta
from engine.text.parsing.chat import joined
from engine.text.parsing.parts import Part
from server.http.body_route import BodyRoute
from server.http.direct import direct_writer
from server.http.errors import THREAD_NOT_FOUND, WireError, failure
from server.http.long_running import hold, long_running
from server.http.openapi import ANTHROPIC_REFUSALS, answered_by
from server.http.streaming import EventStream, JSONAnswer, named_event
from server.routes.chat_run import ChatRun
from server.routes.hints import warn_of_unread
from server.routes.message_outputs import Event, MessageEvents, stopped, usage, vllm_start_usage, vllm_usage
from server.schemas import anthropic_answers as wire
from server.schemas.anthropic import SENT_NAMES, CountTokensBody, MessagesBody
from server.schemas.translation import translated_errors
from server.serving.admission import Reservation
from server.serving.jobs import Job
from server.serving.service import Service

router = APIRouter(prefix="/v1", tags=["anthropic"], responses=ANTHROPIC_REFUSALS, route_class=BodyRoute)
PING_SECONDS = 10.0  # without an event, while a tool call or its markers arrive


@router.post("/messages", responses=answered_by(wire.Message, "text/event-stream"))
@long_running
async def messages(body: MessagesBody, request: Request) -> Response:
    """Generate the next message of a conversation, in the format of Anthropic's Messages API."""
    service: Service = request.app.state.service
    run = _MessageRun(request, body)
    reservation = hold(request, service.admission.reserve(1))
    job = await run.chat.tokenize()
    if body.stream:
        return EventStream(
            run.stream(job, reservation), lambda error: _written([failure(error, request.scope)]), last=b""
        )
    return JSONAnswer(await run.answer(job, reservation))


@router.post("/messages/count_tokens", responses=answered_by(wire.TokenCount))
@long_running
async def count_tokens(body: CountTokensBody, request: Request) -> Response:
    """Return the number of tokens of a message request's prompt."""
    service: Service = request.app.state.service
    chat, places = body.chat(_reasons(service))
    service.check_model(chat.model)

    with translated_errors(SENT_NAMES, places):
        conversation = chat.conversation()
    warn_of_unread(request, conversation, chat, SENT_NAMES)

    with translated_errors(SENT_NAMES, places):
        prompt = await service.tokens.chat(conversation)
    request.state.upload.release()
    return JSONAnswer({"input_tokens": len(prompt.ids)})


class _MessageRun:
    """One message request: its chat, and its answer as events or as a whole."""

    def __init__(self, request: Request, body: MessagesBody):
        self._request = request
        self._service: Service = request.app.state.service
        if body.continues_thread:
            raise WireError(
                404, "thread: no conversation is stored here; send all its messages", type="not_found_error",
                param="thread", code=THREAD_NOT_FOUND,
            )  # fmt: skip
        chat, places = body.chat(_reasons(self._service))
        self._omits_thinking = body.omits_thinking
        self._max_tokens = body.max_tokens
        self._id = f"msg_{request.state.request_id}"
        self._model = body.model
        self._last_event = 0.0
        self.chat = ChatRun(self._service, request, chat, self._id, SENT_NAMES, places, stops_at_context=True)

    async def stream(self, job: Job, reservation: Reservation) -> AsyncGenerator[bytes, None]:
        """Run the job and yield the events of the answer."""
        async with aclosing(self._events(job, reservation, is_stream=True)) as events:
            async for found in events:
                written = self._sent(found)
                if written:
                    yield written

    async def answer(self, job: Job, reservation: Reservation) -> dict[str, Any]:
        """Run the job and return the whole message."""
        message: dict[str, Any] = {}
        async with aclosing(self._events(job, reservation, is_stream=False)) as events:
            async for found in events:
                for event in found:
                    if event["type"] == "message_start":
                        message = event["message"]
                    elif event["type"] == "message_delta":
                        message |= {**event["delta"], "content": self._output.content, "usage": event["usage"]}
        return message

    def _sent(self, events: list[Event]) -> bytes:
        """Return events as they are sent; a ping if there were none for long, or b""."""
        now = time.monotonic()
        if not events and now - self._last_event > PING_SECONDS:
            events = [{"type": "ping"}]
        if not events:
            return b""
        self._last_event = now
        return _written(events)

    async def _events(self, job: Job, reservation: Reservation, is_stream: bool) -> AsyncGenerator[list[Event], None]:
        """Yield the events of each piece of the output, in the order of Anthropic's streams; [] if there are none.

        Events of a stream that were written directly are left out.
        """
        with self.chat.translated():
            parser = self.chat.parser()
            self._output = MessageEvents(self.chat.short_ids, self._omits_thinking)

            def of(deltas: list[OutputDelta]) -> list[Event]:
                parts: list[Part] = [part for delta in deltas for part in parser.feed(delta.text_delta)]
                if job.choices[0].finish_reason is not None:
                    parts += parser.finish(job.choices[0].is_cut)
                return self._output.add(joined(parts))

            direct = direct_writer(self._request, lambda delta: self._sent(of([delta]))) if is_stream else None
            start: list[Event] | None = None
            async with aclosing(self._service.jobs.run(job, reservation, direct)) as arrivals:
                async for deltas in arrivals:
                    found = of(deltas)
                    if start is None:
                        start = [self._start(job), {"type": "ping"}]
                        found = start + found
                    yield found
            ends = stopped(job, parser.found_calls, self._max_tokens)
            yield [
                *self._output.end(),
                {"type": "message_delta", "delta": ends, "usage": self._usage(job)},
                {"type": "message_stop"},
            ]

    def _start(self, job: Job) -> Event:
        message: dict[str, Any] = {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": self._usage(job, at_start=True),
        }  # fmt: skip
        return {"type": "message_start", "message": message}

    def _usage(self, job: Job, at_start: bool = False) -> dict[str, int]:
        config, info = self._service.config, self._service.client.info()
        if config.compat != "vllm":
            return usage(job)
        if at_start:
            return vllm_start_usage(job)
        if not config.sends_prompt_tokens_details:
            return vllm_start_usage(job) | {"output_tokens": len(job.output.token_ids)}
        return vllm_usage(job, info.page_size if info.enable_prefix_caching else 0)


def _reasons(service: Service) -> bool:
    """Return whether the model's reasoning has a known format. Raises WireError 503 until the model is loaded."""
    _ = service.tokens
    return service.chat_formats.reasoning is not None


def _written(events: list[Event]) -> bytes:
    return "".join(named_event(event["type"], event) for event in events).encode()

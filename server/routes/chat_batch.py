"""POST /v1/chat/completions/batch: several conversations in one request, as in vLLM."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.errors import RequestError
from server.http.body_route import BodyRoute
from server.http.long_running import hold, long_running
from server.http.openapi import REFUSALS, answered_by
from server.http.streaming import JSONAnswer
from server.routes import openai_answers as answers
from server.routes.chat_run import ChatRun
from server.routes.openai import chat_choice, chat_outputs, echoed_message, new_head
from server.routes.server_defaults import apply_defaults
from server.routes.vllm_keys import chat_keys
from server.schemas import answers as wire
from server.schemas.requests import BatchChatBody
from server.serving.request_log import stats
from server.serving.service import Service

router = APIRouter(prefix="/v1", tags=["openai"], responses=REFUSALS, route_class=BodyRoute)


@router.post("/chat/completions/batch", responses=answered_by(wire.ChatCompletion))
@long_running
async def chat_completions_batch(body: BatchChatBody, request: Request) -> Response:
    """Generate the next message of each conversation. Choice i is that of conversation i."""
    service: Service = request.app.state.service
    head = new_head(service, request, body.model, "chatcmpl", "chat.completion")
    apply_defaults(body, service.config)
    body.refuse_unsupported()
    conversations = body.conversations()
    service.admission.check_capacity(len(conversations), "messages")
    runs, echoed, keys = [], [], chat_keys(service.config)
    for number, one in enumerate(conversations):
        with _naming_conversation(number):
            runs.append(ChatRun(service, request, one, head["id"]))
        echoed.append(echoed_message(one, runs[-1]))

    reservation = hold(request, service.admission.reserve(len(runs), "messages"))

    jobs = []
    for number, run in enumerate(runs):
        with _naming_conversation(number):
            jobs.append(await run.tokenize())

    await service.jobs.finish(jobs, reservation)
    parsed = []
    for run, job in zip(runs, jobs, strict=True):
        outputs = chat_outputs(service, body, run)
        await outputs.parse(job.choices)
        parsed.append((outputs, job.choices[0]))

    def build(part: Callable[[Any], Any]) -> dict[str, Any]:
        choices = [
            part(chat_choice(outputs, body, choice, keys, echoed[number]) | {"index": number})
            for number, (outputs, choice) in enumerate(parsed)
        ]
        extra = {"stats": stats(jobs)} if body.return_stats else {}
        usage = {**keys.usage, **answers.usage(jobs, service.config.sends_prompt_tokens_details)}
        return {**keys.answer, **head, "choices": choices, "usage": usage, **extra}

    return JSONAnswer(await service.jobs.write(jobs, build, reservation))


@contextmanager
def _naming_conversation(number: int) -> Iterator[None]:
    """Make a RequestError name the messages of a conversation by its number: messages[2][0]."""
    try:
        yield
    except RequestError as error:
        place = f"messages[{number}]"
        message = re.sub(r"\bmessages\b(?=\[| is | has )", place, str(error))
        if error.param == "messages" and place not in message:
            message = f"{place}: {message}"
        raise type(error)(message, param=error.param) from error

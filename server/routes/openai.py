"""OpenAI-compatible routes: /v1/completions, /v1/chat/completions and /v1/models."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.errors import RequestError
from engine.protocol.outputs import CompletionOutput
from server.http.openapi import REFUSALS, answered_by
from server.http.streaming import EventStream, event, merge, until_disconnect
from server.routes import openai_answers as answers
from server.routes.openai_chunks import ChatChunkChoices, ChunkChoices, ChunkWriter, CompletionChunkChoices, Head
from server.schemas import responses as wire
from server.schemas.requests import ChatBody, CompletionBody, OpenAISampling, naming
from server.serving.service import Job, Service
from server.serving.tokenization import Tokenization

router = APIRouter(prefix="/v1", tags=["openai"], responses=REFUSALS)


@router.get("/models", responses=answered_by(wire.ModelList))
async def models(request: Request) -> dict[str, Any]:
    """List the served model under each of its names, with its context length."""
    service: Service = request.app.state.service
    return {"object": "list", "data": _models(service)}


@router.get("/models/{model:path}", responses=answered_by(wire.Model))
async def model(model: str, request: Request) -> dict[str, Any]:
    """Return the served model by one of its names, which may contain slashes."""
    service: Service = request.app.state.service
    _ = service.tokens
    service.check_model(model)
    return next(one for one in _models(service) if one["id"] == model)


def _models(service: Service) -> list[dict[str, Any]]:
    _ = service.tokens  # raises 503 until the model is loaded
    info = service.client.info()
    fixed = {
        "object": "model",
        "created": int(service.start_time),
        "owned_by": "encore",
        "max_model_len": info.max_model_len,
    }
    return [{"id": name, **fixed} for name in service.model_names()]


@router.post("/completions", responses=answered_by(wire.Completion, "text/event-stream"))
async def completions(body: CompletionBody, request: Request) -> Response:
    """Complete one prompt or several, with n choices each, numbered prompt by prompt."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    body.refuse_unsupported()
    params = body.sampling()
    prompts = _prompts(body.prompt)
    head = _head(service, request, body, "cmpl", "text_completion")

    async def submit() -> list[Job]:
        with naming(body.sent_names()):
            jobs = [
                await service.job(head["id"], prompt, "prompt", params, body.priority, body.add_special_tokens)
                for prompt in prompts
            ]
        request.state.jobs += jobs  # for the log
        return jobs

    num_sequences = len(prompts) * params.n
    service.check_capacity(len(prompts), "prompt")
    if body.stream:
        chunk_choices = CompletionChunkChoices(service.tokens, body.echo, body.logprobs)
        return EventStream(_stream(service, num_sequences, submit, head, body, chunk_choices))

    async def answer() -> dict[str, Any]:
        with service.admission(num_sequences) as reservation:
            jobs = await submit()
            await service.finish(jobs, reservation)
        choices = [
            _completion(service.tokens, body, number, job, choice)
            for number, (job, choice) in enumerate((job, choice) for job in jobs for choice in job.choices)
        ]
        return {**head, "choices": choices, "usage": answers.usage(jobs)}

    return JSONResponse(await until_disconnect(request, answer()))


@router.post("/chat/completions", responses=answered_by(wire.ChatCompletion, "text/event-stream"))
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Generate the next message of a conversation, using the model's chat template."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    body.refuse_unsupported()
    params, messages = body.sampling(), body.conversation()
    head = _head(service, request, body, "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion")

    async def submit() -> list[Job]:
        ids = await service.tokens.chat(messages, body.add_generation_prompt)
        with naming(body.sent_names()):
            jobs = [service.tokenized_job(head["id"], None, ids, "messages", params, body.priority)]
        request.state.jobs += jobs  # for the log
        return jobs

    if body.stream:
        return EventStream(
            _stream(service, params.n, submit, head, body, ChatChunkChoices(service.tokens, body.logprobs))
        )

    async def answer() -> dict[str, Any]:
        with service.admission(params.n) as reservation:
            jobs = await submit()
            await service.finish(jobs, reservation)
        choices = [
            answers.chat_choice(
                choice.index, choice, answers.chat_logprobs(service.tokens, choice.logprobs) if body.logprobs else None
            )
            for choice in jobs[0].choices
        ]
        return {**head, "choices": choices, "usage": answers.usage(jobs)}

    return JSONResponse(await until_disconnect(request, answer()))


async def _stream(
    service: Service,
    num_sequences: int,
    submit: Callable[[], Any],
    head: Head,
    body: OpenAISampling,
    chunk_choices: ChunkChoices,
) -> AsyncGenerator[bytes, None]:
    def shared() -> Head:
        if not body.include_usage:
            return head
        return {**head, "usage": answers.usage(jobs) if body.continuous_usage else None}

    with service.admission(num_sequences) as reservation:
        jobs: list[Job] = await submit()
        writer = ChunkWriter(chunk_choices, shared, is_fixed=not (body.include_usage and body.continuous_usage))
        async with aclosing(merge([service.run(job, reservation) for job in jobs])) as arrivals:
            async for number, deltas in arrivals:
                written = writer.of(jobs[number], number * jobs[number].params.n, deltas)
                if written:
                    yield written
        if body.include_usage:
            yield event({**head, "choices": [], "usage": answers.usage(jobs)}).encode()


def _completion(
    tokens: Tokenization, body: CompletionBody, number: int, job: Job, choice: CompletionOutput
) -> dict[str, Any]:
    builder = answers.CompletionLogprobs(tokens, body.logprobs or 0)
    text, logprobs = choice.text, None
    if body.echo:
        prompt, logprobs = answers.echo(tokens, builder, job)
        text = prompt + text
    if body.logprobs is not None:
        own = builder.of(choice.token_ids, choice.logprobs or [])
        logprobs = own if logprobs is None else {name: logprobs[name] + own[name] for name in own}
    return answers.completion_choice(number, text, logprobs, choice)


def _prompts(prompt: Any) -> Sequence[str | list[int]]:
    """Return the prompts as a list. A string or a flat list of token ids is one prompt."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is empty: provide at least one prompt", param="prompt")
    return [prompt] if type(prompt[0]) is int else prompt


def _head(service: Service, request: Request, body: OpenAISampling, prefix: str, kind: str) -> Head:
    _ = service.tokens
    return {
        "id": f"{prefix}-{request.state.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": body.model or service.model_names()[0],
    }

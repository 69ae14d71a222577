"""OpenAI's routes: parse, submit, respond. /v1/completions, /v1/chat/completions and /v1/models."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.errors import RequestError
from engine.outputs import CompletionOutput, OutputDelta
from server import openai_answers as answers
from server import wire_answers as wire
from server.inference import Job, Service
from server.openapi import REFUSALS, answered_by
from server.schemas import ChatBody, CompletionBody, OpenAISampling
from server.streaming import EventStream, event, merge, until_disconnect
from server.tokenization import Tokenization

router = APIRouter(prefix="/v1", tags=["openai"], responses=REFUSALS)

Head = dict[str, Any]  # the fields that a body and each of its chunks share: id, object, created, model


@router.get("/models", responses=answered_by(wire.ModelList))
async def models(request: Request) -> dict[str, Any]:
    """The served model under each of its names, with its context length."""
    service: Service = request.app.state.service
    return {"object": "list", "data": _models(service)}


@router.get("/models/{model:path}", responses=answered_by(wire.Model))
async def model(model: str, request: Request) -> dict[str, Any]:
    """The served model under one of its names, slashes included."""
    service: Service = request.app.state.service
    _ = service.tokens
    service.check_model(model)
    return next(one for one in _models(service) if one["id"] == model)


def _models(service: Service) -> list[dict[str, Any]]:
    _ = service.tokens  # 503 until the model is loaded
    info = service.client.info()
    fixed = {"object": "model", "created": service.created, "owned_by": "encore", "max_model_len": info.max_model_len}
    return [{"id": name, **fixed} for name in service.model_names()]


@router.post("/completions", responses=answered_by(wire.Completion, "text/event-stream"))
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue one prompt or several; n choices each, numbered prompt by prompt."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    body.refuse_unsupported()
    params = body.sampling()
    prompts = _prompts(body.prompt)
    head = _head(service, request, body, "cmpl", "text_completion")

    async def submit() -> list[Job]:
        jobs = [
            await service.job(head["id"], prompt, "prompt", params, body.priority, body.add_special_tokens)
            for prompt in prompts
        ]
        request.state.jobs += jobs  # for the log
        return jobs

    wanted = len(prompts) * params.n
    if body.stream:
        return EventStream(_stream(service, wanted, submit, head, body, _completion_pieces(service.tokens, body)))

    async def answer() -> dict[str, Any]:
        with service.admission(wanted):
            jobs = await submit()
            await service.finish(jobs)
        choices = [
            _completion(service.tokens, body, number, job, choice)
            for number, (job, choice) in enumerate((job, choice) for job in jobs for choice in job.choices)
        ]
        return {**head, "choices": choices, "usage": answers.usage(jobs)}

    return JSONResponse(await until_disconnect(request, answer()))


@router.post("/chat/completions", responses=answered_by(wire.ChatCompletion, "text/event-stream"))
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation through the model's chat template."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    body.refuse_unsupported()
    params, messages = body.sampling(), body.conversation()
    head = _head(service, request, body, "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion")

    async def submit() -> list[Job]:
        ids = await service.tokens.chat(messages, body.add_generation_prompt)
        jobs = [service.tokenized_job(head["id"], None, ids, "messages", params, body.priority)]
        request.state.jobs += jobs  # for the log
        return jobs

    if body.stream:
        return EventStream(_stream(service, params.n, submit, head, body, _chat_pieces(service.tokens, body)))

    async def answer() -> dict[str, Any]:
        with service.admission(params.n):
            jobs = await submit()
            await service.finish(jobs)
        choices = [
            answers.chat_choice(
                choice.index, choice, answers.chat_logprobs(service.tokens, choice.logprobs) if body.logprobs else None
            )
            for choice in jobs[0].choices
        ]
        return {**head, "choices": choices, "usage": answers.usage(jobs)}

    return JSONResponse(await until_disconnect(request, answer()))


# (job, the choice's number in the answer, the delta just added) -> entries of the next chunk's "choices"
Pieces = Callable[[Job, int, OutputDelta], list[dict[str, Any]]]


async def _stream(
    service: Service,
    wanted: int,
    submit: Callable[[], Any],
    head: Head,
    body: OpenAISampling,
    pieces: Pieces,
) -> AsyncIterator[bytes]:
    def shared() -> Head:
        if not body.include_usage:
            return head
        return {**head, "usage": answers.usage(jobs) if body.continuous_usage else None}

    with service.admission(wanted):
        jobs: list[Job] = await submit()
        async with aclosing(merge([service.run(job) for job in jobs])) as deltas:
            async for number, delta in deltas:
                job = jobs[number]
                for choice in pieces(job, number * job.params.n + delta.index, delta):
                    yield event({**shared(), "choices": [choice]})
        if body.include_usage:
            yield event({**head, "choices": [], "usage": answers.usage(jobs)})


def _completion_pieces(tokens: Tokenization, body: CompletionBody) -> Pieces:
    builders: dict[int, answers.CompletionLogprobs] = {}

    def pieces(job: Job, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        choice = job.choices[delta.index]
        begins = number not in builders
        if begins:
            builders[number] = answers.CompletionLogprobs(tokens, body.logprobs or 0)
        out = []
        if begins and body.echo:
            out.append(answers.completion_choice(number, *_echo(tokens, builders[number], job), None))
        ended = delta.finish_reason is not None
        logprobs = None
        if body.logprobs is not None and delta.token_ids:
            logprobs = builders[number].of(delta.token_ids, delta.logprobs or [None] * len(delta.token_ids))
        if delta.text_delta or logprobs or ended:
            out.append(answers.completion_choice(number, delta.text_delta, logprobs, choice if ended else None))
        return out

    return pieces


def _chat_pieces(tokens: Tokenization, body: ChatBody) -> Pieces:
    begun: set[int] = set()

    def pieces(job: Job, number: int, delta: OutputDelta) -> list[dict[str, Any]]:
        out = []
        if number not in begun:
            begun.add(number)
            out.append(answers.chat_chunk_choice(number, {"role": "assistant", "content": ""}, None))
        logprobs = answers.chat_logprobs(tokens, delta.logprobs) if body.logprobs and delta.logprobs else None
        if delta.text_delta or logprobs:
            out.append(answers.chat_chunk_choice(number, {"content": delta.text_delta}, logprobs))
        if delta.finish_reason is not None:
            out.append(answers.chat_chunk_choice(number, {}, None, job.choices[delta.index]))
        return out

    return pieces


def _completion(
    tokens: Tokenization, body: CompletionBody, number: int, job: Job, choice: CompletionOutput
) -> dict[str, Any]:
    builder = answers.CompletionLogprobs(tokens, body.logprobs or 0)
    text, logprobs = choice.text, None
    if body.echo:
        prompt, logprobs = _echo(tokens, builder, job)
        text = prompt + text
    if body.logprobs is not None:
        own = builder.of(choice.token_ids, choice.logprobs or [])
        logprobs = own if logprobs is None else {name: logprobs[name] + own[name] for name in own}
    return answers.completion_choice(number, text, logprobs, choice)


def _echo(
    tokens: Tokenization, builder: answers.CompletionLogprobs, job: Job
) -> tuple[str, dict[str, Any] | None]:
    """The prompt's text, and its logprobs where they were asked for."""
    ids, found = job.output.prompt_token_ids, job.output.prompt_logprobs
    text = job.output.prompt if job.output.prompt is not None else tokens.decode(ids)
    return text, None if found is None else builder.of(ids, found)


def _prompts(prompt: Any) -> Sequence[str | list[int]]:
    """The prompts as a list: a string and a list of ids are one each."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is empty: give at least one prompt", param="prompt")
    return [prompt] if type(prompt[0]) is int else prompt


def _head(service: Service, request: Request, body: OpenAISampling, prefix: str, kind: str) -> Head:
    _ = service.tokens
    return {
        "id": f"{prefix}-{request.state.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": body.model or service.model_names()[0],
    }

"""OpenAI-compatible routes: /v1/completions, /v1/chat/completions and /v1/models."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.errors import RequestError
from engine.protocol.outputs import CompletionOutput
from server.http.body_route import BodyRoute
from server.http.direct import direct_writer
from server.http.keys import check_priority
from server.http.load_report import load_reported
from server.http.long_running import hold, long_running
from server.http.openapi import REFUSALS, answered_by
from server.http.streaming import EventStream, JSONAnswer, event, merge
from server.routes import openai_answers as answers
from server.routes.chat_outputs import ChatOutputs
from server.routes.chat_run import ChatRun
from server.routes.openai_chunks import ChatChunkChoices, ChunkChoices, ChunkWriter, CompletionChunkChoices, Head
from server.routes.server_defaults import apply_defaults
from server.routes.vllm_keys import NullKeys, chat_keys, completion_keys
from server.schemas import answers as wire
from server.schemas.requests import ChatBody, CompletionBody, OpenAISampling, naming
from server.serving.admission import Reservation
from server.serving.jobs import Job
from server.serving.output_budget import size_of
from server.serving.request_log import started, stats
from server.serving.service import Service
from server.serving.tokenization import Tokenization

router = APIRouter(prefix="/v1", tags=["openai"], responses=REFUSALS, route_class=BodyRoute)


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
    created = int(service.start_time)
    fixed = {
        "object": "model",
        "created": created,
        "owned_by": "encore",
        "root": service.config.engine.model,
        "parent": None,
        "max_model_len": info.max_model_len,
        "input_modalities": list(info.input_modalities),
        "sampling_defaults": dict(info.sampling_defaults),
    }
    permission = {
        "object": "model_permission", "created": created, "allow_create_engine": False, "allow_sampling": True,
        "allow_logprobs": True, "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False,
        "organization": "*", "group": None, "is_blocking": False,
    }  # fmt: skip
    return [
        {"id": name, **fixed, "permission": [{"id": f"modelperm-{name}", **permission}]}
        for name in service.model_names()
    ]


@router.post("/completions", responses=answered_by(wire.Completion, "text/event-stream"))
@long_running
async def completions(body: CompletionBody, request: Request) -> Response:
    """Complete one prompt or several, with n choices each, numbered prompt by prompt."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    apply_defaults(body, service.config)
    body.refuse_unsupported()
    check_priority(request, body.priority)
    params, truncation = body.sampling(service.sampling_defaults()), body.truncation
    keys = completion_keys(service.config)
    prompts = _prompts(body.prompt)
    head = new_head(service, request, body.model, "cmpl", "text_completion")

    service.admission.check_capacity(len(prompts), "prompt")
    reservation = hold(request, service.admission.reserve(len(prompts) * params.n))

    with naming(body.sent_names()):
        jobs = [
            await service.jobs.tokenize(
                head["id"], prompt, "prompt", params, body.priority, body.add_special_tokens, truncation
            )
            for prompt in prompts
        ]
    started(request, jobs)

    if body.stream:
        chunk_choices = CompletionChunkChoices(service.tokens, body, keys)
        events = _stream(request, jobs, reservation, head, body, chunk_choices, keys)
        return load_reported(request, EventStream(events), service.load())
    await service.jobs.finish(jobs, reservation)

    def build(part: Callable[[Any], Any]) -> dict[str, Any]:
        choices = [
            part({**keys.choice, **_completion(service.tokens, body, number, job, choice)})
            for number, (job, choice) in enumerate((job, choice) for job in jobs for choice in _returned(body, job))
        ]
        extra = {"stats": stats(jobs)} if body.return_stats else {}
        usage = {**keys.usage, **answers.usage(jobs, service.config.sends_prompt_tokens_details)}
        return {**keys.answer, **head, "choices": choices, "usage": usage, **extra}

    content = await service.jobs.write(jobs, build, reservation)
    return load_reported(request, JSONAnswer(content), service.load())


@router.post("/chat/completions", responses=answered_by(wire.ChatCompletion, "text/event-stream"))
@long_running
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Generate the next message of a conversation, using the model's chat template."""
    service: Service = request.app.state.service
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = new_head(service, request, body.model, "chatcmpl", kind)
    apply_defaults(body, service.config)
    run, keys = ChatRun(service, request, body, head["id"]), chat_keys(service.config)
    echoed = echoed_message(body, run)

    reservation = hold(request, service.admission.reserve(run.params.n))

    job = await run.tokenize()
    outputs = chat_outputs(service, body, run)

    if body.stream:
        chunk_choices = ChatChunkChoices(
            outputs, keys, echoed, service.config.compat == "vllm", with_versions=body.has_weight_versions
        )
        events = _stream(request, [job], reservation, head, body, chunk_choices, keys)
        return load_reported(request, EventStream(events), service.load())
    await service.jobs.finish([job], reservation)
    await outputs.parse(job.choices)

    def build(part: Callable[[Any], Any]) -> dict[str, Any]:
        choices = [part(chat_choice(outputs, body, choice, keys, echoed)) for choice in job.choices]
        extra: dict[str, Any] = {"stats": stats([job])} if body.return_stats else {}
        if body.return_token_ids:
            extra["prompt_token_ids"] = job.output.prompt_token_ids
        if body.prompt_logprobs is not None:
            extra["prompt_logprobs"] = answers.prompt_logprobs(service.tokens, job, body.prompt_logprobs)
        usage = {**keys.usage, **answers.usage([job], service.config.sends_prompt_tokens_details)}
        return {**keys.answer, **head, "choices": choices, "usage": usage, **extra}

    content = await service.jobs.write([job], build, reservation)
    return load_reported(request, JSONAnswer(content), service.load())


def chat_outputs(service: Service, body: ChatBody, run: ChatRun) -> ChatOutputs:
    """Return the formatter of a chat request's outputs."""
    return ChatOutputs(
        run, service.tokens, body.logprobs, body.include_reasoning is not False, body.return_tokens_as_token_ids,
        body.return_token_ids,
    )  # fmt: skip


def echoed_message(body: ChatBody, run: ChatRun) -> str:
    """Return the text that precedes the content with `echo`: the last message, if it is the assistant's."""
    last = run.conversation.messages[-1]
    return str(last["content"]) if body.echo and last["role"] == "assistant" else ""


def chat_choice(
    outputs: ChatOutputs, body: ChatBody, choice: CompletionOutput, keys: NullKeys, echoed: str = ""
) -> dict[str, Any]:
    """Return one entry of a chat completion's choices."""
    entry = {**keys.choice, **outputs.choice(choice)}
    message = entry["message"] = {**keys.message, **entry["message"]}
    if echoed:
        message["content"] = echoed + (message["content"] or "")
    if body.has_weight_versions:
        entry["weight_versions"] = answers.weight_versions(choice)
    if body.return_hidden_states:
        entry["hidden_states"] = answers.last_hidden_state(choice)
    return entry


async def _stream(
    request: Request, jobs: list[Job], reservation: Reservation, head: Head, body: OpenAISampling,
    chunk_choices: ChunkChoices, keys: NullKeys,
) -> AsyncGenerator[bytes, None]:  # fmt: skip
    """Run the jobs and yield the events of their outputs."""
    service: Service = request.app.state.service

    def usage(unsent: int = 0) -> dict[str, Any]:
        return {**keys.usage, **answers.usage(jobs, service.config.sends_prompt_tokens_details, unsent)}

    def shared(unsent: int) -> Head:
        if not body.include_usage:
            return head
        return {**head, "usage": usage(unsent) if body.continuous_usage else None}

    once: Head = dict(keys.first_chunk)
    if body.return_token_ids and isinstance(body, ChatBody):
        once["prompt_token_ids"] = jobs[0].output.prompt_token_ids
    is_fixed = not (body.include_usage and body.continuous_usage)
    writer = ChunkWriter(chunk_choices, shared, is_fixed, once)
    direct = None  # several jobs have several readers, so that one may wait while the events of another are sent
    if len(jobs) == 1:
        direct = direct_writer(request, lambda delta: writer.of(jobs[0], 0, [delta]))
    async with aclosing(merge([service.jobs.run(job, reservation, direct) for job in jobs])) as arrivals:
        async for number, deltas in arrivals:
            job = jobs[number]
            size = sum(size_of(delta.logprobs) + size_of(delta.prompt_logprobs) for delta in deltas)
            written = await service.jobs.write_events(size, partial(writer.of, job, number * job.params.n, deltas))
            if written:
                yield written
    last: dict[str, Any] = {}
    if body.include_usage:
        last["usage"] = usage()
    if body.return_stats:
        last["stats"] = stats(jobs)
    if last:
        yield event({**head, "choices": [], **last}).encode()


def _completion(
    tokens: Tokenization, body: CompletionBody, number: int, job: Job, choice: CompletionOutput
) -> dict[str, Any]:
    logprobs, wanted = None, body.logprobs or 0
    spelling = answers.Spelling(tokens, body.return_tokens_as_token_ids)
    before = answers.echoed_text(tokens, job) if body.echo else ""
    if body.logprobs is not None:
        builder = answers.CompletionLogprobs(tokens, spelling, wanted, job, len(before))
        logprobs = builder.of(choice.token_ids, choice.logprobs or [])
        if body.echo and (of_prompt := answers.echoed_logprobs(tokens, spelling, wanted, job, body.add_special_tokens)):
            logprobs = {name: of_prompt[name] + logprobs[name] for name in logprobs}
    text = before + choice.text
    entry = answers.completion_choice(number, text, logprobs, choice)
    if body.return_token_ids:
        entry |= {"prompt_token_ids": job.output.prompt_token_ids, "token_ids": choice.token_ids}
    if body.has_weight_versions:
        entry["weight_versions"] = answers.weight_versions(choice)
    if body.prompt_logprobs is not None:
        entry["prompt_logprobs"] = answers.prompt_logprobs(tokens, job, body.prompt_logprobs)
    if body.return_hidden_states:
        entry["hidden_states"] = answers.last_hidden_state(choice)
    return entry


def _returned(body: CompletionBody, job: Job) -> list[CompletionOutput]:
    """Return the choices of the answer: all, or with best_of the n best, best first."""
    if not body.chooses_best:
        return job.choices
    return sorted(job.choices, key=answers.mean_logprob, reverse=True)[: body.n or 1]


def _prompts(prompt: Any) -> Sequence[str | list[int]]:
    """Return the prompts as a list. A string or a flat list of token ids is one prompt."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is empty: provide at least one prompt", param="prompt")
    return [prompt] if type(prompt[0]) is int else prompt


def new_head(service: Service, request: Request, model: str | None, prefix: str, kind: str) -> Head:
    """Return the fields that a response and its chunks begin with. Raises WireError 503 until the model is loaded."""
    _ = service.tokens
    return {
        "id": f"{prefix}-{request.state.request_id}",
        "object": kind,
        "created": int(time.time()),
        "model": model or service.model_names()[0],
    }

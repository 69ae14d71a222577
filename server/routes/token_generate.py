"""POST /inference/v1/generate: vLLM's route from token ids to token ids, for trainers.

A choice says which weights produced which of its tokens, and has the finish reason "abort" if it was aborted.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.protocol.messages import ModelInfo
from engine.protocol.outputs import CompletionOutput, OutputDelta
from engine.protocol.request import TokenLogprob
from server.http.body_route import BodyRoute
from server.http.keys import check_priority
from server.http.long_running import hold, long_running
from server.http.openapi import REFUSALS, answered_by
from server.http.streaming import EventStream, JSONAnswer, WriteEvent, event
from server.routes import openai_answers as answers
from server.schemas.answers import TokenGenerated
from server.schemas.foreign_fields import TOKENS
from server.schemas.token_generate import TokenGenerateBody
from server.serving.admission import Reservation
from server.serving.jobs import Job
from server.serving.output_budget import size_of
from server.serving.request_log import started
from server.serving.service import Service

router = APIRouter(tags=["native"], responses=REFUSALS, route_class=BodyRoute)


@router.post(TOKENS, responses=answered_by(TokenGenerated, "text/event-stream"))
@long_running
async def generate_tokens(body: TokenGenerateBody, request: Request) -> Response:
    """Generate token ids from token ids, in vLLM's format, with the weight versions of the tokens."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    body.refuse_unsupported()
    check_priority(request, body.priority)
    info = service.client.info()
    params, experts_start = body.sampling(info.routed_experts is not None), body.experts_start()
    request_id = body.request_id or request.state.request_id
    service.admission.check_capacity(1, "token_ids")
    wanted_prompt = params.prompt_logprobs  # as the client gave it
    reservation = hold(request, service.admission.reserve(params.n))

    job = await service.jobs.tokenize(request_id, body.token_ids, "token_ids", params, body.priority)
    started(request, [job])

    if body.stream:
        return EventStream(_stream(service, job, reservation, body))
    await service.jobs.finish([job], reservation)

    def build(part: Callable[[Any], Any]) -> dict[str, Any]:
        of_prompt = None
        if wanted_prompt is not None:
            of_prompt = answers.prompt_logprobs(service.tokens, job, wanted_prompt)
        found = {
            "request_id": request_id,
            "model": body.model or service.model_names()[0],
            "choices": [part(_choice(job, choice, experts_start, info)) for choice in job.choices],
            "prompt_logprobs": of_prompt,
            "kv_transfer_params": None,
            "usage": _usage(service, job),
        }
        return found | {"prompt_token_ids": job.output.prompt_token_ids} if body.return_token_ids else found

    return JSONAnswer(await service.jobs.write([job], build, reservation))


async def _stream(
    service: Service, job: Job, reservation: Reservation, body: TokenGenerateBody
) -> AsyncGenerator[bytes, None]:
    """Run the job and yield the events of its output."""
    async with aclosing(service.jobs.run(job, reservation)) as arrivals:
        async for deltas in arrivals:
            size = sum(size_of(delta.logprobs) for delta in deltas)
            extra = {"usage": _usage(service, job)} if body.continuous_usage else {}
            written = await service.jobs.write_events(size, partial(_events, job, deltas, extra))
            if written:
                yield written
    if body.include_usage:
        yield event({"request_id": job.public_id, "choices": [], "usage": _usage(service, job)}).encode()


def _usage(service: Service, job: Job) -> dict[str, Any]:
    return answers.usage([job], service.config.sends_prompt_tokens_details)


def _choice(job: Job, choice: CompletionOutput, experts_start: int, info: ModelInfo) -> dict[str, Any]:
    found = {
        "index": choice.index,
        "token_ids": choice.token_ids,
        "logprobs": _logprobs(choice.logprobs or ()) if job.params.logprobs is not None else None,
        "finish_reason": choice.finish_reason,
        "weight_versions": answers.weight_versions(choice),
        **_support(job, choice.logprobs or ()),
    }
    if job.params.return_routed_experts:
        found["routed_experts"] = _experts(choice, experts_start, info)
    return found


def _experts(choice: CompletionOutput, start: int, info: ModelInfo) -> dict[str, Any] | None:
    """Return the experts of the tokens from `start` on; None if no token was computed. Clients want the data first."""
    experts = choice.routed_experts
    if experts is None:
        return None
    rows = np.ascontiguousarray(experts[start:], np.uint8 if info.num_experts <= 256 else np.dtype("<i2"))
    data = base64.b64encode(rows.tobytes()).decode()
    return {"data": data, "shape": list(rows.shape), "dtype": rows.dtype.name, "start": start}


def _events(job: Job, deltas: Iterable[OutputDelta], extra: dict[str, Any], write: WriteEvent) -> bytes:
    """Return an event for each delta with new tokens, or that ends its choice, which then has the weight versions."""
    written = []
    for delta in deltas:
        if not delta.token_ids and delta.finish_reason is None:
            continue
        choice = {
            "index": delta.index,
            "token_ids": delta.token_ids,
            "logprobs": _logprobs(delta.logprobs or ()) if job.params.logprobs is not None else None,
            "finish_reason": delta.finish_reason,
            "weight_versions": answers.weight_versions(job.choices[delta.index]) if delta.finish_reason else None,
            **_support(job, delta.logprobs or ()),
        }
        written.append(write({"request_id": job.public_id, "choices": [choice], **extra}))
    return "".join(written).encode()


def _support(job: Job, found: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return the fields about the tokens that top-k, top-p and min-p left, if they were asked for."""
    if not job.params.returns_support:
        return {}
    scores = list(found)
    fields: dict[str, Any] = {"kept_mass": [answers.finite(one.kept_mass or 0.0) for one in scores]}
    if job.params.return_sampling_mask:
        masks = [one.kept_ids for one in scores]
        fields["sampling_mask"] = None if None in masks else masks
    return fields


def _logprobs(found: Iterable[TokenLogprob]) -> dict[str, Any]:
    content = []
    for one in found:
        others = {one.token_id: one.logprob} | one.named if one.named else one.top or {one.token_id: one.logprob}
        top = [_score(token_id, value) for token_id, value in others.items()]
        content.append({**_score(one.token_id, one.logprob), "top_logprobs": top})
    return {"content": content}


def _score(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "logprob": answers.finite(logprob), "bytes": None}

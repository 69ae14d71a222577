"""POST /generate, in SGLang's format."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.errors import RequestError
from engine.protocol.outputs import CompletionOutput
from engine.protocol.request import TokenLogprob
from server.http.body_route import BodyRoute
from server.http.keys import check_priority
from server.http.long_running import hold, long_running
from server.http.openapi import REFUSALS, answered_by
from server.http.streaming import EventStream, JSONAnswer, WriteEvent, merge
from server.routes.openai_answers import finite, weight_versions
from server.schemas.answers import Generated
from server.schemas.generate import GenerateBody
from server.schemas.requests import naming
from server.serving.admission import Reservation
from server.serving.jobs import ARRAY_BYTES, Job
from server.serving.output_budget import size_of
from server.serving.request_log import started
from server.serving.service import Service
from server.serving.tokenization import Tokenization

router = APIRouter(tags=["native"], responses=REFUSALS, route_class=BodyRoute)


@router.post("/generate", responses=answered_by(Generated | list[Generated], "text/event-stream"))
@long_running
async def generate(body: GenerateBody, request: Request) -> Response:
    """Generate from one prompt or a list of prompts. The response is a list for a list of prompts or n above 1."""
    service: Service = request.app.state.service
    tokens = service.tokens
    body.refuse_unsupported()
    check_priority(request, body.priority)
    prompts, as_list = body.prompts()
    field = "text" if body.text is not None else "input_ids"
    if not prompts:
        raise RequestError("the list of prompts is empty: provide at least one", param=field)
    service.admission.check_capacity(len(prompts), field)  # before building parameters and ids for a million prompts
    params = body.sampling(len(prompts), service.sampling_defaults())
    ids = body.ids(len(prompts), request.state.request_id)
    num_sequences = sum(one.n for one in params)
    as_list = as_list or num_sequences > 1

    reservation = hold(request, service.admission.reserve(num_sequences))

    jobs = []
    for number, (public_id, prompt, one) in enumerate(zip(ids, prompts, params, strict=True)):
        with naming(body.sent_names(number)):
            jobs.append(await service.jobs.tokenize(public_id, prompt, field, one, body.priority))
            if isinstance(body.rid, str):
                jobs[-1].names = (body.rid,)
    started(request, jobs)

    if body.stream:
        return EventStream(_stream(service, jobs, reservation, body, as_list))
    await service.jobs.finish(jobs, reservation)

    def build(part: Callable[[Any], Any]) -> Any:
        found = [part(_answer(tokens, body, job, choice)) for job in jobs for choice in job.choices]
        return found if as_list else found[0]

    return JSONAnswer(await service.jobs.write(jobs, build, reservation))


async def _stream(
    service: Service, jobs: list[Job], reservation: Reservation, body: GenerateBody, as_list: bool
) -> AsyncGenerator[bytes, None]:
    """Run the jobs and yield the events of their outputs."""
    firsts = [sum(job.params.n for job in jobs[:number]) for number in range(len(jobs))]
    async with aclosing(merge([service.jobs.run(job, reservation) for job in jobs])) as arrivals:
        async for number, deltas in arrivals:
            # An event holds the whole output so far: send one per sequence that has new tokens.
            for index in dict.fromkeys(delta.index for delta in deltas):
                job, choice = jobs[number], jobs[number].choices[index]
                size = size_of(choice.logprobs) + size_of(job.output.prompt_logprobs)
                if choice.finish_reason is not None and choice.hidden_state_parts:
                    size += ARRAY_BYTES
                place = firsts[number] + index if as_list else None
                yield await service.jobs.write_events(size, partial(_event, service.tokens, body, job, choice, place))


def _event(
    tokens: Tokenization, body: GenerateBody, job: Job, choice: CompletionOutput, index: int | None, write: WriteEvent
) -> bytes:
    answer = _answer(tokens, body, job, choice)
    return write(answer if index is None else {**answer, "index": index}).encode()


def _answer(tokens: Tokenization, body: GenerateBody, job: Job, choice: CompletionOutput) -> dict[str, Any]:
    """Return the output of a choice so far, in SGLang's format."""
    meta: dict[str, Any] = {
        "id": job.public_id,
        "finish_reason": _finish(choice),
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": len(choice.token_ids),
        "cached_tokens": job.output.cached_tokens,
        "weight_version": choice.weight_version,
        "weight_versions": weight_versions(choice),
        "e2e_latency": time.perf_counter() - job.started,
    }
    if body.return_logprob:
        spelled = tokens if body.return_text_in_logprobs else None
        found = list(choice.logprobs or ())
        meta["output_token_logprobs"] = [_triple(spelled, one) for one in found]
        if body.top_logprobs_num:
            meta["output_top_logprobs"] = [_top(spelled, one) for one in found]
        if job.params.logprob_token_ids:
            meta["output_token_ids_logprobs"] = [_named(spelled, one) for one in found]
        if job.output.prompt_logprobs is not None:
            both = zip(job.output.prompt_token_ids, job.output.prompt_logprobs, strict=True)
            asked = list(both)[max(0, body.logprob_start_len or 0) :]
            meta["input_token_logprobs"] = [
                [None, token_id, tokens.piece(token_id) if spelled else None] if one is None else _triple(spelled, one)
                for token_id, one in asked
            ]
            if body.top_logprobs_num:
                meta["input_top_logprobs"] = [None if one is None else _top(spelled, one) for _, one in asked]
            if job.params.logprob_token_ids:
                meta["input_token_ids_logprobs"] = [None if one is None else _named(spelled, one) for _, one in asked]
    if job.params.return_hidden_states and choice.finish_reason is not None:
        meta["hidden_states"] = _hidden_states(choice, job.prompt_tokens)
    return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}


def _hidden_states(choice: CompletionOutput, prompt_tokens: int) -> list[np.ndarray]:
    """Return the vectors of the prompt's tokens [P, h], then the vector [h] of each generated token but the last."""
    rows = choice.hidden_states
    return [] if rows is None else [rows[:prompt_tokens], *rows[prompt_tokens:]]


def _finish(choice: CompletionOutput) -> dict[str, Any] | None:
    if choice.finish_reason == "length":
        return {"type": "length", "length": len(choice.token_ids)}
    if choice.finish_reason == "stop":
        return {"type": "stop", "matched": choice.stop_reason}
    return None if choice.finish_reason is None else {"type": choice.finish_reason}


def _triple(tokens: Tokenization | None, one: TokenLogprob) -> list[Any]:
    return [finite(one.logprob), one.token_id, tokens.piece(one.token_id) if tokens else None]


def _top(tokens: Tokenization | None, one: TokenLogprob) -> list[list[Any]]:
    return _triples(tokens, one.top)


def _named(tokens: Tokenization | None, one: TokenLogprob) -> list[list[Any]]:
    return _triples(tokens, one.named)


def _triples(tokens: Tokenization | None, logprobs: Mapping[int, float]) -> list[list[Any]]:
    return [
        [finite(value), token_id, tokens.piece(token_id) if tokens else None] for token_id, value in logprobs.items()
    ]

"""Embeddings, pooling, scores and reranking: /v1/embeddings, /pooling, /v1/score and /v1/rerank, as vLLM has them."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.errors import RequestError
from engine.protocol.messages import ModelInfo
from engine.protocol.pooling import activate, finish_embedding
from engine.protocol.request import SamplingParams
from engine.text.scoring import cosine, pairs_of
from server.http.body_route import BodyRoute
from server.http.keys import check_priority
from server.http.load_report import load_reported
from server.http.long_running import hold, long_running
from server.http.openapi import REFUSALS, answered_by
from server.http.streaming import JSONAnswer
from server.routes import openai_answers as answers
from server.routes.openai import new_head
from server.schemas import answers as wire
from server.schemas.pooling import (
    EmbeddingBody,
    InputFields,
    PoolingBody,
    PoolingFields,
    RerankBody,
    ScoreBody,
    ScoredFields,
)
from server.schemas.requests import naming
from server.schemas.truncation import Truncation
from server.serving.jobs import Job
from server.serving.request_log import started
from server.serving.service import Service

router = APIRouter(tags=["pooling"], responses=REFUSALS, route_class=BodyRoute)


@router.post("/v1/embeddings", responses=answered_by(wire.Embeddings))
@long_running
async def embeddings(body: EmbeddingBody, request: Request) -> Response:
    """Return one vector per input: by default the last token's hidden state, normalised."""
    service = _service(body, request)
    return await _vectors(service, request, body, "embed", "embd", "embedding", "embedding")


@router.post("/pooling", responses=answered_by(wire.Pooled))
@long_running
async def pooling(body: PoolingBody, request: Request) -> Response:
    """Return one vector per input, the vectors of its tokens, or the outputs of the model's classification head."""
    service = _service(body, request)
    task = body.task or ("classify" if service.client.info().num_labels else "embed")
    return await _vectors(service, request, body, task, "pool", "pooling", "data")


@router.post("/score", include_in_schema=False)
@router.post("/v1/score", responses=answered_by(wire.Scores))
@long_running
async def score(body: ScoreBody, request: Request) -> Response:
    """Return how well each document matches its query."""
    service = _service(body, request)
    names, queries, documents = body.sides()

    def build(scores: list[float], usage: dict[str, Any]) -> dict[str, Any]:
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
        head = new_head(service, request, body.model, "score", "list")
        return {**head, "data": data, "usage": usage}

    return await _scores(service, request, body, names, queries, documents, build)


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/v1/rerank", responses=answered_by(wire.Reranked))
@long_running
async def rerank(body: RerankBody, request: Request) -> Response:
    """Return the documents that match a query best, best first."""
    service = _service(body, request)
    top_n = body.top_n or len(body.documents)
    if top_n < 0:
        raise RequestError(f"top_n={top_n} must be at least 1, or 0 for all documents", param="top_n")

    def build(scores: list[float], usage: dict[str, Any]) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda index: scores[index], reverse=True)[:top_n]
        document = {"document": {"text": ""}} if body.return_documents else {}
        results = [{"index": index, **document, "relevance_score": scores[index]} for index in order]
        for one in results if document else ():
            one["document"] = {"text": body.documents[one["index"]]}
        head = new_head(service, request, body.model, "rerank", "list")
        tokens = {name: usage[name] for name in ("prompt_tokens", "total_tokens")}
        return {"id": head["id"], "model": head["model"], "usage": tokens, "results": results}

    return await _scores(service, request, body, ("query", "documents"), [body.query], body.documents, build)


def _service(body: PoolingFields, request: Request) -> Service:
    """Return the service after the checks that are common to the routes."""
    service: Service = request.app.state.service
    _ = service.tokens  # raises 503 until the model is loaded
    service.check_model(body.model)
    body.refuse_unsupported()
    check_priority(request, body.priority)
    return service


# ---- vectors -------------------------------------------------------------------------------------------------------


async def _vectors(
    service: Service, request: Request, body: InputFields, task: str, prefix: str, kind: str, field: str
) -> Response:
    """Answer with a vector, or several, of each input. `kind` and `field` name an entry and its vector."""
    info, inputs = service.client.info(), body.inputs
    service.admission.check_capacity(len(inputs), "input")
    params, finish = _task(body, task, info), _finisher(body, task, info)
    before, truncation = info.pooling.prompt(body.prompt_name), body.truncation
    head = new_head(service, request, body.model, prefix, "list")

    reservation = hold(request, service.admission.reserve(len(inputs), "input"))
    jobs = []
    for index, one in enumerate(inputs):
        param = "input" if isinstance(body.input, str) or one is body.input else f"input[{index}]"
        text = before + one if isinstance(one, str) else one
        ids = await _input_ids(service, text, param, body.add_special_tokens, truncation)
        with naming({"return_hidden_states": "task"} if params.return_hidden_states else {}):
            jobs.append(await service.jobs.tokenize(head["id"], ids, param, params, body.priority))
    started(request, jobs)
    await service.jobs.finish(jobs, reservation)

    def build(part: Callable[[Any], Any]) -> dict[str, Any]:
        data = [
            part({"index": index, "object": kind, field: _encode(finish(job), body.encoding_format)})
            for index, job in enumerate(jobs)
        ]
        return {**head, "data": data, "usage": _usage(service, jobs)}

    return load_reported(request, JSONAnswer(await service.jobs.write(jobs, build, reservation)), service.load())


def _task(body: InputFields, task: str, info: ModelInfo) -> SamplingParams:
    """Return the parameters of a task's requests. Raises RequestError for one that the model can't do."""
    salt = body.cache_salt or ""
    if task == "token_embed":
        return SamplingParams(max_tokens=0, temperature=0.0, return_hidden_states=True, cache_salt=salt)
    mode = "classify" if task == "classify" else info.pooling.mode
    params = SamplingParams(max_tokens=0, temperature=0.0, pooling=mode, cache_salt=salt)
    info.check_head(params)
    return params


def _finisher(body: InputFields, task: str, info: ModelInfo) -> Callable[[Job], np.ndarray]:
    """Return a function from a job that has ended to its vector, or to one per token."""
    config = info.pooling
    if task == "classify":
        for name in ("dimensions", "normalize"):
            if getattr(body, name) is not None:
                raise RequestError(f"{name} has no effect on the outputs of a classification head: remove it", name)
        kind = "identity" if body.use_activation is False else config.activation
        return lambda job: activate(_rows(job)[0], kind)
    config.check_dimensions(body.dimensions, info.hidden_size)
    wanted = body.normalizes
    normalize = config.normalize if wanted is None else wanted
    if task == "token_embed":
        return lambda job: finish_embedding(_rows(job), body.dimensions, normalize)
    return lambda job: finish_embedding(_rows(job)[0], body.dimensions, normalize)


def _rows(job: Job) -> np.ndarray:
    rows = job.choices[0].hidden_states
    assert rows is not None  # the engine fails a request without
    return rows


def _encode(vector: np.ndarray, encoding: str) -> np.ndarray | str:
    """Return a vector as it is, to be written as numbers, or in base64 as little-endian float32."""
    return vector if encoding == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()


async def _input_ids(
    service: Service, text: str | list[int], param: str, add_special_tokens: bool, truncation: Truncation | None
) -> list[int]:
    """Return the token ids of an input. A cut keeps the tokens that the tokenizer adds at both ends.

    Raises RequestError, PromptTooLong.
    """
    info, tokens = service.client.info(), service.tokens
    ids = await tokens.encode(text, param, add_special_tokens) if isinstance(text, str) else text
    longest = info.pooling.longest(info.max_model_len)
    if truncation is not None:
        limit = longest if truncation.limit == -1 else truncation.limit
        first, last = tokens.num_special_tokens if isinstance(text, str) and add_special_tokens else (0, 0)
        if len(ids) > limit:
            if limit <= first + last:
                raise RequestError(
                    f"truncate_prompt_tokens={limit} leaves nothing of {param} beside {first + last} special tokens: "
                    "raise it",
                    param="truncate_prompt_tokens",
                )
            inner = dataclasses.replace(truncation, limit=limit - first - last)
            middle = inner.apply(ids[first : len(ids) - last], info.max_model_len, 0)
            ids = [*ids[:first], *middle, *ids[len(ids) - last :]]
    info.pooling.check_length(len(ids), info.max_model_len, param)
    return ids


def _usage(service: Service, jobs: list[Job]) -> dict[str, Any]:
    """Return the `usage` object. The token that a score reads is not part of the answer."""
    usage = answers.usage(jobs, service.config.sends_prompt_tokens_details)
    return usage | {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}


# ---- scores --------------------------------------------------------------------------------------------------------


async def _scores(
    service: Service, request: Request, body: ScoredFields, names: tuple[str, str], queries: Sequence[str],
    documents: Sequence[str], build: Callable[[list[float], dict[str, Any]], dict[str, Any]],
) -> Response:  # fmt: skip
    """Answer with what `build` makes of the scores of the pairs and of the usage."""
    scoring, pairs = service.scoring, pairs_of(queries, documents, names)
    scoring.check(body.instruction)
    if scoring.kind == "cosine" and body.use_activation is not None:
        raise RequestError(
            "use_activation has no effect on the cosine of two embeddings: remove it", param="use_activation"
        )
    count = len(queries) + len(documents) if scoring.kind == "cosine" else len(pairs)
    service.admission.check_capacity(count, names[1])
    truncation = body.truncation_at(None)
    public_id = f"score-{request.state.request_id}"

    reservation = hold(request, service.admission.reserve(count, names[1]))
    cut, jobs = await _cut_texts(service, body, names, queries, documents), []
    info, salt = service.client.info(), body.cache_salt or ""
    if scoring.kind == "cosine":
        params = SamplingParams(max_tokens=0, temperature=0.0, pooling=info.pooling.mode, cache_salt=salt)
        before = info.pooling.prompt(None)
        for name, texts in zip(names, cut, strict=True):
            for index, text in enumerate(texts):
                param = _place(name, index, texts)
                ids = await _input_ids(service, before + text, param, True, truncation)
                jobs.append(await service.jobs.tokenize(public_id, ids, param, params, body.priority))
    else:
        longest = info.pooling.longest(info.max_model_len - (scoring.params.max_tokens or 0))
        limit = None if truncation is None else longest if truncation.limit == -1 else truncation.limit
        params = dataclasses.replace(scoring.params, cache_salt=salt)
        for query, document in pairs:
            param = _place(names[1], document, documents)
            ids = await service.tokens.pair(scoring, cut[0][query], cut[1][document], body.instruction, limit, param)
            info.pooling.check_length(len(ids), longest, param)
            jobs.append(await service.jobs.tokenize(public_id, ids, param, params, body.priority))
    started(request, jobs)
    await service.jobs.finish(jobs, reservation)

    def scores() -> list[float]:
        if scoring.kind == "cosine":
            vectors = [_rows(job)[0] for job in jobs]
            return [cosine(vectors[query], vectors[len(queries) + document]) for query, document in pairs]
        return [scoring.score(job.choices[0], body.use_activation is not False) for job in jobs]

    content = await service.jobs.write(jobs, lambda _: build(scores(), _usage(service, jobs)), reservation)
    return load_reported(request, JSONAnswer(content), service.load())


async def _cut_texts(
    service: Service, body: ScoredFields, names: tuple[str, str], queries: Sequence[str], documents: Sequence[str]
) -> list[Sequence[str]]:
    """Return queries and documents, cut to as many tokens as the body allows for one."""
    found = []
    limits = body.max_tokens_per_query, body.max_tokens_per_doc
    for name, texts, limit in zip(names, (queries, documents), limits, strict=True):
        places = [_place(name, index, texts) for index in range(len(texts))]
        both = zip(texts, places, strict=True)
        found.append([await service.tokens.cut(text, limit, place) for text, place in both] if limit else texts)
    return found


def _place(name: str, index: int, texts: Sequence[str]) -> str:
    """Return the name of a text for errors."""
    return name if len(texts) == 1 else f"{name}[{index}]"

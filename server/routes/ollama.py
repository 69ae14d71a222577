"""Ollama's API: /api/chat and /api/generate, served as chats, and what its clients ask about models.

Routes that change models on the server are refused: it serves the one that it was started with.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from engine.config import DEFAULT_MODEL
from engine.errors import RequestError
from engine.protocol.outputs import OutputDelta
from engine.protocol.request import TokenLogprob
from engine.text.parsing.chat import ChatParser, joined
from engine.text.parsing.parts import Content, Part, Reasoning, ToolCall
from server.http.body_route import BodyRoute
from server.http.errors import WireError, aborted, failure
from server.http.long_running import hold, long_running
from server.http.openapi import OLLAMA_REFUSALS, answered_by
from server.http.streaming import EventStream, JSONAnswer, WriteEvent
from server.routes.chat_outputs import call_id
from server.routes.chat_run import ChatRun
from server.routes.openai_answers import Spelling, chat_logprobs
from server.schemas import ollama_answers as wire
from server.schemas.ollama import SENT_NAMES, OllamaBody, OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from server.serving.admission import Reservation
from server.serving.jobs import Job
from server.serving.output_budget import size_of
from server.serving.request_log import started
from server.serving.service import Service
from server.version import OLLAMA_VERSION

router = APIRouter(prefix="/api", tags=["ollama"], responses=OLLAMA_REFUSALS, route_class=BodyRoute)
NDJSON = "application/x-ndjson"
TAG = ":latest"  # what Ollama adds to a name without a tag
NEVER = "9999-12-31T23:59:59Z"
_FORMAT_BITS = {
    "fp32": 32.0,
    "float32": 32.0,
    "fp8": 8.0,
    "int8": 8.0,
    "int4": 5.0,
    "mxfp4": 4.25,
}  # of a weight, with scales; others have 16


class LineStream(EventStream):
    """A stream of JSON objects, one per line."""

    media_type = NDJSON


@router.post("/chat", responses=answered_by(wire.OllamaChat, NDJSON))
@long_running
async def chat(body: OllamaChatBody, request: Request) -> Response:
    """Generate the next message of a conversation, in the format of Ollama's API."""
    return await _answer(body, request, _ChatLines)


@router.post("/generate", responses=answered_by(wire.OllamaGenerated, NDJSON))
@long_running
async def generate(body: OllamaGenerateBody, request: Request) -> Response:
    """Answer a prompt, in the format of Ollama's API; with raw=true, without the chat template."""
    return await _answer(body, request, _GenerateLines)


async def _answer(body: OllamaBody, request: Request, lines: type[_Lines]) -> Response:
    service: Service = request.app.state.service
    model = served_name(service, body.model)
    body.refuse_unsupported()
    if isinstance(body, OllamaChatBody | OllamaGenerateBody) and body.is_empty:
        return JSONAnswer(lines(body.model).last({}, [], "load"))
    run = _Run(request, body, model, lines(body.model))
    reservation = hold(request, service.admission.reserve(1))
    job = await run.tokenize()
    if body.stream:
        return LineStream(run.stream(job, reservation), lambda error: _written(failure(error, request.scope)), last=b"")
    return JSONAnswer(await run.answer(job, reservation))


class _Lines:
    """Writes the lines of an answer. `model` is the name that the client sent."""

    def __init__(self, model: str):
        self._model = model
        self._num_calls = 0

    def line(self, parts: Sequence[Part], logprobs: Sequence[Any] = ()) -> dict[str, Any]:
        """Return the line of the next parts of the output."""
        content = "".join(part.text for part in parts if isinstance(part, Content))
        thinking = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = [self._call(part) for part in parts if isinstance(part, ToolCall)]
        return {**self._head(), **self._output(content, thinking, calls), "done": False, **_given(logprobs=logprobs)}

    def last(
        self, statistics: Mapping[str, int], parts: Sequence[Part], reason: str, logprobs: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """Return the last line of a stream, or with all parts the whole answer."""
        return {**self.line(parts, logprobs), "done": True, "done_reason": reason, **statistics}

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": _rfc3339(time.time())}

    def _output(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        raise NotImplementedError

    def _call(self, part: ToolCall) -> dict[str, Any]:
        function = {"index": self._num_calls, "name": part.name, "arguments": json.loads(part.arguments)}
        self._num_calls += 1
        return {"id": call_id(), "function": function}


class _ChatLines(_Lines):
    def _output(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message = {"role": "assistant", "content": content, **_given(thinking=thinking, tool_calls=calls)}
        return {"message": message}


class _GenerateLines(_Lines):
    def _output(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"response": content, **_given(thinking=thinking)}


class _Run:
    """One request: its job, and its answer as lines or as a whole."""

    def __init__(self, request: Request, body: OllamaBody, model: str, lines: _Lines):
        self._service: Service = request.app.state.service
        self._request, self._body, self._lines = request, body, lines
        self._id = f"ollama-{request.state.request_id}"
        service, tokenizer = self._service, self._service.client.tokenizer
        if body.think and service.chat_formats.reasoning is None:
            raise RequestError(
                f"think={json.dumps(body.think)}: the model does not support thinking, or its format is not known "
                "(--reasoning-parser); remove it",
                param="think",
            )
        found, places = body.chat(service.client.info().max_model_len)
        found.model = model
        self._prompt: str | None = None
        if isinstance(body, OllamaGenerateBody):
            has_template = tokenizer is None or tokenizer.has_chat_template
            if body.raw or not (has_template or body.system or body.think is not None):
                self._prompt = body.prompt  # as Ollama does for a model without a template
        self._run = ChatRun(service, request, found, self._id, SENT_NAMES, places, stops_at_context=True)
        self._spelling = Spelling(service.tokens)

    async def tokenize(self) -> Job:
        """Return the job."""
        if self._prompt is None:
            return await self._run.tokenize()
        with self._run.translated():
            service, params = self._service, self._run.params
            ids = await service.tokens.encode(self._prompt, "prompt")
            if params.max_tokens is not None:
                room = max(1, service.client.info().max_model_len - len(ids))
                params = dataclasses.replace(params, max_tokens=min(params.max_tokens, room))
            job = service.jobs.of_ids(self._id, self._prompt, ids, "prompt", params, 0)
        started(self._request, [job])
        return job

    async def stream(self, job: Job, reservation: Reservation) -> AsyncGenerator[bytes, None]:
        """Run the job and yield the lines of the answer."""
        jobs, parser = self._service.jobs, self._run.parser()
        with self._run.translated():
            async with aclosing(jobs.run(job, reservation)) as arrivals:
                async for deltas in arrivals:
                    size = sum(size_of(delta.logprobs) for delta in deltas)
                    written = await jobs.write_events(size, partial(self._pieces, parser, job, deltas))
                    if written:
                        yield written
            yield _written(self._lines.last(_statistics(job), [], _done_reason(job)))

    async def answer(self, job: Job, reservation: Reservation) -> Any:
        """Run the job and return the whole answer."""
        with self._run.translated():
            await self._service.jobs.finish([job], reservation)
            choice, parser = job.choices[0], self._run.parser()
            parts = joined([*parser.feed(choice.text), *parser.finish(choice.is_cut)])
            reason, statistics = _done_reason(job), _statistics(job)
            return await self._service.jobs.write(
                [job],
                lambda part: part(self._lines.last(statistics, parts, reason, self._logprobs(choice.logprobs))),
                reservation,
            )

    def _pieces(self, parser: ChatParser, job: Job, deltas: Sequence[OutputDelta], _: WriteEvent) -> bytes:
        parts = [part for delta in deltas for part in parser.feed(delta.text_delta)]
        if job.choices[0].finish_reason is not None:
            parts += parser.finish(job.choices[0].is_cut)
        logprobs = [one for delta in deltas for one in self._logprobs(delta.logprobs)]
        return _written(self._lines.line(joined(parts), logprobs)) if parts or logprobs else b""

    def _logprobs(self, found: Any) -> list[dict[str, Any]]:
        if not self._body.logprobs:
            return []
        entries: list[TokenLogprob] = list(found or ())
        return chat_logprobs(self._spelling, entries)["content"]


@router.get("/version", responses=answered_by(wire.OllamaVersion))
async def show_version() -> dict[str, str]:
    """Return the version of Ollama whose API is followed, which clients compare with what they need."""
    return {"version": OLLAMA_VERSION}


@router.get("/tags", responses=answered_by(wire.OllamaModels))
async def tags(request: Request) -> dict[str, Any]:
    """List the served model under each of its names."""
    service: Service = request.app.state.service
    return {"models": [{**one, "modified_at": _rfc3339(service.start_time)} for one in _models(service)]}


@router.get("/ps", responses=answered_by(wire.OllamaLoaded))
async def loaded_models(request: Request) -> dict[str, Any]:
    """List the served model as loaded."""
    service: Service = request.app.state.service
    models = _models(service)
    info = service.client.info()
    in_vram = info.device != "cpu"
    return {
        "models": [
            {
                **one, "expires_at": NEVER, "size_vram": one["size"] if in_vram else 0,
                "context_length": info.max_model_len,
            }
            for one in models
        ]
    }  # fmt: skip


@router.post("/show", responses=answered_by(wire.OllamaShown))
async def show(body: OllamaShowBody, request: Request) -> dict[str, Any]:
    """Return what is known about the served model."""
    service: Service = request.app.state.service
    name = served_name(service, body.wanted)
    info, formats, tokenizer = service.client.info(), service.chat_formats, service.client.tokenizer
    family = _family(info.architecture)
    capabilities = {"tools": formats.tools is not None, "thinking": formats.reasoning is not None}
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": "\n".join(f"{key:<30} {value}" for key, value in info.sampling_defaults.items()),
        "template": tokenizer.chat_template() if tokenizer is not None else "",
        "details": _details(service),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": info.num_parameters,
            f"{family}.context_length": info.max_model_len,
            f"{family}.vocab_size": info.vocab_size,
        },
        "capabilities": ["completion", *(key for key, is_there in capabilities.items() if is_there)],
        "modified_at": _rfc3339(service.start_time),
    }


@router.head("/version", include_in_schema=False)
@router.head("/tags", include_in_schema=False)
async def reachable() -> Response:
    """Answer a client that asks whether the server is there."""
    return Response()


@router.post("/embed", include_in_schema=False)
@router.post("/embeddings", include_in_schema=False)
async def embed() -> Response:
    """Refuse embeddings."""
    raise _not_supported("embeddings are not offered in Ollama's format: use /v1/embeddings")


@router.post("/pull", include_in_schema=False)
@router.post("/push", include_in_schema=False)
@router.post("/create", include_in_schema=False)
@router.post("/copy", include_in_schema=False)
@router.delete("/delete", include_in_schema=False)
@router.head("/blobs/{digest}", include_in_schema=False)
@router.post("/blobs/{digest}", include_in_schema=False)
async def change_models() -> Response:
    """Refuse to change models."""
    raise _not_supported("models can't be changed over this API: start the server with another --model")


def served_name(service: Service, name: str) -> str:
    """Return the served name for a client's, which may have the tag "latest". Raises WireError 404, 503."""
    _ = service.tokens  # raises 503 until the model is loaded
    untagged = name.removesuffix(TAG)
    found = untagged if name not in service.model_names() and untagged in service.model_names() else name
    service.check_model(found)
    return found


def _not_supported(message: str) -> WireError:
    return WireError(501, message, type="not_supported_error", code="not_supported")


def _models(service: Service) -> list[dict[str, Any]]:
    _ = service.tokens  # raises 503 until the model is loaded
    info, stats = service.client.info(), service.client.stats()
    version = stats.weight_version or info.weight_version
    digest = hashlib.sha256(f"{service.config.engine.model} {version}".encode()).hexdigest()
    size = int(info.num_parameters * _FORMAT_BITS.get(info.weight_format, 16.0) / 8)
    fixed = {"size": size, "digest": digest, "details": _details(service)}
    names = [name if ":" in name else name + TAG for name in service.model_names()]
    return [{"name": name, "model": name, **fixed} for name in names]


def _details(service: Service) -> dict[str, Any]:
    info, model = service.client.info(), service.config.engine.model.lower()
    family = _family(info.architecture)
    return {
        "parent_model": "",
        "format": "gguf" if model.endswith(".gguf") or model == DEFAULT_MODEL else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _shown_count(info.num_parameters),
        "quantization_level": info.weight_format,
    }


def _family(architecture: str) -> str:
    """Return Ollama's spelling of an architecture, such as "llama" for LlamaForCausalLM."""
    return architecture.partition("For")[0].lower()


def _shown_count(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _statistics(job: Job) -> dict[str, int]:
    """Return the counts of a finished job, and its durations in ns. The prompt's includes the wait in the queue."""
    total = time.perf_counter() - job.started
    first = job.watch.first_token_seconds if job.watch is not None else None
    first = total if first is None else min(first, total)
    return {
        "total_duration": int(total * 1e9),
        "load_duration": 0,
        "prompt_eval_count": job.prompt_tokens,
        "prompt_eval_duration": int(first * 1e9),
        "eval_count": len(job.choices[0].token_ids),
        "eval_duration": int((total - first) * 1e9),
    }


def _done_reason(job: Job) -> str:
    """Return why a finished job ended. Raises WireError 503 for one that was aborted."""
    reason = job.choices[0].finish_reason
    if reason == "abort":
        raise aborted()
    return "length" if reason == "length" else "stop"


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value}


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _written(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

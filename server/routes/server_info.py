"""Routes about the server: liveness, readiness, version, metrics and the graph table."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.concurrency import run_in_threadpool

from server.http.openapi import NOT_SERVING, answered_by, failing
from server.observability.exposition import exposition
from server.pages import graphs as graphs_page
from server.pages import page
from server.schemas import answers
from server.serving.generation_probe import GenerationProbe
from server.serving.service import Service
from server.version import VLLM_VERSION, version

router = APIRouter(tags=["server"])


@router.head("/health", include_in_schema=False)
@router.get("/health", responses=answered_by(answers.Health) | failing(answers.Health))
async def health(request: Request) -> Response:
    """Liveness: 200 unless the engine has died for good."""
    service: Service = request.app.state.service
    dead = service.startup_error is not None or (service.started and not service.client.health().alive)
    return JSONResponse({"status": "dead" if dead else "ok"}, status_code=503 if dead else 200)


@router.head("/ready", include_in_schema=False)
@router.get("/ready", responses=answered_by(answers.Ready) | failing(answers.Ready))
async def ready(request: Request) -> Response:
    """Readiness: 200 when requests are accepted, else 503 with the reasons. The body has the warm-up progress."""
    service: Service = request.app.state.service
    reasons = service.reasons_not_ready()
    warm = dict(service.client.health().warm)
    headers = {"Retry-After": "2"} if reasons else {}
    body = {"ready": not reasons, "reasons": reasons, "warm": warm}
    return JSONResponse(body, status_code=503 if reasons else 200, headers=headers)


@router.get("/health_generate", responses=answered_by(answers.Health) | NOT_SERVING)
async def health_generate(request: Request) -> Response:
    """Liveness of the whole path: 200 if the engine generated a token just now, as in SGLang."""
    probe: GenerationProbe = request.app.state.probe
    await probe.check()
    return JSONResponse({"status": "ok"})


@router.get("/load", responses=answered_by(answers.Load))
async def load(request: Request) -> dict[str, int]:
    """Return the number of requests that are being processed, as in vLLM."""
    service: Service = request.app.state.service
    return {"server_load": service.admission.all_unanswered}


@router.get("/version", responses=answered_by(answers.Version))
async def show_version(request: Request) -> dict[str, str]:
    """Return the server's version; with --compat vllm, that of the vLLM release whose API it follows."""
    is_vllm = request.app.state.config.compat == "vllm"
    return {"version": VLLM_VERSION if is_vllm else version()}


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return all metrics: in Prometheus' text format, or in OpenMetrics if the header Accept asks for it."""
    text, content_type = exposition(request.app.state.registry, ",".join(request.headers.getlist("accept")))
    return Response(text, media_type=content_type)


@router.get("/graphs", responses=answered_by(answers.Graphs, "text/html") | NOT_SERVING)
async def graphs(request: Request) -> Response:
    """Return the graph table as JSON, or as a self-refreshing page for clients that accept text/html."""
    service: Service = request.app.state.service
    _ = service.tokens  # raises 503 until the engine has started
    rows: list[dict[str, Any]] = await service.client.graphs()
    body = {
        "model": service.model_names()[0],
        "warm": dict(service.client.health().warm),
        "pool_bytes": service.client.stats().graphs["pool_bytes"],
        "graphs": rows,
    }
    accepted = request.headers.get("accept", "")
    if "text/html" in accepted:
        document = await run_in_threadpool(graphs_page.render_graphs_page, body)
        return HTMLResponse(document, headers=graphs_page.HEADERS)
    return JSONResponse(body, headers=page.HEADERS)

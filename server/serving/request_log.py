"""Access log: one record per HTTP request, with the token counts and latencies of its jobs.

Headers, query strings, prompts and completions are never logged, so that no key or user text can leak.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.observability.logs import FIELDS

if TYPE_CHECKING:
    from server.serving.jobs import Job


PROBES = ("/", "/graphs", "/health", "/ping", "/ready", "/metrics")  # polled about every second


access = logging.getLogger("encore.access")


class RequestLog:
    """ASGI middleware that logs each request when its response is complete or its client has disconnected.

    Sets `state["jobs"]`, the list that `started` extends. Successful probes are not logged. Must be inside
    RequestIds.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        jobs: list[Job] = scope["state"].setdefault("jobs", [])
        began, status = time.perf_counter(), 0

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note_status)
        except Exception:
            status = status or 500  # an outer handler sends the response
            raise
        finally:
            self._log(scope, status or 499, time.perf_counter() - began, jobs)

    def _log(self, scope: Scope, status: int, seconds: float, jobs: Sequence[Job]) -> None:
        path = scope.get("raw_path", b"").partition(b"?")[0].decode("ascii", "replace")[:200]
        if path in PROBES and (status < 400 or path == "/ready"):
            return
        fields = {
            "request_id": scope["state"]["request_id"],
            "method": scope["method"],
            "path": path,
            "status": status,
            "seconds": round(seconds, 6),
            "client": (scope.get("client") or ("",))[0],
        }
        access.info("request", extra={FIELDS: fields | summary(jobs)})


def started(request: Request, jobs: Sequence[Job]) -> None:
    """Log these jobs with their request, and stop counting its body: they have what it said."""
    request.state.jobs.extend(jobs)
    request.state.upload.release()


def summary(jobs: Sequence[Job]) -> dict[str, Any]:
    """Summarize a request's jobs: tokens, times in seconds, finish reasons, and tokens by graph bucket."""
    if not jobs:
        return {}
    return {
        "prompt_tokens": sum(job.prompt_tokens for job in jobs),
        "cached_tokens": sum(job.output.cached_tokens for job in jobs),
        "completion_tokens": sum(len(choice.token_ids) for job in jobs for choice in job.choices),
        "finish_reasons": dict(Counter(choice.finish_reason or "abort" for job in jobs for choice in job.choices)),
        **stats(jobs),
    }


def stats(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return times in seconds (None before the first token) and the number of tokens by graph bucket, or "eager"."""
    watches = [job.watch for job in jobs if job.watch is not None]
    firsts = [watch.first_token_seconds for watch in watches if watch.first_token_seconds is not None]
    queued = [watch.queue_seconds for watch in watches if watch.queue_seconds is not None]
    buckets: Counter[int | None] = sum((watch.buckets for watch in watches), Counter())
    return {
        "queue_seconds": round(max(queued), 6) if queued else None,
        "first_token_seconds": round(min(firsts), 6) if firsts else None,
        "graph_buckets": {"eager" if bucket is None else str(bucket): count for bucket, count in buckets.items()},
    }

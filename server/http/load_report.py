"""The load of the server in a response's header, as in ORCA (Open Request Cost Aggregation), for load balancers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

FORMAT_HEADER, REPORT_HEADER = "endpoint-load-metrics-format", "endpoint-load-metrics"


class LoadReported(Response):
    """A response whose header has a report of the load when it starts, as `text_of` returns it."""

    def __init__(self, response: Response, text_of: Callable[[], str]):
        self._response, self._text_of = response, text_of
        self.status_code = response.status_code
        self.background = None
        self.raw_headers = response.raw_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_reported(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                MutableHeaders(scope=message)[REPORT_HEADER] = self._text_of()
            await send(message)

        await self._response(scope, receive, send_reported)


def load_reported(request: Request, response: Response, metrics: Callable[[], Mapping[str, float]]) -> Response:
    """Return the response, with the load in its header if the request asks for it.

    The format is that of the request's header: JSON or TEXT, as in vLLM. Others are ignored: the report is a hint.
    """
    wanted = request.headers.get(FORMAT_HEADER, "").strip().lower()
    if wanted == "json":
        return LoadReported(response, lambda: f"JSON {json.dumps({'named_metrics': dict(metrics())})}")
    if wanted == "text":
        return LoadReported(
            response, lambda: "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics().items())
        )
    return response

"""The load of the server in a response's header, as in ORCA (Open Request Cost Aggregation), for load balancers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

FORMAT_HEADER, REPORT_HEADER = "endpoint-load-metrics-format", "endpoint-load-metrics"
R = TypeVar("R", bound=Response)


def load_reported(request: Request, response: R, metrics: Mapping[str, float]) -> R:
    """Return the response, with the load in its header if the request asks for it.

    The format is that of the request's header: JSON or TEXT, as in vLLM. Others are ignored: the report is a hint.
    """
    wanted = request.headers.get(FORMAT_HEADER, "").strip().lower()
    if wanted == "json":
        response.headers[REPORT_HEADER] = f"JSON {json.dumps({'named_metrics': dict(metrics)})}"
    elif wanted == "text":
        found = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
        response.headers[REPORT_HEADER] = f"TEXT {found}"
    return response

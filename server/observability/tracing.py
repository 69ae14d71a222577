"""OpenTelemetry traces of requests: spans of the gateway, of an API worker, and of the engine's work.

The spans go to a collector over OTLP/HTTP. OpenTelemetry (`pip install 'encore-serve[otel]'`) is imported only if the
setting `otlp_traces_endpoint` asks for traces.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import ConfigError
from engine.utils.daemon_thread import in_daemon_thread
from server.config import traces_url

if TYPE_CHECKING:
    from server.observability.metrics import RequestWatch

PROBES = frozenset({"/", "/graphs", "/health", "/ping", "/ready", "/metrics"})  # polled about every second
PROTOCOL = "http/protobuf"
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
CONTEXT_HEADERS = ("traceparent", "tracestate")
SERVICE = "encore"
ENGINE_SCOPE = "encore.engine"
REQUEST_SPAN = "llm_request"  # vLLM's name


def check_packages(endpoint: str) -> None:
    """Raise ConfigError if OpenTelemetry is not installed, or if its environment variables ask for another protocol."""
    for name in PROTOCOL_VARIABLES:
        if os.environ.get(name, PROTOCOL) != PROTOCOL:
            raise ConfigError(
                f"{name}={os.environ[name]} is not supported with otlp_traces_endpoint: unset it, or set {PROTOCOL}"
            )
    try:
        importlib.import_module("opentelemetry.sdk.trace.export")
        importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r} needs OpenTelemetry, and {error.name} is not installed: pip install "
            "'encore-serve[otel]', or leave it out"
        ) from error


class Tracing:
    """Makes the spans of one process, and sends them to the collector at `endpoint` in the background.

    `component`: "gateway" or "server". Raises ConfigError as `check_packages` does.
    """

    def __init__(self, endpoint: str, component: str):
        check_packages(endpoint)
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        resources = importlib.import_module("opentelemetry.sdk.resources")
        otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        propagation = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        self._trace = importlib.import_module("opentelemetry.trace")
        self._context = importlib.import_module("opentelemetry.context")
        name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": SERVICE}
        self._provider: Any = sdk.TracerProvider(resource=resources.Resource.create(name), shutdown_on_exit=False)
        exporter = otlp.OTLPSpanExporter(endpoint=traces_url(endpoint))
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._http: Any = self._provider.get_tracer(f"encore.{component}")
        self._engine: Any = self._provider.get_tracer(ENGINE_SCOPE)
        self._propagator: Any = propagation.TraceContextTextMapPropagator()

    async def close(self) -> None:
        """Send the spans that are left."""
        await in_daemon_thread(self._provider.shutdown)

    def http_span(self, scope: Scope) -> Any:
        """Begin the span of an HTTP request, within the trace that its headers name."""
        headers = Headers(scope=scope)
        parent = self._propagator.extract({name: headers[name] for name in CONTEXT_HEADERS if name in headers})
        attributes = {
            "http.request.method": scope["method"], "url.path": scope["path"][:200], "url.scheme": scope["scheme"],
        }  # fmt: skip
        kind = self._trace.SpanKind.SERVER
        return self._http.start_span(scope["method"], context=parent, kind=kind, attributes=attributes)

    def use(self, span: Any) -> Any:
        """Return a context manager that makes a span the parent of spans that begin in it and in its tasks."""
        return self._trace.use_span(span, record_exception=False, set_status_on_exception=False)

    def handed_on(self, scope: Scope, span: Any) -> Scope:
        """Return the scope with headers that name the span, for the next process."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=self._trace.set_span_in_context(span))
        kept = [(name, value) for name, value in scope["headers"] if name.decode("latin-1") not in CONTEXT_HEADERS]
        return {**scope, "headers": kept + [(name.encode(), value.encode()) for name, value in carrier.items()]}

    def end(self, span: Any, scope: Scope, status: int) -> None:
        """End the span of an HTTP request; `status` 0: its client left before the answer."""
        if route := getattr(scope.get("route"), "path", None):
            span.update_name(f"{scope['method']} {route}")
            span.set_attribute("http.route", route)
        if status:
            span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(self._trace.StatusCode.ERROR)
        if request_id := scope.get("state", {}).get("request_id"):
            span.set_attribute("encore.request_id", request_id)
        span.end()

    # ---- the engine's work -----------------------------------------------------------------------------------------

    def watch(self, job: Any) -> Callable[[RequestWatch], None]:
        """Return what records the spans of a prompt when it has ended, below the span that is current now."""
        parent = self._context.get_current()
        return lambda watch: self._record(job, watch, parent)

    def _record(self, job: Any, watch: RequestWatch, parent: Any) -> None:
        to_ns = time.time_ns() - time.perf_counter_ns()
        end = time.perf_counter()

        def at(seconds: float) -> int:
            return int(seconds * 1e9) + to_ns

        sequences = watch.sequences()
        params, tokens = job.params, sum(one.num_tokens for one in sequences)
        attributes = {
            "gen_ai.request.id": job.public_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": job.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": job.prompt_tokens,
            "gen_ai.usage.completion_tokens": tokens,
            "gen_ai.usage.input_tokens": job.prompt_tokens,
            "gen_ai.usage.output_tokens": tokens,
            "gen_ai.latency.e2e": end - watch.started,
        }
        if watch.queue_seconds is not None:
            attributes["gen_ai.latency.time_in_queue"] = watch.queue_seconds
        if watch.first_token_seconds is not None:
            attributes["gen_ai.latency.time_to_first_token"] = watch.first_token_seconds
        span = self._engine.start_span(
            REQUEST_SPAN, context=parent, start_time=at(watch.started), attributes=attributes
        )  # fmt: skip
        inside = self._trace.set_span_in_context(span)
        for one in sequences:
            scheduled = watch.started + one.queue_seconds
            parts = [("queue", watch.started, scheduled)]
            if one.first is not None and one.last is not None:
                parts += [("prefill", scheduled, one.first), ("decode", one.first, one.last)]
            for name, start, stop in parts:
                part = self._engine.start_span(
                    name, context=inside, start_time=at(start), attributes={"encore.sequence": one.number}
                )  # fmt: skip
                part.end(at(stop))
        span.end(at(end))


class TraceRequests:
    """ASGI middleware that makes the span of each request that is no probe, and hands its context on."""

    def __init__(self, app: ASGIApp, tracing: Tracing):
        self.app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBES:
            return await self.app(scope, receive, send)
        span, status = self._tracing.http_span(scope), 0
        inner = self._tracing.handed_on(scope, span)
        inner.setdefault("state", {})

        async def send_and_note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            with self._tracing.use(span):
                await self.app(inner, receive, send_and_note_status)
        except Exception:
            status = status or 500  # an outer handler sends the response
            raise
        finally:
            self._tracing.end(span, inner, status)

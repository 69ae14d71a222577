"""A collector of OpenTelemetry traces: a server on the loopback address that takes OTLP over HTTP."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from tests.support.waiting import PATIENCE


class Span(NamedTuple):
    """A span as the collector received it. Ids are hexadecimal, times in nanoseconds."""

    name: str
    scope: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any]


class Collector:
    """The spans that have arrived at `url`."""

    def __init__(self, url: str):
        self.url = url
        self.spans: list[Span] = []

    def wait(self, condition: Callable[[list[Span]], bool], seconds: float = PATIENCE) -> list[Span]:
        """Wait until the spans meet a condition, and return them."""
        end = time.monotonic() + seconds
        while not condition(spans := list(self.spans)):
            assert time.monotonic() < end, [(one.scope, one.name) for one in spans]
            time.sleep(0.05)
        return spans

    def take(self, body: bytes) -> None:
        """Add the spans of an ExportTraceServiceRequest."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _plain(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [
                    Span(
                        span.name, scope.scope.name, service, span.trace_id.hex(), span.span_id.hex(),
                        span.parent_span_id.hex(), span.start_time_unix_nano, span.end_time_unix_nano,
                        _plain(span.attributes),
                    )
                    for span in scope.spans
                ]  # fmt: skip


def _plain(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/traces":
                collector.take(body)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        collector = Collector(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()

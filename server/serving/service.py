"""The service behind the routes: an engine client's lifecycle, the admission of requests, and their jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.config import ServerConfig
from server.observability.metrics import RequestMetrics
from server.observability.shared_counters import SharedCounters
from server.serving.admission import Admission
from server.serving.jobs import Jobs
from server.serving.lifecycle import Lifecycle

if TYPE_CHECKING:
    from engine.client.async_client import Client
    from server.observability.tracing import Tracing


class Service(Lifecycle):
    """The engine client, with `admission` and `jobs`, for the routes. `begin` starts the client, `close` stops it."""

    def __init__(
        self, client: Client, config: ServerConfig, counters: SharedCounters | None = None,
        start_time: float | None = None, tracing: Tracing | None = None,
    ):  # fmt: skip
        super().__init__(client, config, counters, start_time)
        self.metrics = RequestMetrics(self.counters, tracing)
        self.admission = Admission(self, self.metrics.refused)
        self.jobs = Jobs(self, self.metrics, self.admission.outputs)
        self.unread_hints: set[str] = set()  # that the log has named

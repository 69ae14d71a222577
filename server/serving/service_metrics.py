"""Prometheus metrics of the HTTP side's state: readiness, limits, and the model that is served."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from server.observability.metrics import gauge_family, info_family
from server.version import version

if TYPE_CHECKING:
    from server.serving.service import Service


class ServiceCollector:
    """Reads at each scrape whether requests are answered, the limits, and what is served; also while it loads."""

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """The server's own families; those of the model from when it is first loaded."""
        service = self._service
        yield gauge_family("ready", "1 while requests are answered, else 0.", not service.reasons_not_ready())
        yield gauge_family(
            "num_requests_in_flight", "Sequences that the HTTP side holds places for.", service.all_in_flight
        )
        yield gauge_family("queue_limit", "Sequences that may wait; more are refused.", service.config.max_waiting)
        yield info_family("build_info", "What runs, as labels.", {"version": version()})
        if not service.started:
            return
        info = service.client.info()
        yield gauge_family("max_num_seqs", "Sequences that the running batch may hold.", info.max_num_seqs)
        # Not the weights' version: in RL it changes by the minute, and each value would stay as a series.
        yield info_family(
            "model_info",
            "What is served, as labels.",
            {"model": service.model_names()[0], "architecture": info.architecture, "device": info.device,
             "dtype": info.dtype, "max_model_len": info.max_model_len,
             "warmup": service.config.engine.warmup},
        )  # fmt: skip

"""Prometheus metrics of the server's state: readiness, limits, and the served model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from server.http.body_budget import BODY_BYTES
from server.observability.metrics import gauge_family, info_family
from server.version import version

if TYPE_CHECKING:
    from server.serving.response_store import ResponseStore
    from server.serving.service import Service


class ServiceCollector:
    """Export readiness, limits and model info at each scrape, also while the model loads."""

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield the server's metric families, and the model's families once it is loaded."""
        service = self._service
        yield gauge_family("ready", "1 while the server is ready, else 0.", not service.reasons_not_ready())
        yield gauge_family(
            "num_requests_in_flight", "Admitted sequences that have not ended.", service.admission.all_in_flight
        )
        yield gauge_family(
            "request_body_bytes",
            "Bytes of request bodies that arrive or wait to be tokenized, beyond 64 KiB of each.",
            service.counters.total_gauge(BODY_BYTES),
        )
        yield gauge_family(
            "queue_limit", "Maximum number of waiting sequences; more are refused.", service.config.max_waiting
        )
        yield info_family("build_info", "Build information as labels.", {"version": version()})
        if not service.started:
            return
        info = service.client.info()
        yield gauge_family("max_num_seqs", "Maximum number of sequences in the running batch.", info.max_num_seqs)
        # Without the weight version: in RL it changes every minute, and each value would remain as a series.
        yield info_family(
            "model_info",
            "Information about the served model as labels.",
            {"model": service.model_names()[0], "architecture": info.architecture, "device": info.device,
             "dtype": info.dtype, "max_model_len": info.max_model_len,
             "warmup": service.config.engine.warmup},
        )  # fmt: skip


class ResponseStoreCollector:
    """Export the size of the store of responses, which all API workers share; nothing while there is none."""

    def __init__(self, store: Callable[[], ResponseStore | None]):
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Yield the store's metric families."""
        store = self._store()
        if store is None:
            return
        entries, size = store.usage()
        yield gauge_family("stored_responses", "Stored responses of /v1/responses.", entries)
        yield gauge_family("stored_response_bytes", "Bytes of stored responses with their conversations.", size)

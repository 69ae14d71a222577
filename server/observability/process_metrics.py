"""The `process_…` metrics of a server that may be several processes: the main one's and all fronts' together.

Knows processes by their ids alone. The engine's own memory is its cgroup's to tell.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from server.observability.shared_counters import SharedCounters

LEAST = {"process_start_time_seconds", "process_max_fds"}  # of these the least counts, of the others the sum


class ProcessesCollector:
    """prometheus_client's figures of one process, put together for all that this server has."""

    def __init__(self, counters: SharedCounters):
        self._counters = counters
        counters.values[counters.gauge("pid")] = os.getpid()

    def collect(self) -> Iterator[Metric]:
        """One family of each name."""
        pids = {int(pid) for pid in self._counters.each_gauge("pid") if pid}
        if self._counters.num_rows > 1:
            pids.add(os.getppid())
        found: dict[str, list[Metric]] = {}
        for pid in pids:
            for family in ProcessCollector(pid=functools.partial(int, pid), registry=None).collect():
                found.setdefault(family.name, []).append(family)
        for name, families in found.items():
            first = families[0]
            values = [sample.value for family in families for sample in family.samples]
            [sample] = first.samples
            first.samples = [sample._replace(value=min(values) if name in LEAST else sum(values))]
            yield first

"""`process_…` metrics of the main process and all API workers together.

The engine process is not included: read its memory from its cgroup.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from server.observability.shared_counters import SharedCounters

MINIMUM_OF = {"process_start_time_seconds", "process_max_fds"}  # take the minimum of these, the sum of all others


class ProcessesCollector:
    """Combine prometheus_client's metrics of all processes of this server."""

    def __init__(self, counters: SharedCounters):
        self._counters = counters
        counters.values[counters.gauge_index("pid")] = os.getpid()

    def collect(self) -> Iterator[Metric]:
        """Yield one family per metric name."""
        pids = {int(pid) for pid in self._counters.gauge_per_row("pid") if pid}
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
            first.samples = [sample._replace(value=min(values) if name in MINIMUM_OF else sum(values))]
            yield first

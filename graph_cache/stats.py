"""Counters of the cache: replays, fallbacks with reasons, captures, padding. Dummy runs are not counted.

Plain integers by label tuples. Exporters (Prometheus, logs, tests) read `snapshot()`.
"""

from __future__ import annotations

import bisect
from collections import Counter
from typing import Any

CAPTURE_SECONDS_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

EXACT_ROWS = 512
"""Larger batches are counted by their bucket, so that not every prefill length becomes a label."""


class CacheStats:
    """Counters of one cache, written by the thread that runs it and readable from any."""

    def __init__(self) -> None:
        self.replays: Counter[tuple[str, str, str, int]] = Counter()  # site, scope, phase, bucket
        self.fallbacks: Counter[tuple[str, str, str]] = Counter()  # site, phase, reason
        self.captures: Counter[tuple[str, str, str]] = Counter()  # site, scope, reason
        self.failed_captures: Counter[tuple[str, str]] = Counter()  # site, scope
        self.failures: dict[str, str] = {}  # site -> reason of its last failed capture
        self.invalidations: Counter[str] = Counter()  # reason
        self.real_tokens: Counter[str] = Counter()  # phase
        self.padded_tokens: Counter[str] = Counter()  # phase
        self.batch_rows: Counter[tuple[str, str, int]] = Counter()  # site, phase, real rows (see EXACT_ROWS)
        self.capture_seconds_counts = [0] * (len(CAPTURE_SECONDS_BOUNDS) + 1)
        self.capture_seconds_sum = 0.0

    def observe_capture(self, seconds: float) -> None:
        """Record the duration of a capture."""
        self.capture_seconds_counts[bisect.bisect_left(CAPTURE_SECONDS_BOUNDS, seconds)] += 1
        self.capture_seconds_sum += seconds

    def capture_failed(self, site: str, scope: str, reason: object) -> None:
        """Record a failed capture and the text of its reason."""
        self.failed_captures[site, scope] += 1
        self.failures[site] = str(reason)

    def observe_batch(self, site: str, phase: str, rows: int, padding: int) -> None:
        """Record a batch with this many real rows and padding rows."""
        self.real_tokens[phase] += rows
        self.padded_tokens[phase] += padding
        self.batch_rows[site, phase, rows if rows <= EXACT_ROWS else rows + padding] += 1

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of all counters as plain data: lists of (labels, count)."""
        names = (
            "replays",
            "fallbacks",
            "captures",
            "failed_captures",
            "invalidations",
            "real_tokens",
            "padded_tokens",
            "batch_rows",
        )
        counters: dict[str, Any] = {}
        for name in names:
            items = list(getattr(self, name).items())
            counters[name] = [(labels if isinstance(labels, tuple) else (labels,), count) for labels, count in items]
        counters["capture_seconds"] = {
            "bounds": CAPTURE_SECONDS_BOUNDS,
            "counts": list(self.capture_seconds_counts),
            "sum": self.capture_seconds_sum,
        }
        return counters

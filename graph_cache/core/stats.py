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

SHOWN_PARTS = 6  # of a counter that is printed


class CacheStats:
    """Counters of one cache, written by the thread that runs it and readable from any. Prints as a table of totals."""

    def __init__(self) -> None:
        self.replays: Counter[tuple[str, str, str, int]] = Counter()  # site, scope, phase, bucket
        self.fallbacks: Counter[tuple[str, str, str]] = Counter()  # site, phase, reason
        self.captures: Counter[tuple[str, str, str]] = Counter()  # site, scope, reason
        self.failed_captures: Counter[tuple[str, str]] = Counter()  # site, scope
        self.failures: dict[str, str] = {}  # site -> reason of its last failed capture
        self.invalidations: Counter[str] = Counter()  # reason
        self.shadow_checks: Counter[tuple[str, str, str]] = Counter()  # site, phase, outcome: see shadow.py
        self.shadow_mismatches: Counter[tuple[str, str]] = Counter()  # site, phase; of graphs that were dropped
        self.real_tokens: Counter[str] = Counter()  # phase
        self.padded_tokens: Counter[str] = Counter()  # phase
        self.batch_rows: Counter[tuple[str, str, int]] = Counter()  # site, phase, real rows (see EXACT_ROWS)
        self.capture_seconds_counts = [0] * (len(CAPTURE_SECONDS_BOUNDS) + 1)
        self.capture_seconds_sum = 0.0

    def __repr__(self) -> str:
        """Return the totals and their parts, a counter per line."""
        counters = self.snapshot()
        replays = [(f"{site} {phase} bucket {bucket}", n) for (site, _, phase, bucket), n in counters["replays"]]
        eager = [(f"{site} {phase} {reason}", n) for (site, phase, reason), n in counters["fallbacks"]]
        captures = [(f"{site} {reason}", n) for (site, _, reason), n in counters["captures"]]
        failures = [(site, n) for (site, _), n in counters["failed_captures"]]
        invalidations = [(reason, n) for (reason,), n in counters["invalidations"]]
        lines = [_line("replays", replays), _line("eager", eager), _line("captures", captures)]
        checks = [(f"{site} {phase} {outcome}", n) for (site, phase, outcome), n in counters["shadow_checks"]]
        if failures:
            lines.append(_line("failed captures", failures))
        if invalidations:
            lines.append(_line("invalidations", invalidations))
        if checks:
            lines.append(_line("shadow checks", checks))
        real, padded = (sum(n for _, n in counters[name]) for name in ("real_tokens", "padded_tokens"))
        if real:
            lines.append(f"{'padding':<16} {100 * padded / (real + padded):.1f}% of {real + padded} computed rows")
        if seconds := counters["capture_seconds"]["sum"]:
            lines.append(f"{'capture time':<16} {seconds:.3f} s")
        return "\n".join(lines)

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
            "shadow_checks",
            "shadow_mismatches",
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


def _line(name: str, parts: list[tuple[str, int]]) -> str:
    """Return a counter's total, and its largest parts."""
    parts = sorted((part for part in parts if part[1]), key=lambda part: -part[1])
    shown = [f"{label}: {count}" for label, count in parts[:SHOWN_PARTS]]
    if len(parts) > SHOWN_PARTS:
        shown.append(f"{len(parts) - SHOWN_PARTS} more")
    return f"{name:<16} {sum(count for _, count in parts):<8} {', '.join(shown)}".rstrip()

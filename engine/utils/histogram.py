"""Counts of values in buckets, for metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any


class Histogram:
    """Counts values by bucket. `bounds` are the buckets' upper bounds, ascending; one more bucket has the rest."""

    def __init__(self, bounds: Sequence[float]):
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum: float = 0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> dict[str, Any]:
        """Return the bounds, the count of each bucket and the sum, as plain data."""
        return {"bounds": self._bounds, "counts": list(self._counts), "sum": self._sum}

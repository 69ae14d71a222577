"""Numbers that the fronts of one server add up: each writes a row of shared memory, and any of them reads the sums.

Owns names, rows and the histograms and counters made of them. A row outlives the front that wrote it: its successor
counts on. What is true only of a living front (a gauge) is forgotten with it. Knows neither requests nor HTTP.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

ENTRIES = 1024  # names a row can hold: answers by route and status are the most of them
NAME_BYTES = 120
_STRIDE = 1 + NAME_BYTES // 8  # doubles of an entry: its value, then its name
ROW_DOUBLES = 1 + ENTRIES * _STRIDE  # the row begins with how many entries it has
GAUGE = "now "  # begins the names of what ends with its front


class SharedCounters:
    """One front's row, and the sums over all rows. One thread of one process writes a row; anyone may read.

    `memory`: a writable buffer of doubles for whole rows, zero at first; one's own unless given.
    """

    def __init__(self, memory: Any = None, row: int = 0):
        memory = bytearray(8 * ROW_DOUBLES) if memory is None else memory
        self._bytes = memoryview(memory).cast("B")
        self.values = self._bytes.cast("d")  # `values[place]` is a number; += 1 on one's own counts
        self._start = row * ROW_DOUBLES
        self._indices: list[dict[str, int]] = [{} for _ in range(len(self.values) // ROW_DOUBLES)]
        self._row = row
        self.reset_gauges()

    def index(self, name: str) -> int:
        """Where this row keeps the number `name`; it begins at 0."""
        own = self._read(self._row)
        if name not in own:
            text = name.encode()
            if len(text) > NAME_BYTES or len(own) == ENTRIES:
                raise ValueError(f"no room for {name!r}: {len(own)} of {ENTRIES} names; each has {NAME_BYTES} bytes")
            index = self._start + 1 + len(own) * _STRIDE
            # All of it: a front that was killed here may have left a longer name.
            self._bytes[8 * index + 8 : 8 * index + 8 + NAME_BYTES] = text.ljust(NAME_BYTES, b"\0")
            own[name] = index
            self.values[self._start] += 1  # last: a reader sees whole entries only
        return own[name]

    def gauge_index(self, name: str) -> int:
        """As `place`, for what is forgotten when this front ends."""
        return self.index(GAUGE + name)

    def per_row(self, name: str) -> list[float]:
        """The number in every row that has it."""
        rows = (self._read(row) for row in range(len(self._indices)))
        return [self.values[found[name]] for found in rows if name in found]

    def total(self, name: str) -> float:
        """Its sum over the rows."""
        return sum(self.per_row(name))

    def gauge_per_row(self, name: str) -> list[float]:
        """As `each`, of a gauge."""
        return self.per_row(GAUGE + name)

    def total_gauge(self, name: str) -> float:
        """As `total`, of a gauge."""
        return self.total(GAUGE + name)

    def names(self, prefix: str) -> list[str]:
        """All names that begin so, of any row."""
        rows = [self._read(row) for row in range(len(self._indices))]
        return sorted({name for found in rows for name in found if name.startswith(prefix)})

    @property
    def num_rows(self) -> int:
        """How many fronts there may be."""
        return len(self._indices)

    def row_gauge(self, row: int, name: str) -> float:
        """One row's gauge, 0 where it has none."""
        index = self._read(row).get(GAUGE + name)
        return 0.0 if index is None else self.values[index]

    def reset_gauges(self, row: int | None = None) -> None:
        """A row's gauges are 0, this one's unless named: its front has ended, or begins."""
        for name, index in self._read(self._row if row is None else row).items():
            if name.startswith(GAUGE):
                self.values[index] = 0.0

    def _read(self, row: int) -> dict[str, int]:
        """Where each name of a row is; entries are only ever added."""
        found, start = self._indices[row], row * ROW_DOUBLES
        while len(found) < int(self.values[start]):
            index = start + 1 + len(found) * _STRIDE
            name = bytes(self._bytes[8 * index + 8 : 8 * (index + _STRIDE)]).rstrip(b"\0").decode()
            found[name] = index
        return found


class SharedHistogram:
    """A histogram of seconds over all fronts. `bounds` are the buckets' upper ends, the last one infinite."""

    def __init__(self, counters: SharedCounters, name: str, text: str, bounds: Sequence[float]):
        self._counters, self._name, self._text = counters, name, text
        self.bounds = (*bounds, float("inf"))
        self._names = [f"{name} {number}" for number in range(len(self.bounds))]
        self._indices = [counters.index(one) for one in self._names]
        self._sum = counters.index(f"{name} sum")

    def observe(self, seconds: float) -> None:
        """Count one time."""
        values = self._counters.values
        values[self._indices[bisect_left(self.bounds, seconds)]] += 1
        values[self._sum] += seconds

    def counts(self) -> list[float]:
        """How many times fell into each bucket."""
        return [self._counters.total(name) for name in self._names]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For Prometheus."""
        family = HistogramMetricFamily(f"encore_{self._name}", self._text)
        below, buckets = 0.0, []
        for bound, count in zip(self.bounds, self.counts(), strict=True):
            below += count
            buckets.append((floatToGoString(bound), below))
        family.add_metric([], buckets, self._counters.total(f"{self._name} sum"))
        yield family


class SharedCounter:
    """A counter with labels over all fronts. A set of label values appears with its first count, or with `show`."""

    def __init__(self, counters: SharedCounters, name: str, text: str, labels: Sequence[str]):
        self._counters, self._name, self._text, self._labels = counters, name, text, tuple(labels)
        self._indices: dict[tuple[str, ...], int] = {}

    def add_series(self, *values: str) -> None:
        """Begin a series at 0."""
        self._indices[values] = self._counters.index("\t".join((self._name, *values)))

    def add(self, *values: str) -> None:
        """Count one."""
        if values not in self._indices:
            self.add_series(*values)
        self._counters.values[self._indices[values]] += 1

    def totals(self) -> dict[tuple[str, ...], float]:
        """The count of each set of label values."""
        names = self._counters.names(f"{self._name}\t")
        return {tuple(name.split("\t")[1:]): self._counters.total(name) for name in names}

    def collect(self) -> Iterator[CounterMetricFamily]:
        """For Prometheus."""
        family = CounterMetricFamily(f"encore_{self._name}", self._text, labels=self._labels)
        for values, count in self.totals().items():
            family.add_metric(values, count)
        yield family

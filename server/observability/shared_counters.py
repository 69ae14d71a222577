"""Counters and histograms in shared memory: each API worker writes its own row, any of them reads the sums.

A row outlives its worker: the replacement continues to count in it. Gauges describe a live worker only and are reset
when it ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

ENTRIES = 1024  # names per row; most are responses by route and status
NAME_BYTES = 120
_STRIDE = 1 + NAME_BYTES // 8  # doubles per entry: the value, then the name
ROW_DOUBLES = 1 + ENTRIES * _STRIDE  # a row starts with its number of entries
GAUGE = "now "  # prefix of the names of gauges


class SharedCounters:
    """One API worker's row of numbers, and sums over all rows.

    Only one thread of one process writes a row; any process may read it. `memory` is a writable, zero-initialized
    buffer for a whole number of rows (ROW_DOUBLES doubles each); by default a private buffer of one row.
    """

    def __init__(self, memory: Any = None, row: int = 0):
        memory = bytearray(8 * ROW_DOUBLES) if memory is None else memory
        self._bytes = memoryview(memory).cast("B")
        self.values = self._bytes.cast("d")  # `values[index]` is a number; write only to your own row
        self._start = row * ROW_DOUBLES
        self._indices: list[dict[str, int]] = [{} for _ in range(len(self.values) // ROW_DOUBLES)]
        self._row = row
        self.reset_gauges()

    def index(self, name: str) -> int:
        """Return the index in `values` of this row's number `name`, which starts at 0.

        Raises ValueError if the row is full or the name longer than NAME_BYTES.
        """
        own = self._read(self._row)
        if name not in own:
            text = name.encode()
            if len(text) > NAME_BYTES or len(own) == ENTRIES:
                raise ValueError(f"no room for {name!r}: {len(own)} of {ENTRIES} names; each has {NAME_BYTES} bytes")
            index = self._start + 1 + len(own) * _STRIDE
            # Overwrite the whole field: a worker that was killed here may have left a longer name.
            self._bytes[8 * index + 8 : 8 * index + 8 + NAME_BYTES] = text.ljust(NAME_BYTES, b"\0")
            own[name] = index
            self.values[self._start] += 1  # last, so that readers see complete entries only
        return own[name]

    def gauge_index(self, name: str) -> int:
        """Return the index of this row's gauge `name`. Gauges are reset when the worker ends."""
        return self.index(GAUGE + name)

    def per_row(self, name: str) -> list[float]:
        """Return the number `name` of every row that has it."""
        rows = (self._read(row) for row in range(len(self._indices)))
        return [self.values[found[name]] for found in rows if name in found]

    def total(self, name: str) -> float:
        """Return the sum of `name` over all rows."""
        return sum(self.per_row(name))

    def gauge_per_row(self, name: str) -> list[float]:
        """Return the gauge `name` of every row that has it."""
        return self.per_row(GAUGE + name)

    def total_gauge(self, name: str) -> float:
        """Return the sum of the gauge `name` over all rows."""
        return self.total(GAUGE + name)

    def names(self, prefix: str) -> list[str]:
        """Return the sorted names of all rows that start with `prefix`."""
        rows = [self._read(row) for row in range(len(self._indices))]
        return sorted({name for found in rows for name in found if name.startswith(prefix)})

    @property
    def num_rows(self) -> int:
        """Number of rows, that is, of worker slots."""
        return len(self._indices)

    def row_gauge(self, row: int, name: str) -> float:
        """Return the gauge `name` of one row, 0 if it has none."""
        index = self._read(row).get(GAUGE + name)
        return 0.0 if index is None else self.values[index]

    def reset_gauges(self, row: int | None = None) -> None:
        """Set all gauges of a row to 0 (default: this row). Called when its worker starts and ends."""
        for name, index in self._read(self._row if row is None else row).items():
            if name.startswith(GAUGE):
                self.values[index] = 0.0

    def _read(self, row: int) -> dict[str, int]:
        """Return name -> index of a row. Entries are only added, never removed."""
        found, start = self._indices[row], row * ROW_DOUBLES
        while len(found) < int(self.values[start]):
            index = start + 1 + len(found) * _STRIDE
            name = bytes(self._bytes[8 * index + 8 : 8 * (index + _STRIDE)]).rstrip(b"\0").decode()
            found[name] = index
        return found


class SharedHistogram:
    """A histogram of seconds or counts, summed over all API workers.

    `bounds` are the buckets' upper bounds, infinity last.
    """

    def __init__(self, counters: SharedCounters, name: str, text: str, bounds: Sequence[float]):
        self._counters, self._name, self._text = counters, name, text
        self.bounds = (*bounds, float("inf"))
        self._names = [f"{name} {number}" for number in range(len(self.bounds))]
        self._indices = [counters.index(one) for one in self._names]
        self._sum = counters.index(f"{name} sum")

    def observe(self, value: float) -> None:
        """Count one value."""
        values = self._counters.values
        values[self._indices[bisect_left(self.bounds, value)]] += 1
        values[self._sum] += value

    def counts(self) -> list[float]:
        """Return the number of observations in each bucket (not cumulative)."""
        return [self._counters.total(name) for name in self._names]

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric family."""
        family = HistogramMetricFamily(f"encore_{self._name}", self._text)
        below, buckets = 0.0, []
        for bound, count in zip(self.bounds, self.counts(), strict=True):
            below += count
            buckets.append((floatToGoString(bound), below))
        family.add_metric([], buckets, self._counters.total(f"{self._name} sum"))
        yield family


class SharedCounter:
    """A labelled counter, summed over all API workers. A series exists after its first count or `add_series`."""

    def __init__(self, counters: SharedCounters, name: str, text: str, labels: Sequence[str]):
        self._counters, self._name, self._text, self._labels = counters, name, text, tuple(labels)
        self._indices: dict[tuple[str, ...], int] = {}

    def add_series(self, *values: str) -> None:
        """Create the series of these label values at 0."""
        self._indices[values] = self._counters.index("\t".join((self._name, *values)))

    def add(self, *values: str) -> None:
        """Increment the series of these label values by one."""
        if values not in self._indices:
            self.add_series(*values)
        self._counters.values[self._indices[values]] += 1

    def totals(self) -> dict[tuple[str, ...], float]:
        """Return label values -> count."""
        names = self._counters.names(f"{self._name}\t")
        return {tuple(name.split("\t")[1:]): self._counters.total(name) for name in names}

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the metric family."""
        family = CounterMetricFamily(f"encore_{self._name}", self._text, labels=self._labels)
        for values, count in self.totals().items():
            family.add_metric(values, count)
        yield family

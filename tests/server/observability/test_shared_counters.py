"""Sums over the rows of several API workers: when a worker ends, its counters remain and its gauges are reset."""

from __future__ import annotations

import multiprocessing

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from server.observability.shared_counters import (
    ENTRIES,
    NAME_BYTES,
    ROW_DOUBLES,
    SharedCounter,
    SharedCounters,
    SharedHistogram,
)


def shared(rows: int):
    return multiprocessing.get_context("spawn").RawArray("d", rows * ROW_DOUBLES)


def count_in_a_process(memory, row: int, times: int) -> None:
    counts = SharedCounter(SharedCounters(memory, row), "answers", "", ["route", "status"])
    for _ in range(times):
        counts.add("/health", "200")
        counts.add(f"/only/{row}", "404")


def test_every_row_reads_the_sum_over_all_rows():
    memory = shared(3)
    one, two = SharedCounters(memory, 0), SharedCounters(memory, 2)
    one.values[one.index("a")] = 1.5
    two.values[two.index("b")] = 7.0
    two.values[two.index("a")] = 2.0
    assert one.total("a") == two.total("a") == 3.5 and one.per_row("b") == [7.0] and one.total("none") == 0
    assert one.names("") == ["a", "b"] and one.num_rows == 3


def test_processes_count_side_by_side():
    memory = shared(3)
    workers = [multiprocessing.get_context("spawn").Process(target=count_in_a_process, args=(memory, row, 2000))
               for row in range(3)]  # fmt: skip
    for worker in workers:
        worker.start()
    seen = SharedCounter(SharedCounters(memory, 0), "answers", "", ["route", "status"])
    while any(worker.is_alive() for worker in workers):
        assert sum(seen.totals().values()) <= 12000
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert seen.totals() == {("/health", "200"): 6000, **{(f"/only/{row}", "404"): 2000 for row in range(3)}}


def test_a_replacement_keeps_counters_and_resets_gauges():
    memory = shared(2)
    first = SharedCounters(memory, 1)
    first.values[first.index("count")] = 5
    first.values[first.gauge_index("open")] = 3
    second = SharedCounters(memory, 1)
    second.values[second.index("count")] += 1
    watcher = SharedCounters(memory, 0)
    assert watcher.total("count") == 6 and watcher.total_gauge("open") == 0
    second.values[second.gauge_index("open")] = 2
    assert watcher.row_gauge(1, "open") == 2 and watcher.row_gauge(0, "open") == 0
    watcher.reset_gauges(1)
    assert second.gauge_per_row("open") == [0] and second.total("count") == 6


def test_a_full_row_and_a_name_that_is_too_long_are_refused():
    counters = SharedCounters()
    counters.index("n" * NAME_BYTES)
    with pytest.raises(ValueError, match="no room"):
        counters.index("n" * (NAME_BYTES + 1))
    for number in range(ENTRIES - 1):
        counters.index(str(number))
    with pytest.raises(ValueError, match=f"{ENTRIES} of {ENTRIES} names"):
        counters.index("one more")
    assert counters.index("7") == counters.index("7")


def test_a_half_written_name_does_not_corrupt_the_next_one():
    memory = shared(1)
    SharedCounters(memory).index("first")
    memory_bytes = memoryview(memory).cast("B")
    written = bytes(memory_bytes).index(b"first")
    row = 8 * (1 + NAME_BYTES // 8)
    # As left by a worker that was killed before it counted the entry.
    memory_bytes[written + row : written + row + 9] = b"abandoned"
    SharedCounters(memory).index("next")
    assert SharedCounters(memory).names("") == ["first", "next"]


def test_histograms_and_counters_are_exported_to_prometheus():
    memory, registry = shared(2), CollectorRegistry()
    times = [SharedHistogram(SharedCounters(memory, row), "wait_seconds", "Waiting.", (0.1, 1.0)) for row in range(2)]
    counts = SharedCounter(SharedCounters(memory, 0), "ends", "Ends.", ["reason"])
    registry.register(times[0])
    registry.register(counts)
    counts.add_series("stop")
    for seconds, which in ((0.05, 0), (0.1, 1), (0.5, 1), (30.0, 0)):
        times[which].observe(seconds)
    assert times[1].counts() == [2, 1, 1]
    families = {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}
    samples = {(one.name, one.labels.get("le")): one.value for one in families["encore_wait_seconds"].samples}
    assert samples[("encore_wait_seconds_bucket", "0.1")] == 2 and samples[("encore_wait_seconds_bucket", "+Inf")] == 4
    assert samples[("encore_wait_seconds_sum", None)] == pytest.approx(30.65)
    assert samples[("encore_wait_seconds_count", None)] == 4
    assert [(one.labels, one.value) for one in families["encore_ends"].samples] == [({"reason": "stop"}, 0)]

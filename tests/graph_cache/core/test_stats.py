"""CacheStats: labels of the counters, and snapshots as copies."""

from __future__ import annotations

import torch

from graph_cache import BATCH, BufferSpec, GraphCache
from graph_cache.core.stats import CAPTURE_SECONDS_BOUNDS, EXACT_ROWS, CacheStats


def test_a_batch_counts_its_rows_and_its_padding_apart():
    stats = CacheStats()
    stats.observe_batch("decode", "decode", 3, 1)
    stats.observe_batch("decode", "decode", 3, 5)
    assert stats.real_tokens == {"decode": 6} and stats.padded_tokens == {"decode": 6}
    assert stats.batch_rows == {("decode", "decode", 3): 2}


def test_large_batches_are_counted_by_their_bucket_so_that_labels_stay_few():
    stats = CacheStats()
    for rows in range(1, 8193):
        stats.observe_batch("prefill", "prefill", rows, -rows % 1024)
    assert len(stats.batch_rows) == EXACT_ROWS + 8 and stats.batch_rows["prefill", "prefill", 8192] == 1024
    assert stats.real_tokens == {"prefill": sum(range(1, 8193))}


def test_capture_times_fall_into_the_first_bound_that_holds_them():
    stats = CacheStats()
    for seconds in (0.0, CAPTURE_SECONDS_BOUNDS[0], 0.011, 1000.0):
        stats.observe_capture(seconds)
    assert stats.capture_seconds_counts[:2] == [2, 1]
    assert stats.capture_seconds_counts[-1] == 1
    assert sum(stats.capture_seconds_counts) == 4
    assert stats.capture_seconds_sum == sum((0.0, CAPTURE_SECONDS_BOUNDS[0], 0.011, 1000.0))


def test_a_snapshot_is_a_plain_copy():
    stats = CacheStats()
    stats.replays["net", "block", "decode", 4] += 2
    stats.invalidations["reload"] += 1
    stats.observe_capture(0.02)
    taken = stats.snapshot()
    stats.replays["net", "block", "decode", 4] += 1
    stats.observe_capture(0.02)
    assert taken["replays"] == [(("net", "block", "decode", 4), 2)]
    assert taken["invalidations"] == [(("reload",), 1)]
    assert taken["capture_seconds"]["sum"] == 0.02 and sum(taken["capture_seconds"]["counts"]) == 1
    assert set(taken) == {
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
        "capture_seconds",
    }


def test_printed_statistics_show_figures():
    cache = GraphCache(device="cpu")
    run = cache.graphed(
        "net", lambda x: x * 2, {"x": BufferSpec((BATCH, 4), torch.float32)}, independent_rows=True, buckets=(2, 4)
    )
    assert str(cache.stats).split() == ["replays", "0", "eager", "0", "captures", "0"]
    cache.warm()
    run(torch.ones(3, 4))
    run(torch.ones(5, 4))
    printed = str(cache.stats)
    assert printed == repr(cache.stats)
    lines = dict(line.split(maxsplit=1) for line in printed.splitlines())
    assert lines["replays"].split(maxsplit=1) == ["1", "net decode bucket 4: 1"]
    assert lines["eager"].split(maxsplit=1) == ["1", "net decode above_largest_bucket: 1"]
    assert lines["captures"].split(maxsplit=1) == ["2", "net warmup: 2"]
    assert lines["padding"] == "11.1% of 9 computed rows"
    cache.invalidate("weights moved")
    assert "invalidations    2        weights moved: 2" in str(cache.stats)
    assert repr(cache) == "<GraphCache on cpu; sites: net; graphs captured: 0>"


def test_printed_statistics_stay_short():
    stats = CacheStats()
    for bucket in range(1, 101):
        stats.replays["net", "block", "decode", bucket] = bucket
    stats.capture_failed("net", "block", "no memory")
    replays, *_ = str(stats).splitlines()
    assert "5050" in replays and "bucket 100: 100" in replays and replays.endswith("94 more") and len(replays) < 200
    assert "failed captures  1        net: 1" in str(stats)

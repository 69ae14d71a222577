"""Keep counters monotonic across engine restarts: add the totals of ended processes to the running one's.

Gauges always come from the running process.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from engine.protocol.messages import EngineStats

COUNTS = (
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens", "steps",
    "idle_check_failures", "draft_tokens", "accepted_tokens", "drafts",
    "tier_failed_reads", "tier_dropped",
)  # fmt: skip
GRAPH_COUNTS = (
    "replays", "fallbacks", "captures", "failed_captures", "invalidations", "real_tokens", "padded_tokens",
    "batch_rows", "shadow_checks", "shadow_mismatches",
)  # fmt: skip


def totals_after_exit(ended: EngineStats, reason: str) -> EngineStats:
    """Return the stats to keep of an ended process: its counters, `reason` as the last error, and gauges at zero."""
    counts = {name: getattr(ended, name) for name in COUNTS}
    graphs = {name: ended.graphs[name] for name in (*GRAPH_COUNTS, "capture_seconds") if name in ended.graphs}
    return EngineStats(
        **counts,
        ended=dict(ended.ended),
        accepted_by_position=dict(ended.accepted_by_position),
        tier_hits=dict(ended.tier_hits),
        histograms=ended.histograms,
        graphs=graphs,
        weight_version=ended.weight_version,
        last_error=reason,
    )


def add_totals(before: EngineStats, now: EngineStats) -> EngineStats:
    """Return the running process' snapshot `now` with the counters of earlier processes, `before`, added."""
    counts = {name: getattr(before, name) + getattr(now, name) for name in COUNTS}
    graphs = dict(now.graphs)
    for name in GRAPH_COUNTS:
        if name in before.graphs or name in now.graphs:
            graphs[name] = _sum(before.graphs.get(name, ()), now.graphs.get(name, ()))
    graphs |= _sum_all({"capture_seconds": stats.graphs.get("capture_seconds")} for stats in (before, now))
    return dataclasses.replace(
        now,
        **counts,
        ended=dict(Counter(before.ended) + Counter(now.ended)),
        accepted_by_position=dict(Counter(before.accepted_by_position) + Counter(now.accepted_by_position)),
        tier_hits=dict(Counter(before.tier_hits) + Counter(now.tier_hits)),
        histograms=_sum_all((before.histograms, now.histograms)),
        graphs=graphs,
        last_error=now.last_error or before.last_error,
    )


def _sum(*lists: Iterable[tuple[tuple, int]]) -> list[tuple[tuple, int]]:
    total: Counter[tuple] = Counter()
    for pairs in lists:
        for labels, count in pairs:
            total[tuple(labels)] += count
    return list(total.items())


def _sum_all(of_processes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sum of each histogram; one that a process doesn't have, or has as None, counts nothing there."""
    total: dict[str, Any] = {}
    for histograms in of_processes:
        for name, found in histograms.items():
            if found is not None:
                total[name] = _sum_histograms(total[name], found) if name in total else found
    return total


def _sum_histograms(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    counts = [a + b for a, b in zip(before["counts"], now["counts"], strict=True)]
    return {"bounds": now["bounds"], "counts": counts, "sum": before["sum"] + now["sum"]}

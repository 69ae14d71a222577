"""Data of the status page: the server's current state and the last five minutes, one point per second.

A background task records the history. Counters are turned into rates, shares and quantiles here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError
from server.serving.service import Service
from server.version import version

if TYPE_CHECKING:
    from engine.protocol.messages import EngineStats
    from server.observability.shared_counters import SharedHistogram

log = logging.getLogger("encore.server")

STEP_SECONDS = 1.0
HISTORY_STEPS = 300
SMOOTH_STEPS = 3  # rates and quantiles span this many steps: a single second has few requests
TABLE_MAX_AGE_SECONDS = 1.0  # the graph table is fetched at most this often, for all open pages together
TABLE_TIMEOUT_SECONDS = 0.5  # a long engine step must not block the page: it then shows the previous table
SERIES = ("output", "prompt", "running", "waiting", "kv", "first_p50", "first_p95", "next_p50", "next_p95")
MAX_ERROR_CHARS = 300


@dataclass(frozen=True)
class _Reading:
    at: float
    output: int
    prompt: int
    first: list[float]
    next: list[float]


class History:
    """The last HISTORY_STEPS seconds of each series. A second without observations is None."""

    def __init__(self) -> None:
        self._past: deque[_Reading] = deque(maxlen=SMOOTH_STEPS + 1)
        self._points: deque[tuple[float | None, ...]] = deque(maxlen=HISTORY_STEPS)

    def record(self, at: float, stats: EngineStats, first: SharedHistogram, following: SharedHistogram) -> None:
        """Add a point at time `at` (time.monotonic).

        `first` and `following` are the histograms of the time to first token and the time between tokens.
        """
        now = _Reading(at, stats.generation_tokens, stats.prompt_tokens, first.counts(), following.counts())
        self._past.append(now)
        then = self._past[0]
        passed = now.at - then.at
        if passed <= 0:
            return
        times = [
            quantile(one.bounds, [b - a for a, b in zip(before, after, strict=True)], share)
            for one, before, after in ((first, then.first, now.first), (following, then.next, now.next))
            for share in (0.5, 0.95)
        ]
        self._points.append((
            (now.output - then.output) / passed, (now.prompt - then.prompt) / passed,
            stats.num_running, stats.num_waiting, stats.kv_cache_usage, *times,
        ))  # fmt: skip

    def columns(self) -> dict[str, list[float | None]]:
        """Return series name -> values, oldest first, rounded to 4 significant digits."""
        return {
            name: [None if (value := point[index]) is None else _round(value) for point in self._points]
            for index, name in enumerate(SERIES)
        }


class StatusBoard:
    """The status of one service. Call `begin` and `close` in the application's lifespan."""

    def __init__(self, service: Service):
        self._service, self._history = service, History()
        self._rows: list[dict[str, Any]] = []
        self._rows_time = 0.0
        self._table_task: asyncio.Task[list[dict[str, Any]]] | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start recording the history."""
        self._task = asyncio.create_task(self._record())

    async def close(self) -> None:
        """Stop recording."""
        tasks = [task for task in (self._task, self._table_task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _record(self) -> None:
        metrics = self._service.metrics
        while True:
            if self._service.started:
                stats = self._service.client.stats()
                self._history.record(time.monotonic(), stats, metrics.first_token, metrics.inter_token)
            await asyncio.sleep(STEP_SECONDS)

    async def snapshot(self) -> dict[str, Any]:
        """Return the values of the status page as JSON-compatible types."""
        service = self._service
        body: dict[str, Any] = {
            "version": version(),
            "uptime": max(0, round(time.time() - service.start_time)),
            "state": self._state(),
            "reasons": service.reasons_not_ready(),
            "warm": dict(service.client.health().warm),
            "model": None,
            "queue": {"in_flight": service.admission.all_in_flight, "limit": service.config.max_waiting},
            "history": {"step": STEP_SECONDS, **self._history.columns()},
        }
        if not service.started:
            return body
        info, stats, health = service.client.info(), service.client.stats(), service.client.health()
        body["model"] = {
            "name": service.model_names()[0], "architecture": info.architecture, "device": info.device,
            "dtype": info.dtype, "weight_format": info.weight_format, "max_model_len": info.max_model_len,
            "weight_version": stats.weight_version or info.weight_version,
        }  # fmt: skip
        ended = {reason: count for (reason,), count in service.metrics.ended.totals().items()}  # as seen by clients
        body["queue"] |= {"running": stats.num_running, "waiting": stats.num_waiting, "seats": info.max_num_seqs}
        body["engine"] = {
            "restarts": health.restarts, "silent": round(health.silent, 1),
            "last_error": stats.last_error[:MAX_ERROR_CHARS], "kv": stats.kv_cache_usage,
            "prefix_hits": share(stats.prefix_cache_hits, stats.prefix_cache_queries),
            "preemptions": stats.num_preemptions, "prompt_tokens": stats.prompt_tokens,
            "output_tokens": stats.generation_tokens, "ended": ended,
        }  # fmt: skip
        body["graphs"] = graph_summary(stats.graphs, info.graph_buckets, await self._table())
        return body

    def _state(self) -> str:
        service = self._service
        if not service.reasons_not_ready():
            return "ready"
        if service.draining:
            return "draining"
        if service.startup_error is not None or (service.started and not service.client.health().alive):
            return "dead"
        return "recovering" if service.started else "loading"

    async def _table(self) -> list[dict[str, Any]]:
        """Return the graph table, fetched at most once per TABLE_MAX_AGE_SECONDS, or the previous one on timeout."""
        if self._table_task is None and time.monotonic() - self._rows_time >= TABLE_MAX_AGE_SECONDS:
            self._table_task = asyncio.create_task(self._service.client.graphs())
        if self._table_task is not None:
            await asyncio.wait({self._table_task}, timeout=TABLE_TIMEOUT_SECONDS)
        if self._table_task is not None and self._table_task.done():
            task, self._table_task, self._rows_time = self._table_task, None, time.monotonic()
            try:
                self._rows = task.result()
            except EngineError as error:  # the page shows it anyway, from the client's health
                log.debug("no graph table: %s", error)
                self._rows = []
        return self._rows


def graph_summary(graphs: Mapping[str, Any], sizes: Sequence[int], rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarize decode steps by bucket: steps, replays and padding, and the reasons for eager steps.

    `graphs` is the graph cache's snapshot, `sizes` its buckets, `rows` its graph table. A step counts for the smallest
    bucket that holds its rows. `padding` is the share of rows without a token; eager steps have none.
    """
    rows = [row for row in rows if row["phase"] == "decode"]  # prefill buckets may have the same sizes
    steps: Counter[int] = Counter()
    real: Counter[int] = Counter()
    oversized = 0
    for (_, phase, count), times in graphs.get("batch_rows", ()):
        if phase != "decode":
            continue
        index = bisect_left(sizes, int(count))
        if index == len(sizes):
            oversized += times
            continue
        steps[sizes[index]] += times
        real[sizes[index]] += int(count) * times
    per_step = max(
        (int(row.get("graphs") or 1) for row in rows), default=1
    )  # several replays per step with layer scope
    replayed: Counter[int] = Counter()
    for (_, _, phase, bucket), times in graphs.get("replays", ()):
        if phase == "decode":
            replayed[int(bucket)] += times
    buckets = []
    for size in sizes:
        bucket_rows = [row for row in rows if row["bucket"] == size]
        hits = min(steps[size], replayed[size] // per_step)
        buckets.append({
            "bucket": size, "steps": steps[size], "hits": hits,
            "padding": share(steps[size] * size - real[size], steps[size] * size) if hits else None,
            "captured": sum(row["state"] == "captured" for row in bucket_rows), "wanted": len(bucket_rows),
            "failed": next((str(row["failure"])[:MAX_ERROR_CHARS] for row in bucket_rows if row.get("failure")), None),
            "bytes": max((row["bytes"] for row in bucket_rows), default=0),  # graphs share one pool, so no sum
        })  # fmt: skip
    all_steps = sum(steps.values())
    padded, computed = (sum(times for (phase,), times in graphs.get(name, ()) if phase == "decode")
                        for name in ("padded_tokens", "real_tokens"))  # fmt: skip
    eager: Counter[str] = Counter()
    for (_, phase, reason), times in graphs.get("fallbacks", ()):
        if phase == "decode":
            eager[str(reason)] += times
    return {
        "buckets": buckets,
        "hit_rate": share(sum(one["hits"] for one in buckets), all_steps + oversized),
        "padding": share(padded, padded + computed),
        "pool_bytes": graphs.get("pool_bytes", 0),
        "eager": dict(eager.most_common()),
    }


def share(part: float, whole: float) -> float | None:
    """Return part / whole, or None if `whole` is 0."""
    return part / whole if whole else None


def quantile(bounds: Sequence[float], counts: Sequence[float], wanted: float) -> float | None:
    """Return the quantile `wanted` (0 to 1) of a histogram, interpolated within its bucket; None if it is empty.

    `bounds` are the buckets' upper bounds, the last one infinite; `counts` the observations in each.
    """
    rank = wanted * sum(counts)
    if rank <= 0:
        return None
    below = 0.0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            low = bounds[index - 1] if index else 0.0
            high = bounds[index] if index < len(bounds) - 1 else low  # the last bucket is unbounded
            return low + (high - low) * (rank - below) / count
        below += count
    return bounds[-2]


def _round(value: float) -> float:
    return float(f"{value:.4g}")

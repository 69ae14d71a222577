"""What the status page shows: the server's state now, and its last minutes, second by second.

Owns the history, which one task writes while the server runs, and the reading of counters as rates, shares and
quantiles. Knows no HTML.
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
KEPT_STEPS = 300
SMOOTH_STEPS = 3  # rates and quantiles are over this many steps: one second holds few requests
ROWS_SECONDS = 1.0  # how old the graph table may be, however many pages look at it
ROWS_TIMEOUT = 0.5  # a long step must not hold the page up: it shows the table that it has
SERIES = ("output", "prompt", "running", "waiting", "kv", "first_p50", "first_p95", "next_p50", "next_p95")
SHOWN_ERROR = 300  # characters


@dataclass(frozen=True)
class _Reading:
    at: float
    output: int
    prompt: int
    first: list[float]
    next: list[float]


class History:
    """The last KEPT_STEPS seconds of each series; a second in which nothing could be measured holds None."""

    def __init__(self) -> None:
        self._past: deque[_Reading] = deque(maxlen=SMOOTH_STEPS + 1)
        self._points: deque[tuple[float | None, ...]] = deque(maxlen=KEPT_STEPS)

    def record(self, at: float, stats: EngineStats, first: SharedHistogram, following: SharedHistogram) -> None:
        """Add the second that ends `at` (time.monotonic). The times are those to the first and between tokens."""
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
        """Each series, oldest second first, rounded to what a chart can show."""
        return {
            name: [None if (value := point[place]) is None else _round(value) for point in self._points]
            for place, name in enumerate(SERIES)
        }


class StatusBoard:
    """The state and the history of one service. `begin` and `close` belong to the server's lifespan."""

    def __init__(self, service: Service):
        self._service, self._history = service, History()
        self._rows: list[dict[str, Any]] = []
        self._rows_at = 0.0
        self._asking: asyncio.Task[list[dict[str, Any]]] | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start to record."""
        self._task = asyncio.create_task(self._record())

    async def close(self) -> None:
        """Stop recording."""
        tasks = [task for task in (self._task, self._asking) if task is not None]
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

    async def show(self) -> dict[str, Any]:
        """All that the page shows, as plain values."""
        service = self._service
        body: dict[str, Any] = {
            "version": version(),
            "uptime": max(0, round(time.time() - service.began)),
            "state": self._state(),
            "reasons": service.reasons_not_ready(),
            "model": None,
            "queue": {"in_flight": service.all_in_flight, "limit": service.config.max_waiting},
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
        ended = {reason: count for (reason,), count in service.metrics.ended.totals().items()}  # as clients saw it
        body["queue"] |= {"running": stats.num_running, "waiting": stats.num_waiting, "seats": info.max_num_seqs}
        body["engine"] = {
            "restarts": health.restarts, "silent": round(health.silent, 1), "warm": health.warm,
            "last_error": stats.last_error[:SHOWN_ERROR], "kv": stats.kv_cache_usage,
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
        """The graph table, asked for once a second at most however many look, or the last one that came."""
        if self._asking is None and time.monotonic() - self._rows_at >= ROWS_SECONDS:
            self._asking = asyncio.create_task(self._service.client.graphs())
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=ROWS_TIMEOUT)
        if self._asking is not None and self._asking.done():
            asked, self._asking, self._rows_at = self._asking, None, time.monotonic()
            try:
                self._rows = asked.result()
            except EngineError as gone:  # the page's banner says so, from the client's health
                log.debug("no graph table: %s", gone)
                self._rows = []
        return self._rows


def graph_summary(graphs: Mapping[str, Any], sizes: Sequence[int], rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Decode steps by bucket: how many there were, replayed what share, padded how much; and why others ran eager.

    `graphs` is the cache's snapshot of counts, `sizes` its buckets, `rows` its table of graphs. A step falls into the
    smallest bucket that holds its rows; the bucket's padding is its rows that carried no token. Eager steps have none.
    """
    rows = [row for row in rows if row["phase"] == "decode"]  # prefill graphs have buckets of the same sizes
    steps: Counter[int] = Counter()
    real: Counter[int] = Counter()
    beyond = 0
    for (_, phase, count), times in graphs.get("batch_rows", ()):
        if phase != "decode":
            continue
        place = bisect_left(sizes, int(count))
        if place == len(sizes):
            beyond += times
            continue
        steps[sizes[place]] += times
        real[sizes[place]] += int(count) * times
    per_step = max((int(row.get("graphs") or 1) for row in rows), default=1)  # a layer scope replays several a step
    replayed: Counter[int] = Counter()
    for (_, _, phase, bucket), times in graphs.get("replays", ()):
        if phase == "decode":
            replayed[int(bucket)] += times
    found = []
    for size in sizes:
        own = [row for row in rows if row["bucket"] == size]
        hits = min(steps[size], replayed[size] // per_step)
        found.append({
            "bucket": size, "steps": steps[size], "hits": hits,
            "padding": share(steps[size] * size - real[size], steps[size] * size) if hits else None,
            "captured": sum(row["state"] == "captured" for row in own), "wanted": len(own),
            "failed": next((str(row["failure"])[:SHOWN_ERROR] for row in own if row.get("failure")), None),
            "bytes": max((row["bytes"] for row in own), default=0),  # graphs of one pool: no sum of them means anything
        })  # fmt: skip
    all_steps = sum(steps.values())
    padded, computed = (sum(times for (phase,), times in graphs.get(name, ()) if phase == "decode")
                        for name in ("padded_tokens", "real_tokens"))  # fmt: skip
    eager: Counter[str] = Counter()
    for (_, phase, reason), times in graphs.get("fallbacks", ()):
        if phase == "decode":
            eager[str(reason)] += times
    return {
        "buckets": found,
        "hit_rate": share(sum(one["hits"] for one in found), all_steps + beyond),
        "padding": share(padded, padded + computed),
        "pool_bytes": graphs.get("pool_bytes", 0),
        "eager": dict(eager.most_common()),
    }


def share(part: float, whole: float) -> float | None:
    """part / whole, None of nothing."""
    return part / whole if whole else None


def quantile(bounds: Sequence[float], counts: Sequence[float], wanted: float) -> float | None:
    """The value that a share `wanted` of the observations lies below, on a line through its bucket; None of nothing.

    `bounds` are the buckets' upper ends, the last one infinite; `counts` how many fell into each.
    """
    rank = wanted * sum(counts)
    if rank <= 0:
        return None
    below = 0.0
    for place, count in enumerate(counts):
        if count and below + count >= rank:
            low = bounds[place - 1] if place else 0.0
            high = bounds[place] if place < len(bounds) - 1 else low  # the last bucket has no end: its beginning
            return low + (high - low) * (rank - below) / count
        below += count
    return bounds[-2]


def _round(value: float) -> float:
    return float(f"{value:.4g}")

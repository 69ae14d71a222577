"""Prometheus metrics: engine counts, read at each scrape, and request latencies measured by the HTTP side.

Names follow vLLM's metrics with the prefix `encore_`; the graph cache's metrics have no counterpart in vLLM. The caller
owns the registry, so two servers in one process don't share counters. HTTP counters live in shared counters, which sum
over the API workers.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.protocol.sleep import MEMORY_PARTS
from server.observability.shared_counters import SharedCounter, SharedCounters, SharedHistogram

if TYPE_CHECKING:
    from engine.client.async_client import Client
    from engine.protocol.outputs import OutputDelta

QUEUE_FULL = "max_num_queued_reqs"  # vLLM's name of the reason
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
N_BUCKETS = (1, 2, 5, 10, 20)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class _Job(Protocol):
    started: float
    params: Any
    max_tokens: int

    @property
    def prompt_tokens(self) -> int: ...


class _Traces(Protocol):
    """What makes spans: returns what to call when a job has ended."""

    def watch(self, job: Any) -> Callable[[RequestWatch], None]: ...


class RequestMetrics:
    """Request latencies as clients see them, and finish reasons, summed over all API workers.

    `tracing` makes spans of the requests too; None: there are no traces.
    """

    def __init__(self, counters: SharedCounters, tracing: _Traces | None = None):
        self.tracing = tracing

        def histogram(name: str, text: str, bounds: Sequence[float]) -> SharedHistogram:
            return SharedHistogram(counters, name, text, bounds)

        self.first_token = histogram(
            "time_to_first_token_seconds",
            "Time from a request's arrival to its first token in seconds.",
            FIRST_TOKEN_BUCKETS,
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds",
            "Time between two outputs of a sequence, per token, in seconds.",
            TOKEN_BUCKETS,
        )
        self.per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token of a finished sequence in seconds.",
            TOKEN_BUCKETS,
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds",
            "Time from a request's arrival to the end of a sequence in seconds.",
            REQUEST_BUCKETS,
        )
        self.queued = histogram(
            "request_queue_time_seconds",
            "Time from a request's arrival at the engine to its first step in seconds.",
            REQUEST_BUCKETS,
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds",
            "Time from a sequence's first step to its first token in seconds.",
            REQUEST_BUCKETS,
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "Time from a sequence's first token to its last in seconds.", REQUEST_BUCKETS
        )
        self.inference_time = histogram(
            "request_inference_time_seconds",
            "Time from a sequence's first step to its last token in seconds.",
            REQUEST_BUCKETS,
        )
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", COUNT_BUCKETS)
        self.generation_tokens = histogram(
            "request_generation_tokens", "Generated tokens of a finished sequence.", COUNT_BUCKETS
        )
        self.computed_prompt_tokens = histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a finished sequence that were computed, not found in the prefix cache.",
            COUNT_BUCKETS,
        )
        self.n = histogram("request_params_n", "The parameter n of a request.", N_BUCKETS)
        self.max_tokens = histogram(
            "request_params_max_tokens",
            "Maximum number of tokens of a finished sequence; without max_tokens, what the context holds.",
            COUNT_BUCKETS,
        )
        self.most_tokens = histogram(
            "request_max_num_generation_tokens", "Generated tokens of a request's longest sequence.", COUNT_BUCKETS
        )
        self.refused = SharedCounter(
            counters, "admission_rejections", "Requests refused because the queue is full.", ["reason"]
        )
        self.refused.add_series(QUEUE_FULL)
        self.ended = SharedCounter(
            counters, "request_success", "Finished sequences, by finish reason.", ["finished_reason"]
        )
        for reason in ("stop", "length", "abort", "error"):  # start at 0, so that rates exist before the first event
            self.ended.add_series(reason)

    def watch(self, job: _Job) -> RequestWatch:
        """Return a RequestWatch for one job."""
        self.prompt_tokens.observe(job.prompt_tokens)
        return RequestWatch(self, job, None if self.tracing is None else self.tracing.watch(job))

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        for one in (
            self.first_token,
            self.inter_token,
            self.per_output_token,
            self.e2e_latency,
            self.queued,
            self.prefill_time,
            self.decode_time,
            self.inference_time,
            self.prompt_tokens,
            self.generation_tokens,
            self.computed_prompt_tokens,
            self.n,
            self.max_tokens,
            self.most_tokens,
            self.refused,
            self.ended,
        ):
            yield from one.collect()


class SequenceTimes(NamedTuple):
    """When a sequence was scheduled, after seconds in the queue, and its first and last token by time.perf_counter."""

    number: int
    queue_seconds: float
    first: float | None
    last: float | None
    num_tokens: int


class RequestWatch:
    """Measure the latencies of one job's sequences.

    Call `observe_deltas` as deltas arrive, then `close`, whether the job finished, failed or was aborted. `on_close`
    is called then, once.
    """

    def __init__(
        self, metrics: RequestMetrics, job: _Job, on_close: Callable[[RequestWatch], None] | None = None
    ):  # fmt: skip
        self._metrics, self.started, self._on_close = metrics, job.started, on_close
        self._prompt_tokens, self._max_tokens, self._n = job.prompt_tokens, job.max_tokens, job.params.n
        self._cached: dict[int, int] = {}
        self._closed = False
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._queued: dict[int, float] = {}
        self._unfinished = set(range(self._n))
        self.queue_seconds: float | None = None
        self.first_token_seconds: float | None = None
        self.buckets: collections.Counter[int | None] = collections.Counter()  # tokens by graph bucket, None if eager

    def observe_deltas(self, deltas: Sequence[OutputDelta]) -> None:
        """Record deltas that arrived together, now."""
        now = time.perf_counter()
        counts: dict[int, int] = {}
        for delta in deltas:
            if delta.queue_time is not None:
                self._metrics.queued.observe(delta.queue_time)
                self._queued[delta.index] = delta.queue_time
                self._cached[delta.index] = delta.cached_tokens
                self.queue_seconds = max(self.queue_seconds or 0.0, delta.queue_time)
            count = len(delta.token_ids)
            if count:
                self.buckets[delta.graph_bucket] += count
                counts[delta.index] = counts.get(delta.index, 0) + count
        for index, count in counts.items():
            self._observe_tokens(index, count, now)
        for delta in deltas:
            if delta.finish_reason is not None and delta.index in self._unfinished:
                self._observe_finish(delta.index, delta.finish_reason, now)

    def _observe_tokens(self, index: int, count: int, now: float) -> None:
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self.started
        if index in self._last:
            self._metrics.inter_token.observe((now - self._last[index]) / count)
        else:
            self._first[index] = now
            self._metrics.first_token.observe(now - self.started)
        self._last[index] = now
        self._tokens[index] = self._tokens.get(index, 0) + count

    def _observe_finish(self, index: int, reason: str, now: float) -> None:
        self._unfinished.discard(index)
        self._metrics.ended.add(reason)
        self._metrics.e2e_latency.observe(now - self.started)
        tokens = self._tokens.get(index, 0)
        self._metrics.generation_tokens.observe(tokens)
        self._metrics.max_tokens.observe(self._max_tokens)
        self._metrics.computed_prompt_tokens.observe(self._prompt_tokens - self._cached.get(index, 0))
        if tokens:
            prefill = self._first[index] - self.started - self._queued.get(index, 0.0)
            decode = self._last[index] - self._first[index]
            self._metrics.prefill_time.observe(prefill)
            self._metrics.decode_time.observe(decode)
            self._metrics.inference_time.observe(prefill + decode)
        if tokens > 1:
            self._metrics.per_output_token.observe((now - self._first[index]) / (tokens - 1))

    def close(self, failed: bool = False) -> None:
        """Count sequences that have not finished as aborted, or as failed. Later calls do nothing."""
        for _ in self._unfinished:
            self._metrics.ended.add("error" if failed else "abort")
        self._unfinished.clear()
        if not self._closed:
            self._closed = True
            self._metrics.n.observe(self._n)
            self._metrics.most_tokens.observe(max(self._tokens.values(), default=0))
            if self._on_close is not None:
                self._on_close(self)

    def sequences(self) -> list[SequenceTimes]:
        """Return the times of the sequences that were scheduled."""
        return [
            SequenceTimes(
                index, seconds, self._first.get(index), self._last.get(index), self._tokens.get(index, 0)
            )
            for index, seconds in self._queued.items()
        ]  # fmt: skip


def response_counts(counters: SharedCounters) -> SharedCounter:
    """Return the counter that CountResponses increments."""
    return SharedCounter(counters, "http_responses", "HTTP responses, by route and status.", ["route", "status"])


class CountResponses:
    """ASGI middleware that counts responses by route template and status when their headers are sent.

    `route` is "none" if no route matches. A route that raises counts as 500. A client that disconnects before the
    headers is not counted.
    """

    def __init__(self, app: ASGIApp, counter: SharedCounter):
        self.app, self._counter = app, counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        def count(status: int) -> None:
            nonlocal started
            started = True
            # Never use the path itself: a scanner would create a series per path.
            self._counter.add(getattr(scope.get("route"), "path", "none"), str(status))

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, send_counted)
        except Exception:
            if not started:
                count(500)
            raise


class EngineCollector:
    """Export the engine client's latest snapshot at each scrape.

    Counters continue when an engine process is replaced. Counts since the last snapshot of the old process, at most
    0.2 seconds old, are lost. Nothing is exported until `started` returns True, that is, until the model is loaded.
    """

    def __init__(self, client: Client, started: Callable[[], bool], num_speculative_tokens: int = 0):
        self._client, self._started, self._num_drafted = client, started, num_speculative_tokens

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families of the engine and its graph cache."""
        if not self._started():
            return
        stats, health = self._client.stats(), self._client.health()
        yield gauge_family("engine_up", "1 while the engine accepts requests, else 0.", float(health.ready))
        yield gauge_family("engine_heartbeat_age_seconds", "Seconds since the engine last reported.", health.silent)
        sleeping = GaugeMetricFamily(
            "encore_engine_sleeping", "1 for parts of the engine's memory that are released, else 0.", labels=("part",)
        )
        for part in MEMORY_PARTS:
            sleeping.add_metric((part,), part in stats.released)
        yield sleeping
        yield CounterMetricFamily(
            "encore_engine_restarts", "Restarts of an engine process that died or hung.", value=health.restarts
        )
        yield gauge_family("num_requests_running", "Number of sequences in the running batch.", stats.num_running)
        yield gauge_family("num_requests_waiting", "Number of sequences waiting to be scheduled.", stats.num_waiting)
        waiting = GaugeMetricFamily(
            "encore_num_requests_waiting_by_reason",
            "Waiting sequences: for a place in the batch (capacity), or for their grammar (deferred).",
            labels=("reason",),
        )
        waiting.add_metric(("capacity",), stats.num_waiting - stats.num_deferred)
        waiting.add_metric(("deferred",), stats.num_deferred)
        yield waiting
        yield gauge_family("kv_cache_usage_perc", "KV cache usage. 1 means 100 percent.", stats.kv_cache_usage)
        yield gauge_family("cpu_threads", "Threads that a step on a CPU uses; 0 on a GPU.", stats.num_threads)
        totals = {
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            "num_preemptions": ("Preempted sequences.", stats.num_preemptions),
            "prompt_tokens": ("Prompt tokens of scheduled requests.", stats.prompt_tokens),
            "generation_tokens": ("Generated tokens.", stats.generation_tokens),
            "prompt_tokens_cached": ("Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            "spec_decode_num_drafts": ("Drafts of speculative decoding.", stats.drafts),
            "spec_decode_num_draft_tokens": ("Draft tokens of speculative decoding.", stats.draft_tokens),
            "spec_decode_num_accepted_tokens": ("Draft tokens that sampling confirmed.", stats.accepted_tokens),
            "kv_offloading_failed_reads": (
                "Blocks whose files were missing, truncated or corrupted, and were computed again.",
                stats.tier_failed_reads,
            ),
            "kv_offloading_dropped_blocks": ("Evicted blocks without room in host memory.", stats.tier_dropped),
            "engine_steps": ("Engine steps.", stats.steps),
            "idle_check_failures": (
                "Checks of an idle engine that found leaked pages or slots.",
                stats.idle_check_failures,
            ),
        }
        for name, (text, value) in totals.items():
            yield CounterMetricFamily(f"encore_{name}", text, value=value)
        sources = {
            "local_compute": stats.prompt_tokens - stats.prefix_cache_hits,
            "local_cache_hit": stats.prefix_cache_hits,
        }
        yield _by_label("prompt_tokens_by_source", "Prompt tokens: computed, or cached.", "source", sources)
        cached = {"device": stats.prefix_cache_hits - sum(stats.tier_hits.values())}
        cached |= {tier: stats.tier_hits.get(tier, 0) for tier in stats.tier_bytes}
        yield _by_label("prompt_tokens_cached_by_source", "Cached prompt tokens, by place.", "source", cached)
        if stats.tier_bytes:
            used = GaugeMetricFamily("encore_kv_offloading_bytes", "Size of the blocks in a tier.", labels=("tier",))
            for tier, size in stats.tier_bytes.items():
                used.add_metric((tier,), size)
            yield used
        yield _by_label(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by position in the draft.",
            "position",
            {str(position): stats.accepted_by_position.get(position, 0) for position in range(self._num_drafted)},
        )
        for name, text, key in _HISTOGRAMS:
            yield histogram_family(name, text, stats.histograms.get(key))
        yield from graph_families(stats.graphs)


# (name, help, key in EngineStats.histograms)
_HISTOGRAMS = (
    ("iteration_tokens_total", "Prompt tokens computed and tokens generated by a step.", "iteration_tokens"),
    ("request_num_preemptions", "How often an ended sequence was preempted.", "request_preemptions"),
)


def _by_label(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"encore_{name}", text, labels=(label,))
    for value, count in values.items():
        family.add_metric((value,), count)
    return family


# (name, help, label names, key in graph_cache's snapshot). Each value there is a list of (label values, count).
_GRAPH_COUNTERS = (
    ("graph_replays", "Graph replays, without dummy runs.", ("site", "scope", "phase", "bucket"), "replays"),
    ("graph_fallbacks", "Steps that ran eager, by reason.", ("site", "phase", "reason"), "fallbacks"),
    ("graph_captures", "Graphs captured.", ("site", "scope", "reason"), "captures"),
    ("graph_failed_captures", "Captures that failed.", ("site", "scope"), "failed_captures"),
    ("graph_invalidations", "Graphs dropped because a tensor moved or on request.", ("reason",), "invalidations"),
    ("graph_shadow_checks", "Replays compared with eager, by outcome.", ("site", "phase", "outcome"), "shadow_checks"),
    ("graph_shadow_mismatches", "Graphs dropped: they differed from eager.", ("site", "phase"), "shadow_mismatches"),
    ("graph_real_tokens", "Rows that held a token.", ("phase",), "real_tokens"),
    ("graph_padded_tokens", "Padding rows.", ("phase",), "padded_tokens"),
    ("graph_batch_rows", "Steps by real rows, above 512 by bucket.", ("site", "phase", "rows"), "batch_rows"),
)  # fmt: skip


def graph_families(snapshot: Mapping[str, Any]) -> Iterator[Metric]:
    """Yield the metric families of a graph cache's snapshot; counters of an empty one have no samples."""
    for name, text, labels, key in _GRAPH_COUNTERS:
        family = CounterMetricFamily(f"encore_{name}", text, labels=labels)
        for values, count in snapshot.get(key, ()):
            family.add_metric([str(value) for value in values], count)
        yield family
    entries = GaugeMetricFamily("encore_graph_cache_entries", "Graphs in the cache.", labels=("site", "scope"))
    for values, count in snapshot.get("entries", ()):
        entries.add_metric([str(value) for value in values], count)
    yield entries
    yield gauge_family(
        "graph_pool_bytes", "Bytes of the memory pool shared by all graphs.", snapshot.get("pool_bytes", 0)
    )
    yield gauge_family(
        "graph_warm_ratio",
        "Share of the wanted graphs that are captured, from 0 to 1.",
        snapshot.get("warm_ratio", 0.0),
    )
    yield histogram_family(
        "graph_capture_seconds", "Time per graph capture in seconds.", snapshot.get("capture_seconds")
    )


def histogram_family(name: str, text: str, found: Mapping[str, Any] | None) -> Metric:
    """Return the family of a histogram as plain data: bounds, counts by bucket, and sum; without samples if None."""
    family = HistogramMetricFamily(f"encore_{name}", text)
    if found is not None:
        total, buckets = 0, []
        for bound, count in zip([*found["bounds"], float("inf")], found["counts"], strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))
        family.add_metric([], buckets, found["sum"])
    return family


def gauge_family(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"encore_{name}", text, value=value)


def info_family(name: str, text: str, labels: Mapping[str, Any]) -> Metric:
    family = GaugeMetricFamily(f"encore_{name}", text, labels=tuple(labels))
    family.add_metric([str(value) for value in labels.values()], 1)
    return family

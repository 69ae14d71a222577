"""The one thread that touches the device: takes commands, steps, reports.

`step()` is the hot loop: schedule, launch, and then book and judge what is read: the same step, or the one before it,
which the device finished while this one was being enqueued. Knows no transport and no text.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.errors import EngineError, RequestError
from engine.judge import Judge
from engine.kv_cache import PagePool
from engine.launched import UNREAD_STEPS, Launched
from engine.megatron.hosted import HostedModel
from engine.messages import (
    Abort,
    Ask,
    Command,
    Dead,
    EngineStats,
    Events,
    ModelInfo,
    Reply,
    Report,
    Snapshot,
    Stop,
    Submit,
)
from engine.model_runner import ModelRunner
from engine.operations import Operations
from engine.prefix_cache import PrefixCache
from engine.request import EngineRequest, Request, RequestState, TokenEvent, check_prompt_ids
from engine.scheduler import Scheduler, SchedulerConfig
from engine.weights import stage_update
from graph_cache.errors import ManifestError
from graph_cache.keys import GraphKey
from graph_cache.manifest import Manifest

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.2
IDLE_SECONDS = 0.05
MANIFEST_SECONDS = 30.0
IDLE_CHECK_SECONDS = 5.0
FAILURES_IN_A_ROW = 3


class EngineLoop:
    """Requests, scheduler and runner of one model. One thread calls its methods; `serve` makes a loop of them."""

    fatal_failures = FAILURES_IN_A_ROW  # steps that fail in a row; the last one ends the loop

    def __init__(self, config: EngineConfig, runner: ModelRunner, info: ModelInfo, manifest: Manifest | None = None):
        self.config = config
        self.runner = runner
        self.info = info
        self.manifest = manifest
        self.weight_version = info.weight_version
        pool = PagePool(config.num_pages, config.page_size)
        self.prefix_cache = PrefixCache(pool) if config.enable_prefix_caching else None
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
            ),
            pool,
            self.prefix_cache,
            weight_version=self.weight_version,
        )
        self.judge = Judge(self.scheduler, runner)
        self._eos = frozenset(info.eos_token_ids)
        self._behind = UNREAD_STEPS - 1 if config.async_scheduling else 0  # steps that may be unread after a step()
        self._under_way: deque[tuple[Batch, Launched]] = deque()  # enqueued and not read, oldest first
        self._steps = self._failures = 0
        self._last_error = ""
        self.warm_asked = False  # capture between steps also under warm-up `lazy`, until nothing is missing
        self.operations = Operations(self)
        # Whoever brings requests or commands may have moved storage before; between the steps of one batch nobody can.
        self._unchecked = True
        self._idle_check_failures = 0
        self._next_idle_check = 0.0
        self._next_capture = 0.0
        self._next_save = time.monotonic() + MANIFEST_SECONDS
        self._save_failed = False  # the last save of the manifest did, and the log says so

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Accept a request. Raises RequestError (PromptTooLong) for one that can't be meant or can never fit."""
        self._unchecked = True
        check_prompt_ids(request.prompt_token_ids, self.info.vocab_size)
        self.runner.sampling.check(request.params)
        self.scheduler.add(Request(request, self.weight_version, self._eos))

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        """Accept requests; one that is refused is answered by a last event with finish_reason "error"."""
        for request in requests:
            try:
                self.add(request)
            except EngineError as error:
                self.judge.refuse(request, error, self.weight_version)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests that live; unknown ids (ended a moment ago) are left alone."""
        for request_id in request_ids:
            request = self.scheduler.get(request_id)
            if request is not None:
                self.judge.end(request, RequestState.ABORTED, TokenEvent(request_id=request_id, finish_reason="abort"))

    def drop_events(self) -> None:
        """Forget answers that nobody will take: those of requests that a caller has just aborted."""
        self.judge.events.clear()

    @property
    def has_work(self) -> bool:
        """Whether a request lives, a step is unread, or an answer waits to be taken."""
        return self.scheduler.has_work or bool(self._under_way) or bool(self.judge.events)

    def step(self) -> list[TokenEvent]:
        """Enqueue one batch and read the oldest unread one; return what that gave, with every answer that came up since
        the last step. With nothing to enqueue, all that is unread is read.
        """
        if self._unchecked:
            self.runner.cache.check_addresses()
            self._unchecked = False
        batch = self.scheduler.schedule()
        failure = self._launch(batch)
        self.drain(self._behind if batch and failure is None else 0)
        if failure is not None:
            self._fail(batch, failure)
        self._steps += bool(batch)
        events, self.judge.events = self.judge.events, []
        return events

    def _launch(self, batch: Batch) -> Exception | None:
        """Enqueue a batch; returns what went wrong, if anything did. Earlier steps are read first then."""
        try:
            for request in batch.admitted:
                request.prompt_scores = []  # of a prefill that a preemption broke off
                self.runner.admit(request)
            if batch:
                launched = self.runner.launch(batch)
                self.scheduler.dispatch(batch)
                self._under_way.append((batch, launched))
        except BaseException as error:
            self.runner.abandon()
            if isinstance(error, Exception):
                return error
            self.scheduler.preempt_all()  # interrupted: how far the device came is unknown, so all is computed anew
            raise
        return None

    def drain(self, behind: int = 0) -> None:
        """Read, book and judge what is under way, but for the newest `behind` steps. Call it before anything changes
        that tokens are judged by: those of steps under way belong to what was then.
        """
        while len(self._under_way) > behind:
            batch, launched = self._under_way[0]
            try:
                result = launched.read()  # an interruption here leaves it to the next step
                self._under_way.popleft()
                self.judge.book(batch, result)
                self._failures = 0
            except Exception as error:
                behind = 0  # what comes next is fed from the host, which must know every token by then
                self._fail(batch, error)

    def _fail(self, batch: Batch, error: Exception) -> None:
        """Fail the requests of a batch that raised. The error is told to their callers, logged and kept for reports."""
        logger.error(
            "a step failed; its %d requests fail with it", len(batch.decodes) + len(batch.prefills), exc_info=error
        )
        self._under_way = deque(step for step in self._under_way if step[0] is not batch)
        self._last_error = f"{type(error).__name__}: {error}"
        self._failures += 1
        if not batch or self._failures >= self.fatal_failures:
            raise error
        self.runner.abandon()
        # Those admitted without a chunk in this step too: their slot may hold another's sampling state.
        involved = dict.fromkeys((*batch.decodes, *(chunk.request for chunk in batch.prefills), *batch.admitted))
        for request in involved:
            if not request.state.is_final:
                self.judge.end(
                    request,
                    RequestState.FAILED,
                    TokenEvent(
                        request_id=request.request_id,
                        finish_reason="error",
                        error=f"the step failed: {self._last_error}",
                    ),
                )

    # ---- between steps ---------------------------------------------------------------------------------------------

    def warm(
        self, progress: Callable[[int, int, Any], None] | None = None, wanted: Sequence[GraphKey] | None = None
    ) -> None:
        """Capture every graph that is wanted ahead, or these."""
        self.runner.cache.warm(progress, wanted)

    def capture_between_steps(self) -> bool:
        """Capture one graph that is wanted ahead and missing: all of them under warm-up `background`, those that were
        dropped as stale under `full`. While serving, at most half the time goes to it. A step may be under way: a
        capture comes after it on the device, and leaves the static inputs as it found them.
        """
        now = time.monotonic()
        is_lazy = self.config.warmup == "lazy" and not self.warm_asked
        if is_lazy or (self.scheduler.has_work and now < self._next_capture):
            return False
        if not self.capture_next():
            self.warm_asked = False
            return False
        took = time.monotonic() - now
        self._next_capture = now + 2 * took
        return True

    def capture_next(self, key: GraphKey | None = None) -> bool:
        """Capture one graph that is wanted ahead and missing, or this one; False if there is none."""
        return self.runner.cache.warm_next(key)

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: str) -> int:
        """Write new weights in place, all or nothing; graphs stay valid. Returns how many tensors were written.

        Raises WeightUpdateError, with the old weights untouched, if any name, shape or value is refused.
        """
        _check_version(version)
        written = stage_update(self.runner.model.weight_slots(), weights)
        self.weights_changed(version)
        return written

    def weights_changed(self, version: str) -> None:
        """The weights in place are new ones: running requests are recomputed, prefix KV of the old ones is dropped."""
        _check_version(version)
        self.drain()
        self.scheduler.preempt_all()
        self.scheduler.set_weight_version(version)
        self.weight_version = version
        self.runner.cache.check_addresses()

    def graphs(self) -> list[dict[str, Any]]:
        """The graph cache as rows of plain values."""
        return self.runner.cache.table()

    def stats(self) -> EngineStats:
        """A snapshot of every counter and gauge."""
        cache, scheduler = self.runner.cache, self.scheduler
        entries = Counter((row["site"], row["scope"]) for row in cache.table() if row["state"] == "captured")
        graphs = cache.stats.snapshot() | {
            "entries": list(entries.items()),
            "pool_bytes": cache.pool_bytes,
            "warm_ratio": cache.warm_ratio(),
        }
        pending = len(cache.pending())
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.pool.usage,
            prefix_cache_queries=self.prefix_cache.queries if self.prefix_cache else 0,
            prefix_cache_hits=self.prefix_cache.hits if self.prefix_cache else 0,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.prompt_tokens,
            generation_tokens=self.judge.generated,
            steps=self._steps,
            ended=dict(self.judge.ended),
            graphs=graphs,
            warm={
                "mode": self.config.warmup,
                "captured": sum(entries.values()),
                "pending": pending,
                "ratio": cache.warm_ratio(),
            },
            weight_version=self.weight_version,
            last_error=self._last_error,
            idle_check_failures=self._idle_check_failures,
        )

    def idle_check(self) -> None:
        """Raise, listing every leak, unless all pages and slots are back and nothing is under way."""
        self.drain()
        self.scheduler.idle_check()

    def _check_idle(self) -> None:
        """On becoming idle, look for leaks, at most every IDLE_CHECK_SECONDS; one is logged and counted, not fatal."""
        if time.monotonic() < self._next_idle_check:
            return
        self._next_idle_check = time.monotonic() + IDLE_CHECK_SECONDS
        try:
            self.idle_check()
        except EngineError as error:
            logger.error("%s", error)
            self._idle_check_failures += 1
            self._last_error = str(error)

    def save_manifest(self) -> None:
        """Write what traffic used to disk, if a manifest is kept.

        A manifest that can't be written is logged once, until a save succeeds; the engine goes on without it.
        """
        self._next_save = time.monotonic() + MANIFEST_SECONDS
        if self.manifest is None:
            return
        try:
            self.manifest.save()
            self._save_failed = False
        except ManifestError as error:
            if not self._save_failed:
                logger.warning("the graph manifest was not saved, and the engine goes on without it: %s", error)
            self._save_failed = True

    def close(self) -> None:
        """Drop the graphs and let the model go; nothing may be called after it."""
        self.runner.cache.clear()
        if isinstance(self.runner.model, HostedModel):
            self.runner.model.release()

    # ---- as a service ----------------------------------------------------------------------------------------------

    def serve(self, receive: Callable[[float], Command | None], send: Callable[[Report], None]) -> None:
        """Take commands, step and report until a Stop. `receive(timeout)` gives the next command or None.

        Always ends with one Dead report, whatever happens.
        """
        reason, next_report, captures = "", 0.0, None
        gc.collect()
        try:
            while True:
                if captures != (captures := self.runner.cache.stats.captures.total()):
                    # A collection would walk the model's and the graphs' objects, which stay, for 100 ms amid a step.
                    gc.freeze()  # again after each capture, which lets go of what is frozen
                busy = self.has_work
                command = receive(0.0 if busy else IDLE_SECONDS)
                with self.runner.cache.pool.turn():
                    while command is not None:
                        if isinstance(command, Stop):
                            return
                        self._obey(command, send)
                        command = receive(0.0)
                    if self.has_work:
                        events = self.step()
                        if events:
                            send(Events(events))
                        next_report = min(next_report, time.monotonic() + REPORT_SECONDS)
                    captured = self.capture_between_steps()
                if busy and not self.has_work:
                    self._check_idle()
                now = time.monotonic()
                if now >= next_report or captured or (busy and not self.has_work):
                    send(Snapshot(self.stats()))
                    next_report = now + REPORT_SECONDS
                if now >= self._next_save and not self.has_work:
                    self.save_manifest()
        except Exception as error:
            logger.exception("the engine loop ends")
            reason = f"{type(error).__name__}: {error}"
        finally:
            try:
                self.abort([request.request_id for request in self.scheduler.requests()])
                self.save_manifest()
                if self.judge.events:
                    send(Events(self.judge.events))
            except Exception as error:  # broken books; the Dead below still ends every request at the caller's side
                logger.exception("the engine loop could not end its requests")
                reason = reason or f"{type(error).__name__}: {error}"
            gc.unfreeze()
            send(Dead(reason))

    def _obey(self, command: Command, send: Callable[[Report], None]) -> None:
        if isinstance(command, Submit):
            self.submit(command.requests)
        elif isinstance(command, Abort):
            self.abort(command.request_ids)
        elif isinstance(command, Ask):
            self._unchecked = True
            self.drain()  # what is asked may move weights or storage under a step
            try:
                send(Reply(command.number, attrgetter(command.method)(self)(*command.args)))
            except Exception as error:
                send(Reply(command.number, error=error))


def _check_version(version: object) -> None:
    if not isinstance(version, str) or not version:
        raise RequestError(f"version={version!r}: a name for the new weights is needed", param="version")

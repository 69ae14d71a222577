"""The engine loop: receives commands, runs steps and sends reports, on the only thread that uses the executor.

`step()` is the hot path: schedule a batch, submit it to the executor, then read and finish a step. That is the same
step or, with async scheduling, the one before it, which the device completed while this one was being enqueued.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from engine.core.constraints import Constraints
from engine.core.finish import StepFinisher
from engine.core.operations import Operations
from engine.core.step_timer import StepTimer
from engine.errors import EngineDead, EngineError, RequestError
from engine.executor.interface import Executor
from engine.protocol.messages import (
    Abort,
    Ask,
    Command,
    Dead,
    EngineStats,
    Events,
    Reply,
    Report,
    Snapshot,
    Stop,
    Submit,
)
from engine.protocol.request import EngineRequest, TokenEvent, check_prompt_ids
from engine.scheduling.batch import Batch
from engine.scheduling.page_pool import PagePool
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request, RequestState
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from engine.text.grammars.compiler import GrammarCompiler
from engine.utils.async_copy import upload_buffer
from engine.worker.async_output import MAX_STEPS_IN_FLIGHT, AsyncStepOutput
from engine.worker.model_runner import ModelRunner
from engine.worker.step_input import MaskInput
from graph_cache.errors import ManifestError
from graph_cache.keys import GraphKey

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.2
IDLE_SECONDS = 0.05
QUIET_SECONDS = 0.2  # without work before a capture begins, which the next request would wait for
MANIFEST_SECONDS = 30.0
IDLE_CHECK_SECONDS = 5.0
MAX_CONSECUTIVE_FAILURES = 3
COMPILE_SECONDS = 0.01  # to wait for a grammar before commands are received again, if there is nothing else to do


class StepInFlight(NamedTuple):
    """An enqueued step whose results were not read. `enqueued`: when, by the clock of the StepTimer."""

    batch: Batch
    output: AsyncStepOutput
    enqueued: float


class EngineLoop:
    """The scheduler and live requests of one model, whose steps an executor runs.

    Not thread-safe. `serve` runs it until a Stop command. `compiler`: for the grammars of constrained requests; None
    refuses them. The loop closes it.
    """

    def __init__(self, executor: Executor, compiler: GrammarCompiler | None = None):
        self.executor = executor
        worker = executor.worker
        self.config, self.info = worker.config, worker.info
        self.manifest = worker.runner.cache.manifest
        self.weight_version = self.info.weight_version
        config = self.config
        pool = PagePool(config.num_pages, config.page_size)
        groups = tuple(group.window for group in worker.runner.kv.groups)
        self.prefix_cache = PrefixCache(pool, groups) if config.enable_prefix_caching else None
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                max_prefill_chunks=worker.runner.prefill_buckets.max_chunks,
                num_speculative_tokens=config.num_speculative_tokens,
                max_verify_tokens=worker.runner.max_verify_tokens,
                groups=groups,
            ),
            pool,
            self.prefix_cache,
            weight_version=self.weight_version,
        )
        self._eos = frozenset(self.info.eos_token_ids)
        self.constraints = Constraints(
            compiler,
            self.info.vocab_size,
            config.max_num_seqs,
            self._eos,
            lambda rows, words: upload_buffer(rows, words, worker.runner.device),
        )
        self.finisher = StepFinisher(self.scheduler, executor, self.constraints)
        self._max_unread_steps = MAX_STEPS_IN_FLIGHT - 1 if config.async_scheduling else 0  # when step() returns
        self._in_flight: deque[StepInFlight] = deque()  # oldest first
        self.timer = StepTimer()
        self._unmasked: Batch | None = None  # the newest step in flight, if it waits for its masks to be sampled
        self._steps = self._failures = 0
        self._last_error = ""
        self.warm_requested = False  # capture between steps also under warm-up `lazy`, until nothing is missing
        self.operations = Operations(self)
        self._storage_may_have_moved = True  # so that all addresses of graphs are checked before the next step
        self._idle_check_failures = 0
        self._next_idle_check = 0.0
        self._next_capture = 0.0
        self._next_save = time.monotonic() + MANIFEST_SECONDS
        self._save_failed = False  # the last save of the manifest did, and the log says so

    @property
    def runner(self) -> ModelRunner:
        """Rank 0's model runner, for reports."""
        return self.executor.worker.runner

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError for an invalid request, PromptTooLong for one that can never fit.

        A constrained request waits until its grammar is compiled. If that fails, it gets a final event with
        finish_reason "error", as it does in `submit`. Addresses of graphs are checked before the next step, since the
        calling code may have moved storage.
        """
        self._storage_may_have_moved = True
        self._add(request)

    def _add(self, request: EngineRequest) -> None:
        check_prompt_ids(request.prompt_token_ids, self.info.vocab_size)
        self.runner.sampling.check(request.params)
        request.params.check_hidden_states(self.info.hidden_state_size)
        if not request.params.is_constrained or self.constraints.begin(request):
            self._schedule(request)

    def _schedule(self, request: EngineRequest) -> None:
        try:
            self.scheduler.add(Request(request, self.weight_version, self._eos))
        except EngineError:
            self.constraints.forget(request.request_id)
            raise

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        """Queue requests of a served engine, in which no code but that of an Ask can move storage.

        A rejected request gets a final event with finish_reason "error".
        """
        for request in requests:
            try:
                self._add(request)
            except EngineError as error:
                self.finisher.reject(request, error, self.weight_version)

    def _schedule_compiled(self) -> None:
        """Queue the requests whose grammar is compiled now. With nothing else to do, wait a little for one."""
        is_idle = not self.scheduler.has_work and not self._in_flight and not self.finisher.events
        for request, error in self.constraints.compiled(COMPILE_SECONDS if is_idle else 0.0):
            try:
                if error is not None:
                    raise error
                self._schedule(request)
            except EngineError as refusal:
                self.finisher.reject(request, refusal, self.weight_version)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort live requests. Unknown ids are ignored, since a request may just have ended."""
        for request_id in request_ids:
            request = self.scheduler.get(request_id)
            if request is not None:
                self.finisher.end(
                    request, RequestState.ABORTED, TokenEvent(request_id=request_id, finish_reason="abort")
                )
            elif self.constraints.forget(request_id):
                self.finisher.drop(request_id, self.weight_version)

    def drop_events(self) -> None:
        """Discard pending events that no caller will read, such as those of requests just aborted."""
        self.finisher.events.clear()

    @property
    def has_work(self) -> bool:
        """Whether there is a live request, a step in flight or a pending event."""
        scheduler, constraints = self.scheduler, self.constraints
        return (
            scheduler.has_work or bool(self._in_flight) or bool(self.finisher.events) or constraints.num_compiling > 0
        )

    def step(self) -> list[TokenEvent]:
        """Schedule and enqueue one batch, finish older steps, and return all new events.

        With async scheduling the new step stays in flight. Without it, or with nothing to enqueue, every step is
        finished. A constrained batch in flight waits for its masks, which depend on the tokens before: threads compute
        them while its forward graph runs, this thread finishes the step before, and the caller uses the events.
        """
        if self._storage_may_have_moved:
            self.executor.call("check_addresses")
            self._storage_may_have_moved = False
        self.drain(self._max_unread_steps)  # a step whose read was interrupted: only the device knows its tokens
        if self.constraints.num_compiling:
            self._schedule_compiled()
        masks = self._fill_masks()
        started = self.timer.now()
        batch = self.scheduler.schedule()
        self.constraints.mark(batch)
        if masks is None or self._send(masks):
            failure = self._execute(batch, started)
            self.drain(self._max_unread_steps if batch and failure is None else 0)
            if failure is not None:
                self._fail_batch(batch, failure)
            self._steps += bool(batch)
        self.executor.check()  # results that were computed without a lost rank are invalid
        events, self.finisher.events = self.finisher.events, []
        return events

    def _execute(self, batch: Batch, started: float) -> Exception | None:
        """Enqueue a batch, scheduled from `started` on. If that raises, wait for the earlier steps and return that."""
        try:
            for request in batch.admitted:
                request.forget_partial_results()
            if batch:
                output = self.executor.submit(batch)
                self.scheduler.dispatch(batch)
                self._in_flight.append(StepInFlight(batch, output, self.timer.enqueued(started)))
                self._unmasked = batch if batch.constrained else None
        except EngineDead:
            raise
        except BaseException as error:
            self.executor.recover(error)
            if isinstance(error, Exception):
                return error
            self.scheduler.preempt_all()  # interrupted with the device's progress unknown: recompute everything
            raise
        return None

    def _fill_masks(self) -> MaskInput | None:
        """Return the masks of the step that waits for them; None if none does, or if it failed now.

        All earlier steps must be finished: a mask depends on the token before it. Ends the requests that no token may
        follow; their rows are stale then.
        """
        batch = self._unmasked
        if batch is None:
            return None
        try:
            masks, ended = self.constraints.masks(batch.masked_requests())
        except Exception as error:
            self._fail_batch(batch, error)
            return None
        for request, message in ended:
            self.finisher.end_constrained(request, message)
        return masks

    def _send(self, masks: MaskInput) -> bool:
        """Enqueue the rest of the step that waits for masks. Returns whether that succeeded."""
        assert self._unmasked is not None
        try:
            self.executor.call("sample", masks)
        except EngineDead:
            raise
        except Exception as error:
            self._fail_batch(self._unmasked, error)
            return False
        except BaseException as error:
            self.executor.recover(error)
            self._drop_unmasked()
            raise
        self._unmasked = None
        return True

    def _drop_unmasked(self) -> None:
        """Drop the step that waits for masks, and compute its requests again."""
        self._in_flight = deque(step for step in self._in_flight if step.batch is not self._unmasked)
        self._unmasked = None
        self.scheduler.preempt_all()

    def drain(self, behind: int = 0) -> bool:
        """Read and finish steps in flight, oldest first, until at most `behind` are left. Return whether none failed.

        Call it before changing the weights or anything else that finishing a step depends on: the tokens in flight
        were computed under the old state.
        """
        has_succeeded = True
        while len(self._in_flight) > behind:
            batch, output, enqueued = self._in_flight[0]
            if batch is self._unmasked:
                masks = self._fill_masks()
                if masks is None or not self._send(masks):
                    has_succeeded = False
                    continue
            try:
                result = output.read()  # if interrupted here, the next step reads it again
                self._in_flight.popleft()
                self.timer.finished(batch, enqueued)
                last_before = len(self._in_flight) == 1  # a mask depends on the tokens of all earlier steps
                self.finisher.finish_step(batch, result, self._unmasked if last_before else None)
                self._failures = 0
            except Exception as error:
                behind = 0  # the next step's inputs come from the host, which must know every token by then
                has_succeeded = False
                self._fail_batch(batch, error)
        return has_succeeded

    def _fail_batch(self, batch: Batch, error: Exception) -> None:
        """Fail the requests of a batch that raised. The error goes to their callers, the log and `stats`.

        Raises the error again if the batch was empty or MAX_CONSECUTIVE_FAILURES steps failed in a row, and EngineDead
        if the executor can't continue.
        """
        logger.error("a step failed; its %d requests fail with it", len(batch.requests), exc_info=error)
        self._in_flight = deque(step for step in self._in_flight if step.batch is not batch)
        self._last_error = f"{type(error).__name__}: {error}"
        self._failures += 1
        if not batch or self._failures >= MAX_CONSECUTIVE_FAILURES:
            raise error
        self.executor.recover(error)
        # Include requests admitted without a chunk in this step: the workers may not have their sampling parameters.
        involved = dict.fromkeys((*batch.requests, *batch.admitted))
        for request in involved:
            if not request.state.is_final:
                self.finisher.end(
                    request,
                    RequestState.FAILED,
                    TokenEvent(
                        request_id=request.request_id,
                        finish_reason="error",
                        error=f"the step failed: {self._last_error}",
                    ),
                )
        if self._unmasked is not None:  # it failed, or its masks depend on what failed
            self._drop_unmasked()

    # ---- between steps ---------------------------------------------------------------------------------------------

    def warm(
        self, progress: Callable[[int, int, Any], None] | None = None, wanted: Sequence[GraphKey] | None = None
    ) -> None:
        """Capture the graphs in `wanted`, or by default every missing graph of the warm-up plan."""
        keys = list(self.runner.cache.pending() if wanted is None else wanted)
        if self._unmasked is not None:
            self.drain()  # a capture would overwrite its logits
        with self.runner.cache.pool.session():  # one for all captures
            for done, key in enumerate(keys, 1):
                self.executor.call("warm", [key])
                if progress is not None:
                    progress(done, len(keys), key)

    def capture_between_steps(self) -> bool:
        """Capture one missing graph of the warm-up plan; returns whether one was captured.

        Under warm-up `background` this captures all of them over time, under `full` only those dropped as stale. While
        requests are live, captures take at most half the time. A step may be in flight: the capture runs after it on
        the device and restores the static inputs.
        """
        now = time.monotonic()
        is_lazy = self.config.warmup == "lazy" and not self.warm_requested
        if is_lazy or (self.scheduler.has_work and now < self._next_capture):
            return False
        if not self.capture_next():
            self.warm_requested = False
            return False
        elapsed = time.monotonic() - now
        self._next_capture = now + 2 * elapsed
        return True

    def capture_next(self, key: GraphKey | None = None) -> bool:
        """Capture the graph of `key`, or by default one missing graph of the plan. Returns False if none is missing."""
        if key is None:
            key = next(iter(self.runner.cache.pending()), None)
        if key is None:
            return False
        if self._unmasked is not None:
            self.drain()  # a capture would overwrite its logits
        self.executor.call("capture", key)
        return True

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: str) -> int:
        """Write new weights in place; graphs stay valid. Returns the number of tensors written.

        Raises WeightUpdateError, with the old weights unchanged, if any name, shape or value is invalid.
        """
        _check_version(version)
        self.drain()  # an interrupted wait must not separate new weights from `weights_changed`
        written = self.executor.update_weights(weights)
        self.weights_changed(version)
        return written

    def load_weights(self, path: str, version: str) -> int:
        """As `update_weights`, from a safetensors file or a folder of them."""
        _check_version(version)
        self.drain()  # an interrupted wait must not separate new weights from `weights_changed`
        written = self.executor.load_weights(path)
        self.weights_changed(version)
        return written

    def weights_changed(self, version: str) -> None:
        """Record that the weights changed in place: recompute running requests and drop the old weights' prefix KV."""
        _check_version(version)
        self.drain()
        self.scheduler.preempt_all()
        self.scheduler.set_weight_version(version)
        self.weight_version = version
        self.executor.call("check_addresses")

    def graphs(self) -> list[dict[str, Any]]:
        """Return the graph cache's table, one dict of plain values per graph."""
        return self.runner.cache.table()

    def stats(self) -> EngineStats:
        """Return a snapshot of all counters and gauges."""
        cache, scheduler = self.runner.cache, self.scheduler
        entries = cache.captured_graphs()
        graphs = cache.stats.snapshot() | {
            "entries": list(entries.items()),
            "pool_bytes": cache.pool_bytes,
            "warm_ratio": cache.warm_ratio(),
        }
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self.constraints.num_compiling,
            kv_cache_usage=scheduler.pool.usage,
            prefix_cache_queries=self.prefix_cache.queries if self.prefix_cache else 0,
            prefix_cache_hits=self.prefix_cache.hits if self.prefix_cache else 0,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.prompt_tokens,
            generation_tokens=self.finisher.generated_tokens,
            draft_tokens=self.finisher.draft_tokens,
            accepted_tokens=self.finisher.accepted_tokens,
            steps=self._steps,
            ended=dict(self.finisher.ended),
            graphs=graphs,
            warm={
                "mode": self.config.warmup,
                "captured": sum(entries.values()),
                "pending": len(cache.pending()),
                "ratio": cache.warm_ratio(),
            },
            weight_version=self.weight_version,
            last_error=self._last_error,
            idle_check_failures=self._idle_check_failures,
        )

    def idle_check(self) -> None:
        """Drain, then raise SchedulerInvariantError listing every live request and leaked page or slot, if any."""
        self.drain()
        self.scheduler.idle_check()

    def _check_idle(self) -> None:
        """Run `idle_check` at most every IDLE_CHECK_SECONDS. A leak is logged and counted; it is not fatal."""
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
        """Save the graph manifest, if there is one. Logs a failure once, until a save succeeds."""
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
        """Close the workers: drop the graphs and release the model. The loop can't be used afterwards."""
        self.constraints.close()
        self.executor.close()

    # ---- as a service ----------------------------------------------------------------------------------------------

    def serve(self, receive: Callable[[float], Command | None], send: Callable[[Report], None]) -> None:
        """Process commands and run steps until a Stop command. `receive(timeout)` returns the next command or None.

        The last report is always a Dead, also after an error, which it then names. Closes the loop.
        """
        reason, is_lost, next_report, captures = "", False, 0.0, None
        gc.collect()
        last_busy = time.monotonic()
        try:
            while True:
                if captures != (captures := self.runner.cache.stats.captures.total()):
                    # Keep the garbage collector off the long-lived objects of model and graphs: walking them would
                    # stall a step for 100 ms. Freeze again after each capture, because captures unfreeze.
                    gc.freeze()
                self.executor.check()
                busy = self.has_work
                command = receive(self._seconds_to_wait() if busy else IDLE_SECONDS)
                with self.runner.cache.pool.turn():
                    while command is not None:
                        if isinstance(command, Stop):
                            return
                        self._handle_command(command, send)
                        command = receive(0.0)
                    if busy and self._seconds_to_wait() > 0:
                        continue  # more requests may come for the next step
                    if self.has_work:
                        self._send_events(self.step(), send)
                        next_report = min(next_report, time.monotonic() + REPORT_SECONDS)
                    if busy or self.has_work:
                        last_busy = time.monotonic()
                    is_quiet = time.monotonic() - last_busy >= QUIET_SECONDS
                    captured = (self.has_work or is_quiet) and self.capture_between_steps()
                if busy and not self.has_work:
                    self._check_idle()
                now = time.monotonic()
                if now >= next_report or captured or (busy and not self.has_work):
                    send(Snapshot(self.stats()))
                    next_report = now + REPORT_SECONDS
                if now >= self._next_save and not self.has_work:
                    self.save_manifest()
        except Exception as error:
            logger.exception("the engine loop failed")
            reason, is_lost = f"{type(error).__name__}: {error}", isinstance(error, EngineDead)
        finally:
            try:
                if is_lost:  # the Dead below ends the requests; their last results are invalid
                    self.drop_events()
                else:
                    self.abort([request.request_id for request in self.scheduler.requests()])
                    self.abort(self.constraints.compiling)
                self.save_manifest()
                self._send_events(self.finisher.events, send)
            except Exception as error:  # scheduler state is broken; the Dead below still ends every request's stream
                logger.exception("the engine loop could not end its requests")
                reason = reason or f"{type(error).__name__}: {error}"
            gc.unfreeze()
            send(Dead(reason))
            self.close()

    def _seconds_to_wait(self) -> float:
        """Return for how long the next step need not be scheduled, because the device is busy with a long one."""
        if len(self._in_flight) != 1 or self._unmasked is not None or self.finisher.events:
            return 0.0
        step = self._in_flight[0]
        return self.timer.seconds_to_wait(step.batch, step.enqueued)

    def _send_events(self, events: list[TokenEvent], send: Callable[[Report], None]) -> None:
        """Send the events of a step. A snapshot precedes the end of a request: its answer is in the counters then.

        A later one could be late by seconds, because a capture may follow the step.
        """
        if any(event.finish_reason is not None for event in events):
            send(Snapshot(self.stats()))
        if events:
            send(Events(events))

    def _handle_command(self, command: Command, send: Callable[[Report], None]) -> None:
        if isinstance(command, Submit):
            self.submit(command.requests)
        elif isinstance(command, Abort):
            self.abort(command.request_ids)
        elif isinstance(command, Ask):
            self._storage_may_have_moved = True
            self.drain()  # the called method may change weights or storage that a step in flight uses
            try:
                send(Reply(command.number, attrgetter(command.method)(self)(*command.args)))
            except Exception as error:
                send(Reply(command.number, error=error))


def _check_version(version: object) -> None:
    if not isinstance(version, str) or not version:
        raise RequestError(f"version={version!r} is invalid: give the new weights a non-empty name", param="version")

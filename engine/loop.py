"""The one thread that touches the device: takes commands, steps, reports.

`step()` is the hot loop: schedule, run, book, judge. Owns every request from acceptance to its end, and that each ends
once, as finished, aborted or failed. Knows no transport and no text.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.errors import EngineError, RequestError
from engine.kv_cache import PagePool
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
from engine.model_runner import ModelRunner, StepResult
from engine.operations import Operations
from engine.prefix_cache import PrefixCache
from engine.request import EngineRequest, Request, RequestState, TokenEvent, TokenLogprob, check_prompt_ids
from engine.scheduler import Scheduler, SchedulerConfig
from engine.weights import stage_update
from graph_cache.manifest import Manifest

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.2
IDLE_SECONDS = 0.05
MANIFEST_SECONDS = 30.0
IDLE_CHECK_SECONDS = 5.0
FAILURES_IN_A_ROW = 3


class EngineLoop:
    """Requests, scheduler and runner of one model. One thread calls its methods; `serve` makes a loop of them."""

    def __init__(self, config: EngineConfig, runner: ModelRunner, info: ModelInfo, manifest: Manifest | None = None):
        self.config = config
        self.runner = runner
        self.info = info
        self.manifest = manifest
        self.weight_version = info.weight_version
        pool = PagePool(config.num_pages, config.page_size)
        self.prefix_cache = PrefixCache(pool) if config.enable_prefix_caching else None
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens,
                            max_model_len=config.max_model_len),
            pool, self.prefix_cache, weight_version=self.weight_version,
        )
        self._eos = frozenset(info.eos_token_ids)
        self._slots: dict[str, int] = {}
        self._scores: dict[str, list[TokenLogprob]] = {}  # prompt log-probabilities so far
        self._reported: set[str] = set()  # requests whose first event is out
        self._events: list[TokenEvent] = []
        self._prompt_tokens = self._generated = self._steps = self._failures = 0
        self._ended: Counter[str] = Counter()
        self._last_error = ""
        self._bucket: int | None = None  # of the graph that gave the token that is being judged
        self.warm_asked = False  # capture between steps also under warm-up `lazy`, until nothing is missing
        self.operations = Operations(self)
        # Whoever brings requests or commands may have moved storage before; between the steps of one batch nobody can.
        self._unchecked = True
        self._idle_check_failures = 0
        self._next_idle_check = 0.0
        self._next_capture = 0.0
        self._next_save = time.monotonic() + MANIFEST_SECONDS

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Accept a request. Raises RequestError (PromptTooLong) for one that can't be meant or can never fit."""
        self._unchecked = True
        check_prompt_ids(request.prompt_token_ids, self.info.vocab_size)
        self.runner.sampling.check(request.params)
        self.scheduler.add(Request(request, self.weight_version))

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        """Accept requests; one that is refused is answered by a last event with finish_reason "error"."""
        for request in requests:
            try:
                self.add(request)
            except EngineError as error:
                self._ended["error"] += 1
                self._events.append(TokenEvent(request_id=request.request_id, finish_reason="error", error=str(error),
                                               refusal=error, weight_version=self.weight_version))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests that live; unknown ids (ended a moment ago) are left alone."""
        for request_id in request_ids:
            request = self.scheduler.get(request_id)
            if request is not None:
                self._end(request, RequestState.ABORTED, TokenEvent(request_id=request_id, finish_reason="abort"))

    def drop_events(self) -> None:
        """Forget answers that nobody will take: those of requests that a caller has just aborted."""
        self._events.clear()

    @property
    def has_work(self) -> bool:
        """Whether a request lives or an answer waits to be taken."""
        return self.scheduler.has_work or bool(self._events)

    def step(self) -> list[TokenEvent]:
        """Run one batch and return what it gave, with every answer that came up since the last step."""
        if self._unchecked:
            self.runner.cache.check_addresses()
            self._unchecked = False
        batch = self.scheduler.schedule()
        try:
            for request in batch.admitted:
                self._take_slot(request)
            if batch:
                result = self.runner.run(batch)
                self._book(batch, result)
                self._failures = 0
        except Exception as error:  # one bad batch must not end the service: its requests fail, the others go on
            self._fail(batch, error)
        self._steps += bool(batch)
        events, self._events = self._events, []
        return events

    def _take_slot(self, request: Request) -> None:
        if request.request_id not in self._slots:
            self._prompt_tokens += request.prompt_len
        self._slots[request.request_id] = request.slot
        self._scores.pop(request.request_id, None)  # of a prefill that a preemption broke off
        self.runner.sampling.set_slot(request.slot, request.params, request.seed, request.request.prompt_token_ids,
                                      request.output_ids)

    def _book(self, batch: Batch, result: StepResult) -> None:
        """Append the sampled tokens, then decide who is done."""
        for request_id, scores in result.prompt_logprobs.items():
            if request_id not in self._reported:
                self._scores.setdefault(request_id, []).extend(scores)
        tokens = {request_id: token for request_id, token in result.tokens.items() if token >= 0}
        at_end = [*batch.decodes, *(chunk.request for chunk in batch.prefills if chunk.is_last)]
        unwanted = [request for request in at_end
                    if request.params.max_tokens == 0 and tokens.pop(request.request_id, None) is not None]
        self.scheduler.complete(batch, tokens)
        for request in unwanted:
            self._finish(request, [], None, "length", None)
        for place, request in enumerate(at_end):
            if request.state.is_final:
                continue
            self._bucket = result.graph_bucket if place < len(batch.decodes) else None
            token = result.tokens[request.request_id]
            if token < 0:
                pages = list(request.pages)
                self._end(request, RequestState.FAILED, TokenEvent(
                    request_id=request.request_id, finish_reason="error",
                    error="the model's logits are not finite (NaN or infinity) for this request: check the weights",
                ))
                self.runner.scrub([page for page in pages if not self.scheduler.pool.count(page)])
                continue
            self._generated += 1
            self._judge(request, token, result.logprobs.get(request.request_id))

    def _judge(self, request: Request, token: int, logprob: TokenLogprob | None) -> None:
        """Does this token end its request, and why."""
        params, logprobs = request.params, None if logprob is None else [logprob]
        if request.output_len > params.min_tokens or not params.min_tokens:
            if token in params.stop_token_ids:
                return self._finish(request, [token], logprobs, "stop", token)
            if token in self._eos and not params.ignore_eos:
                return self._finish(request, [token], logprobs, "stop", None)
        if len(request.token_ids) >= self.scheduler.token_limit(request):
            return self._finish(request, [token], logprobs, "length", None)
        self._emit(request, TokenEvent(request_id=request.request_id, token_ids=[token], logprobs=logprobs))

    def _finish(self, request: Request, tokens: list[int], logprobs: list[TokenLogprob] | None, reason: str,
                stop_reason: int | None) -> None:
        self._end(request, RequestState.FINISHED, TokenEvent(
            request_id=request.request_id, token_ids=tokens, logprobs=logprobs, finish_reason=reason,
            stop_reason=stop_reason,
        ))

    def _emit(self, request: Request, event: TokenEvent) -> None:
        """Complete an event with what belongs to every event, or to the first one only."""
        event.weight_version = request.weight_version
        event.graph_bucket = self._bucket
        if request.request_id not in self._reported:
            self._reported.add(request.request_id)
            event.cached_tokens = request.cached_tokens
            if request.first_scheduled_time is not None:
                event.queue_time = max(0.0, request.first_scheduled_time - request.arrival_time)
            if request.params.prompt_logprobs is not None:
                event.prompt_logprobs = [None, *self._scores.pop(request.request_id, [])]
        self._events.append(event)

    def _end(self, request: Request, state: RequestState, event: TokenEvent) -> None:
        """The one way out: sampling state, slot, pages and maps come back, and the last event goes out."""
        self._emit(request, event)
        request_id = request.request_id
        slot = self._slots.pop(request_id, None)
        if slot is not None and request.slot is not None:
            self.runner.sampling.clear_slot(slot)
        self.scheduler.finish(request, state, event.finish_reason)
        self._reported.discard(request_id)
        self._scores.pop(request_id, None)
        self._ended[event.finish_reason] += 1

    def _fail(self, batch: Batch, error: Exception) -> None:
        """Fail the requests of a batch that raised. The error is told to their callers, logged and kept for reports."""
        logger.exception("a step failed; its %d requests fail with it", len(batch.decodes) + len(batch.prefills))
        self._last_error = f"{type(error).__name__}: {error}"
        self._failures += 1
        if not batch or self._failures >= FAILURES_IN_A_ROW:
            raise error
        self.runner.inputs.forget()
        # Those admitted without a chunk in this step too: their slot may hold another's sampling state.
        involved = dict.fromkeys((*batch.decodes, *(chunk.request for chunk in batch.prefills), *batch.admitted))
        for request in involved:
            if not request.state.is_final:
                self._end(request, RequestState.FAILED, TokenEvent(
                    request_id=request.request_id, finish_reason="error", error=f"the step failed: {self._last_error}",
                ))

    # ---- between steps ---------------------------------------------------------------------------------------------

    def warm(self, progress: Callable[[int, int, Any], None] | None = None) -> None:
        """Capture every graph that is wanted ahead."""
        self.runner.cache.warm(progress)
        self.runner.inputs.forget()

    def capture_between_steps(self) -> bool:
        """Capture one graph that is wanted ahead and missing: all of them under warm-up `background`, those that were
        dropped as stale under `full`. While serving, at most half the time goes to it.
        """
        now = time.monotonic()
        is_lazy = self.config.warmup == "lazy" and not self.warm_asked
        if is_lazy or (self.scheduler.has_work and now < self._next_capture):
            return False
        if not self.runner.cache.warm_next():
            self.warm_asked = False
            return False
        took = time.monotonic() - now
        self._next_capture = now + 2 * took
        return True

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: str) -> int:
        """Write new weights in place, all or nothing; graphs stay valid. Returns how many tensors were written.

        Raises WeightUpdateError, with the old weights untouched, if any name, shape or value is refused.
        """
        _check_version(version)
        written = stage_update(self.runner.model, weights)
        self.weights_changed(version)
        return written

    def weights_changed(self, version: str) -> None:
        """The weights in place are new ones: running requests are recomputed, prefix KV of the old ones is dropped."""
        _check_version(version)
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
            "entries": list(entries.items()), "pool_bytes": cache.pool_bytes, "warm_ratio": cache.warm_ratio(),
        }
        pending = len(cache.pending())
        return EngineStats(
            num_running=scheduler.num_running, num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.pool.usage,
            prefix_cache_queries=self.prefix_cache.queries if self.prefix_cache else 0,
            prefix_cache_hits=self.prefix_cache.hits if self.prefix_cache else 0,
            num_preemptions=scheduler.num_preemptions, prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generated, steps=self._steps, ended=dict(self._ended), graphs=graphs,
            warm={"mode": self.config.warmup, "captured": sum(entries.values()), "pending": pending,
                  "ratio": cache.warm_ratio()},
            weight_version=self.weight_version, last_error=self._last_error,
            idle_check_failures=self._idle_check_failures,
        )

    def idle_check(self) -> None:
        """Raise, listing every leak, unless all pages, slots and maps are back."""
        self.scheduler.idle_check()
        leaks = {"slots": self._slots, "prompt scores": self._scores, "first events": self._reported}
        found = [f"{len(held)} {name} of ended requests" for name, held in leaks.items() if held]
        if found:
            raise EngineError("not idle: " + "; ".join(found))

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
        """Write what traffic used to disk, if a manifest is kept; a disk that refuses is logged."""
        self._next_save = time.monotonic() + MANIFEST_SECONDS
        if self.manifest is not None:
            try:
                self.manifest.save()
            except (OSError, EngineError) as error:
                logger.warning("the graph manifest was not saved: %s", error)

    # ---- as a service ----------------------------------------------------------------------------------------------

    def serve(self, receive: Callable[[float], Command | None], send: Callable[[Report], None]) -> None:
        """Take commands, step and report until a Stop. `receive(timeout)` gives the next command or None.

        Always ends with one Dead report, whatever happens.
        """
        reason, next_report = "", 0.0
        try:
            while True:
                busy = self.has_work
                command = receive(0.0 if busy else IDLE_SECONDS)
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
                if self._events:
                    send(Events(self._events))
            except Exception as error:  # broken books; the Dead below still ends every request at the caller's side
                logger.exception("the engine loop could not end its requests")
                reason = reason or f"{type(error).__name__}: {error}"
            send(Dead(reason))

    def _obey(self, command: Command, send: Callable[[Report], None]) -> None:
        if isinstance(command, Submit):
            self.submit(command.requests)
        elif isinstance(command, Abort):
            self.abort(command.request_ids)
        elif isinstance(command, Ask):
            self._unchecked = True
            try:
                send(Reply(command.number, attrgetter(command.method)(self)(*command.args)))
            except Exception as error:
                send(Reply(command.number, error=error))


def _check_version(version: object) -> None:
    if not isinstance(version, str) or not version:
        raise RequestError(f"version={version!r}: a name for the new weights is needed", param="version")

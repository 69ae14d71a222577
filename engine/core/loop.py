"""The engine loop: queues requests and runs steps, on the only thread that uses the executor.

`step()` is the hot path: schedule a batch, submit it to the executor, then read and finish a step. That is the same
step or, with async scheduling, the one before it, which the device completed while this one was being enqueued.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from engine.core.captures import Captures
from engine.core.constraints import Constraints
from engine.core.finish import StepFinisher
from engine.core.kv_event_publisher import KVEventPublisher
from engine.core.pause import Pause, PauseMode
from engine.core.sleep import Sleep
from engine.core.steps import Steps
from engine.core.tiers import TierMoves, open_tiers
from engine.errors import ConfigError, EngineError, RequestError
from engine.executor.interface import Executor
from engine.protocol.messages import EngineStats
from engine.protocol.request import EngineRequest, TokenEvent, check_prompt_ids
from engine.sampling.sampler import check_sampling
from engine.scheduling.kv_events import KVEventRecorder
from engine.scheduling.page_pool import PagePool
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request, RequestState
from engine.scheduling.scheduler import Scheduler, SchedulerConfig, SchedulerInvariantError
from engine.speculation.ngram import NgramDrafter
from engine.text.grammars.compiler import GrammarCompiler
from engine.utils.async_copy import upload_buffer
from engine.worker.async_output import MAX_STEPS_IN_FLIGHT
from graph_cache.errors import ManifestError

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 0.01  # to wait for a grammar before commands are received again, if there is nothing else to do


class EngineLoop:
    """The scheduler and live requests of one model, whose steps an executor runs.

    Not thread-safe. `service.serve` runs it until a Stop command. `compiler`: for the grammars of constrained requests;
    None refuses them. `publisher`: for events of the prefix cache; None: off. The loop closes both.
    """

    def __init__(
        self,
        executor: Executor,
        compiler: GrammarCompiler | None = None,
        publisher: KVEventPublisher | None = None,
    ):
        self.executor = executor
        workers = executor.capabilities
        self.config, self.info = workers.config, workers.info
        self.weight_version = self.info.weight_version
        config = self.config
        pool = PagePool(config.num_pages, config.page_size)
        if publisher is not None and not config.enable_prefix_caching:
            raise ConfigError(
                "kv_events_config publishes what the prefix cache holds, and this model runs without one: leave it out"
            )
        self._publisher = publisher
        self._kv_events = None if publisher is None else KVEventRecorder(config.page_size, workers.windows)
        self.prefix_cache = (
            PrefixCache(pool, workers.windows, self._kv_events) if config.enable_prefix_caching else None
        )
        tiers = open_tiers(executor, self.prefix_cache, self._kv_events)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                max_prefill_chunks=workers.max_prefill_chunks,
                num_speculative_tokens=config.num_speculative_tokens,
                max_verify_tokens=workers.max_verify_tokens,
                prefill_buckets=workers.prefill_buckets,
                max_mixed_decodes=workers.max_mixed_decodes,
                groups=workers.windows,
            ),
            pool,
            self.prefix_cache,
            weight_version=self.weight_version,
            drafter=NgramDrafter() if config.num_speculative_tokens else None,
            tiers=tiers,
        )
        self._tiers = None if tiers is None else TierMoves(self.scheduler, executor, tiers)
        self._eos = frozenset(self.info.eos_token_ids)
        self.constraints = Constraints(
            compiler,
            self.info.vocab_size,
            config.max_num_seqs,
            self._eos,
            lambda rows, words: upload_buffer(rows, words, workers.device),
        )
        self.finisher = StepFinisher(self.scheduler, executor, self.constraints)
        self.steps = Steps(self.scheduler, executor, self.constraints, self.finisher)
        self.captures = Captures(executor, config, self.steps)
        self._max_unread_steps = MAX_STEPS_IN_FLIGHT - 1 if config.async_scheduling else 0  # when step() returns
        self._pause = Pause()
        self.sleep = Sleep(executor, self._pause, self._begin_pause, self.resume, self._forget_kv)
        self._num_steps = 0
        self._storage_may_have_moved = True  # so that all addresses of graphs are checked before the next step
        self._idle_check_failures = 0
        self._save_failed = False  # the last save of the manifest did, and the log says so

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError for an invalid request, PromptTooLong for one that can never fit.

        During a pause it is held until `resume`, which then may reject it, or refused with EnginePaused.

        A constrained request waits until its grammar is compiled. If that fails, it gets a final event with
        finish_reason "error", as it does in `submit`. Addresses of graphs are checked before the next step, since the
        calling code may have moved storage.
        """
        self.storage_may_have_moved()
        self._add(request)

    def _add(self, request: EngineRequest) -> None:
        check_prompt_ids(request.prompt_token_ids, self.info.vocab_size)
        check_sampling(request.params, self.info.vocab_size, self._eos)
        request.params.check_hidden_states(self.info.hidden_state_size)
        request.params.check_routed_experts(self.info.routed_experts is not None)
        request.params.check_support(self.info.logprobs_mode)
        self.info.check_head(request.params)
        self._check_adapter(request.adapter)
        if self._pause.holds(request):
            return
        if not request.params.is_constrained or self.constraints.begin(request):
            self._schedule(request)

    def _check_adapter(self, name: str) -> None:
        loaded = self.executor.capabilities.adapters
        if name and name not in loaded:
            found = f"loaded are {', '.join(loaded)}" if loaded else "this model has no adapters"
            raise RequestError(f"adapter={name!r} is not loaded: {found}; leave it out", param="adapter")

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
        is_idle = not self.scheduler.has_work and not self.steps and not self.finisher.events
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
            elif self.constraints.forget(request_id) or self._pause.forget(request_id):
                self.finisher.drop(request_id, self.weight_version)

    def abort_requests(self, names: Iterable[str] | None = None) -> int:
        """Abort the requests that clients know by one of `names`, or all of them; return how many clients' requests.

        They end with finish_reason "abort" and keep what was generated. Unknown names are ignored.
        """
        self.steps.drain()  # the tokens in flight are generated
        wanted = None if names is None else set(names)
        found = [one for one in self.live_requests() if wanted is None or wanted.intersection(one.names)]
        self.abort([one.request_id for one in found])
        return len({one.request_id.partition("#")[0] for one in found})

    def live_requests(self) -> list[EngineRequest]:
        """Return all requests that have not ended, also those that wait for a grammar or the end of a pause."""
        queued = [record.request for record in self.scheduler.requests()]
        return queued + self.constraints.compiling + list(self._pause.held.values())

    def take_events(self) -> list[TokenEvent]:
        """Return the pending events, such as the events of requests just aborted. Publishes KV events."""
        self._publish_kv_events()
        events, self.finisher.events = self.finisher.events, []
        return events

    @property
    def has_work(self) -> bool:
        """Whether there is a live request, a step in flight or a pending event."""
        return self.scheduler.has_work or self.constraints.num_compiling > 0 or bool(self._pause.held) or self.can_step

    @property
    def can_step(self) -> bool:
        """Whether `step` has something to do. During a pause there may be live requests that can't run."""
        if self.steps or self.finisher.events:
            return True
        return not self._pause.is_frozen and (self.scheduler.has_work or self.constraints.num_compiling > 0)

    def step(self) -> list[TokenEvent]:
        """Schedule and enqueue one batch, finish older steps, and return all new events.

        With async scheduling the new step stays in flight. Without it, or with nothing to enqueue, every step is
        finished. A constrained batch in flight waits for its masks, which depend on the tokens before: threads compute
        them while its forward graph runs, this thread finishes the step before, and the caller uses the events.
        """
        if self._storage_may_have_moved:
            self.executor.call("check_addresses")
            self._storage_may_have_moved = False
        steps = self.steps
        steps.drain(self._max_unread_steps)  # a step whose read was interrupted: only the device knows its tokens
        if self._pause.is_frozen:
            steps.drain()
            return self.take_events()
        if self.constraints.num_compiling:
            self._schedule_compiled()
        masks = steps.fill_masks()
        started = steps.timer.now()
        if self._tiers is not None:
            self._tiers.poll()
        batch = self.scheduler.schedule()
        if self._tiers is not None:
            self._tiers.send()
            if not batch and not steps:
                self._tiers.wait()
        self.constraints.mark(batch)
        if masks is None or steps.sample(masks):
            failure = steps.submit(batch, started)
            steps.drain(self._max_unread_steps if batch and failure is None else 0)
            if failure is not None:
                steps.fail(batch, failure)
            self._num_steps += bool(batch)
        self.executor.check()  # results that were computed without a lost rank are invalid
        return self.take_events()

    def capture_between_steps(self, is_interrupted: Callable[[], bool] = lambda: False) -> bool:
        """See Captures.capture_between_steps. While memory is released, nothing is captured."""
        if self._pause.obstacle:
            return False
        return self.captures.capture_between_steps(has_work=self.scheduler.has_work, is_interrupted=is_interrupted)

    def seconds_to_wait(self) -> float:
        """Return for how long the next step need not be scheduled, because the device is busy with a long one."""
        return 0.0 if self.finisher.events else self.steps.seconds_to_wait()

    def storage_may_have_moved(self) -> None:
        """Check all addresses of graphs before the next step: code outside the loop ran since the last one."""
        self._storage_may_have_moved = True

    # ---- pause -----------------------------------------------------------------------------------------------------

    def pause(self, mode: str = "abort") -> None:
        """Pause, or change the mode of a pause; `resume` ends it. Raises RequestError for an unknown mode.

        - abort: end all requests with finish_reason "abort" and refuse new ones with EnginePaused.
        - wait: run the requests there are to their end, and hold new ones.
        - keep: freeze all requests where they are, with their KV, and hold new ones. If the weights change meanwhile,
          the KV is computed again, unless `keep_stale_kv` is set.
        """
        self._begin_pause(mode)
        self.sleep.paused()

    def _begin_pause(self, mode: str) -> None:
        self._pause.begin(mode)
        self.steps.drain()
        if mode == "abort":
            self.abort_requests()

    def resume(self) -> None:
        """End the pause: frozen requests go on, and held ones are queued. Without a pause it does nothing.

        Raises RequestError while memory is released, or weights are missing after a sleep.
        """
        held = self._pause.end()
        self.sleep.resumed()
        self.submit(held)

    @property
    def pause_mode(self) -> PauseMode | None:
        """The mode of the pause; None if there is none."""
        return self._pause.mode

    @property
    def obstacle(self) -> str:
        """Why no step can run, such as a sleep, and what ends that; "" if steps can run, or are only paused."""
        return self._pause.obstacle

    def num_awaited(self) -> int:
        """Return how many sequences a pause with mode "wait" still waits for. Raises RequestError if it was ended."""
        if self._pause.mode != "wait":
            raise RequestError("the pause was ended or changed while it waited for the running requests")
        return len(self.scheduler.requests()) + self.constraints.num_compiling

    # ---- weights ---------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: str) -> int:
        """Write new weights in place; graphs stay valid. Returns the number of tensors written.

        Raises WeightUpdateError, with the old weights unchanged, if any name, shape or value is invalid.
        """
        _check_version(version)
        self.sleep.check_weights()
        self.steps.drain()  # an interrupted wait must not separate new weights from `weights_changed`
        written = self.executor.update_weights(weights)
        self.weights_changed(version)
        return written

    def load_weights(self, path: str | Sequence[str], version: str) -> int:
        """As `update_weights`, from a safetensors file, a folder of them, or several of these."""
        _check_version(version)
        self.sleep.check_weights()
        self.steps.drain()  # an interrupted wait must not separate new weights from `weights_changed`
        written = self.executor.load_weights(*([path] if isinstance(path, str) else path))
        self.weights_changed(version)
        return written

    def weights_changed(self, version: str) -> None:
        """Record that the weights changed in place: recompute running requests and drop the old weights' prefix KV.

        With `keep_stale_kv`, requests that have output tokens go on with the KV that they have.
        """
        _check_version(version)
        self.steps.drain()
        if self.config.keep_stale_kv:
            self.scheduler.preempt_all(without_tokens=True)
            self.scheduler.rename_weights(version)
        else:
            self.scheduler.preempt_all()
            self.scheduler.set_weight_version(version)
        self.weight_version = version
        self.executor.call("check_addresses")
        self.sleep.weights_came()
        self._publish_kv_events()

    def rename_weights(self, version: str) -> None:
        """Name the weights `version` without changing them: the tokens from now on have that version. KV is kept."""
        _check_version(version)
        self.steps.drain()
        self.scheduler.rename_weights(version)
        self.weight_version = version
        self._publish_kv_events()

    def reset_prefix_cache(self, recompute_running: bool = False) -> None:
        """Drop all cached prefixes. With `recompute_running` live requests lose their KV too, and compute it again."""
        if recompute_running:
            self.steps.drain()
            self.scheduler.preempt_all()
        if self.prefix_cache is not None:
            self.prefix_cache.reset()
        self._publish_kv_events()

    def _publish_kv_events(self) -> None:
        """Publish the events of the prefix cache since the last call, as one batch.

        If the batch is lost, the next one begins with AllBlocksCleared: subscribers may miss pages that are cached, and
        never count on pages that are not.
        """
        if self._kv_events is None or self._publisher is None:
            return
        if (events := self._kv_events.take()) and not self._publisher.publish(events):
            self._kv_events.cleared()

    def _forget_kv(self) -> None:
        self.reset_prefix_cache(recompute_running=True)
        if self._tiers is not None:
            self._tiers.drain()

    def poll_tiers(self) -> None:
        """Go on with moves of blocks between the tiers, while no step does. See TierMoves.poll."""
        if self._tiers is not None and not self._pause.obstacle:
            self._tiers.poll()
            self._tiers.send()

    def send_moves(self) -> None:
        """Begin the moves of blocks that were ordered since the last step. Needs tiers."""
        assert self._tiers is not None
        self._tiers.send()

    def save_prefixes(self) -> None:
        """Write cached prefixes to disk for the next start, if there is a disk tier. All requests must have ended."""
        if self._tiers is not None and not self._pause.obstacle:
            self.steps.drain()
            self._tiers.save()

    # ---- reports ---------------------------------------------------------------------------------------------------

    def graphs(self) -> list[dict[str, Any]]:
        """Return the graph cache's table, one dict of plain values per graph."""
        return self.executor.graphs.table()

    def stats(self) -> EngineStats:
        """Return a snapshot of all counters and gauges."""
        cache, scheduler = self.executor.graphs, self.scheduler
        entries = cache.captured_graphs()
        graphs = cache.stats.snapshot() | {
            "entries": list(entries.items()),
            "pool_bytes": cache.pool_bytes,
            "warm_ratio": cache.warm_ratio(),
        }
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + self.constraints.num_compiling + len(self._pause.held),
            kv_cache_usage=scheduler.pool.usage,
            prefix_cache_queries=self.prefix_cache.queries if self.prefix_cache else 0,
            prefix_cache_hits=self.prefix_cache.hits if self.prefix_cache else 0,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.prompt_tokens,
            generation_tokens=self.finisher.generated_tokens,
            draft_tokens=self.finisher.draft_tokens,
            accepted_tokens=self.finisher.accepted_tokens,
            drafts=self.finisher.drafts,
            accepted_by_position=dict(self.finisher.accepted_by_position),
            num_deferred=self.constraints.num_compiling,
            histograms={
                "iteration_tokens": self.steps.iteration_tokens.snapshot(),
                "request_preemptions": self.finisher.preemptions.snapshot(),
            },
            steps=self._num_steps,
            ended=dict(self.finisher.ended),
            graphs=graphs,
            warm={
                "mode": self.config.warmup,
                "captured": sum(entries.values()),
                "pending": len(cache.pending()),
                "ratio": cache.warm_ratio(),
            },
            weight_version=self.weight_version,
            last_error=self.steps.last_error,
            idle_check_failures=self._idle_check_failures,
            pause=self._pause.mode or "",
            released=self.sleep.released,
            weights_discarded=self.sleep.discarded,
            num_threads=self._num_threads(),
            **self._tier_stats(),
        )

    def _tier_stats(self) -> dict[str, Any]:
        tiers = self.scheduler.tiers
        if tiers is None:
            return {}
        return {
            "tier_hits": dict(tiers.counts.hits),
            "tier_bytes": tiers.used_bytes(),
            "tier_failed_reads": tiers.counts.failed_reads,
            "tier_dropped": tiers.counts.dropped,
        }

    def _num_threads(self) -> int:
        """Return the number of threads that a step on a CPU uses; 0 on a GPU."""
        workers = self.executor.capabilities
        if workers.device.type != "cpu":
            return 0
        return torch.get_num_threads() if workers.threads is None else workers.threads.count

    def idle_check(self) -> None:
        """Drain, then raise SchedulerInvariantError listing every live request and leaked page or slot, if any."""
        self.steps.drain()
        if self._tiers is not None:
            self._tiers.drain()
        self.scheduler.idle_check()
        if waiting := [one.request_id for one in self.live_requests()]:
            raise SchedulerInvariantError(f"not idle: requests {waiting} wait to be queued")

    def count_leaks(self) -> None:
        """Run `idle_check`. A leak is logged, counted and reported; it is not fatal."""
        try:
            self.idle_check()
        except EngineError as error:
            logger.error("%s", error)
            self._idle_check_failures += 1
            self.steps.last_error = str(error)

    def save_manifest(self) -> None:
        """Save the graph manifest, if there is one. Logs a failure once, until a save succeeds."""
        manifest = self.executor.graphs.manifest
        if manifest is None:
            return
        try:
            manifest.save()
            self._save_failed = False
        except ManifestError as error:
            if not self._save_failed:
                logger.warning("the graph manifest was not saved, and the engine goes on without it: %s", error)
            self._save_failed = True

    def close(self) -> None:
        """Close the workers: drop the graphs and release the model. The loop can't be used afterwards."""
        self.constraints.close()
        if self._publisher is not None:
            self._publisher.close()
        self.executor.close()


def _check_version(version: object) -> None:
    if not isinstance(version, str) or not version:
        raise RequestError(f"version={version!r} is invalid: give the new weights a non-empty name", param="version")

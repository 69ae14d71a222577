"""Rank 0 of a model that is split over several processes: its loop leads theirs.

Every rank has a whole loop, scheduler included, over its part of the model. Rank 0 tells the others each call that
changes its loop before it makes it, they make the same call, and nothing else is synchronised: what a loop does follows
from its calls alone, since logits are gathered and sampling has no state, so all ranks choose, enqueue and capture the
same. Owns which calls are told and what the loss of a rank means. Knows no pipes.
"""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from engine.checkpoint.source import ModelSource
from engine.config import EngineConfig
from engine.core.builder import load_manifest
from engine.core.loop import EngineLoop
from engine.core.operations import Operations
from engine.errors import EngineDead, EngineError
from engine.executor.shard import Shard, ShardPlan, plan_shards
from engine.executor.worker_group import DeviceReady, LoopReady, WeightsLoaded, WorkerGroup
from engine.loader.weights import READABLE_DTYPES
from engine.protocol.messages import Command, Report, TokenEvent
from engine.protocol.request import EngineRequest
from engine.utils.processes import log_format
from graph_cache.keys import GraphKey
from graph_cache.manifest import Manifest

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_SECONDS = 0.1
# Calls that may end in an EngineError, which is then the same on all ranks. Any other error leaves them apart.
RECOVERABLE_CALLS = frozenset({"add", "update_weights", "weights_changed", "operations.load_weights"})


class StartRank(NamedTuple):
    """The first message to a rank. `log` is the style of rank 0's log."""

    plan: ShardPlan
    rank: int
    rendezvous: str
    log: tuple[bytes, int]


class StartLoop(NamedTuple):
    """The second: what all loops have alike. The manifest is for the order of captures; only rank 0 saves it."""

    num_pages: int
    manifest: Manifest | None


class LoopCall(NamedTuple):
    """Each other one: a method of the loop, and where rank 0's loop is before it. None ends the rank."""

    method: str
    args: tuple
    fingerprint: tuple


class LoopFingerprint:
    """Where a loop is, in a few numbers: two ranks that differ would exchange what doesn't belong together."""

    def __init__(self, loop: EngineLoop):
        self._loop = loop
        self._tokens = 0

    def note(self, events: Iterable[TokenEvent]) -> None:
        """Take in the tokens of a step."""
        self._tokens = hash((self._tokens, *(token for event in events for token in event.token_ids)))

    def read(self) -> tuple:
        """The numbers as they are now."""
        loop, stats = self._loop, self._loop.runner.cache.stats
        return (
            loop.scheduler.num_running,
            loop.scheduler.num_waiting,
            loop.scheduler.pool.num_free,
            self._tokens,
            loop.weight_version,
            stats.captures.total(),
            stats.failed_captures.total(),
            stats.replays.total(),
        )


def start_leader(config: EngineConfig, source: ModelSource, eos_token_ids: tuple[int, ...] = ()) -> LeaderLoop:
    """Start the other ranks, load all parts, and put rank 0's loop together. As `build_loop`, for
    `tensor_parallel_size` above 1.

    Raises ConfigError or ModelError, EngineDead if a rank ends meanwhile; no process is left then.
    """
    plan = plan_shards(config, source, eos_token_ids)
    workers, shard = WorkerGroup(plan.ranks - 1), None
    try:
        workers.send_each(
            [StartRank(plan, rank, workers.rendezvous, _picklable_log_format()) for rank in range(1, plan.ranks)]
        )
        shard = Shard(plan, 0)
        workers.wait_for(DeviceReady)  # a rank that can't come is known before others wait for it
        _run_while_ranks_live(workers, lambda: shard.join(workers.rendezvous))
        pages = shard.load()
        pages = min(pages, *(loaded.num_pages for loaded in workers.wait_for(WeightsLoaded)))
        manifest = load_manifest(shard.sized, source, plan.weight_format)
        workers.broadcast(StartLoop(pages, manifest))
        make = functools.partial(LeaderLoop, workers=workers, shard=shard)
        loop = _run_while_ranks_live(
            workers, lambda: shard.loop(pages, manifest, make)
        )  # its kernels' memory is shared
        workers.wait_for(LoopReady)
        workers.watch(shard.abandon)
        atexit.register(loop.close)  # a process that ends with captured communicators may hang
        return loop
    except BaseException:
        workers.kill()
        if shard is not None:
            shard.leave()
        raise


def _run_while_ranks_live(workers: WorkerGroup, function: Callable[[], T]) -> T:
    """What `meet` gives, which the other ranks call too; raises EngineDead if one of them ends meanwhile, for which it
    would wait.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True, name="encore-meet")
    thread.start()
    while thread.is_alive():
        thread.join(POLL_SECONDS)
        workers.poll()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def _picklable_log_format() -> tuple[bytes, int]:
    """The style of this process's log, pickled by itself: a formatter may be of a class that others don't have."""
    formatter, level = log_format()
    try:
        return pickle.dumps(formatter), level
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        logger.debug("the other ranks log in a plain style: %s", error)
        return pickle.dumps(None), level


class LeaderLoop(EngineLoop):
    """The loop of rank 0. Its methods are EngineLoop's; those that change it are told to the other ranks first.

    Whatever else than a refusal breaks off a told call, on any rank, ends all of them (an interruption too): the ranks
    may be apart then. EngineDead says so, from that call or the next one.
    """

    fatal_failures = 1  # a step that failed here may have gone well elsewhere

    def __init__(self, *args: Any, workers: WorkerGroup, shard: Shard):
        super().__init__(*args)
        self._workers, self._shard = workers, shard
        self._fingerprint = LoopFingerprint(self)
        self._is_replicating = False
        self._closed = False
        self.operations = LeaderOperations(self)

    @contextmanager
    def replicated(self, method: str, *args: Any) -> Iterator[None]:
        """Make a call inside; the ranks are told of it, unless it is part of one that they were told of."""
        if self._is_replicating:
            yield
            return
        self._is_replicating = True
        try:
            self._workers.broadcast(LoopCall(method, args, self._fingerprint.read()))
            yield
        except BaseException as error:
            if isinstance(error, EngineDead) or (isinstance(error, EngineError) and method in RECOVERABLE_CALLS):
                raise
            reason = f"rank 0 broke off in {method}: {type(error).__name__}: {error}".rstrip(": ")
            if not isinstance(error, Exception):
                self._workers.fail(reason)
                raise
            raise EngineDead(self._workers.pending_failure() or self._workers.fail(reason)) from error
        finally:
            self._is_replicating = False
        if self._workers.failure is not None:
            self.drop_events()  # what came of it, without a rank, is nothing to hand out
            self._workers.check()

    @property
    def pids(self) -> list[int]:
        """The process ids of the other ranks, from rank 1 on."""
        return self._workers.pids

    # ---- the calls that are told -----------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        with self.replicated("add", request):
            super().add(request)

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        requests = list(requests)
        with self.replicated("submit", requests):
            super().submit(requests)

    def abort(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        if self._workers.failure is None:  # else whoever waits is told by the loop's end
            with self.replicated("abort", request_ids):
                super().abort(request_ids)

    def step(self) -> list[TokenEvent]:
        with self.replicated("step"):
            events = super().step()
        self._fingerprint.note(events)
        return events

    def drain(self, behind: int = 0) -> None:
        with self.replicated("drain", behind):
            super().drain(behind)

    # In which order graphs are captured depends on when it was asked for: rank 0's order goes with the call.

    def warm(
        self, progress: Callable[[int, int, Any], None] | None = None, wanted: Sequence[GraphKey] | None = None
    ) -> None:
        wanted = list(self.runner.cache.pending() if wanted is None else wanted)
        with self.replicated("warm", None, wanted):
            super().warm(progress, wanted)

    def capture_between_steps(self) -> bool:
        self._workers.check()  # an idle loop comes here too
        return super().capture_between_steps()

    def capture_next(self, key: GraphKey | None = None) -> bool:
        keys = self.runner.cache.pending() if key is None else [key]
        if not keys:
            return False
        with self.replicated("capture_next", keys[0]):
            return super().capture_next(keys[0])

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: str) -> int:
        """As EngineLoop's: whole tensors, of which each rank takes its part. Their copies pass through pipes, so from
        files `operations.load_weights` is faster.
        """
        if self._is_replicating:  # each rank has tensors of its own
            return super().update_weights(weights, version)
        items = [item if _is_sendable(item) else None for item in weights]
        with self.replicated("update_weights", len(items), version):
            for item in items:
                self._workers.broadcast(_sendable(item))
            return super().update_weights(items, version)

    def weights_changed(self, version: str) -> None:
        with self.replicated("weights_changed", version):
            super().weights_changed(version)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def serve(self, receive: Callable[[float], Command | None], send: Callable[[Report], None]) -> None:
        try:
            super().serve(receive, send)
        finally:
            self.close()

    def close(self) -> None:
        """End the other ranks, drop the graphs, then destroy the groups. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._workers.request_stop()
        try:
            super().close()
            self._shard.leave()  # together with the others
        finally:
            self._workers.end()
            gc.collect()  # model and loop know each other, and are in the way of whatever comes next


class LeaderOperations(Operations):
    """What an operator asks of all ranks; what isn't here is about rank 0 alone, or comes as a call of the loop."""

    _loop: LeaderLoop

    def invalidate(self) -> int:
        with self._loop.replicated("operations.invalidate"):
            return super().invalidate()

    def load_weights(self, path: str, version: str) -> int:
        path = os.path.abspath(path)
        with self._loop.replicated("operations.load_weights", path, version):
            return super().load_weights(path, version)


def _is_sendable(item: Any) -> bool:
    """Whether it is a (name, tensor) pair that could be sent; every rank will refuse anything else."""
    if not isinstance(item, (tuple, list)) or len(item) != 2 or not isinstance(item[1], torch.Tensor):
        return False
    tensor = item[1]
    return not tensor.is_meta and tensor.layout is torch.strided and tensor.dtype in READABLE_DTYPES


def _sendable(item: tuple[str, torch.Tensor] | None) -> tuple[str, torch.Tensor] | None:
    """The pair as it is sent: the tensor a copy on the CPU."""
    if item is None:
        return None
    name, tensor = item
    # A copy even of what is there: a view would be sent with all that lies behind it.
    return name, torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())

"""Rank 0 of a tensor-parallel engine: its loop leads the loops of the worker processes.

Every rank runs a complete loop, scheduler included, over its shard of the model. Rank 0 sends the workers each call
that changes its loop before it executes the call, and they execute it too. Nothing else is synchronised: logits are
gathered and sampling is stateless, so the same calls make all ranks schedule, launch and capture the same. This module
decides which calls are replicated and how the loss of a rank is handled.
"""

from __future__ import annotations

import atexit
import functools
import gc
import logging
import os
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
from engine.utils.processes.log import log_format
from graph_cache.keys import GraphKey
from graph_cache.manifest import Manifest

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_SECONDS = 0.1
# Calls that may raise an EngineError, which is then raised on all ranks. After any other error their states may differ.
RECOVERABLE_CALLS = frozenset({"add", "update_weights", "weights_changed", "operations.load_weights"})


class StartRank(NamedTuple):
    """The first message to a worker. `log` is rank 0's pickled log formatter and its level."""

    plan: ShardPlan
    rank: int
    rendezvous: str
    log: tuple[bytes, int]


class StartLoop(NamedTuple):
    """The second message: values that all loops share. The manifest sets the capture order; only rank 0 saves it."""

    num_pages: int
    manifest: Manifest | None


class LoopCall(NamedTuple):
    """Every later message: a method of the loop, and the fingerprint of rank 0's loop before the call.

    None instead of a LoopCall stops the worker.
    """

    method: str
    args: tuple
    fingerprint: tuple


class LoopFingerprint:
    """The state of a loop in a few numbers. Ranks whose states differ would combine unrelated values in collectives."""

    def __init__(self, loop: EngineLoop):
        self._loop = loop
        self._tokens = 0

    def note(self, events: Iterable[TokenEvent]) -> None:
        """Add the tokens of a step to the fingerprint."""
        self._tokens = hash((self._tokens, *(token for event in events for token in event.token_ids)))

    def read(self) -> tuple:
        """Return the current numbers."""
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
    """Start the workers, load all shards and build rank 0's loop: `build_loop` for `tensor_parallel_size` > 1.

    Raises ConfigError or ModelError, or EngineDead if a worker ends meanwhile; no process is left running then.
    """
    plan = plan_shards(config, source, eos_token_ids)
    workers, shard = WorkerGroup(plan.ranks - 1), None
    try:
        workers.send_each([StartRank(plan, rank, workers.rendezvous, log_format()) for rank in range(1, plan.ranks)])
        shard = Shard(plan, 0)
        workers.wait_for(DeviceReady)  # a worker without a usable device fails before other ranks wait for it
        _run_while_ranks_live(workers, lambda: shard.join(workers.rendezvous))
        pages = shard.load()
        pages = min(pages, *(loaded.num_pages for loaded in workers.wait_for(WeightsLoaded)))
        manifest = load_manifest(shard.sized, source, plan.weight_format)
        workers.broadcast(StartLoop(pages, manifest))
        make = functools.partial(LeaderLoop, workers=workers, shard=shard)
        loop = _run_while_ranks_live(
            workers, lambda: shard.loop(pages, manifest, make)
        )  # all ranks map each other's all-reduce memory here
        workers.wait_for(LoopReady)
        workers.watch(shard.abandon)
        atexit.register(loop.close)  # a process that exits with captured communicators may hang
        return loop
    except BaseException:
        workers.kill()
        if shard is not None:
            shard.leave()
        raise


def _run_while_ranks_live(workers: WorkerGroup, function: Callable[[], T]) -> T:
    """Run a collective `function` in a thread and return its value.

    Raises EngineDead if a worker ends meanwhile, instead of waiting for it forever.
    """
    values: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            values.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="encore-meet")
    thread.start()
    while thread.is_alive():
        thread.join(POLL_SECONDS)
        workers.poll()
    if errors:
        raise errors[0]
    return values[0]


class LeaderLoop(EngineLoop):
    """The loop of rank 0: an EngineLoop that sends each call that changes it to the workers first.

    If a replicated call fails on any rank with anything but a recoverable error (KeyboardInterrupt included), the
    states of the ranks may differ, so all ranks end. That call or the next one raises EngineDead.
    """

    fatal_failures = 1  # a step that fails here may succeed on other ranks

    def __init__(self, *args: Any, workers: WorkerGroup, shard: Shard):
        super().__init__(*args)
        self._workers, self._shard = workers, shard
        self._fingerprint = LoopFingerprint(self)
        self._is_replicating = False
        self._closed = False
        self.operations = LeaderOperations(self)

    @contextmanager
    def replicated(self, method: str, *args: Any) -> Iterator[None]:
        """Send a call to the workers, then execute it in the block. Calls nested in a replicated one are not sent."""
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
            reason = f"rank 0 failed in {method}: {type(error).__name__}: {error}".rstrip(": ")
            if not isinstance(error, Exception):
                self._workers.fail(reason)
                raise
            raise EngineDead(self._workers.pending_failure() or self._workers.fail(reason)) from error
        finally:
            self._is_replicating = False
        if self._workers.failure is not None:
            self.drop_events()  # results computed without a rank are invalid
            self._workers.check()

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, in order of rank from 1."""
        return self._workers.pids

    # ---- replicated calls ------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        with self.replicated("add", request):
            super().add(request)

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        requests = list(requests)
        with self.replicated("submit", requests):
            super().submit(requests)

    def abort(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        if self._workers.failure is None:  # after a failure, the end of the loop ends all requests
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

    # The capture order depends on when it is read, so rank 0 sends its own order with the call.

    def warm(
        self, progress: Callable[[int, int, Any], None] | None = None, wanted: Sequence[GraphKey] | None = None
    ) -> None:
        wanted = list(self.runner.cache.pending() if wanted is None else wanted)
        with self.replicated("warm", None, wanted):
            super().warm(progress, wanted)

    def capture_between_steps(self) -> bool:
        self._workers.check()  # so that an idle loop notices a failure too
        return super().capture_between_steps()

    def capture_next(self, key: GraphKey | None = None) -> bool:
        keys = self.runner.cache.pending() if key is None else [key]
        if not keys:
            return False
        with self.replicated("capture_next", keys[0]):
            return super().capture_next(keys[0])

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: str) -> int:
        """As EngineLoop.update_weights, with whole tensors: each rank takes its shard.

        The tensors are copied through pipes; to load weights from files, `operations.load_weights` is faster.
        """
        if self._is_replicating:  # part of a replicated call, so each rank has read the tensors itself
            return super().update_weights(weights, version)
        items: list[Any] = [item if _is_sendable(item) else None for item in weights]
        with self.replicated("update_weights", len(items), version):
            for item in items:
                self._workers.broadcast(_sendable(item))
            return super().update_weights(items, version)

    def weights_changed(self, version: str) -> None:
        with self.replicated("weights_changed", version):
            super().weights_changed(version)

    # ---- shutdown --------------------------------------------------------------------------------------------------

    def serve(self, receive: Callable[[float], Command | None], send: Callable[[Report], None]) -> None:
        try:
            super().serve(receive, send)
        finally:
            self.close()

    def close(self) -> None:
        """Stop the workers, drop the graphs, then destroy the process groups. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._workers.request_stop()
        try:
            super().close()
            self._shard.leave()  # at the same time as the workers
        finally:
            self._workers.end()
            gc.collect()  # model and loop form a reference cycle, which would keep their memory


class LeaderOperations(Operations):
    """Operations that run on all ranks. Inherited ones concern rank 0 only or are replicated as calls of the loop."""

    _loop: LeaderLoop

    def invalidate(self) -> int:
        with self._loop.replicated("operations.invalidate"):
            return super().invalidate()

    def load_weights(self, path: str, version: str) -> int:
        path = os.path.abspath(path)
        with self._loop.replicated("operations.load_weights", path, version):
            return super().load_weights(path, version)


def _is_sendable(item: Any) -> bool:
    """Return whether `item` is a (name, tensor) pair that can be pickled. Every rank rejects anything else."""
    if not isinstance(item, (tuple, list)) or len(item) != 2 or not isinstance(item[1], torch.Tensor):
        return False
    tensor = item[1]
    return not tensor.is_meta and tensor.layout is torch.strided and tensor.dtype in READABLE_DTYPES


def _sendable(item: tuple[str, torch.Tensor] | None) -> tuple[str, torch.Tensor] | None:
    """Return the pair with a copy of the tensor on the CPU."""
    if item is None:
        return None
    name, tensor = item
    # Copy CPU tensors too: pickling a view would send its whole storage.
    return name, torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())

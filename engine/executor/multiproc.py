"""The executor of several ranks: rank 0's worker in this process, each other worker in a separate process.

A step is one message to the other ranks, the StepInput that rank 0 executes too. Ranks synchronise only through their
collectives. Logits are gathered and sampling is stateless, so that equal steps give equal tokens on all ranks.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.errors import EngineDead, WeightUpdateError
from engine.executor.messages import BuildWorker, Call, SharedTensor, StartRank
from engine.executor.rank_state import StateTracker
from engine.executor.reports import describe_error
from engine.executor.worker_group import POLL_SECONDS, DeviceReady, WeightsLoaded, WorkerGroup, WorkerReady
from engine.scheduling.batch import Batch
from engine.utils.daemon_thread import in_background
from engine.utils.processes.log import log_format
from engine.worker.async_output import AsyncStepOutput
from engine.worker.startup import WorkerPlan, WorkerStart
from engine.worker.worker import Worker

logger = logging.getLogger(__name__)

T = TypeVar("T")


def start_ranks(plan: WorkerPlan) -> MultiprocExecutor:
    """Start the worker processes and load the model on all ranks.

    Raises ConfigError or ModelError, or EngineDead if a worker ends meanwhile; no process is left running then.
    """
    group, start = WorkerGroup(plan.num_ranks - 1), None
    try:
        log = log_format()
        group.send_each([StartRank(plan, rank, group.rendezvous, log) for rank in range(1, plan.num_ranks)])
        start = WorkerStart(plan)
        group.wait_for(DeviceReady)  # a worker without a usable device fails before other ranks wait for it
        _run_while_ranks_live(group, lambda: start.join(group.rendezvous))
        pages = start.load()
        pages = min(pages, *(loaded.num_pages for loaded in group.wait_for(WeightsLoaded)))
        group.broadcast(BuildWorker(pages))
        # all ranks map each other's all-reduce memory here
        worker = _run_while_ranks_live(group, lambda: start.build(pages))
        group.wait_for(WorkerReady)
        group.watch(worker.abandon)
        return MultiprocExecutor(worker, group)
    except BaseException:
        group.kill()
        if start is not None:
            start.leave()
        raise


def _run_while_ranks_live(group: WorkerGroup, function: Callable[[], T]) -> T:
    """Run a collective `function` in a thread and return its value.

    Raises EngineDead if a worker ends meanwhile, instead of waiting for it forever.
    """
    future = in_background(function, "encore-meet")
    while not future.done():
        wait([future], POLL_SECONDS)
        group.poll()
    return future.result()


class MultiprocExecutor:
    """An Executor with worker processes on this host. See Executor.

    Every message has a number and rank 0's state, which each rank compares with its own. If a rank fails, or one call
    succeeds on some ranks only, their states may differ, so all ranks end: that call or the next one raises EngineDead.
    """

    def __init__(self, worker: Worker, group: WorkerGroup):
        self.worker, self._group = worker, group
        self.capabilities, self.graphs = worker.capabilities, worker.runner.cache
        self._tracker = StateTracker(worker)
        self._num_calls = 0
        self._closed = False
        atexit.register(self.close)  # a process that exits with captured communicators may hang

    @property
    def pids(self) -> list[int]:
        return self._group.pids

    # ---- steps and calls -------------------------------------------------------------------------------------------

    def submit(self, batch: Batch) -> AsyncStepOutput:
        with self._must_succeed("execute"):
            step = self.worker.prepare(batch)
            self._broadcast("execute", step)
            output = self.worker.execute(step)
            self._tracker.add(output)
            return output

    def recover(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            with self._must_succeed("a step"):
                raise error

    def call(self, method: str, *args: Any) -> Any:
        with self._must_succeed(method):
            self._broadcast(method, *args)
            return getattr(self.worker, method)(*args)

    def _broadcast(self, method: str, *args: Any, has_reply: bool = False) -> int:
        """Send a call to all workers and return its number."""
        number = self._num_calls
        self._group.broadcast(Call(number, self._tracker.state(), method, args, has_reply))
        self._num_calls += 1
        return number

    @contextmanager
    def _must_succeed(self, what: str) -> Iterator[None]:
        """End the group if the block raises, also if it is interrupted by the user."""
        try:
            yield
        except EngineDead:
            raise
        except BaseException as error:
            reason = f"rank 0 failed in {what}: {describe_error(error)}"
            if not isinstance(error, Exception):
                self._group.fail(reason)
                raise
            # the loss of another rank may be the cause
            raise EngineDead(self._group.pending_failure() or self._group.fail(reason)) from error

    # ---- weights ---------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        """See Executor. CPU tensors are sent in shared memory; CUDA tensors are read where they are."""
        weights = list(weights)
        self._group.check()
        count = self.worker.stage_weights(weights)  # refuses what can't be sent, too
        sent: list[SharedTensor] = []
        try:
            return self._commit(count, lambda: self._share(weights, sent))
        except EngineDead:
            for tensor in sent:
                tensor.release()
            raise

    def load_weights(self, *paths: str) -> int:
        absolute = [os.path.abspath(path) for path in paths]
        self._group.check()
        count = self.worker.stage_files(*absolute)
        return self._commit(count, lambda: self._broadcast("stage_files", *absolute, has_reply=True))

    def _share(self, weights: Sequence[tuple[str, Tensor]], sent: list[SharedTensor]) -> int:
        """Send whole tensors to all workers to stage, add them to `sent`, and return the call's number."""

        def share() -> list[tuple[str, SharedTensor]]:
            shared = [(name, SharedTensor.of(tensor)) for name, tensor in weights]
            sent.extend(tensor for _, tensor in shared)
            return shared

        if not any(tensor.is_cuda for _, tensor in weights):
            return self._broadcast("stage_weights", share(), has_reply=True)
        number, state = self._num_calls, self._tracker.state()
        # one handle per receiver: torch frees a tensor's memory when each handle was released once
        self._group.send_each([Call(number, state, "stage_weights", (share(),), True) for _ in self.pids])
        self._num_calls += 1
        return number

    def _commit(self, count: int, stage: Callable[[], int]) -> int:
        """Write what rank 0 has staged, if all other ranks can stage it too; else keep the old weights everywhere."""
        try:
            with self._must_succeed("a weight update"):
                refusals = self._group.replies(stage())
                if refusals:
                    number = self._broadcast("discard_weights", has_reply=True)
                else:
                    number = self._broadcast("commit_weights", has_reply=True)
                    self.worker.commit_weights()
                self._group.replies(number)  # from now on no rank uses the caller's tensors
        finally:
            self.worker.discard_weights()
            if torch.cuda.is_initialized():
                torch.cuda.ipc_collect()  # frees the memory of tensors that the other ranks have dropped
        for rank, error in refusals.items():
            raise WeightUpdateError(f"rank {rank}: {error}") from error
        return count

    # ---- shutdown --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self._group.check()

    def close(self) -> None:
        """Stop the workers and close this one at the same time: they destroy their process groups together."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._group.request_stop()
        try:
            self.worker.close()
        finally:
            self._group.end()
            gc.collect()  # model and runner form a reference cycle, which would keep their memory

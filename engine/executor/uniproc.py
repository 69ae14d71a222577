"""The executor of one rank: calls the worker directly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from engine.scheduling.batch import Batch
from engine.utils.host_default import host_default
from engine.worker.async_output import AsyncStepOutput
from engine.worker.worker import Worker


class UniprocExecutor:
    """An Executor of one worker in this process, which runs whatever default device its caller has. See Executor."""

    pids = ()

    def __init__(self, worker: Worker):
        self.worker = worker
        self.capabilities, self.graphs = worker.capabilities, worker.runner.cache

    def submit(self, batch: Batch) -> AsyncStepOutput:
        with host_default():
            return self.worker.execute(self.worker.prepare(batch))

    def recover(self, error: BaseException) -> None:
        with host_default():
            self.worker.reset_after_failure()

    def call(self, method: str, *args: Any) -> Any:
        with host_default():
            return getattr(self.worker, method)(*args)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> int:
        with host_default():
            count = self.worker.stage_weights(weights)
            self.worker.commit_weights()
        return count

    def load_weights(self, *paths: str) -> int:
        with host_default():
            count = self.worker.stage_files(*paths)
            self.worker.commit_weights()
        return count

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.worker.close()

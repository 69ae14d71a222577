"""A StepInput holds all that a worker needs: a second worker that executes copies of them gives the same results."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from multiprocessing import Pipe
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from engine import EngineConfig
from engine.checkpoint.source import resolve_model
from engine.core.loop import EngineLoop
from engine.executor.messages import PackedMessage, receive
from engine.executor.uniproc import UniprocExecutor
from engine.scheduling.batch import Batch
from engine.scheduling.request import Request
from engine.worker.async_output import AsyncStepOutput
from engine.worker.startup import WorkerStart, plan_workers
from engine.worker.step_input import StepInput
from engine.worker.worker import Worker
from tests.engine.core.test_async_scheduling import run_workload
from tests.engine.core.test_loop import ARRIVALS, SMALL
from tests.engine.lively import SETTINGS


class MirrorExecutor(UniprocExecutor):
    """Executes every call on a second worker too, from messages, and keeps the steps and the results of both.

    The tests compare them, because the loop takes an error here for a failed step and goes on.
    """

    def __init__(self, worker: Worker, other: Worker):
        super().__init__(worker)
        self._other = other
        self._unread: deque[tuple[AsyncStepOutput, AsyncStepOutput]] = deque()
        self._sender, self._receiver = Pipe()
        self.steps: list[StepInput] = []
        self.results: list[tuple[Any, Any]] = []

    def submit(self, batch: Batch) -> AsyncStepOutput:
        self.read()
        step = self.worker.prepare(batch)
        self.steps.append(step)
        with PackedMessage(step) as packed:
            sending = threading.Thread(target=packed.send, args=(self._sender,))
            sending.start()
            copy = receive(self._receiver)
            sending.join()
        outputs = self.worker.execute(step), self._other.execute(copy)
        self._unread.append(outputs)
        return outputs[0]

    def call(self, method: str, *args: Any) -> Any:
        result = super().call(method, *args)
        self.results.append((result, getattr(self._other, method)(*pickle.loads(pickle.dumps(args)))))
        return result

    def read(self) -> None:
        """Keep the results of the steps that the loop has read."""
        while self._unread and self._unread[0][0].is_read:
            first, second = self._unread.popleft()
            self.results.append((first.read(), second.read()))
        self.results.append((self.worker.state(), self._other.state()))


def contents(value: Any) -> list[Any]:
    """All objects in nested dataclasses, lists and dicts."""
    if hasattr(type(value), "__slots__") and hasattr(type(value), "__dataclass_fields__"):
        inner = [getattr(value, name) for name in type(value).__dataclass_fields__]
    elif isinstance(value, dict):
        inner = [*value, *value.values()]
    else:
        inner = list(value) if isinstance(value, (list, tuple)) else []
    return [value, *(one for part in inner for one in contents(part))]


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "async"])
def mirrored(lively_model, request) -> EngineLoop:
    base = {"model": str(lively_model)} | SETTINGS | SMALL | {"max_num_batched_tokens": 16}
    plan = plan_workers(EngineConfig(**base, async_scheduling=request.param), resolve_model(str(lively_model)))
    starts = WorkerStart(plan), WorkerStart(plan)
    workers = [start.build(start.load()) for start in starts]
    yield EngineLoop(MirrorExecutor(*workers))
    for worker in workers:
        worker.close()


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=ARRIVALS)
def test_two_workers_fed_the_same_steps_give_the_same_results(mirrored, arrivals):
    executor = mirrored.executor
    executor.steps, executor.results = [], []
    failures = mirrored.stats().ended.get("error", 0)
    run_workload(mirrored, arrivals)
    executor.read()
    assert mirrored.stats().ended.get("error", 0) == failures
    assert len(executor.results) > len(executor.steps)
    for first, second in executor.results:
        assert first == second
    assert not any(isinstance(value, Request) for value in contents(executor.steps))

"""Check that all ranks are in the same state before each call."""

from __future__ import annotations

from collections import deque

from engine.executor.messages import RankState
from engine.worker.async_output import AsyncStepOutput
from engine.worker.worker import Worker


class StateTracker:
    """Tracks the state of one rank. Every rank adds the output of each of its steps.

    Tokens are compared once rank 0 has read them. A worker reads its own then, which also frees their place among the
    steps in flight.
    """

    def __init__(self, worker: Worker):
        self._worker = worker
        self._unread: deque[AsyncStepOutput] = deque()
        self._steps = self._tokens = 0

    def add(self, output: AsyncStepOutput) -> None:
        """Add the output of a step that was just enqueued."""
        self._unread.append(output)

    def state(self) -> RankState:
        """Return rank 0's state: with the tokens of the steps that were read."""
        while self._unread and self._unread[0].is_read:
            self._read_next()
        return RankState(self._steps, self._tokens, self._worker.state())

    def state_after(self, steps: int) -> RankState:
        """Return this rank's state after reading the results of its first `steps` steps."""
        while self._unread and self._steps < steps:
            self._read_next()
        return RankState(self._steps, self._tokens, self._worker.state())

    def _read_next(self) -> None:
        self._tokens = hash((self._tokens, *self._unread.popleft().read().tokens))
        self._steps += 1

"""Estimate how long the device needs for a step in flight, so that the next one is scheduled no earlier than needed.

A step may take tens of milliseconds. If the next step were scheduled when it begins, a request that arrives meanwhile
would wait for both.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from engine.scheduling.batch import Batch

MIN_PROMPT_TOKENS = 256
"""Steps with fewer prompt tokens are estimated by those without any, which take no longer."""

RECENT_STEPS, RECENT_DECODES = 32, 8
MIN_WAIT = 0.0005
"""Seconds: shorter waits are not worth it."""

SAFETY = 0.85
"""Share of the estimate after which the next step is scheduled: the device must not run out of work."""


class StepTimer:
    """Durations of recent steps.

    The estimate of a step with prompt tokens is the least time per prompt token of recent steps. Longer contexts, more
    decodes and small steps take more time per token, so an estimate of those is too short, and the next step is
    scheduled early. The estimate of other steps is the shortest of the most recent ones.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._rates: deque[float] = deque(maxlen=RECENT_STEPS)  # seconds per prompt token
        self._decodes: deque[float] = deque(maxlen=RECENT_DECODES)  # seconds of steps without prompt tokens
        self._host_times: deque[float] = deque(maxlen=RECENT_STEPS)  # seconds to schedule and enqueue a step
        self._last_finished = 0.0

    def now(self) -> float:
        """Return the time in seconds, for the other methods."""
        return self._clock()

    def enqueued(self, since: float) -> float:
        """Record that a step was enqueued, and return the time; the host began to schedule it at `since`."""
        now = self._clock()
        self._host_times.append(now - since)
        return now

    def finished(self, batch: Batch, enqueued: float) -> None:
        """Record that the results of a step, enqueued at that time, have arrived. Call it for all, in order."""
        now, tokens = self._clock(), prompt_tokens(batch)
        seconds = now - max(enqueued, self._last_finished)
        if tokens >= MIN_PROMPT_TOKENS:
            self._rates.append(seconds / tokens)
        elif not tokens:
            self._decodes.append(seconds)
        self._last_finished = now

    def seconds_to_wait(self, batch: Batch, enqueued: float) -> float:
        """Return for how long no step needs to be scheduled after this one, the only one in flight; 0 if at once."""
        end = max(enqueued, self._last_finished) + SAFETY * self._estimate(prompt_tokens(batch))
        wait = end - max(self._host_times, default=0.0) - self._clock()
        return wait if wait >= MIN_WAIT else 0.0

    def _estimate(self, tokens: int) -> float:
        """Return the seconds that a step with this many prompt tokens takes at least; 0 if unknown."""
        if tokens >= MIN_PROMPT_TOKENS:
            return tokens * min(self._rates, default=0.0)
        return min(self._decodes, default=0.0)


def prompt_tokens(batch: Batch) -> int:
    """Return the number of prompt tokens that a step computes."""
    return sum(chunk.length for chunk in batch.prefills)

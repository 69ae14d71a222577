"""Capture the graphs of the warm-up plan: all at once, or one by one between steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.config import ResolvedConfig
from engine.core.steps import Steps
from engine.executor.interface import Executor
from graph_cache.backends.interrupts import CaptureInterrupted
from graph_cache.core.keys import GraphKey

logger = logging.getLogger(__name__)

LOG_SECONDS = 5.0
MAX_STALL_SECONDS = 0.5  # for which a capture on a CPU may hold up live requests
ASKED = "asked"  # invalidation reason of graphs that an operator dropped
CPU_CAPTURE_SHARE, GPU_CAPTURE_SHARE = 0.05, 0.5  # of the time, while requests are live


class CaptureLog:
    """Logs how far the captures between steps are: at the first, every LOG_SECONDS, and after the last."""

    def __init__(self) -> None:
        self._began: float | None = None  # None: no capture since nothing was missing
        self._next = 0.0
        self._num_captured = 0

    def captured(self, missing: int) -> None:
        """Note that a graph was captured, and how many are missing."""
        now = time.monotonic()
        self._num_captured += 1
        if self._began is None:
            self._began, self._next = now, now + LOG_SECONDS
            logger.info("capturing %d graphs between requests; until then their steps run eager", 1 + missing)
        elif now >= self._next:
            self._next = now + LOG_SECONDS
            logger.info("captured %d of %d graphs", self._num_captured, self._num_captured + missing)

    def completed(self) -> None:
        """Note that no graph is missing."""
        if self._began is not None:
            seconds = time.monotonic() - self._began
            logger.info("captured %d graphs in %.1f s; none is missing", self._num_captured, seconds)
        self._began, self._num_captured = None, 0


class Captures:
    """Decides which graph is captured when. Not thread-safe."""

    def __init__(self, executor: Executor, config: ResolvedConfig, steps: Steps):
        self._executor, self._config, self._steps = executor, config, steps
        self._cache = executor.graphs
        self._log = CaptureLog()
        self._is_requested = False  # capture between steps also under warm-up `lazy`, until nothing is missing
        self._next_capture = 0.0
        self._waits_for_idle = False  # a capture took too long beside live requests

    def warm(
        self, progress: Callable[[int, int, Any], None] | None = None, wanted: Sequence[GraphKey] | None = None
    ) -> None:
        """Capture the graphs in `wanted`, or by default every missing graph of the warm-up plan.

        `progress(done, total, key)` is called before each capture, with its key, and after the last.
        """
        keys = list(self._cache.pending() if wanted is None else wanted)
        self._finish_masked()
        with self._cache.pool.session():  # one for all captures
            for done, key in enumerate(keys):
                if progress is not None:
                    progress(done, len(keys), key)
                self._executor.call("warm", [key])
            if progress is not None and keys:
                progress(len(keys), len(keys), keys[-1])

    def request(self) -> int:
        """Capture the missing graphs of the plan between steps, whatever the warm-up. Returns how many are missing."""
        missing = len(self._cache.pending())
        self._is_requested = missing > 0
        return missing

    def invalidate(self) -> int:
        """Drop every graph; the warm-up mode decides when each is captured again. Returns the number dropped."""
        return self._executor.call("invalidate", ASKED)

    def capture_between_steps(self, *, has_work: bool, is_interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Capture one missing graph of the warm-up plan; returns whether one was captured.

        Under warm-up `background` this captures all of them over time, under `full` only those dropped as stale. While
        requests are live (`has_work`), captures take at most a share of the time. A step may be in flight: the capture
        runs after it on the device and restores the static inputs. On a CPU a capture is given up soon after
        `is_interrupted()` is true, and tried again later; beside live requests also after MAX_STALL_SECONDS, and then
        tried again without them.
        """
        now = time.monotonic()
        is_lazy = self._config.warmup == "lazy" and not self._is_requested
        self._waits_for_idle &= has_work
        if is_lazy or (has_work and (now < self._next_capture or self._waits_for_idle)):
            return False
        backend = self._cache.pool.backend

        def has_stalled() -> bool:
            return has_work and time.monotonic() > now + MAX_STALL_SECONDS

        try:
            with backend.interrupts.allow(lambda: has_stalled() or is_interrupted()):
                captured = self.capture_next()
        except CaptureInterrupted:
            self._waits_for_idle = has_stalled()
            return False
        if not captured:
            self._log.completed()
            self._is_requested = False
            return False
        self._log.captured(len(self._cache.pending()))
        elapsed = time.monotonic() - now
        self._next_capture = now + elapsed / (CPU_CAPTURE_SHARE if backend.capture_runs else GPU_CAPTURE_SHARE)
        return True

    def capture_next(self, key: GraphKey | None = None) -> bool:
        """Capture the graph of `key`, or by default one missing graph of the plan. Returns False if none is missing."""
        if key is None:
            key = self._next_key()
        if key is None:
            return False
        self._finish_masked()
        self._executor.call("capture", key)
        return True

    def _finish_masked(self) -> None:
        """Finish the step that waits for masks, if any: a capture would overwrite its logits."""
        if self._steps.masked is not None:
            self._steps.drain()

    def _next_key(self) -> GraphKey | None:
        """Return the key to capture next; None if none is missing.

        On a CPU the smallest buckets come first, which the first requests use and which take the shortest time. On a
        GPU the order is the cache's, with the largest first: it decides how much memory the pool takes.
        """
        keys = self._cache.pending()
        if self._cache.pool.backend.capture_runs:
            return min(keys, key=lambda key: key.bucket, default=None)
        return next(iter(keys), None)

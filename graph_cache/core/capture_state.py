"""State machine of a capture.

Every capture has one CaptureState: a bucket's graphs (`cache.py`), the graphs of a module call
(`training/modules.py`), a training iteration (`training/iteration.py`), and the graphs of a pipeline stage
(`adapters/transformer_engine/graphs.py`).

    WARMING                   count_warmup(), last run     ->  PENDING
    PENDING, STALE, EVICTED   succeed()                    ->  CAPTURED
    PENDING, STALE, EVICTED   fail(reason)                 ->  FAILED
    CAPTURED                  drop(STALE or EVICTED)       ->  STALE or EVICTED
    FAILED                    drop(cause)                  ->  PENDING
    any                       drop(cause, warmup_runs > 0) ->  WARMING

PENDING, STALE and EVICTED may capture at the next run. FAILED may not until `drop`, since the same call would fail
again. A refused capture, of an operation that a graph cannot contain, is FAILED with the refusal as its reason. Pure
Python.
"""

from __future__ import annotations

import enum
from typing import Any

from graph_cache.core.keys import CAPTURE_FAILED, EVICTED, NOT_CAPTURED, STALE, WARMING_UP
from graph_cache.errors import GraphError
from graph_cache.utils.digest import Digest


class CaptureStatus(enum.Enum):
    """Status of a capture. The values appear as `state` in the graph table."""

    WARMING = WARMING_UP
    """Eager runs before the capture remain."""
    PENDING = NOT_CAPTURED
    """The next run may capture."""
    CAPTURED = "captured"
    """Runs replay."""
    FAILED = "failed"
    """The capture failed. Runs are eager until the failure is dropped."""
    STALE = STALE
    """The graphs were dropped because memory that they read may have moved. The next run may capture."""
    EVICTED = EVICTED
    """The graphs were dropped to free their memory. The next run may capture."""


_MAY_CAPTURE = frozenset((CaptureStatus.PENDING, CaptureStatus.STALE, CaptureStatus.EVICTED))


class CaptureState:
    """State of one capture.

    Args:
        warmup_runs: Eager runs before the capture.

    Attributes:
        status: The current status. Changed by the methods only.
        warmup_left: Eager runs that remain before the capture; 0 unless warming.
        failure: Reason of the failed or refused capture; None in every other status.
        replays: Replays since the capture.
    """

    __slots__ = ("failure", "replays", "status", "warmup_left")

    def __init__(self, warmup_runs: int = 0):
        self.failure: str | None = None
        self.replays = 0
        self.warmup_left = warmup_runs
        self.status = CaptureStatus.WARMING if warmup_runs > 0 else CaptureStatus.PENDING

    def __repr__(self) -> str:
        return f"CaptureState({self.status.value}, warmup_left={self.warmup_left}, replays={self.replays})"

    @property
    def captured(self) -> bool:
        """Whether runs replay."""
        return self.status is CaptureStatus.CAPTURED

    @property
    def failed(self) -> bool:
        """Whether the capture failed, so that runs are eager until `drop`."""
        return self.status is CaptureStatus.FAILED

    @property
    def may_capture(self) -> bool:
        """Whether the next run may capture."""
        return self.status in _MAY_CAPTURE

    @property
    def fallback_reason(self) -> str | None:
        """Why a run is eager now, as a value of the metrics' `reason` label; None if it replays."""
        if self.captured:
            return None
        return CAPTURE_FAILED if self.failed else self.status.value

    def count_warmup(self) -> None:
        """Count an eager run. Has an effect only while warming."""
        if self.status is CaptureStatus.WARMING:
            self.warmup_left -= 1
            if not self.warmup_left:
                self.status = CaptureStatus.PENDING

    def succeed(self) -> None:
        """Record that the capture succeeded. Raises GraphError unless it may capture."""
        if not self.may_capture:
            raise GraphError(f"a capture that is {self.status.value} cannot succeed: drop it first")
        self.status, self.replays = CaptureStatus.CAPTURED, 0

    def fail(self, reason: object) -> None:
        """Record that the capture failed or was refused.

        A capture of several graphs may fail more than once; the last reason stays. Raises GraphError if it is warming
        or captured.
        """
        if not (self.may_capture or self.failed):
            raise GraphError(f"a capture that is {self.status.value} cannot fail: {reason}")
        self.status, self.failure = CaptureStatus.FAILED, str(reason)

    def drop(self, cause: CaptureStatus, warmup_runs: int = 0) -> None:
        """Forget the graphs, the failure and the warm-up, so that the capture is tried again.

        Args:
            cause: STALE or EVICTED; the status of a dropped graph until the next capture. Without a graph the status
                becomes PENDING, or stays STALE or EVICTED.
            warmup_runs: Eager runs before the next capture. If there are any, the status becomes WARMING.
        """
        if cause not in (CaptureStatus.STALE, CaptureStatus.EVICTED):
            raise GraphError(f"a capture is dropped as stale or evicted, not as {cause.value}")
        if self.captured:
            self.status = cause
        elif not self.may_capture:
            self.status = CaptureStatus.PENDING
        if warmup_runs > 0:
            self.status = CaptureStatus.WARMING
        self.failure, self.replays, self.warmup_left = None, 0, max(0, warmup_runs)

    def row(
        self, *, engine: str = "", nbytes: int = 0, capture_seconds: float = 0.0, digest: Digest | None = None
    ) -> dict[str, Any]:
        """Return the columns that the tables of all kinds of captures share, as plain values."""
        return {
            "state": self.status.value,
            "replays": self.replays,
            "engine": engine,
            "bytes": nbytes,
            "capture_seconds": round(capture_seconds, 6),
            "failure": self.failure,
        } | (digest or Digest()).columns()

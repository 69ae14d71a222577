"""The state machine of captures, against a model of three facts: graphs, a failure, and warm-up runs."""

from __future__ import annotations

import json

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from graph_cache.core.capture_state import CaptureState, CaptureStatus
from graph_cache.core.keys import REASONS
from graph_cache.errors import CaptureRefused, GraphError
from graph_cache.utils.digest import Digest

CAUSES = (CaptureStatus.STALE, CaptureStatus.EVICTED)
WARMUPS = st.integers(0, 4)


class CaptureMachine(RuleBasedStateMachine):
    @initialize(warmup_runs=WARMUPS)
    def start(self, warmup_runs):
        self.state = CaptureState(warmup_runs)
        self.warmup, self.has_graph, self.failure, self.replays = warmup_runs, False, None, 0
        self.cause = None  # why the last graph was dropped, until the next capture

    def is_ready(self):
        return not (self.warmup or self.has_graph or self.failure)

    @rule()
    def run_eager(self):
        self.state.count_warmup()
        self.warmup = max(0, self.warmup - 1)

    @precondition(lambda self: self.has_graph)
    @rule()
    def replay(self):
        self.state.replays += 1
        self.replays += 1

    @rule()
    def succeed(self):
        if self.is_ready():
            self.state.succeed()
            self.has_graph, self.replays, self.cause = True, 0, None
        else:
            with pytest.raises(GraphError, match="cannot succeed"):
                self.state.succeed()

    @rule(reason=st.sampled_from(["out of memory", CaptureRefused("a host read")]))
    def fail(self, reason):
        if self.is_ready() or self.failure:
            self.state.fail(reason)
            self.failure, self.cause = str(reason), None
        else:
            with pytest.raises(GraphError, match="cannot fail"):
                self.state.fail(reason)

    @rule(cause=st.sampled_from(CAUSES), warmup_runs=WARMUPS)
    def drop(self, cause, warmup_runs):
        self.state.drop(cause, warmup_runs)
        if warmup_runs or self.warmup or self.failure:
            self.cause = None
        elif self.has_graph:
            self.cause = cause
        self.warmup, self.has_graph, self.failure, self.replays = warmup_runs, False, None, 0

    @rule(cause=st.sampled_from([one for one in CaptureStatus if one not in CAUSES]))
    def drop_for_another_cause(self, cause):
        with pytest.raises(GraphError, match="stale or evicted"):
            self.state.drop(cause)

    @invariant()
    def agrees_with_the_model(self):
        if self.has_graph:
            status = CaptureStatus.CAPTURED
        elif self.failure:
            status = CaptureStatus.FAILED
        elif self.warmup:
            status = CaptureStatus.WARMING
        else:
            status = self.cause or CaptureStatus.PENDING
        state = self.state
        assert (state.status, state.warmup_left) == (status, self.warmup)
        assert (state.captured, state.failed) == (self.has_graph, bool(self.failure))
        assert state.may_capture == self.is_ready()
        assert (state.failure, state.replays) == (self.failure, self.replays)

    @invariant()
    def a_run_replays_or_is_eager_for_a_known_reason(self):
        reason = self.state.fallback_reason
        assert reason is None if self.has_graph else reason in REASONS

    @invariant()
    def the_row_is_plain(self):
        digest = Digest("0123456789abcdef", 4, 16)
        row = self.state.row(engine="loop", nbytes=8, capture_seconds=0.1234567, digest=digest)
        assert json.loads(json.dumps(row)) == {
            "state": self.state.status.value,
            "replays": self.replays,
            "engine": "loop",
            "bytes": 8,
            "capture_seconds": 0.123457,
            "failure": self.failure,
            "digest": "0123456789abcdef",
            "nodes": 4,
            "unverified_bytes": 16,
        }


TestCaptureMachine = CaptureMachine.TestCase


def test_the_table_and_the_metrics_keep_their_names():
    """Dashboards and the status page read these values."""
    assert {status.name: status.value for status in CaptureStatus} == {
        "WARMING": "warming_up",
        "PENDING": "not_captured",
        "CAPTURED": "captured",
        "FAILED": "failed",
        "STALE": "stale_address",
        "EVICTED": "evicted",
    }
    state = CaptureState()
    state.fail("a host read")
    assert state.fallback_reason == "capture_failed"

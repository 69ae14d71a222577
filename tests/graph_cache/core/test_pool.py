"""GraphPool: serialised captures, the frozen garbage collector, and cleanup of flags after errors."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from graph_cache import GraphRunner
from graph_cache.backends.cpu import CpuBackend
from graph_cache.core.pool import GraphPool
from graph_cache.errors import CaptureError
from tests.support.waiting import PATIENCE, wait


@pytest.fixture
def pool():
    return GraphPool(CpuBackend())


class Cycle:
    def __init__(self):
        self.me = self


def test_garbage_is_not_collected_during_a_session_and_is_after_it(pool):
    with pool.session():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        dead = weakref.ref(Cycle())
        assert dead() is not None
    assert dead() is None
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_nested_sessions_thaw_with_the_outermost(pool):
    with pool.session():
        with pool.session():
            pass
        assert not gc.isenabled() and gc.get_freeze_count() > 0
    assert gc.isenabled()


def test_garbage_from_before_a_nested_session_is_collected_too(pool):
    with pool.session():
        dead = weakref.ref(Cycle())
        with pool.session():
            assert dead() is not None
    assert dead() is None


def test_a_collector_that_was_off_stays_off(pool):
    gc.disable()
    try:
        with pool.session(), pool.session():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_session_that_raises_leaves_collector_lock_and_flags_as_they_were(pool, error):
    with pytest.raises(error):
        with pool.session(), pool.warmup_flag(), pool.capture_flag(), pool.session():
            assert pool.capturing and pool.warming
            raise error
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert not pool.capturing and not pool.warming
    assert _free(pool)


def _free(pool):
    taken = []

    def take():
        taken.append(pool.lock.acquire(blocking=False))
        if taken[0]:
            pool.lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


def test_captures_of_two_threads_go_one_at_a_time(pool):
    inside, worst = [], []

    def capture(value):
        def fn():
            inside.append(value)
            worst.append(len(inside))
            for _ in range(20):
                value.mul_(1)
            inside.pop()

        for _ in range(5):
            GraphRunner(fn, pool, statics=lambda: [value]).capture()

    values = [torch.ones(4), torch.ones(4)]
    threads = [threading.Thread(target=capture, args=(value,)) for value in values]
    with pool.session():
        for thread in threads:
            thread.start()
        threads[0].join(0.05)
        assert not inside and all(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join()
    assert set(worst) == {1}


def test_flags_are_visible_to_other_threads(pool):
    seen = []
    with pool.warmup_flag():
        thread = threading.Thread(target=lambda: seen.append((pool.warming, pool.capturing)))
        thread.start()
        thread.join()
    assert seen == [(True, False)]
    assert (pool.warming, pool.capturing) == (False, False)


@pytest.mark.parametrize("when", ["warm-up", "capture"])
def test_an_interrupted_capture_closes_the_runner_and_rewinds(pool, when):
    value = torch.zeros(2)

    def fn():
        value.add_(1)
        if pool.capturing == (when == "capture"):
            raise KeyboardInterrupt

    runner = GraphRunner(fn, pool, statics=lambda: [value])
    with pytest.raises(KeyboardInterrupt):
        runner.capture()
    assert runner.state.value == "closed"
    assert value.tolist() == [0, 0]
    assert not pool.capturing and not pool.warming and not pool.backend.is_capturing() and gc.isenabled()


def test_an_error_in_statics_becomes_a_capture_error(pool):
    def statics():
        raise RuntimeError("out of memory")

    with pytest.raises(CaptureError, match="out of memory"):
        GraphRunner(lambda: None, pool, statics=statics).capture()
    assert gc.isenabled()


def test_a_closed_graph_releases_its_memory_even_while_referenced(pool):
    value = torch.zeros(1000)
    runner = GraphRunner(lambda: value.copy_((value + 1) * 2), pool, statics=lambda: [value])
    runner.capture()
    held = runner.bare_replay
    assert pool.nbytes() >= 4000
    runner.close()
    assert held is not None and pool.nbytes() == 0


def test_every_warm_up_run_starts_from_the_same_state(pool):
    value, seen = torch.zeros(1), []

    def fn():
        seen.append(value.item() if not pool.capturing else None)
        value.add_(1)

    runner = GraphRunner(fn, pool, statics=lambda: [value], warmup_runs=3)
    runner.capture()
    assert seen[:3] == [0, 0, 0]
    assert value.item() == 0


def wait_for_quiet(pool):
    """Wait until another thread waits in `quiet` for the turn to end: it holds the gate."""
    gate = pool._turn_gate  # noqa: SLF001

    def is_held():
        if gate.acquire(blocking=False):
            gate.release()
            return False
        return True

    wait(is_held, "the other thread")


def test_quiet_waits_for_a_turn_to_end_and_holds_the_next_one_off(pool):
    begun, done, order = threading.Event(), threading.Event(), []

    def run():
        with pool.turn():
            begun.set()
            done.wait(PATIENCE)
            order.append("turn")
        with pool.turn():
            order.append("next turn")

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(PATIENCE)
    threading.Thread(target=lambda: [wait_for_quiet(pool), done.set()]).start()
    with pool.quiet():
        order.append("quiet")
        time.sleep(0.05)
        order.append("still quiet")
    thread.join(PATIENCE)
    assert order == ["turn", "quiet", "still quiet", "next turn"]


def test_a_nested_turn_does_not_deadlock_with_a_waiting_quiet(pool):
    begun, order = threading.Event(), []

    def run():
        with pool.turn():
            begun.set()
            wait_for_quiet(pool)
            with pool.turn():
                order.append("inner")
        order.append("turn")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert begun.wait(PATIENCE)
    taken = []
    other = threading.Thread(target=lambda: [pool.quiet().__enter__(), taken.append(True)], daemon=True)
    other.start()
    thread.join(PATIENCE)
    other.join(PATIENCE)
    assert order == ["inner", "turn"] and taken

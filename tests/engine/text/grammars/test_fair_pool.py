"""The pool in which one client's many tasks make way for those of others."""

from __future__ import annotations

import threading

import pytest

from engine.text.grammars.fair_pool import FairPool
from tests.support.waiting import PATIENCE

SECONDS = PATIENCE


@pytest.fixture
def pool():
    pool = FairPool(4, "test")
    yield pool
    pool.cancel_all()
    pool.join()


def test_tasks_of_a_higher_rank_leave_threads_for_others(pool):
    release, started = threading.Event(), threading.Semaphore(0)

    def slow():
        started.release()
        release.wait(SECONDS)

    slow_ones = [pool.submit(rank, slow) for rank in range(20)]
    for _ in range(3):  # the first, and two others
        assert started.acquire(timeout=SECONDS)
    assert pool.submit(0, lambda: "done").result(SECONDS) == "done"
    assert not started.acquire(timeout=0.1)
    release.set()
    for future in slow_ones:
        future.result(SECONDS)


def test_tasks_run_by_rank_and_then_in_order():
    pool, release, order = FairPool(1, "test"), threading.Event(), []
    pool.submit(0, lambda: release.wait(SECONDS))
    futures = [pool.submit(rank, lambda rank=rank, turn=turn: order.append((rank, turn))) for turn, rank in
               enumerate([3, 0, 2, 0, 3])]  # fmt: skip
    release.set()
    for future in futures:
        future.result(SECONDS)
    assert order == [(0, 1), (0, 3), (2, 2), (3, 0), (3, 4)]
    pool.cancel_all()
    pool.join()


def test_a_cancelled_task_never_runs_and_an_error_is_the_futures(pool):
    release = threading.Event()
    busy = [pool.submit(0, lambda: release.wait(SECONDS)) for _ in range(4)]
    cancelled = pool.submit(0, lambda: pytest.fail("it ran"))
    assert cancelled.cancel()
    release.set()
    with pytest.raises(ZeroDivisionError):
        pool.submit(1, lambda: 1 // 0).result(SECONDS)
    assert pool.submit(1, lambda: 7).result(SECONDS) == 7
    assert [future.result(SECONDS) for future in busy] == [True] * 4


def test_a_closed_pool_cancels_what_waits_and_takes_no_more():
    pool, release = FairPool(1, "test"), threading.Event()
    running = pool.submit(0, lambda: release.wait(SECONDS))
    waiting = pool.submit(0, lambda: None)
    while not running.running():
        pass
    pool.cancel_all()
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(0, lambda: None)
    release.set()
    pool.join()
    assert running.result() is True


def test_a_client_with_many_tasks_leaves_a_thread_for_another(pool):
    release = threading.Event()
    slow = [pool.submit(0, lambda: release.wait(SECONDS), "many") for _ in range(20)]
    assert pool.submit(0, lambda: "done", "other").result(SECONDS) == "done"
    assert sum(future.running() for future in slow) <= 3
    release.set()
    assert all(future.result(SECONDS) for future in slow)

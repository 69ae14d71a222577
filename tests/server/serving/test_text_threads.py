"""Threads for texts: lanes, interruption, and their end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from server.http.errors import WireError
from server.http.sender import SENDER
from server.serving.text_threads import LANE_THREADS, Interrupted, Lane, TextThreads
from tests.support.waiting import PATIENCE, until


def loop_for_ever(seen=None):
    try:
        while True:
            pass
    except Exception:
        raise AssertionError("a handler of the work caught the interruption") from None
    except BaseException as error:
        if seen is not None:
            seen.append(type(error))
        raise


def working():
    return [thread for thread in threading.enumerate() if thread.name == "text"]


async def test_work_returns_its_value_or_raises_its_error():
    threads = TextThreads()
    assert await threads.run(lambda: 7, Lane.SMALL) == 7
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 / 0, Lane.SMALL)


async def test_an_endless_loop_is_interrupted_and_its_thread_ends():
    threads, seen = TextThreads(), []
    with pytest.raises(TimeoutError):
        await threads.run(lambda: loop_for_ever(seen), Lane.SMALL, seconds=0.1)
    await until(lambda: not working(), "the end of the work")
    assert seen == [Interrupted]
    assert await threads.run(lambda: 7, Lane.SMALL) == 7


async def test_a_cancelled_loop_is_interrupted_too_and_gives_its_place_back():
    threads = TextThreads()
    for _ in range(2 * LANE_THREADS):
        task = asyncio.create_task(threads.run(loop_for_ever, Lane.SMALL, seconds=60))
        await until(working, "the work")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not working(), "the end of the work")
    assert await threads.run(lambda: 7, Lane.SMALL) == 7


async def test_large_work_never_holds_small_work_and_has_few_threads():
    threads, stop = TextThreads(), threading.Event()
    large = [asyncio.create_task(threads.run(lambda: stop.wait(PATIENCE), Lane.LARGE)) for _ in range(10)]
    await until(lambda: len(working()) == LANE_THREADS, "the work of all places")
    assert await asyncio.wait_for(threads.run(lambda: 7, Lane.SMALL), PATIENCE) == 7
    for task in large:  # cancelled work that can't be interrupted still counts
        task.cancel()
    late = asyncio.create_task(threads.run(lambda: 8, Lane.LARGE))
    await asyncio.sleep(0.1)
    assert len(working()) == LANE_THREADS and not late.done()
    stop.set()
    assert await asyncio.wait_for(late, PATIENCE) == 8


async def test_work_that_ends_at_its_limit_breaks_nothing():
    """The interruption may arrive while the thread reports its end."""
    threads = TextThreads()
    for _ in range(300):
        try:
            await threads.run(lambda: time.sleep(0.001), Lane.SMALL, seconds=0.00105)
        except TimeoutError:
            continue
    await until(lambda: not working(), "the end of the work")
    assert await asyncio.gather(*(threads.run(lambda: 7, Lane.SMALL) for _ in range(LANE_THREADS + 1))) == [7] * 3


async def test_close_ends_every_call_and_waits_for_no_thread():
    threads, stop = TextThreads(), threading.Event()
    calls = [asyncio.create_task(threads.run(lambda: stop.wait(PATIENCE), Lane.SMALL)) for _ in range(3 * LANE_THREADS)]
    await until(lambda: len(working()) == LANE_THREADS, "the work of all places")
    threads.close()
    errors = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE)
    assert all(isinstance(error, WireError) and error.status == 503 for error in errors)
    with pytest.raises(WireError):
        await threads.run(lambda: 7, Lane.SMALL)
    stop.set()


async def test_a_senders_many_texts_hold_up_another_for_one_of_them_at_most():
    threads, begun, gates = TextThreads(), [], [threading.Event() for _ in range(10)]

    async def run(sender, work):
        SENDER.set(sender)  # of this task only
        await threads.run(work, Lane.PROCESS)

    def slow(number):
        begun.append(number)
        gates[number].wait(PATIENCE)

    many = [asyncio.create_task(run("many", lambda number=number: slow(number))) for number in range(10)]
    await until(lambda: len(begun) == LANE_THREADS, "the first texts")
    other = asyncio.create_task(run("other", lambda: None))
    await asyncio.sleep(0.05)
    gates[begun[0]].set()
    await asyncio.wait_for(other, PATIENCE)
    assert len(begun) <= LANE_THREADS + 1
    for gate in gates:
        gate.set()
    await asyncio.gather(*many)
    assert sorted(begun) == list(range(10))


async def test_a_cancelled_wait_holds_no_place():
    threads, stop = TextThreads(), threading.Event()
    calls = [asyncio.create_task(threads.run(lambda: stop.wait(PATIENCE), Lane.SMALL)) for _ in range(LANE_THREADS + 3)]
    await until(lambda: len(working()) == LANE_THREADS, "the work of all places")
    for call in calls[LANE_THREADS:]:
        call.cancel()
    stop.set()
    await asyncio.gather(*calls, return_exceptions=True)
    assert await asyncio.gather(*(threads.run(lambda: 7, Lane.SMALL) for _ in range(4))) == [7] * 4

"""Work that arrives in a burst begins in turns, in order."""

from __future__ import annotations

import asyncio

from server.http.turns import STARTS, Turns

BURST = 5 * STARTS + 3


async def test_a_burst_begins_in_order_over_several_iterations():
    turns, begun = Turns(), []
    for number in range(BURST):
        if turns.take(lambda number=number: begun.append(number)):
            begun.append(number)
    assert begun == list(range(STARTS))
    counts = []
    while len(begun) < BURST:
        await asyncio.sleep(0)
        counts.append(len(begun))
    assert begun == list(range(BURST))
    assert max(b - a for a, b in zip(counts, counts[1:], strict=False)) <= STARTS


async def test_later_work_takes_the_turns_that_are_left():
    turns = Turns()
    for _ in range(3):
        assert all(turns.take(lambda: None) for _ in range(STARTS))
        assert not turns.take(lambda: None)
        await asyncio.sleep(0)  # the turn of the one that waited
        await asyncio.sleep(0)
        await asyncio.sleep(0)

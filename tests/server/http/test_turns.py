"""A burst of requests begins in turns; probes don't wait for it."""

from __future__ import annotations

import asyncio

from server.http.turns import STARTS, Turns

BURST = 10 * STARTS


def scope(method: str) -> dict[str, str]:
    return {"type": "http", "method": method}


async def begun_in_order(cancelled: frozenset[int] = frozenset()) -> tuple[list[int], list[int]]:
    """Send a burst and then a probe. Return which requests began in order, and how many before the probe did."""
    begun: list[int] = []
    before_probe: list[int] = []

    async def app(scope, receive, send):
        if scope["method"] == "GET":
            before_probe.append(len(begun))
        else:
            begun.append(scope["number"])
            await asyncio.sleep(0)

    turns = Turns(app)
    tasks = [asyncio.create_task(turns(scope("POST") | {"number": n}, None, None)) for n in range(BURST)]
    tasks.append(asyncio.create_task(turns(scope("GET"), None, None)))
    await asyncio.sleep(0)
    for number in cancelled:
        tasks[number].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    again = asyncio.create_task(turns(scope("POST") | {"number": BURST}, None, None))
    await asyncio.wait_for(again, 10)
    return begun, before_probe


async def test_a_burst_begins_in_order_and_a_probe_waits_for_few_of_it():
    begun, before_probe = await begun_in_order()
    assert begun == list(range(BURST + 1))
    assert before_probe == [STARTS]


async def test_requests_whose_client_left_while_they_waited_take_no_turn():
    left = frozenset(range(STARTS, BURST - 3))
    begun, _ = await begun_in_order(left)
    assert begun == [n for n in range(BURST + 1) if n not in left]

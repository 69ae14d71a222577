"""The queue in which one client's many tasks make way for those of others."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.utils.fair_queue import FairQueue


def taken(queue):
    found = []
    while (one := queue.take()) is not None:
        found.append(one)
    return found


@pytest.mark.parametrize(("places", "held"), [(1, 1), (2, 2), (4, 3), (8, 5)])
def test_a_client_leaves_places_for_others(places, held):
    queue = FairQueue(places)
    for number in range(20):
        queue.push(number, "many")
    first = taken(queue)
    assert [item for _, item in first] == list(range(held))
    queue.push("other", "one")
    if held == places:
        queue.done(first[-1][0])
    assert [item for _, item in taken(queue)][:1] == ["other"]


def test_clients_take_turns():
    queue = FairQueue(1)
    for item in ("a1", "a2", "a3", "b1", "b2", "c1"):
        queue.push(item, item[0])
    order = []
    while (one := queue.take()) is not None:
        order.append(one[1])
        queue.done(one[0])
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_tasks_of_a_client_run_by_rank_and_unknown_clients_are_all_different():
    queue = FairQueue(4)
    for rank in (1, 0, 2, 0):
        queue.push(rank, "a", rank)
    assert [item for _, item in taken(queue)] == [0, 0, 1]
    unknown = FairQueue(4)
    for number in range(6):
        unknown.push(number)
    assert len(taken(unknown)) == 4


def test_a_place_that_is_given_back_is_used_by_the_same_client():
    queue = FairQueue(2)
    for number in range(4):
        queue.push(number, "a")
    first, second = taken(queue)
    queue.done(first[0])
    assert [item for _, item in taken(queue)] == [2]
    queue.done(second[0])
    assert [item for _, item in taken(queue)] == [3]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=30), st.randoms())
def test_all_tasks_run_and_a_client_that_waits_is_served_before_another_gets_a_second_place(places, tasks, rng):
    queue, running, done = FairQueue(places), [], 0
    waiting = Counter(client for client, _ in tasks)
    for number, (client, rank) in enumerate(tasks):
        queue.push(number, client, rank)
    while done < len(tasks):
        while (one := queue.take()) is not None:
            running.append(one[0])
            waiting[one[0].client] -= 1
            counts = Counter(ticket.client for ticket in running)
            assert len(running) <= places
            for other, count in waiting.items():
                assert not count or counts[other] + 1 >= counts[one[0].client] or one[0].rank < 2
        assert running, "no task may run, and some wait"
        queue.done(running.pop(rng.randrange(len(running))))
        done += 1
    assert len(queue) == 0

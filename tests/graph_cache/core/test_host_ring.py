"""HostRing: results in order, each read once, and none overwritten unread."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graph_cache.backends.cpu import CpuBackend
from graph_cache.core.host_ring import HostRing
from graph_cache.errors import GraphError


def ring(depth=2, rows=4, shape=()):
    return HostRing(CpuBackend(), rows, torch.int64, shape, depth)


def test_a_result_is_a_copy_of_the_value_at_push():
    slots, value = ring(), torch.arange(3)
    ticket = slots.push(value)
    value.fill_(9)
    first = ticket.read()
    assert first.tolist() == [0, 1, 2]
    slots.push(value).read()
    slots.push(value).read()
    assert first.tolist() == [0, 1, 2]


def test_slots_keep_their_trailing_shape():
    ticket = ring(shape=(2,)).push(torch.ones(3, 2, dtype=torch.int64))
    assert ticket.read().shape == (3, 2)


def test_an_unread_result_is_never_overwritten():
    slots = ring(depth=3)
    tickets = [slots.push(torch.full((1,), step)) for step in range(3)]
    for _ in range(2):
        with pytest.raises(GraphError, match="all 3 slots"):
            slots.push(torch.zeros(1, dtype=torch.int64))
    assert [ticket.read().item() for ticket in tickets] == [0, 1, 2]


def test_a_ticket_is_read_once_also_after_its_slot_was_used_again():
    slots = ring(depth=1)
    old = slots.push(torch.zeros(1, dtype=torch.int64))
    old.read()
    new = slots.push(torch.ones(1, dtype=torch.int64))
    with pytest.raises(GraphError, match="read once"):
        old.read()
    assert new.read().item() == 1


def test_slots_can_be_read_in_any_order_but_are_reused_in_push_order():
    slots = ring(depth=2)
    first, second = slots.push(torch.tensor([1])), slots.push(torch.tensor([2]))
    assert second.read().item() == 2
    with pytest.raises(GraphError, match="not read"):
        slots.push(torch.tensor([3]))
    assert first.read().item() == 1
    assert slots.push(torch.tensor([3])).read().item() == 3


@given(st.integers(1, 4), st.lists(st.booleans(), max_size=30))
def test_results_come_out_in_push_order(depth, pushes):
    slots, waiting, pushed, read = ring(depth), [], 0, []
    for push in pushes:
        if push and len(waiting) < depth:
            waiting.append(slots.push(torch.tensor([pushed])))
            pushed += 1
        elif waiting:
            read.append(waiting.pop(0).read().item())
    assert read == list(range(len(read)))

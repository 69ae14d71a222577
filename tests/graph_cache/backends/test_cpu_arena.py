"""Arena: live buffers never overlap, memory stays near the peak of live bytes, claims are released."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graph_cache.backends.cpu_arena import ALIGNMENT, RESERVED_BYTES, Arena, plan_layout
from graph_cache.backends.cpu_tape import Buffer
from graph_cache.errors import CaptureError

buffers = st.lists(
    st.builds(
        lambda size, first, length: Buffer(size, first, first + length),
        st.integers(0, 3000),
        st.integers(0, 30),
        st.integers(0, 10),
    ),
    max_size=40,
)


def aligned_size(buffer):
    return max(ALIGNMENT, -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT)


def overlap_in_time(one, other):
    return one.first <= other.last and other.first <= one.last


@given(buffers)
def test_no_two_buffers_that_live_at_once_overlap(many):
    offsets, need = plan_layout(many)
    for index, (one, start) in enumerate(zip(many, offsets, strict=True)):
        assert start % ALIGNMENT == 0
        assert start + aligned_size(one) <= need
        for other, begin in zip(many[:index], offsets, strict=False):
            if overlap_in_time(one, other):
                assert start + aligned_size(one) <= begin or begin + aligned_size(other) <= start


@given(buffers)
def test_memory_stays_near_the_most_that_lives_at_once(many):
    _, need = plan_layout(many)
    most = max((sum(aligned_size(one) for one in many if one.first <= now <= one.last) for now in range(50)), default=0)
    assert most <= need <= 2 * most


def test_a_chain_of_equal_buffers_needs_two_of_them():
    chain = [Buffer(1 << 20, step, step + 1) for step in range(100)]
    assert plan_layout(chain)[1] == 2 << 20


def test_inputs_are_not_overwritten_by_the_outputs_of_the_same_call():
    offsets, need = plan_layout([Buffer(64, 0, 1), Buffer(64, 1, 1)])
    assert sorted(offsets) == [0, 64] and need == 128


def test_freed_neighbours_join_into_room_for_a_larger_one():
    offsets, need = plan_layout([Buffer(64, 0, 1), Buffer(64, 0, 1), Buffer(64, 0, 9), Buffer(128, 2, 3)])
    assert offsets[3] == 0 and need == 192


def test_arena_bytes_are_those_of_the_largest_live_claim():
    arena = Arena()
    small, large = arena.claim(1000), arena.claim(50_000)
    assert arena.nbytes() == 50_000
    del large
    gc.collect()
    assert arena.nbytes() == 1000
    del small
    gc.collect()
    assert arena.nbytes() == 0


def test_trimming_gives_pages_back_and_keeps_what_live_claims_hold():
    arena = Arena()
    small, large = arena.claim(4096), arena.claim(1 << 20)
    kept = small.tensor(torch.uint8, (4096,), (1,), 0).fill_(7)
    large.tensor(torch.uint8, (1 << 20,), (1,), 0)[4096:].fill_(9)
    del large
    gc.collect()
    arena.trim()
    assert kept.eq(7).all()
    again = arena.claim(1 << 20)
    assert again.tensor(torch.uint8, (1 << 20,), (1,), 0)[4096:].eq(0).all()  # fresh pages from the system


def test_a_claim_beyond_the_reserved_space_is_an_error_that_says_so():
    with pytest.raises(CaptureError, match="reserves"):
        Arena().claim(RESERVED_BYTES + 1)


def test_claims_share_one_storage_and_views_have_the_asked_geometry():
    arena = Arena()
    one, other = arena.claim(256), arena.claim(512)
    view = one.tensor(torch.int32, (2, 3), (1, 2), 64)
    assert (view.shape, view.stride(), view.storage_offset()) == ((2, 3), (1, 2), 16)
    assert view.data_ptr() - other.tensor(torch.uint8, (1,), (1,), 0).data_ptr() == 64

"""Buckets: the default ladder, rounding up, limits, and parsing of user input."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_cache.core.buckets import MAX_BUCKETS, Buckets, default_ladder
from graph_cache.errors import GraphConfigError


def test_ladder_to_256_has_35_sizes():
    assert default_ladder(256) == (1, 2, 4, *range(8, 257, 8))
    assert len(default_ladder(256)) == 35


def test_ladder_widens_its_stride_past_256_and_doubles_it_with_every_octave():
    assert default_ladder(512) == (*default_ladder(256), *range(272, 513, 16))
    assert default_ladder(2048)[-32:] == (*range(544, 1025, 32), *range(1088, 2049, 64))


@pytest.mark.parametrize(
    ("top", "sizes"),
    [(1, (1,)), (2, (1, 2)), (4, (1, 2, 4)), (5, (1, 2, 4, 5)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 8, 9))],
)
def test_ladder_always_ends_in_the_maximum(top, sizes):
    assert default_ladder(top) == sizes


@given(st.integers(1, 5000))
def test_every_ladder_is_ascending_and_ends_in_the_maximum(top):
    ladder = default_ladder(top)
    assert ladder[-1] == top and list(ladder) == sorted(set(ladder))


@pytest.mark.parametrize("top", [0, -1, True, 2.0, "8", 1 << 40])
def test_an_invalid_maximum_is_rejected(top):
    with pytest.raises(GraphConfigError, match="max_num_seqs"):
        default_ladder(top)


@given(st.sets(st.integers(1, 300), min_size=1), st.integers(0, 320))
def test_round_up_is_the_smallest_bucket_that_holds_the_batch(sizes, rows):
    buckets = Buckets(tuple(sizes))
    holding = [size for size in sizes if size >= rows]
    expected = min(holding) if holding else None
    assert buckets.round_up(rows) == expected
    assert buckets.padding(rows) == (None if expected is None else expected - rows)


def test_a_negative_batch_is_an_error_and_not_an_index_from_the_end():
    with pytest.raises(ValueError, match="-1 rows"):
        Buckets((1, 8)).round_up(-1)


def test_buckets_sort_iterate_compare_and_stay_frozen():
    buckets = Buckets((8, 1, 4))
    assert list(buckets) == [1, 4, 8] and len(buckets) == 3 and buckets.max == 8 and 4 in buckets and 5 not in buckets
    assert buckets == Buckets((1, 4, 8)) and hash(buckets) == hash(Buckets((1, 4, 8)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        buckets.sizes = (1,)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((), "empty"),
        ((0, 1), "is 0"),
        ((-4,), "is -4"),
        ((1, True), "type bool"),
        ((1, 2.0), "type float"),
        (("8",), "type str"),
        ((1, 8, 8, 2, 2), r"\[2, 8\] are given twice"),
        (tuple(range(1, MAX_BUCKETS + 2)), "at most"),
    ],
)
def test_invalid_bucket_lists_are_rejected(sizes, message):
    with pytest.raises(GraphConfigError, match=message):
        Buckets(sizes)


def test_for_limit_takes_the_ladder_or_adds_the_maximum():
    assert Buckets.for_limit(20).sizes == default_ladder(20)
    assert Buckets.for_limit(20, [8, 4]).sizes == (4, 8, 20)
    assert Buckets.for_limit(8, iter([8, 4])).sizes == (4, 8)


def test_for_limit_refuses_sizes_beyond_the_maximum_and_says_what_to_do():
    with pytest.raises(GraphConfigError, match=r"\[32, 64\].*raise max_num_seqs to 64 or drop"):
        Buckets.for_limit(20, [8, 64, 32])
    with pytest.raises(GraphConfigError, match="empty"):
        Buckets.for_limit(20, [])

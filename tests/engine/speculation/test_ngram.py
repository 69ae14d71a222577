"""Draft tokens by prompt lookup, against a search of the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.drafter import DraftRow, accepted
from engine.speculation.ngram import NGRAM_SIZES, NgramDrafter, NgramIndex


def search(token_ids: list[int], count: int) -> list[int]:
    for size in NGRAM_SIZES:
        for end in range(len(token_ids) - 1, size - 1, -1):
            if len(token_ids) > size and token_ids[end - size : end] == token_ids[-size:]:
                return (token_ids[end:] * count)[:count]
    return []


@given(st.lists(st.integers(0, 3), max_size=60), st.data())
def test_proposals_equal_a_search_however_the_text_grows(token_ids, data):
    index, length = NgramIndex(), 0
    while length < len(token_ids):
        length = data.draw(st.integers(length + 1, len(token_ids)))
        count = data.draw(st.integers(1, 5))
        assert index.propose(token_ids[:length], count) == search(token_ids[:length], count)


def test_the_longest_match_wins_and_then_the_latest():
    assert NgramIndex().propose([1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], 2) == [9, 5]
    assert NgramIndex().propose([2, 3, 9, 7, 2, 3, 8, 1, 2, 3], 2) == [8, 1]
    assert NgramIndex().propose([1, 2, 3, 4], 2) == []


def test_a_text_that_repeats_is_continued():
    assert NgramIndex().propose([7, 8, 9, 7, 8, 9, 7, 8], 5) == [9, 7, 8, 9, 7]


def test_a_drafter_keeps_the_requests_of_a_batch_apart_until_they_end():
    drafter = NgramDrafter()
    rows = [DraftRow("a", [1, 2, 3, 1, 2], 2), DraftRow("b", [5, 6, 5, 6], 3), DraftRow("c", [1, 2], 4)]
    assert drafter.propose(rows) == [[3, 1], [5, 6, 5], []]
    assert drafter.propose([DraftRow("a", [1, 2, 3, 1, 2, 3], 1)]) == [[1]]
    drafter.forget("a")
    drafter.forget("unknown")
    assert drafter.propose([DraftRow("a", [4, 4, 4], 1)]) == [[4]]  # an index of other tokens would find nothing


def test_the_first_sampled_token_that_is_no_draft_is_the_last_accepted():
    assert accepted([7, 8], [7, 8, 9]) == [7, 8, 9]
    assert accepted([7, 8], [7, 5, 9]) == [7, 5]
    assert accepted([7, 8], [1, 8, 9]) == [1]

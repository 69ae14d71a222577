"""Groups of decode rows that share their first pages, for any tables."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.worker.prefix_groups import MIN_MEMBERS, group_by_prefix, max_groups_of

PAGE, WIDTH = 4, 6


def tables_of(rows: list[list[int]]) -> np.ndarray:
    return np.array([[*row, *[0] * (WIDTH - len(row))] for row in rows], np.int64).reshape(len(rows), WIDTH)


def group(rows: list[list[int]], positions: list[int] | None = None, max_groups: int = 4, max_members: int = 8):
    ends = [len(row) * PAGE for row in rows] if positions is None else positions
    return group_by_prefix(tables_of(rows), np.array(ends, np.int64), PAGE, max_groups, max_members)


@st.composite
def batches(draw):
    """Page tables that branch, as those of a prefix cache, and some that only look alike."""
    prefixes: list[list[int]] = [[]]
    fresh = iter(range(1, 10_000))
    for _ in range(draw(st.integers(0, 6))):
        prefixes.append([*draw(st.sampled_from(prefixes))[: WIDTH - 1], next(fresh)])
    rows, positions = [], []
    for _ in range(draw(st.integers(0, 20))):
        row = list(draw(st.sampled_from(prefixes)))
        while len(row) < WIDTH and draw(st.booleans()):
            row.append(next(fresh))
        if draw(st.integers(0, 9)) == 0:
            row = draw(st.permutations(row))
        rows.append(row)
        positions.append(draw(st.integers(0, max(0, len(row) * PAGE - 1))))
    return rows, positions


@settings(max_examples=300, deadline=None)
@given(batches(), st.integers(1, 4), st.integers(1, 8))
def test_members_read_the_same_pages_before_their_newest_token(batch, max_groups, max_members):
    rows, positions = batch
    found = group(rows, positions, max_groups, max_members)
    assert found.members.shape == (max_groups, max_members) and found.keys.shape == (len(rows),)
    saved, seen = 0, set()
    for index, line in enumerate(found.members.tolist()):
        members = [row - 1 for row in line if row]
        assert bool(members) == (index < found.num_groups) and line[: len(members)] == [row + 1 for row in members]
        if not members:
            continue
        keys = {int(found.keys[row]) for row in members}
        assert len(keys) == 1 and len(members) > 1 and not seen & set(members)
        (shared,) = keys
        pages = shared // PAGE
        assert shared == pages * PAGE > 0 and all(positions[row] >= shared for row in members)
        assert len({tuple(rows[row][:pages]) for row in members}) == 1 and 0 not in rows[members[0]][:pages]
        seen |= set(members)
        saved += (len(members) - 1) * shared
    assert found.saved == saved and found.num_groups <= max_groups_of(len(rows))  # others, no graph would read
    assert {row for row in range(len(rows)) if found.keys[row]} == seen


def test_prompts_that_branch_often_have_no_more_groups_than_the_graphs_of_their_bucket_read():
    rows = [[1, 2, 3, 4, 5, 100 + row] for row in range(4)]
    rows += [[*range(1, depth + 1), 10 * depth + row] for depth in (4, 3, 2, 1) for row in range(2)]
    found = group(rows, max_groups=64)
    assert (
        found.num_groups == max_groups_of(12) == 3 and found.keys.tolist() == [20] * 4 + [16] * 2 + [12] * 2 + [0] * 4
    )


def test_samples_of_one_prompt_are_one_group():
    found = group([[1, 2, 3, 10 + row] for row in range(6)])
    assert found.keys.tolist() == [12] * 6 and found.members[0].tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    assert (found.num_groups, found.saved) == (1, 5 * 12)


def test_prompts_within_a_common_system_prompt_are_grouped_by_their_own_pages():
    rows = [[1, 2, 10 + row // 4, 100 + row] for row in range(8)] + [[1, 2, 50], [1, 2, 51]]
    found = group(rows)
    assert found.keys.tolist() == [12] * 8 + [8] * 2
    assert found.members[:3, :4].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]] and found.num_groups == 3


def test_fewer_rows_than_the_least_group_share_nothing():
    found = group([[1, 2, 10 + row] for row in range(MIN_MEMBERS - 1)])
    assert found.num_groups == found.saved == 0 and not found.keys.any() and not found.members.any()


def test_large_groups_are_divided_and_the_best_kept():
    rows = [[1, 2, 100 + row] for row in range(11)] + [[3, 200 + row] for row in range(4)]
    found = group(rows, max_groups=2, max_members=5)
    assert found.members.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]] and found.saved == 2 * 4 * 8
    assert found.keys.tolist() == [8] * 10 + [0] * 5

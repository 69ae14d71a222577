"""Group decode rows whose first pages are the same, for attention that reads them once (cascade attention)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

MIN_MEMBERS = 4
"""Fewest rows that share a page for it to count as shared. There is at most one group per MIN_MEMBERS rows."""


class PrefixGroups(NamedTuple):
    """Groups of b rows that share their first pages. No row is in two groups.

    - keys int64 [b]: the number of leading tokens that a row shares with its group, whole pages; 0 without a group.
    - members int64 [max_groups, max_members]: row + 1 of each member, 0 for none. Used groups come first.
    - num_groups: number of used groups.
    - saved: number of tokens that attention need not read again.
    """

    keys: np.ndarray
    members: np.ndarray
    num_groups: int
    saved: int


def max_groups_of(rows: int) -> int:
    """Return the maximum number of groups among this many rows."""
    return -(-rows // MIN_MEMBERS)


def group_by_prefix(
    tables: np.ndarray, positions: np.ndarray, page_size: int, max_groups: int, max_members: int
) -> PrefixGroups:
    """Group rows by the longest sequence of first pages that at least MIN_MEMBERS rows share.

    `tables` int64 [b, P] are the rows' pages, 0 where a row has none; `positions` int64 [b] the positions of their
    newest tokens. Only pages before the newest token are shared, which no step writes again. Groups of more than
    `max_members` rows are divided. If there are more than `max_groups`, or than `max_groups_of(b)`, the groups that
    save most are kept.
    """
    keys, members = np.zeros(len(tables), np.int64), np.zeros((max_groups, max_members), np.int64)
    num_pages = np.minimum(positions // page_size, tables.shape[1])
    first_pages = np.where(num_pages > 0, tables[:, 0], 0)
    candidates = np.flatnonzero(_is_shared(first_pages))
    if not len(candidates):  # in most batches
        return PrefixGroups(keys, members, 0, 0)
    width = int(num_pages[candidates].max())
    is_read = np.arange(width) < num_pages[candidates, None]
    is_shared = _is_shared(np.where(is_read, tables[candidates, :width], 0))
    depths = np.where(is_shared.all(axis=1), width, is_shared.argmin(axis=1))
    rows_of: dict[tuple[int, int], list[int]] = {}
    for row, depth in zip(candidates.tolist(), depths.tolist(), strict=True):
        rows_of.setdefault((depth, int(tables[row, depth - 1])), []).append(row)

    found: list[tuple[int, int, list[int]]] = []
    for (depth, _), rows in rows_of.items():
        first = tables[rows[0], :depth]
        same = [row for row in rows if np.array_equal(tables[row, :depth], first)]
        for start in range(0, len(same), max_members):
            part = same[start : start + max_members]
            if len(part) > 1:
                found.append(((len(part) - 1) * depth * page_size, depth * page_size, part))
    found = sorted(found, key=lambda group: group[0], reverse=True)[: min(max_groups, max_groups_of(len(tables)))]

    for index, (_, shared, rows) in enumerate(found):
        keys[rows] = shared
        members[index, : len(rows)] = np.array(rows) + 1
    return PrefixGroups(keys, members, len(found), sum(saved for saved, _, _ in found))


def _is_shared(pages: np.ndarray) -> np.ndarray:
    """Return for each entry whether at least MIN_MEMBERS entries are equal to it; False for 0."""
    times = np.bincount(pages.ravel(), minlength=1)
    times[0] = 0
    return times[pages] >= MIN_MEMBERS

"""Packed log-probabilities behave like a list of TokenLogprob, and a step's rows become the records of its tokens."""

from __future__ import annotations

import copy
import gc
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.logprobs import TokenLogprob, TokenLogprobs, pack_records

LOGPROBS = st.floats(max_value=0.0, allow_nan=False) | st.just(-math.inf)
IDS = st.integers(0, 10) | st.integers(0, 2**62)
TABLES = st.dictionaries(IDS, LOGPROBS, max_size=6)
ENTRIES = st.builds(TokenLogprob, IDS, LOGPROBS, st.integers(1, 2**40), TABLES, TABLES)
LISTS = st.lists(ENTRIES | st.none(), max_size=6)
BOUNDS = st.none() | st.integers(-8, 8)


def packed(entries):
    found = TokenLogprobs()
    found += entries
    return found


@given(LISTS)
def test_a_packed_list_reads_like_the_list(entries):
    found = packed(entries)
    assert len(found) == len(entries) and bool(found) == bool(entries)
    assert list(found) == entries and list(reversed(found)) == entries[::-1]
    assert [found[index] for index in range(-len(entries), len(entries))] == entries * 2
    assert repr(found) == repr(entries)
    for one, other in zip(found, entries, strict=True):
        if other is not None:
            assert (list(one.top), list(one.named)) == (list(other.top), list(other.named))  # in order
            numbers = (one.token_id, one.rank, *one.top, *one.named)
            assert {type(number) for number in numbers} == {int} and type(one.logprob) is float
    with pytest.raises(IndexError):
        found[len(entries)]


@given(LISTS, BOUNDS, BOUNDS, st.sampled_from([None, 1, 2, -1, -3]))
def test_a_slice_is_a_copy(entries, start, stop, step):
    found = packed(entries)
    part = found[start:stop:step]
    assert isinstance(part, TokenLogprobs) and part == entries[start:stop:step]
    part.append(None)
    assert found == entries


@given(LISTS, LISTS)
def test_entries_are_equal_if_those_of_the_lists_are(entries, others):
    found, more = packed(entries), packed(others)
    assert (found == more) == (entries == others) == (found == others) == (entries == more)
    assert (found != more) == (entries != others)
    assert found != tuple(entries) and found != "x"


def test_equality_is_that_of_the_values():
    one, other = TokenLogprob(1, 0.0, 1, {1: -1.0, 2: -2.0}), TokenLogprob(1, -0.0, 1, {2: -2.0, 1: -1.0})
    assert one == other and packed([one]) == packed([other])


@given(st.lists(LISTS, max_size=4))
def test_appending_in_place_is_that_of_lists(parts):
    found, by_extend, by_append, wanted = packed([]), packed([]), packed([]), []
    alias = found
    for number, part in enumerate(parts):
        found += packed(part) if number % 2 else part
        by_extend.extend(iter(part))
        for entry in part:
            by_append.append(entry)
        wanted += part
    assert alias is found and found == by_extend == by_append == wanted


@given(LISTS)
def test_copies_are_independent(entries):
    found = packed(entries)
    for one in (pickle.loads(pickle.dumps(found)), copy.copy(found), copy.deepcopy(found)):
        assert isinstance(one, TokenLogprobs) and one == found == entries
        one.append(None)
        assert found == entries


def test_a_token_takes_few_bytes_and_no_tracked_object():
    entries = [TokenLogprob(100_000 + step, -1.5, 1, {step + k: -k - 0.5 for k in range(5)}) for step in range(100)]
    found = packed(entries)
    assert len(pickle.dumps(found)) < 100 * 120
    assert not any(map(gc.is_tracked, found.records))


@given(LISTS)
def test_alternatives_are_counted(entries):
    wanted = sum(len(one.top) + len(one.named) for one in entries if one is not None)
    assert packed(entries).num_alternatives == wanted


@st.composite
def steps(draw):
    """Entries of a step's rows, how many alternatives each wants, and how many each row has columns for."""
    entries, counts = [], []
    k = draw(st.integers(0, 4))
    for _ in range(draw(st.integers(0, 5))):
        count = draw(st.sampled_from([k, draw(st.integers(0, k))]))
        top = draw(st.dictionaries(IDS, LOGPROBS.filter(math.isfinite), max_size=count))
        entry = TokenLogprob(draw(IDS), draw(LOGPROBS), draw(st.integers(1, 9)), top, draw(TABLES))
        entries.append(draw(st.sampled_from([entry, entry, None])))
        counts.append(count)
    return entries, counts, k


@given(steps())
def test_rows_of_a_step_become_records(step):
    entries, counts, k = step
    named = [() if one is None else tuple(one.named) for one in entries]
    rows = np.full((3 + 2 * k, len(entries)), -7)  # columns first, as the kernels write them
    floats, named_values = rows.view(np.float64), np.full((len(entries), max(map(len, named), default=0)), math.nan)
    floats[3::2] = -math.inf
    for row, (entry, count) in enumerate(zip(entries, counts, strict=True)):
        if entry is None:
            continue
        rows[0, row], floats[1, row], rows[2, row] = entry.token_id, entry.logprob, entry.rank
        for place, (token_id, value) in enumerate(entry.top.items()):
            floats[3 + 2 * place, row], rows[4 + 2 * place, row] = value, token_id
        floats[3 + 2 * count :: 2, row] = -1.0  # not asked for: kernels leave what an earlier step wrote
        named_values[row, : len(entry.named)] = list(entry.named.values())
    assert TokenLogprobs(pack_records(rows.T, counts, named_values, named)) == entries

"""Tuner: against brute force, against the default ladder, and over increasing budgets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_cache.core.buckets import default_ladder
from graph_cache.errors import GraphConfigError
from graph_cache.tuning.tuner import expected_padding, tune


def histograms(max_size: int, entries: int):
    return st.dictionaries(st.integers(1, max_size), st.integers(1, 1000), min_size=1, max_size=entries)


def brute_force(candidates, max_size, histogram, allowed) -> float:
    """Return the least padding over all subsets of `candidates` plus the maximum that `allowed` accepts."""
    others = sorted(set(candidates) - {max_size})
    lists = (
        (*chosen, max_size) for count in range(len(others) + 1) for chosen in itertools.combinations(others, count)
    )
    return min(expected_padding(sizes, histogram) for sizes in lists if allowed(sizes))


def test_expected_padding_by_hand():
    assert expected_padding((4, 8), {3: 2, 4: 1, 5: 1}) == (1 + 1 + 0 + 3) / 4
    assert expected_padding((8,), {}) == 0.0


def test_tune_by_hand():
    tuning = tune({2: 90, 24: 10}, max_size=32, max_buckets=2, bytes_of=lambda size: 100 + size)
    assert tuning.sizes == (2, 32)
    assert tuning.expected_padding_rows == 8 * 10 / 100
    assert tuning.padding_fraction == 80 / (90 * 2 + 10 * 32)
    assert (len(tuning.sizes), tuning.bytes) == (2, 234)


def test_small_batches_are_not_dropped_first():
    # Dropping small sizes first would pad a batch of 2 to 24.
    assert 2 in tune({2: 1000, 24: 1, 30: 1}, max_size=32, max_buckets=3).sizes


@settings(deadline=None, max_examples=150)
@given(histograms(9, 9), st.integers(1, 9))
def test_count_budget_equals_brute_force_over_all_lists(histogram, graphs):
    tuning = tune(histogram, max_size=9, max_buckets=graphs)
    best = brute_force(range(1, 10), 9, histogram, lambda sizes: len(sizes) <= graphs)
    assert tuning.expected_padding_rows == best == expected_padding(tuning.sizes, histogram)
    assert len(tuning.sizes) <= graphs


@settings(deadline=None, max_examples=150)
@given(histograms(9, 9), st.lists(st.integers(0, 20), min_size=9, max_size=9), st.integers(0, 60), st.booleans())
def test_byte_budget_equals_brute_force_over_all_lists(histogram, increments, spare, affine):
    prices = list(itertools.accumulate(increments)) if not affine else [7 + size for size in range(9)]
    budget = prices[8] + spare
    tuning = tune(histogram, max_size=9, max_bytes=budget, bytes_of=lambda size: prices[size - 1])
    best = brute_force(range(1, 10), 9, histogram, lambda sizes: sum(prices[size - 1] for size in sizes) <= budget)
    assert tuning.expected_padding_rows == best
    assert tuning.bytes == sum(prices[size - 1] for size in tuning.sizes) <= budget


@settings(deadline=None, max_examples=200)
@given(
    histograms(30, 9), st.lists(st.integers(0, 50), min_size=30, max_size=30), st.integers(0, 150), st.integers(1, 9)
)
def test_both_budgets_with_any_prices_equal_brute_force_over_observed_sizes(histogram, prices, spare, graphs):
    budget = prices[29] + spare
    tuning = tune(histogram, max_size=30, max_buckets=graphs, max_bytes=budget, bytes_of=lambda size: prices[size - 1])
    best = brute_force(
        histogram, 30, histogram,
        lambda sizes: len(sizes) <= graphs and sum(prices[size - 1] for size in sizes) <= budget,
    )  # fmt: skip
    assert tuning.expected_padding_rows == best
    assert len(tuning.sizes) <= graphs and tuning.bytes <= budget


def test_a_dominated_label_with_fewer_graphs_is_kept_when_graphs_are_limited():
    # A partial list with more padding and bytes leads to the best result here, because it leaves more graphs.
    histogram = {1: 13, 2: 23, 4: 8, 6: 11, 7: 16}
    prices = {1: 0, 2: 2, 4: 5, 6: 0, 7: 4, 17: 9}
    tuning = tune(histogram, max_size=17, max_buckets=4, max_bytes=19, bytes_of=prices.__getitem__)
    best = brute_force(
        histogram, 17, histogram, lambda sizes: len(sizes) <= 4 and sum(prices[size] for size in sizes) <= 19
    )
    assert tuning.expected_padding_rows == best


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 300))
def test_never_worse_than_the_default_ladder_of_the_same_length(data, max_size):
    histogram = data.draw(histograms(max_size, 60))
    ladder = default_ladder(max_size)
    tuning = tune(histogram, max_size=max_size, max_buckets=len(ladder))
    assert tuning.expected_padding_rows <= expected_padding(ladder, histogram)
    assert len(tuning.sizes) <= len(ladder) and tuning.sizes[-1] == max_size


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(20, 120))
def test_never_worse_than_the_default_ladder_in_the_same_bytes(data, max_size):
    histogram = data.draw(histograms(max_size, 40))
    ladder = default_ladder(max_size)

    def price(size):
        return 1000 + 3 * size

    tuning = tune(histogram, max_size=max_size, max_bytes=sum(map(price, ladder)), bytes_of=price)
    assert tuning.expected_padding_rows <= expected_padding(ladder, histogram)


@settings(deadline=None, max_examples=40)
@given(histograms(60, 25))
def test_more_graphs_never_pad_more(histogram):
    paddings = [tune(histogram, max_size=60, max_buckets=n).expected_padding_rows for n in range(1, 27)]
    assert paddings == sorted(paddings, reverse=True)
    assert paddings[-1] == 0


@settings(deadline=None, max_examples=30)
@given(histograms(60, 20), st.lists(st.integers(1, 40), min_size=60, max_size=60))
def test_more_bytes_never_pad_more(histogram, prices):
    def price(size):
        return prices[size - 1]

    budgets = range(price(60), price(60) + 200, 23)
    paddings = [tune(histogram, max_size=60, max_bytes=n, bytes_of=price).expected_padding_rows for n in budgets]
    assert paddings == sorted(paddings, reverse=True)


def test_no_traffic_and_no_budget_is_the_default_ladder():
    tuning = tune({}, max_size=100)
    assert tuning.sizes == default_ladder(100)
    assert (tuning.expected_padding_rows, tuning.padding_fraction, tuning.bytes) == (0.0, 0.0, None)


def test_no_traffic_within_a_budget_keeps_the_maximum_and_the_count():
    tuning = tune({}, max_size=100, max_buckets=5)
    assert len(tuning.sizes) == 5 and tuning.sizes[-1] == 100
    assert set(tuning.sizes) <= set(default_ladder(100))


def test_without_a_budget_as_many_buckets_as_the_ladder_has():
    tuning = tune(dict.fromkeys(range(1, 101), 1), max_size=100)
    assert len(tuning.sizes) == len(default_ladder(100))


def test_sizes_counted_zero_times_are_not_captured():
    assert tune({3: 0, 5: 4, 700: 0}, max_size=8, max_buckets=8).sizes == (5, 8)


def test_full_size_count_problem_is_exact_in_reasonable_time():
    # Every size once: the best 64 buckets are evenly spaced.
    tuning = tune(dict.fromkeys(range(1, 513), 1), max_size=512, max_buckets=64)
    assert tuning.expected_padding_rows == 3.5


@pytest.mark.parametrize(
    ("histogram", "budget", "message"),
    [
        ({9: 1, 12: 3}, {}, r"\[9, 12\] rows, beyond the largest bucket, 8"),
        ({0: 1}, {}, "batch of 0 rows"),
        ({1.0: 1}, {}, "batch of 1.0 rows"),
        ({1: -2}, {}, "counts -2"),
        ({1: 0.5}, {}, "counts 0.5"),
        ({1: 1}, {"max_buckets": 0}, "max_buckets is 0"),
        ({1: 1}, {"max_bytes": 100}, "without bytes_of"),
        ({1: 1}, {"max_bytes": -1, "bytes_of": len}, "max_bytes is -1"),
        ({1: 1}, {"max_bytes": 99, "bytes_of": lambda size: 100}, "max_size=8, which costs 100"),
        ({1: 1}, {"max_bytes": 99, "bytes_of": lambda size: 0.5}, r"bytes_of\(1\) is 0.5"),
    ],
)
def test_invalid_input_is_rejected(histogram, budget, message):
    with pytest.raises(GraphConfigError, match=message):
        tune(histogram, max_size=8, **budget)


def test_padding_of_a_batch_that_no_bucket_holds_is_refused():
    with pytest.raises(GraphConfigError, match="beyond the largest bucket"):
        expected_padding((1, 8), {9: 1})

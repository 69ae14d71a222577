"""Token budgets of an encoder: against brute force over all lists, and invalid input."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_cache.errors import GraphConfigError
from graph_cache.tuning.budget_tuner import tune_token_budgets

histograms = st.dictionaries(st.integers(1, 14), st.integers(1, 100), min_size=1, max_size=9)


def cost_of(budgets, histogram, eager_share):
    """Count the cost microbatch by microbatch."""
    return sum(
        batches * (budgets[bisect_left(budgets, size)] - size if size <= budgets[-1] else eager_share * size)
        for size, batches in histogram.items()
    )


@settings(deadline=None, max_examples=250)
@given(histograms, st.integers(1, 5), st.sampled_from([1, 2, 4]), st.fractions(0, 2, max_denominator=5))
def test_budgets_equal_brute_force_over_all_lists(histogram, count, multiple, share):
    found = tune_token_budgets(histogram, max_budgets=count, multiple_of=multiple, eager_share=share)
    candidates = range(multiple, 17, multiple)
    lists = [one for k in range(1, count + 1) for one in itertools.combinations(candidates, k)]
    best = min(cost_of(one, histogram, share) for one in lists if one[-1] >= min(histogram))
    batches = sum(histogram.values())
    assert cost_of(found.budgets, histogram, share) == best
    assert found.expected_cost == pytest.approx(float(Fraction(best) / batches))
    assert len(found.budgets) <= count and all(one % multiple == 0 for one in found.budgets)
    covered = {size: number for size, number in histogram.items() if size <= found.budgets[-1]}
    assert found.coverage == sum(covered.values()) / batches
    assert found.expected_padding == pytest.approx(cost_of(found.budgets, covered, 0) / batches)


def test_a_rare_huge_microbatch_runs_eager():
    histogram = {784: 990, 1024: 9_000, 65_536: 1}
    assert tune_token_budgets(histogram, max_budgets=1).budgets == (1024,)
    assert tune_token_budgets(histogram, max_budgets=2).budgets == (784, 1024)
    assert tune_token_budgets(histogram, max_budgets=3).budgets == (784, 1024, 65_536)


def test_one_size_needs_one_budget():
    assert tune_token_budgets({784: 5}, max_budgets=8).budgets == (784,)
    assert tune_token_budgets({786: 5}, max_budgets=8, multiple_of=4).budgets == (788,)


def test_exact_budgets_beat_powers_of_two():
    histogram = {196 * images: 400 // images for images in range(1, 25)}
    powers = [256, 1024, 2048, 8192]
    assert cost_of(tune_token_budgets(histogram).budgets, histogram, 0.5) < 0.5 * cost_of(powers, histogram, 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patches": {}}, "no microbatches"),
        ({"patches": [784]}, "give a mapping"),
        ({"patches": {0: 1}}, "0 patches"),
        ({"patches": {4: -1}}, "-1 microbatches"),
        ({"max_budgets": 0}, "max_budgets is 0"),
        ({"multiple_of": 0}, "multiple_of is 0"),
        ({"eager_share": -0.1}, "eager_share is -0.1"),
        ({"eager_share": float("nan")}, "eager_share is nan"),
        ({"eager_share": True}, "eager_share is True"),
    ],
)
def test_invalid_input_is_refused(options, message):
    with pytest.raises(GraphConfigError, match=message):
        tune_token_budgets(**{"patches": {4: 1}} | options)

"""Maximum of packed sequences: against brute force, the range of costs it is best for, and invalid input."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from statistics import NormalDist

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_cache.errors import GraphConfigError
from graph_cache.tuning.packed_tuner import histogram_of, packed_cost, tune_packed

histograms = st.dictionaries(st.integers(1, 40), st.integers(1, 500), min_size=1, max_size=12)
costs = st.one_of(st.integers(0, 200), st.fractions(0, 200, max_denominator=7))


def exact_cost(maximum, histogram, cost):
    """Count the cost batch by batch."""
    return sum(
        batches * (maximum - documents if documents <= maximum else cost) for documents, batches in histogram.items()
    )


@settings(deadline=None, max_examples=300)
@given(histograms, costs)
def test_the_maximum_equals_brute_force_over_all_maxima(histogram, cost):
    tuning = tune_packed(histogram, eager_cost=cost)
    found = {maximum: exact_cost(maximum, histogram, cost) for maximum in range(1, 45)}
    assert found[tuning.max_packed_seqs] == min(found.values())
    batches = sum(histogram.values())
    assert tuning.expected_cost == pytest.approx(float(Fraction(min(found.values())) / batches))
    assert tuning.expected_cost == packed_cost(tuning.max_packed_seqs, histogram, eager_cost=cost)
    covered = sum(count for documents, count in histogram.items() if documents <= tuning.max_packed_seqs)
    assert tuning.coverage == covered / batches and tuning.batches == batches
    ties = [maximum for maximum, value in found.items() if value == min(found.values()) and maximum in histogram]
    assert tuning.max_packed_seqs == min(ties)


@settings(deadline=None, max_examples=200)
@given(histograms, st.integers(0, 200))
def test_the_range_of_costs_holds_exactly_where_the_maximum_is_best(histogram, cost):
    tuning = tune_packed(histogram, eager_cost=cost)
    low, high = tuning.eager_costs

    def is_best(at):
        mine = packed_cost(tuning.max_packed_seqs, histogram, eager_cost=at)
        return mine <= min(packed_cost(other, histogram, eager_cost=at) for other in histogram) + 1e-9

    assert low <= cost and (high is None or cost <= high)
    assert is_best(low) and is_best(1e6 if high is None else high)
    assert low == 0 or not is_best(low - max(1e-3, low / 1000))
    assert high is None or not is_best(high + max(1e-3, high / 1000))


def observed(batches=10_000):
    """Return a distribution with P50 = 12, P90 = 43, P99 = 106 and a maximum of 358, lognormal between these."""
    normal = NormalDist()
    points = [(normal.inv_cdf(share), math.log(count)) for share, count in ((0.5, 12), (0.9, 43), (0.99, 106))]

    def documents(share):
        z = normal.inv_cdf(share)
        (z0, low), (z1, high) = points[:2] if z < points[1][0] else points[1:]
        return min(358, max(1, round(math.exp(low + (high - low) * (z - z0) / (z1 - z0)))))

    return Counter([documents((index + 0.5) / batches) for index in range(batches - 1)] + [358])


def test_the_optimum_is_near_64_for_the_distribution_whose_users_chose_64():
    tuning = tune_packed(observed())
    assert 61 <= tuning.max_packed_seqs <= 67 and round(tuning.coverage, 2) == 0.96
    # Covering all batches costs more padding than the eager batches cost.
    assert packed_cost(358, observed()) > 4 * tuning.expected_cost
    assert packed_cost(106, observed()) > tuning.expected_cost < packed_cost(43, observed())


def test_a_list_counts_as_its_histogram():
    assert histogram_of([3, 1, 3]) == {1: 1, 3: 2} == histogram_of({3: 2, 1: 1, 9: 0})
    assert tune_packed([3, 1, 3]) == tune_packed({1: 1, 3: 2})
    assert tune_packed(iter([7])).max_packed_seqs == 7


def test_extreme_costs_cover_everything_or_only_the_smallest():
    assert tune_packed([1, 5, 100], eager_cost=1e9).max_packed_seqs == 100
    assert tune_packed([1, 5, 100], eager_cost=1e9).eager_costs[1] is None
    assert tune_packed([1, 5, 100], eager_cost=0).max_packed_seqs == 1


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "no batches"),
        ({4: 0}, "no batches"),
        ([0], "0 documents"),
        ([True, 1], "True documents"),
        ([1.0], "1.0 documents"),
        (["3"], "'3' documents"),
        ({-2: 1}, "-2 documents"),
        ({2: -1}, "-1 batches"),
        ({2: 1.5}, "1.5 batches"),
        ("12", "'12': give a mapping"),
        (None, "None: give a mapping"),
    ],
)
def test_invalid_documents_are_refused(documents, message):
    with pytest.raises(GraphConfigError, match=message):
        tune_packed(documents)


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf"), True, "640", None])
def test_an_invalid_eager_cost_is_refused(cost):
    with pytest.raises(GraphConfigError, match="eager_cost is"):
        tune_packed([3], eager_cost=cost)


def test_an_invalid_maximum_is_refused():
    with pytest.raises(GraphConfigError, match="the maximum is 0"):
        packed_cost(0, [3])

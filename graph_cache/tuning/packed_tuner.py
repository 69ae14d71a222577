"""Choose how many documents packed sequences are padded to: the least expected cost over observed batches. Exact.

Each batch costs its padding documents if it is padded and replays, and `eager_cost` padding documents if it has more
documents than the maximum and runs eager. Lowering the maximum to the largest observed number that it covers never adds
cost, so only observed numbers are candidates. All arithmetic is in integers and fractions, so rounding never decides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from graph_cache.errors import GraphConfigError
from graph_cache.utils.validation import is_whole_number

# With P50 = 12 and P90 = 43 documents, lognormally distributed, this gives 64, the number that such jobs settled on.
DEFAULT_EAGER_COST = 640


@dataclass(frozen=True)
class PackedTuning:
    """A maximum number of packed sequences and its expected cost.

    max_packed_seqs    the maximum: `cuda_graph_max_packed_seqs`
    coverage           share of batches with at most that many documents, which replay
    expected_padding   padding documents per batch, averaged over all batches
    expected_cost      `expected_padding` plus `eager_cost` for each batch that runs eager, per batch
    eager_costs        the range of `eager_cost` in which this maximum is the best; the end is None if it is unbounded
    batches            number of observed batches
    """

    max_packed_seqs: int
    coverage: float
    expected_padding: float
    expected_cost: float
    eager_costs: tuple[float, float | None]
    batches: int


def tune_packed(
    documents: Mapping[int, int] | Iterable[int], *, eager_cost: float | Fraction = DEFAULT_EAGER_COST
) -> PackedTuning:
    """Return the maximum number of packed sequences with the least expected cost. Ties go to the smaller maximum.

    `documents` maps documents per batch to the number of batches, or lists one number per batch. `eager_cost` is the
    time that a batch loses by running eager, in units of the time that one padding document costs. Raises
    GraphConfigError for invalid numbers and for no batches.
    """
    observed = histogram_of(documents)
    cost = _fraction(eager_cost)
    choices = _choices(observed)
    best = min(choices, key=lambda choice: (choice.cost(cost), choice.maximum))
    batches = sum(observed.values())
    return PackedTuning(
        max_packed_seqs=best.maximum,
        coverage=(batches - best.eager) / batches,
        expected_padding=best.padding / batches,
        expected_cost=float(best.cost(cost) / batches),
        eager_costs=_range_of(best, choices),
        batches=batches,
    )


def packed_cost(
    maximum: int, documents: Mapping[int, int] | Iterable[int], *, eager_cost: float | Fraction = DEFAULT_EAGER_COST
) -> float:
    """Return the expected cost of a maximum, in padding documents per batch, as `tune_packed` counts it."""
    if not is_whole_number(maximum, 1):
        raise GraphConfigError(f"the maximum is {maximum!r}: give a whole number of documents from 1 up")
    observed = histogram_of(documents)
    padding = sum((maximum - count) * batches for count, batches in observed.items() if count <= maximum)
    eager = sum(batches for count, batches in observed.items() if count > maximum)
    return float((padding + _fraction(eager_cost) * eager) / sum(observed.values()))


def histogram_of(documents: Mapping[int, int] | Iterable[int]) -> dict[int, int]:
    """Return documents per batch -> number of batches, ascending and without zeros. Raises GraphConfigError."""
    if isinstance(documents, Mapping):
        found = dict(documents)
    elif isinstance(documents, Iterable) and not isinstance(documents, (str, bytes)):
        numbers = list(documents)
        for number in numbers:  # before counting, which takes 1 and True as one
            _check_documents(number)
        found = dict(Counter(numbers))
    else:
        raise GraphConfigError(
            f"documents is {documents!r}: give a mapping from documents per batch to number of batches, or a list "
            "with one number per batch"
        )
    for number, batches in found.items():
        _check_documents(number)
        if not is_whole_number(batches, 0):
            raise GraphConfigError(f"{batches!r} batches have {number} documents: give a whole number of 0 or more")
    observed = {number: found[number] for number in sorted(found) if found[number]}
    if not observed:
        raise GraphConfigError("documents has no batches: give the number of documents of at least one")
    return observed


@dataclass(frozen=True)
class _Choice:
    """A maximum, its padding documents over all batches, and its number of eager batches."""

    maximum: int
    padding: int
    eager: int

    def cost(self, eager_cost: Fraction) -> Fraction:
        return self.padding + eager_cost * self.eager


def _choices(observed: Mapping[int, int]) -> list[_Choice]:
    """Return a choice for every observed number of documents, ascending."""
    batches, covered, documents, choices = sum(observed.values()), 0, 0, []
    for number, count in observed.items():
        covered += count
        documents += number * count
        choices.append(_Choice(number, number * covered - documents, batches - covered))
    return choices


def _range_of(best: _Choice, choices: Iterable[_Choice]) -> tuple[float, float | None]:
    """Return the eager costs from which and up to which no other choice costs less."""
    low, high = Fraction(0), None
    for other in choices:
        if other.eager == best.eager:
            continue
        equal = Fraction(best.padding - other.padding, other.eager - best.eager)
        if other.eager > best.eager:
            low = max(low, equal)
        else:
            high = equal if high is None else min(high, equal)
    return float(low), None if high is None else float(high)


def _check_documents(number: object) -> None:
    if not is_whole_number(number, 1):
        raise GraphConfigError(f"a batch has {number!r} documents: give whole numbers from 1 up")


def _fraction(eager_cost: object) -> Fraction:
    if isinstance(eager_cost, bool) or not isinstance(eager_cost, (int, float, Fraction)):
        raise GraphConfigError(f"eager_cost is {eager_cost!r}: give a number of padding documents")
    if not math.isfinite(eager_cost) or eager_cost < 0:
        raise GraphConfigError(f"eager_cost is {eager_cost!r}: give a finite number of 0 or more padding documents")
    return Fraction(eager_cost)

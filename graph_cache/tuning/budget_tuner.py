"""Choose token budgets for an encoder: the list with the least expected cost over observed microbatches. Exact.

A microbatch with `tokens` patches is padded to the smallest budget that holds it; above the largest budget it runs
eager. Lowering a budget to the largest microbatch that it holds never adds cost, so only observed sizes (rounded up to
the granularity) are candidates. Arithmetic is in integers and fractions, so rounding never decides.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from graph_cache.errors import GraphConfigError
from graph_cache.utils.validation import is_whole_number

DEFAULT_EAGER_SHARE = 0.5


@dataclass(frozen=True)
class TokenBudgets:
    """Token budgets and their expected cost.

    budgets            ascending, in patches per microbatch
    coverage           share of microbatches that fit into the largest budget
    expected_padding   padding patches per microbatch, averaged over all microbatches
    expected_cost      `expected_padding` plus what microbatches above the largest budget lose, in patches
    """

    budgets: tuple[int, ...]
    coverage: float
    expected_padding: float
    expected_cost: float


def tune_token_budgets(
    patches: Mapping[int, int],
    *,
    max_budgets: int = 4,
    multiple_of: int = 1,
    eager_share: float | Fraction = DEFAULT_EAGER_SHARE,
) -> TokenBudgets:
    """Return at most `max_budgets` budgets with the least expected cost. Ties go to fewer, then to smaller budgets.

    `patches` maps patches per microbatch (the sum over its images) to the number of microbatches. Budgets are multiples
    of `multiple_of`, such as the square of the spatial merge size. A microbatch of n patches that runs eager loses as
    much time as `eager_share` * n padding patches cost. At least the smallest microbatch gets a budget. Raises
    GraphConfigError for invalid values and no microbatches.
    """
    observed = _validated(patches)
    if not is_whole_number(max_budgets, 1):
        raise GraphConfigError(f"max_budgets is {max_budgets!r}: give a whole number of at least 1")
    if not is_whole_number(multiple_of, 1):
        raise GraphConfigError(f"multiple_of is {multiple_of!r}: give a whole number of at least 1")
    if isinstance(eager_share, bool) or not isinstance(eager_share, (int, float, Fraction)):
        raise GraphConfigError(f"eager_share is {eager_share!r}: give a number, the share of a microbatch's time")
    if not math.isfinite(eager_share) or eager_share < 0:
        raise GraphConfigError(f"eager_share is {eager_share!r}: give a finite number of 0 or more")
    grid = sorted({-(-size // multiple_of) * multiple_of for size in observed})
    table = _Table(grid, observed)
    last, cost = table.best_end(min(max_budgets, len(grid)), Fraction(eager_share))
    budgets = table.path(*last)
    count = sum(observed.values())
    covered = sum(batches for size, batches in observed.items() if size <= budgets[-1])
    padding = sum(
        (budgets[bisect_left(budgets, size)] - size) * batches
        for size, batches in observed.items()
        if size <= budgets[-1]
    )
    return TokenBudgets(budgets, covered / count, padding / count, float(cost / count))


class _Table:
    """The least padding of all microbatches up to a candidate that is a budget, for each number of budgets.

    `rows[k][j]` is that padding with k + 1 budgets, the last at candidate j. A step's padding satisfies the quadrangle
    inequality, so the best budget before j is monotonic in j: divide and conquer computes a row in O(n log n).
    """

    def __init__(self, grid: list[int], observed: Mapping[int, int]):
        self.grid = grid
        counts, tokens = [0] * len(grid), [0] * len(grid)
        for size, batches in observed.items():
            at = bisect_left(grid, size)
            counts[at] += batches
            tokens[at] += size * batches
        self._counts = [0, *accumulate(counts)]
        self._tokens = [0, *accumulate(tokens)]
        self.rows: list[list[int]] = []
        self._before: list[list[int]] = []

    def padding(self, i: int, j: int) -> int:
        """Return the padding of microbatches above candidate i (-1: all) and up to candidate j."""
        return self.grid[j] * (self._counts[j + 1] - self._counts[i + 1]) - (self._tokens[j + 1] - self._tokens[i + 1])

    def best_end(self, budgets: int, eager_share: Fraction) -> tuple[tuple[int, int], Fraction]:
        """Return (row, candidate) of the best largest budget, and the cost over all microbatches."""
        n, best, found = len(self.grid), None, (0, 0)
        for row in range(budgets):
            self._add_row()
            for j in range(row, n):
                cost = self.rows[row][j] + eager_share * (self._tokens[n] - self._tokens[j + 1])
                if best is None or cost < best:
                    best, found = cost, (row, j)
        assert best is not None
        return found, best

    def path(self, row: int, j: int) -> tuple[int, ...]:
        """Return the budgets that lead to this entry, ascending."""
        found = [self.grid[j]]
        while row:
            j = self._before[row][j]
            row -= 1
            found.append(self.grid[j])
        return tuple(reversed(found))

    def _add_row(self) -> None:
        n, row = len(self.grid), len(self.rows)
        if row == 0:
            self.rows.append([self.padding(-1, j) for j in range(n)])
            self._before.append([-1] * n)
            return
        previous, costs, before = self.rows[-1], [0] * n, [-1] * n
        # Each entry: candidates lo..hi, whose best budget before them lies in first..final.
        pending = [(row, n - 1, row - 1, n - 2)]
        while pending:
            lo, hi, first, final = pending.pop()
            if lo > hi:
                continue
            middle = (lo + hi) // 2
            choices = range(first, min(final, middle - 1) + 1)
            at = min(choices, key=lambda i: previous[i] + self.padding(i, middle))  # noqa: B023
            costs[middle], before[middle] = previous[at] + self.padding(at, middle), at
            pending += [(lo, middle - 1, first, at), (middle + 1, hi, at, final)]
        self.rows.append(costs)
        self._before.append(before)


def _validated(patches: Mapping[int, int]) -> dict[int, int]:
    if not isinstance(patches, Mapping):
        raise GraphConfigError(f"patches is {patches!r}: give a mapping from patches to number of microbatches")
    for size, batches in patches.items():
        if not is_whole_number(size, 1):
            raise GraphConfigError(f"a microbatch has {size!r} patches: give whole numbers from 1 up")
        if not is_whole_number(batches, 0):
            raise GraphConfigError(f"{batches!r} microbatches have {size} patches: give a whole number of 0 or more")
    observed = {size: batches for size, batches in patches.items() if batches}
    if not observed:
        raise GraphConfigError("patches has no microbatches: give the size of at least one")
    return observed

"""Find the bucket list with the least expected padding for a histogram of batch sizes. Exact.

A bucket list is a path from 0 over the chosen sizes to the maximum, where a step from one size to the next costs the
padding of the batches in between. Moving a bucket down to the largest batch that it holds never adds padding, so only
observed sizes (and the maximum) are candidates. All arithmetic is in integers, so rounding never decides.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from graph_cache.core.buckets import Buckets, default_ladder
from graph_cache.errors import GraphConfigError
from graph_cache.utils.validation import is_whole_number


@dataclass(frozen=True)
class Tuning:
    """A bucket list and its expected cost.

    sizes                  ascending, the maximum last
    expected_padding_rows  padding rows per step, averaged over the histogram
    padding_fraction       share of the computed rows that are padding, in [0, 1)
    bytes                  sum of `bytes_of` over the sizes; None without `bytes_of`
    """

    sizes: tuple[int, ...]
    expected_padding_rows: float
    padding_fraction: float
    bytes: int | None


def tune(
    histogram: Mapping[int, int],
    *,
    max_size: int,
    max_buckets: int | None = None,
    max_bytes: int | None = None,
    bytes_of: Callable[[int], int] | None = None,
) -> Tuning:
    """Return the buckets with the least expected padding within a budget. `max_size` is always included.

    `histogram` maps a batch size in rows to the number of steps with that size; sizes beyond `max_size` raise
    GraphConfigError. If it is empty, every size of the default ladder counts as equally likely. The budget is a number
    of buckets, or bytes as the sum of `bytes_of(size)`, or both; without either, as many buckets as the default ladder
    has. `bytes_of(size)` is the whole number of bytes that one more graph of that size costs: in a pool shared by all
    buckets, the graph's own overhead and not its activations. Exact if `bytes_of` does not decrease with size;
    otherwise exact among the observed sizes.

    A graph count takes milliseconds; a byte budget over 500 observed sizes usually takes under a second, at worst half
    a minute. Ties go to the first list found, which contains no bucket that saves nothing. Raises GraphConfigError for
    a budget that cannot hold `max_size`.
    """
    ladder = default_ladder(max_size)
    _check_budget(max_size, max_buckets, max_bytes, bytes_of)
    if max_buckets is None and max_bytes is None:
        max_buckets = len(ladder)
    observed = _validated(histogram, max_size)
    steps = _Steps(observed or dict.fromkeys(ladder, 1), max_size)
    graphs = min(max_buckets or steps.count, steps.count)
    if max_bytes is None or bytes_of is None:
        path = _Suffixes(steps, graphs).best_path()
    else:
        prices = [_price(bytes_of, size) for size in steps.sizes]
        if prices[-1] > max_bytes:
            raise GraphConfigError(
                f"max_bytes is {max_bytes}, too little for the graph of max_size={max_size}, which costs "
                f"{prices[-1]}: raise max_bytes to at least that, or lower max_size"
            )
        path = _BytesBudget(steps, prices, max_bytes, graphs).best_path()
    sizes = tuple(steps.sizes[index] for index in path)
    padding, fraction = _padding(sizes, observed)
    total = None if bytes_of is None else sum(_price(bytes_of, size) for size in sizes)
    return Tuning(sizes, padding, fraction, total)


def expected_padding(sizes: Iterable[int], histogram: Mapping[int, int]) -> float:
    """Return the padding rows per step for these bucket sizes, averaged over `histogram`; 0.0 if it is empty.

    Raises GraphConfigError if the histogram has a batch that no bucket holds.
    """
    buckets = Buckets(tuple(sizes))
    return _padding(buckets, _validated(histogram, buckets.max))[0]


class _Steps:
    """The observed sizes in ascending order, the maximum last, and the padding of a step between two of them.

    Indices: `sizes[i]` for i in 0..count-1. A step from index i to j > i means buckets at both and none in between; i =
    -1 is the start.
    """

    def __init__(self, histogram: Mapping[int, int], max_size: int):
        self.sizes = sorted({*histogram, max_size})
        self.count = len(self.sizes)
        counts = [histogram.get(size, 0) for size in self.sizes]
        # Prefix sums: [j + 1] - [i + 1] is the sum over i+1..j.
        self._steps = [0, *accumulate(counts)]
        self._rows = [0, *accumulate(size * count for size, count in zip(self.sizes, counts, strict=True))]

    def padding(self, i: int, j: int) -> int:
        """Return the padding rows, over the whole histogram, of batches above sizes[i] and up to sizes[j]."""
        return self.sizes[j] * (self._steps[j + 1] - self._steps[i + 1]) - (self._rows[j + 1] - self._rows[i + 1])


class _Suffixes:
    """The least padding from every index to the end with at most k further buckets, for every k up to `graphs`.

    `rows[k][i + 1]` is that padding after a bucket at i (i = -1: from the start), None if k buckets do not suffice. The
    padding of a step satisfies the quadrangle inequality, so the best next bucket is monotonic in i, and divide and
    conquer over its range computes a row in O(n log n).
    """

    def __init__(self, steps: _Steps, graphs: int):
        self.steps = steps
        last = steps.count - 1
        self.rows: list[list[int | None]] = [[None] * steps.count + [0]]
        self._next: list[list[int]] = [[last] * (steps.count + 1)]
        for _ in range(graphs):
            self._add_row()

    def best_path(self) -> list[int]:
        """Return the indices of the best buckets from the start, at most `graphs` of them."""
        path: list[int] = []
        index, left = -1, len(self.rows) - 1
        while index != self.steps.count - 1:
            index = self._next[left][index + 1]
            left -= 1
            path.append(index)
        return path

    def _add_row(self) -> None:
        padding, before, last = self.steps.padding, self.rows[-1], self.steps.count - 1
        row: list[int | None] = [None] * (last + 1) + [0]
        following = [last] * (last + 2)
        # Each entry: find the best next bucket for i in lo..hi, which lies in first..final.
        pending = [(-1, last - 1, 0, last)]
        while pending:
            lo, hi, first, final = pending.pop()
            if lo > hi:
                continue
            middle = (lo + hi) // 2
            best, best_at = None, last
            for j in range(max(first, middle + 1), final + 1):
                rest = before[j + 1]
                if rest is not None and (best is None or padding(middle, j) + rest < best):
                    best, best_at = padding(middle, j) + rest, j
            row[middle + 1], following[middle + 1] = best, best_at
            pending.append((lo, middle - 1, first, best_at))
            pending.append((middle + 1, hi, best_at, final))
        self.rows.append(row)
        self._next.append(following)


@dataclass(frozen=True, slots=True)
class _Label:
    """A partial path to `index`: its padding, bytes and number of buckets, and the label before it."""

    padding: int
    bytes: int
    graphs: int
    index: int
    before: _Label | None

    def path(self) -> list[int]:
        path, label = [], self
        while label.before is not None:
            path.append(label.index)
            label = label.before
        return path[::-1]


class _Completion:
    """For every index, the path to the end with the least padding * scale + bytes * price."""

    def __init__(self, steps: _Steps, prices: list[int], price: int, scale: int):
        last = steps.count - 1
        self.steps, self.prices = steps, prices
        self.cost = [0] * (last + 2)  # the least cost after a bucket at i, in entry i + 1; the next three likewise
        self.padding = [0] * (last + 2)
        self.bytes = [0] * (last + 2)
        self.graphs = [0] * (last + 2)
        self._next = [last] * (last + 2)
        size_costs = [price * bytes_ for bytes_ in prices]
        for i in range(last - 1, -2, -1):
            costs = [scale * steps.padding(i, j) + size_costs[j] + self.cost[j + 1] for j in range(i + 1, last + 1)]
            self.cost[i + 1] = min(costs)
            j = self._next[i + 1] = i + 1 + costs.index(self.cost[i + 1])
            self.padding[i + 1] = steps.padding(i, j) + self.padding[j + 1]
            self.bytes[i + 1] = prices[j] + self.bytes[j + 1]
            self.graphs[i + 1] = 1 + self.graphs[j + 1]

    def complete(self, label: _Label) -> _Label:
        """Return `label` extended by the path from its index to the end."""
        while label.index != self.steps.count - 1:
            j = self._next[label.index + 1]
            padding = label.padding + self.steps.padding(label.index, j)
            label = _Label(padding, label.bytes + self.prices[j], label.graphs + 1, j, label)
        return label


class _BytesBudget:
    """Shortest path under a byte budget (and a count), by label setting: exact, with bounds that prune most labels.

    A label is dropped if another label at the same index has no more padding, bytes and buckets; if even its cheapest
    completion exceeds the budget; or if a lower bound on its total is no better than a known path. There are two
    bounds: the least padding with the remaining buckets, and the Lagrangian bound, the least padding plus bytes at the
    best price per byte, which is nearly tight. Good paths are found early, because every label is completed along the
    best path at each price tried.
    """

    def __init__(self, steps: _Steps, prices: list[int], max_bytes: int, graphs: int):
        self.steps, self.prices, self.max_bytes = steps, prices, max_bytes
        self.last = steps.count - 1
        # Bytes bound the count too. If that bound is tighter, a label's own count does not matter.
        self.cheapest = min(prices[: self.last], default=0)
        affordable = 1 + bisect_right(list(accumulate(sorted(prices[: self.last]))), max_bytes - prices[self.last])
        self.count_matters = graphs < affordable
        self.graphs = min(graphs, affordable)
        self.suffixes = _Suffixes(steps, self.graphs)
        self.completions: list[_Completion] = []

    def best_path(self) -> list[int]:
        unpriced = self.suffixes.best_path()
        if sum(self.prices[index] for index in unpriced) <= self.max_bytes:
            return unpriced
        self._find_price_per_byte()
        best = _Label(self.steps.padding(-1, self.last), self.prices[self.last], 1, self.last, _START)
        labels: list[list[_Label]] = [[] for _ in range(self.steps.count + 1)]
        labels[0].append(_START)
        for index in range(-1, self.last):
            for label in _undominated(labels[index + 1], self.count_matters):
                best = self._extend(label, labels, self._completed(label, best))
        return best.path()

    def _extend(self, label: _Label, labels: list[list[_Label]], best: _Label) -> _Label:
        """Append the successors of `label` to `labels`, and return the best known path."""
        steps, prices, last = self.steps, self.prices, self.last
        left = self.graphs - label.graphs - 1
        # The best path may have improved since this label was made.
        if self._cannot_improve(label, best):
            return best
        for j in range(label.index + 1, last + 1):
            spent = label.bytes + prices[j]
            spare = self.max_bytes - spent - (prices[last] if j != last else 0)
            if spare < 0:
                continue
            graphs_left = min(left, spare // self.cheapest + 1) if self.cheapest else left
            rest = self.suffixes.rows[graphs_left][j + 1]
            if rest is None:
                continue
            padding = label.padding + steps.padding(label.index, j)
            if padding + rest >= best.padding:
                continue
            reached = _Label(padding, spent, label.graphs + 1, j, label)
            if j == last:
                best = reached
            elif not self._cannot_improve(reached, best):
                labels[j + 1].append(reached)
        return best

    def _completed(self, label: _Label, best: _Label) -> _Label:
        entry = label.index + 1
        for completion in self.completions:
            within = (
                label.bytes + completion.bytes[entry] <= self.max_bytes
                and label.graphs + completion.graphs[entry] <= self.graphs
            )
            if within and label.padding + completion.padding[entry] < best.padding:
                best = completion.complete(label)
        return best

    def _cannot_improve(self, label: _Label, best: _Label) -> bool:
        rest = self.completions[-1].cost[label.index + 1]
        bound = label.padding * self.scale + self.price * (label.bytes - self.max_bytes) + rest
        return bound >= best.padding * self.scale

    def _find_price_per_byte(self) -> None:
        """Raise the price of a byte, the fraction price/scale, until the lower bound is maximal."""
        self.price, self.scale = 0, 1
        free = _Completion(self.steps, self.prices, self.price, self.scale)
        self.completions.append(free)
        expensive = free.complete(_START)
        cheap = _Label(self.steps.padding(-1, self.last), self.prices[self.last], 1, self.last, _START)
        # Two paths define a line of padding over bytes; its slope is the next price, until no path lies below the line.
        # If the expensive path fits the budget, only the number of graphs is binding, and the price stays 0.
        while expensive.bytes > self.max_bytes:
            self.price, self.scale = cheap.padding - expensive.padding, expensive.bytes - cheap.bytes
            self.completions.append(_Completion(self.steps, self.prices, self.price, self.scale))
            found = self.completions[-1].complete(_START)
            on_line = cheap.padding * self.scale + cheap.bytes * self.price
            if found.padding * self.scale + found.bytes * self.price >= on_line:
                return
            if found.bytes > self.max_bytes:
                expensive = found
            else:
                cheap = found


_START = _Label(0, 0, 0, -1, None)


def _undominated(labels: list[_Label], count_matters: bool) -> list[_Label]:
    """Return the labels of one index that no other dominates; `count_matters` compares bucket counts too."""
    kept: list[_Label] = []
    # fewest_bytes[g]: the least bytes among kept labels with g buckets; kept labels have no more padding.
    most = max((label.graphs for label in labels), default=0) if count_matters else 0
    fewest_bytes: list[float] = [float("inf")] * (most + 1)
    for label in sorted(labels, key=lambda label: (label.padding, label.bytes, label.graphs)):
        graphs = label.graphs if count_matters else 0
        if min(fewest_bytes[: graphs + 1]) > label.bytes:
            fewest_bytes[graphs] = label.bytes
            kept.append(label)
    return kept


def _padding(sizes: Iterable[int], histogram: Mapping[int, int]) -> tuple[float, float]:
    """Return padding rows per step, and the share of all computed rows."""
    ascending = tuple(sizes)
    steps = sum(histogram.values())
    real = sum(size * count for size, count in histogram.items())
    computed = sum(ascending[bisect_left(ascending, size)] * count for size, count in histogram.items())
    return ((computed - real) / steps, (computed - real) / computed) if steps else (0.0, 0.0)


def _validated(histogram: Mapping[int, int], max_size: int) -> dict[int, int]:
    for size, count in histogram.items():
        if not is_whole_number(size, 1):
            raise GraphConfigError(f"the histogram has a batch of {size!r} rows: give whole numbers from 1 up")
        if not is_whole_number(count, 0):
            raise GraphConfigError(f"the histogram counts {count!r} batches of {size} rows: give counts of 0 or more")
    beyond = sorted(size for size, count in histogram.items() if size > max_size and count)
    if beyond:
        raise GraphConfigError(
            f"the histogram has batches of {beyond} rows, beyond the largest bucket, {max_size}: "
            "raise the maximum, or remove them"
        )
    return {size: count for size, count in histogram.items() if count}


def _check_budget(
    max_size: int, max_buckets: int | None, max_bytes: int | None, bytes_of: Callable[[int], int] | None
) -> None:
    if max_buckets is not None and not is_whole_number(max_buckets, 1):
        raise GraphConfigError(f"max_buckets is {max_buckets!r}: give at least 1, for max_size={max_size} itself")
    if max_bytes is not None and not is_whole_number(max_bytes, 0):
        raise GraphConfigError(f"max_bytes is {max_bytes!r}: give a whole number of bytes")
    if max_bytes is not None and bytes_of is None:
        raise GraphConfigError("max_bytes is given without bytes_of: give the bytes that a graph of each size costs")


def _price(bytes_of: Callable[[int], int], size: int) -> int:
    price = bytes_of(size)
    if not is_whole_number(price, 0):
        raise GraphConfigError(f"bytes_of({size}) is {price!r}: give a whole number of bytes, 0 or more")
    return price

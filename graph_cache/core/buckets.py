"""Batch sizes to capture, and the lookup of the bucket for a batch.

Works on plain integers. Sizes count rows along the batch dimension. A batch goes to the smallest bucket that holds it;
a batch larger than the largest bucket runs eager.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from graph_cache.errors import GraphConfigError
from graph_cache.utils.validation import is_whole_number

# Upper limits that catch typos such as "1-1000000", which no warm-up could capture.
MAX_SIZE = 1 << 20
MAX_BUCKETS = 4096


def default_ladder(max_num_seqs: int) -> tuple[int, ...]:
    """Return the default sizes: 1, 2, 4, then steps of 8 up to 256, 16 up to 512, 32 up to 1024, and so on.

    Ascending. `max_num_seqs` (rows, at least 1) is always the last, even if it is off the stride; otherwise full
    batches, the most expensive ones, would run eager.
    """
    top = _row_count(max_num_seqs, "max_num_seqs")
    sizes = [size for size in (1, 2, 4) if size < top]
    size, stride, stride_ends = 8, 8, 256
    while size < top:
        sizes.append(size)
        if size >= stride_ends:
            stride, stride_ends = stride * 2, stride_ends * 2
        size += stride
    return (*sizes, top)


@dataclass(frozen=True)
class Buckets:
    """An ascending tuple of distinct sizes, with a lookup table for rounding up.

    Sizes may be given in any order. Raises GraphConfigError for an empty list, duplicates, and anything but integers
    from 1 up. Immutable, hence safe to share between threads.
    """

    sizes: tuple[int, ...]
    _table: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = tuple(sorted(_row_count(size, "a bucket") for size in self.sizes))
        if not sizes:
            raise GraphConfigError(
                "the list of buckets is empty: give at least one size, or omit it for the default ladder"
            )
        if len(sizes) > MAX_BUCKETS:
            raise GraphConfigError(f"{len(sizes)} buckets were given, and each is a graph: give at most {MAX_BUCKETS}")
        duplicates = sorted({size for size, following in itertools.pairwise(sizes) if size == following})
        if duplicates:
            raise GraphConfigError(f"buckets {duplicates} are given twice in {list(sizes)}: give each size once")
        table: list[int] = [sizes[0]]
        for size in sizes:
            table.extend([size] * (size + 1 - len(table)))
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "_table", tuple(table))

    @classmethod
    def for_limit(cls, max_num_seqs: int, sizes: Iterable[int] | None = None) -> Buckets:
        """Return the buckets for batches of up to `max_num_seqs` rows: `sizes`, or the default ladder.

        Adds the maximum if `sizes` lacks it. Raises GraphConfigError for a size beyond the maximum, which would hold
        memory for batches that cannot occur.
        """
        top = _row_count(max_num_seqs, "max_num_seqs")
        if sizes is None:
            return cls(default_ladder(top))
        given = cls(tuple(sizes))
        too_large = [size for size in given if size > top]
        if too_large:
            raise GraphConfigError(
                f"buckets {too_large} are larger than max_num_seqs={top}, so no batch would use them: "
                f"raise max_num_seqs to {given.max} or drop them"
            )
        return given if top in given else cls((*given.sizes, top))

    @property
    def max(self) -> int:
        """The largest size in rows."""
        return self.sizes[-1]

    def round_up(self, rows: int) -> int | None:
        """Return the smallest bucket that holds `rows` (at least 0), or None if `rows` exceeds the largest. O(1)."""
        if rows < 0:
            raise ValueError(f"a batch of {rows} rows is invalid: give at least 0 rows")
        return self._table[rows] if rows < len(self._table) else None

    def padding(self, rows: int) -> int | None:
        """Return the number of padding rows for a batch of `rows`, or None if no bucket holds it."""
        bucket = self.round_up(rows)
        return None if bucket is None else bucket - rows

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __contains__(self, size: object) -> bool:
        return size in self.sizes


def _row_count(value: object, what: str) -> int:
    if not is_whole_number(value):
        raise GraphConfigError(f"{what} is {value!r}, of type {type(value).__name__}: give a whole number of rows")
    if not 1 <= value <= MAX_SIZE:
        raise GraphConfigError(f"{what} is {value}: give a number of rows from 1 to {MAX_SIZE}")
    return value

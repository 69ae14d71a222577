"""The batch sizes that are captured, and which of them holds a given batch.

Pure integers: this room knows neither tensors nor graphs. Sizes count rows along the batch dimension.
A batch goes to the smallest bucket that holds it; one beyond the largest goes to none and runs eager.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from graph_cache.errors import GraphConfigError
from graph_cache.validation import is_whole_number

# Beyond these a list is a slip of the keyboard ("1-1000000"), not a wish that any warm-up could fulfil.
MAX_SIZE = 1 << 20
MAX_BUCKETS = 4096


def default_ladder(max_num_seqs: int) -> tuple[int, ...]:
    """The sizes captured when none are given: 1, 2, 4, steps of 8 to 256, then 16 to 512, 32 to 1024, and so on.

    Ascending, and `max_num_seqs` (rows, at least 1) is always the last, even off the stride: else full batches,
    the most expensive ones, would be the ones that run eager.
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
    """An ascending tuple of distinct sizes, with rounding up by a table.

    Give sizes in any order; they are sorted. Empty lists, duplicates, and anything but integers from 1 up are
    refused with GraphConfigError. Immutable, hence safe to share between threads.
    """

    sizes: tuple[int, ...]
    _table: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = tuple(sorted(_row_count(size, "a bucket") for size in self.sizes))
        if not sizes:
            raise GraphConfigError("an empty list of buckets was given: name at least one size, or none for the ladder")
        if len(sizes) > MAX_BUCKETS:
            raise GraphConfigError(f"{len(sizes)} buckets were given: each is a graph; give at most {MAX_BUCKETS}")
        duplicates = sorted({size for size, following in itertools.pairwise(sizes) if size == following})
        if duplicates:
            raise GraphConfigError(f"buckets {duplicates} are given twice in {list(sizes)}: name each size once")
        table: list[int] = [sizes[0]]
        for size in sizes:
            table.extend([size] * (size + 1 - len(table)))
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "_table", tuple(table))

    @classmethod
    def for_limit(cls, max_num_seqs: int, sizes: Iterable[int] | None = None) -> Buckets:
        """The buckets for batches of up to `max_num_seqs` rows: `sizes`, or the default ladder.

        The maximum is added where `sizes` lacks it. A size beyond the maximum is refused: it would hold memory
        for batches that can't occur.
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
        """The smallest bucket that holds `rows` (at least 0), or None if `rows` is above the largest. O(1)."""
        if rows < 0:
            raise ValueError(f"a batch of {rows} rows was asked for: a batch has at least 0 rows")
        return self._table[rows] if rows < len(self._table) else None

    def padding(self, rows: int) -> int | None:
        """How many rows of padding a batch of `rows` gets, or None if no bucket holds it."""
        bucket = self.round_up(rows)
        return None if bucket is None else bucket - rows

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __contains__(self, size: object) -> bool:
        return size in self.sizes


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes from a command line: `1,2,4,8-64:8` is 1, 2, 4 and then 8 to 64 in steps of 8 (a step of 1 if unsaid).

    A range whose end is off the stride stops before it. Returned ascending; a size named twice counts once, since
    ranges may well touch. Raises GraphConfigError naming the part that can't be read.
    """
    sizes: set[int] = set()
    for part in text.split(","):
        sizes.update(_parse_part(part.strip(), text))
    return tuple(sorted(sizes))


def _parse_part(part: str, text: str) -> Iterable[int]:
    span, colon, step_text = part.partition(":")
    first_text, dash, last_text = span.partition("-")
    digits = [first_text] + [last_text] * bool(dash) + [step_text] * bool(colon)
    if (colon and not dash) or not all(number.strip().isdecimal() and number.isascii() for number in digits):
        raise GraphConfigError(
            f"bucket sizes {text!r} have a part {part!r} that can't be read: "
            "write sizes and ranges with commas, such as 1,2,4,8-64:8"
        )
    numbers = [int(number) for number in digits]
    first, last = numbers[0], numbers[1] if dash else numbers[0]
    step = numbers[2] if colon else 1
    if not 1 <= first <= last <= MAX_SIZE or step < 1:
        raise GraphConfigError(
            f"bucket sizes {text!r} have a part {part!r} out of order or range: "
            f"sizes go from 1 to {MAX_SIZE}, the first no larger than the last, with a step of at least 1"
        )
    return range(first, last + 1, step)


def _row_count(value: object, what: str) -> int:
    if not is_whole_number(value):
        raise GraphConfigError(f"{what} is {value!r}, of type {type(value).__name__}: give a whole number of rows")
    if not 1 <= value <= MAX_SIZE:
        raise GraphConfigError(f"{what} is {value}: give a number of rows from 1 to {MAX_SIZE}")
    return value

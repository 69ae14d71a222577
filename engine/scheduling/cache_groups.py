"""Page arithmetic of cache groups: which entries of each page table a request needs.

A cache group is a set of layers that share a page table: those with full attention, or those with the same sliding
window. All groups take pages from one pool. Entry i of every table stands for tokens [i * page_size, (i + 1) *
page_size); entries that no later query reads are 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from engine.errors import ConfigError

Windows = tuple[int | None, ...]  # per group, the window in tokens, None for full attention


def check_windows(windows: Windows) -> None:
    """Raise ConfigError if a window is below 1."""
    for group, window in enumerate(windows):
        if window is not None and window < 1:
            raise ConfigError(f"groups[{group}]={window} is invalid: give a window of at least 1 token, or None")


def pages_before(window: int, page_size: int) -> int:
    """Return how many full pages before a page boundary the first query after it reads in a window group."""
    return -(-(window - 1) // page_size)


class CacheGroups:
    """The cache groups of one scheduler, whose prefill chunks have at most `max_chunk` tokens.

    In a window group, the query at position p reads positions (p - window, p]. While a request prefills, it holds the
    pages for the largest chunk and the window before it, so that a prefill never needs more pages than at its start.
    """

    def __init__(self, windows: Windows, page_size: int, max_chunk: int):
        check_windows(windows)
        self.windows = windows
        self.page_size = page_size
        self.has_windows = any(window is not None for window in windows)
        # L tokens at any alignment touch at most ceil((L - 1) / page_size) + 1 pages.
        self._prefill_pages = [
            None if window is None else -(-(window + max_chunk - 2) // page_size) + 1 for window in windows
        ]
        self._decode_pages = [None if window is None else pages_before(window, page_size) + 1 for window in windows]

    def first_needed(self, computed: int) -> list[int]:
        """Return per group the first table entry that a query at position `computed` or later reads."""
        size = self.page_size
        return [0 if window is None else max(0, computed - window + 1) // size for window in self.windows]

    def table_lengths(self, computed: int, num_tokens: int) -> list[int]:
        """Return per group the entries that a request of `num_tokens` tokens, `computed` of them done, needs next."""
        pages = -(-num_tokens // self.page_size)
        return [
            pages if limit is None else min(pages, first + limit)
            for first, limit in zip(self.first_needed(computed), self._prefill_pages, strict=True)
        ]

    def max_pages(self, num_tokens: int) -> int:
        """Return the most pages that a request holds at once on its way to `num_tokens` stored tokens."""
        return self._total(-(-num_tokens // self.page_size), self._prefill_pages)

    def decode_pages(self, num_tokens: int) -> int:
        """Return the most pages that a request holds while it decodes up to `num_tokens` stored tokens."""
        return self._total(-(-num_tokens // self.page_size), self._decode_pages)

    def tokens_in(self, capacity: int, max_tokens: int) -> int:
        """Return how many tokens a request alone in a pool of `capacity` pages can store, in whole pages.

        Counts no further than the page of token `max_tokens`.
        """
        pages = range(-(-max_tokens // self.page_size) + 1)
        fitting = bisect_right(pages, capacity, key=lambda count: self._total(count, self._prefill_pages)) - 1
        return fitting * self.page_size

    @staticmethod
    def _total(pages: int, limits: Sequence[int | None]) -> int:
        return sum(pages if limit is None else min(pages, limit) for limit in limits)

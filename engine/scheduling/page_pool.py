"""The pool of KV pages: page numbers, reference counts, and which unreferenced pages keep cached contents.

Works on plain integers; the attention backend holds the tensors. Not thread-safe: the engine loop's thread owns it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from engine.errors import ConfigError, EngineError

SCRATCH_PAGE = 0  # padded rows read and write this page, so they never touch a request's pages


class NoPages(EngineError):
    """More pages were requested than are free; none was allocated."""


class InvariantError(EngineError, RuntimeError):
    """The engine's internal state is inconsistent: a bug, never an invalid request."""


class PagePool:
    """`num_pages` pages of `page_size` tokens each. Page 0 is the scratch page and is never allocated.

    Every other page is in exactly one of three states: referenced (count >= 1), empty (count 0, contents invalid), or
    idle (count 0, contents kept by `keep`). Empty and idle pages both count as free: `allocate` takes empty ones first,
    then evicts the least recently released idle one, calling `on_evict` first.
    """

    def __init__(self, num_pages: int, page_size: int):
        if page_size < 1:
            raise ConfigError(f"page_size={page_size} is invalid: give at least 1 token")
        if num_pages < 2:
            raise ConfigError(f"num_pages={num_pages} is invalid: give at least 2, as page 0 is the scratch page")
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_evict: Callable[[int], None] | None = None  # set by the one PrefixCache on this pool
        self._counts = [0] * num_pages
        self._empty = list(range(num_pages - 1, SCRATCH_PAGE, -1))  # a stack: low numbers are allocated first
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._kept: set[int] = set()  # pages whose contents are cached, referenced or not

    @property
    def capacity(self) -> int:
        """Number of pages that can be allocated: all but the scratch page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Number of pages that `allocate` can return now, idle ones included."""
        return len(self._empty) + len(self._idle)

    @property
    def num_in_use(self) -> int:
        """Number of referenced pages."""
        return self.capacity - self.num_free

    @property
    def usage(self) -> float:
        """Fraction of the pages in use, 0 to 1; cached but unreferenced pages count as free."""
        return self.num_in_use / self.capacity

    def pages_for(self, num_tokens: int) -> int:
        """Return the number of pages that hold the keys and values of `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def ref_count(self, page: int) -> int:
        """Return the number of references to `page`."""
        return self._counts[page]

    def allocate(self, num: int) -> list[int]:
        """Return `num` pages with one reference each and undefined contents.

        Raises NoPages, allocating nothing, if fewer are free.
        """
        if num < 0:
            raise InvariantError(f"allocate({num}): a number of pages can't be negative")
        if num > self.num_free:
            raise NoPages(f"{num} pages were requested, {self.num_free} of {self.capacity} are free")
        pages = []
        for _ in range(num):
            page = self._empty.pop() if self._empty else self._evict_oldest()
            self._counts[page] = 1
            pages.append(page)
        return pages

    def acquire(self, pages: Sequence[int]) -> None:
        """Add a reference to each page. Each must be referenced or idle: an empty page has no contents to share."""
        for page in pages:
            if self._counts[page] == 0 and page not in self._idle:
                raise InvariantError(f"page {page} is empty (or the scratch page): it can't be shared")
        for page in pages:
            if self._counts[page] == 0:
                del self._idle[page]
            self._counts[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page. Raises InvariantError, changing nothing, for a page without references.

        Releases pages last to first, so that the end of a cached prefix is evicted before its beginning, which more
        prompts share.
        """
        if len(set(pages)) != len(pages):
            raise InvariantError(f"free() got the same page twice: {list(pages)}")
        unreferenced = [page for page in pages if self._counts[page] == 0]
        if unreferenced:
            raise InvariantError(f"double free: pages {unreferenced} have no references")
        for page in reversed(pages):
            self._counts[page] -= 1
            if self._counts[page] == 0:
                if page in self._kept:
                    self._idle[page] = None
                else:
                    self._empty.append(page)

    def keep(self, page: int) -> None:
        """Keep the contents of this referenced page after its release, until eviction or `discard`."""
        if self._counts[page] == 0:
            raise InvariantError(f"keep() got page {page}, which has no references: its contents may be overwritten")
        self._kept.add(page)

    def discard(self, page: int) -> None:
        """Stop keeping the contents of this kept page. Does not call `on_evict`."""
        self._kept.remove(page)
        if page in self._idle:
            del self._idle[page]
            self._empty.append(page)

    def problems(self) -> list[str]:
        """Describe every inconsistency of the pool; empty if there is none."""
        found = []
        empty = set(self._empty)
        if len(empty) != len(self._empty):
            found.append("a page is in the empty list twice")
        if SCRATCH_PAGE in empty or SCRATCH_PAGE in self._idle or self._counts[SCRATCH_PAGE]:
            found.append("the scratch page was allocated or freed")
        for page in range(1, self.num_pages):
            conditions = (self._counts[page] > 0) + (page in empty) + (page in self._idle)
            if conditions != 1:
                found.append(
                    f"page {page} is in {conditions} states instead of one: count {self._counts[page]}, "
                    f"empty {page in empty}, idle {page in self._idle}"
                )
            if page in self._idle and page not in self._kept:
                found.append(f"page {page} is idle though its contents are not kept")
            if page in empty and page in self._kept:
                found.append(f"page {page} is empty though its contents are kept")
        return found

    def check(self) -> None:
        """Raise InvariantError listing every problem. O(pages); for tests and the idle check."""
        found = self.problems()
        if found:
            raise InvariantError("the page pool is broken: " + "; ".join(found))

    def kept_pages(self) -> frozenset[int]:
        """Return the pages with kept contents, referenced or idle, as a copy; for checks."""
        return frozenset(self._kept)

    def _evict_oldest(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._kept.remove(page)
        if self.on_evict is not None:
            self.on_evict(page)
        return page

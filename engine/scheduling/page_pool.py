"""The pool of KV pages: who may write where, as plain ints.

Owns page numbers, their reference counts, and which unreferenced pages are still worth keeping for their contents.
Must not know tensors (the attention backend holds those), tokens, hashes or requests. One thread, the engine loop's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from engine.errors import ConfigError, EngineError

SCRATCH_PAGE = 0  # padded rows read and write here, so that they can't touch a request's pages


class NoPages(EngineError):
    """More pages were asked for than are free; nothing was taken."""


class InvariantError(EngineError, RuntimeError):
    """The engine's own bookkeeping is broken: a bug, never a caller's mistake."""


class PagePool:
    """`num_pages` pages of `page_size` tokens each; page 0 is the scratch page and is never lent.

    Every other page is in exactly one of three conditions:
    referenced (count >= 1), empty (count 0, contents worthless), or idle (count 0, contents kept by `keep`).
    Empty and idle pages both count as free: `allocate` takes empty ones first, then the least recently released
    idle one, telling `on_evict` about it first.
    """

    def __init__(self, num_pages: int, page_size: int):
        if page_size < 1:
            raise ConfigError(f"page_size={page_size}: at least 1 token is needed")
        if num_pages < 2:
            raise ConfigError(f"num_pages={num_pages}: at least 2 are needed, one is the scratch page")
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_evict: Callable[[int], None] | None = None  # set by the one PrefixCache on this pool
        self._counts = [0] * num_pages
        self._empty = list(range(num_pages - 1, SCRATCH_PAGE, -1))  # a stack: low numbers are lent first
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._kept: set[int] = set()  # pages whose contents are cached, referenced or not

    @property
    def capacity(self) -> int:
        """Pages that can be lent at all."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could give now, idle ones included."""
        return len(self._empty) + len(self._idle)

    @property
    def num_in_use(self) -> int:
        """Pages that somebody references."""
        return self.capacity - self.num_free

    @property
    def usage(self) -> float:
        """Share of the pages in use, 0 to 1; cached but unreferenced pages count as free."""
        return self.num_in_use / self.capacity

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold the keys and values of `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def ref_count(self, page: int) -> int:
        """References to `page`."""
        return self._counts[page]

    def allocate(self, num: int) -> list[int]:
        """`num` pages with one reference each, contents undefined. Raises NoPages and takes nothing if short."""
        if num < 0:
            raise InvariantError(f"allocate({num}): a number of pages can't be negative")
        if num > self.num_free:
            raise NoPages(f"{num} pages were asked for, {self.num_free} of {self.capacity} are free")
        pages = []
        for _ in range(num):
            page = self._empty.pop() if self._empty else self._evict_oldest()
            self._counts[page] = 1
            pages.append(page)
        return pages

    def acquire(self, pages: Sequence[int]) -> None:
        """Add a reference to each page; each must be referenced or idle, for an empty page has no contents to share."""
        for page in pages:
            if self._counts[page] == 0 and page not in self._idle:
                raise InvariantError(f"page {page} is empty (or the scratch page): it can't be shared")
        for page in pages:
            if self._counts[page] == 0:
                del self._idle[page]
            self._counts[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Drop one reference to each page. Raises InvariantError, changing nothing, for one that has none.

        Released last to first, so that of a chain of kept pages the end is evicted before the beginning that more
        prompts share.
        """
        if len(set(pages)) != len(pages):
            raise InvariantError(f"the same page is freed twice in one call: {list(pages)}")
        unreferenced = [page for page in pages if self._counts[page] == 0]
        if unreferenced:
            raise InvariantError(f"pages {unreferenced} are freed without a reference: a double free")
        for page in reversed(pages):
            self._counts[page] -= 1
            if self._counts[page] == 0:
                if page in self._kept:
                    self._idle[page] = None
                else:
                    self._empty.append(page)

    def keep(self, page: int) -> None:
        """From now on the contents of this referenced page are worth keeping after its release."""
        if self._counts[page] == 0:
            raise InvariantError(f"page {page} is kept while nobody references it: its contents are not settled")
        self._kept.add(page)

    def discard(self, page: int) -> None:
        """The contents of this kept page are worthless from now on; does not call `on_evict`."""
        self._kept.remove(page)
        if page in self._idle:
            del self._idle[page]
            self._empty.append(page)

    def problems(self) -> list[str]:
        """Everything that is wrong with the pool itself, in words; empty if it is whole."""
        found = []
        empty = set(self._empty)
        if len(empty) != len(self._empty):
            found.append("a page is twice among the empty ones")
        if SCRATCH_PAGE in empty or SCRATCH_PAGE in self._idle or self._counts[SCRATCH_PAGE]:
            found.append("the scratch page was lent or freed")
        for page in range(1, self.num_pages):
            conditions = (self._counts[page] > 0) + (page in empty) + (page in self._idle)
            if conditions != 1:
                found.append(
                    f"page {page} is in {conditions} conditions, not one: count {self._counts[page]}, "
                    f"empty {page in empty}, idle {page in self._idle}"
                )
            if page in self._idle and page not in self._kept:
                found.append(f"page {page} is idle though its contents are not kept")
            if page in empty and page in self._kept:
                found.append(f"page {page} is empty though its contents are kept")
        return found

    def check(self) -> None:
        """Raise InvariantError listing every problem; for tests and the idle check, O(pages)."""
        found = self.problems()
        if found:
            raise InvariantError("the page pool is broken: " + "; ".join(found))

    def kept_pages(self) -> frozenset[int]:
        """Pages whose contents are kept, referenced or idle; a copy, for checks."""
        return frozenset(self._kept)

    def _evict_oldest(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._kept.remove(page)
        if self.on_evict is not None:
            self.on_evict(page)
        return page

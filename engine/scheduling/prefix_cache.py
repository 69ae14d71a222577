"""The prefix cache: maps prefixes to full KV pages, so that prompts with the same beginning share keys and values.

A page's key in its cache group is a digest of (its parent's digest, its tokens). The first parent is a digest of the
salt, so equal keys mean equal prefixes under equal weights. Not thread-safe: the engine loop's thread owns it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Protocol

from engine.errors import ConfigError
from engine.scheduling.cache_groups import Windows, check_windows, pages_before
from engine.scheduling.kv_events import KVEventRecorder
from engine.scheduling.page_pool import PagePool


class PrefixChain:
    """The digests of one sequence's full pages, computed on demand. Created by `PrefixCache.chain`.

    A chain belongs to the cache generation that created it. After `reset` it matches and inserts nothing, which keeps
    pages computed with older weights out of the cache.
    """

    __slots__ = ("adapter", "cache_salt", "digests", "generation", "root")

    def __init__(self, root: bytes, generation: int, cache_salt: str = "", adapter: str = ""):
        self.root = root
        self.generation = generation
        self.cache_salt, self.adapter = cache_salt, adapter  # of the request, for events
        self.digests: list[bytes] = []

    def digest(self, index: int, token_ids: Sequence[int], page_size: int) -> bytes:
        """Return the key of full page `index` of `token_ids`. Earlier tokens must not differ from earlier calls."""
        while len(self.digests) <= index:
            start = len(self.digests) * page_size
            parent = self.digests[-1] if self.digests else self.root
            tokens = array("q", token_ids[start : start + page_size])
            self.digests.append(blake2b(parent + tokens.tobytes(), digest_size=32).digest())
        return self.digests[index]


class Tiers(Protocol):
    """What takes the blocks of evicted pages; see LowerTiers."""

    def evicted(self, group: int, digest: bytes, page: int) -> None: ...

    def reset(self) -> None: ...


class PrefixCache:
    """The cached pages of one pool, for one or more cache groups.

    A prefix of k pages is found if every group has the pages that the next query reads: a full group all k, a window
    group the pages of the last window - 1 tokens. `queries` and `hits` count prompt tokens looked up and found, never
    reset. Only paged keys and values are cached: don't use it for models with recurrent state. `events` records what
    is cached and evicted; None records nothing. `tiers` takes what is evicted; None drops it.
    """

    def __init__(self, pool: PagePool, groups: Windows = (None,), events: KVEventRecorder | None = None):
        check_windows(groups)
        if not groups:
            raise ConfigError(
                "groups=() is invalid with a prefix cache: without paged layers there is nothing to share"
            )
        self.pool = pool
        self.groups = groups
        self.events = events
        self.tiers: Tiers | None = None
        self.queries = 0
        self.hits = 0
        self.evictions = 0
        self.generation = 0
        self._page_of: list[dict[bytes, int]] = [{} for _ in groups]
        self._digest_of: dict[int, bytes] = {}  # for the pages of all groups
        self._pages_before = [None if window is None else pages_before(window, pool.page_size) for window in groups]
        pool.on_evict = self._evicted

    def __len__(self) -> int:
        """Number of cached pages, referenced or idle."""
        return len(self._digest_of)

    def chain(self, salt: str, cache_salt: str = "", adapter: str = "") -> PrefixChain:
        """Create the chain of one sequence. Sequences with different salts never share pages.

        `cache_salt` and `adapter`: the parts of the salt that the request gave, which events name.
        """
        root = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()
        return PrefixChain(root, self.generation, cache_salt, adapter)

    def is_current(self, chain: PrefixChain) -> bool:
        """Whether the chain was created after the last `reset`."""
        return chain.generation == self.generation

    def lookup(self, chain: PrefixChain, token_ids: Sequence[int]) -> list[list[int]]:
        """Return the page tables, one per group, of the longest cached prefix of `token_ids`.

        They are equally long; entries that lie before a group's window are 0. The pages are neither referenced nor
        counted. At least one token is left to compute, because its logits are needed.
        """
        size = self.pool.page_size
        length = (len(token_ids) - 1) // size if self.is_current(chain) else 0
        tables: list[list[int]] = [[] for _ in self.groups]
        for table, page_of, before in zip(tables, self._page_of, self._pages_before, strict=True):
            if before is None:
                for index in range(length):
                    page = page_of.get(chain.digest(index, token_ids, size))
                    if page is None:
                        break
                    table.append(page)
                length = len(table)
        while (gap := self._last_gap(chain, token_ids, length)) is not None:
            length = gap  # every longer prefix needs the missing entry, too
        for table, page_of, before in zip(tables, self._page_of, self._pages_before, strict=True):
            del table[length:]
            if before is not None:
                start = max(0, length - before)
                table += [0] * start
                table += [page_of[chain.digest(index, token_ids, size)] for index in range(start, length)]
        return tables

    def length_with(
        self, below: Callable[[int, bytes], bool], chain: PrefixChain, token_ids: Sequence[int], found: int
    ) -> int:
        """Return the length in pages of the longest prefix whose entries are cached or in the tiers below.

        `found`: the length that `lookup` has found. `below(group, digest)`: whether a tier has a block.
        """
        size = self.pool.page_size
        length = (len(token_ids) - 1) // size if self.is_current(chain) else 0

        def holds(group: int, digest: bytes) -> bool:
            return digest in self._page_of[group] or below(group, digest)

        for group, before in enumerate(self._pages_before):
            if before is None:
                indices = range(found, length)
                length = next((i for i in indices if not holds(group, chain.digest(i, token_ids, size))), length)
        while (gap := self._last_gap(chain, token_ids, length, holds)) is not None:
            length = gap
        return length

    def entries(self, chain: PrefixChain, token_ids: Sequence[int], length: int) -> list[tuple[int, int, int]]:
        """Return (group, index, page) of each entry that a prefix of `length` pages needs; page 0: it isn't cached."""
        found = []
        for group, (page_of, before) in enumerate(zip(self._page_of, self._pages_before, strict=True)):
            for index in range(0 if before is None else max(0, length - before), length):
                page = page_of.get(chain.digest(index, token_ids, self.pool.page_size), 0)
                found.append((group, index, page))
        return found

    def pages(self) -> Iterator[tuple[int, bytes, int]]:
        """Yield (group, digest, page) of all cached pages."""
        for group, page_of in enumerate(self._page_of):
            for digest, page in page_of.items():
                yield group, digest, page

    def page(self, group: int, digest: bytes) -> int:
        """Return the page with this key; 0 if there is none."""
        return self._page_of[group].get(digest, 0)

    def next_page(self, chain: PrefixChain, token_ids: Sequence[int], length: int) -> bytes | None:
        """Return the digest of the page after the first `length` pages; None if a lookup would not look for it."""
        size = self.pool.page_size
        return chain.digest(length, token_ids, size) if length < (len(token_ids) - 1) // size else None

    def acquire(self, tables: Sequence[Sequence[int]]) -> None:
        """Reference the pages that `lookup` returned. Call it before any allocation; the caller frees them."""
        for table in tables:
            self.pool.acquire([page for page in table if page])

    def record_lookup(self, queried: int, hit: int) -> None:
        """Count a lookup that was used, in tokens. Separate from `lookup`, which a blocked request repeats."""
        self.queries += queried
        self.hits += hit

    def match(self, token_ids: Sequence[int], salt: str) -> list[list[int]]:
        """Look up, reference and count in one call; the caller frees the returned pages."""
        tables = self.lookup(self.chain(salt), token_ids)
        self.acquire(tables)
        self.record_lookup(len(token_ids), len(tables[0]) * self.pool.page_size)
        return tables

    def insert(
        self, chain: PrefixChain, token_ids: Sequence[int], tables: Sequence[Sequence[int]], start: int, stop: int
    ) -> None:
        """Cache entries [start, stop) of each group's page table; each page must be referenced, full and computed.

        Entries that are 0 are skipped. If a group has already cached a prefix, its page stays and the given one remains
        private. Does nothing for a chain created before a `reset`.
        """
        if not self.is_current(chain):
            return
        for group, page_of in enumerate(self._page_of):
            table, added = tables[group], []
            for index in range(start, stop):
                digest = chain.digest(index, token_ids, self.pool.page_size)
                if digest not in page_of and (page := table[index]):
                    self.pool.keep(page)
                    page_of[digest] = page
                    self._digest_of[page] = digest
                    added.append(index)
            if added and self.events is not None:
                self.events.stored(group, chain.digests, added, token_ids, chain.cache_salt, chain.adapter)

    def reset(self) -> None:
        """Drop all entries and start a new generation. Referenced pages stay with their requests, but aren't shared."""
        for page in self._digest_of:
            self.pool.discard(page)
        for page_of in self._page_of:
            page_of.clear()
        self._digest_of.clear()
        self.generation += 1
        if self.tiers is not None:
            self.tiers.reset()
        if self.events is not None:
            self.events.cleared()

    def problems(self) -> list[str]:
        """Describe every inconsistency within the cache or with its pool; empty if there is none."""
        found = []
        digests = {page: digest for page_of in self._page_of for digest, page in page_of.items()}
        if digests != self._digest_of or len(digests) != sum(map(len, self._page_of)):
            found.append("the prefix cache's maps disagree")
        kept = self.pool.kept_pages()
        if kept != self._digest_of.keys():
            found.append(f"pages kept but not cached, or the reverse: {sorted(kept ^ self._digest_of.keys())}")
        return found

    def _last_gap(
        self,
        chain: PrefixChain,
        token_ids: Sequence[int],
        length: int,
        holds: Callable[[int, bytes], bool] | None = None,
    ) -> int | None:
        """Return an entry that a window group needs for a prefix of `length` pages and lacks, or None.

        It is the last such entry of its group, so no prefix between it and `length` is complete either. `holds`:
        whether there is a page or a block; None: whether there is a page.
        """
        holds = holds or (lambda group, digest: digest in self._page_of[group])
        for group, before in enumerate(self._pages_before):
            if before is not None:
                for index in range(length - 1, max(0, length - before) - 1, -1):
                    if not holds(group, chain.digest(index, token_ids, self.pool.page_size)):
                        return index
        return None

    def _evicted(self, page: int) -> None:
        digest = self._digest_of.pop(page)
        for group, page_of in enumerate(self._page_of):
            if page_of.get(digest) == page:
                del page_of[digest]
                if self.tiers is not None:
                    self.tiers.evicted(group, digest, page)
                if self.events is not None:
                    self.events.removed(group, digest)
        self.evictions += 1

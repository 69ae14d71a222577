"""The prefix cache: maps prefixes to full KV pages, so that prompts with the same beginning share keys and values.

A page's key is a digest of (its parent's digest, its tokens). The first parent is a digest of the salt, so equal keys
mean equal prefixes under equal weights. Not thread-safe: the engine loop's thread owns it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from engine.scheduling.page_pool import PagePool


class PrefixChain:
    """The digests of one sequence's full pages, computed on demand. Created by `PrefixCache.chain`.

    A chain belongs to the cache generation that created it. After `reset` it matches and inserts nothing, which keeps
    pages computed with older weights out of the cache.
    """

    __slots__ = ("digests", "generation", "root")

    def __init__(self, root: bytes, generation: int):
        self.root = root
        self.generation = generation
        self.digests: list[bytes] = []

    def digest(self, index: int, token_ids: Sequence[int], page_size: int) -> bytes:
        """Return the key of full page `index` of `token_ids`. Earlier tokens must not differ from earlier calls."""
        while len(self.digests) <= index:
            start = len(self.digests) * page_size
            parent = self.digests[-1] if self.digests else self.root
            tokens = array("q", token_ids[start : start + page_size])
            self.digests.append(blake2b(parent + tokens.tobytes(), digest_size=32).digest())
        return self.digests[index]


class PrefixCache:
    """The cached pages of one pool. `queries` and `hits` count prompt tokens looked up and found, never reset."""

    def __init__(self, pool: PagePool):
        self.pool = pool
        self.queries = 0
        self.hits = 0
        self.evictions = 0
        self.generation = 0
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        pool.on_evict = self._evicted

    def __len__(self) -> int:
        """Number of cached pages, referenced or idle."""
        return len(self._page_of)

    def chain(self, salt: str) -> PrefixChain:
        """Create the chain of one sequence. Sequences with different salts (weight versions) never share pages."""
        return PrefixChain(blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32).digest(), self.generation)

    def is_current(self, chain: PrefixChain) -> bool:
        """Whether the chain was created after the last `reset`."""
        return chain.generation == self.generation

    def lookup(self, chain: PrefixChain, token_ids: Sequence[int]) -> list[int]:
        """Return the pages of the longest cached prefix of `token_ids`, without referencing or counting them.

        At least one token is left to compute, because its logits are needed.
        """
        pages: list[int] = []
        if not self.is_current(chain):
            return pages
        for index in range((len(token_ids) - 1) // self.pool.page_size):
            page = self._page_of.get(chain.digest(index, token_ids, self.pool.page_size))
            if page is None:
                break
            pages.append(page)
        return pages

    def acquire(self, pages: Sequence[int]) -> None:
        """Reference the pages that `lookup` returned. Call it before any allocation; the caller frees them."""
        self.pool.acquire(pages)

    def record_lookup(self, queried: int, hit: int) -> None:
        """Count a lookup that was used, in tokens. Separate from `lookup`, which a blocked request repeats."""
        self.queries += queried
        self.hits += hit

    def match(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """Look up, reference and count in one call; the caller frees the returned pages."""
        pages = self.lookup(self.chain(salt), token_ids)
        self.acquire(pages)
        self.record_lookup(len(token_ids), len(pages) * self.pool.page_size)
        return pages

    def insert(self, chain: PrefixChain, token_ids: Sequence[int], pages: Sequence[int], start: int, stop: int) -> None:
        """Cache pages[start:stop] of the sequence `token_ids`; each must be referenced, full and computed.

        If a prefix is already cached, its page stays and the given one remains private. Does nothing for a chain
        created before a `reset`.
        """
        if not self.is_current(chain):
            return
        for index in range(start, stop):
            digest = chain.digest(index, token_ids, self.pool.page_size)
            if digest not in self._page_of:
                self.pool.keep(pages[index])
                self._page_of[digest] = pages[index]
                self._digest_of[pages[index]] = digest

    def reset(self) -> None:
        """Drop all entries and start a new generation. Referenced pages stay with their requests, but aren't shared."""
        for page in self._digest_of:
            self.pool.discard(page)
        self._page_of.clear()
        self._digest_of.clear()
        self.generation += 1

    def problems(self) -> list[str]:
        """Describe every inconsistency within the cache or with its pool; empty if there is none."""
        found = []
        if {page: digest for digest, page in self._page_of.items()} != self._digest_of:
            found.append("the prefix cache's two maps disagree")
        kept = self.pool.kept_pages()
        if kept != self._digest_of.keys():
            found.append(f"pages kept but not cached, or the reverse: {sorted(kept ^ self._digest_of.keys())}")
        return found

    def _evicted(self, page: int) -> None:
        del self._page_of[self._digest_of.pop(page)]
        self.evictions += 1

"""Which full pages hold which tokens: prompts that begin alike share their keys and values.

Owns the map from a prefix to its pages and its counters. A page's key is a digest of (its parent's digest, its
tokens), and the first parent is a digest of the salt, so that equal keys mean equal prefixes under equal weights.
Must not know requests, queues or tensors. One thread, the engine loop's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from engine.scheduling.page_pool import PagePool


class PrefixChain:
    """The digests of one sequence's full pages, computed as far as anybody asked; made by `PrefixCache.chain`.

    It belongs to the generation of the cache that made it: after `reset` it matches nothing and inserts nothing,
    which keeps pages written under older weights out for good.
    """

    __slots__ = ("digests", "generation", "root")

    def __init__(self, root: bytes, generation: int):
        self.root = root
        self.generation = generation
        self.digests: list[bytes] = []

    def digest(self, index: int, token_ids: Sequence[int], page_size: int) -> bytes:
        """The key of full page `index` of `token_ids`; earlier tokens must be those of earlier calls."""
        while len(self.digests) <= index:
            start = len(self.digests) * page_size
            parent = self.digests[-1] if self.digests else self.root
            tokens = array("q", token_ids[start : start + page_size])
            self.digests.append(blake2b(parent + tokens.tobytes(), digest_size=32).digest())
        return self.digests[index]


class PrefixCache:
    """The cached pages of one pool. `queries` and `hits` count prompt tokens looked up and found; never reset."""

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
        """Pages in the cache, referenced or idle."""
        return len(self._page_of)

    def chain(self, salt: str) -> PrefixChain:
        """A chain for one sequence. Sequences of different salts (the weights' version) never share pages."""
        return PrefixChain(blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32).digest(), self.generation)

    def is_current(self, chain: PrefixChain) -> bool:
        """Whether no `reset` came since the chain was made."""
        return chain.generation == self.generation

    def lookup(self, chain: PrefixChain, token_ids: Sequence[int]) -> list[int]:
        """Pages holding the longest cached prefix of `token_ids`, not referenced and not counted: see `take`.

        Never the whole: at least one token is left to compute, for its logits are needed.
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
        """Reference the pages of a `lookup`, before anything else is allocated; the caller frees them."""
        self.pool.acquire(pages)

    def record_lookup(self, queried: int, hit: int) -> None:
        """Count a lookup that was acted on, in tokens; apart, for a blocked request is looked up many times."""
        self.queries += queried
        self.hits += hit

    def match(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """`lookup`, `take` and `count` in one: the pages are referenced for the caller."""
        pages = self.lookup(self.chain(salt), token_ids)
        self.acquire(pages)
        self.record_lookup(len(token_ids), len(pages) * self.pool.page_size)
        return pages

    def insert(self, chain: PrefixChain, token_ids: Sequence[int], pages: Sequence[int], start: int, stop: int) -> None:
        """Offer pages[start:stop], each full and computed, of the sequence `token_ids` that references `pages`.

        A prefix that is cached already keeps its page, and the offered one stays private. A chain from before a
        `reset` is ignored.
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
        """Drop everything and start a new generation: pages in use stay with their users, but are never shared."""
        for page in self._digest_of:
            self.pool.discard(page)
        self._page_of.clear()
        self._digest_of.clear()
        self.generation += 1

    def problems(self) -> list[str]:
        """Where the cache disagrees with itself or with its pool, in words; empty if nowhere."""
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

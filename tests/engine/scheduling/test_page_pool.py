"""The page pool: every page is in exactly one state, and misuse raises before anything changes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine.errors import ConfigError
from engine.scheduling.page_pool import SCRATCH_PAGE, InvariantError, NoPages, PagePool


def test_scratch_page_is_never_allocated():
    pool = PagePool(num_pages=5, page_size=4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(InvariantError):
        pool.free([SCRATCH_PAGE])
    with pytest.raises(InvariantError):
        pool.acquire([SCRATCH_PAGE])


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 16), (0, 16), (8, 0)])
def test_pool_rejects_sizes_without_a_usable_page(num_pages, page_size):
    with pytest.raises(ConfigError):
        PagePool(num_pages, page_size)


def test_short_pool_raises_and_takes_nothing():
    pool = PagePool(4, 16)
    pool.allocate(2)
    with pytest.raises(NoPages, match="2 pages were requested, 1 of 3 are free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check()


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for_rounds_up(tokens, pages):
    assert PagePool(4, 16).pages_for(tokens) == pages


def test_shared_page_comes_back_with_its_last_reference():
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    pool.acquire(pages)
    pool.free(pages)
    assert pool.num_in_use == 2 and pool.usage == pytest.approx(2 / 3)
    pool.free(pages)
    assert pool.num_in_use == 0 and pool.usage == 0.0


@pytest.mark.parametrize("wrong", [lambda pages: [*pages, pages[0]], lambda pages: [pages[0], 3]])
def test_double_free_raises_and_changes_nothing(wrong):
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    with pytest.raises(InvariantError):
        pool.free(wrong(pages))
    assert [pool.ref_count(page) for page in pages] == [1, 1]
    pool.check()


def test_kept_page_is_allocated_last_and_its_eviction_is_reported():
    pool = PagePool(4, 16)
    evicted = []
    pool.on_evict = evicted.append
    first, second, third = pool.allocate(3)
    pool.keep(first)
    pool.keep(third)
    pool.free([third])
    pool.free([first])
    pool.free([second])
    assert pool.allocate(1) == [second] and evicted == []
    assert pool.allocate(2) == [third, first]
    assert evicted == [third, first]


def test_chain_released_together_is_evicted_from_its_end():
    pool = PagePool(4, 16)
    pages = pool.allocate(3)
    for page in pages:
        pool.keep(page)
    pool.free(pages)
    assert pool.allocate(3) == pages[::-1]


def test_idle_page_can_be_shared_again_but_an_empty_one_cannot():
    pool = PagePool(4, 16)
    kept, plain = pool.allocate(2)
    pool.keep(kept)
    pool.free([kept, plain])
    pool.acquire([kept])
    assert pool.ref_count(kept) == 1 and pool.num_free == 2
    with pytest.raises(InvariantError, match="can't be shared"):
        pool.acquire([plain])


def test_discarded_page_is_empty_again():
    pool = PagePool(3, 16)
    evicted = []
    pool.on_evict = evicted.append
    idle, used = pool.allocate(2)
    pool.keep(idle)
    pool.keep(used)
    pool.free([idle])
    pool.discard(idle)
    pool.discard(used)
    pool.free([used])
    assert sorted(pool.allocate(2)) == sorted([idle, used]) and evicted == []
    pool.check()


def test_check_lists_every_problem_at_once():
    pool = PagePool(3, 16)
    first, second = pool.allocate(2)
    for page in (first, second):
        pool.keep(page)
    pool.free([first, second])
    pool.on_evict = lambda page: 1 / 0  # loses the page that is being evicted
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            pool.allocate(1)
    with pytest.raises(InvariantError, match=rf"page {first} is in 0 states.*page {second} is in 0 states"):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Random owners allocate, share, keep and free pages; the reference model is a plain list of references."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.pool = PagePool(num_pages=9, page_size=4)
        self.references: list[int] = []
        self.kept: set[int] = set()
        self.pool.on_evict = self.kept.remove

    @rule(target=held, num=st.integers(0, 5))
    def allocate(self, num):
        free = 8 - len(set(self.references))
        assert self.pool.num_free == free
        if num > free:
            with pytest.raises(NoPages):
                self.pool.allocate(num)
            return multiple()
        pages = self.pool.allocate(num)
        assert len(set(pages)) == num and not set(pages) & set(self.references)
        assert not set(pages) & self.kept
        self.references += pages
        return pages

    @rule(target=held, pages=held)
    def share(self, pages):
        self.pool.acquire(pages)
        self.references += pages
        return pages

    @rule(pages=consumes(held))
    def free(self, pages):
        self.pool.free(pages)
        for page in pages:
            self.references.remove(page)

    @rule(pages=held)
    def keep(self, pages):
        for page in pages:
            self.pool.keep(page)
        self.kept |= set(pages)

    @rule(data=st.data())
    def revive(self, data):
        idle = sorted(self.kept - set(self.references))
        if idle:
            page = data.draw(st.sampled_from(idle))
            self.pool.acquire([page])
            self.pool.free([page])

    @rule(data=st.data())
    def discard(self, data):
        if self.kept:
            page = data.draw(st.sampled_from(sorted(self.kept)))
            self.pool.discard(page)
            self.kept.remove(page)

    @invariant()
    def agrees_with_the_model(self):
        self.pool.check()
        assert [self.pool.ref_count(page) for page in range(9)] == [self.references.count(page) for page in range(9)]
        assert self.pool.kept_pages() == self.kept


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

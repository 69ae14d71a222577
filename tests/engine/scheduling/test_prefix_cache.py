"""The prefix cache: a hit was computed for exactly this prefix with exactly these weights."""

import pytest

from engine.scheduling.page_pool import PagePool
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import RequestState
from tests.engine.scheduling.steps import add, chunks, make, names, step

SIZE = 4


def stored(cache: PrefixCache, token_ids: list[int], salt: str = "v1") -> list[int]:
    """Allocate pages for `token_ids`, cache the full ones and free all of them. Returns the pages."""
    pages = cache.pool.allocate(cache.pool.pages_for(len(token_ids)))
    cache.insert(cache.chain(salt), token_ids, [pages], 0, len(token_ids) // SIZE)
    cache.pool.free(pages)
    return pages


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(PagePool(num_pages=17, page_size=SIZE))


def test_match_returns_the_pages_of_the_shared_prefix_referenced(cache):
    pages = stored(cache, list(range(12)))
    found = cache.match([*range(8), 99, 98, 97, 96, 95], "v1")
    assert found == [pages[:2]]
    assert [cache.pool.ref_count(page) for page in pages] == [1, 1, 0]


@pytest.mark.parametrize(("length", "pages"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_match_leaves_at_least_one_token_to_compute(cache, length, pages):
    stored(cache, list(range(12)))
    assert len(cache.match(list(range(length)), "v1")[0]) == pages


def test_same_page_after_another_prefix_does_not_match(cache):
    stored(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.match([9, 9, 9, 9, 5, 6, 7, 8, 0], "v1") == [[]]
    assert cache.match([5, 6, 7, 8, 0], "v1") == [[]]


def test_other_weights_never_match(cache):
    stored(cache, list(range(8)), salt="v1")
    assert cache.match(list(range(9)), "v2") == [[]]
    assert len(cache.match(list(range(9)), "v1")[0]) == 2


def test_reset_empties_the_cache_and_refuses_pages_begun_before(cache):
    tokens = list(range(8))
    chain = cache.chain("v1")
    pages = cache.pool.allocate(2)
    cache.insert(chain, tokens, [pages], 0, 1)
    cache.reset()
    assert len(cache) == 0 and cache.match(tokens, "v1") == [[]]
    cache.insert(chain, tokens, [pages], 1, 2)
    assert len(cache) == 0
    assert cache.lookup(chain, tokens) == [[]]
    cache.pool.free(pages)
    assert cache.pool.num_free == 16 and cache.problems() == []


def test_reset_separates_two_runs_under_the_same_version(cache):
    # A version name that is used again (a roll-back) must not match chains from its first use.
    old = cache.chain("v1")
    cache.reset()
    cache.reset()
    page = cache.pool.allocate(1)
    cache.insert(old, list(range(4)), [page], 0, 1)
    assert cache.match(list(range(5)), "v1") == [[]]


def test_duplicate_prefix_keeps_the_first_page_and_leaves_the_second_private(cache):
    first = stored(cache, list(range(8)))
    second = cache.pool.allocate(2)
    cache.insert(cache.chain("v1"), list(range(8)), [second], 0, 2)
    assert cache.match(list(range(9)), "v1") == [first]
    cache.pool.free(second)
    assert cache.pool.allocate(1)[0] in second and cache.evictions == 0


def test_eviction_takes_the_least_recently_used_prefix_from_its_end(cache):
    old = stored(cache, list(range(16)))
    young = stored(cache, list(range(100, 116)))
    cache.pool.free(cache.match(list(range(17)), "v1")[0])  # used again: now the most recent of the two
    cache.pool.allocate(8 + 1)
    assert cache.evictions == 1
    assert len(cache.lookup(cache.chain("v1"), list(range(17)))[0]) == len(old)
    assert cache.lookup(cache.chain("v1"), list(range(100, 117))) == [young[:3]]


def test_pages_in_use_are_never_evicted(cache):
    stored(cache, list(range(8)))
    held = cache.match(list(range(9)), "v1")
    cache.pool.allocate(14)
    assert cache.pool.num_free == 0 and cache.evictions == 0
    assert cache.lookup(cache.chain("v1"), list(range(9))) == held


def test_evicted_parent_computed_again_finds_its_children(cache):
    first, second = stored(cache, list(range(8)))
    cache.pool.acquire([second])
    cache.pool.free(cache.pool.allocate(15))
    assert cache.evictions == 1 and cache.lookup(cache.chain("v1"), list(range(9))) == [[]]
    again = stored(cache, list(range(4)))
    assert cache.lookup(cache.chain("v1"), list(range(9))) == [[*again, second]]


def test_queries_and_hits_count_tokens(cache):
    stored(cache, list(range(8)))
    cache.match(list(range(10)), "v1")
    cache.match([7, 7, 7], "v1")
    cache.lookup(cache.chain("v1"), list(range(10)))  # a lookup that was not used
    assert (cache.queries, cache.hits) == (13, 8)


def test_any_version_name_makes_a_salt(cache):
    # Names come over HTTP: JSON can contain a lone surrogate, which strict UTF-8 can't encode.
    stored(cache, list(range(4)), salt="\ud800")
    assert len(cache.match(list(range(5)), "\ud800")[0]) == 1


def test_problems_names_a_page_that_the_pool_keeps_and_the_cache_does_not(cache):
    page = cache.pool.allocate(1)[0]
    cache.pool.keep(page)
    assert cache.problems() == [f"pages kept but not cached, or the reverse: [{page}]"]


# --- one prompt, several samples ---


def test_the_samples_of_a_prompt_compute_it_once_also_before_its_tokens_are_read():
    scheduler = make(seqs=8, budget=64)
    prompt = list(range(21))
    for index in range(4):
        add(scheduler, f"a{index}", prompt, index=index)
    first = scheduler.schedule()
    scheduler.dispatch(first)
    second = scheduler.schedule()  # the first step is still in flight
    scheduler.dispatch(second)
    assert chunks(first) == [("a0", 0, 21, True)]
    assert names(second.decodes) == ["a0", "a1", "a2", "a3"]  # the last token of a prompt is always computed
    assert [request.cached_tokens for request in scheduler.requests()] == [0, 20, 20, 20]


def test_samples_of_a_prompt_longer_than_a_step_compute_each_token_once():
    scheduler = make(seqs=8, budget=16, pages=128)
    for index in range(3):
        add(scheduler, f"a{index}", list(range(70)), index=index, max_tokens=2)
    computed = 0
    while scheduler.has_work:
        computed += sum(chunk.length for chunk in step(scheduler).prefills)
    assert computed <= 70 + 2 * 2
    scheduler.idle_check()


def test_a_prompt_with_another_salt_or_with_log_probabilities_of_the_prompt_does_not_wait():
    scheduler = make(seqs=8, budget=64)
    add(scheduler, "a", list(range(12)))
    add(scheduler, "b", list(range(12)), cache_salt="other")
    add(scheduler, "c", list(range(12)), prompt_logprobs=1)
    assert [name for name, *_ in chunks(scheduler.schedule())] == ["a", "b", "c"]


def test_pages_of_a_failed_step_are_shared_with_no_later_request():
    scheduler = make(seqs=8, budget=64)
    request = add(scheduler, "a", list(range(12)))
    scheduler.dispatch(scheduler.schedule())
    scheduler.finish(request, RequestState.FAILED)
    other = add(scheduler, "b", list(range(12)))
    step(scheduler)
    assert other.cached_tokens == 0

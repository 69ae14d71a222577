"""Cache groups: page tables with windows, prefixes that every group can continue, and limits of the pool."""

import pytest

from engine.errors import ConfigError, PromptTooLong
from engine.scheduling.cache_groups import CacheGroups
from engine.scheduling.page_pool import PagePool
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import RequestState
from engine.scheduling.scheduler import Scheduler, SchedulerConfig, SchedulerInvariantError
from tests.engine.scheduling.steps import PAGE, add, make, names, step


def held(request) -> list[int]:
    """Return the number of pages that the request holds in each group."""
    return [len([page for page in table if page]) for table in request.page_tables]


# --- page arithmetic ---


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 16, 17])
@pytest.mark.parametrize("max_chunk", [1, 3, 16])
def test_window_group_holds_exactly_the_pages_that_its_queries_read(page_size, window, max_chunk):
    groups, total = CacheGroups((None, window), page_size, max_chunk), 80
    most = 0
    for computed in range(total):
        read = {position // page_size for query in range(computed, total) for position in range(total)
                if query - window < position <= query}  # fmt: skip
        assert groups.first_needed(computed) == [0, min(read)]
        chunk = {page for page in read if page * page_size < min(total, computed + max_chunk)}
        lengths = groups.table_lengths(computed, total)
        assert lengths[0] == -(-total // page_size) and max(chunk) < lengths[1] <= lengths[0]
        most = max(most, len(chunk))
    assert groups.max_pages(total) == -(-total // page_size) + most


# --- pages of a request ---


def test_pages_that_left_the_window_are_freed_and_their_entries_become_the_scratch_page():
    scheduler = make(groups=(None, 6), cached=False)
    request = add(scheduler, "a", 10, max_tokens=20)
    step(scheduler)
    full, window = (list(table) for table in request.page_tables)
    while request.num_computed < 13:
        step(scheduler)
    assert request.page_tables[0][:3] == full and request.num_freed == [0, 1]
    assert request.page_tables[1][:3] == [0, *window[1:3]]  # the query at 13 reads positions 8 to 13, at 12 it read 7
    while request.state is RequestState.RUNNING:
        assert held(request)[1] <= 3  # at most 6 positions, at any alignment
        step(scheduler)
    assert request.state is RequestState.FINISHED
    scheduler.idle_check()


def test_long_prompt_needs_only_its_chunk_and_window():
    scheduler = make(pages=7, budget=8, seqs=1, groups=(12,), cached=False)
    request = add(scheduler, "a", 200, max_tokens=40)
    while scheduler.has_work:
        step(scheduler)
        assert sum(held(request)) <= 6 == CacheGroups((12,), PAGE, 8).max_pages(200)
    assert request.output_len == 40


@pytest.mark.parametrize(("groups", "pages", "limit"), [((None, None), 9, 17), ((None, 5), 9, 25), ((5, 9), 9, 256)])
def test_token_limit_is_what_a_request_alone_in_the_pool_can_store(groups, pages, limit):
    scheduler = make(pages=pages, budget=4, seqs=2, groups=groups)
    request = add(scheduler, "a", 10, max_tokens=None)
    assert scheduler.token_limit(request) == limit
    while scheduler.has_work:
        step(scheduler)
    assert len(request.token_ids) == limit and scheduler.num_preemptions == 0
    if limit < 256:
        with pytest.raises(PromptTooLong, match=f"need .* pages of 4 tokens, the whole KV cache has {pages}"):
            add(scheduler, "b", limit, max_tokens=1 + PAGE)
    scheduler.idle_check()


def test_head_enters_on_pages_that_left_a_window():
    scheduler = make(pages=12, budget=32, groups=(4,), cached=False)
    add(scheduler, "long", 32, max_tokens=20)
    step(scheduler)
    late = add(scheduler, "late", 16, max_tokens=4, arrival=1.0)
    assert not step(scheduler).preempted
    step(scheduler)
    assert late.slot is not None and scheduler.get("long").slot is not None


def test_request_whose_freed_pages_are_shared_preempts_the_last_in_order():
    # Pages that "sharer" references don't return to the pool when they leave the window of "first".
    scheduler = make(pages=6, budget=8, groups=(12,))
    prompt = list(range(16))
    first = add(scheduler, "first", prompt, max_tokens=20)
    for _ in range(3):
        step(scheduler)
    assert held(first) == [4] and first.num_freed == [1]
    add(scheduler, "small", 1, max_tokens=4, arrival=1.0)
    sharer = add(scheduler, "sharer", [*prompt, 99], max_tokens=4, arrival=2.0)
    assert names(step(scheduler).decodes) == ["first", "small", "sharer"] and sharer.cached_tokens == 16
    while first.num_computed < 20:
        assert not step(scheduler).preempted
    batch = step(scheduler)
    assert names(batch.preempted) == ["sharer"] and names(batch.decodes)[0] == "first"
    while scheduler.has_work:
        step(scheduler)
    scheduler.idle_check()


def test_urgent_request_counts_the_pages_of_all_its_victims_groups():
    scheduler = make(pages=8, groups=(None, 9))
    add(scheduler, "low", 8, max_tokens=3, priority=1)
    step(scheduler)
    add(scheduler, "high", 8, max_tokens=3)
    batch = step(scheduler)
    assert names(batch.preempted) == ["low"] and names(batch.admitted) == ["high"]


def test_model_without_paged_layers_needs_no_pages():
    scheduler = make(pages=1, groups=(), cached=False)
    request = add(scheduler, "a", 100, max_tokens=30)
    step(scheduler)
    assert request.page_tables == [] and scheduler.pool.num_in_use == 0
    while scheduler.has_work:
        step(scheduler)
    assert request.output_len == 30
    scheduler.idle_check()


def test_check_finds_a_freed_entry_that_is_not_zero_and_a_page_in_two_groups():
    scheduler = make(groups=(None, 6))
    request = add(scheduler, "a", 10)
    step(scheduler)
    request.num_freed[1] = 1
    with pytest.raises(SchedulerInvariantError, match="freed 1 pages, not those before its window, in group 1"):
        scheduler.check()
    request.num_freed[1] = 0
    request.page_tables[1][0] = request.page_tables[0][0]
    with pytest.raises(SchedulerInvariantError, match="holds a page twice.*page 1 has 1 references, .* hold 2"):
        scheduler.check()


# --- steps in flight ---


def test_pages_of_a_step_in_flight_stay_for_the_prefix_cache():
    scheduler = make(groups=(None, 6), budget=64)
    request = add(scheduler, "a", list(range(40)), max_tokens=20)
    prefill = scheduler.schedule()
    scheduler.dispatch(prefill)
    assert request.num_freed == [0, 0]  # the prefill's pages are cached from here on
    decode = scheduler.schedule()
    scheduler.dispatch(decode)
    assert request.num_freed == [0, 8]
    scheduler.complete(prefill, [7])
    scheduler.complete(decode, [7])
    while request.num_computed < 45:
        step(scheduler)
    assert request.num_freed == [0, 9]
    other = add(scheduler, "b", [*range(20), 99], max_tokens=1)
    assert names(step(scheduler).decodes) == ["a", "b"]
    assert other.cached_tokens == 20


def test_pages_of_a_step_in_flight_are_freed_if_the_pool_lacks_pages():
    scheduler = make(pages=6, seqs=1, budget=8, groups=(12,))
    request = add(scheduler, "a", 60, max_tokens=2)
    batches = []
    for _ in range(7):  # no step completes meanwhile
        batches.append(scheduler.schedule())
        scheduler.dispatch(batches[-1])
        scheduler.check()
    assert request.num_computed == 56 and sum(held(request)) <= 6
    for batch in batches:
        scheduler.complete(batch, [])
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.num_preemptions == 0
    scheduler.idle_check()


# --- prefix cache ---


def stored(cache: PrefixCache, token_ids: list[int]) -> list[list[int]]:
    """Cache the full pages of `token_ids` in every group and free them. Returns the page tables."""
    tables = [cache.pool.allocate(len(token_ids) // PAGE) for _ in cache.groups]
    cache.insert(cache.chain(""), token_ids, tables, 0, len(token_ids) // PAGE)
    for table in tables:
        cache.pool.free(table)
    return tables


def evict(cache: PrefixCache, *pages: int) -> None:
    """Evict these pages: allocate all free pages while the other cached ones are in use."""
    others = [page for page in cache.pool.kept_pages() if page not in pages]
    cache.pool.acquire(others)
    cache.pool.free(cache.pool.allocate(cache.pool.num_free) + others)


def test_match_has_zeros_before_the_window():
    cache = PrefixCache(PagePool(64, PAGE), (None, 6, 1, 100))
    full, window, _, wide = stored(cache, list(range(16)))
    found = cache.match(list(range(17)), "")
    assert found == [full, [0, 0, *window[2:]], [0, 0, 0, 0], wide]  # positions 11 to 15; none
    assert [cache.pool.ref_count(page) for page in window] == [0, 0, 1, 1]
    cache.acquire(found)
    assert cache.hits == 16 and cache.problems() == []


def test_longest_prefix_that_all_groups_can_continue_is_found():
    cache = PrefixCache(PagePool(64, PAGE), (None, 6, 9))
    full, window, wide = stored(cache, list(range(32)))
    chain, tokens = cache.chain(""), list(range(33))
    evict(cache, window[6])
    assert cache.lookup(chain, tokens) == [full[:6], [0, 0, 0, 0, *window[4:6]], [0, 0, 0, 0, *wide[4:6]]]
    evict(cache, wide[4], window[2])
    assert cache.lookup(chain, tokens) == [full[:2], window[:2], wide[:2]]
    evict(cache, full[0])
    assert cache.lookup(chain, tokens) == [[], [], []]
    assert cache.problems() == []


def test_window_group_alone_matches_after_the_beginning_was_evicted():
    cache = PrefixCache(PagePool(64, PAGE), (6,))
    [table] = stored(cache, list(range(32)))
    evict(cache, *table[:3])
    assert cache.lookup(cache.chain(""), list(range(33))) == [[0] * 6 + table[6:]]
    assert cache.lookup(cache.chain(""), list(range(16))) == [[]]


def test_freed_window_pages_are_found_by_a_later_prompt():
    scheduler = make(groups=(None, 6), budget=16)
    first = add(scheduler, "a", list(range(60)), max_tokens=2)
    while first.state is not RequestState.FINISHED:
        step(scheduler)
    second = add(scheduler, "b", [*range(32), 99, 98], max_tokens=2)
    step(scheduler)
    assert second.cached_tokens == 32 and second.num_freed == [0, 6]


def test_end_of_a_prefix_is_evicted_in_all_groups_before_its_beginning():
    scheduler = make(pages=8, groups=(None, 64))
    add(scheduler, "a", list(range(16)), max_tokens=1)
    step(scheduler)
    scheduler.pool.free(scheduler.pool.allocate(4))
    [full, window] = scheduler.prefix_cache.match(list(range(17)), "")
    assert len(full) == len(window) == 2


# --- config ---


@pytest.mark.parametrize("window", [0, -4])
def test_windows_below_one_are_refused(window):
    with pytest.raises(ConfigError, match=rf"groups\[1\]={window} is invalid"):
        make(groups=(None, window))


def test_prefix_cache_needs_the_schedulers_groups():
    pool = PagePool(9, PAGE)
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=64, groups=(None, 8))
    with pytest.raises(ConfigError, match=r"groups=\(None, 8\) differ from the prefix cache's groups=\(None,\)"):
        Scheduler(config, pool, PrefixCache(pool))
    with pytest.raises(ConfigError, match="without paged layers"):
        PrefixCache(pool, ())


def test_pool_without_a_page_for_each_group_is_refused():
    with pytest.raises(ConfigError, match="num_pages=3 is too small for 3 cache groups: give at least 4"):
        make(pages=2, groups=(None, 4, 8))

"""Events of the prefix cache: their form, and that whoever applies them knows what is cached."""

import pytest

from engine.scheduling.kv_events import KVEventRecorder
from engine.scheduling.page_pool import PagePool
from engine.scheduling.prefix_cache import PrefixCache
from tests.support.kv_view import View

SIZE = 4


@pytest.fixture
def cache():
    return PrefixCache(PagePool(num_pages=5, page_size=SIZE), (None,), KVEventRecorder(SIZE, (None,)))


def insert(cache, token_ids, salt="", groups=1):
    tables = [cache.pool.allocate(len(token_ids) // SIZE) for _ in range(groups)]
    cache.insert(cache.chain(f"v1\0{salt}", salt), token_ids, tables, 0, len(token_ids) // SIZE)
    for table in tables:
        cache.pool.free(table)


def test_a_stored_run_of_pages_is_one_event_with_the_keys_of_vllm():
    cache = PrefixCache(PagePool(num_pages=9, page_size=SIZE), (None,), KVEventRecorder(SIZE, (None,)))
    insert(cache, list(range(9)))
    [event] = cache.events.take()
    first, second = event.pop("block_hashes")
    assert event == {
        "type": "BlockStored", "parent_block_hash": None, "token_ids": list(range(8)), "block_size": SIZE,
        "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip
    insert(cache, list(range(12)))  # the first two are cached already
    [event] = cache.events.take()
    assert event["parent_block_hash"] == second != first
    assert event["token_ids"] == [8, 9, 10, 11] and len(event["block_hashes"]) == 1


def test_pages_of_a_salted_request_name_the_salt_at_the_first_page_and_have_other_hashes(cache):
    insert(cache, list(range(8)))
    insert(cache, list(range(8)), salt="tenant")
    plain, salted = cache.events.take()
    assert not {"extra_keys", "cache_salt"} & plain.keys()
    assert salted["extra_keys"] == [["tenant"], None] and salted["cache_salt"] == "tenant"
    insert(cache, list(range(50, 54)), salt="\ud800")  # JSON can hold it, UTF-8 can't
    assert cache.events.take()[-1]["extra_keys"] == [["\ufffd" * 3]]
    assert not set(plain["block_hashes"]) & set(salted["block_hashes"])


def test_pages_of_an_adapter_name_it_at_each_page_and_in_the_event(cache):
    tables = cache.pool.allocate(3)
    cache.insert(cache.chain("('v1', 'french', 'tenant')", "tenant", "french"), list(range(12)), [tables], 0, 2)
    cache.insert(cache.chain("('v1', 'french', 'tenant')", "tenant", "french"), list(range(12)), [tables], 2, 3)
    cache.pool.free(tables)
    first, second = cache.events.take()
    assert (first["lora_name"], first["lora_id"], first["cache_salt"]) == ("french", None, "tenant")
    assert first["extra_keys"] == [["french", "tenant"], ["french"]] and second["extra_keys"] == [["french"]]
    view = View()
    view.apply([first, second])
    assert view.match(list(range(13)), SIZE, "tenant", adapter="french") == 3
    assert view.match(list(range(13)), SIZE, "tenant") == view.match(list(range(13)), SIZE, adapter="french") == 0


def test_evictions_in_a_row_are_one_event_and_remove_the_last_page_first(cache):
    insert(cache, list(range(16)))
    [stored] = cache.events.take()
    pages = cache.pool.allocate(3)
    assert cache.events.take() == [
        {"type": "BlockRemoved", "block_hashes": stored["block_hashes"][:0:-1], "medium": "GPU", "group_idx": 0}
    ]
    cache.pool.free(pages)


def test_a_reset_is_one_event_and_later_evictions_name_nothing_from_before(cache):
    insert(cache, list(range(16)))
    cache.reset()
    assert cache.events.take() == [{"type": "AllBlocksCleared"}]
    cache.pool.free(cache.pool.allocate(4))
    assert cache.events.take() == []


def test_after_lost_events_removals_of_unknown_pages_are_left_out(cache):
    insert(cache, list(range(16)))
    cache.events.take()
    cache.events.cleared()  # as the loop does when a batch was not published
    cache.pool.free(cache.pool.allocate(2))
    insert(cache, list(range(50, 58)))
    view = View()
    view.apply(cache.events.take())
    assert len(view.blocks) == 2 and view.match(list(range(50, 60)), SIZE) == 2


def test_groups_have_an_index_and_a_kind():
    groups = (None, 8)
    cache = PrefixCache(PagePool(num_pages=9, page_size=SIZE), groups, KVEventRecorder(SIZE, groups))
    insert(cache, list(range(8)), groups=2)
    full, window = cache.events.take()
    assert full["group_idx"] == 0 and "kv_cache_spec_sliding_window" not in full
    assert window["group_idx"] == 1 and window["kv_cache_spec_kind"] == "sliding_window"
    assert window["kv_cache_spec_sliding_window"] == 8 and window["block_hashes"] == full["block_hashes"]


def test_a_page_that_left_its_window_splits_a_run():
    groups = (4,)
    cache = PrefixCache(PagePool(num_pages=9, page_size=SIZE), groups, KVEventRecorder(SIZE, groups))
    first, third = cache.pool.allocate(2)
    cache.insert(cache.chain("v1"), list(range(12)), [[first, 0, third]], 0, 3)
    events = cache.events.take()
    assert [event["token_ids"] for event in events] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert events[0]["parent_block_hash"] is None and events[1]["parent_block_hash"] not in (
        None, events[0]["block_hashes"][0],
    )  # fmt: skip
    cache.pool.free([first, third])

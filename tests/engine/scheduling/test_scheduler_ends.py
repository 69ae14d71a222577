"""The end of a request: cached prefixes, freed slots and pages, and exactly one final state."""

import pytest

from engine.errors import ConfigError, EngineError, RequestError
from engine.scheduling.request import RequestState
from engine.scheduling.scheduler import SchedulerConfig, SchedulerInvariantError
from tests.engine.scheduling.steps import add, chunks, make, names, step

# --- prefix cache ---


def test_second_prompt_skips_the_cached_pages():
    scheduler = make()
    first = add(scheduler, "a", list(range(12)), max_tokens=1)
    scheduler.schedule()
    cached = first.page_tables[0]
    step(scheduler)
    second = add(scheduler, "b", [*range(8), 90, 91, 92], max_tokens=1)
    batch = scheduler.schedule()
    assert chunks(batch) == [("b", 8, 3, True)]
    assert second.page_tables[0][:2] == cached[:2] and second.page_tables[0][2] not in cached
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)
    assert (scheduler.prefix_cache.queries, scheduler.prefix_cache.hits) == (23, 8)


def test_outputs_are_cached_for_the_next_turn_but_never_an_uncomputed_token():
    scheduler = make()
    first = add(scheduler, "a", list(range(6)), max_tokens=3)
    for _ in range(3):
        step(scheduler)
    assert first.output_len == 3
    second = add(scheduler, "b", [*range(6), 7, 7, 7, 1], max_tokens=1)
    step(scheduler)
    assert second.cached_tokens == 8  # tokens 0..5, 7, 7; the third 7 was sampled but its KV was never computed
    assert len(scheduler.prefix_cache) == 2


def test_pages_of_a_prompt_in_prefill_hold_only_computed_tokens():
    scheduler = make(budget=8)
    add(scheduler, "a", list(range(30)))
    scheduler.schedule()
    assert len(scheduler.prefix_cache) == 0
    step(scheduler)
    assert len(scheduler.prefix_cache) == 2


def test_prompt_logprobs_compute_every_prompt_token():
    scheduler = make()
    add(scheduler, "a", list(range(12)), max_tokens=1)
    step(scheduler)
    asking = add(scheduler, "b", list(range(12)), max_tokens=1, prompt_logprobs=0)
    assert chunks(step(scheduler)) == [("b", 0, 12, True)] and asking.cached_tokens == 0


def test_preempted_request_finds_its_own_pages_again_without_counting_as_a_hit():
    scheduler = make()
    request = add(scheduler, "a", 12, max_tokens=20)
    step(scheduler)
    assert scheduler.preempt_all() == [request]
    batch = step(scheduler)
    assert names(batch.decodes) == ["a"] and not batch.prefills
    assert request.cached_tokens == 0 and scheduler.prefix_cache.hits == 0


def test_no_kv_crosses_a_change_of_weights():
    scheduler = make(weight_version="v1")
    add(scheduler, "done", list(range(12)), max_tokens=1)
    running = add(scheduler, "running", list(range(50, 58)), max_tokens=20)
    step(scheduler)
    scheduler.set_weight_version("v2")
    for _ in range(6):
        step(scheduler)
    assert len(scheduler.prefix_cache) == 0  # what `running` computes now depends on old KV
    assert running.weight_version == "v1"
    fresh = add(scheduler, "fresh", list(range(12)), max_tokens=1)
    again = add(scheduler, "again", running.token_ids[:12], max_tokens=1)
    step(scheduler)
    assert fresh.cached_tokens == again.cached_tokens == 0 and fresh.weight_version == "v2"
    scheduler.set_weight_version("v1")  # a roll-back to the name that `running` was admitted under
    for _ in range(6):
        step(scheduler)
    assert len(scheduler.prefix_cache) == 0


def test_recomputed_requests_belong_to_the_new_weights():
    scheduler = make(weight_version="v1")
    request = add(scheduler, "a", 12, max_tokens=20)
    step(scheduler)
    scheduler.preempt_all()
    scheduler.set_weight_version("v2")
    assert chunks(step(scheduler)) == [("a", 0, 13, True)]
    assert request.weight_version == "v2" and len(scheduler.prefix_cache) == 3


def test_failed_request_drops_its_cached_pages_and_those_built_on_them():
    scheduler = make()
    request = add(scheduler, "a", list(range(12)), max_tokens=20)
    step(scheduler)
    sharer = add(scheduler, "b", [*range(12), 90, 91, 92], max_tokens=20)
    step(scheduler)
    assert sharer.cached_tokens == 12
    scheduler.finish(request, RequestState.FAILED)
    for _ in range(6):
        step(scheduler)
    assert len(scheduler.prefix_cache) == 0
    scheduler.abort("b")
    scheduler.idle_check()


def test_request_that_failed_in_the_queue_leaves_the_cache_alone():
    scheduler = make(seqs=1)
    add(scheduler, "a", list(range(12)))
    waiting = add(scheduler, "b", 4)
    step(scheduler)
    scheduler.finish(waiting, RequestState.FAILED)
    assert len(scheduler.prefix_cache) == 3


# --- ends ---


def test_prompt_only_request_ends_without_a_token():
    scheduler = make()
    request = add(scheduler, "a", 8, max_tokens=0)
    batch = scheduler.schedule()
    assert chunks(batch) == [("a", 0, 8, True)] and len(request.page_tables[0]) == 2
    scheduler.dispatch(batch)
    scheduler.complete(batch, [None])
    assert request.output_len == 0 and scheduler.token_limit(request) == 8
    scheduler.finish(request, RequestState.FINISHED)
    scheduler.idle_check()


def test_first_schedule_is_stamped_once():
    times = iter([5.0, 6.0])
    scheduler = make(clock=lambda: next(times), weight_version="w1")
    request = add(scheduler, "a", 4)
    step(scheduler)
    scheduler.preempt_all()
    step(scheduler)
    assert request.first_scheduled_time == 5.0 and request.weight_version == "w1"


def test_abort_ends_waiting_running_and_preempted_requests_once():
    scheduler = make(seqs=1)
    running = add(scheduler, "running", 4)
    waiting = add(scheduler, "waiting", 4, arrival=1.0)
    step(scheduler)
    assert scheduler.abort("waiting") and scheduler.abort("running")
    preempted = add(scheduler, "preempted", 4)
    step(scheduler)
    scheduler.preempt_all()
    assert preempted.state is RequestState.PREEMPTED and scheduler.abort("preempted")
    assert {request.state for request in (running, waiting, preempted)} == {RequestState.ABORTED}
    assert not scheduler.abort("running") and not scheduler.abort("never heard of")
    scheduler.idle_check()


def test_abort_between_schedule_and_complete_is_skipped_even_if_the_id_is_used_again():
    scheduler = make()
    decoding = add(scheduler, "decoding", 4)
    step(scheduler)
    filling = add(scheduler, "filling", 12)
    batch = scheduler.schedule()
    scheduler.abort("decoding")
    scheduler.abort("filling")
    again = add(scheduler, "decoding", 4)
    scheduler.dispatch(batch)
    scheduler.complete(batch, [7, 7])
    assert decoding.output_len == 1 and filling.output_len == 0 and again.output_len == 0
    assert scheduler.get("decoding") is again
    scheduler.check()


def test_slots_are_distinct_and_come_back():
    scheduler = make(seqs=3)
    requests = [add(scheduler, name, 2) for name in "abcd"]
    step(scheduler)
    assert [request.slot for request in requests] == [0, 1, 2, None]
    scheduler.abort("b")
    step(scheduler)
    assert requests[3].slot == 1


def test_add_refuses_an_id_in_use_an_empty_prompt_and_a_used_record():
    scheduler = make()
    request = add(scheduler, "a", 2)
    for prompt, param in ((2, "request_id"), ([], "prompt_token_ids")):
        with pytest.raises(RequestError) as caught:
            add(scheduler, "a" if param == "request_id" else "b", prompt)
        assert caught.value.param == param
    scheduler.abort("a")
    with pytest.raises(SchedulerInvariantError, match="give add\\(\\) a new record"):
        scheduler.add(request)


def test_finish_refuses_what_is_not_live_or_not_final_and_changes_nothing():
    scheduler = make()
    request = add(scheduler, "a", 2)
    with pytest.raises(EngineError, match="can't go from waiting to finished"):
        scheduler.finish(request, RequestState.FINISHED)
    with pytest.raises(SchedulerInvariantError, match="needs a final state"):
        scheduler.finish(request, RequestState.PREEMPTED)
    step(scheduler)
    scheduler.finish(request, RequestState.FINISHED)
    with pytest.raises(SchedulerInvariantError, match="not live"):
        scheduler.finish(request, RequestState.FINISHED)


def test_batch_is_completed_once():
    scheduler = make()
    add(scheduler, "a", 2)
    batch = step(scheduler)
    with pytest.raises(SchedulerInvariantError, match="already completed"):
        scheduler.complete(batch, [7])


def test_batch_of_an_earlier_schedule_is_refused_once_its_requests_moved_on():
    scheduler = make(budget=8)
    add(scheduler, "a", 20)
    stale = scheduler.schedule()
    step(scheduler)
    with pytest.raises(SchedulerInvariantError, match="not at position 0"):
        scheduler.dispatch(stale)


def test_request_left_without_a_token_is_an_error_not_a_hang():
    scheduler = make()
    add(scheduler, "a", 2)
    batch = scheduler.schedule()
    scheduler.dispatch(batch)
    scheduler.complete(batch, [None])
    with pytest.raises(SchedulerInvariantError, match="has nothing to compute"):
        scheduler.schedule()


def test_idle_check_lists_every_leak_at_once():
    scheduler = make(seqs=2)
    live = add(scheduler, "live", 4)
    step(scheduler)
    lost = scheduler.pool.allocate(1)[0]
    live.slot = 1 - live.slot  # the other slot, which is free
    with pytest.raises(SchedulerInvariantError) as caught:
        scheduler.idle_check()
    for leak in ("'live'", "3 of 64 pages", "1 slots", "free and held slots", f"page {lost} has 1 references"):
        assert leak in str(caught.value)


def test_leaked_page_that_blocks_an_idle_engine_is_an_error_not_a_hang():
    scheduler = make(pages=4)
    scheduler.pool.allocate(1)
    add(scheduler, "a", 14, max_tokens=2)
    with pytest.raises(SchedulerInvariantError, match="doesn't fit an idle engine"):
        scheduler.schedule()


# --- config ---


@pytest.mark.parametrize(
    "wrong",
    [{"max_num_seqs": 0}, {"max_num_batched_tokens": 7, "max_num_seqs": 8}, {"max_model_len": -1}],
)
def test_config_rejects_invalid_values(wrong):
    right = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SchedulerConfig(**{**right, **wrong})

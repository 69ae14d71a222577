"""Scheduling decisions: order, token budget, pages and priorities."""

from collections import Counter

import pytest

from engine.errors import PromptTooLong
from engine.scheduling.request import RequestState
from engine.scheduling.scheduler import SchedulerInvariantError
from tests.engine.scheduling.steps import PAGE, add, chunks, make, names, step

# --- steps and the token budget ---


def test_prompt_is_prefilled_then_decoded_to_its_end():
    scheduler = make()
    request = add(scheduler, "a", 10, max_tokens=3)
    assert request.state is RequestState.WAITING and scheduler.num_waiting == 1
    batch = step(scheduler)
    assert chunks(batch) == [("a", 0, 10, True)] and names(batch.admitted) == ["a"] and not batch.decodes
    assert request.state is RequestState.RUNNING and request.num_computed == 10 and request.output_len == 1
    for _ in range(2):
        batch = step(scheduler)
        assert names(batch.decodes) == ["a"] and not batch.prefills
    assert request.state is RequestState.FINISHED and request.token_ids[10:] == [7, 7, 7]
    assert not scheduler.has_work
    assert not scheduler.schedule()
    scheduler.idle_check()


def test_long_prompt_is_chunked_under_the_budget_and_continues_before_new_prompts():
    scheduler = make(budget=8)
    add(scheduler, "long", 20)
    add(scheduler, "next", 6)
    assert chunks(step(scheduler)) == [("long", 0, 8, False)]
    assert chunks(step(scheduler)) == [("long", 8, 8, False)]
    assert chunks(step(scheduler)) == [("long", 16, 4, True), ("next", 0, 4, False)]
    batch = step(scheduler)
    assert names(batch.decodes) == ["long"] and chunks(batch) == [("next", 4, 2, True)]


def test_a_step_with_decodes_has_fewer_prompt_tokens():
    scheduler = make(budget=8192, pages=9000, context=30000)
    add(scheduler, "long", 9000)
    assert chunks(step(scheduler)) == [("long", 0, 8192, False)]
    add(scheduler, "other", 2, arrival=1.0, max_tokens=90)
    add(scheduler, "longest", 20000, arrival=2.0)
    assert chunks(step(scheduler)) == [("long", 8192, 808, True), ("other", 0, 2, True), ("longest", 0, 7382, False)]
    batch = step(scheduler)
    assert names(batch.decodes) == ["long", "other"] and chunks(batch) == [("longest", 7382, 4094, False)]


def test_a_small_prompt_does_not_wait_for_a_large_one():
    scheduler = make(budget=8)
    add(scheduler, "large", 20)
    assert chunks(step(scheduler)) == [("large", 0, 8, False)]
    add(scheduler, "small", 4, max_tokens=50, arrival=1.0)
    assert chunks(step(scheduler)) == [("large", 8, 4, False), ("small", 0, 4, True)]
    add(scheduler, "medium", 5, max_tokens=50, arrival=2.0)
    batch = step(scheduler)
    assert names(batch.decodes) == ["small"] and chunks(batch) == [("large", 12, 7, False)]


def test_further_sequences_of_a_batch_make_way_for_other_requests():
    scheduler = make(seqs=1)
    for index in range(4):
        add(scheduler, f"batch-{index}", 4, max_tokens=1, arrival=0.0, index=index)
    order = names(step(scheduler).admitted)
    add(scheduler, "other", 4, max_tokens=1, arrival=5.0)
    add(scheduler, "late", 4, max_tokens=1, arrival=25.0)
    while scheduler.has_work:
        order += names(step(scheduler).admitted)
    assert order == ["batch-0", "other", "batch-1", "batch-2", "late", "batch-3"]  # none waits for ever


def test_a_request_takes_the_slot_of_a_further_sequence_of_a_batch():
    scheduler = make(seqs=16, budget=64)
    batch = [add(scheduler, f"batch-{index}", 1, max_tokens=90, index=index) for index in range(20)]
    assert len(step(scheduler).admitted) == 16
    add(scheduler, "other", 30, max_tokens=90, arrival=1.0)
    done = step(scheduler)
    assert names(done.admitted) == ["other"] and names(done.preempted) == ["batch-15"]
    add(scheduler, "late", 30, max_tokens=90, arrival=125.0)  # as old as batch-12 then
    assert names(step(scheduler).preempted) == ["batch-14"]
    add(scheduler, "later", 30, max_tokens=90, arrival=145.0)  # later than all that run: none waits for ever
    done = step(scheduler)
    assert not done.preempted and not done.admitted
    while scheduler.has_work:
        step(scheduler)
    assert all(request.output_len == 90 for request in batch)
    scheduler.idle_check()


def test_a_request_takes_the_slot_and_token_of_a_further_sequence():
    scheduler = make(seqs=4, budget=4)
    for index in range(4):
        add(scheduler, f"batch-{index}", 1, max_tokens=90, index=index)
    step(scheduler)
    add(scheduler, "other", 9, max_tokens=90, arrival=1.0)
    batch = step(scheduler)
    assert names(batch.preempted) == ["batch-3"] and chunks(batch) == [("other", 0, 1, False)]


def test_further_sequences_take_no_slot_from_each_other():
    scheduler = make(seqs=2)
    for index in range(2):
        add(scheduler, f"a-{index}", 4, max_tokens=90, index=index)
    step(scheduler)
    for index in range(1, 3):
        add(scheduler, f"b-{index}", 4, max_tokens=90, arrival=-30.0, index=index)
    assert not step(scheduler).preempted


def test_a_short_request_takes_the_slot_of_the_last_long_one():
    scheduler = make(seqs=4)
    for name in "abcd":
        add(scheduler, name, 4, max_tokens=90)
    step(scheduler)
    add(scheduler, "next", 4, max_tokens=90, arrival=1.0)
    for name in ("one", "two"):
        add(scheduler, name, 4, max_tokens=2, arrival=2.0)
    order = []
    for _ in range(5):
        batch = step(scheduler)
        order.append((names(batch.preempted), names(batch.admitted)))
    # One at a time, in the slot of the last request, which then continues before those that arrived after it.
    assert order == [(["d"], ["one"]), ([], []), ([], ["two"]), ([], []), ([], ["d"])]


@pytest.mark.parametrize("seqs", [2, 3])
def test_a_short_request_does_not_take_the_slot_of_one_admitted_in_the_same_step(seqs):
    scheduler = make(seqs=seqs)
    for number in range(1, seqs):
        add(scheduler, f"first-{number}", 4, max_tokens=90)
    add(scheduler, "further", 4, max_tokens=90, index=1)
    step(scheduler)
    add(scheduler, "next", 4, max_tokens=90, arrival=1.0)
    add(scheduler, "short", 4, max_tokens=1, arrival=2.0)
    batch = step(scheduler)
    assert names(batch.preempted) == ["further"] and names(batch.admitted) == ["next"]
    batch = step(scheduler)
    assert names(batch.preempted) == ["next"] and names(batch.admitted) == ["short"]


def test_a_short_request_takes_the_slot_and_token_of_the_last_long_one():
    scheduler = make(seqs=4, budget=4)
    for name in "abcd":
        add(scheduler, name, 1, max_tokens=90)
    step(scheduler)
    add(scheduler, "short", 2, max_tokens=1, arrival=1.0)
    batch = step(scheduler)
    assert names(batch.preempted) == ["d"] and chunks(batch) == [("short", 0, 1, False)]


def test_a_short_request_waits_its_turn_for_a_single_slot():
    scheduler = make(seqs=1)
    add(scheduler, "long", 4, max_tokens=90)
    step(scheduler)
    add(scheduler, "short", 4, max_tokens=1, arrival=1.0)
    assert not step(scheduler).preempted


@pytest.mark.parametrize("fields", [
    {"prompt": 33, "max_tokens": 1}, {"prompt": 17, "max_tokens": 1, "prompt_logprobs": 0},
    {"prompt": 4, "max_tokens": 17}, {"prompt": 4, "max_tokens": None}, {"prompt": 4, "max_tokens": 1, "index": 1},
    {"prompt": 4, "max_tokens": 1, "priority": 1},
])  # fmt: skip
def test_other_requests_keep_the_order(fields):
    scheduler = make(seqs=4, budget=64)
    for name in "abcd":
        add(scheduler, name, 4, max_tokens=90)
    step(scheduler)
    add(scheduler, "next", 4, max_tokens=90, arrival=1.0)
    add(scheduler, "other", arrival=2.0, **fields)
    batch = step(scheduler)
    assert not batch.preempted and not batch.admitted


def test_a_short_request_does_not_overtake_a_head_that_lacks_pages():
    scheduler = make(pages=16, seqs=4)
    add(scheduler, "running", 40, max_tokens=24)
    step(scheduler)
    add(scheduler, "big", 40, max_tokens=24, arrival=1.0)
    add(scheduler, "short", 4, max_tokens=1, arrival=2.0)
    for _ in range(2):
        assert not step(scheduler).admitted


def test_steps_with_a_short_request_are_short():
    scheduler = make(budget=16, seqs=4)
    add(scheduler, "large", 50)
    step(scheduler)
    add(scheduler, "short", 8, max_tokens=2, arrival=1.0)
    assert chunks(step(scheduler)) == [("short", 0, 8, True), ("large", 16, 4, False)]
    add(scheduler, "next", 50, arrival=2.0)
    batch = step(scheduler)
    assert names(batch.decodes) == ["short"] and chunks(batch) == [("large", 20, 4, False)]
    assert chunks(step(scheduler)) == [("large", 24, 16, False)]


def test_prompt_tokens_with_logprobs_count_twice():
    scheduler = make(budget=9, seqs=4)
    add(scheduler, "scored", 10, prompt_logprobs=1)
    assert chunks(step(scheduler)) == [("scored", 0, 4, False)]
    add(scheduler, "plain", 20, max_tokens=90, arrival=1.0)
    assert chunks(step(scheduler)) == [("scored", 4, 4, False), ("plain", 0, 1, False)]
    assert chunks(step(scheduler)) == [("scored", 8, 2, True), ("plain", 1, 5, False)]


def test_decodes_come_first_and_cost_one_token_each():
    scheduler = make(budget=8, seqs=4)
    for name in "abc":
        add(scheduler, name, 2, max_tokens=90)
    step(scheduler)
    add(scheduler, "long", 40)
    batch = step(scheduler)
    assert names(batch.decodes) == ["a", "b", "c"] and chunks(batch) == [("long", 0, 5, False)]


def test_prefill_keeps_a_token_even_when_the_budget_is_one_per_slot():
    scheduler = make(budget=2, seqs=2)
    add(scheduler, "a", 2)
    step(scheduler)
    add(scheduler, "b", 3)
    batch = step(scheduler)
    assert names(batch.decodes) == ["a"] and chunks(batch) == [("b", 0, 1, False)]


def test_last_token_of_a_prompt_is_a_decode():
    scheduler = make(budget=8)
    one = add(scheduler, "one", 1)
    batch = step(scheduler)
    assert names(batch.decodes) == ["one"] and names(batch.admitted) == ["one"] and one.output_len == 1
    scheduler.abort("one")
    add(scheduler, "nine", 9)
    assert chunks(step(scheduler)) == [("nine", 0, 8, False)]
    batch = step(scheduler)
    assert names(batch.decodes) == ["nine"] and not batch.prefills


def test_one_token_prompts_are_counted_in_the_budget():
    scheduler = make(seqs=4, budget=4)
    for name in "abc":
        add(scheduler, name, 1)
    add(scheduler, "d", 9)
    batch = step(scheduler)
    assert names(batch.decodes) == ["a", "b", "c"] and chunks(batch) == [("d", 0, 1, False)]


# --- order ---


def test_waiting_requests_go_by_priority_then_arrival_then_order_of_add():
    scheduler = make(seqs=1, budget=64)
    for name, priority, arrival in (("d", 1, 0.0), ("b", 0, 2.0), ("c", 0, 2.0), ("a", 0, 1.0)):
        add(scheduler, name, 4, max_tokens=1, priority=priority, arrival=arrival)
    assert [names(step(scheduler).admitted) for _ in range(4)] == [["a"], ["b"], ["c"], ["d"]]


def test_smaller_request_does_not_overtake_a_head_that_lacks_pages():
    scheduler = make(pages=8)
    add(scheduler, "running", 16, max_tokens=8)
    step(scheduler)
    add(scheduler, "big", 20, max_tokens=1, arrival=1.0)
    small = add(scheduler, "small", 2, max_tokens=1, arrival=2.0)
    for _ in range(6):
        assert names(step(scheduler).decodes) == ["running"]
    assert small.state is RequestState.WAITING
    assert names(step(scheduler).decodes) == ["running"]  # its last token
    assert names(step(scheduler).admitted) == ["big", "small"]


def test_blocked_head_enters_as_soon_as_pages_return():
    scheduler = make(pages=8, seqs=4)
    for name in "ab":
        add(scheduler, name, 14, max_tokens=3)
    head = add(scheduler, "head", 14, max_tokens=3, arrival=1.0)
    step(scheduler)
    step(scheduler)
    assert head.slot is None
    scheduler.abort("a")
    assert names(step(scheduler).admitted) == ["head"]


def test_aborting_a_blocked_head_lets_the_next_in():
    scheduler = make(pages=8)
    add(scheduler, "running", 16)
    step(scheduler)
    add(scheduler, "big", 20, max_tokens=1, arrival=1.0)
    add(scheduler, "small", 2, max_tokens=1, arrival=2.0)
    step(scheduler)
    scheduler.abort("big")
    assert names(step(scheduler).admitted) == ["small"]


# --- pages ---


def test_requests_that_fit_together_to_their_end_run_together():
    scheduler = make(pages=4)
    add(scheduler, "a", 4, max_tokens=5)
    add(scheduler, "b", 4, max_tokens=5)
    assert names(step(scheduler).admitted) == ["a", "b"]
    while scheduler.has_work:
        assert len(step(scheduler).decodes) == 2
    assert scheduler.num_preemptions == 0


def test_pool_is_filled_to_its_last_page_and_no_further():
    scheduler = make(pages=3)
    request = add(scheduler, "a", 4, max_tokens=9)  # the KV of 12 tokens: the last one's is never stored
    for _ in range(9):
        step(scheduler)
    assert request.state is RequestState.FINISHED and request.output_len == 9
    with pytest.raises(PromptTooLong, match="4 prompt tokens and max_tokens=10 need 4 pages of 4 tokens, .* has 3"):
        add(scheduler, "b", 4, max_tokens=10)


def test_decode_without_a_page_preempts_the_last_in_order_which_keeps_its_place():
    scheduler = make(pages=8, cached=False)
    first = add(scheduler, "first", 8, max_tokens=20)
    last = add(scheduler, "last", 8, max_tokens=12, arrival=1.0)
    later = add(scheduler, "later", 4, max_tokens=4, arrival=2.0)
    batch = step(scheduler)
    assert names(batch.admitted) == ["first", "last"]
    while not batch.preempted:
        batch = step(scheduler)
    assert names(batch.preempted) == ["last"] and names(batch.decodes) == ["first"]
    assert (
        last.state is RequestState.PREEMPTED and last.page_tables == [] and last.slot is None and last.num_computed == 0
    )
    outputs = last.output_len
    assert outputs > 0 and scheduler.num_waiting == 2
    while first.state is RequestState.RUNNING:
        assert later.slot is None
        step(scheduler)
    batch = step(scheduler)
    assert names(batch.admitted)[0] == "last" and batch.prefills[0].length == 8 + outputs
    while scheduler.has_work:
        step(scheduler)
    assert last.output_len == 12 and last.state is RequestState.FINISHED
    scheduler.idle_check()


def test_repeated_preemptions_become_rarer():
    # The prompts fill 20 slots; few requests fit to their end. With a constant reserve a request was preempted up to
    # 4 times, 63 times in total.
    scheduler = make(pages=40, seqs=20, cached=False)
    for number in range(40):
        add(scheduler, f"r{number:02}", 1 + number % 5, max_tokens=20 + number * 37 % 71, arrival=float(number))
    preempted: Counter[str] = Counter()
    while scheduler.has_work:
        preempted.update(names(step(scheduler).preempted))
    assert 0 < max(preempted.values()) <= 2
    assert preempted.total() <= 45


def test_preempt_all_does_not_raise_the_admission_reserve():
    scheduler = make(pages=12, cached=False)
    for name in "ab":
        add(scheduler, name, 8, max_tokens=20)
    for _ in range(5):
        step(scheduler)
        scheduler.preempt_all()
    assert names(step(scheduler).admitted) == ["a", "b"]


def test_idle_cached_pages_are_not_counted_twice():
    scheduler = make(pages=6)
    add(scheduler, "a", list(range(12)), max_tokens=1)
    step(scheduler)
    add(scheduler, "running", 6, max_tokens=3)
    step(scheduler)
    # 3 pages cached and idle, 3 more needed, 1 other page free
    add(scheduler, "b", [*range(12), *range(40, 48)], max_tokens=4)
    assert names(step(scheduler).decodes) == ["running"]
    assert names(step(scheduler).decodes) == ["running"]
    batch = step(scheduler)
    assert chunks(batch) == [("b", 12, 8, True)]


def test_unbounded_request_may_grow_to_the_whole_pool_and_is_not_refused():
    scheduler = make(pages=3, context=256)
    request = add(scheduler, "a", 12, max_tokens=None)
    assert scheduler.token_limit(request) == 13
    step(scheduler)
    assert request.state is RequestState.FINISHED
    with pytest.raises(PromptTooLong):
        add(scheduler, "b", 13, max_tokens=None)


def test_unbounded_request_is_limited_by_the_context():
    scheduler = make(context=20)
    assert scheduler.token_limit(add(scheduler, "a", 19, max_tokens=None)) == 20
    with pytest.raises(PromptTooLong, match="context of 20"):
        add(scheduler, "b", 20, max_tokens=None)


@pytest.mark.parametrize(("prompt", "max_tokens", "param"), [(10, 11, "max_tokens"), (21, 0, "prompt_token_ids")])
def test_request_beyond_the_context_is_refused_at_once_and_names_the_field(prompt, max_tokens, param):
    scheduler = make(context=20)
    with pytest.raises(PromptTooLong) as caught:
        add(scheduler, "a", prompt, max_tokens=max_tokens)
    assert caught.value.param == param and not scheduler.has_work
    add(scheduler, "a", prompt - 1, max_tokens=max_tokens)


def test_unfinished_request_at_its_limit_is_an_error_not_a_hang():
    scheduler = make(pages=2)
    add(scheduler, "a", 4, max_tokens=None)
    with pytest.raises(SchedulerInvariantError, match="exceeds its limit of 9 tokens"):
        for _ in range(9):
            step(scheduler, finish=False)


# --- priorities ---


def test_higher_priority_takes_a_slot_from_the_last_lower_one():
    scheduler = make(seqs=2)
    add(scheduler, "low", 4, priority=1)
    lower = add(scheduler, "lower", 4, priority=2)
    step(scheduler)
    add(scheduler, "high", 4, priority=0)
    batch = step(scheduler)
    assert names(batch.preempted) == ["lower"] and names(batch.admitted) == ["high"]
    assert names(batch.decodes) == ["low"] and lower.state is RequestState.PREEMPTED


def test_same_priority_never_preempts_on_arrival():
    scheduler = make(seqs=1)
    add(scheduler, "first", 4, arrival=5.0)
    step(scheduler)
    add(scheduler, "earlier", 4, arrival=1.0)
    batch = step(scheduler)
    assert names(batch.decodes) == ["first"] and not batch.preempted


def test_higher_priority_preempts_nothing_when_it_fits():
    scheduler = make()
    add(scheduler, "low", 4, priority=1)
    step(scheduler)
    add(scheduler, "high", 4, priority=0)
    batch = step(scheduler)
    assert not batch.preempted and names(batch.decodes) == ["low"] and chunks(batch) == [("high", 0, 4, True)]


def test_no_preemption_if_it_would_not_free_enough_pages():
    scheduler = make(pages=10)
    add(scheduler, "equal", 20, max_tokens=4, priority=0)
    add(scheduler, "low", 8, max_tokens=1 + PAGE, priority=1)
    step(scheduler)
    add(scheduler, "high", 28, max_tokens=4, priority=0, arrival=1.0)
    batch = step(scheduler)
    assert not batch.preempted and names(batch.decodes) == ["equal", "low"]


def test_urgent_request_does_not_count_pages_still_referenced_after_preemption():
    scheduler = make(pages=8, seqs=4)
    shared = list(range(12))
    add(scheduler, "keeper", [*shared, 50], max_tokens=3, priority=0)
    step(scheduler)
    add(scheduler, "sharer", [*shared, 60], max_tokens=3, priority=1)
    step(scheduler)
    assert scheduler.pool.num_in_use == 5
    # 5 pages; 3 are free and preempting the sharer frees 1
    add(scheduler, "high", 17, max_tokens=3, priority=0, arrival=1.0)
    assert not step(scheduler).preempted


def test_urgent_request_enters_on_the_pages_its_victim_shared_with_it():
    scheduler = make(pages=6, seqs=1)
    shared = list(range(12))
    add(scheduler, "low", [*shared, 50], max_tokens=10, priority=1)
    step(scheduler)
    high = add(scheduler, "high", [*shared, 60], max_tokens=10, priority=0)
    batch = step(scheduler)
    assert names(batch.preempted) == ["low"] and names(batch.decodes) == ["high"] and high.cached_tokens == 12


def test_shared_pages_are_freed_when_all_their_holders_are_preempted():
    scheduler = make(pages=8, seqs=4)
    shared = list(range(12))
    for name in "ab":
        add(scheduler, name, [*shared, ord(name)], max_tokens=3, priority=1)
        step(scheduler)
    assert scheduler.pool.num_in_use == 5
    add(scheduler, "high", 24, max_tokens=3)
    batch = step(scheduler)
    assert names(batch.preempted) == ["b", "a"] and names(batch.admitted) == ["high"]


def test_pages_matched_by_an_urgent_request_are_not_counted_as_freed():
    scheduler = make(pages=9, seqs=4)
    shared = list(range(12))
    add(scheduler, "equal", 12, max_tokens=4)
    add(scheduler, "low", [*shared, 50], max_tokens=3, priority=1)
    step(scheduler)
    assert scheduler.pool.num_in_use == 8
    # 3 more; 1 is free and preempting low frees 1
    add(scheduler, "high", [*shared, *range(60, 68)], max_tokens=4, arrival=1.0)
    assert not step(scheduler).preempted


def test_urgent_request_preempts_no_more_than_it_needs():
    scheduler = make(pages=8, seqs=4)
    for name in "ab":
        add(scheduler, name, 14, max_tokens=2, priority=1)
    step(scheduler)
    add(scheduler, "high", 15, max_tokens=17)
    batch = step(scheduler)
    assert names(batch.preempted) == ["b"] and names(batch.decodes) == ["a"]


def test_several_urgent_requests_do_not_preempt_beyond_the_token_budget():
    scheduler = make(seqs=4, budget=8)
    for name in "abcd":
        add(scheduler, name, 2, max_tokens=50, priority=1)
    step(scheduler)
    for name in "wxyz":
        add(scheduler, name, 30, priority=0)
    batch = step(scheduler)
    assert names(batch.admitted) == ["w"] and names(batch.preempted) == ["d"]
    assert names(step(scheduler).preempted) == []


@pytest.mark.parametrize("seqs", [1, 4])
def test_higher_priority_takes_the_slot_and_token_of_a_lower_one(seqs):
    scheduler = make(seqs=seqs, budget=seqs)  # decodes in all slots take the whole budget
    low = [add(scheduler, f"low-{number}", 1, max_tokens=90, priority=1) for number in range(seqs)]
    step(scheduler)
    add(scheduler, "high", 1)
    batch = step(scheduler)
    assert names(batch.preempted) == [low[-1].request_id] and names(batch.admitted) == ["high"]
    assert len(batch.decodes) == seqs

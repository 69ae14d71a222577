"""After the weights changed: how running requests are recomputed, and how long their streams stand still."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from engine.scheduling.admission import RECOMPUTED_TOKENS
from engine.scheduling.request import Request, RequestState
from engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.steps import add, chunks, make, names, step

BUDGET = 8192


class Pause(NamedTuple):
    """How long a stream waits for its first token after the update, in steps and in tokens that these compute."""

    steps: int
    tokens: int


def streams(lengths: list[int], **settings) -> tuple[Scheduler, list[Request]]:
    """Return a scheduler with running requests that have these numbers of tokens."""
    scheduler = make(pages=40_000, seqs=64, budget=BUDGET, context=32_768, **settings)
    requests = [
        add(scheduler, f"r{index:02}", length - 1, max_tokens=500, arrival=float(index))
        for index, length in enumerate(lengths)
    ]
    while not all(request.output_len for request in requests):
        step(scheduler)
    return scheduler, requests


def change_weights(scheduler: Scheduler, version: str) -> None:
    scheduler.preempt_all()
    scheduler.set_weight_version(version)


def pauses(scheduler: Scheduler, requests: list[Request]) -> tuple[dict[str, Pause], int]:
    """Update the weights. Return each stream's pause, and the most tokens of a step that a ready stream waits for."""
    change_weights(scheduler, "new")
    before = {request.request_id: request.output_len for request in requests}
    found: dict[str, Pause] = {}
    steps = tokens = longest = 0
    while len(found) < len(requests):
        batch = step(scheduler)
        computed = len(batch.decodes) + sum(chunk.length for chunk in batch.prefills)
        steps, tokens = steps + 1, tokens + computed
        if found:
            assert set(found) <= {request.request_id for request in batch.decodes}, "each ready stream has a token"
            longest = max(longest, computed)
        for request in requests:
            name = request.request_id
            if name not in found and request.output_len > before[name]:
                found[name] = Pause(steps, tokens)
                assert request.weight_version == "new"
    return found, longest


@pytest.mark.parametrize("count", [1, 8, 32])
def test_streams_go_on_one_by_one_and_ready_ones_wait_for_small_steps(count):
    scheduler, requests = streams([650 - 3 * index for index in range(count)])
    found, longest = pauses(scheduler, requests)
    assert longest <= RECOMPUTED_TOKENS
    before = 0
    for place, request in enumerate(requests):
        before += len(request.token_ids)
        pause = found[request.request_id]
        # tokens of this stream and those before it, what fills the last step, and a token per step of each ready stream
        assert pause.tokens <= before + RECOMPUTED_TOKENS + pause.steps * place
    assert list(found.values()) == sorted(found.values())


def test_a_step_is_not_shorter_than_what_makes_the_first_stream_ready():
    scheduler, requests = streams([20_000, 20_100])
    found, longest = pauses(scheduler, requests)
    assert found["r00"].steps == 3 and found["r00"].tokens <= 20_001 + RECOMPUTED_TOKENS
    assert longest <= RECOMPUTED_TOKENS


def test_steps_are_as_long_as_ever_when_all_streams_are_ready():
    scheduler, requests = streams([2000, 300])
    pauses(scheduler, requests)
    add(scheduler, "new", 6000, max_tokens=50, arrival=9.0)
    assert chunks(step(scheduler)) == [("new", 0, 4094, False)]


def test_samples_of_a_prompt_compute_it_once():
    scheduler = make(pages=4000, seqs=16, budget=BUDGET, context=8192)
    requests = [add(scheduler, f"r#{index}", list(range(2000)), max_tokens=500, index=index) for index in range(8)]
    for _ in range(40):
        step(scheduler)
    change_weights(scheduler, "new")
    computed = 0
    while any(request.num_computed < 2000 for request in requests):
        computed += sum(chunk.length for chunk in step(scheduler).prefills)
    assert computed < 2000 + 8 * 60
    assert all(request.weight_version == "new" for request in requests)


def test_a_second_update_begins_anew_and_an_ended_request_is_forgotten():
    scheduler, requests = streams([2000, 300, 900])
    change_weights(scheduler, "new")
    step(scheduler)
    scheduler.finish(requests[1], RequestState.ABORTED)
    add(scheduler, "r01", 50, arrival=9.0)  # another request of the same name
    found, _ = pauses(scheduler, [requests[0], requests[2]])
    assert found["r00"].tokens < found["r02"].tokens <= 2900 + RECOMPUTED_TOKENS + found["r02"].steps
    for _ in range(3):
        batch = step(scheduler)
    assert names(batch.decodes) == ["r00", "r02", "r01"] and not chunks(batch)


def test_kept_kv_is_not_computed_again_and_never_enters_the_prefix_cache():
    scheduler, [running] = streams([200])
    waiting = add(scheduler, "prefill", 20_000, arrival=9.0)
    step(scheduler)
    assert waiting.num_computed and not waiting.output_len
    assert scheduler.preempt_all(without_tokens=True) == [waiting]
    scheduler.rename_weights("new")
    assert running.num_computed == 200 and running.weight_version == "new"
    for _ in range(40):
        step(scheduler)
    again = add(scheduler, "again", running.token_ids[:220])
    step(scheduler)
    assert again.cached_tokens == 0

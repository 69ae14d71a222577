"""Decodes in one packed step with prompt chunks: every request gets the same results as when they run apart.

Only the kernels for Hopper GPUs run such steps by default; on a CPU they run here through PyTorch's attention.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from engine import Engine, EngineConfig
from engine.protocol.phase import Phase
from engine.scheduling.batch import Batch
from engine.scheduling.request import Request
from engine.worker.packed_graphs import PackedBuckets, decode_row
from engine.worker.step_input import StepInput
from tests.engine.core.test_async_scheduling import SAMPLING_PARAMS, plain, run_workload, scores
from tests.engine.core.test_loop import ARRIVALS, SMALL
from tests.engine.lively import PROMPTS, SETTINGS, greedy, request, tokens
from tests.support.waiting import PATIENCE


def make_mixed(engine: Engine, decodes: int = 64) -> Engine:
    """Let up to `decodes` decodes share a step with prompt chunks, and count such steps."""
    builder = engine.loop.executor.worker.runner.builder
    build = builder.build

    def counted(batch: Batch) -> StepInput:
        step = build(batch)
        builder.num_mixed += step.prefill is not None and step.prefill.num_decodes > 0
        return step

    builder.max_mixed_decodes, builder.num_mixed, builder.build = decodes, 0, counted
    return engine


def count_mixed(engine: Engine) -> int:
    return engine.loop.executor.worker.runner.builder.num_mixed


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "async scheduling"])
def pair(lively_model, request):
    """Two engines with few pages, of which the second mixes."""
    base = {"model": str(lively_model)} | SETTINGS | SMALL | {"max_num_batched_tokens": 16}
    engines = [Engine(EngineConfig(**base, async_scheduling=request.param)) for _ in range(2)]
    for engine, decodes in zip(engines, (0, 64), strict=True):
        make_mixed(engine, decodes)
    for engine in engines:
        for params in SAMPLING_PARAMS:
            if params.structured_outputs is not None:
                engine.loop.constraints.compile(params).result(PATIENCE)
    yield engines
    assert count_mixed(engines[1]) > 50 and not count_mixed(engines[0])
    for engine in engines:
        engine.close()


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arrivals=ARRIVALS.map(lambda rows: [(row[0] % len(SAMPLING_PARAMS), *row[1:]) for row in rows]))
def test_any_workload_gives_the_same_results_as_apart(pair, arrivals):
    apart, mixed = (run_workload(engine.loop, arrivals) for engine in pair)
    assert apart.keys() == mixed.keys()
    for name, expected in apart.items():
        found = mixed[name]
        assert tokens(found) == tokens(expected) and len(found) == len(expected)
        last, wanted = found[-1], expected[-1]
        assert (last.finish_reason, last.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
        for one, other in zip(found, expected, strict=True):
            assert plain(one.logprobs or []) == scores(other.logprobs or [])
            assert plain(one.prompt_logprobs or []) == scores(other.prompt_logprobs or [])


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_decodes_go_on_in_the_step_of_a_prompt_and_after_it(make_engine, reference, async_scheduling):
    """Of three decodes and a prompt of several chunks, each gets its tokens, with no step between them lost."""
    engine = make_mixed(make_engine(async_scheduling=async_scheduling, max_num_batched_tokens=8))
    loop, asked = engine.loop, [request(str(index), prompt, greedy(30)) for index, prompt in enumerate(PROMPTS[:3])]
    events: dict[str, list] = {}
    for one in asked:
        loop.add(one)
    late = request("late", [5 + index % 90 for index in range(40)], greedy(10))
    for step in range(200):
        if step == 12:
            loop.add(late)
        for event in loop.step():
            events.setdefault(event.request_id, []).append(event)
        if step > 12 and not loop.has_work:
            break
    for one in (*asked, late):
        assert tokens(events[one.request_id]) == reference.greedy(one.prompt_token_ids, one.params.max_tokens)
    assert count_mixed(engine) > 3


def test_more_decodes_than_allowed_run_apart(make_engine):
    engine = make_mixed(make_engine(), decodes=1)
    loop = engine.loop
    for index, prompt in enumerate(PROMPTS[:3]):
        loop.add(request(f"first {index}", prompt, greedy(30)))
    for _ in range(8):
        loop.step()
    few = count_mixed(engine)
    loop.add(request("second", PROMPTS[0], greedy(4)))
    for _ in range(8):
        loop.step()
    assert count_mixed(engine) == few
    engine.loop.executor.worker.runner.builder.max_mixed_decodes = 4
    loop.add(request("third", PROMPTS[0], greedy(4)))
    while loop.has_work:
        loop.step()
    assert count_mixed(engine) > few


def test_hidden_states_of_decodes_are_those_of_steps_apart(make_engine):
    params = greedy(12, return_hidden_states=True)
    found = []
    for decodes in (0, 64):
        engine = make_mixed(make_engine(enable_return_hidden_states=True, max_num_batched_tokens=8), decodes)
        outputs = engine.generate(prompt_token_ids=[PROMPTS[0], [7] * 30], sampling_params=params)
        found.append([output.outputs[0].hidden_states for output in outputs])
        assert (count_mixed(engine) > 0) == (decodes > 0)
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape and abs(one - other).max() < 1e-4


def test_mixed_buckets_hold_the_decodes_beside_the_prompts():
    buckets = PackedBuckets(Phase.PREFILL, 256, 8192, 4, 1, max_decodes=128)
    assert buckets.sizes.max == 8192 and buckets.num_chunks(64) == 64 and buckets.num_chunks(512) == 128 + 32
    assert buckets.choose(200, 100) == 256 and buckets.choose(8193, 2) is None
    assert buckets.choose(64, 65) == 128, "more chunks than the bucket holds"
    few = PackedBuckets(Phase.PREFILL, 8, 300, 4, 1, max_decodes=128)
    assert few.sizes.max == 300 and few.num_chunks(300) == 8


def test_a_decode_takes_the_newest_token_from_the_device_unless_the_host_knows_it():
    one = Request(request("a", [5, 6, 7], greedy(4)), "0", frozenset())
    one.slot, one.page_tables = 3, [[1]]
    assert decode_row(one, 2).tokens == (7,) and decode_row(one, 2).entry == 4
    assert decode_row(one, 3).tokens == (-4,)

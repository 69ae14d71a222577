"""Samples as they finish, and several generations on one engine."""

import threading

import pytest

from engine import SamplingParams
from engine.errors import RequestError
from tests.engine.lively import PROMPTS, greedy
from tests.support.waiting import PATIENCE


def lengths(*counts: int) -> list[SamplingParams]:
    return [greedy(count) for count in counts]


def test_samples_come_as_they_finish_and_equal_generate(make_engine):
    engine = make_engine()
    params = [SamplingParams(max_tokens=count, n=2, temperature=1.0, seed=5) for count in (24, 3, 11)]
    expected = engine.generate(prompt_token_ids=PROMPTS[:3], sampling_params=params)
    samples = list(engine.generate_as_completed(prompt_token_ids=PROMPTS[:3], sampling_params=params))
    assert [sample.prompt_index for sample in samples] == [1, 1, 2, 2, 0, 0]
    found = {(sample.prompt_index, sample.output.index): sample.output.token_ids for sample in samples}
    assert found == {
        (index, output.index): output.token_ids for index, one in enumerate(expected) for output in one.outputs
    }
    engine.idle_check()


def test_weights_change_and_other_calls_generate_between_two_samples(make_engine, reference):
    engine = make_engine()
    samples = engine.generate_as_completed(prompt_token_ids=PROMPTS[:2], sampling_params=lengths(4, 30))
    first = next(samples)
    assert first.prompt_index == 0 and first.output.token_ids == reference.greedy(PROMPTS[0], 4)
    [inner] = engine.generate(prompt_token_ids=PROMPTS[2], sampling_params=greedy(60))
    assert inner.token_ids == reference.greedy(PROMPTS[2], 60)
    weights = {name: tensor.clone() for name, tensor in engine.loop.executor.worker.runner.model.named_weights()}
    engine.update_weights(weights, version="same")
    [second] = samples
    assert second.output.token_ids == reference.greedy(PROMPTS[1], 30)
    engine.idle_check()


def test_threads_share_the_batches_of_one_engine(make_engine, reference):
    engine = make_engine()
    found: dict[int, list[int]] = {}

    def run(index: int) -> None:
        [output] = engine.generate(prompt_token_ids=PROMPTS[index], sampling_params=greedy(20 + index))
        found[index] = output.token_ids

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert found == {index: reference.greedy(PROMPTS[index], 20 + index) for index in range(4)}
    engine.idle_check()


def test_closing_the_iterator_aborts_what_is_left_and_nothing_else(make_engine, reference):
    engine = make_engine()
    kept = engine.generate_as_completed(prompt_token_ids=PROMPTS[:1], sampling_params=greedy(40))
    closed = engine.generate_as_completed(prompt_token_ids=PROMPTS[:3], sampling_params=lengths(2, 90, 90))
    assert next(closed).prompt_index == 0
    closed.close()
    assert [sample.output.token_ids for sample in kept] == [reference.greedy(PROMPTS[0], 40)]
    engine.idle_check()


def test_the_longest_expected_start_first(make_engine):
    with make_engine(max_num_seqs=1, graph_buckets=(1,)) as engine:
        samples = engine.generate_as_completed(
            prompt_token_ids=PROMPTS[:3], sampling_params=greedy(3), expected_tokens=[5, 900, 40]
        )
        assert [sample.prompt_index for sample in samples] == [1, 2, 0]


@pytest.mark.parametrize("expected", [[1], [1, -2], "12", [1, 2.5]])
def test_expected_tokens_are_checked_before_anything_runs(make_engine, expected):
    engine = make_engine()
    with pytest.raises(RequestError, match="expected_tokens.*one for each of the 2 prompts"):
        engine.generate_as_completed(prompt_token_ids=PROMPTS[:2], expected_tokens=expected)


def test_the_samples_of_a_prompt_compute_it_once(make_engine):
    engine = make_engine()
    prompt = [7 + index % 199 for index in range(220)]
    before = engine.stats()
    [output] = engine.generate(
        prompt_token_ids=prompt, sampling_params=SamplingParams(n=6, max_tokens=4, temperature=1.0)
    )
    after = engine.stats()
    assert len(output.outputs) == 6
    computed = (after.prefix_cache_queries - before.prefix_cache_queries) - (
        after.prefix_cache_hits - before.prefix_cache_hits
    )
    assert computed <= 220 + 5 * engine.info.page_size

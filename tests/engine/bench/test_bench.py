"""Measurements of `encore bench` on the tiny model: the figures match what ran."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.bench.measure import (
    decode_shares,
    graph_summary,
    measure_batch,
    measure_mixed,
    random_prompts,
    replay_against_eager,
    seconds_of,
)
from engine.bench.report import doubling, table
from engine.errors import EngineError
from tests.engine.lively import SAMPLING_VARIANTS


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    config = EngineConfig(
        model=str(tiny_model),
        max_num_seqs=4,
        max_model_len=128,
        graph_manifest="none",
        num_threads=1,
        enable_prefix_caching=False,
        device="cpu",
        graph_buckets=(1, 4),
    )
    with Engine(config) as made:
        yield made


def test_every_step_runs_the_whole_batch(engine: Engine) -> None:
    row = measure_batch(engine, 3, prompt_tokens=6, output_tokens=8, repeats=1, rng=random.Random(0))
    steps = decode_shares(
        engine.stats().graphs, {"batch_rows": [], "fallbacks": [], "real_tokens": [], "padded_tokens": []}
    )
    # 7 + 0 + 1 + 7 decode steps: untimed run, one token, a quarter of the tokens, all of them; 3 rows in bucket 4
    assert steps == {"decode_steps": 15, "hit_rate": 1.0, "padding": 0.25}
    assert row["preemptions"] == 0
    engine.idle_check()


def test_replay_and_eager_are_timed_on_the_bucket_of_the_batch(engine: Engine) -> None:
    assert replay_against_eager(engine, 3, 8, repeats=1)["reason"] == "not_captured"
    engine.warm()
    found = replay_against_eager(engine, 3, 8, repeats=2)
    assert found["bucket"] == 4 and found["replay_ms"] > 0 and found["eager_ms"] > 0
    assert found["speedup"] == pytest.approx(found["eager_ms"] / found["replay_ms"], rel=0.05)
    assert graph_summary(engine)["captured"] == 2 + 2 * SAMPLING_VARIANTS


def test_comparing_with_eager_does_not_change_later_answers(tiny_model: Path) -> None:
    # With few pages, used in turn, some request gets the page that a padding row might still point to.
    config = EngineConfig(
        model=str(tiny_model),
        max_num_seqs=4,
        max_model_len=128,
        graph_manifest="none",
        num_threads=1,
        enable_prefix_caching=False,
        device="cpu",
        graph_buckets=(4,),
        num_pages=9,
    )
    greedy = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=0)
    with Engine(config) as engine:

        def answers() -> list[list[float]]:
            outputs = engine.generate(prompt_token_ids=[[5, 6, 7], [9, 8]], sampling_params=greedy)
            return [[entry.logprob for entry in output.logprobs] for output in outputs]

        before = answers()
        replay_against_eager(engine, 4, 100, repeats=1)
        assert [answers() for _ in range(4)] == [before] * 4
        engine.idle_check()


def test_the_mixed_run_depends_only_on_its_seed(engine: Engine) -> None:
    runs = [measure_mixed(engine, 6, 16, 8, seed) for seed in (1, 1, 2)]
    shapes = [(run["prompt_tokens"], run["output_tokens"], run["steps"]) for run in runs]
    assert shapes[0] == shapes[1] != shapes[2]
    assert 6 * 2 <= runs[0]["prompt_tokens"] <= 6 * 16


def test_a_failed_sequence_is_not_timed(engine: Engine) -> None:
    with pytest.raises(EngineError, match="exceed"):
        seconds_of(engine, [[5] * 120], [50])


def test_prompts_share_no_prefix_and_stay_in_the_vocabulary() -> None:
    prompts = random_prompts(random.Random(0), 1000, [5, 5, 2])
    assert [len(prompt) for prompt in prompts] == [5, 5, 2]
    assert prompts[0] != prompts[1] and all(3 <= token < 1000 for prompt in prompts for token in prompt)


def test_batch_sizes_double_up_to_the_limit() -> None:
    assert [doubling(limit) for limit in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_a_missing_figure_is_shown_as_a_dash() -> None:
    lines = table([{"batch": 2, "first_token_ms": 1.5, "decode_ms_per_step": None, "replay_against_eager": None}])
    assert lines.splitlines()[1].split() == ["2", "1.5", "-", "-", "-", "-", "-", "-", "-", "-"]

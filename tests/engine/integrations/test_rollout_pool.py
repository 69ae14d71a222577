"""A pool of engines on a real Ray, compared with one engine."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import RequestError, WeightUpdateError
from tests.soak.serving import command_of

pytest.importorskip("ray", reason="the pool runs on Ray")
pytestmark = pytest.mark.filterwarnings("default")  # of Ray's own modules

from engine.integrations.rollout_pool import RolloutPool  # noqa: E402
from tests.support.waiting import descendants, wait  # noqa: E402

PROMPTS = [[5, 9, 11], [40, 41], [7] * 20, [100, 3, 55, 8], [12, 13]]


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_model), dtype="float32", num_threads=1, max_num_seqs=4, max_model_len=1024, warmup="lazy",
        graph_manifest="none", progress=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pool(config: EngineConfig) -> Iterator[RolloutPool]:
    """A pool of two engines, shared by the tests of this file."""
    with RolloutPool(config, engines=2) as pool:
        yield pool


@pytest.fixture
def engine(config: EngineConfig) -> Iterator[Engine]:
    with Engine(config) as engine:
        yield engine


def pids() -> list[int]:
    """The processes of the engines. Other tests of the machine may have some too."""
    return [pid for pid in descendants(os.getpid()) if command_of(pid).startswith("ray::EngineActor")]


def tokens(outputs) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def test_a_pool_returns_what_one_engine_returns(pool, engine):
    params = [SamplingParams(max_tokens=count, n=3, temperature=1.0, seed=count) for count in (30, 3, 11, 20, 7)]
    wanted = engine.generate(prompt_token_ids=PROMPTS, sampling_params=params)
    found = pool.generate(prompt_token_ids=PROMPTS, sampling_params=params)
    assert tokens(found) == tokens(wanted)
    assert [[one.text for one in output.outputs] for output in found] == [
        [one.text for one in output.outputs] for output in wanted
    ]
    text = pool.generate("red fox", {"max_tokens": 5, "temperature": 0.0})[0]
    assert text.text == engine.generate("red fox", {"max_tokens": 5, "temperature": 0.0})[0].text


def test_samples_without_a_seed_are_those_of_one_engine(config, pool, engine):
    """Both count their requests; the pool has counted those of other tests."""
    params = SamplingParams(max_tokens=6, n=2, temperature=1.0)
    seen = next(pool._seeds)  # noqa: SLF001
    for _ in range(seen):
        next(engine._seeds)  # noqa: SLF001
    wanted = engine.generate(prompt_token_ids=PROMPTS, sampling_params=params)
    assert tokens(pool.generate(prompt_token_ids=PROMPTS, sampling_params=params)) == tokens(wanted)


def test_every_sample_comes_once_and_short_ones_first(pool):
    params = [SamplingParams(max_tokens=count, n=2, temperature=0.0, ignore_eos=True) for count in (400, 2, 2, 2, 2)]
    samples = list(pool.generate_as_completed(prompt_token_ids=PROMPTS, sampling_params=params))
    places = Counter((sample.prompt_index, sample.output.index) for sample in samples)
    assert places == Counter({(prompt, index): 1 for prompt in range(5) for index in range(2)})
    assert {sample.prompt_index for sample in samples[-2:]} == {0}


def test_arguments_are_refused_before_anything_runs(pool):
    with pytest.raises(RequestError, match="max_tokens"):
        pool.generate(prompt_token_ids=PROMPTS, sampling_params={"max_tokens": -1})
    with pytest.raises(RequestError, match="expected_tokens"):
        pool.generate(prompt_token_ids=PROMPTS, sampling_params={"max_tokens": 2}, expected_tokens=[1])
    with pytest.raises(RequestError, match="prompt_logprobs"):
        pool.generate(prompt_token_ids=PROMPTS, sampling_params={"prompt_logprobs": 1})
    with pytest.raises(RequestError, match="context|exceed"):
        pool.generate(prompt_token_ids=[[1] * 1020], sampling_params={"max_tokens": 100})


def test_weights_reach_every_engine_also_a_successor_and_nothing_is_lost_or_doubled(pool, engine, tiny_model):
    torch.manual_seed(3)
    weights = {
        name: (torch.randn_like(value) * 0.1).to(torch.bfloat16).float()
        for name, value in load_file(tiny_model / "model.safetensors").items()
    }
    with pytest.raises(WeightUpdateError):
        pool.update_weights({"nothing": torch.zeros(2)}, version="bad")
    assert pool.update_weights(weights, version="step-1") == engine.update_weights(weights, version="step-1")
    assert pool.weight_version == "step-1"

    params = [SamplingParams(max_tokens=200, n=4, temperature=1.0, seed=one, ignore_eos=True) for one in range(5)]
    wanted = {
        (prompt, one.index): one.token_ids
        for prompt, output in enumerate(engine.generate(prompt_token_ids=PROMPTS, sampling_params=params))
        for one in output.outputs
    }
    before = pids()
    assert len(before) == 2
    found: dict[tuple[int, int], list[int]] = {}
    versions = set()
    for sample in pool.generate_as_completed(prompt_token_ids=PROMPTS, sampling_params=params):
        place = sample.prompt_index, sample.output.index
        assert place not in found
        found[place] = sample.output.token_ids
        versions |= {span.version for span in sample.output.weight_versions}
        if len(found) == 2:
            os.kill(before[0], signal.SIGKILL)
    assert found == wanted
    assert versions == {"step-1"}

    def again() -> dict[tuple[int, int], list[int]]:
        outputs = pool.generate(prompt_token_ids=PROMPTS, sampling_params=params)
        return {(prompt, one.index): one.token_ids for prompt, output in enumerate(outputs) for one in output.outputs}

    wait(lambda: len(pids()) >= 2, "a successor")
    assert again() == wanted
    os.kill(before[1], signal.SIGKILL)  # so that the successor computes what follows
    assert again() == wanted
    assert not set(before) & set(pids())


def test_weights_change_between_two_samples(pool, tiny_model):
    weights = load_file(tiny_model / "model.safetensors")
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (2, 900, 900)]
    samples = pool.generate_as_completed(prompt_token_ids=PROMPTS[:3], sampling_params=params)
    next(samples)
    pool.update_weights(weights, version="step-2")
    spans = [sample.output.weight_versions for sample in samples]
    assert all([span.version for span in one] == ["step-1", "step-2"] for one in spans), spans


def test_a_pause_holds_samples_and_leaving_an_iterator_ends_them(pool):
    samples = pool.generate_as_completed(
        prompt_token_ids=PROMPTS, sampling_params={"max_tokens": 900, "ignore_eos": True}
    )
    samples.close()  # before it began
    samples = pool.generate_as_completed(
        prompt_token_ids=PROMPTS,
        sampling_params=[SamplingParams(max_tokens=2 if one == 0 else 900, ignore_eos=True) for one in range(5)],
    )
    next(samples)
    samples.close()
    pool.pause("keep")
    assert pool.is_paused
    pool.resume()
    assert len(pool.generate(prompt_token_ids=PROMPTS, sampling_params={"max_tokens": 2})) == 5

"""The contract of executors: an engine gives the same results above one worker and above two processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import RequestError, WeightUpdateError
from engine.executor.multiproc import MultiprocExecutor
from engine.executor.uniproc import UniprocExecutor
from engine.loader.weights import iterate_safetensors
from tests.engine.lively import MANY, PROMPTS, SETTINGS, drain, greedy, request, tokens

EXECUTORS = {1: UniprocExecutor, 2: MultiprocExecutor}
SAMPLED = [
    SamplingParams(max_tokens=20, temperature=1.2, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.8, top_p=0.8, top_k=12, seed=4, ignore_eos=True),
    greedy(20, repetition_penalty=1.3, logprobs=2),
    greedy(20, prompt_logprobs=1),
    greedy(20, logit_bias={7: 5.0}, presence_penalty=0.5),
]


@pytest.fixture(scope="module", params=[1, 2], ids=["uniproc", "multiproc"])
def engine(request: pytest.FixtureRequest, lively_model: Path) -> Iterator[Engine]:
    """One engine for the tests that leave it as it was; async scheduling, few pages."""
    config = EngineConfig(
        **{"model": str(lively_model), "tensor_parallel_size": request.param, "async_scheduling": True}
        | SETTINGS
        | {"num_pages": 40, "cpu_weight_format": "fp32"}
    )
    with Engine(config) as engine:
        assert type(engine.loop.executor) is EXECUTORS[request.param]
        yield engine
        engine.idle_check()


def generate(engine: Engine, params: Any = None) -> list[list[int]]:
    outputs = engine.generate(prompt_token_ids=list(PROMPTS), sampling_params=params or greedy(20))
    return [list(output.token_ids) for output in outputs]


def test_greedy_tokens_are_those_of_transformers(engine, reference):
    assert generate(engine) == [reference.greedy(prompt, 20) for prompt in PROMPTS]


def test_sampled_tokens_logprobs_and_penalties_are_those_of_one_worker(engine, make_engine):
    outputs, expected = (
        one.generate(prompt_token_ids=list(PROMPTS), sampling_params=SAMPLED) for one in (engine, make_engine())
    )
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    for output, other in zip(outputs, expected, strict=True):
        assert (output.logprobs is None, output.prompt_logprobs is None) == (
            other.logprobs is None,
            other.prompt_logprobs is None,
        )
        for entry, twin in zip(output.logprobs or [], other.logprobs or [], strict=True):
            assert entry.token_id == twin.token_id and entry.logprob == pytest.approx(twin.logprob, abs=1e-3)


def test_requests_that_are_preempted_or_aborted_leave_the_others_unchanged(engine, reference):
    loop = engine.loop
    for number, prompt in enumerate(MANY):
        loop.add(request(f"{number}", prompt, greedy(90)))
    preempted = loop.stats().num_preemptions
    events = drain(loop, {9: ["3"]})
    assert loop.stats().num_preemptions > preempted
    assert events["3"][-1].finish_reason == "abort"
    for number, prompt in enumerate(MANY):
        if number != 3:
            assert tokens(events[f"{number}"]) == reference.greedy(prompt, 90)


def test_an_invalid_request_is_rejected_and_the_engine_continues(engine, reference):
    with pytest.raises(RequestError):
        engine.loop.add(request("bad", [1, 10**6], greedy(3)))
    assert generate(engine) == [reference.greedy(prompt, 20) for prompt in PROMPTS]


def test_weights_are_replaced_from_tensors_and_from_files(
    engine, lively_model, other_model, reference, other_reference
):
    old, new = ([one.greedy(prompt, 20) for prompt in PROMPTS] for one in (reference, other_reference))
    weights = list(iterate_safetensors(other_model))
    assert engine.update_weights(dict(weights), version="a") == len(weights)
    assert generate(engine) == new != old
    assert engine.loop.load_weights(str(lively_model), "b") == len(weights)
    assert generate(engine) == old and engine.weight_version == "b"


def test_a_refused_update_keeps_the_old_weights(engine, other_model, reference, tmp_path):
    weights = list(iterate_safetensors(other_model))
    version = engine.weight_version
    for refused in (
        [*weights, ("nothing.weight", weights[0][1])],
        [(name, tensor[:-1]) for name, tensor in weights],
        [*weights, "no pair"],
        [*weights[:-1], (weights[-1][0], weights[-1][1].to("meta"))],
        [],
    ):
        with pytest.raises(WeightUpdateError):
            engine.update_weights(refused, version="refused")
    with pytest.raises(WeightUpdateError, match="does not exist"):
        engine.loop.load_weights(str(tmp_path / "nowhere"), "refused")
    with pytest.raises(OSError, match="the trainer went away"):
        engine.update_weights(fail_midway(weights), version="refused")
    assert engine.weight_version == version
    assert generate(engine) == [reference.greedy(prompt, 20) for prompt in PROMPTS]


def fail_midway(weights):
    yield weights[0]
    raise OSError("the trainer went away")


def test_a_row_of_nan_fails_its_request_and_leaves_clean_pages_on_every_rank(engine, lively_model, reference):
    weights = dict(iterate_safetensors(lively_model))
    name = "model.layers.0.input_layernorm.weight"
    engine.update_weights([(name, torch.full_like(weights[name], 3e38))], version="huge")
    [output] = engine.generate(prompt_token_ids=PROMPTS[0], sampling_params=greedy(9))
    assert output.finish_reason == "error" and "not finite" in output.outputs[0].error
    engine.update_weights([(name, weights[name])], version="clean")
    outputs = engine.generate(prompt_token_ids=MANY, sampling_params=greedy(90))  # more than fit in all pages
    assert [output.token_ids for output in outputs] == [reference.greedy(prompt, 90) for prompt in MANY]


def test_graphs_are_captured_dropped_and_reported(engine, reference):
    loop = engine.loop
    loop.captures.warm()
    captured = [row for row in loop.graphs() if row["state"] == "captured"]
    assert not loop.executor.worker.runner.cache.pending() and not loop.captures.capture_next()
    assert loop.captures.invalidate() == len(captured)
    assert generate(engine) == [reference.greedy(prompt, 20) for prompt in PROMPTS]
    loop.executor.check()

"""Pooled vectors of prompts: those of transformers' hidden states, in every order in which tokens are computed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.errors import RequestError
from engine.loader.weights import iterate_safetensors
from tests.engine.core.test_loop import SMALL
from tests.engine.lively import PROMPTS, drain, greedy, request, tokens

TOLERANCE = 1e-4
MODES = ("last", "mean")
LONG = [[7 + number, *range(3, 3 + length)] for number, length in enumerate((90, 33, 60, 17, 1, 48))]


@torch.inference_mode()
def expected(reference, ids, mode):
    """Return transformers' vector [h]: of the last token, or the mean over the tokens."""
    hidden = reference.model.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0]
    return (hidden[-1] if mode == "last" else hidden.mean(0)).numpy()


def pooled(mode, **options):
    return SamplingParams(max_tokens=0, temperature=0.0, pooling=mode, **options)


def assert_vector(found, reference, ids, mode):
    assert found.dtype == np.float32 and found.shape == (1, reference.model.config.hidden_size)
    np.testing.assert_allclose(found[0], expected(reference, ids, mode), atol=TOLERANCE)


def vector_of(events):
    """Return the only vector of a request's events."""
    assert not tokens(events) and events[-1].finish_reason == "stop"
    (found,) = [event.hidden_states for event in events if event.hidden_states is not None]
    return found


@pytest.mark.parametrize("scope", ["none", "layer", "block"])
@pytest.mark.parametrize("behind", [False, True], ids=["sync", "async"])
def test_vectors_beside_decodes_equal_transformers(make_engine, reference, scope, behind):
    engine = make_engine(inference_cuda_graph_scope=scope, async_scheduling=behind, max_num_batched_tokens=48)
    prompts = [*LONG, *PROMPTS]
    params = [pooled(MODES[number % 2]) if number < len(LONG) else greedy(12) for number in range(len(prompts))]
    outputs = engine.generate(prompt_token_ids=prompts, sampling_params=params)
    for output, prompt, one in zip(outputs, prompts, params, strict=True):
        if one.pooling is None:
            assert output.token_ids == reference.greedy(prompt, 12) and output.hidden_states is None
        else:
            assert_vector(output.hidden_states, reference, prompt, one.pooling)


@pytest.mark.parametrize("mode", MODES)
def test_chunks_and_cached_prefixes_leave_no_token_out(make_engine, reference, mode):
    engine = make_engine(max_num_batched_tokens=16)
    shared = list(range(3, 83))
    prompts = [[*shared, 5], shared, [*shared, 9, 8, 7]]  # with all pages cached, one token is left to compute
    for _ in range(2):
        for output in engine.generate(prompt_token_ids=prompts, sampling_params=pooled(mode)):
            assert_vector(output.hidden_states, reference, output.prompt_token_ids, mode)
    assert (output.cached_tokens > 0) == (mode == "last")  # a mean needs every token


def test_equal_prompts_at_once_give_the_same_vector(make_engine, reference):
    """The later ones wait for the pages of the first."""
    engine = make_engine(max_num_batched_tokens=24)
    params = [pooled("last"), pooled("mean"), greedy(5)] * 3
    outputs = engine.generate(prompt_token_ids=[LONG[0]] * 9, sampling_params=params)
    for output, one in zip(outputs, params, strict=True):
        if one.pooling is None:
            assert output.token_ids == reference.greedy(LONG[0], 5)
        else:
            assert_vector(output.hidden_states, reference, LONG[0], one.pooling)


@pytest.mark.parametrize("behind", [False, True], ids=["sync", "async"])
def test_vectors_beside_constrained_decodes(make_engine, reference, behind):
    engine = make_engine(max_num_batched_tokens=24, async_scheduling=behind)
    constrained = SamplingParams(max_tokens=30, temperature=1.0, structured_outputs={"regex": "[a-z ]{12,25}[.]"})
    prompts, params = [PROMPTS[0], *LONG], [constrained, *(pooled(MODES[number % 2]) for number in range(len(LONG)))]
    first, *others = engine.generate(prompt_token_ids=prompts, sampling_params=params)
    assert first.text.endswith(".")
    for output, prompt, one in zip(others, LONG, params[1:], strict=True):
        assert_vector(output.hidden_states, reference, prompt, one.pooling)


def test_vectors_beside_drafts_equal_transformers(make_engine, reference):
    engine = make_engine(num_speculative_tokens=3)
    prompts = [[5, 9, 200, 5, 9, 200, 5, 9], LONG[1], LONG[4]]
    outputs = engine.generate(prompt_token_ids=prompts, sampling_params=[greedy(20), pooled("last"), pooled("mean")])
    assert outputs[0].token_ids == reference.greedy(prompts[0], 20)
    assert_vector(outputs[1].hidden_states, reference, prompts[1], "last")
    assert_vector(outputs[2].hidden_states, reference, prompts[2], "mean")


@pytest.mark.parametrize("behind", [False, True], ids=["sync", "async"])
def test_preempted_prompts_give_one_right_vector(make_engine, reference, behind):
    loop = make_engine(**SMALL | {"num_pages": 20}, max_num_batched_tokens=16, async_scheduling=behind).loop
    prompts = {"mean": LONG[2], "last": [*LONG[2], 5]}
    loop.add(request("mean", prompts["mean"], pooled("mean")))
    loop.step()
    running = loop.scheduler.get("mean")
    loop.step()
    loop.add(request("last", prompts["last"], pooled("last"), priority=-1))
    loop.step()
    assert running.num_preemptions == 1
    for index in range(4):
        loop.add(request(f"d{index}", LONG[1][: 8 + index], greedy(20)))
    events = drain(loop)
    for mode, prompt in prompts.items():
        assert_vector(vector_of(events[mode]), reference, prompt, mode)
    for index in range(4):
        assert tokens(events[f"d{index}"]) == reference.greedy(LONG[1][: 8 + index], 20)


def test_every_running_prompt_is_recomputed_for_new_weights(make_engine, other_model, other_reference):
    loop = make_engine(max_num_batched_tokens=16).loop
    for mode in MODES:
        loop.add(request(mode, LONG[0], pooled(mode)))
    loop.step()
    loop.update_weights(iterate_safetensors(other_model), version="new")
    events = drain(loop)
    for mode in MODES:
        assert_vector(vector_of(events[mode]), other_reference, LONG[0], mode)
        assert events[mode][-1].weight_version == "new"


@pytest.mark.parametrize("behind", [False, True], ids=["sync", "async"])
def test_an_abort_storm_leaks_nothing_and_spares_the_others(make_engine, reference, behind):
    chance = random.Random(3)
    engine = make_engine(max_num_batched_tokens=16, async_scheduling=behind)
    prompts = {f"r{index}": chance.choice(LONG) for index in range(40)}
    for index, (name, prompt) in enumerate(prompts.items()):
        engine.loop.add(request(name, prompt, greedy(6) if index % 4 == 3 else pooled(MODES[index % 2])))
    doomed = chance.sample(sorted(prompts), 25)
    events = drain(engine.loop, {chance.randrange(40): doomed[at : at + 2] for at in range(0, 25, 2)})
    survivors = [name for name in prompts if events[name][-1].finish_reason == "stop"]
    assert len(survivors) >= 8
    for name in survivors:
        index = int(name[1:])
        assert_vector(vector_of(events[name]), reference, prompts[name], MODES[index % 2])
    engine.idle_check()


def test_ranks_give_the_vectors_of_one_process(make_engine, reference):
    engine = make_engine(tensor_parallel_size=2, max_num_batched_tokens=32)
    outputs = engine.generate(prompt_token_ids=LONG[:2], sampling_params=[pooled("last"), pooled("mean")])
    assert_vector(outputs[0].hidden_states, reference, LONG[0], "last")
    assert_vector(outputs[1].hidden_states, reference, LONG[1], "mean")


def test_a_vector_that_is_not_finite_fails_its_request_alone(make_engine, reference):
    engine = make_engine()
    engine.loop.executor.worker.runner.model.embedding.weight.data[42] = float("nan")
    bad = [5, 42, 7]
    outputs = engine.generate(
        prompt_token_ids=[bad, LONG[3], bad], sampling_params=[*map(pooled, MODES), pooled("mean")]
    )
    assert [output.finish_reason for output in outputs] == ["error", "stop", "error"]
    assert "hidden states are not finite" in outputs[0].outputs[0].error and outputs[0].hidden_states is None
    assert_vector(outputs[1].hidden_states, reference, LONG[3], "mean")
    # The pages that the failed prompts held are clean.
    assert_vector(
        engine.generate(prompt_token_ids=[PROMPTS[4]], sampling_params=pooled("last"))[0].hidden_states,
        reference, PROMPTS[4], "last",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"pooling": "cls", "max_tokens": 0}, "pooling"),
        ({"pooling": "last"}, "max_tokens"),
        ({"pooling": "last", "max_tokens": 0, "n": 2}, "n"),
        ({"pooling": "mean", "max_tokens": 0, "return_hidden_states": True}, "return_hidden_states"),
    ],
)
def test_parameters_that_contradict_pooling_are_refused(options, param):
    with pytest.raises(RequestError) as refused:
        SamplingParams(**options)
    assert refused.value.param == param

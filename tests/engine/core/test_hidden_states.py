"""Hidden states of requests that ask for them: those of transformers, in every order in which tokens are computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.errors import RequestError
from engine.loader.weights import iterate_safetensors
from tests.engine.core.test_loop import SMALL
from tests.engine.lively import MANY, PROMPTS, drain, greedy, request, tokens

ON = {"enable_return_hidden_states": True}
WANTED = {"return_hidden_states": True}
TOLERANCE = 2e-4


@torch.inference_mode()
def expected(reference, ids):
    """Return transformers' hidden states [len(ids), h] after the final norm."""
    return reference.model.model(torch.tensor([list(ids)]), use_cache=False).last_hidden_state[0].numpy()


def assert_equal(output, reference):
    computed = [*output.prompt_token_ids, *output.token_ids][:-1] or output.prompt_token_ids
    found = output.hidden_states
    assert found.dtype == np.float32 and found.shape == (len(computed), reference.model.config.hidden_size)
    np.testing.assert_allclose(found, expected(reference, computed), atol=TOLERANCE)


@pytest.mark.parametrize("scope", ["none", "layer", "block"])
@pytest.mark.parametrize("behind", [False, True], ids=["sync", "async"])
def test_hidden_states_equal_transformers(make_engine, reference, scope, behind):
    engine = make_engine(**ON, inference_cuda_graph_scope=scope, async_scheduling=behind)
    params = [greedy(count, return_hidden_states=index != 2) for index, count in enumerate((12, 1, 5, 30, 7))]
    outputs = engine.generate(prompt_token_ids=PROMPTS, sampling_params=params)
    assert [output.token_ids for output in outputs] == [
        reference.greedy(prompt, one.max_tokens) for prompt, one in zip(PROMPTS, params, strict=True)
    ]
    assert outputs[2].hidden_states is None
    for output in (*outputs[:2], *outputs[3:]):
        assert_equal(output, reference)


def test_chunks_and_cached_prefixes_leave_no_token_out(make_engine, reference):
    engine = make_engine(**ON, max_num_batched_tokens=16)
    prompt = list(range(3, 80))
    engine.generate(prompt_token_ids=[prompt], sampling_params=greedy(2))
    for _ in range(2):  # the prompt's pages are in the prefix cache
        assert_equal(engine.generate(prompt_token_ids=[prompt], sampling_params=greedy(6, **WANTED))[0], reference)


@pytest.mark.parametrize("behind", [False, True], ids=["sync", "async"])
def test_a_preempted_request_gives_each_hidden_state_once(make_engine, reference, behind):
    loop = make_engine(**ON, **SMALL, async_scheduling=behind).loop
    for index, prompt in enumerate(MANY):
        loop.add(request(str(index), prompt, greedy(30, **WANTED)))
    events = drain(loop)
    assert loop.stats().num_preemptions > 0
    for index, prompt in enumerate(MANY):
        found = np.concatenate([event.hidden_states for event in events[str(index)] if event.hidden_states is not None])
        computed = [*prompt, *tokens(events[str(index)])][:-1]
        np.testing.assert_allclose(found, expected(reference, computed), atol=TOLERANCE)


def test_a_prefill_that_is_interrupted_by_new_weights_gives_those_of_one_version(
    make_engine, other_model, other_reference
):
    loop = make_engine(**ON, max_num_batched_tokens=16).loop
    prompt = list(range(3, 60))
    loop.add(request("a", prompt, greedy(4, **WANTED)))
    loop.step()
    loop.update_weights(iterate_safetensors(other_model), version="new")
    events = drain(loop)["a"]
    found = np.concatenate([event.hidden_states for event in events if event.hidden_states is not None])
    np.testing.assert_allclose(found, expected(other_reference, [*prompt, *tokens(events)][:-1]), atol=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "n": 3, "seed": 5},
        {"structured_outputs": {"regex": "[a-z ]{3,25}[.]"}, "temperature": 1.0},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"max_tokens": 0},
    ],
    ids=["n", "constrained", "logprobs", "prompt only"],
)
def test_hidden_states_go_with_other_parameters(make_engine, reference, options):
    engine = make_engine(**ON)
    params = SamplingParams(**{"max_tokens": 12, **options, **WANTED})
    output = engine.generate(prompt_token_ids=[PROMPTS[0]], sampling_params=params)[0]
    for choice in output.outputs:
        computed = [*output.prompt_token_ids, *choice.token_ids]
        np.testing.assert_allclose(
            choice.hidden_states, expected(reference, computed[:-1] if choice.token_ids else computed), atol=TOLERANCE
        )


def test_rows_with_hidden_states_have_no_drafts(make_engine, reference):
    engine = make_engine(**ON, num_speculative_tokens=3)
    prompt = [5, 9, 200, 5, 9, 200, 5, 9]
    outputs = engine.generate(prompt_token_ids=[prompt, prompt], sampling_params=[greedy(20, **WANTED), greedy(20)])
    assert outputs[0].token_ids == outputs[1].token_ids
    assert_equal(outputs[0], reference)


def test_ranks_give_the_hidden_states_of_one_process(make_engine, reference):
    engine = make_engine(**ON, tensor_parallel_size=2)
    assert_equal(engine.generate(prompt_token_ids=[PROMPTS[3]], sampling_params=greedy(8, **WANTED))[0], reference)


def test_an_engine_that_keeps_none_refuses_the_request(make_engine):
    with pytest.raises(RequestError, match="keeps no hidden states; start it with enable_return") as refused:
        make_engine().generate(prompt_token_ids=[PROMPTS[0]], sampling_params=greedy(8, **WANTED))
    assert refused.value.param == "return_hidden_states"

"""The probability and the ids that top-k, top-p and min-p keep, beside log-probabilities of the sampled tokens."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from engine import SamplingParams
from engine.errors import RequestError
from engine.protocol.logprobs import TokenLogprob, TokenLogprobs
from engine.sampling.sampler import Sampler
from engine.worker.sampling_graphs import SamplingStep
from graph_cache.config import GraphConfig
from graph_cache.core.buckets import Buckets
from graph_cache.core.cache import GraphCache
from tests.engine.lively import PROMPTS
from tests.support.engines import DEVICES

VOCAB = 997
CUTS = [
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 0.7},
    {"top_p": 0.999, "temperature": 2.0},
    {"top_k": 5, "repetition_penalty": 1.3, "logit_bias": {3: 4.0}},
    {"min_p": 0.2, "allowed_token_ids": [1, 2, 3, 50]},
]
UNCUT = [{}, {"temperature": 0.0}, {"temperature": 0.0, "top_k": 5}, {"top_k": VOCAB}]


def kept_by_definition(logits, params):
    """Return the whole distribution and the ids that stay, most likely first. Written from the definitions."""
    probabilities = (logits.double() / params.temperature).softmax(0)
    ids = sorted(range(len(logits)), key=lambda token: (-float(probabilities[token]), token))
    if params.top_k:
        ids = ids[: params.top_k]
    mass = sum(float(probabilities[token]) for token in ids)
    chosen, sum_so_far = [], 0.0
    for token in ids:
        if params.top_p < 1.0 and sum_so_far >= params.top_p * mass:
            break
        chosen.append(token)
        sum_so_far += float(probabilities[token])
    least = params.min_p * float(probabilities.max())
    return probabilities, [token for token in chosen if float(probabilities[token]) >= least]


@pytest.mark.parametrize("device", DEVICES)
def test_mass_and_ids_are_those_of_the_definitions(device):
    """Rows with other needs are in the same batch, and on a GPU kernels sample them."""
    torch.manual_seed(0)
    cases = [cut for cut in CUTS if not {"logit_bias", "allowed_token_ids"} & cut.keys()]
    params = [SamplingParams(**cut, return_sampling_mask=True) for cut in cases]
    params += [SamplingParams(**cut, return_kept_mass=True) for cut in cases]
    params += [SamplingParams(), SamplingParams(logprobs=2), SamplingParams(logprobs=1, top_p=0.5)]
    rows = len(params)
    logits = (3 * torch.randn(rows, VOCAB)).to(device)
    sampler = Sampler(rows, VOCAB, device)
    for slot, one in enumerate(params):
        sampler.set_slot(slot, one, seed=slot, prompt_ids=[1])
    next_tokens = logits.argmax(1)
    step = SamplingStep(
        GraphCache(GraphConfig(), device), sampler, logits, next_tokens,
        torch.zeros(rows + 1, dtype=torch.int64, device=device), Buckets((rows,)),
    )  # fmt: skip
    step.load(torch.tensor([range(1, rows + 1), [1] * rows]).to(device))
    with torch.inference_mode():
        result = step.run(list(range(rows)), [1] * rows)
    tokens = result.token_ids.tolist()
    assert result.logprobs is not None
    for row, one in enumerate(params):
        found = result.logprobs[row]
        if not one.returns_support:
            assert found is None or (found.kept_mass is None and found.kept_ids is None)
            continue
        probabilities, ids = kept_by_definition(logits[row].cpu(), one)
        mass = math.log(sum(float(probabilities[token]) for token in ids))
        assert found.kept_mass == pytest.approx(mass, abs=1e-5)
        assert found.kept_ids == (ids if one.return_sampling_mask else None)
        assert tokens[row] == found.token_id and tokens[row] in ids
        assert found.logprob + found.kept_mass == pytest.approx(math.log(float(probabilities[tokens[row]])), abs=1e-4)


def test_an_engines_outputs_have_them_for_each_token(make_engine, reference):
    engine = make_engine()
    params = [SamplingParams(max_tokens=6, ignore_eos=True, seed=4, return_sampling_mask=True, **cut) for cut in CUTS]
    outputs = engine.generate(prompt_token_ids=[PROMPTS[0]] * len(CUTS), sampling_params=params)
    for cut, output in zip(CUTS, outputs, strict=True):
        [found] = output.outputs
        assert len(found.sampling_mask) == len(found.kept_mass) == len(found.token_ids) == len(found.logprobs) == 6
        assert all(token in mask for token, mask in zip(found.token_ids, found.sampling_mask, strict=True))
        if {"logit_bias", "allowed_token_ids"} & cut.keys():
            assert max(map(len, found.sampling_mask)) <= 5
            continue
        ids = [*PROMPTS[0], *found.token_ids]
        whole = (reference.logits(ids)[len(PROMPTS[0]) - 1 : -1] / cut.get("temperature", 1.0)).log_softmax(1)
        for place, mask in enumerate(found.sampling_mask):
            mass = float(whole[place][mask].logsumexp(0))
            assert found.kept_mass[place] == pytest.approx(mass, abs=1e-4)
            one = found.logprobs[place]
            assert one.logprob + one.kept_mass == pytest.approx(float(whole[place, one.token_id]), abs=1e-4)


def test_nothing_is_listed_where_nothing_is_cut_off(make_engine):
    engine = make_engine()
    asked = [SamplingParams(max_tokens=3, ignore_eos=True, return_sampling_mask=True, **one) for one in UNCUT[:3]]
    for output in engine.generate(prompt_token_ids=[PROMPTS[0]] * 3, sampling_params=asked):
        assert output.outputs[0].kept_mass == [0.0] * 3 and output.outputs[0].sampling_mask is None
    plain = SamplingParams(max_tokens=3, logprobs=1, top_p=0.9)
    [output] = engine.generate(prompt_token_ids=[PROMPTS[0]], sampling_params=plain)
    assert output.outputs[0].kept_mass is None and output.outputs[0].sampling_mask is None


def test_an_engine_with_raw_logprobs_refuses_them_by_name(make_engine):
    engine = make_engine(logprobs_mode="raw")
    for name in ("return_kept_mass", "return_sampling_mask"):
        with pytest.raises(RequestError, match=f"{name}: .*logprobs_mode='processed'"):
            engine.generate(prompt_token_ids=[[1]], sampling_params={name: True})
    with pytest.raises(RequestError, match="return_kept_mass must be true or false"):
        SamplingParams(return_kept_mass=1)
    assert SamplingParams(return_kept_mass=True).logprobs == 0


def test_packed_entries_keep_mass_and_ids():
    entries = [
        TokenLogprob(5, -0.5, 1, {5: -0.5, 6: -1.0}, {7: -2.0}, -0.25, [5, 6, 9]),
        TokenLogprob(5, -0.5, 3, {}, {}, 0.0, None),
        TokenLogprob(5, -0.5, 3, {}, {1: -1.0, 2: -math.inf}, -1.5, []),
        TokenLogprob(5, -0.5, 2, {1: -0.1}, {}),
    ]
    packed = TokenLogprobs()
    packed.extend(entries)
    assert list(packed) == entries and pickle.loads(pickle.dumps(packed)) == entries

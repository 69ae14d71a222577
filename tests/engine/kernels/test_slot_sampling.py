"""Sampling from slots with the Triton kernels: the tokens and counts of the same step in torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.support.kernels import DEVICE, INTERPRETED  # isort: skip  (before what imports triton)

from engine.kernels import fused_sampling
from engine.kernels.slot_sampling_kernels import NUM_ROW_COLUMNS, UNIFORM, row_params_kernel
from engine.protocol.request import SamplingParams, mix64
from engine.sampling import ops
from engine.sampling.sampler import Sampler
from tests.support.sampling_cases import UNTOUCHED, assert_nearly_all_equal, random_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpretable,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # raised by Triton: ast, numpy scalars
]
ROWS = 22 if INTERPRETED else 400
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, min_p=0.05),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=1.5, presence_penalty=1.0, repetition_penalty=1.3, logit_bias={5: 30.0, 6: 30.0}),
    SamplingParams(temperature=3.0, min_tokens=500, max_tokens=None, stop_token_ids=list(range(90))),
    SamplingParams(temperature=0.0, frequency_penalty=0.7, logit_bias={i: float(i % 7) for i in range(97)}),
    SamplingParams(temperature=0.0, min_tokens=3, max_tokens=None, stop_token_ids=list(range(96))),
    SamplingParams(temperature=2.0, top_k=5, logit_bias={7: 9.0}),
]
GRAMMAR = {"structured_outputs": {"regex": "a"}}  # only the masks below matter here
CONSTRAINED = [
    SamplingParams(temperature=0.0, **GRAMMAR),
    SamplingParams(temperature=5.0, **GRAMMAR),
    SamplingParams(temperature=1.5, top_p=0.9, **GRAMMAR),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.5, top_k=5, presence_penalty=1.0, logit_bias={5: 30.0, 6: 30.0}, **GRAMMAR),
    SamplingParams(temperature=0.7),
    SamplingParams(min_tokens=500, max_tokens=None, stop_token_ids=list(range(60)), **GRAMMAR),
    SamplingParams(temperature=0.0, frequency_penalty=0.7, **GRAMMAR),
]


def sampler_with(params, rows, vocab_size, *, fused):
    sampler = Sampler(rows, vocab_size, DEVICE, eos_token_ids=(2,), fused=fused)
    for slot in range(rows):
        sampler.set_slot(slot, params[slot % len(params)], slot, [1, 2, 3], [4, 5])
    allow(sampler, params, 0)
    return sampler


def allow(sampler, params, seed):
    """Give every slot a random mask, which only those of constrained requests use; return the masks as bool."""
    shape = (sampler.max_num_seqs, sampler.masks.masks.shape[1] * 32)
    bits = np.random.default_rng(seed).random(shape) < 0.2
    bits[:, 64:67] = True  # some token beyond every ban
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    sampler.masks.write(list(range(shape[0])), masks)
    constrained = [params[slot % len(params)].structured_outputs is not None for slot in range(shape[0])]
    return torch.from_numpy(bits[:, : sampler.vocab_size] | ~np.array(constrained)[:, None])


def step(sampler, logits, slots, positions):
    """Run the step for rows of these slots (-1: padding); returns next_tokens and last_tokens."""
    next_tokens = torch.full((len(slots),), UNTOUCHED, device=DEVICE)
    last_tokens = torch.full((sampler.max_num_seqs + 1,), UNTOUCHED, device=DEVICE)
    variant = sampler.variant(slots)
    if variant is not None:
        entries, at = (torch.tensor(values, device=DEVICE) for values in ([slot + 1 for slot in slots], positions))
        sampler.slot_sampling()(logits[: len(slots)], entries, at, next_tokens, last_tokens, **variant)
    return next_tokens, last_tokens


@pytest.mark.parametrize(
    "params",
    [PARAMS, PARAMS[:3], PARAMS[3:6], PARAMS[6:10], CONSTRAINED],
    ids=["mixed", "untruncated", "truncated", "adjusted", "constrained"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_and_counts_equal_those_of_torch(params, dtype):
    vocab_size = 97
    logits = random_logits(ROWS, vocab_size, dtype)
    logits[1, 3], logits[4, 50], logits[7] = math.nan, math.inf, -math.inf
    before = logits.clone()
    slots = [-1 if row % 10 == 9 else (row * 7) % ROWS if ROWS % 7 else row for row in range(ROWS)]
    ours, theirs = (sampler_with(params, ROWS, vocab_size, fused=fused) for fused in (True, False))
    for position in range(5, 9):
        found, found_last = step(ours, logits, slots, [position] * ROWS)
        wanted, wanted_last = step(theirs, logits, slots, [position] * ROWS)
        assert_nearly_all_equal(found, wanted)
        assert_nearly_all_equal(found_last, wanted_last)
        if torch.equal(found, wanted):
            assert ours.counts.values.equal(theirs.counts.values)
    assert logits.nan_to_num().equal(before.nan_to_num())


@pytest.mark.parametrize("vocab_size", [97, 128, 5000])
def test_constrained_rows_sample_allowed_tokens_only_and_others_are_unchanged(vocab_size):
    logits = random_logits(ROWS, vocab_size, torch.float32)
    slots = list(range(ROWS))
    sampler = sampler_with(CONSTRAINED, ROWS, vocab_size, fused=True)
    free = [params.structured_outputs is None for params in CONSTRAINED]
    plain = sampler_with([one if is_free else SamplingParams(temperature=0.0) for one, is_free
                          in zip(CONSTRAINED, free, strict=True)], ROWS, vocab_size, fused=True)  # fmt: skip
    for position in range(5, 8):
        allowed = allow(sampler, CONSTRAINED, position)
        found, _ = step(sampler, logits, slots, [position] * ROWS)
        without, _ = step(plain, logits, slots, [position] * ROWS)
        for row, token in enumerate(found.tolist()):
            if free[row % len(free)]:
                assert token == without[row]
            else:
                assert token >= 0 and allowed[row, token]
            if CONSTRAINED[row % len(free)] == SamplingParams(temperature=0.0, **GRAMMAR):
                assert token == logits[row].cpu().masked_fill(~allowed[row], -math.inf).argmax()


def test_row_is_sampled_the_same_in_every_batch():
    rows, vocab_size = len(PARAMS), 5000
    logits = random_logits(rows, vocab_size, torch.float16)
    wanted, _ = step(sampler_with(PARAMS, rows, vocab_size, fused=True), logits, list(range(rows)), [5] * rows)
    for seed in range(3):
        slots = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: 2 + 4 * seed].tolist()
        sampler = sampler_with(PARAMS, rows, vocab_size, fused=True)  # a new one: penalties count earlier tokens
        assert step(sampler, logits[slots], slots, [5] * len(slots))[0].equal(wanted[slots])


def test_kernel_hashes_the_same_random_numbers_as_torch():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 12345]
    sampler = Sampler(len(seeds), 8, DEVICE, fused=True)
    for slot, seed in enumerate(seeds):
        sampler.set_slot(slot, SamplingParams(), seed, [])
    positions = torch.tensor([0, 1, 17, 2**40, 2**31, 131072], device=DEVICE)
    values, out = sampler.table.values, torch.zeros(len(seeds), NUM_ROW_COLUMNS, dtype=torch.float64, device=DEVICE)
    entries = torch.arange(1, len(seeds) + 1, device=DEVICE)
    row_params_kernel[(len(seeds),)](
        values, values.view(torch.float64), entries, positions, out, *ops.HASH_CONSTANTS, PROCESSORS=False
    )
    keys = torch.tensor([mix64(seed) for seed in seeds], device=DEVICE)
    assert out[:, UNIFORM].equal(ops.uniform(keys, positions))


@pytest.mark.parametrize("tile", [32, fused_sampling.TILE])
def test_first_of_equal_maxima_is_chosen(monkeypatch, tile):
    monkeypatch.setattr(fused_sampling, "TILE", tile)
    logits = torch.zeros(3, 99, device=DEVICE)
    logits[0, [40, 70, 98]] = 2.0
    logits[1, [96, 98]] = 1.0
    params = [SamplingParams(temperature=0.0, logit_bias={50: -1.0})]
    found, last = step(sampler_with(params, 3, 99, fused=True), logits, [0, 1, 2], [5, 5, 5])
    assert found.tolist() == last[1:].tolist() == [40, 96, 0]

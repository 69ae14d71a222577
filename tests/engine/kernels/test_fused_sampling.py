"""Fused sampling against weights_of and sample_full: tokens, batches, tiles, rows without a token, and the sampler."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.kernels import DEVICE, INTERPRETED  # isort: skip  (before what imports triton)

from engine.kernels import fused_sampling
from engine.kernels.fused_sampling import TILE, sample_rows
from engine.protocol.request import SamplingParams
from engine.sampling import ops as draw
from engine.sampling.sampler import Sampler
from tests.support.sampling_cases import (
    LEFT,
    assert_nearly_all_equal,
    assert_replays_follow,
    random_logits,
    scaled_logits,
    uniforms,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpretable,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # Triton's own, of Python's ast and numpy's scalars
]
INF, NAN = math.inf, math.nan
ROWS = 120 if INTERPRETED else 2000
VOCABULARIES = [1, 2, 17, 777, TILE, TILE + 1] + ([] if INTERPRETED else [50257, 151936])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def numbers_of(rows, seed=0, temperature=None, min_p=0.0, u=None):
    """float64 [rows, 3]: temperatures (of all sizes unless given), min_p, and random numbers unless given."""
    numbers = torch.empty(rows, 3, dtype=torch.float64)
    some = torch.tensor([1.0, 0.7, 0.25, 1.3, 100.0], dtype=torch.float64)
    numbers[:, 0] = some[torch.arange(rows) % len(some)] if temperature is None else temperature
    numbers[:, 1] = min_p
    numbers[:, 2] = uniforms(rows, seed) if u is None else u
    return numbers.to(DEVICE)


def drawn(logits, numbers, tile=TILE):
    token_ids = torch.full((len(logits),), LEFT, device=DEVICE)
    sample_rows(logits, *numbers.unbind(1), token_ids, tile)
    return token_ids


def expected(logits, numbers):
    z = scaled_logits(logits, numbers[:, 0])
    return draw.sample_full(draw.weights_of(z), numbers[:, 1], numbers[:, 2]).token_ids


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_are_those_of_draw_whole(vocab_size, dtype):
    rows = min(ROWS, 2**26 // vocab_size)
    logits, numbers = random_logits(rows, vocab_size, dtype), numbers_of(rows)
    assert_nearly_all_equal(drawn(logits, numbers), expected(logits, numbers))


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 2 / 3, 1 - 2.0**-53])
@pytest.mark.parametrize("tile", [16, TILE])
def test_shares_that_exp_gives_exactly_are_drawn_exactly(u, tile):
    rows, vocab_size = 24, 99
    allowed = torch.rand(rows, vocab_size, generator=torch.Generator().manual_seed(1)) < 0.2
    allowed[:, 50] = True
    allowed[:, [0, -1]] = False
    logits = torch.where(allowed, 2.5, -INF).to(DEVICE)
    numbers = numbers_of(rows, u=u)
    found = drawn(logits, numbers, tile)
    assert found.equal(expected(logits, numbers))
    ids = [row.nonzero().squeeze(1) for row in allowed]
    assert found.tolist() == [row[int(u * len(row))].item() for row in ids]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_do_not_depend_on_the_tiles(dtype):
    rows = 20 if INTERPRETED else 500
    logits, numbers = random_logits(rows, 1000, dtype), numbers_of(rows, min_p=0.001)
    whole = drawn(logits, numbers, 1024)
    assert len(set(whole.tolist())) > 10
    assert all(drawn(logits, numbers, tile).equal(whole) for tile in (64, 128, 512))


def test_row_is_drawn_the_same_in_every_batch_and_place():
    rows, vocab_size = 12, 5000
    logits, numbers = random_logits(rows, vocab_size, torch.float16), numbers_of(rows)
    logits[3, 7] = NAN
    whole = drawn(logits, numbers)
    for row in range(rows):
        assert drawn(logits[row : row + 1], numbers[row : row + 1]).equal(whole[row : row + 1])
    for seed in range(4):
        some = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: 2 + 3 * seed].to(DEVICE)
        assert drawn(logits[some], numbers[some]).equal(whole[some])


def test_strides_of_logits_and_numbers_change_nothing():
    rows, vocab_size = 6, 777
    logits, numbers = random_logits(rows, vocab_size), numbers_of(rows)
    wanted = drawn(logits, numbers)
    wide = torch.full((2 * rows, vocab_size + 5), 50.0, device=DEVICE)
    wide[::2, :vocab_size] = logits
    before = wide.clone()
    assert drawn(wide[::2, :vocab_size], numbers).equal(wanted)
    assert drawn(logits.t().contiguous().t(), numbers).equal(wanted)
    assert drawn(logits, torch.cat([numbers, numbers], 1)[:, :3]).equal(wanted)
    assert drawn(logits.double(), numbers).equal(wanted)
    assert wide.equal(before)


@pytest.mark.parametrize("min_p", [1e-9, 0.02, 0.3, 1.0])
def test_min_p_keeps_what_draw_whole_keeps(min_p):
    rows, vocab_size = ROWS, 500
    logits = random_logits(rows, vocab_size, torch.bfloat16)
    numbers = numbers_of(rows, min_p=min_p)
    numbers[::3, 1] = 0
    found = drawn(logits, numbers)
    assert_nearly_all_equal(found, expected(logits, numbers))
    x = logits.double()
    shares = ((x.gather(1, found.unsqueeze(1)).squeeze(1) - x.amax(1)) / numbers[:, 0]).exp()
    assert (shares >= numbers[:, 1] * (1 - 1e-5)).all()
    if min_p == 1.0:
        assert (shares == 1).sum() >= rows * 2 // 3


@pytest.mark.filterwarnings("default:overflow encountered:RuntimeWarning")  # numpy's, under the interpreter
def test_temperatures_from_one_end_to_the_other():
    rows, vocab_size = 40, 2000
    logits = random_logits(rows, vocab_size)
    coldest = numbers_of(rows, temperature=1e-5)
    assert drawn(logits, coldest).equal(logits.argmax(1))
    assert drawn(logits * 1e37, coldest).equal(logits.argmax(1))  # z overflows to -inf
    hottest = numbers_of(rows, temperature=100.0)
    assert_nearly_all_equal(drawn(logits, hottest), expected(logits, hottest))
    assert len(set(drawn(logits, hottest).tolist())) > rows * 0.9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 40, 99])
def test_row_without_a_distribution_gives_no_token_and_harms_no_other(dtype, place):
    good = random_logits(7, 100, dtype)
    bad = good.clone()
    bad[1, place], bad[3, place], bad[5] = NAN, INF, -INF
    bad[6, [place, (place + 50) % 100]] = torch.tensor([NAN, INF], device=DEVICE, dtype=dtype)
    numbers = numbers_of(7)
    wanted = drawn(good, numbers)
    wanted[[1, 3, 5, 6]] = -1
    assert drawn(bad, numbers, 16).equal(wanted)


def test_rows_of_temperature_zero_are_left_as_they_are():
    logits, numbers = random_logits(6, 100), numbers_of(6)
    whole = drawn(logits, numbers)
    numbers[[0, 2, 5], 0] = 0
    whole[[0, 2, 5]] = LEFT
    assert drawn(logits, numbers).equal(whole)


def test_frequencies_are_the_distribution():
    draws, vocab_size = (1500 if INTERPRETED else 60_000), 12
    logits = torch.linspace(-2, 2, vocab_size)[torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))]
    numbers = numbers_of(draws, seed=3, temperature=0.8)
    found = drawn(logits.to(DEVICE).expand(draws, vocab_size), numbers, 16)
    counts = torch.bincount(found, minlength=vocab_size).cpu().double()
    wanted = (logits.double() / 0.8).softmax(0) * draws
    degrees = vocab_size - 1
    assert ((counts - wanted) ** 2 / wanted).sum() < degrees + 5 * math.sqrt(2 * degrees)


def test_numbers_of_different_strides_are_refused():
    numbers = numbers_of(2)
    with pytest.raises(ValueError, match="columns of one matrix"):
        sample_rows(
            random_logits(2, 5),
            numbers[:, 0],
            numbers[:, 1].contiguous(),
            numbers[:, 2],
            torch.zeros(2, dtype=torch.int64, device=DEVICE),
        )


@pytest.mark.skipif(INTERPRETED, reason="captures a CUDA graph")
def test_captured_draw_follows_logits_and_numbers_changed_between_replays():
    assert_replays_follow(sample_rows, drawn, random_logits(16, 151936, torch.bfloat16), numbers_of)


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.6, min_p=0.05),
    SamplingParams(temperature=0.0),
    SamplingParams(logprobs=2),
    SamplingParams(top_p=0.9),
    SamplingParams(temperature=1.5, presence_penalty=1.0, repetition_penalty=1.3, logit_bias={5: 30.0, 6: 30.0}),
    SamplingParams(temperature=3.0, min_tokens=500, max_tokens=None, stop_token_ids=list(range(90))),
    SamplingParams(min_p=0.9),
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    SamplingParams(temperature=2.0, top_k=5, logit_bias={7: 9.0}),
    SamplingParams(temperature=5.0, top_p=0.8, min_p=0.1, logprobs=1),
]


def sampler_with(params, rows, vocab_size, *, fused):
    """A sampler whose rows without logprobs are drawn by the kernels, or by torch."""
    state = Sampler(rows, vocab_size, DEVICE, eos_token_ids=(2,))
    state._selector._kernels = fused_sampling if fused else None
    for slot in range(rows):
        state.set_slot(slot, params[slot % len(params)], slot, [1, 2, 3], [4, 5])
    return state


@pytest.mark.parametrize(
    "params",
    [PARAMS, PARAMS[:2], PARAMS[5:6], PARAMS[8:10], [PARAMS[0], PARAMS[8]]],
    ids=["mixed", "whole", "adjusted", "truncated", "whole and truncated"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sampler_chooses_the_same_with_and_without_the_kernels(params, dtype):
    rows, vocab_size = (24 if INTERPRETED else 400), 97
    logits = random_logits(rows + 2, vocab_size, dtype)
    logits[1, 3] = NAN
    before = logits.clone()
    slots = [-1 if row % 11 == 10 else row for row in range(rows)]
    found, wanted = (sampler_with(params, rows, vocab_size, fused=fused) for fused in (True, False))
    found.warm_up(logits)
    for position in range(5, 9):
        ours = found.sample(logits, slots, [position] * rows)
        theirs = wanted.sample(logits, slots, [position] * rows)
        assert ours.token_ids[1] == -1 and ours.token_ids[10] == 0
        assert_nearly_all_equal(ours.token_ids, theirs.token_ids)
        assert ours.logprobs == theirs.logprobs
    assert logits.nan_to_num().equal(before.nan_to_num())


def test_row_of_the_sampler_is_drawn_the_same_in_every_batch():
    rows, vocab_size = 16, 777
    logits = random_logits(rows, vocab_size, torch.float16)
    state = sampler_with(PARAMS, rows, vocab_size, fused=True)
    whole = state.sample(logits, range(rows), [5] * rows).token_ids
    for seed in range(6):
        some = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: 1 + 3 * seed].tolist()
        assert state.sample(logits[some], some, [5] * len(some)).token_ids.equal(whole[some])


def test_slot_goes_from_the_kernels_to_torch_with_its_request():
    logits = random_logits(1, 50)
    state = sampler_with(PARAMS[:1], 1, 50, fused=True)
    state.set_slot(0, SamplingParams(temperature=0.0), 0, [])
    assert state.sample(logits, [0], [0]).token_ids.equal(logits.argmax(1))
    state.clear_slot(0)
    assert state.sample(logits, [0], [0]).token_ids.equal(logits.argmax(1))
    state.set_slot(0, SamplingParams(temperature=1e-5), 0, [])
    assert state.sample(-logits, [0], [0]).token_ids.equal(logits.argmin(1))

"""Fused sampling against sample_full: tokens, batches, tiles, rows without a token, and the whole sampler."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.kernels import DEVICE, INTERPRETED  # isort: skip  (before what imports triton)

from engine.kernels.fused_sampling import TILE, sample_rows
from engine.sampling import ops
from tests.support.sampling_cases import (
    UNTOUCHED,
    assert_nearly_all_equal,
    assert_replays_follow,
    random_logits,
    scaled_logits,
    uniforms,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpretable,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # raised by Triton: ast, numpy scalars
]
INF, NAN = math.inf, math.nan
ROWS = 120 if INTERPRETED else 2000
VOCABULARIES = [1, 2, 17, 777, TILE, TILE + 1] + ([] if INTERPRETED else [50257, 151936])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def params_of(rows, seed=0, temperature=None, min_p=0.0, u=None):
    """float64 [rows, 3]: temperature (varied by default), min_p, and u (random by default)."""
    row_params = torch.empty(rows, 3, dtype=torch.float64)
    some = torch.tensor([1.0, 0.7, 0.25, 1.3, 100.0], dtype=torch.float64)
    row_params[:, 0] = some[torch.arange(rows) % len(some)] if temperature is None else temperature
    row_params[:, 1] = min_p
    row_params[:, 2] = uniforms(rows, seed) if u is None else u
    return row_params.to(DEVICE)


def sample(logits, row_params, tile=TILE):
    token_ids = torch.full((len(logits),), UNTOUCHED, device=DEVICE)
    sample_rows(logits, *row_params.unbind(1), token_ids, tile)
    return token_ids


def expected(logits, row_params):
    z = scaled_logits(logits, row_params[:, 0])
    return ops.sample_full(ops.weights_of(z), row_params[:, 1], row_params[:, 2]).token_ids


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_equal_sample_full(vocab_size, dtype):
    rows = min(ROWS, 2**26 // vocab_size)
    logits, row_params = random_logits(rows, vocab_size, dtype), params_of(rows)
    assert_nearly_all_equal(sample(logits, row_params), expected(logits, row_params))


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 2 / 3, 1 - 2.0**-53])
@pytest.mark.parametrize("tile", [16, TILE])
def test_equal_logits_are_sampled_exactly(u, tile):
    rows, vocab_size = 24, 99
    allowed = torch.rand(rows, vocab_size, generator=torch.Generator().manual_seed(1)) < 0.2
    allowed[:, 50] = True
    allowed[:, [0, -1]] = False
    logits = torch.where(allowed, 2.5, -INF).to(DEVICE)
    row_params = params_of(rows, u=u)
    found = sample(logits, row_params, tile)
    assert found.equal(expected(logits, row_params))
    ids = [row.nonzero().squeeze(1) for row in allowed]
    assert found.tolist() == [row[int(u * len(row))].item() for row in ids]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_do_not_depend_on_the_tile_size(dtype):
    rows = 20 if INTERPRETED else 500
    logits, row_params = random_logits(rows, 1000, dtype), params_of(rows, min_p=0.001)
    wanted = sample(logits, row_params, 1024)
    assert len(set(wanted.tolist())) > 10
    assert all(sample(logits, row_params, tile).equal(wanted) for tile in (64, 128, 512))


def test_row_is_sampled_the_same_in_every_batch_and_position():
    rows, vocab_size = 12, 5000
    logits, row_params = random_logits(rows, vocab_size, torch.float16), params_of(rows)
    logits[3, 7] = NAN
    wanted = sample(logits, row_params)
    for row in range(rows):
        assert sample(logits[row : row + 1], row_params[row : row + 1]).equal(wanted[row : row + 1])
    for seed in range(4):
        rows_in_batch = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: 2 + 3 * seed].to(DEVICE)
        assert sample(logits[rows_in_batch], row_params[rows_in_batch]).equal(wanted[rows_in_batch])


def test_strides_of_logits_and_params_change_nothing():
    rows, vocab_size = 6, 777
    logits, row_params = random_logits(rows, vocab_size), params_of(rows)
    wanted = sample(logits, row_params)
    wide = torch.full((2 * rows, vocab_size + 5), 50.0, device=DEVICE)
    wide[::2, :vocab_size] = logits
    before = wide.clone()
    assert sample(wide[::2, :vocab_size], row_params).equal(wanted)
    assert sample(logits.t().contiguous().t(), row_params).equal(wanted)
    assert sample(logits, torch.cat([row_params, row_params], 1)[:, :3]).equal(wanted)
    assert sample(logits.double(), row_params).equal(wanted)
    assert wide.equal(before)


@pytest.mark.parametrize("min_p", [1e-9, 0.02, 0.3, 1.0])
def test_min_p_keeps_the_same_tokens_as_sample_full(min_p):
    rows, vocab_size = ROWS, 500
    logits = random_logits(rows, vocab_size, torch.bfloat16)
    row_params = params_of(rows, min_p=min_p)
    row_params[::3, 1] = 0
    found = sample(logits, row_params)
    assert_nearly_all_equal(found, expected(logits, row_params))
    x = logits.double()
    relative = ((x.gather(1, found.unsqueeze(1)).squeeze(1) - x.amax(1)) / row_params[:, 0]).exp()
    assert (relative >= row_params[:, 1] * (1 - 1e-5)).all()
    if min_p == 1.0:
        assert (relative == 1).sum() >= rows * 2 // 3


@pytest.mark.filterwarnings("default:overflow encountered:RuntimeWarning")  # from numpy, under the interpreter
def test_extreme_temperatures():
    rows, vocab_size = 40, 2000
    logits = random_logits(rows, vocab_size)
    coldest = params_of(rows, temperature=1e-5)
    assert sample(logits, coldest).equal(logits.argmax(1))
    assert sample(logits * 1e37, coldest).equal(logits.argmax(1))  # z overflows to -inf
    hottest = params_of(rows, temperature=100.0)
    assert_nearly_all_equal(sample(logits, hottest), expected(logits, hottest))
    assert len(set(sample(logits, hottest).tolist())) > rows * 0.9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 40, 99])
def test_non_finite_row_gives_no_token_and_leaves_other_rows_unchanged(dtype, place):
    good = random_logits(7, 100, dtype)
    bad = good.clone()
    bad[1, place], bad[3, place], bad[5] = NAN, INF, -INF
    bad[6, [place, (place + 50) % 100]] = torch.tensor([NAN, INF], device=DEVICE, dtype=dtype)
    row_params = params_of(7)
    wanted = sample(good, row_params)
    wanted[[1, 3, 5, 6]] = -1
    assert sample(bad, row_params, 16).equal(wanted)


def test_rows_of_temperature_zero_are_not_written():
    logits, row_params = random_logits(6, 100), params_of(6)
    wanted = sample(logits, row_params)
    row_params[[0, 2, 5], 0] = 0
    wanted[[0, 2, 5]] = UNTOUCHED
    assert sample(logits, row_params).equal(wanted)


def test_token_frequencies_follow_the_distribution():
    draws, vocab_size = (1500 if INTERPRETED else 60_000), 12
    logits = torch.linspace(-2, 2, vocab_size)[torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))]
    row_params = params_of(draws, seed=3, temperature=0.8)
    found = sample(logits.to(DEVICE).expand(draws, vocab_size), row_params, 16)
    counts = torch.bincount(found, minlength=vocab_size).cpu().double()
    wanted = (logits.double() / 0.8).softmax(0) * draws
    degrees = vocab_size - 1
    assert ((counts - wanted) ** 2 / wanted).sum() < degrees + 5 * math.sqrt(2 * degrees)


def test_params_with_different_strides_are_rejected():
    row_params = params_of(2)
    with pytest.raises(ValueError, match="columns of one matrix"):
        sample_rows(
            random_logits(2, 5),
            row_params[:, 0],
            row_params[:, 1].contiguous(),
            row_params[:, 2],
            torch.zeros(2, dtype=torch.int64, device=DEVICE),
        )


@pytest.mark.skipif(INTERPRETED, reason="captures a CUDA graph")
def test_captured_sampling_follows_logits_and_params_changed_between_replays():
    assert_replays_follow(sample_rows, sample, random_logits(16, 151936, torch.bfloat16), params_of)

"""Truncated sampling kernels against sample_truncated: tokens, ties, distributions, and rows without a token."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.kernels import DEVICE, INTERPRETED  # isort: skip  (before what imports triton)

from engine.kernels import fused_sampling
from engine.kernels.fused_sampling import CANDIDATES, TILE, sample_truncated_rows
from engine.kernels.top_k_top_p_kernels import search_kernel
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
ROWS = 18 if INTERPRETED else 2000  # the interpreter takes 0.1 s per row
VOCABULARIES = [1, 17, 777, TILE + 1] + ([] if INTERPRETED else [2, 50257, 151936])
DTYPES = [torch.float32, torch.bfloat16] + ([] if INTERPRETED else [torch.float16])
MAX_UNIFORM = 1 - 2.0**-53  # the largest random number
RECIPES = [  # top_k, top_p, min_p
    (20, 0.95, 0.0),
    (0, 0.9, 0.0),
    (50, 1.0, 0.0),
    (0, 0.9999, 0.0),
    (300, 0.5, 0.01),
    (0, 0.99, 0.05),
    (3, 0.8, 0.2),
    (500, 0.9999, 0.0),
    (0, 0.3, 1e-9),
]


def params_of(rows, recipes=RECIPES, seed=0, temperature=None, u=None):
    """float64 [rows, 5]: temperature (varied by default), top_k, top_p, min_p, and u (random by default)."""
    row_params = torch.empty(rows, 5, dtype=torch.float64)
    some = torch.tensor([1.0, 0.7, 0.25, 2.0, 100.0], dtype=torch.float64)
    row_params[:, 0] = some[torch.arange(rows) % len(some)] if temperature is None else temperature
    row_params[:, 1:4] = torch.tensor(recipes, dtype=torch.float64)[torch.arange(rows) % len(recipes)]
    row_params[:, 4] = uniforms(rows, seed) if u is None else u
    return row_params.to(DEVICE)


def sample(logits, row_params, tile=TILE, candidates=CANDIDATES):
    token_ids = torch.full((len(logits),), UNTOUCHED, device=DEVICE)
    sample_truncated_rows(logits, *row_params.unbind(1), token_ids, tile, candidates)
    return token_ids


def expected(logits, row_params):
    z = scaled_logits(logits, row_params[:, 0])
    return ops.sample_truncated(z, ops.weights_of(z), *row_params.unbind(1)[1:], 0).token_ids


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_equal_sample_truncated(vocab_size, dtype):
    rows = min(ROWS, 2**26 // vocab_size)
    logits, row_params = random_logits(rows, vocab_size, dtype), params_of(rows)
    assert_nearly_all_equal(sample(logits, row_params), expected(logits, row_params))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_do_not_depend_on_the_tile_size_or_candidate_limit(dtype):
    rows, vocab_size = (len(RECIPES) if INTERPRETED else 500), 600
    logits, row_params = random_logits(rows, vocab_size, dtype), params_of(rows)
    wanted = sample(logits, row_params)
    assert_nearly_all_equal(wanted, expected(logits, row_params))
    for tile, candidates in ((64, 1), (256, 40), (1024, 300)):  # 1: nearly all rows are split into buckets
        assert sample(logits, row_params, tile, candidates).equal(wanted)


@pytest.mark.parametrize("top_k", [0, 1, 4, 40])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.5 + 2.0**-53, 1.0])
@pytest.mark.parametrize("candidates", [8, CANDIDATES])
def test_ties_at_the_truncation_boundary_are_broken_by_id(top_k, top_p, candidates):
    vocab_size, us = 70, torch.tensor([0.0, 2.0**-53, 0.4, MAX_UNIFORM], dtype=torch.float64)
    allowed = torch.rand(len(us), vocab_size, generator=torch.Generator().manual_seed(1)) < 0.4
    allowed[:, 50], allowed[:, 0] = True, False
    logits = torch.where(allowed, 2.5, -INF).to(DEVICE)
    row_params = params_of(len(us), [(top_k, top_p, 0.0)], u=us)
    found = sample(logits, row_params, 32, candidates)
    assert found.equal(expected(logits, row_params))
    for token, row, u in zip(found.tolist(), allowed, us.tolist(), strict=True):
        ids = row.nonzero().squeeze(1).tolist()[: top_k or vocab_size]
        ids = ids[: math.ceil(top_p * len(ids))]
        assert token == ids[int(u * len(ids))]


@pytest.mark.parametrize("candidates", [1, 100])
def test_ties_of_several_sizes_equal_sample_truncated(candidates):
    rows, vocab_size = (30 if INTERPRETED else 3000), 200
    logits = random_logits(rows, vocab_size).mul(0.5).round().to(torch.bfloat16)  # about ten distinct values
    recipes = [(k, p, m) for k in (0, 2, 15, 90) for p in (0.2, 0.7, 0.97, 1.0) for m in (0.0, 0.1) if k or p < 1]
    row_params = params_of(rows, recipes)
    assert_nearly_all_equal(sample(logits, row_params, 64, candidates), expected(logits, row_params))


@pytest.mark.parametrize("recipe", [(1, 1.0, 0.0), (0, 1e-9, 0.0), (0, 0.9, 1.0), (7, 1e-300, 0.5)], ids=str)
def test_narrowest_truncation_is_greedy(recipe):
    rows, vocab_size = 6, 1000
    logits = torch.stack([torch.randperm(vocab_size) for _ in range(rows)]).to(DEVICE, torch.float32)
    assert sample(logits, params_of(rows, [recipe], temperature=1.0)).equal(logits.argmax(1))


@pytest.mark.parametrize("recipe", [(2, 1.0, 0.0), (0, MAX_UNIFORM, 0.0), (9, MAX_UNIFORM, 2.0**-40)], ids=str)
@pytest.mark.parametrize("candidates", [1, CANDIDATES])
def test_token_of_weight_one_can_be_sampled(recipe, candidates):
    logits = torch.full((2, 100), -28.0, device=DEVICE)  # weight 0
    logits[:, 7], logits[0, 60] = 0.0, -27.7  # weights 2**40 and 1
    row_params = params_of(2, [recipe], temperature=1.0, u=MAX_UNIFORM)
    assert sample(logits, row_params, 32, candidates).tolist() == expected(logits, row_params).tolist() == [60, 7]


@pytest.mark.parametrize("top_k", [99, 100, 101, 5000])
def test_top_k_of_about_the_vocabulary_or_more(top_k):
    rows, vocab_size = 8, 100
    logits, row_params = random_logits(rows, vocab_size), params_of(rows, [(top_k, 0.98, 0.0), (top_k, 1.0, 0.0)])
    wanted = row_params.clone()
    wanted[:, 1] = 0 if top_k >= vocab_size else top_k
    for candidates in (20, CANDIDATES):
        assert sample(logits, row_params, 64, candidates).equal(expected(logits, wanted))


@pytest.mark.parametrize("recipe", [(0, 0.9999, 0.0), (CANDIDATES + 500, 0.9, 0.0), (5, 1.0, 0.0)], ids=str)
def test_flat_rows_are_sampled_from_all_their_logits(recipe):
    rows, vocab_size = 3, 3 * TILE // 2
    logits = torch.zeros(rows, vocab_size, device=DEVICE)
    logits[1] = random_logits(1, vocab_size)[0] / 100
    row_params = params_of(rows, [recipe], temperature=1.0)
    found = sample(logits, row_params)
    assert found.equal(expected(logits, row_params))
    kept = min(recipe[0] or vocab_size, vocab_size)
    assert found[0] == int(row_params[0, 4] * math.ceil(recipe[1] * kept))


# Distributions by name: what random_logits gives for some rows, changed.
DISTRIBUTIONS = {
    "equal": lambda x: x * 0,
    "narrow": lambda x: x / 30,
    "normal": lambda x: x / 3,
    "wide": lambda x: x,
    "two_levels": lambda x: (x > 1).float(),
    "far_levels": lambda x: (x > 2).float() * 9,
    "ties": lambda x: (x / 3).half().float(),
    "few_values": lambda x: (x * 0.5).round(),
    "one_hot": lambda x: x + torch.nn.functional.one_hot(x.argmax(1), x.shape[1]) * 40,
    "stripes": lambda x: torch.where(torch.arange(x.shape[1], device=x.device) % 50 == 7, x + 15, x),
    "sorted": lambda x: x.sort(dim=1, descending=True).values,
    "mostly_weightless": lambda x: torch.where(x > 3, x, x - 60),
    "mostly_masked": lambda x: torch.where(x > 5, x, -INF),
    "half_masked": lambda x: torch.where(x > 0, 0.0, -INF),
}
WIDE_RECIPES = [
    (0, 1e-9, 0.0), (0, 0.5, 0.0), (0, 0.9, 0.0), (0, 0.95, 0.05), (0, 0.9999, 1e-6), (0, MAX_UNIFORM, 0.0),
    (1, 0.9, 0.0), (50, 0.9, 0.0), (600, 1.0, 0.0), (900, 0.9, 0.0), (900, 0.97, 0.3), (2999, 0.5, 0.0),
]  # fmt: skip


class PoisonedSearch:
    """The kernel that searches gathered tokens, launched after all logits became NaN: it must not need them."""

    def __getitem__(self, grid):
        def launch(logits, *args, **options):
            logits.fill_(NAN)
            search_kernel[grid](logits, *args, **options)

        return launch


@pytest.fixture
def without_logits(monkeypatch):
    """Return `sample`, of a copy of the logits, whose last kernel can't read them."""
    monkeypatch.setattr(fused_sampling, "search_kernel", PoisonedSearch())
    return lambda logits, *args: sample(logits.clone(), *args)


@pytest.mark.parametrize("rows", [8, 9])  # other numbers of buckets
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
@pytest.mark.parametrize("candidates", [1] if INTERPRETED else [1, 100])
def test_any_distribution_is_sampled_from_few_buckets(without_logits, kind, rows, candidates):
    repeats = 1 if INTERPRETED else 12
    logits = DISTRIBUTIONS[kind](random_logits(rows * repeats, 3000))
    us = uniforms(len(logits), 5)
    us[0], us[-1] = 0.0, MAX_UNIFORM
    recipes = WIDE_RECIPES[rows % 2 :: 2] if INTERPRETED else WIDE_RECIPES
    row_params = params_of(len(logits), recipes, temperature=1.0, u=us)
    found = torch.cat(
        [
            without_logits(logits[i : i + rows], row_params[i : i + rows], TILE, candidates)
            for i in range(0, len(logits), rows)
        ]
    )
    assert_nearly_all_equal(found, expected(logits, row_params))


@pytest.mark.parametrize("rows", [1] if INTERPRETED else [1, 9, 40])
@pytest.mark.parametrize("vocab_size", [32_003] if INTERPRETED else [32_000, 151_936, 262_144, 2**20 + 1])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_large_vocabularies_are_sampled_from_few_buckets(without_logits, rows, vocab_size, temperature):
    kinds = ["equal", "ties"] if INTERPRETED else list(DISTRIBUTIONS)
    recipes = [(0, 0.9, 0.0), (3000, 0.95, 0.0), (0, 0.999, 1e-4), (50, 0.9, 0.0)]
    for seed, kind in enumerate(kinds):
        logits = DISTRIBUTIONS[kind](random_logits(rows, vocab_size, seed=seed))
        recipes = recipes[1:] + recipes[:1]
        row_params = params_of(rows, recipes, seed=seed, temperature=temperature)
        assert_nearly_all_equal(without_logits(logits, row_params), expected(logits, row_params))


@pytest.mark.parametrize("kind", ["equal", "wide", "ties"])
@pytest.mark.parametrize("sorted_tokens", [32, 1024])
def test_rows_whose_windows_do_not_fit_are_searched_in_their_logits(monkeypatch, kind, sorted_tokens):
    monkeypatch.setattr(fused_sampling, "SPLITS", ((2**31, fused_sampling.Split(16, 1024, 0)),))
    monkeypatch.setattr(fused_sampling, "SORTED", sorted_tokens)
    logits = DISTRIBUTIONS[kind](random_logits(len(WIDE_RECIPES), 3000))
    row_params = params_of(len(logits), WIDE_RECIPES, temperature=1.0)
    assert_nearly_all_equal(sample(logits, row_params, TILE, 1), expected(logits, row_params))


@pytest.mark.filterwarnings("default:overflow encountered:RuntimeWarning")  # from numpy, under the interpreter
def test_extreme_temperatures():
    rows, vocab_size = 9, 1500
    logits = random_logits(rows, vocab_size)
    coldest, hottest = (params_of(rows, temperature=temperature) for temperature in (1e-5, 100.0))
    assert sample(logits, coldest).equal(logits.argmax(1))
    assert sample(logits * 1e37, coldest).equal(logits.argmax(1))  # z overflows to -inf
    assert_nearly_all_equal(sample(logits, hottest), expected(logits, hottest))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("candidates", [4, CANDIDATES])
def test_non_finite_row_gives_no_token_and_leaves_other_rows_unchanged(dtype, candidates):
    good = random_logits(8, 100, dtype)
    bad = good.clone()
    bad[1, 0], bad[3, 99], bad[5] = NAN, INF, -INF
    bad[6, [40, 90]] = torch.tensor([NAN, INF], device=DEVICE, dtype=dtype)
    row_params = params_of(8)
    wanted = sample(good, row_params)
    wanted[[1, 3, 5, 6]] = -1
    assert sample(bad, row_params, 32, candidates).equal(wanted)


def test_rows_of_temperature_zero_are_not_written():
    logits, row_params = random_logits(6, 100), params_of(6)
    wanted = sample(logits, row_params, 64, 10)
    row_params[[0, 2, 5], 0] = 0
    wanted[[0, 2, 5]] = UNTOUCHED
    assert sample(logits, row_params, 64, 10).equal(wanted)


def test_row_is_sampled_the_same_in_every_batch_and_position():
    rows, vocab_size = 9, 700
    logits, row_params = random_logits(rows, vocab_size, torch.float16), params_of(rows)
    logits[3, 7] = NAN
    wanted = sample(logits, row_params, 128, 100)
    for seed in range(4):
        rows_in_batch = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: 1 + 2 * seed].to(DEVICE)
        assert sample(logits[rows_in_batch], row_params[rows_in_batch], 128, 100).equal(wanted[rows_in_batch])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs programs one after the other")
def test_program_order_changes_nothing():
    rows, vocab_size = 256, 151936
    logits, row_params = random_logits(rows, vocab_size, torch.bfloat16), params_of(rows)
    wanted = sample(logits, row_params)
    for tile in (256, 1024, TILE, TILE, TILE):
        assert sample(logits, row_params, tile).equal(wanted)


def test_strides_of_logits_and_params_change_nothing():
    rows, vocab_size = 9, 333
    logits, row_params = random_logits(rows, vocab_size), params_of(rows)
    wanted = sample(logits, row_params, 64, 50)
    wide = torch.full((2 * rows, vocab_size + 5), 50.0, device=DEVICE)
    wide[::2, :vocab_size] = logits
    before = wide.clone()
    assert sample(wide[::2, :vocab_size], row_params, 64, 50).equal(wanted)
    assert sample(logits.t().contiguous().t(), row_params, 64, 50).equal(wanted)
    assert sample(logits, torch.cat([row_params, row_params], 1)[:, :5], 64, 50).equal(wanted)
    assert wide.equal(before)


def test_params_with_different_strides_are_rejected():
    columns = list(params_of(2).unbind(1))
    columns[2] = columns[2].contiguous()
    with pytest.raises(ValueError, match="top_k.*columns of one matrix"):
        sample_truncated_rows(random_logits(2, 5), *columns, torch.zeros(2, dtype=torch.int64, device=DEVICE))


def test_token_frequencies_follow_the_truncated_distribution():
    draws, vocab_size, kept = (150 if INTERPRETED else 60_000), 12, 7
    logits = torch.linspace(-2, 2, vocab_size)[torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))]
    row_params = params_of(draws, [(kept, 1.0, 0.0)], seed=3, temperature=0.8)
    found = sample(logits.to(DEVICE).expand(draws, vocab_size), row_params, 32)
    counts = torch.bincount(found, minlength=vocab_size).cpu().double()
    best = logits.topk(kept).indices
    assert counts[best].sum() == draws
    wanted = (logits[best].double() / 0.8).softmax(0) * draws
    assert ((counts[best] - wanted) ** 2 / wanted).sum() < kept - 1 + 5 * math.sqrt(2 * (kept - 1))


@pytest.mark.skipif(INTERPRETED, reason="captures a CUDA graph")
def test_captured_sampling_follows_logits_and_params_changed_between_replays():
    assert_replays_follow(sample_truncated_rows, sample, random_logits(18, 151936, torch.bfloat16), params_of)

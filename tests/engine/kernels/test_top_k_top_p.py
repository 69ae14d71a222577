"""The kernels' truncated draw against sample_truncated: tokens, ties, every way to them, and rows that have none."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.kernels import DEVICE, INTERPRETED  # isort: skip  (before what imports triton)

from engine.kernels import fused_sampling
from engine.kernels.fused_sampling import CANDIDATES, TILE, sample_truncated_rows
from engine.sampling import ops as draw
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
ROWS = 18 if INTERPRETED else 2000  # a row takes the interpreter a tenth of a second
VOCABULARIES = [1, 17, 777, TILE + 1] + ([] if INTERPRETED else [2, 50257, 151936])
DTYPES = [torch.float32, torch.bfloat16] + ([] if INTERPRETED else [torch.float16])
LAST = 1 - 2.0**-53  # the greatest random number
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


def numbers_of(rows, recipes=RECIPES, seed=0, temperature=None, u=None):
    """float64 [rows, 5]: temperatures (of all sizes unless given), top_k, top_p, min_p, random numbers unless given."""
    numbers = torch.empty(rows, 5, dtype=torch.float64)
    some = torch.tensor([1.0, 0.7, 0.25, 2.0, 100.0], dtype=torch.float64)
    numbers[:, 0] = some[torch.arange(rows) % len(some)] if temperature is None else temperature
    numbers[:, 1:4] = torch.tensor(recipes, dtype=torch.float64)[torch.arange(rows) % len(recipes)]
    numbers[:, 4] = uniforms(rows, seed) if u is None else u
    return numbers.to(DEVICE)


def drawn(logits, numbers, tile=TILE, candidates=CANDIDATES):
    token_ids = torch.full((len(logits),), LEFT, device=DEVICE)
    sample_truncated_rows(logits, *numbers.unbind(1), token_ids, tile, candidates)
    return token_ids


def expected(logits, numbers):
    z = scaled_logits(logits, numbers[:, 0])
    return draw.sample_truncated(z, draw.weights_of(z), *numbers.unbind(1)[1:], 0).token_ids


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_are_those_of_draw_truncated(vocab_size, dtype):
    rows = min(ROWS, 2**26 // vocab_size)
    logits, numbers = random_logits(rows, vocab_size, dtype), numbers_of(rows)
    assert_nearly_all_equal(drawn(logits, numbers), expected(logits, numbers))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_depend_neither_on_the_tiles_nor_on_how_many_candidates_there_may_be(dtype):
    rows, vocab_size = (len(RECIPES) if INTERPRETED else 500), 600
    logits, numbers = random_logits(rows, vocab_size, dtype), numbers_of(rows)
    whole = drawn(logits, numbers)
    assert_nearly_all_equal(whole, expected(logits, numbers))
    for tile, candidates in ((64, 1), (256, 40), (1024, 300)):  # 1: nearly all rows go through all logits
        assert drawn(logits, numbers, tile, candidates).equal(whole)


@pytest.mark.parametrize("top_k", [0, 1, 4, 40])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.5 + 2.0**-53, 1.0])
@pytest.mark.parametrize("candidates", [8, CANDIDATES])
def test_limits_cut_through_ties_by_id(top_k, top_p, candidates):
    vocab_size, us = 70, torch.tensor([0.0, 2.0**-53, 0.4, LAST], dtype=torch.float64)
    allowed = torch.rand(len(us), vocab_size, generator=torch.Generator().manual_seed(1)) < 0.4
    allowed[:, 50], allowed[:, 0] = True, False
    logits = torch.where(allowed, 2.5, -INF).to(DEVICE)
    numbers = numbers_of(len(us), [(top_k, top_p, 0.0)], u=us)
    found = drawn(logits, numbers, 32, candidates)
    assert found.equal(expected(logits, numbers))
    for token, row, u in zip(found.tolist(), allowed, us.tolist(), strict=True):
        ids = row.nonzero().squeeze(1).tolist()[: top_k or vocab_size]
        ids = ids[: math.ceil(top_p * len(ids))]
        assert token == ids[int(u * len(ids))]


@pytest.mark.parametrize("candidates", [1, 100])
def test_ties_of_several_sizes_are_drawn_as_by_draw_truncated(candidates):
    rows, vocab_size = (30 if INTERPRETED else 3000), 200
    logits = random_logits(rows, vocab_size).mul(0.5).round().to(torch.bfloat16)  # some ten different ones
    recipes = [(k, p, m) for k in (0, 2, 15, 90) for p in (0.2, 0.7, 0.97, 1.0) for m in (0.0, 0.1) if k or p < 1]
    numbers = numbers_of(rows, recipes)
    assert_nearly_all_equal(drawn(logits, numbers, 64, candidates), expected(logits, numbers))


@pytest.mark.parametrize("recipe", [(1, 1.0, 0.0), (0, 1e-9, 0.0), (0, 0.9, 1.0), (7, 1e-300, 0.5)], ids=str)
def test_narrowest_truncation_is_greedy(recipe):
    rows, vocab_size = 6, 1000
    logits = torch.stack([torch.randperm(vocab_size) for _ in range(rows)]).to(DEVICE, torch.float32)
    assert drawn(logits, numbers_of(rows, [recipe], temperature=1.0)).equal(logits.argmax(1))


@pytest.mark.parametrize("recipe", [(2, 1.0, 0.0), (0, LAST, 0.0), (9, LAST, 2.0**-40)], ids=str)
@pytest.mark.parametrize("candidates", [1, CANDIDATES])
def test_least_likely_token_that_weighs_anything_can_be_drawn(recipe, candidates):
    logits = torch.full((2, 100), -28.0, device=DEVICE)  # a weight of 0
    logits[:, 7], logits[0, 60] = 0.0, -27.7  # 2**40 and 1
    numbers = numbers_of(2, [recipe], temperature=1.0, u=LAST)
    assert drawn(logits, numbers, 32, candidates).tolist() == expected(logits, numbers).tolist() == [60, 7]


@pytest.mark.parametrize("top_k", [99, 100, 101, 5000])
def test_top_k_of_about_the_vocabulary_or_more(top_k):
    rows, vocab_size = 8, 100
    logits, numbers = random_logits(rows, vocab_size), numbers_of(rows, [(top_k, 0.98, 0.0), (top_k, 1.0, 0.0)])
    wanted = numbers.clone()
    wanted[:, 1] = 0 if top_k >= vocab_size else top_k
    for candidates in (20, CANDIDATES):
        assert drawn(logits, numbers, 64, candidates).equal(expected(logits, wanted))


@pytest.mark.parametrize("recipe", [(0, 0.9999, 0.0), (CANDIDATES + 500, 0.9, 0.0), (5, 1.0, 0.0)], ids=str)
def test_flat_rows_are_drawn_from_all_their_logits(recipe):
    rows, vocab_size = 3, 3 * TILE // 2
    logits = torch.zeros(rows, vocab_size, device=DEVICE)
    logits[1] = random_logits(1, vocab_size)[0] / 100
    numbers = numbers_of(rows, [recipe], temperature=1.0)
    found = drawn(logits, numbers)
    assert found.equal(expected(logits, numbers))
    kept = min(recipe[0] or vocab_size, vocab_size)
    assert found[0] == int(numbers[0, 4] * math.ceil(recipe[1] * kept))


def test_only_rows_that_keep_more_than_the_candidates_go_through_all_their_logits(monkeypatch):
    monkeypatch.setattr(fused_sampling, "_PASSES", fused_sampling._PASSES[:1])
    few = [(20, 0.95, 0.0), (90, 1.0, 0.0), (0, 0.2, 0.0), (0, 0.99999, 0.3), (0, 0.9999, 0.01)]
    many = [(201, 0.1, 0.0), (0, 0.9, 0.0), (0, 0.9999, 1e-6)]
    logits = random_logits(len(few + many), 2000)
    logits[4, 50:] -= 1000  # 50 weigh anything
    numbers = numbers_of(len(logits), few + many, temperature=2.0)
    found = drawn(logits, numbers, TILE, 200)
    assert found[: len(few)].equal(expected(logits, numbers)[: len(few)])
    assert (found[len(few) :] == -2).all()


@pytest.mark.filterwarnings("default:overflow encountered:RuntimeWarning")  # numpy's, under the interpreter
def test_temperatures_from_one_end_to_the_other():
    rows, vocab_size = 9, 1500
    logits = random_logits(rows, vocab_size)
    coldest, hottest = (numbers_of(rows, temperature=temperature) for temperature in (1e-5, 100.0))
    assert drawn(logits, coldest).equal(logits.argmax(1))
    assert drawn(logits * 1e37, coldest).equal(logits.argmax(1))  # z overflows to -inf
    assert_nearly_all_equal(drawn(logits, hottest), expected(logits, hottest))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("candidates", [4, CANDIDATES])
def test_row_without_a_distribution_gives_no_token_and_harms_no_other(dtype, candidates):
    good = random_logits(8, 100, dtype)
    bad = good.clone()
    bad[1, 0], bad[3, 99], bad[5] = NAN, INF, -INF
    bad[6, [40, 90]] = torch.tensor([NAN, INF], device=DEVICE, dtype=dtype)
    numbers = numbers_of(8)
    wanted = drawn(good, numbers)
    wanted[[1, 3, 5, 6]] = -1
    assert drawn(bad, numbers, 32, candidates).equal(wanted)


def test_rows_of_temperature_zero_are_left_as_they_are():
    logits, numbers = random_logits(6, 100), numbers_of(6)
    whole = drawn(logits, numbers, 64, 10)
    numbers[[0, 2, 5], 0] = 0
    whole[[0, 2, 5]] = LEFT
    assert drawn(logits, numbers, 64, 10).equal(whole)


def test_row_is_drawn_the_same_in_every_batch_and_place():
    rows, vocab_size = 9, 700
    logits, numbers = random_logits(rows, vocab_size, torch.float16), numbers_of(rows)
    logits[3, 7] = NAN
    whole = drawn(logits, numbers, 128, 100)
    for seed in range(4):
        some = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: 1 + 2 * seed].to(DEVICE)
        assert drawn(logits[some], numbers[some], 128, 100).equal(whole[some])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs programs one after the other")
def test_order_in_which_programs_arrive_changes_nothing():
    rows, vocab_size = 256, 151936
    logits, numbers = random_logits(rows, vocab_size, torch.bfloat16), numbers_of(rows)
    whole = drawn(logits, numbers)
    for tile in (256, 1024, TILE, TILE, TILE):
        assert drawn(logits, numbers, tile).equal(whole)


def test_strides_of_logits_and_numbers_change_nothing():
    rows, vocab_size = 9, 333
    logits, numbers = random_logits(rows, vocab_size), numbers_of(rows)
    wanted = drawn(logits, numbers, 64, 50)
    wide = torch.full((2 * rows, vocab_size + 5), 50.0, device=DEVICE)
    wide[::2, :vocab_size] = logits
    before = wide.clone()
    assert drawn(wide[::2, :vocab_size], numbers, 64, 50).equal(wanted)
    assert drawn(logits.t().contiguous().t(), numbers, 64, 50).equal(wanted)
    assert drawn(logits, torch.cat([numbers, numbers], 1)[:, :5], 64, 50).equal(wanted)
    assert wide.equal(before)


def test_numbers_of_different_strides_are_refused():
    columns = list(numbers_of(2).unbind(1))
    columns[2] = columns[2].contiguous()
    with pytest.raises(ValueError, match="top_k.*columns of one matrix"):
        sample_truncated_rows(random_logits(2, 5), *columns, torch.zeros(2, dtype=torch.int64, device=DEVICE))


def test_frequencies_are_those_of_what_is_kept():
    draws, vocab_size, kept = (150 if INTERPRETED else 60_000), 12, 7
    logits = torch.linspace(-2, 2, vocab_size)[torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))]
    numbers = numbers_of(draws, [(kept, 1.0, 0.0)], seed=3, temperature=0.8)
    found = drawn(logits.to(DEVICE).expand(draws, vocab_size), numbers, 32)
    counts = torch.bincount(found, minlength=vocab_size).cpu().double()
    best = logits.topk(kept).indices
    assert counts[best].sum() == draws
    wanted = (logits[best].double() / 0.8).softmax(0) * draws
    assert ((counts[best] - wanted) ** 2 / wanted).sum() < kept - 1 + 5 * math.sqrt(2 * (kept - 1))


@pytest.mark.skipif(INTERPRETED, reason="captures a CUDA graph")
def test_captured_draw_follows_logits_and_numbers_changed_between_replays():
    assert_replays_follow(sample_truncated_rows, drawn, random_logits(18, 151936, torch.bfloat16), numbers_of)

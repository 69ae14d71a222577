"""Log-probabilities of slots by the Triton kernels, against those of torch on the same rows."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.kernels import DEVICE, INTERPRETED  # isort: skip  (before what imports triton)

from engine.kernels import fused_logprobs
from engine.kernels.logprob_layout import MAX_TOP
from engine.protocol.request import SamplingParams
from engine.sampling.logprobs import SCORE_COLUMNS
from engine.sampling.sampler import Sampler
from tests.support.sampling_cases import random_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpretable,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # raised by Triton: ast, numpy scalars
    pytest.mark.filterwarnings("default:overflow encountered:RuntimeWarning"),  # from numpy, under the interpreter
]
INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
GREEDY = {"temperature": 0.0}
PARAMS = [
    SamplingParams(**GREEDY, logprobs=5),
    SamplingParams(**GREEDY),
    SamplingParams(temperature=0.7, logprobs=0),
    SamplingParams(**GREEDY, logprobs=MAX_TOP, min_p=0.3),
    SamplingParams(temperature=1.3, logprobs=3, logprob_token_ids=[96, 0, 5, 5]),
    SamplingParams(),
    SamplingParams(logprobs=20, min_p=0.02, logprob_token_ids=list(range(97))),
    SamplingParams(**GREEDY, logprob_token_ids=[7]),
    SamplingParams(temperature=0.1, logprobs=1),
]


def sampler_with(params, rows, vocab_size, **options):
    sampler = Sampler(rows, vocab_size, DEVICE, eos_token_ids=(2,), fused=True, **options)
    for slot in range(rows):
        sampler.set_slot(slot, params[slot % len(params)], slot, [1, 2, 3], [4, 5])
    return sampler


def by_kernels(sampler, logits, slots, token_ids):
    """Return the entries of rows of these slots (-1: padding) that the kernels cover, by row."""
    read = sampler.slot_logprobs(slots)
    if read is None:
        return {}
    scores = torch.full((SCORE_COLUMNS * len(slots),), -7, device=DEVICE)
    entries = torch.tensor([slot + 1 for slot in slots], device=DEVICE)
    sampler.slot_scoring()(logits, entries, token_ids, scores)
    rows, pending = read(scores, len(slots))
    return dict(zip(rows, pending.read(), strict=True))


def by_torch(sampler, logits, slots, token_ids, **options):
    complete = sampler.logprobs_of(logits, slots, **options)
    pending = [] if complete is None else complete(token_ids)
    return {row: entry for rows, part in pending for row, entry in zip(rows, part.read(), strict=True)}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for row, entry in found.items():
        other = wanted[row]
        if other is None:
            assert entry is None
            continue
        assert (entry.token_id, entry.rank) == (other.token_id, other.rank)
        assert (list(entry.top), list(entry.named)) == (list(other.top), list(other.named))
        values = ([one.logprob, *one.top.values(), *one.named.values()] for one in (entry, other))
        assert next(values) == pytest.approx(next(values), abs=2e-6)
        assert {type(number) for number in (entry.token_id, entry.rank, *entry.top, *entry.named)} == {int}


def check(logits, params=PARAMS, seed=0, **options):
    """Compare random tokens of all rows, each in a slot of its own, except for padding."""
    rows, vocab_size = logits.shape
    sampler = sampler_with(params, rows, vocab_size, **options)
    slots = [-1 if row % 11 == 10 else (row * 7) % rows if rows % 7 else row for row in range(rows)]
    tokens = torch.randint(vocab_size, (rows,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    finite = torch.isfinite(logits.amax(1).float())
    tokens = torch.where(finite, tokens, -1)
    found = by_kernels(sampler, logits, slots, tokens)
    assert_same(found, by_torch(sampler, logits, slots, tokens))
    assert not by_torch(sampler, logits, slots, tokens, beside_kernels=True)
    return found


@pytest.mark.parametrize("tile", [32, 64, fused_logprobs.TILE])
@pytest.mark.parametrize("mode", ["processed", "raw"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logprobs_equal_those_of_torch(monkeypatch, tile, mode, dtype):
    monkeypatch.setattr(fused_logprobs, "TILE", tile)
    logits = random_logits(20, 97, dtype)
    before = logits.clone()
    found = check(logits, logprobs_mode=mode)
    assert len(found) > 10 and max(entry.rank for entry in found.values()) > 1
    assert logits.equal(before)


@pytest.mark.parametrize("vocab_size", [1, 2, 17, 4096, 4097] + ([] if INTERPRETED else [32000, 128256, 151936]))
def test_any_vocabulary(vocab_size):
    ids = [0, vocab_size // 2, vocab_size - 1]
    params = [
        SamplingParams(**GREEDY, logprobs=20, logprob_token_ids=ids),
        SamplingParams(logprobs=3, temperature=2.0, logprob_token_ids=ids[:1]),
        SamplingParams(logprobs=0),
    ]
    check(random_logits(6 if INTERPRETED else 100, vocab_size, torch.float16), params)


@pytest.mark.parametrize("tile", [32, fused_logprobs.TILE])
@pytest.mark.parametrize("steps", [1, 4, 0.25])
def test_equal_logits_rank_by_id(monkeypatch, tile, steps):
    monkeypatch.setattr(fused_logprobs, "TILE", tile)
    logits = (random_logits(20, 97) * steps).round() / steps
    logits[0], logits[1, ::2], logits[2, 40:] = 0.0, -0.0, logits[2].max()
    for mode in ("processed", "raw"):
        check(logits, logprobs_mode=mode)


@pytest.mark.parametrize("tile", [32, fused_logprobs.TILE])
def test_alternatives_of_probability_zero_are_left_out(monkeypatch, tile):
    monkeypatch.setattr(fused_logprobs, "TILE", tile)
    logits = random_logits(20, 97)
    kept = torch.rand(20, 97, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.1
    kept[:, 50] = True
    logits[~kept] = -INF
    logits[3, :96], logits[5, 1:], logits[5, 0] = -INF, -INF, 1.0
    kept = logits > -INF
    for mode in ("processed", "raw"):
        found = check(logits, logprobs_mode=mode)
        assert all(len(entry.top) <= kept[row].sum() for row, entry in found.items())
    peaked = random_logits(20, 97)
    peaked[:, 3] = 60.0  # weights of 0, which are alternatives nevertheless
    check(peaked)


@pytest.mark.parametrize("mode", ["processed", "raw"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_rows_that_are_not_finite_have_none(mode, bad):
    logits = random_logits(20, 97)
    logits[0], logits[4, 96], logits[6, 0] = (bad if bad == -INF else logits[0]), bad, bad
    found = check(logits, logprobs_mode=mode)
    assert [row for row, entry in found.items() if entry is None] == ([0] if bad == -INF else [4, 6])


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_row_is_scored_the_same_in_every_batch(mode):
    rows, vocab_size = 12, 5000
    logits = random_logits(rows, vocab_size, torch.float16)
    tokens = torch.arange(rows, device=DEVICE) * 100
    sampler = sampler_with(PARAMS, rows, vocab_size, logprobs_mode=mode)
    wanted = by_kernels(sampler, logits, list(range(rows)), tokens)
    for seed in range(3):
        slots = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: 1 + 5 * seed].tolist()
        found = by_kernels(sampler, logits[slots], slots, tokens[slots])
        assert found == {row: wanted[slot] for row, slot in enumerate(slots) if slot in wanted}


TRUNCATED = [
    SamplingParams(logprobs=5, top_p=0.8, logprob_token_ids=[3, 50, 96]),
    SamplingParams(logprobs=20, top_k=7),
    SamplingParams(logprobs=20, top_k=40, top_p=0.9, temperature=2.0),
    SamplingParams(logprobs=3, top_p=0.95, min_p=0.05, logprob_token_ids=list(range(97))),
    SamplingParams(logprobs=20, top_p=1 - 2.0**-53, logprob_token_ids=list(range(97))),
    SamplingParams(logprobs=10, top_k=3, min_p=0.9),
    SamplingParams(logprobs=0, top_p=1e-9),
    SamplingParams(logprobs=20, top_k=15, top_p=0.5),
]


@pytest.mark.parametrize("kind", ["normal", "equal", "ties", "weightless", "masked"])
def test_logprobs_after_top_k_and_top_p_equal_those_of_torch(kind):
    rows, vocab_size = len(TRUNCATED), 97
    logits = random_logits(rows, vocab_size)
    if kind == "equal":
        logits *= 0
    elif kind == "ties":
        logits = (logits / 2).round()
    else:
        logits[:, 5:] -= {"normal": 0, "weightless": 60, "masked": INF}[kind]
    sampler, slots = sampler_with(TRUNCATED, rows, vocab_size), list(range(rows))
    tokens = sampled(sampler, logits, slots)
    found = by_kernels(sampler, logits, slots, tokens)
    assert list(found) == slots
    assert_same(found, by_torch(sampler, logits, slots, tokens))


def sampled(sampler, logits, slots):
    """Sample rows of these slots, as a step does before it scores them."""
    tokens = torch.arange(len(slots), device=DEVICE)
    entries = torch.tensor([slot + 1 for slot in slots], device=DEVICE)
    last_tokens = torch.zeros(sampler.max_num_seqs + 1, dtype=torch.int64, device=DEVICE)
    sampler.slot_sampling()(logits, entries, entries, tokens, last_tokens, **sampler.variant(slots))
    return tokens


def test_torch_scores_what_the_kernels_leave():
    params = [
        SamplingParams(**GREEDY, logprobs=2),
        SamplingParams(logprobs=2, top_k=5),
        SamplingParams(logprobs=2, top_p=0.9),
        SamplingParams(**GREEDY, logprobs=MAX_TOP + 1),
        SamplingParams(**GREEDY, logprobs=1, logit_bias={3: 2.0}),
        SamplingParams(logprobs=1, presence_penalty=1.0),
        SamplingParams(**GREEDY, logprobs=1, min_tokens=9, max_tokens=None, stop_token_ids=[7]),
        SamplingParams(**GREEDY, top_k=5, logprobs=1),
        SamplingParams(logprobs=2, top_k=5, logprob_token_ids=[4]),
        SamplingParams(**GREEDY),
    ]
    slots, logits = list(range(len(params))), random_logits(len(params), 97)
    for mode, covered in (("processed", [0, 1, 2, 7]), ("raw", [0, 1, 2, 4, 5, 6, 7, 8])):
        sampler = sampler_with(params, len(params), 97, logprobs_mode=mode)
        tokens = sampled(sampler, logits, slots)
        found = by_kernels(sampler, logits, slots, tokens)
        rest = by_torch(sampler, logits, slots, tokens, beside_kernels=True)
        assert list(found) == covered and sorted([*found, *rest]) == slots[:-1]
        assert_same(found | rest, by_torch(sampler, logits, slots, tokens))
    sampler = sampler_with(params, len(params), 97)
    sampler.lift_min_tokens([6], [12])  # the mask of a row ends, and with it what keeps the kernels from it
    assert_same(by_kernels(sampler, logits[6:7], [6], tokens[6:7]), by_torch(sampler, logits[6:7], [6], tokens[6:7]))
    assert by_kernels(sampler, logits[6:7], [6], tokens[6:7])


def test_a_reused_slot_keeps_nothing_of_its_last_request():
    logits, tokens = random_logits(1, 97), torch.tensor([5], device=DEVICE)
    sampler = sampler_with(PARAMS, 1, 97)
    for params in (*PARAMS, PARAMS[0], PARAMS[4], PARAMS[7], PARAMS[3]):
        sampler.set_slot(0, params, 0, [1])
        assert_same(by_kernels(sampler, logits, [0], tokens), by_torch(sampler, logits, [0], tokens))


def test_strides_of_logits_change_nothing():
    logits, tokens = random_logits(9, 97), torch.arange(9, device=DEVICE)
    sampler, slots = sampler_with(PARAMS, 9, 97), list(range(9))
    wanted = by_kernels(sampler, logits, slots, tokens)
    wide = torch.full((18, 130), 50.0, device=DEVICE)
    wide[::2, :97] = logits
    assert by_kernels(sampler, wide[::2, :97], slots, tokens) == wanted
    assert by_kernels(sampler, logits.t().contiguous().t(), slots, tokens) == wanted

"""Sampling against a per-row reference in plain Python, and against itself in other batches."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.protocol.request import GOLDEN, SamplingParams, mix64
from engine.sampling import ops
from engine.sampling.penalties import count_tokens
from engine.sampling.sampler import Sampler, prompt_logprobs
from tests.support.sampling_steps import sample

EOS = 2
INF = math.inf


def reference_logits(logits, params, prompt, outputs):
    """Logits after penalties, bias and the min_tokens mask, token by token."""
    counts = Counter(outputs)
    adjusted = []
    for token, x in enumerate(logits):
        if token in counts or token in prompt:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * counts[token]
        x -= params.presence_penalty if counts[token] else 0.0
        x += (params.logit_bias or {}).get(token, 0.0)
        if len(outputs) < params.min_tokens and (token in params.stop_token_ids or token == EOS):
            x = -INF
        adjusted.append(x)
    return adjusted


def reference_distribution(logits, params, prompt, outputs):
    """{token: log-probability} of possible tokens; None if rounding could decide what top-p or min-p keeps."""
    x = reference_logits(logits, params, prompt, outputs)
    temperature = params.temperature or 1.0
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    weight = {token: math.exp((x[token] - x[order[0]]) / temperature) for token in order}
    if not params.is_greedy:
        order = order[: params.top_k or len(order)]
        total, before, kept = math.fsum(weight[token] for token in order), 0.0, []
        for token in order:
            if params.top_p < 1 and abs(before / total - params.top_p) < 1e-6:
                return None
            if before / total >= params.top_p and params.top_p < 1:
                break
            before += weight[token]
            kept.append(token)
        if params.min_p and any(abs(weight[token] - params.min_p) < 1e-6 for token in kept if token != order[0]):
            return None
        order = [token for token in kept if weight[token] >= params.min_p]
    total = math.fsum(weight[token] for token in order)
    return {token: math.log(weight[token] / total) for token in order if weight[token] > 0}


def sampler_with(params, prompt, outputs, vocab_size, seed=0, slot=1, **options):
    sampler = Sampler(4, vocab_size, eos_token_ids=(EOS,), **options)
    sampler.set_slot(slot, params, seed, prompt, outputs)
    return sampler


def sample_one(sampler, logits, position, slot=1):
    """(token, TokenLogprob) of a batch of one row."""
    result = sample(sampler, torch.as_tensor(logits, dtype=torch.float32)[None], [slot], [position])
    return result.token_ids.item(), result.logprobs and result.logprobs[0]


# A coarse grid of logits: exact in float32, with ties as in the bfloat16 logits of a real model.
some_logits = st.lists(st.integers(-64, 64).map(lambda i: i / 8), min_size=8, max_size=40)
some_params = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.5, 3.0]),
        "top_k": st.integers(0, 50),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 0.6),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.25, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 0.25, 1.5]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 0.5, 2.0]),
        "logit_bias": st.dictionaries(st.integers(0, 7), st.sampled_from([-100.0, -1.5, 0.5, 4.0, 100.0])),
        "stop_token_ids": st.lists(st.integers(0, 6), max_size=3),
        "min_tokens": st.integers(0, 4),
    },
)
some_ids = st.lists(st.integers(0, 7), max_size=6)


@settings(max_examples=400, deadline=None)
@given(some_logits, some_params, some_ids, some_ids, st.integers(-(2**63), 2**63 - 1))
def test_distribution_equals_the_reference(logits, fields, prompt, outputs, seed):
    ids = list(reversed(range(len(logits))))
    params = SamplingParams(**fields, logprobs=100, logprob_token_ids=ids)
    expected = reference_distribution(logits, params, prompt, outputs)
    assume(expected is not None)
    sampler = sampler_with(params, prompt, outputs, len(logits), seed)
    token, chosen = sample_one(sampler, logits, len(prompt) + len(outputs))
    assert list(chosen.top) == list(expected)
    assert chosen.top == pytest.approx(expected, abs=2e-4)
    assert list(chosen.named) == ids and {i: chosen.named[i] for i in chosen.top} == chosen.top
    assert {chosen.named[i] for i in ids if i not in chosen.top} <= {-INF}
    assert chosen.token_id == token and chosen.logprob == chosen.top[token]
    if params.is_greedy:
        assert token == next(iter(expected))
    x = reference_logits(logits, params, prompt, outputs)
    assert chosen.rank == 1 + sum(y > x[token] for y in x)


def expected_token(distribution, params, u, vocab_size):
    """The token at `u` of the cumulative distribution: by probability if truncated, else by id. None near a border."""
    truncated = params.top_p < 1 or 0 < params.top_k < vocab_size
    order = list(distribution) if truncated else sorted(distribution)
    cumulative = 0.0
    for token in order:
        cumulative += math.exp(distribution[token])
        if abs(cumulative - u) < 1e-5:
            return None
        if cumulative > u:
            return token
    return None


@settings(max_examples=300, deadline=None)
@given(some_logits, some_params, some_ids, some_ids, st.integers(-(2**63), 2**63 - 1))
def test_token_is_the_inverse_of_the_cumulative_distribution(logits, fields, prompt, outputs, seed):
    params, position = SamplingParams(**fields), len(prompt) + len(outputs)
    distribution = reference_distribution(logits, params, prompt, outputs)
    assume(distribution is not None and not params.is_greedy)
    expected = expected_token(distribution, params, python_uniform(mix64(seed), position), len(logits))
    assume(expected is not None)
    sampler = sampler_with(params, prompt, outputs, len(logits), seed)
    assert sample_one(sampler, logits, position)[0] == expected


@settings(max_examples=60, deadline=None)
@given(some_logits, some_params, some_ids, st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(0, 5))
def test_preempted_request_continues_with_the_same_tokens(logits, fields, prompt, outputs, recounted):
    params = SamplingParams(**fields, logprobs=100)
    whole = sampler_with(params, prompt, outputs, len(logits), seed=5)
    resumed = sampler_with(params, prompt, outputs[:recounted], len(logits), seed=5, slot=3)
    if params.has_penalties:
        rest = torch.tensor(outputs[recounted:], dtype=torch.int64)
        count_tokens(resumed.counts.values, torch.full_like(rest, 3), rest)
    position = len(prompt) + len(outputs)
    assert sample_one(whole, logits, position) == sample_one(resumed, logits, position, slot=3)


def test_a_reused_slot_keeps_nothing_of_its_last_request():
    logits = torch.zeros(1, 8)
    params = SamplingParams(temperature=0.0, presence_penalty=1.0, logprobs=8)
    sampler = sampler_with(params, [0], [1, 2], 8)
    sample(sampler, logits, [1], [3])
    sampler.set_slot(1, params, 0, [0], [])
    assert len(set(sample(sampler, logits, [1], [1]).logprobs[0].top.values())) == 1


def test_penalties_count_sampled_tokens_without_the_host():
    logits = torch.tensor([[0.0, 0.0, 9.0, 8.0, 0.0], [0.0, 0.0, 0.0, 9.0, 8.5]])
    sampler = Sampler(4, 5)
    penalty = SamplingParams(temperature=0.0, frequency_penalty=1.5, logprobs=0)
    sampler.set_slot(3, penalty, 0, [1])
    sampler.set_slot(0, SamplingParams(temperature=0.0, logprobs=0), 0, [1])
    sampler.set_slot(2, penalty, 0, [1])
    given = [sample(sampler, logits[[0, 0, 1]], [3, 0, 2], [step + 1] * 3).token_ids.tolist() for step in range(4)]
    assert given == [[2, 2, 3], [3, 2, 4], [2, 2, 3], [3, 2, 4]]
    sampler.set_slot(3, penalty, 0, [1], [2, 2])  # recomputed from the host's tokens: nothing else counts
    assert sample(sampler, logits[:1], [3], [3]).token_ids.tolist() == [3]


def test_a_row_without_a_token_counts_nothing():
    sampler = Sampler(2, 4)
    sampler.set_slot(0, SamplingParams(temperature=0.0, presence_penalty=2.0, logprobs=4), 0, [1])
    assert sample(sampler, torch.full((1, 4), float("nan")), [0], [1]).token_ids.tolist() == [-1]
    assert len(set(sample(sampler, torch.zeros(1, 4), [0], [1]).logprobs[0].top.values())) == 1  # none is penalised


def python_uniform(key, position):
    return (mix64(key + (position + 1) * GOLDEN) % 2**64 >> 11) * 2.0**-53


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40)), min_size=1, max_size=9))
@example([(2**63 - 1, 0), (-(2**63), 1), (0, 0), (-1, 2**40)])
def test_uniform_is_the_hash_of_key_and_position_alone(pairs):
    keys, positions = (torch.tensor(column) for column in zip(*pairs, strict=True))
    u = ops.uniform(keys, positions)
    assert u.dtype == torch.float64
    assert u.tolist() == [python_uniform(key, position) for key, position in pairs]
    assert 0.0 <= u.min() and u.max() < 1.0


def chi_square(counts, expected):
    return sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True))


@pytest.mark.parametrize("along", ["positions", "seeds", "children"])
def test_uniform_is_uniform_and_uncorrelated(along):
    n = 65536
    index = torch.arange(n)
    if along == "positions":
        u = ops.uniform(torch.full((n,), mix64(42)), index)
    elif along == "seeds":
        u = ops.uniform(torch.tensor([mix64(seed) for seed in range(n)]), torch.full((n,), 17))
    else:
        u = ops.uniform(torch.tensor([mix64(mix64(7 + k * GOLDEN)) for k in range(n)]), torch.full((n,), 17))
    # 255 degrees of freedom: mean 255, standard deviation 22.6; 5 deviations occur once in millions.
    assert chi_square(torch.histc(u, 256, 0.0, 1.0).tolist(), [n / 256] * 256) < 368
    pairs = torch.floor(u[:-1] * 16) * 16 + torch.floor(u[1:] * 16)
    assert chi_square(torch.bincount(pairs.long(), minlength=256).tolist(), [(n - 1) / 256] * 256) < 368


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.02}], ids=str
)
def test_token_frequencies_follow_the_distribution(fields):
    logits = [math.sin(3 * i) * 2 for i in range(30)]
    params = SamplingParams(**fields, temperature=0.8)
    expected = reference_distribution(logits, params, [], [])
    sampler = Sampler(1000, 30)
    for slot in range(1000):
        sampler.set_slot(slot, params, slot, [])
    counts = Counter()
    for position in range(20):
        counts.update(sample(sampler, torch.tensor([logits] * 1000), range(1000), [position] * 1000).token_ids.tolist())
    assert set(counts) <= set(expected)
    degrees = len(expected) - 1
    found = chi_square([counts[t] for t in expected], [math.exp(p) * 20000 for p in expected.values()])
    assert found < degrees + 5 * math.sqrt(2 * degrees) + 5


VARIED = [
    SamplingParams(seed=1, logprobs=3),
    SamplingParams(seed=2, top_p=0.9),
    SamplingParams(seed=3, top_k=40, logprobs=0),
    SamplingParams(seed=4, min_p=0.02),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(seed=5, top_k=1500, top_p=0.99, temperature=2.0),
    SamplingParams(seed=6, presence_penalty=1.0, repetition_penalty=1.3, logit_bias={5: 3.0}),
    SamplingParams(seed=7, top_p=0.999, temperature=4.0, logprobs=5),  # a nucleus wider than the candidates
    SamplingParams(seed=8, min_tokens=500, max_tokens=None),
]


@pytest.mark.parametrize("chunk", [2**12, 2**26], ids=["many chunks", "one chunk"])
def test_row_is_sampled_the_same_in_every_batch(monkeypatch, chunk):
    monkeypatch.setattr("engine.sampling.scoring._CHUNK_LOGITS", (chunk, chunk))
    vocab_size, rows = 3000, len(VARIED)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocab_size, generator=generator) * 2).to(torch.bfloat16)
    sampler = Sampler(rows, vocab_size, eos_token_ids=(EOS,))
    for slot, params in enumerate(VARIED):
        sampler.set_slot(slot, params, params.seed or 0, [1, 2, 3], [4, 5])
    positions = [5 + 7 * slot for slot in range(rows)]

    def sampled(slots, padding=0):
        batch = torch.cat([logits[slots], torch.full((padding, vocab_size), 3.0, dtype=torch.bfloat16)])
        result = sample(sampler, batch, slots, [positions[slot] for slot in slots])
        entries = zip(result.token_ids.tolist(), result.logprobs or [None] * len(slots), strict=True)
        return dict(zip(slots, entries, strict=True))

    alone = {slot: sampled([slot])[slot] for slot in range(rows)}
    assert len({token for token, _ in alone.values()}) > 5
    for seed in range(12):
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
        chosen = order[: 1 + seed % rows]
        assert sampled(chosen, padding=seed) == {slot: alone[slot] for slot in chosen}
    assert sampled(list(range(rows))) == alone


@pytest.mark.parametrize("vocab_size", [500, 3000])
@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.97, 1.0])
def test_truncation_of_a_large_vocabulary_equals_the_reference(vocab_size, top_p):
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)).tolist()
    for top_k in (0, 100, 2000):
        params = SamplingParams(top_p=top_p, top_k=top_k, temperature=3.0, logprobs=0)
        expected = reference_distribution(logits, params, [], [])
        sampler = Sampler(64, vocab_size)
        for slot in range(64):
            sampler.set_slot(slot, params, slot, [])
        for entry in sample(sampler, torch.tensor([logits] * 64), range(64), range(64)).logprobs:
            assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-5)
        kept = ops.sample_truncated(*inputs(torch.tensor([logits]), params, 0.5), 0).kept
        assert kept.item() == len(expected)


def inputs(logits, params, u):
    """Arguments of sample_truncated for rows that share their parameters."""
    z = (logits - logits.amax(1, keepdim=True)) / params.temperature
    columns = [
        torch.full((len(logits),), x, dtype=torch.float64) for x in (params.top_k, params.top_p, params.min_p, u)
    ]
    return z, ops.weights_of(z), *columns


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("seed", range(5))
def test_token_of_probability_zero_is_never_sampled(u, seed):
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(seed)) * 4
    logits[torch.rand(64, 50, generator=torch.Generator().manual_seed(seed)) < 0.7] = -INF
    logits[:, :10] = -INF
    logits[:, -10:] = -INF
    logits[:, 20] = 0.0
    rows = torch.full((64,), u, dtype=torch.float64)
    z, weights, *columns = inputs(logits, SamplingParams(top_p=0.999999), u)
    for token_ids in (
        ops.sample_full(weights, None, rows).token_ids,
        ops.sample_full(weights, torch.zeros_like(rows), rows).token_ids,
        ops.sample_truncated(z, weights, *columns, 0).token_ids,
    ):
        assert logits.gather(1, token_ids[:, None]).min() > -INF


def test_extreme_random_numbers_sample_the_first_and_the_last_token():
    weights = torch.tensor([[0, 5, 7, 0, 1, 0]]).expand(3, 6)
    u = torch.tensor([0.0, 5 / 13, 1 - 2.0**-53], dtype=torch.float64)
    assert ops.sample_full(weights, None, u).token_ids.tolist() == [1, 2, 4]


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=8), st.integers(1, 2**19))
def test_rounding_never_selects_past_the_last_possible_token(some, times):
    weights = torch.tensor([[weight * times for weight in some] + [0, 0]])  # totals up to the maximum of a vocabulary
    u = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert ops.sample_full(weights, None, u).token_ids.item() == len(some) - 1


def test_equal_logits_rank_by_id():
    z = torch.tensor([[-1.0, 0.0, -1.0, 0.0, -INF, -0.0, -1e-40]])
    for count in range(1, 8):
        assert ops.ranked(z, count)[0].tolist() == [1, 3, 5, 6, 0, 2, 4][:count]


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-5}], ids=str)
def test_narrowest_truncation_is_greedy(fields):
    logits = torch.randn(200, 97, generator=torch.Generator().manual_seed(3))
    sampler = Sampler(200, 97)
    for slot in range(200):
        sampler.set_slot(slot, SamplingParams(**fields), slot, [])
    assert sample(sampler, logits, range(200), [9] * 200).token_ids.equal(logits.argmax(1))


def test_top_k_of_the_vocabulary_or_more_is_off():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(3)).expand(40, 50)
    sampled = []
    for top_k in (0, 50, 51, 2**31 - 1):
        sampler = Sampler(40, 50)
        for slot in range(40):
            sampler.set_slot(slot, SamplingParams(top_k=top_k), slot, [])
        sampled.append(sample(sampler, logits, range(40), [9] * 40).token_ids.tolist())
    assert sampled == [sampled[0]] * 4


def test_token_depends_on_seed_and_position_and_negative_seeds_work():
    logits = torch.zeros(1, 1000)
    sampler = Sampler(1, 1000)

    def sampled_token(seed, position):
        sampler.set_slot(0, SamplingParams(), seed, [])
        return sample(sampler, logits, [0], [position]).token_ids.item()

    seeds = [0, 1, -1, 2**63 - 1, -(2**63)]
    assert len({sampled_token(seed, 3) for seed in seeds}) == 5
    assert len({sampled_token(7, position) for position in range(6)}) >= 5
    assert sampled_token(-1, 3) == sampled_token(-1, 3)


@pytest.mark.parametrize("bad", [[math.nan, 0.0, 1.0], [INF, 0.0, 1.0], [-INF, -INF, -INF]], ids=str)
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5}], ids=str)
@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_non_finite_row_is_marked_and_leaves_other_rows_unchanged(bad, fields, mode):
    sampler = Sampler(3, 3, logprobs_mode=mode)
    for slot in range(3):
        sampler.set_slot(slot, SamplingParams(**fields, logprobs=2), 9, [])
    good = [0.0, 1.0, 0.5]
    result = sample(sampler, torch.tensor([good, bad, good]), [0, 1, 2], [4, 4, 4])
    expected = sample(sampler, torch.tensor([good]), [0], [4])
    tokens = result.token_ids.tolist()
    assert tokens[1] == -1 and result.logprobs[1] is None
    assert tokens[0] == tokens[2] == expected.token_ids.item()
    assert result.logprobs[0] == result.logprobs[2] == expected.logprobs[0]


@pytest.mark.parametrize("bad", [math.nan, -INF])
def test_a_row_without_finite_logits_may_have_min_p_and_named_tokens(bad):
    sampler = Sampler(2, 4)
    for slot in range(2):
        sampler.set_slot(slot, SamplingParams(min_p=0.5, logprob_token_ids=[3, 0]), slot, [])
    none, entry = sample(sampler, torch.tensor([[bad] * 4, [0.0, 0.0, -9.0, -9.0]]), [0, 1], [1, 1]).logprobs
    assert none is None and entry.named == {3: -INF, 0: pytest.approx(math.log(0.5))}


def test_inactive_and_padded_rows_are_ignored_and_logits_are_not_written():
    params = SamplingParams(repetition_penalty=2.0, logit_bias={1: 5.0}, min_tokens=3, stop_token_ids=[0], logprobs=0)
    sampler = sampler_with(params, [0, 1], [], 6)
    logits = torch.randn(4, 6)
    logits[2:] = math.nan
    before = logits.clone()
    result = sample(sampler, logits, [1, 2, -1], [2, 0, 0])
    assert logits.equal(before) or torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert result.token_ids.tolist()[1:] == [logits[1].argmax().item(), -1]
    assert [entry is None for entry in result.logprobs] == [False, True, True]


def test_min_tokens_bans_stop_tokens_until_enough_are_generated():
    logits = torch.tensor([[0.0, 1.0, 9.0, 8.0, 7.0]])  # 2 is end-of-text, 3 a stop token
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[3])
    sampler = sampler_with(params, [0, 0, 0], [], 5)
    assert sampler.needs_sampler([1])
    assert [sample(sampler, logits, [1], [position]).token_ids.item() for position in (3, 4, 5)] == [4, 4, 2]
    assert not sampler.needs_sampler([1])
    sampler.set_slot(1, SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[3], ignore_eos=True), 0, [0])
    assert sample(sampler, logits, [1], [1]).token_ids.item() == 2
    sampler.set_slot(1, params, 0, [0, 0, 0], [4, 4])
    assert sample(sampler, logits, [1], [5]).token_ids.item() == 2


@pytest.mark.parametrize(
    "fields, needs",
    [({"temperature": 0.0}, False), ({"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.2}, False), ({}, True),
     ({"temperature": 0.0, "logprobs": 0}, True), ({"temperature": 0.0, "logit_bias": {1: 1.0}}, True),
     ({"temperature": 0.0, "frequency_penalty": 0.1}, True), ({"temperature": 0.0, "min_tokens": 1}, True),
     ({"temperature": 0.0, "min_tokens": 1, "ignore_eos": True}, False)],
    ids=str,
)  # fmt: skip
def test_needs_sampler_only_where_argmax_is_not_enough(fields, needs):
    sampler = sampler_with(SamplingParams(**fields), [0], [], 5)
    assert sampler.needs_sampler([0, 1]) is needs
    assert sampler.needs_sampler(iter([1, -1])) is needs
    assert not sampler.needs_sampler([0, 2, -1])


def test_logprobs_are_returned_only_for_rows_that_request_them():
    sampler = Sampler(3, 6)
    for slot, k in enumerate([None, 0, 2]):
        sampler.set_slot(slot, SamplingParams(temperature=0.0, logprobs=k), 0, [])
    logits = torch.tensor([[1.0, 2.0, 3.0, 3.0, 0.0, -INF]] * 3)
    none, zero, two = sample(sampler, logits, [0, 1, 2], [0, 0, 0]).logprobs
    expected = torch.log_softmax(logits[0], 0)
    assert none is None
    assert (zero.token_id, zero.rank, zero.top) == (2, 1, {})
    assert zero.logprob == pytest.approx(expected[2].item(), abs=1e-6)
    assert list(two.top) == [2, 3]
    assert sample(sampler, logits[:1], [0], [0]).logprobs is None


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_named_tokens_have_the_log_softmax_of_their_row(mode):
    sampler = Sampler(4, 300, logprobs_mode=mode)
    named = [[7], [299, 0, 5], [], [1, 1, 2]]
    for slot, ids in enumerate(named):
        sampler.set_slot(slot, SamplingParams(seed=slot, logprobs=slot, logprob_token_ids=ids), slot, [])
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(8)) * 4
    entries = sample(sampler, logits, range(4), range(4)).logprobs
    for slot, (entry, row) in enumerate(zip(entries, torch.log_softmax(logits, 1), strict=True)):
        assert list(entry.named) == list(dict.fromkeys(named[slot])) and len(entry.top) == slot
        assert list(entry.named.values()) == pytest.approx([row[i].item() for i in entry.named], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_raw_logprobs_are_of_the_untouched_logits(dtype):
    params = SamplingParams(seed=3, temperature=0.5, top_k=4, logit_bias={7: 50.0}, presence_penalty=1.0, logprobs=5)
    sampler = sampler_with(params, [1], [2, 3], 40, seed=3, logprobs_mode="raw")
    logits = (torch.randn(1, 40, generator=torch.Generator().manual_seed(5)) * 3).to(dtype)
    result = sample(sampler, logits, [1], [3])
    expected = torch.log_softmax(logits.float(), 1)[0]
    chosen = result.logprobs[0]
    assert result.token_ids.item() == chosen.token_id == 7
    assert chosen.logprob == pytest.approx(expected[7].item(), abs=1e-5)
    assert chosen.rank == 1 + (expected > expected[7]).sum().item() > 1
    assert list(chosen.top.values()) == pytest.approx(expected.topk(5).values.tolist(), abs=1e-5)


def read_prompt_logprobs(logits, targets, k):
    return [entry for part in prompt_logprobs(logits, targets, k) for entry in part.read()]


@pytest.mark.parametrize("chunk", [2**24, 100])
def test_prompt_logprobs_are_the_log_softmax_of_the_targets(monkeypatch, chunk):
    monkeypatch.setattr("engine.sampling.logprobs._CHUNK_LOGITS", chunk)
    logits = torch.randn(17, 60, generator=torch.Generator().manual_seed(2)) * 5
    targets = torch.arange(17) * 3
    entries = read_prompt_logprobs(logits, targets, 4)
    expected = torch.log_softmax(logits, 1)
    assert [entry.token_id for entry in entries] == targets.tolist()
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(expected[row, targets[row]].item(), abs=1e-5)
        assert entry.rank == 1 + (logits[row] > logits[row, targets[row]]).sum().item()
        values, ids = expected[row].topk(4)
        assert list(entry.top) == ids.tolist()
        assert list(entry.top.values()) == pytest.approx(values.tolist(), abs=1e-5)
    assert read_prompt_logprobs(logits, targets, 0)[0].top == {}
    assert read_prompt_logprobs(logits[:0], targets[:0], 3) == []


def test_peaked_distribution_still_ranks_the_alternatives():
    logits = torch.tensor([[-50.0, 0.0, 60.0, -20.0, -10.0]])
    (entry,) = read_prompt_logprobs(logits, torch.tensor([0]), 4)
    assert list(entry.top) == [2, 1, 4, 3]
    assert entry.logprob == pytest.approx(-110.0) and entry.rank == 5


def test_invalid_slots_and_modes_are_rejected():
    sampler = Sampler(2, 8)
    calls = [
        lambda: sampler.set_slot(2, SamplingParams(), 0, []),
        lambda: sampler.set_slot(-1, SamplingParams(), 0, []),
        lambda: Sampler(1, 8, logprobs_mode="x"),
    ]
    for bad in calls:
        with pytest.raises(ValueError):
            bad()


def test_params_outside_the_vocabulary_are_rejected_and_change_nothing():
    sampler = Sampler(1, 8, eos_token_ids=(7,))
    for params, field in ((SamplingParams(stop_token_ids=[8]), "stop_token_ids"),
                          (SamplingParams(logit_bias={8: 1.0}), "logit_bias"),
                          (SamplingParams(stop_token_ids=list(range(7)), min_tokens=1),
                           "stop_token_ids")):  # fmt: skip
        with pytest.raises(RequestError) as error:
            sampler.set_slot(0, params, 0, [])
        assert error.value.param == field
        assert not sampler.needs_sampler([0])

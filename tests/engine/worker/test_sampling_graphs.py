"""The captured sampling step: replays give the tokens of an eager step, for any parameters, batch and bucket."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from engine.protocol.request import SamplingParams
from engine.sampling.sampler import Sampler, SampleResult
from engine.worker.sampling_graphs import LOGPROBS_SITE, SITE, SamplingStep, sampling_buckets
from graph_cache.config import GraphConfig
from graph_cache.core.buckets import Buckets
from graph_cache.core.cache import GraphCache
from graph_cache.errors import CaptureError
from tests.engine.lively import PROMPTS, SAMPLING_VARIANTS, greedy
from tests.support.sampling_steps import sample

SLOTS, EOS = 8, 2
LADDER = (1, 2, 4, 6, 8)
PROMPT = [1, 2, 3]
SENTINEL = 7  # a greedy token that no argmax gives
GREEDY = SamplingParams(temperature=0.0)


class Rig:
    """A sampling step with the buffers of a forward step, and a sampler of its own to compare with."""

    def __init__(self, vocab_size, device="cpu", dtype=torch.float32, buckets=LADDER, **options):
        self.device = torch.device(device)
        self.logits = torch.zeros(SLOTS, vocab_size, dtype=dtype, device=device)
        self.next_tokens = torch.zeros(SLOTS, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(SLOTS + 1, dtype=torch.int64, device=device)
        self.cache = GraphCache(device=device, **options)
        self.sampler, self.reference = (Sampler(SLOTS, vocab_size, device, eos_token_ids=(EOS,)) for _ in range(2))
        self.step = SamplingStep(
            self.cache, self.sampler, self.logits, self.next_tokens, self.last_tokens, Buckets(buckets)
        )

    def set_slots(self, params, outputs=(4, 5), first=0):
        for slot, one in enumerate(params, first):
            for sampler in (self.sampler, self.reference):
                sampler.set_slot(slot, one, 100 + slot, PROMPT, outputs)

    def forward(self, logits, slots, positions):
        """Write what a forward step leaves behind: logits, greedy tokens, slots and positions."""
        rows = len(slots)
        best, ids = logits.max(dim=1)
        self.logits[:rows] = logits
        self.next_tokens[:rows] = torch.where(torch.isfinite(best), ids, -1)
        entries = torch.tensor([slot + 1 for slot in slots], device=self.device)
        self.last_tokens[entries] = ids
        self.step.load(torch.stack([entries, torch.tensor(positions, device=self.device)]))

    def run(self, logits, slots, positions):
        self.forward(logits, slots, positions)
        with torch.inference_mode():
            return self.step.run(slots, positions)

    def check(self, logits, slots, positions):
        """Run a step, and check tokens, next inputs, log-probabilities and counts against an eager step."""
        found = self.run(logits, slots, positions)
        wanted = sample(self.reference, logits, slots, positions)
        assert found.token_ids.equal(wanted.token_ids)
        assert (found.logprobs or [None] * len(slots)) == (wanted.logprobs or [None] * len(slots))
        entries = [slot + 1 for slot in slots]
        assert self.last_tokens[entries].equal(found.token_ids.clamp(min=0)) or -1 in found.token_ids
        assert self.sampler.counts.values[slots].equal(self.reference.counts.values[slots])
        return found.token_ids.tolist()

    def replays(self):
        return sum(count for (site, *_), count in self.cache.stats.replays.items() if site == SITE)

    def replays_by_variant(self):
        rows = [row for row in self.cache.table() if row["replays"]]
        found = Counter()
        for row in rows:
            found[row["statics"]["processors"], row["statics"]["limits"]] += row["replays"]
        return found

    def fallbacks(self):
        return {reason: count for (_, _, reason), count in self.cache.stats.fallbacks.items()}


def random_logits(rows, vocab_size, seed=0, dtype=torch.float32):
    return (torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@pytest.fixture(scope="module")
def small():
    return Rig(40)


params_strategy = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0]),
        "top_k": st.integers(0, 50),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 0.6),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 1.5]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 2.0]),
        "logit_bias": st.dictionaries(st.integers(0, 39), st.sampled_from([-100.0, -1.5, 0.5, 100.0]), max_size=40),
        "stop_token_ids": st.lists(st.integers(0, 6), max_size=3),
        "min_tokens": st.integers(0, 4),
        "logprobs": st.sampled_from([None, None, 0, 3]),
    },
)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(params_strategy, min_size=1, max_size=SLOTS),
    st.lists(st.integers(0, 7), max_size=6),
    st.integers(0, 2**31),
    st.permutations(range(SLOTS)),
)
def test_replay_equals_eager_sampling(small, fields, outputs, seed, order):
    small.set_slots([SamplingParams(**one) for one in fields], outputs)
    slots = [slot for slot in order if slot < len(fields)]
    for step in range(3):
        # A coarse grid has ties, as bfloat16 logits do.
        logits = (random_logits(len(slots), 40, seed + step) * 4).round() / 4
        small.check(logits, slots, [len(PROMPT) + len(outputs) + step] * len(slots))
    assert not small.fallbacks()


VARIED = [
    SamplingParams(top_k=40),
    SamplingParams(top_p=0.9),
    GREEDY,
    SamplingParams(top_k=1500, top_p=0.99, temperature=2.0),
    SamplingParams(top_p=0.999, temperature=4.0),  # a nucleus wider than the candidates
    SamplingParams(min_p=0.02),
    SamplingParams(presence_penalty=1.0, repetition_penalty=1.3, logit_bias={5: 3.0}),
    SamplingParams(temperature=0.0, min_tokens=500, max_tokens=None, stop_token_ids=[9]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_vocabulary_in_chunks_of_rows(dtype, monkeypatch):
    monkeypatch.setattr("engine.sampling.scoring._CHUNK_LOGITS", (3 * 30_000, 3 * 30_000))  # 3 rows each
    rig = Rig(30_000, dtype=dtype)
    rig.set_slots(VARIED)
    for seed, slots in enumerate([[0], [0, 2], [5, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7], [4, 3]]):
        rig.check(random_logits(len(slots), 30_000, seed, dtype), slots, [5 + seed] * len(slots))
    assert rig.replays() == 5 and not rig.fallbacks()


def test_each_batch_replays_the_cheapest_variant():
    rig = Rig(40)
    rig.set_slots([SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.5), VARIED[6], GREEDY])
    for slots, expected in (
        ([0, 4], (False, "none")),
        ([0, 1], (False, "top_k")),
        ([0, 1, 2], (False, "any")),
        ([3], (True, "none")),
        ([1, 3], (True, "top_k")),
    ):
        before = rig.replays_by_variant()
        rig.check(random_logits(len(slots), 40), slots, [5] * len(slots))
        assert rig.replays_by_variant() - before == {expected: 1}


def test_greedy_batches_replay_nothing_and_greedy_rows_keep_the_forward_token():
    rig = Rig(40)
    rig.set_slots([GREEDY, SamplingParams(temperature=0.0, logprobs=2), SamplingParams()])
    logits = random_logits(3, 40)
    rig.check(logits[:2], [0, 1], [5, 5])
    assert rig.replays() == 0 and not rig.fallbacks() and not rig.cache.stats.captures
    rig.forward(logits, [0, 1, 2], [5, 5, 5])
    rig.next_tokens[0], rig.last_tokens[1] = SENTINEL, SENTINEL
    with torch.inference_mode():
        found = rig.step.run([0, 1, 2], [5, 5, 5]).token_ids
    assert found[0] == rig.last_tokens[1] == SENTINEL
    assert found[2] == sample(rig.reference, logits[2:], [2], [5]).token_ids[0]


def test_padding_and_rows_of_an_earlier_batch_write_nothing():
    rig = Rig(40)
    rig.set_slots([SamplingParams(presence_penalty=1.0)] * SLOTS)
    rig.check(random_logits(8, 40), list(range(8)), [5] * 8)
    tokens, counts = rig.last_tokens.clone(), rig.sampler.counts.values.clone()
    rig.logits.fill_(math.nan)
    rig.check(random_logits(3, 40, seed=1), [6, 1, 4], [6, 6, 6])  # in a bucket of 4, after one of 8
    untouched = [slot for slot in range(SLOTS) if slot not in (6, 1, 4)]
    assert rig.last_tokens[0] == 0
    assert rig.last_tokens[[slot + 1 for slot in untouched]].equal(tokens[[slot + 1 for slot in untouched]])
    assert rig.sampler.counts.values[untouched].equal(counts[untouched])


def test_preempted_request_continues_with_the_same_tokens_in_another_slot_and_batch():
    params = SamplingParams(top_p=0.9, frequency_penalty=0.5, logit_bias={3: 2.0}, min_tokens=4)
    rig, logits = Rig(40), random_logits(6, 40)
    rig.sampler.set_slot(2, params, 5, PROMPT, [])
    whole = [rig.run(logits[i : i + 1], [2], [3 + i]).token_ids.item() for i in range(6)]
    resumed = Rig(40)
    resumed.set_slots([SamplingParams(), GREEDY, VARIED[6]])
    resumed.sampler.set_slot(7, params, 5, PROMPT, whole[:3])
    rows = torch.stack([torch.cat([random_logits(3, 40, i), logits[i : i + 1]]) for i in range(6)])
    found = [resumed.run(rows[i], [0, 1, 2, 7], [9, 9, 9, 3 + i]).token_ids[3].item() for i in range(3, 6)]
    assert found == whole[3:]
    assert len(set(whole)) > 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_rows_are_marked_and_leave_other_rows_unchanged(bad):
    rig = Rig(40)
    rig.set_slots([SamplingParams(), SamplingParams(top_p=0.8), VARIED[6], GREEDY, SamplingParams(top_k=3)])
    logits = random_logits(5, 40)
    logits[[1, 2, 3]] = logits[[1, 2, 3]].index_fill(
        1, torch.arange(40) if bad == -math.inf else torch.tensor([9]), bad
    )
    before = rig.sampler.counts.values[2].clone()
    found = rig.check(logits, [0, 1, 2, 3, 4], [5] * 5)
    assert found[1:4] == [-1, -1, -1] and min(found[0], found[4]) >= 0
    assert rig.last_tokens[[2, 3]].tolist() == [0, 0] and rig.last_tokens.min() >= 0
    assert rig.sampler.counts.values[2].equal(before)


def test_min_tokens_ends_by_position_and_argmax_is_then_enough():
    rig = Rig(5)
    logits = torch.tensor([[0.0, 1.0, 9.0, 8.0, 7.0]])  # 2 is end-of-text, 3 a stop token
    rig.sampler.set_slot(1, SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[3]), 0, [0, 0, 0])
    assert [rig.run(logits, [1], [position]).token_ids.item() for position in (3, 4, 5)] == [4, 4, 2]
    assert rig.replays() == 2 and not rig.sampler.needs_sampler([1])


def test_a_reused_slot_keeps_nothing_of_its_last_request():
    rig, logits = Rig(40), random_logits(1, 40)
    for params in (VARIED[6], VARIED[7], GREEDY, SamplingParams(), VARIED[7], VARIED[6], SamplingParams(top_k=2)):
        rig.set_slots([params])
        rig.set_slots([SamplingParams(logit_bias={0: 0.5})], first=1)  # so that every batch takes the processors
        rig.check(logits.expand(2, 40), [0, 1], [5, 5])


def test_logits_are_never_written():
    rig = Rig(40)
    rig.set_slots([SamplingParams(), VARIED[6], VARIED[7], VARIED[1]])
    logits = random_logits(4, 40)
    rig.check(logits, [0, 1, 2, 3], [5] * 4)
    assert rig.logits[:4].equal(logits)


class Operations(TorchDispatchMode):
    """Counts the operations called, by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_a_steady_step_uploads_nothing():
    rig = Rig(40)
    rig.set_slots(VARIED)
    slots = list(range(SLOTS))
    rig.check(random_logits(8, 40), slots, [5] * 8)
    rows = torch.stack([torch.arange(1, 9), torch.full((8,), 6)])
    with torch.inference_mode(), Operations() as steady:
        rig.step.load(rows)
        rig.step.run(slots, [6] * 8)
    assert "aten::lift_fresh" not in steady.names  # what `torch.tensor` of Python values calls
    with Operations() as eager:
        sample(rig.reference, rig.logits, slots, [6] * 8)  # which uploads slots and positions
    assert eager.names["aten::lift_fresh"] > 0


# ---- misses --------------------------------------------------------------------------------------------------------


def test_a_miss_runs_the_same_code_eager_and_is_counted():
    rig = Rig(40, capture_on_miss=False)
    rig.set_slots(VARIED)
    rig.check(random_logits(3, 40), [0, 4, 6], [5] * 3)
    assert rig.fallbacks() == {"not_captured": 1}
    rig.cache.warm()
    rig.check(random_logits(3, 40), [0, 4, 6], [6] * 3)
    assert rig.replays() == 1


def test_graphs_that_are_off_run_eager():
    off = GraphConfig(inference_scope="none")
    rig = Rig(40, config=off)
    rig.set_slots(VARIED)
    rig.check(random_logits(8, 40), list(range(8)), [5] * 8)
    assert rig.fallbacks() == {"graphs_off": 1}


def test_a_refused_capture_runs_eager(monkeypatch, caplog):
    rig = Rig(40)
    rig.set_slots(VARIED)

    def refuse(*_):
        raise CaptureError("refused by the test")

    monkeypatch.setattr(type(rig.cache.pool.backend), "capture", refuse)
    for position in (5, 6):
        rig.check(random_logits(8, 40), list(range(8)), [position] * 8)
    assert rig.fallbacks() == {"capture_failed": 2}
    assert "refused by the test" in caplog.text


def test_captures_leave_no_trace():
    rig = Rig(40)
    rig.set_slots(VARIED)
    rig.forward(random_logits(8, 40), list(range(8)), [5] * 8)
    tensors = [rig.logits, rig.next_tokens, rig.last_tokens, rig.step.slots, rig.step.positions,
               *rig.sampler.table.tensors(rig.sampler.counts, rig.sampler.masks)]  # fmt: skip
    before = [tensor.clone() for tensor in tensors]
    rig.cache.warm()
    assert rig.cache.stats.captures.total() == 4 * SAMPLING_VARIANTS and rig.cache.warm_ratio() == 1.0
    assert all(tensor.equal(copy) for tensor, copy in zip(tensors, before, strict=True))


def test_buckets_are_the_powers_of_two_and_the_largest():
    assert sampling_buckets(Buckets((1, 2, 3, 4, 8, 12, 16, 24))).sizes == (1, 2, 4, 8, 16, 24)
    assert sampling_buckets(Buckets((6,))).sizes == (6,)


# ---- in the engine -------------------------------------------------------------------------------------------------


def test_engine_gives_the_same_sampled_tokens_from_graphs_eager_and_alone(make_engine):
    params = [
        SamplingParams(max_tokens=12, ignore_eos=True, seed=row, **fields)
        for row, fields in enumerate(
            [{}, {"top_p": 0.9, "logprobs": 2}, {"temperature": 0.0}, {"top_k": 20, "presence_penalty": 1.0},
             {"temperature": 0.0, "logit_bias": {5: 2.0}, "min_tokens": 6}]
        )
    ]  # fmt: skip

    def tokens(engine, prompts, params):
        outputs = engine.generate(prompt_token_ids=prompts, sampling_params=params)
        return [(output.token_ids, output.logprobs) for output in outputs]

    graphed, eager = make_engine(), make_engine(cuda_graph_impl="none")
    found = tokens(graphed, PROMPTS, params)
    assert found == tokens(eager, PROMPTS, params)
    assert found == [tokens(graphed, [prompt], [one])[0] for prompt, one in zip(PROMPTS, params, strict=True)]
    replays = dict(graphed.stats().graphs["replays"])
    assert replays[SITE, "block", "sample", 8] > 12
    assert dict(eager.stats().graphs["fallbacks"])[SITE, "sample", "graphs_off"] > 12


def test_greedy_engine_never_samples(make_engine):
    engine = make_engine()
    engine.generate(prompt_token_ids=PROMPTS, sampling_params=greedy(6))
    assert not [labels for labels, _ in engine.stats().graphs["replays"] if labels[0] == SITE]


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [777, 32000])
def test_gpu_replay_equals_eager_sampling(vocab_size):
    rig = Rig(vocab_size, "cuda", torch.bfloat16)
    rig.set_slots(VARIED)
    same = total = 0
    for position in range(5, 25):
        slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(position))[: 1 + position % 8].tolist()
        logits = random_logits(len(slots), vocab_size, position, torch.bfloat16).cuda()
        found = rig.run(logits, slots, [position] * len(slots)).token_ids
        wanted = sample(rig.reference, logits, slots, [position] * len(slots)).token_ids
        same, total = same + (found == wanted).sum().item(), total + len(slots)
        for slot, token in zip(slots, found.tolist(), strict=True):
            assert rig.last_tokens[slot + 1] == token
    assert same >= total - 1  # exp of the kernels and of torch may differ in its last bit
    assert rig.replays() > 10 and not rig.fallbacks()


SCORED = [
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=0.8, logprobs=20),
    GREEDY,
    SamplingParams(top_p=0.9, logprobs=3),
    SamplingParams(temperature=0.0, logprobs=21),  # scored by torch, as is the next
    SamplingParams(logprobs=2, presence_penalty=1.0),
    SamplingParams(min_p=0.1, logprobs=4, logprob_token_ids=[5, 700]),
    SamplingParams(),
]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [777, 128256])
def test_gpu_log_probabilities_of_the_graph_equal_those_of_torch(vocab_size):
    rig = Rig(vocab_size, "cuda", torch.bfloat16)
    rig.set_slots(SCORED)
    for position in range(5, 25):
        slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(position))[: 1 + position % 8].tolist()
        logits = random_logits(len(slots), vocab_size, position, torch.bfloat16).cuda()
        found = rig.run(logits, slots, [position] * len(slots))
        wanted = sample(rig.reference, logits, slots, [position] * len(slots))
        assert found.token_ids.equal(wanted.token_ids)
        for one, other in zip(found.logprobs or [], wanted.logprobs or [], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert (one.token_id, one.rank, list(one.top)) == (other.token_id, other.rank, list(other.top))
                assert list(one.top.values()) == pytest.approx(list(other.top.values()), abs=1e-5)
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
                assert one.named == pytest.approx(other.named, abs=1e-5)
    replays = {site for (site, *_), count in rig.cache.stats.replays.items() if count}
    assert replays == {SITE, LOGPROBS_SITE} and not rig.fallbacks()


def profile_second_step(rig: Rig) -> tuple[SampleResult, list[str]]:
    """Return the result of a batch's second step, read within the profile, and the names of its events on the GPU."""
    slots = list(range(SLOTS))
    rig.run(random_logits(8, 32000).cuda(), slots, [5] * 8)
    rows = torch.stack([torch.arange(1, 9), torch.full((8,), 6)]).cuda()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as trace:
        with torch.inference_mode():
            rig.step.load(rows)
            result = rig.step.run(slots, [6] * 8)
            _ = result.logprobs
        torch.cuda.synchronize()
    return result, [event.name for event in trace.events()]


@pytest.mark.gpu
def test_gpu_greedy_batch_with_log_probabilities_replays_one_graph_and_copies_nothing_from_the_host():
    rig = Rig(32000, "cuda", torch.bfloat16)
    rig.set_slots([SCORED[0]] * SLOTS)
    result, names = profile_second_step(rig)
    assert len(result.logprobs) == SLOTS
    assert any("scored_row_kernel" in name for name in names)
    assert not [name for name in names if "HtoD" in name]
    assert sum("DtoH" in name for name in names) == 1
    assert rig.replays() == 0


@pytest.mark.gpu
def test_gpu_steady_step_copies_nothing_from_the_host():
    rig = Rig(32000, "cuda", torch.bfloat16)
    rig.set_slots(VARIED)
    _, names = profile_second_step(rig)
    assert any("sample_kernel" in name for name in names)
    assert not [name for name in names if "HtoD" in name]

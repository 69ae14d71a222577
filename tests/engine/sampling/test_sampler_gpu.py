"""The sampler on a GPU: the same tokens as on the CPU, in every batch, without waiting for the device."""

import time

import pytest
import torch

from engine.protocol.request import SamplingParams, mix64
from engine.sampling import ops
from engine.sampling.penalties import count_tokens
from engine.sampling.sampler import Sampler
from tests.support.sampling_steps import sample

pytestmark = pytest.mark.gpu

PARAMS = [
    SamplingParams(logprobs=3),
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=40, logprobs=0),
    SamplingParams(min_p=0.02),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(top_k=1500, top_p=0.99, temperature=2.0),
    SamplingParams(presence_penalty=1.0, repetition_penalty=1.3, logit_bias={5: 3.0}),
    SamplingParams(top_p=0.999, temperature=4.0, logprobs=5),
    SamplingParams(min_tokens=500, max_tokens=None, stop_token_ids=[7]),
]


def sampler_with(device, rows, vocab_size, params):
    sampler = Sampler(rows, vocab_size, device, eos_token_ids=(2,))
    for slot in range(rows):
        sampler.set_slot(slot, params[slot % len(params)], slot, [1, 2, 3], [4, 5])
    return sampler


def test_gpu_uniform_numbers_equal_the_cpu_bit_for_bit():
    keys = torch.tensor([mix64(seed) for seed in range(-500, 500)])
    positions = torch.arange(1000) * 7919
    assert ops.uniform(keys.cuda(), positions.cuda()).cpu().equal(ops.uniform(keys, positions))


@pytest.mark.parametrize("vocab_size", [777, 32000])
def test_gpu_samples_the_same_tokens_as_the_cpu(vocab_size):
    rows = 200
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    on_cpu = sample(sampler_with("cpu", rows, vocab_size, PARAMS), logits, range(rows), [5] * rows)
    on_gpu = sample(sampler_with("cuda", rows, vocab_size, PARAMS), logits.cuda(), range(rows), [5] * rows)
    # exp differs in its last bit between the two, which changes one token in millions.
    same = [i for i in range(rows) if on_cpu.token_ids[i] == on_gpu.token_ids[i]]
    assert len(same) >= rows - 1
    for i in same:
        a, b = on_cpu.logprobs[i], on_gpu.logprobs[i]
        if a is not None:
            assert (a.token_id, a.rank, list(a.top)) == (b.token_id, b.rank, list(b.top))
            assert [a.logprob, *a.top.values()] == pytest.approx([b.logprob, *b.top.values()], abs=1e-4)


@pytest.mark.parametrize("vocab_size", [777, 32000])
def test_gpu_row_is_sampled_the_same_in_every_batch(vocab_size):
    rows = 120
    logits = torch.randn(rows, vocab_size, device="cuda") * 3
    wanted = sample(sampler_with("cuda", rows, vocab_size, PARAMS), logits, range(rows), [5] * rows)
    for seed in range(8):
        sampler = sampler_with("cuda", rows, vocab_size, PARAMS)  # a new sampler: penalties count earlier samples
        slots = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: 1 + 17 * seed].tolist()
        found = sample(sampler, logits[slots], slots, [5] * len(slots))
        assert found.token_ids.equal(wanted.token_ids[slots])
        assert (found.logprobs or [None] * len(slots)) == [wanted.logprobs[i] for i in slots]


def test_gpu_counts_are_the_same_one_by_one_and_all_at_once():
    logits = torch.randn(1, 500, device="cuda")
    params = SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.2, logprobs=100)
    outputs = [3, 3, 4, 3, 9]
    sampler = Sampler(2, 500, "cuda")
    sampler.set_slot(0, params, 0, [1, 2], outputs)
    sampler.set_slot(1, params, 0, [1, 2], outputs[:2])
    for token in outputs[2:]:
        count_tokens(sampler.counts.values, *torch.tensor([[1], [token]], device="cuda"))
    assert sample(sampler, logits, [0], [7]).logprobs == sample(sampler, logits, [1], [7]).logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"min_p": 0.02},
        {"logit_bias": {5: 4.0}},
        {"top_k": 20, "top_p": 0.95},
        {"top_k": 50, "logit_bias": {5: 4.0}},
        {"top_p": 0.9, "temperature": 0.7},
        {"top_p": 0.99, "temperature": 2.0, "min_p": 0.001},
        {"top_p": 0.99, "temperature": 2.0},  # exceeds the candidates
    ],
    ids=str,
)
def test_gpu_samples_the_same_tokens_as_the_cpu_for_every_logits_dtype(fields, dtype):
    rows, vocab_size = 500, 32000
    logits = (torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    params = [SamplingParams(**fields)]
    on_cpu, on_gpu = (sampler_with(device, rows, vocab_size, params) for device in ("cpu", "cuda"))
    positions = range(rows)
    wanted = sample(on_cpu, logits, range(rows), positions).token_ids
    found = sample(on_gpu, logits.cuda(), range(rows), positions).token_ids.cpu()
    assert (found == wanted).sum() >= rows - 1  # exp differs in its last bit between the two
    assert len(set(found.tolist())) > rows / 4


@pytest.mark.parametrize(
    ("fields", "share"),
    [({}, 0.05), ({"temperature": 0.6, "min_p": 0.02}, 0.05), ({"top_k": 20, "top_p": 0.95}, 1.4)],
    ids=str,
)
def test_gpu_samples_without_a_copy_of_the_logits(fields, share):
    """A copy in float32 or a sort takes 2 or more. After top-k or top-p, there is room for 5/16 of the sort keys."""
    rows, vocab_size = 64, 151936
    sampler = sampler_with("cuda", rows, vocab_size, [SamplingParams(**fields)])
    logits = torch.randn(rows, vocab_size, device="cuda", dtype=torch.bfloat16)
    sample(sampler, logits, range(rows), [4] * rows)  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sample(sampler, logits, range(rows), [5] * rows)
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes * share


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_gpu_step_is_enqueued_without_waiting_for_the_device():
    rows, vocab_size = 64, 32000
    params = [p for p in PARAMS if p.logprobs is None or p.top_p == 1.0 or p.top_k]  # else torch reads a flag
    sampler = sampler_with("cuda", rows, vocab_size, params)
    logits = torch.randn(rows, vocab_size, device="cuda")
    sample(sampler, logits, range(rows), [5] * rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # raises at any call that waits
    try:
        result = sample(sampler, logits, range(rows), [6] * rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(result.logprobs) == rows


@pytest.mark.parametrize(
    "fields",
    [{}, {"top_k": 50}, {"top_p": 0.95}, {"top_k": 20, "top_p": 0.95}, {"min_p": 0.05}, {"presence_penalty": 1.0}],
    ids=str,
)
def test_gpu_step_of_256_rows_takes_milliseconds(fields, capsys):
    rows, vocab_size = 256, 151936
    sampler = sampler_with("cuda", rows, vocab_size, [SamplingParams(**fields)])
    logits = torch.randn(rows, vocab_size, device="cuda") * 3
    logits[:, :100] += 15  # a confident model: its nucleus is small
    taken = []
    for position in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        sample(sampler, logits, range(rows), [position] * rows)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    with capsys.disabled():
        print(f"\n{fields}: {min(taken) * 1000:.2f} ms, peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    assert min(taken) < 0.1

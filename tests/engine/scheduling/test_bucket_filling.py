"""Prompt chunks fill the token bucket of their step: the share of padding in whole runs of the scheduler."""

from __future__ import annotations

import random

import pytest

from engine.protocol.phase import Phase
from engine.scheduling.page_pool import PagePool
from engine.scheduling.request import RequestState
from engine.scheduling.scheduler import Scheduler, SchedulerConfig
from engine.worker.packed_graphs import PackedBuckets
from tests.engine.scheduling.steps import PAGE, add

SEQS = 256


def padding_share(inputs, outputs, *, requests: int, budget: int, mixed: int) -> float:
    """Run random requests, with at most `mixed` decodes in the graph of prompt chunks; return the share of padding."""
    buckets = PackedBuckets(Phase.PREFILL, SEQS, budget, 1, 1, mixed)
    config = SchedulerConfig(
        max_num_seqs=SEQS,
        max_num_batched_tokens=budget,
        max_model_len=1 << 15,
        prefill_buckets=buckets.sizes.sizes,
        max_mixed_decodes=mixed,
    )
    pool = PagePool(1 + requests * (inputs[1] + outputs[1]) // PAGE + requests, PAGE)
    scheduler, numbers = Scheduler(config, pool), random.Random(0)
    for index in range(requests):
        add(scheduler, str(index), numbers.randint(*inputs), numbers.randint(*outputs), arrival=index)
    tokens = computed = 0
    while scheduler.has_work:
        batch = scheduler.schedule()
        decodes, prompt = len(batch.decodes), sum(chunk.length for chunk in batch.prefills)
        assert decodes + prompt <= budget
        if prompt:
            joined = decodes if decodes <= mixed else 0
            bucket = buckets.choose(joined + prompt, joined + len(batch.prefills))
            assert bucket is not None
            tokens, computed = tokens + bucket, computed + joined + prompt
        scheduler.dispatch(batch)
        sampled = [request for request, _ in batch.sampled]
        scheduler.complete(batch, [7] * len(sampled))
        for request in sampled:
            if len(request.token_ids) >= scheduler.token_limit(request):
                scheduler.finish(request, RequestState.FINISHED)
    return 1 - computed / tokens


@pytest.mark.parametrize("budget", [3000, 4096, 8192])
@pytest.mark.parametrize("mixed", [0, 32, 128])
def test_less_than_one_percent_of_a_mixed_load_is_padding(budget, mixed):
    share = padding_share((100, 6000), (32, 400), requests=150, budget=budget, mixed=mixed)
    assert share < 0.01, share  # 0.02 to 0.05 if decodes that run apart took room of the bucket


def test_a_budget_is_the_largest_bucket_that_fits():
    config = SchedulerConfig(
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        max_model_len=8192,
        prefill_buckets=(64, 1024, 2048, 3840, 4096),
        max_mixed_decodes=128,
    )
    assert config.prompt_tokens(0) == 4096
    assert config.prompt_tokens(128) == 4096 - 128  # decodes fill the bucket
    assert config.prompt_tokens(129) == 3840  # they run apart, and the step has room for 3967
    assert config.prompt_tokens(100, drafts=20) == 3840  # so do the rows that verify drafts
    assert config.prompt_tokens(250, drafts=500) == 3346  # 2048 would leave too much of the budget unused


def test_budgets_of_steps_without_graphs_are_not_cut():
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=4096, max_model_len=8192)
    assert [config.prompt_tokens(decodes) for decodes in (0, 100, 200)] == [4096, 3996, 3896]

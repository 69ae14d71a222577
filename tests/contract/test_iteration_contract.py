"""A whole training iteration as one graph, on every backend."""

from __future__ import annotations

import pytest
import torch

from graph_cache.stats import CacheStats
from tests.contract.training_models import MODELS, assert_same, batches, iterate, iteration_of, mlp, twins


@pytest.mark.parametrize("options", [{}, {"inside": True}, {"inside": True, "step_inside": True}],
                         ids=["accumulating", "clearing", "with_optimizer"])
@pytest.mark.parametrize("name", ["mlp", "encoder", "batch_norm"])
def test_a_whole_iteration_equals_eager_bit_for_bit(pool, device, name, options):
    eager, graphed = twins(MODELS[name][0], device)
    data, stats = batches(12, device), CacheStats()
    expected = iterate(eager, data, lambda step: step, **options)
    assert_same(iterate(graphed, data, lambda step: iteration_of(pool, stats, step), **options), expected)
    assert sum(stats.replays.values()) >= 5
    for key, value in eager.state_dict().items():
        assert torch.equal(graphed.state_dict()[key], value), key


def test_another_number_of_microbatches_or_shape_is_never_stale(pool, device):
    eager, graphed = twins(mlp, device)
    stats = CacheStats()
    data = batches(5, device) + batches(4, device, micro=3) + batches(4, device, rows=3) + batches(2, device)
    expected = iterate(eager, data, lambda step: step, inside=True)
    holder = []

    def wrap(step):
        holder.append(iteration_of(pool, stats, step))
        return holder[0]

    assert_same(iterate(graphed, data, wrap, inside=True), expected)
    assert len(holder[0].table()) == 3
    holder[0].clear()
    assert holder[0].table() == []


def test_a_step_that_reads_on_the_host_runs_eager(pool, device):
    eager, graphed = twins(mlp, device)
    stats = CacheStats()

    def make(model):
        def step(x):
            loss = model(x).pow(2).mean()
            loss.backward()
            return torch.tensor(loss.item())
        return step

    torch.manual_seed(1)
    ours, run = [], iteration_of(pool, stats, make(graphed))
    x = batches(1, device)[0][0]
    for _ in range(6):
        ours.append([run(x), *(p.grad.clone() for p in graphed.parameters())])
    torch.manual_seed(1)
    step = make(eager)
    theirs = [[step(x), *(p.grad.clone() for p in eager.parameters())] for _ in range(6)]
    assert stats.failed_captures
    assert not stats.replays
    assert len(ours) == len(theirs)

"""Outstanding microbatches of pipeline schedules: interleaved forwards and backwards of several model chunks.

A chunk takes a tensor that another stage sent and gives the gradient back. Chunks are numbered from 1 in an order; a
negative number is the backward of the oldest outstanding microbatch of that chunk.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.contract.training_models import LENGTH, ROWS, WIDTH, SmallGPT, assert_same, attached, twins

INTERLEAVED = [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]
ORDERS = {
    "last_stage": [1, -1, 1, -1, 1, -1],
    "one_forward_one_backward": [1, 1, 1, -1, 1, -1, 1, -1, 1, -1, -1, -1],
    "all_forwards_first": [1, 1, 1, -1, -1, -1],
    "two_virtual_stages": INTERLEAVED,
}


class Chunks(nn.Module):
    """Model chunks of one stage, two layers each."""

    def __init__(self, count):
        super().__init__()
        self.chunks = nn.ModuleList(SmallGPT() for _ in range(count))


def peaks(order):
    """Return the peak number of outstanding microbatches of each chunk."""
    running, most = dict.fromkeys(map(abs, order), 0), dict.fromkeys(map(abs, order), 0)
    for chunk in order:
        running[abs(chunk)] += 1 if chunk > 0 else -1
        most[abs(chunk)] = max(most[abs(chunk)], running[abs(chunk)])
    return [most[chunk] for chunk in sorted(most)]


def run(model, order, steps, device, rows=ROWS):
    """Return outputs, input gradients and parameter gradients of every step."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    log = []
    for _ in range(steps):
        optimizer.zero_grad()
        outstanding, found = {chunk: [] for chunk in map(abs, order)}, []
        for chunk in order:
            if chunk > 0:
                x = torch.randn(rows, LENGTH, WIDTH, generator=generator).to(device).requires_grad_()
                out = model.chunks[chunk - 1](x)
                outstanding[chunk].append((x, out))
                found.append(out.detach().clone())
            else:
                x, out = outstanding[-chunk].pop(0)
                out.backward(1e-3 * torch.randn(out.shape, generator=generator).to(device))
                found.append(x.grad.clone())
        log.append([*found, *[parameter.grad.clone() for parameter in model.parameters()]])
        optimizer.step()
    return log


def both(order, pool, device, steps=4, warmup=2):
    eager, graphed = twins(lambda: Chunks(max(order)), device)
    paths = [f"chunks.{chunk}.layers.{layer}" for chunk in range(max(order)) for layer in range(2)]
    graphs, stats = attached(graphed, paths, pool, warmup=warmup)
    assert_same(run(graphed, order, steps, device), run(eager, order, steps, device))
    return graphs, stats


@pytest.mark.parametrize("name", ORDERS)
def test_every_schedule_equals_eager_with_a_pair_for_each_outstanding_microbatch(pool, device, name):
    order = ORDERS[name]
    graphs, stats = both(order, pool, device)
    table = graphs.table()
    for chunk, peak in enumerate(peaks(order)):
        for layer in range(2):
            rows = [row for row in table if row["module"] == f"chunks.{chunk}.layers.{layer}"]
            assert len(rows) == peak  # microbatches that don't overlap share static inputs
    assert not [labels for labels in stats.fallbacks if labels[2] not in ("warming_up",)]
    forwards = sum(step > 0 for step in order) * 2 * 4
    assert sum(stats.replays.values()) + sum(stats.fallbacks.values()) == forwards


def test_a_schedule_with_fewer_microbatches_runs_from_the_graphs_of_a_longer_one(pool, device):
    eager, graphed = twins(lambda: Chunks(1), device)
    _, stats = attached(graphed, ["chunks.0.layers.0", "chunks.0.layers.1"], pool)
    log = []
    for model in (graphed, eager):
        log.append(
            [
                *run(model, ORDERS["one_forward_one_backward"], 3, device),
                *run(model, ORDERS["last_stage"], 2, device),
                *run(model, ORDERS["all_forwards_first"], 1, device),
            ]
        )
    assert_same(*log)
    assert {labels[2] for labels in stats.fallbacks} == {"warming_up"}


def test_more_outstanding_microbatches_than_were_recorded_run_eager_beside_the_graphs(pool, device):
    eager, graphed = twins(lambda: Chunks(1), device)
    _, stats = attached(graphed, ["chunks.0.layers.0", "chunks.0.layers.1"], pool)
    log = []
    for model in (graphed, eager):
        log.append([*run(model, [1, 1, -1, -1], 3, device), *run(model, ORDERS["all_forwards_first"], 1, device)])
    assert_same(*log)
    assert stats.fallbacks["chunks.0.layers.0", "forward", "no_free_instance"] == 1


@pytest.mark.parametrize("order", [[1, 1, 1, -1, -1, -1, 2, -2], [1, 2, -2, -1], [2, 1, -1, -2]], ids=str)
def test_a_changed_schedule_gets_additional_graphs_beside_the_first(pool, device, order):
    eager, graphed = twins(lambda: Chunks(2), device)
    paths = [f"chunks.{chunk}.layers.{layer}" for chunk in range(2) for layer in range(2)]
    graphs, stats = attached(graphed, paths, pool)
    log = []
    for model in (graphed, eager):
        log.append(
            [
                *run(model, [1, -1, 2, -2], 3, device),
                *run(model, order, 4, device),
                *run(model, [1, -1, 2, -2], 1, device),
            ]
        )
    assert_same(*log)
    late = [labels for labels in stats.fallbacks if labels[2] != "warming_up"]
    assert all(stats.fallbacks[labels] <= 2 * 2 for labels in late), stats.fallbacks  # in two steps, two calls each
    before = dict(stats.replays)
    assert_same(run(graphed, order, 1, device), run(eager, order, 1, device))
    assert sum(stats.replays.values()) - sum(before.values()) == 2 * sum(step > 0 for step in order)


def test_microbatches_interleaved_layer_by_layer_equal_eager(pool, device):
    eager, graphed = twins(SmallGPT, device)
    graphs, stats = attached(graphed, ["layers.0", "layers.1"], pool)

    def train(model):
        torch.manual_seed(1)
        log = []
        for step in range(4):
            model.zero_grad()
            xs = [torch.full((ROWS, LENGTH, WIDTH), 0.1 * (step + k), device=device) for k in range(2)]
            hidden = [model.layers[0](x) for x in xs]
            hidden = [model.layers[1](x) for x in hidden]
            for out in hidden:  # first in, first out
                out.pow(2).mean().backward()
            log.append([*[out.detach().clone() for out in hidden], *[p.grad.clone() for p in model.parameters()]])
        return log

    assert_same(train(graphed), train(eager))
    assert len(graphs.table()) == 4 and {labels[2] for labels in stats.fallbacks} == {"warming_up"}


def test_a_layer_called_twice_in_one_forward_is_one_microbatch(pool, device):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear(torch.tanh(self.linear(self.linear(x))))

    eager, graphed = twins(Twice, device)
    graphs, stats = attached(graphed, ["linear"], pool)
    xs = [torch.randn(ROWS, WIDTH, device=device) for _ in range(5)]
    log = []
    for model in (graphed, eager):
        found = []
        for x in xs:
            model.zero_grad()
            out = model(x)
            out.pow(2).mean().backward()
            found.append([out.detach().clone(), *[p.grad.clone() for p in model.parameters()]])
        log.append(found)
    assert_same(*log)
    assert len(graphs.table()) == 3 and {labels[2] for labels in stats.fallbacks} == {"warming_up"}

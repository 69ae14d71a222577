"""Optimizers that step inside a captured iteration: changes are noticed, and few graphs are kept."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from graph_cache.core.stats import CacheStats
from tests.contract.training_models import WIDTH, assert_same, iteration_of, twins


def two():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def step_of(model, optimizer_now):
    """Return a training step that uses the optimizer returned by `optimizer_now()`."""

    def step(x):
        optimizer_now().zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer_now().step()
        return loss.detach()

    return step


def run_iterations(model, wrap, change, device, make=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)):
    optimizer = make(model.parameters())
    run, log, saved = wrap(step_of(model, lambda: optimizer)), [], None
    for index in range(12):
        if index == 4:
            saved = {
                "state": {
                    k: {n: v.clone() for n, v in one.items()} for k, one in optimizer.state_dict()["state"].items()
                },
                "param_groups": optimizer.state_dict()["param_groups"],
            }
        if index == 7:
            change(optimizer, saved)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).to(device)
        log.append([run(x).clone(), *[parameter.detach().clone() for parameter in model.parameters()]])
    return log


def other_rate(optimizer, saved):
    optimizer.param_groups[0]["lr"] = 0.01


def earlier_state(optimizer, saved):
    optimizer.load_state_dict(saved)


def one_parameter_fewer(optimizer, saved):
    del optimizer.param_groups[0]["params"][0]


@pytest.mark.parametrize("change", [other_rate, earlier_state, one_parameter_fewer])
def test_optimizer_changes_inside_an_iteration_are_noticed(pool, device, change, caplog):
    eager, graphed = twins(two, device)
    stats = CacheStats()
    log = [
        run_iterations(graphed, lambda step: iteration_of(pool, stats, step), change, device),
        run_iterations(eager, lambda step: step, change, device),
    ]
    assert_same(*log)
    assert sum(stats.captures.values()) == 2 and sum(stats.replays.values()) >= 3
    assert ("belongs in a tensor" in caplog.text) == (change is not earlier_state)


def test_a_learning_rate_in_a_tensor_changes_without_another_graph(pool, device):
    eager, graphed = twins(two, device)
    stats = CacheStats()
    if device.type == "cpu":
        pytest.skip("PyTorch's optimizers read a learning rate in a tensor on the host there")

    def adam(parameters):
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.1, device=device), capturable=True)

    change = lambda optimizer, saved: optimizer.param_groups[0]["lr"].fill_(0.01)  # noqa: E731
    log = [
        run_iterations(graphed, lambda step: iteration_of(pool, stats, step), change, device, adam),
        run_iterations(eager, lambda step: step, change, device, adam),
    ]
    assert_same(*log)
    assert sum(stats.captures.values()) == 1


def test_a_recreated_optimizer_replaces_the_old_one_and_its_graph(pool, device):
    eager, graphed = twins(two, device)
    stats, log = CacheStats(), []
    for model in (graphed, eager):
        now, found = {}, []
        step = step_of(model, lambda now=now: now["optimizer"])
        run = iteration_of(pool, stats, step) if model is graphed else step
        for index in range(18):
            if index % 6 == 0:
                now["optimizer"] = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
                gc.collect()
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).to(device)
            found.append([run(x).clone(), *[parameter.detach().clone() for parameter in model.parameters()]])
        log.append(found)
        if model is graphed:
            assert len(run.table()) == 1
    assert_same(*log)
    assert sum(stats.replays.values()) >= 3 * 2


def test_a_changing_learning_rate_keeps_at_most_a_few_graphs(pool, device):
    _, graphed = twins(two, device)
    stats = CacheStats()
    optimizer = torch.optim.SGD(graphed.parameters(), 0.1)
    run = iteration_of(pool, stats, step_of(graphed, lambda: optimizer))
    for index in range(40):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + index // 4)
        run(torch.ones(4, WIDTH, device=device))
    assert sum(stats.captures.values()) == 10 and len(run.table()) == 4

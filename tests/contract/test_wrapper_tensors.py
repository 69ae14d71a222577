"""Sparse tensors, wrappers of other tensors (which have no address), and host tensors: no graph reads stale ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from graph_cache.core.stats import CacheStats
from graph_cache.training.call import lacks_memory
from graph_cache.training.reasons import ELSEWHERE, NO_MEMORY
from tests.contract.training_models import WIDTH, attached, iteration_of, twins


def pair(step, device, requires_grad=False):
    generator = torch.Generator().manual_seed(step)
    both = [torch.randn(4, WIDTH, generator=generator).to(device) for _ in range(2)]
    return TwoTensor(*both).requires_grad_(requires_grad)


def parts(value):
    return [value.a.clone(), value.b.clone()]


def test_calls_with_wrapper_tensors_run_eager_between_replays(pool, device):
    eager, graphed = twins(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), device)
    _, stats = attached(graphed, ["0", "2"], pool)
    for step in range(8):
        plain = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 + step)).to(device)
        found = []
        for model in (eager, graphed):
            model.zero_grad()
            model(plain).pow(2).sum().backward()
            made = model(pair(step, device))
            found.append([*[parameter.grad.clone() for parameter in model.parameters()], *parts(made.detach())])
        assert all(map(torch.equal, *found)), f"step {step}"
    assert stats.fallbacks["0", "forward", NO_MEMORY] == stats.fallbacks["2", "forward", NO_MEMORY] == 8
    assert sum(stats.replays.values()) > 0 and not stats.failed_captures


@pytest.mark.parametrize("scale", [1.0, torch.ones(())], ids=["a_number", "a_tensor"])
def test_an_iteration_reads_the_wrapper_tensors_of_the_current_call(pool, device, scale):
    eager, graphed = twins(lambda: nn.Linear(WIDTH, WIDTH), device)

    def step_of(model):
        def step(x, scale):
            model.zero_grad()
            made = model(x) * scale
            loss = made.a.pow(2).sum() + made.b.sum()
            return loss.detach()

        return step

    stats = CacheStats()
    run, alone = iteration_of(pool, stats, step_of(graphed)), step_of(eager)
    scale = scale.to(device) if isinstance(scale, torch.Tensor) else scale
    for step in range(7):
        assert torch.equal(run(pair(step, device), scale), alone(pair(step, device), scale)), f"step {step}"
    assert sum(stats.replays.values()) >= 2 and not stats.failed_captures


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return torch.sparse.mm(x, self.weight)


def test_sparse_arguments_run_eager_correctly(pool, device):
    eager, graphed = twins(Sparse, device)
    _, stats = attached(graphed, [""], pool)
    whole = iteration_of(pool, stats, lambda x: graphed(x).pow(2).sum().detach())
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        x = (torch.randn(4, WIDTH, generator=generator) * (torch.rand(4, WIDTH, generator=generator) < 0.3)).to(device)
        found = []
        for model in (eager, graphed):
            model.zero_grad()
            loss = model(x.to_sparse()).pow(2).sum()
            loss.backward()
            found.append([loss.detach(), model.weight.grad.clone()])
        assert all(map(torch.equal, *found)), f"step {step}"
        assert torch.equal(whole(x.to_sparse()), found[0][0])
    assert stats.fallbacks["model", "forward", NO_MEMORY] == 6 + 6  # the iteration runs the module too
    assert stats.fallbacks["iteration", "full_iteration", NO_MEMORY] == 6
    assert not stats.replays


def test_a_sparse_argument_at_the_start_of_a_step_does_not_block_other_modules(pool, device):
    torch.manual_seed(0)
    model = nn.ModuleList([Sparse(), nn.Linear(WIDTH, WIDTH)]).to(device)
    _, stats = attached(model, ["0", "1"], pool)
    x = torch.eye(WIDTH, device=device).to_sparse()
    for _ in range(6):
        model.zero_grad()
        model[1](model[0](x)).pow(2).sum().backward()
    assert stats.fallbacks["0", "forward", NO_MEMORY] == 6
    assert sum(stats.replays.values()) == 4


class Scaled(nn.Linear):
    def forward(self, x, scale):
        return super().forward(x) * scale


def test_a_number_in_a_tensor_on_the_host_is_never_stale(pool, device):
    eager, graphed = twins(lambda: Scaled(WIDTH, WIDTH), device)
    _, stats = attached(graphed, [""], pool)
    whole = iteration_of(pool, stats, lambda x, scale: (eager(x, scale)).sum().detach())
    x = torch.ones(4, WIDTH, device=device)
    for step in range(6):
        scale, found = torch.tensor(float(step)), []
        for model in (eager, graphed):
            model.zero_grad()
            model(x, scale).pow(2).sum().backward()
            found.append(model.weight.grad.clone())
        assert torch.equal(*found), f"step {step}"
        with torch.no_grad():
            assert torch.equal(whole(x, scale), eager(x, scale).sum()), f"step {step}"
    on_host = 0 if device.type == "cpu" else 6
    assert stats.fallbacks["model", "forward", ELSEWHERE] == stats.fallbacks["iteration", "full_iteration", ELSEWHERE]
    assert stats.fallbacks["model", "forward", ELSEWHERE] == on_host
    assert bool(stats.replays) is not bool(on_host)


def test_an_attached_model_can_be_exported(pool, device):
    eager, graphed = twins(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), device)
    attached(graphed, ["0"], pool)
    x = torch.ones(2, WIDTH, device=device)
    assert torch.equal(torch.export.export(graphed, (x,)).module()(x), eager(x))


def test_an_empty_tensor_has_memory(device):
    assert lacks_memory(pair(0, device)) and not lacks_memory(torch.empty(0, device=device))


def test_a_module_that_returns_a_sparse_tensor_runs_eager(pool, device):
    class ToSparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return (x * self.weight).to_sparse()

    eager, graphed = twins(ToSparse, device)
    _, stats = attached(graphed, [""], pool)
    for step in range(5):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        for model in (eager, graphed):
            model.zero_grad()
            model(x).to_dense().pow(2).sum().backward()
        assert torch.equal(graphed.weight.grad, eager.weight.grad)
    assert not stats.replays and sum(stats.failed_captures.values()) == 1

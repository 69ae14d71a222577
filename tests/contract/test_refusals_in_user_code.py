"""Refusals that code catches, tensors that are given twice, and state that an optimizer or a class changes late."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from graph_cache.core.buffers import BufferSpec
from graph_cache.core.cache import GraphCache
from graph_cache.core.stats import CacheStats
from tests.contract.training_models import WIDTH, assert_same, attached, iteration_of


class CatchesRefusals(nn.Linear):
    def forward(self, x):
        try:
            scale = 2.0 if x.sum().item() > 0 else 1.0
        except Exception:
            scale = 1.0
        return super().forward(x) * scale


class Compares(nn.Linear):
    def forward(self, x, y):
        return super().forward(x) * (2.0 if x is y else 1.0) + y


def steps(model, inputs, wrap=lambda step: step):
    def step(*args):
        model.zero_grad()
        loss = model(*args).square().mean()
        loss.backward()
        return loss.detach()

    run, found = wrap(step), []
    for args in inputs:
        found.append([run(*args), *(parameter.grad.clone() for parameter in model.parameters())])
    return found


def data(device, number=8):
    generator = torch.Generator().manual_seed(1)
    signs = [-1.0 if index < number // 2 else 1.0 for index in range(number)]
    return [(sign * torch.rand(4, WIDTH, generator=generator)).to(device) for sign in signs]


@pytest.mark.parametrize("api", ["attach", "iteration"])
def test_code_that_catches_a_refused_read_runs_eager(pool, device, api):
    eager = CatchesRefusals(WIDTH, WIDTH).to(device)
    graphed, inputs, stats = copy.deepcopy(eager), [(x,) for x in data(device)], CacheStats()
    if api == "attach":
        graphs, stats = attached(graphed, [""], pool)
        ours = steps(graphed, inputs)
    else:
        ours = steps(graphed, inputs, lambda step: iteration_of(pool, stats, step))
    assert_same(ours, steps(eager, inputs))
    assert stats.failed_captures and not stats.replays


@pytest.mark.parametrize("api", ["attach", "iteration"])
def test_one_tensor_as_two_arguments_stays_one(pool, device, api):
    eager = Compares(WIDTH, WIDTH).to(device)
    graphed, stats = copy.deepcopy(eager), CacheStats()
    inputs = [(x, x) for x in data(device)] + [(x, x.clone()) for x in data(device)] + [(x, x) for x in data(device)]
    if api == "attach":
        graphs, stats = attached(graphed, [""], pool)
        ours = steps(graphed, inputs)
    else:
        ours = steps(graphed, inputs, lambda step: iteration_of(pool, stats, step))
    assert_same(ours, steps(eager, inputs))
    assert stats.replays.total() >= 6


def test_a_cached_function_that_gets_one_tensor_twice_runs_eager(pool, device):
    cache = GraphCache(device=device, pool=pool)
    spec = BufferSpec(("batch", WIDTH), torch.float32)
    run = cache.graphed("add", lambda a, b: a * (3.0 if a is b else 1.0) + b, {"a": spec, "b": spec}, buckets=(4,))
    with torch.inference_mode():
        for x in data(device):
            assert torch.equal(run(a=x, b=x), 3 * x + x)
            assert torch.equal(run(a=x, b=x.clone()), x + x)
    assert {reason for *_, reason in cache.stats.fallbacks} >= {"repeated_tensor"} and cache.stats.replays.total() >= 4


def test_hooks_of_an_optimizer_that_are_added_later_run(pool, device):
    def build():
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, WIDTH).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return model, optimizer, step

    def halve(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    results = []
    for captured in (False, True):
        model, optimizer, step = build()
        run = iteration_of(pool, CacheStats(), step) if captured else step
        losses = []
        for index, x in enumerate(data(device, 12)):
            if index == 6:
                optimizer.register_step_pre_hook(halve)
            losses.append(run(x))
        results.append([[*losses, *(parameter.detach().clone() for parameter in model.parameters())]])
    assert_same(results[1], results[0])


def test_a_step_whose_model_changes_its_class_keeps_its_results(pool, device):
    class Doubles(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    eager = nn.Linear(WIDTH, WIDTH).to(device)
    graphed, results = copy.deepcopy(eager), []
    for model, wrap in ((eager, lambda step: step), (graphed, lambda step: iteration_of(pool, CacheStats(), step))):

        def step(x, model=model):
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        run, losses = wrap(step), []
        for index, x in enumerate(data(device, 12)):
            if index == 6:
                model.__class__ = Doubles
            losses.append(run(x))
        results.append([losses])
    assert_same(results[1], results[0])


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_forward_mode_derivatives_in_a_step_run_eager(pool, device):
    model = nn.Linear(WIDTH, WIDTH).to(device)

    def step(x):
        _, tangent = torch.func.jvp(lambda value: torch.tanh(model(value)), (x,), (torch.ones_like(x),))
        return tangent.detach()

    run = iteration_of(pool, CacheStats(), step)
    for x in data(device, 6):
        assert torch.equal(run(x), step(x))

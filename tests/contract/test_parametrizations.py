"""Parametrized weights, also within `parametrize.cached()`: captured calls never read a stale weight."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from graph_cache.backends import backend_for
from graph_cache.core.buffers import BufferSpec
from graph_cache.core.cache import GraphCache
from graph_cache.core.pool import GraphPool
from graph_cache.core.stats import CacheStats
from tests.contract.training_models import attached, iteration_of

WIDTH, STEPS = 8, 8


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def symmetric(linear):
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


class Refused(nn.Module):
    """Reads a value of a tensor, so that its capture is refused after the weight was computed."""

    def __init__(self):
        super().__init__()
        self.linear = symmetric(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        y = self.linear(x)
        return y if y.sum().item() == y.sum().item() else x


KINDS = {
    "symmetric": lambda: symmetric(nn.Linear(WIDTH, WIDTH)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "refused": Refused,
}
# The steps within `cached()`. The third one captures.
WHEN = {
    "never": lambda step: 0,
    "always": lambda step: 1,
    "while it captures": lambda step: step == 2,
    "in replays": lambda step: step > 2,
    "every other step": lambda step: step % 2,
    "nested": lambda step: 2,
}


def build(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), KINDS[kind](), nn.Tanh(), KINDS[kind]())


def train(kind, when, api, captures, stats):
    """Return losses, gradients and weights of steps with two calls before the backward."""
    model, log = build(kind), []
    pool = GraphPool(backend_for(torch.device("cpu")))

    def step(first, second):
        loss = model(first).pow(2).mean() + model(second).pow(2).mean()
        loss.backward()
        return loss.detach()

    call = step
    if captures and api == "iteration":
        stats.append(CacheStats())
        call = iteration_of(pool, stats[0], step)
    elif captures:
        stats.append(attached(model, ["1", "3"], pool)[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index in range(STEPS):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(index)
        data = [torch.randn(4, WIDTH, generator=generator) for _ in range(2)]
        with contextlib.ExitStack() as stack:
            for _ in range(WHEN[when](index)):
                stack.enter_context(parametrize.cached())
            log.append(call(*data).clone())
        log += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
    return log + [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("api", ["attach", "iteration"])
@pytest.mark.parametrize(
    ("kind", "when"),
    [(kind, "never") for kind in KINDS]
    + [("symmetric", when) for when in WHEN if when != "never"]
    + [("spectral_norm", "every other step"), ("refused", "always"), ("refused", "while it captures")],
)
def test_parametrized_weights_are_as_in_eager(kind, when, api):
    stats = []
    found = train(kind, when, api, True, stats)
    wanted = train(kind, when, api, False, [])
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    reasons = {reason for _, _, reason in stats[0].fallbacks}
    assert ("cached_parametrization" in reasons) == (when != "never")
    if kind != "refused" and when in ("never", "while it captures"):
        assert sum(stats[0].replays.values()) > 0


@pytest.mark.parametrize("first", [0, 1])
def test_a_function_called_within_cached_reads_the_cached_weight(first):
    log = []
    for captures in (True, False):
        model = build("symmetric").eval()
        call = model
        if captures:
            cache = GraphCache(pool=GraphPool(backend_for(torch.device("cpu"))))
            specs = {"x": BufferSpec(("batch", WIDTH), torch.float32)}
            call = cache.graphed("model", lambda x, model=model: model(x), specs, buckets=(4,), watch=model)
        log.append([])
        for index in range(6):
            with torch.inference_mode(), parametrize.cached() if index % 2 == first else contextlib.nullcontext():
                for number in range(2):
                    x = torch.ones(4, WIDTH)
                    log[-1].append(call(x).clone())
                    model[1].parametrizations.weight.original.mul_(1.0 + number)
    assert all(map(torch.equal, *log))

"""Several backwards of one forward (`retain_graph=True`): as in eager at any step, also if the capture saw only one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graph_cache.errors import GraphError
from tests.contract.training_models import attached

WIDTH, STEPS = 8, 10


def network():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def inputs(step, number, device):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + number)).to(device)


def gan(first, second, step, doubled, device):
    fake = first(inputs(step, 0, device))
    loss = second(inputs(step, 1, device)).pow(2).mean() - second(fake).pow(2).mean()
    loss.backward(retain_graph=doubled)
    if doubled:
        second.zero_grad()
        (second(fake).pow(2).mean() if step % 2 else loss * 0.5).backward()


def pcgrad(first, second, step, doubled, device):
    y = second(first(inputs(step, 0, device)))
    losses = [y[:2].pow(2).mean(), y[2:].abs().mean()]
    if doubled:
        trained = [*first.parameters(), *second.parameters()]
        grads = [torch.autograd.grad(losses[0], trained, retain_graph=True)]
        grads.append(torch.autograd.grad(losses[1], trained))
        for parameter, one, other in zip(trained, *grads, strict=True):
            parameter.grad = one + other * 0.5
    else:
        sum(losses).backward()


def grad_then_backward(first, second, step, doubled, device):
    y = first(inputs(step, 0, device))
    loss = second(y).pow(2).mean()
    scale = torch.autograd.grad(loss, y, retain_graph=True)[0].norm() if doubled else 1.0
    (loss * scale).backward()


def always_retained(first, second, step, doubled, device):
    first.loss = second(first(inputs(step, 0, device))).pow(2).mean()
    first.loss.backward(retain_graph=True)


def after_the_next_forward(first, second, step, doubled, device):
    loss = second(first(inputs(step, 0, device))).pow(2).mean()
    loss.backward(retain_graph=doubled)
    if getattr(first, "earlier", None) is not None:
        first.earlier.backward()
    first.earlier = loss if doubled else None


LOOPS = {loop.__name__: loop for loop in (gan, pcgrad, grad_then_backward, always_retained, after_the_next_forward)}


@pytest.mark.parametrize("since", [0, 5])
@pytest.mark.parametrize("name", LOOPS)
def test_a_second_backward_is_as_in_eager(name, since, pool, device):
    logs, replays = [], 0
    for captures in (True, False):
        torch.manual_seed(0)
        networks, log = [network().to(device), network().to(device)], []
        found = [attached(one, ["0", "2"], pool) for one in networks] if captures else []
        for step in range(STEPS):
            for one in networks:
                one.zero_grad()
            LOOPS[name](*networks, step, step >= since, device)
            for one in networks:
                log += [torch.zeros(1) if p.grad is None else p.grad.clone() for p in one.parameters()]
        logs.append(log)
        replays += sum(sum(stats.replays.values()) for _, stats in found)
        for graphs, _ in found:
            graphs.detach()
    assert all(map(torch.equal, *logs)) and replays > 0


def test_without_saved_tensors_a_backward_may_run_again_as_in_eager(pool):
    model = nn.Sequential(nn.Identity())
    graphs, stats = attached(model, ["0"], pool)
    for _ in range(5):
        x = torch.ones(4, WIDTH, device=pool.backend.device, requires_grad=True)
        y = model(x)
        for _ in range(2):
            y.backward(torch.ones_like(y))
        assert x.grad.eq(2).all()
    graphs.detach()


def test_a_second_backward_that_eager_refuses_too_says_what_to_set(pool):
    model = network().to(pool.backend.device)
    graphs, _ = attached(model, ["0", "2"], pool)
    for _ in range(4):
        loss = model(torch.ones(4, WIDTH, device=pool.backend.device)).pow(2).mean()
        loss.backward(retain_graph=False)
    with pytest.raises((GraphError, RuntimeError), match="retain_graph=True"):
        loss.backward()
    graphs.detach()

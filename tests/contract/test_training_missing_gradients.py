"""Gradients that a replay could miss: of tensors outside the module, and gradients of gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graph_cache.errors import GraphError
from tests.contract.training_models import WIDTH, assert_same, attached, twins

STEPS = 8


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softplus(), nn.Linear(WIDTH, 1))


def data(device, steps=STEPS):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, WIDTH, generator=generator).to(device) for _ in range(steps)]


def run(model, loss_of, device, trained=None):
    """Train, and return each step's loss and gradients (zeros where there is none)."""
    parameters = list(model.parameters()) if trained is None else trained(model)
    optimizer, log = torch.optim.SGD(parameters, lr=0.05, momentum=0.9), []
    for step, x in enumerate(data(device)):
        optimizer.zero_grad()
        loss = loss_of(model, x, step)
        loss.backward()
        log.append(
            [loss.detach().clone(), *[torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]]
        )
        optimizer.step()
    return log


# ---- gradients of gradients --------------------------------------------------------------------------------------


def penalty(model, x):
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (grad.norm(dim=1) - 1).pow(2).mean()


GRADIENTS_OF_GRADIENTS = {
    "penalty": lambda model, x, step: model(x).mean() + 10 * penalty(model, x),
    "forces": lambda model, x, step: penalty(model, x),
    "now_and_then": lambda model, x, step: model(x).mean() + (10 * penalty(model, x) if step % 3 == 0 else 0),
}


@pytest.mark.parametrize("paths", [[""], ["0", "1", "2"]], ids=["whole", "layers"])
@pytest.mark.parametrize("loss", GRADIENTS_OF_GRADIENTS)
def test_calls_whose_gradients_are_differentiated_again_run_eager(pool, device, loss, paths):
    eager, graphed = twins(mlp, device)
    _, stats = attached(graphed, paths, pool)
    assert_same(run(graphed, GRADIENTS_OF_GRADIENTS[loss], device), run(eager, GRADIENTS_OF_GRADIENTS[loss], device))
    assert all("create_graph=True" in reason for reason in stats.failures.values()) and stats.failures
    assert sum(stats.fallbacks[path or "model", "forward", "capture_failed"] for path in paths) > 0
    if loss == "penalty":
        assert stats.replays or paths != [""]  # calls with a plain backward replay


def test_a_gradient_differentiated_again_after_the_capture_raises_once_and_then_runs_eager(pool, device):
    eager, graphed = twins(mlp, device)
    graphs, stats = attached(graphed, [""], pool)
    x = data(device, 1)[0]

    def first_order(model):
        inputs = x.clone().requires_grad_()
        model(inputs).sum().backward()

    for _ in range(4):
        first_order(graphed)
    assert stats.replays
    with pytest.raises(GraphError, match="create_graph=True"):
        penalty(graphed, x)
    graphed.zero_grad()
    for model in (graphed, eager):
        penalty(model, x).backward()
    assert_same(
        [[p.grad for p in graphed.parameters() if p.grad is not None]],
        [[p.grad for p in eager.parameters() if p.grad is not None]],
    )
    penalty(graphed, x)  # graphs are dropped between steps, and an autograd thread may have ended the failed one late
    assert sum(stats.failed_captures.values()) == 1 and not graphs.table()


# ---- trainable tensors that are not declared ---------------------------------------------------------------------


class Head(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.bias, self.tied = nn.Parameter(torch.zeros(WIDTH)), tied

    def forward(self, x):
        return F.linear(x, self.tied[0], self.bias)


class TiedByReference(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.head = Head([self.embed.weight])

    def forward(self, x):
        return self.head(torch.tanh(self.embed(x)))


class OwnReference(nn.Linear):
    """Keeps one of its own parameters in a list, too."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.weights = [self.weight]

    def forward(self, x):
        return F.linear(x, self.weights[0], self.bias)


class LeafAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scales = (torch.ones(WIDTH, requires_grad=True),)

    def _apply(self, fn, recurse=True):
        self.scales = tuple(fn(scale.detach()).requires_grad_() for scale in self.scales)
        return super()._apply(fn, recurse)

    def forward(self, x):
        return self.linear(x) * self.scales[0]


class Modulated(nn.Module):
    """A block whose scale another network computes before each call."""

    def __init__(self):
        super().__init__()
        self.net, self.block = nn.Linear(WIDTH, WIDTH), self.Block(WIDTH, WIDTH)

    class Block(nn.Linear):
        gamma = None

        def forward(self, x):
            return super().forward(x) * self.gamma

    def forward(self, x):
        self.block.gamma = self.net(x.mean(0))
        return self.block(x)


UNDECLARED = {
    "tied": (TiedByReference, ["head"], None),
    "own_list": (OwnReference, [""], None),
    "leaf": (LeafAttribute, [""], lambda model: [*model.parameters(), *model.scales]),
    "computed": (Modulated, ["block"], None),
}


@pytest.mark.parametrize("case", UNDECLARED)
def test_trainable_tensors_that_are_neither_parameters_nor_arguments_keep_a_module_eager(pool, device, case):
    build, paths, trained = UNDECLARED[case]
    eager, graphed = twins(build, device)
    _, stats = attached(graphed, paths, pool)
    loss_of = lambda model, x, step: model(x).pow(2).mean()  # noqa: E731
    assert_same(run(graphed, loss_of, device, trained), run(eager, loss_of, device, trained))
    assert sum(stats.failed_captures.values()) == 1 and not stats.replays
    assert "neither its parameters nor arguments" in next(iter(stats.failures.values()))


class Masked(nn.Linear):
    def __init__(self, as_buffer):
        super().__init__(WIDTH, WIDTH)
        if as_buffer:
            self.register_buffer("mask", torch.ones(WIDTH))
        else:
            self.mask = torch.ones(WIDTH)

    def _apply(self, fn, recurse=True):
        if "mask" in vars(self):
            self.mask = fn(self.mask)
        return super()._apply(fn, recurse)

    def forward(self, x):
        return super().forward(x) * self.mask


@pytest.mark.parametrize("as_buffer", [False, True], ids=["attribute", "buffer"])
def test_a_tensor_that_is_trained_from_some_step_on_gets_its_gradient(pool, device, as_buffer):
    eager, graphed = twins(lambda: Masked(as_buffer), device)
    _, stats = attached(graphed, [""], pool)

    def loss_of(model, x, step):
        if step == 4:
            model.mask.requires_grad_()
        return model(x).pow(2).mean()

    trained = lambda model: [*model.parameters(), model.mask]  # noqa: E731
    assert_same(run(graphed, loss_of, device, trained), run(eager, loss_of, device, trained))
    assert stats.replays and "neither its parameters nor arguments" in next(iter(stats.failures.values()))

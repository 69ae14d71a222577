"""What happens between a captured forward and its backward, and the Python state that a backward reads and changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.contract.training_models import WIDTH, assert_same, attached, twins

STEPS, CHANGED = 10, 6
SCALE = 1.0
CALLS = 0


class Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1


class ScalesGradient(Copies):
    @staticmethod
    def backward(ctx, grad):
        return grad * SCALE


class CountsBackwards(Copies):
    @staticmethod
    def backward(ctx, grad):
        global CALLS
        CALLS += 1
        return grad * CALLS


class InFunction(nn.Linear):
    def forward(self, x):
        return ScalesGradient.apply(super().forward(x))


class InHook(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * SCALE)
        return y.square()


class Counts(nn.Linear):
    def forward(self, x):
        return CountsBackwards.apply(super().forward(x))


def job(model, device):
    log = []
    globals().update(SCALE=1.0, CALLS=0)
    for index in range(STEPS):
        globals()["SCALE"] = 1.0 + index // CHANGED
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).to(device)
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        log.append([loss.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
    return log, CALLS


@pytest.mark.parametrize("kind", [InFunction, InHook])
def test_a_change_of_what_a_backward_reads_is_noticed(pool, device, kind):
    eager, graphed = twins(lambda: kind(WIDTH, WIDTH), device)
    _, stats = attached(graphed, [""], pool)
    assert_same(job(graphed, device)[0], job(eager, device)[0])
    assert sum(stats.replays.values()) >= 2


def test_a_backward_that_counts_runs_eager_and_counts_once_a_step(pool, device):
    eager, graphed = twins(lambda: Counts(WIDTH, WIDTH), device)
    _, stats = attached(graphed, [""], pool)
    (found, calls), (wanted, _) = job(graphed, device), job(eager, device)
    assert_same(found, wanted)
    assert calls == STEPS and not stats.replays and "changes CALLS" in stats.failures["model"]


def scaled_weight(model, x, y):
    with torch.no_grad():
        model[2].weight.mul_(2)


WRITES = {
    "output": lambda model, x, y: y.mul_(2),
    "input": lambda model, x, y: x.mul_(2),
    "weight": scaled_weight,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_backward_refuses_what_was_written_in_place_since_the_forward(pool, device, name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid()).to(device)
    _, stats = attached(model, [""], pool)
    for index in range(STEPS):
        x = torch.randn(4, WIDTH, device=device)
        y = model(x)
        if index == CHANGED:
            WRITES[name](model, x, y)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.square().sum().backward()
        else:
            y.square().sum().backward()
    assert sum(stats.replays.values()) >= 2


def test_writes_to_what_no_backward_needs_are_allowed(pool, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(device)
    _, stats = attached(model, [""], pool)
    for _ in range(STEPS):
        y = model(torch.randn(4, WIDTH, device=device))
        with torch.no_grad():
            model[0].bias.mul_(0.5)
        y.sum().backward()
    assert sum(stats.replays.values()) >= 2


def test_a_checkpoint_is_computed_again_in_backwards_only(pool, device):
    """Spectral norm updates a buffer in each forward, also in those of a backward."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

        def forward(self, x):
            return checkpoint(self.linear, x, use_reentrant=False, preserve_rng_state=False)

    eager, graphed = twins(Checkpointed, device)
    _, stats = attached(graphed, [""], pool)
    assert_same(job(graphed, device)[0], job(eager, device)[0])
    assert_same([list(graphed.buffers())], [list(eager.buffers())])
    assert sum(stats.replays.values()) >= 2

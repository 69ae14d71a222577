"""Megatron's `main_grad`: a hook or the module's backward accumulates gradients in a float32 buffer per parameter.

Graphed training leaves the same bits there as eager training.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.contract.training_models import MANY, WIDTH, attached, batches, in_place, twins

STEPS = 10


class AddsItself(torch.autograd.Function):
    """Linear map. Its backward adds the weight's gradient to main_grad and returns a dummy gradient or None."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.main_grad = weight.main_grad
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.main_grad.add_(grad.flatten(0, -2).t().float() @ x.flatten(0, -2).float())
        if not hasattr(weight, "grad_added_to_main_grad"):
            return grad @ weight, None
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.empty_like(weight)


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return AddsItself.apply(self.norm(x), self.weight)


def fused():
    return nn.Sequential(Fused(), nn.GELU(), Fused()).bfloat16()


def plain():
    block = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(nn.Sequential(*block), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())).bfloat16()


def eight_plain():
    """Eight equal blocks: gradients of the first ones are copies, the others are returned uncopied."""
    return nn.Sequential(
        *[nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(8)]
    ).bfloat16()


def eight_fused():
    return nn.Sequential(*[Fused() for _ in range(8)]).bfloat16()


EIGHT = [str(index) for index in range(8)]


def with_main_grads(model, flag):
    """Add a buffer per parameter and a hook on each grad accumulator, as Megatron's DistributedDataParallel does."""
    accumulators, seen = [], []
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, device=parameter.device)
        if flag:
            parameter.grad_added_to_main_grad = False
        accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]

        def hook(*_, parameter=parameter):
            added = getattr(parameter, "grad_added_to_main_grad", False)
            seen.append((added, parameter.grad is not None))
            if parameter.grad is not None and not added:
                parameter.main_grad.add_(parameter.grad.data)
            parameter.grad = None

        accumulator.register_hook(hook)
        accumulators.append(accumulator)
    return accumulators, seen


def train(model, data):
    """Train with two microbatches per step. Returns losses and every main_grad."""
    torch.manual_seed(1)
    log = []
    for micro in data:
        for parameter in model.parameters():
            parameter.main_grad.zero_()
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = False
        losses = [model(x.bfloat16()).float().pow(2).mean() for x in micro]
        for loss in losses:
            loss.backward()
        log.append(
            [
                *[loss.detach().clone() for loss in losses],
                *[parameter.main_grad.clone() for parameter in model.parameters()],
            ]
        )
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is None
                parameter.sub_(0.05 * parameter.main_grad)
    return log


def assert_same(ours, theirs):
    for step, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        assert all(map(torch.equal, left, right)), f"step {step}"


@pytest.mark.parametrize("flag", [True, False], ids=["flagged", "unflagged"])
@pytest.mark.parametrize(
    ("build", "paths", "copied"),
    [
        (plain, ["0", "1"], 0),
        (fused, ["0", "2"], 1),
        (eight_plain, EIGHT, 4),
        (eight_fused, EIGHT, 4),
    ],
    ids=["hook_adds", "fused", "hook_adds_to_eight", "eight_fused"],
)
def test_main_grads_equal_eagers_bit_for_bit(pool, device, build, paths, copied, flag):
    eager, graphed = twins(build, device)
    keep = [with_main_grads(model, flag) for model in (eager, graphed)]
    data = batches(STEPS, device, rows=MANY)
    expected = train(eager, data)
    graphs, stats = attached(graphed, paths, pool)
    assert_same(train(graphed, data), expected)
    assert sum(stats.replays.values()) == (STEPS - 2) * 2 * len(paths)
    assert not stats.failed_captures
    assert in_place(graphs)[: len(paths)] == [index >= copied for index in range(len(paths))]
    assert keep[1][1] == keep[0][1]  # the hooks ran as often, and saw the same flags and dummies
    graphs.detach()


@pytest.mark.parametrize(("build", "paths"), [(fused, ["0", "2"]), (eight_fused, EIGHT)], ids=["fused", "eight_fused"])
def test_a_main_grad_that_moved_is_noticed(pool, device, build, paths):
    eager, graphed = twins(build, device)
    keep = [with_main_grads(model, True) for model in (eager, graphed)]
    graphs, stats = attached(graphed, paths, pool)
    data = batches(4, device)
    assert_same(train(graphed, data), train(eager, data))
    graphed[0].weight.main_grad = torch.zeros_like(graphed[0].weight.main_grad)
    assert_same(train(graphed, data), train(eager, data))
    assert stats.invalidations == {"stale_address": 1}
    assert keep[1][1] == keep[0][1]

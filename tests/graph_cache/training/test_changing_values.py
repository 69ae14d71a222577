"""A value that changes at every call is named, and how often it changed."""

from __future__ import annotations

import torch
from torch import nn

from engine import Engine, EngineConfig


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, number, *, weight=1.0):
        return self.linear(x) * (weight + number)


def failure_after(calls):
    with Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2)) as engine:
        model = Weighted()
        engine.attach(model)
        for args, kwargs in calls:
            model(torch.randn(2, 4), *args, **kwargs).sum().backward()
        (row,) = engine.graphs()
        return row["failure"]


def test_an_argument_that_changes_at_every_call_is_named():
    assert "argument 1 (int) changed in 3 of 4 calls" in failure_after(((number,), {}) for number in range(4))
    assert "weight (float) changed in 3 of 4" in failure_after(((1,), {"weight": n / 8}) for n in range(4))


def test_arguments_that_stay_or_alternate_in_captured_calls_are_not_named():
    assert failure_after(((1,), {"weight": 0.5}) for _ in range(8)) == ""
    assert failure_after(((number % 2,), {}) for number in range(8)) == ""


def test_a_learning_rate_that_changes_inside_an_iteration_is_named():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    with Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2)) as engine:
        step = engine.capture_iteration(train, device="cpu")
        for number in range(8):
            step(torch.randn(2, 4))
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 2)
        (row,) = engine.graphs()
    assert "a setting of an optimizer inside, such as its learning rate, changed in 3 of" in row["failure"]

"""Several networks in one training engine and one pool, such as an actor and a critic."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.training.engine import TrainingEngine

WIDTH, STEPS = 8, 8


def network():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


@pytest.fixture
def engine():
    with TrainingEngine(EngineConfig(mode="training", cuda_graph_warmup_steps=2)) as engine:
        yield engine


def train(actor, critic, steps=STEPS):
    """Train an actor against a critic, and the critic; return all gradients."""
    log = []
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (actor, critic)]
    for step in range(steps):
        state = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        (-critic(actor(state)).mean()).backward()
        log += [parameter.grad.clone() for parameter in actor.parameters()]
        optimizers[0].step()
        optimizers[1].zero_grad()
        (critic(state) - 1.0).pow(2).mean().backward()
        log += [parameter.grad.clone() for parameter in critic.parameters()]
        optimizers[1].step()
    return log


def replays(engine, name):
    return next(row["replays"] for row in engine.graphs() if row["module"] == name)


def forward_is_replaced(model):
    return "forward" in vars(model)


@pytest.mark.parametrize("paths", [[""], ["0", "2"]], ids=["whole", "parts"])
def test_two_networks_replay_in_one_pool_and_equal_eager(engine, paths):
    torch.manual_seed(0)
    wanted = train(network(), network())
    torch.manual_seed(0)
    actor, critic = network(), network()
    names = engine.attach(actor, paths)
    pool = engine.pool
    others = engine.attach(critic, paths)
    found = train(actor, critic)
    assert all(map(torch.equal, found, wanted))
    assert not set(names) & set(others) and engine.pool is pool
    assert all(replays(engine, name) for name in (*names, *others))


def test_detach_of_one_network_leaves_the_other(engine):
    actor, critic = network(), network()
    (name,), _ = engine.attach(actor), engine.attach(critic)
    train(actor, critic)
    engine.detach(critic)
    before = replays(engine, name)
    assert forward_is_replaced(actor) and not forward_is_replaced(critic)
    train(actor, critic)
    assert replays(engine, name) > before
    engine.attach(critic)
    engine.detach()
    assert not forward_is_replaced(actor) and not forward_is_replaced(critic)


@pytest.mark.parametrize("second", ["", "0"])
def test_a_module_is_attached_once(engine, second):
    model = network()
    engine.attach(model)
    with pytest.raises(ConfigError, match=r"already attached.*detach"):
        engine.attach(model, [second])
    assert forward_is_replaced(model)  # the first one stays


def test_parts_that_contain_an_attached_module_are_refused(engine):
    model = network()
    engine.attach(model, ["0"])
    with pytest.raises(ConfigError, match="modules in common with 0"):
        engine.attach(model)
    assert engine.attach(model, ["2"]) == ["2"]


def test_detach_of_an_unknown_model_says_so(engine):
    with pytest.raises(ConfigError, match="not attached"):
        engine.detach(network())


def test_a_network_that_calls_another_runs_it_as_part_of_its_capture(engine):
    class Critic(nn.Module):
        def __init__(self, actor):
            super().__init__()
            self.linear, self.held = nn.Linear(WIDTH, WIDTH), [actor]

        def forward(self, x):
            return self.linear(x) + self.held[0](x).detach()

    torch.manual_seed(0)
    actors, critics = [network(), network()], []
    actors[1].load_state_dict(actors[0].state_dict())
    for actor in actors:
        torch.manual_seed(1)
        critics.append(Critic(actor))
    engine.attach(actors[0])
    engine.attach(critics[0])
    assert all(map(torch.equal, train(actors[0], critics[0]), train(actors[1], critics[1])))

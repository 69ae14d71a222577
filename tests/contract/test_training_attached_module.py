"""What other code may do with an attached module: inspect, pickle, wrap and transform it."""

from __future__ import annotations

import functools
import gc
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

from engine import Engine, EngineConfig
from tests.contract.training_models import WIDTH, attached, twins


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, scale: float = 1.0):
        return self.second(torch.tanh(self.first(x))) * scale


def warmed(device, pool, paths=("",)):
    """Return an eager model, the same attached with graphs, and an input."""
    eager, graphed = twins(Model, device)
    graphs, stats = attached(graphed, list(paths), pool)
    x = torch.randn(4, WIDTH, device=device)
    for _ in range(4):
        graphed(x).sum().backward()
        graphed.zero_grad()
    assert stats.replays
    return eager, graphed, graphs, stats, x


def test_the_signature_stays_visible(pool, device):
    eager, graphed, graphs, _, _ = warmed(device, pool)
    assert inspect.signature(graphed.forward) == inspect.signature(eager.forward)
    assert graphed.forward.__name__ == "forward"
    graphs.detach()
    assert "forward" not in vars(graphed)


@pytest.mark.parametrize("save", ["pickle", "torch_save"])
def test_a_pickled_model_is_not_attached(pool, device, save):
    eager, graphed, _, stats, x = warmed(device, pool)
    if save == "pickle":
        loaded = pickle.loads(pickle.dumps(graphed))
    else:
        file = io.BytesIO()
        torch.save(graphed, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    before = sum(stats.replays.values())
    assert torch.equal(loaded(x), eager(x))
    assert loaded.forward.__self__ is loaded and sum(stats.replays.values()) == before


def functional_gradients(model, x):
    parameters = dict(model.named_parameters())
    loss = lambda given: torch.func.functional_call(model, given, (x,)).pow(2).mean()  # noqa: E731
    return list(torch.func.grad(loss)(parameters).values())


def forward_mode(model, x):
    with torch.autograd.forward_ad.dual_level():
        out = model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        return [torch.autograd.forward_ad.unpack_dual(out).tangent.clone()]


TRANSFORMS = {
    "grad": functional_gradients,
    "vmap": lambda model, x: [torch.func.vmap(model)(x.unsqueeze(1))],
    "jvp": lambda model, x: list(torch.func.jvp(model, (x,), (torch.ones_like(x),))),
    "vjp": lambda model, x: [torch.func.vjp(model, x)[0]],
    "jacrev": lambda model, x: [torch.func.jacrev(model)(x)],
    "forward_mode": forward_mode,
    "trace": lambda model, x: [torch.jit.trace(model, (x,), check_trace=False)(x)],
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_run_eager(pool, device, name):
    eager, graphed, _, stats, x = warmed(device, pool)
    found, expected = TRANSFORMS[name](graphed, x), TRANSFORMS[name](eager, x)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert stats.fallbacks["model", "forward", "transform"] >= 1


def test_a_wrapper_over_an_attached_module_survives_detach(pool, device):
    eager, graphed, graphs, stats, x = warmed(device, pool)
    original, calls = graphed.forward, []

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    graphed.forward = wrapper
    graphs.detach()
    before = sum(stats.replays.values())
    assert torch.equal(graphed(x), eager(x)) and calls == [1]
    assert graphed.forward is wrapper and sum(stats.replays.values()) == before


def test_a_module_without_parameters_can_be_attached():
    engine = Engine(EngineConfig(mode="training", cuda_graph_warmup_steps=2))
    model = nn.Sequential(nn.Tanh(), nn.Softplus())
    engine.attach(model)
    x = torch.randn(4, WIDTH, requires_grad=True)
    for _ in range(4):
        model(x).sum().backward()
    assert sum(row["replays"] for row in engine.graphs()) > 0
    engine.detach()


class Unused(Model):
    """A parameter without influence on the result."""

    def forward(self, x, scale: float = 1.0):
        with torch.no_grad():
            shift = self.second(x)
        return self.first(x) * scale + shift


def test_hooks_of_parameters_without_a_gradient_do_not_run(pool, device):
    _, graphed = twins(Unused, device)
    _, stats = attached(graphed, [""], pool)
    seen = []
    for name, parameter in graphed.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.append((name, grad is None)))
    for _ in range(4):
        graphed(torch.randn(4, WIDTH, device=device)).sum().backward()
    assert stats.replays and set(seen) == {("first.weight", False), ("first.bias", False)}
    assert graphed.second.weight.grad is None


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH)

    def forward(self, x):
        return self.cell(x)[0]


@pytest.mark.parametrize("calls_before", [0, 1, 2, 3])
def test_a_capture_keeps_tensors_put_into_the_weights_of_a_recurrent_module(pool, device, calls_before):
    eager, graphed = twins(Cell, device)
    attached(graphed, [""], pool, warmup=1)
    for call in range(8):
        if call == calls_before:
            for model in (eager, graphed):
                weights = model.cell._flat_weights
                weights[0] = (weights[0].detach() + 1).requires_grad_()
        x = torch.randn(3, 2, WIDTH, device=device)
        found = []
        for model in (graphed, eager):
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            found.append([loss.detach(), *[parameter.grad for parameter in model.parameters()]])
        for ours, theirs in zip(*found, strict=True):
            assert (ours is None and theirs is None) or torch.equal(ours, theirs)


class Pair(Model):
    def forward(self, x, scale: float = 1.0):
        x = self.first(x)
        return x, x.square().mean()


class Squashed(Model):
    """Its derivative is computed from its result."""

    def forward(self, x, scale: float = 1.0):
        return torch.tanh(self.first(x))


@pytest.mark.parametrize("warmup", [1, 2])
@pytest.mark.parametrize("kind", [Pair, Squashed])
def test_a_gradient_of_a_gradient_equals_eager_while_warming_up(pool, device, kind, warmup):
    eager, graphed = twins(kind, device)
    attached(graphed, [""], pool, warmup=warmup)
    for seed in range(2):
        found = []
        for model in (eager, graphed):
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_()
            result = model(x)
            first, second = result if kind is Pair else (result, result.square().mean())
            loss = first.sin().sum() + second
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + grad.square().sum()).backward()
            found.append([x.grad, *[parameter.grad for parameter in model.parameters() if parameter.grad is not None]])
        for wanted, got in zip(*found, strict=True):
            assert torch.equal(got, wanted)


class Helper:
    def __init__(self, weight):
        self.weight = weight

    def scaled(self, x):
        return x * self.weight


class WithHelper(Model):
    """Reads a parameter through an object that is no module, as Megatron's Mamba mixer does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.helper = Helper(self.weight)

    def forward(self, x):
        return self.first(self.helper.scaled(x))


def test_a_parameter_that_a_helper_object_holds_is_trained(pool, device):
    torch.manual_seed(0)
    models = [WithHelper(), WithHelper()]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model.to(device)
        assert model.helper.weight is model.weight
    _, stats = attached(models[1], [""], pool)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(6):
        x = torch.randn(4, WIDTH, device=device)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        assert torch.equal(models[0].weight, models[1].weight)
    assert stats.replays and models[1].helper.weight is models[1].weight


def test_a_replaced_weight_of_a_recurrent_module_is_trained(pool, device):
    """The references to the former weight are dead when the next capture begins."""
    eager, graphed = twins(Cell, device)
    attached(graphed, [""], pool, warmup=1)
    logs = []
    for model in (graphed, eager):
        generator, log = torch.Generator().manual_seed(3), []
        for call in range(7):
            if call == 3:
                model.cell.weight_ih_l0 = nn.Parameter(torch.ones(3 * WIDTH, WIDTH, device=device) * 0.1)
                gc.collect()
            parameters = list(model.parameters())
            model.zero_grad()
            loss = model(torch.randn(3, 2, WIDTH, generator=generator).to(device)).square().mean()
            loss.backward()
            assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
            log.append([loss.detach(), *[parameter.grad.clone() for parameter in parameters]])
        logs.append(log)
    for ours, theirs in zip(*logs, strict=True):
        assert all(map(torch.equal, ours, theirs))

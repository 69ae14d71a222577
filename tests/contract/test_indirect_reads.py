"""Python state that code reads by other ways than its name: captured calls equal eager when it changes."""

from __future__ import annotations

import builtins
import contextvars
import dataclasses
import functools
import operator
import os
import types
import weakref

import numpy
import pytest
import torch
from torch import nn

from graph_cache.core.stats import CacheStats
from tests.contract import test_python_state_reads as reads
from tests.contract.test_iteration_optimizers import run_iterations
from tests.contract.training_models import WIDTH, attached, iteration_of, twins

FORMAT = "{0.scale:.2f}"
VARIABLE = "CONTRACT_TEST_PLACE"


@dataclasses.dataclass
class Point:
    scale: float = 1.0


class Other(Point):
    @property
    def doubled(self):
        return 4.0


class Raising:
    """Raises for an absent attribute, but no AttributeError."""

    def __init__(self):
        self.held = {"scale": 1.0}

    def __getattr__(self, name):
        return self.held[name]


class Prefixed(Point):
    def __getattribute__(self, name):
        return object.__getattribute__(self, "sc" + name)


@functools.cache
def cached_dictionary():
    return {"scale": 1.0}


@functools.lru_cache(maxsize=2)
def cached_object():
    return Point()


DEFAULT: contextvars.ContextVar[list[float]] = contextvars.ContextVar("default", default=[1.0])  # noqa: B039


def by_name(point):
    match point:
        case Point(scale=found):
            return found
    return 0.0


def by_position(point):
    match point:
        case Point(found):
            return found
    return 0.0


def from_text():
    variables = {"scale": 1.0}
    exec("def read():\n    return scale", variables)
    return variables["read"]


def wrapper():
    factor = [1.0]

    @functools.wraps(torch.relu)
    def scaled(x):
        return torch.relu(x) * factor[0]

    scaled.factor = factor
    return scaled


def named_in_closure():
    point, name = Point(), "scale"
    return types.SimpleNamespace(read=lambda: getattr(point, name), point=point)


def foreign(**buffers):
    module = nn.Module()
    for name, value in buffers.items():
        module.register_buffer(name, value)
    return [module]


def set_scale(model):
    model.place.scale = 2.0


# How a forward reads a number or tensor from `model.place`, what is there first, and the change.
PLACES = {
    "field of a format": (Point, lambda model: float(FORMAT.format(model.place)), set_scale),
    "pattern with names": (Point, lambda model: by_name(model.place), set_scale),
    "pattern by position": (Point, lambda model: by_position(model.place), set_scale),
    "name in a closure": (
        named_in_closure,
        lambda model: model.place.read(),
        lambda model: setattr(model.place.point, "scale", 2.0),
    ),
    "names that are keys": (
        lambda: (Point(), {"scale": 1}),
        lambda model: sum(getattr(model.place[0], name) for name in model.place[1]),
        lambda model: setattr(model.place[0], "scale", 2.0),
    ),
    "dir": (
        lambda: types.SimpleNamespace(scale=1.0),
        lambda model: sum(getattr(model.place, name) for name in dir(model.place) if name[0] != "_"),
        set_scale,
    ),
    "__getattribute__": (Prefixed, lambda model: model.place.ale, lambda model: vars_of(model.place).update(scale=2.0)),
    "__getattr__ that raises KeyError": (
        Raising,
        lambda model: model.place.scale,
        lambda model: model.place.held.update(scale=2.0),
    ),
    "result in a cache": (
        cached_dictionary.cache_clear,
        lambda model: cached_dictionary()["scale"],
        lambda model: cached_dictionary().update(scale=2.0),
    ),
    "result in a bounded cache": (
        cached_object.cache_clear,
        lambda model: cached_object().scale,
        lambda model: setattr(cached_object(), "scale", 2.0),
    ),
    "global of code from text": (
        from_text,
        lambda model: model.place(),
        lambda model: model.place.__globals__.update(scale=2.0),
    ),
    "wrapper of a function of torch": (
        wrapper,
        lambda model: model.place(torch.ones(1)),
        lambda model: model.place.factor.__setitem__(0, 2.0),
    ),
    "default of a context variable": (
        lambda: DEFAULT.get().__setitem__(0, 1.0),
        lambda model: DEFAULT.get()[0],
        lambda model: DEFAULT.get().__setitem__(0, 2.0),
    ),
    "environment under another name": (
        lambda: os.environ.update({VARIABLE: "1.0"}) or os.environ,
        lambda model: float(model.place[VARIABLE]),
        lambda model: model.place.update({VARIABLE: "2.0"}),
    ),
    "attribute of a partial": (
        lambda: functools.partial(float),
        lambda model: getattr(model.place, "scale", 1.0),
        set_scale,
    ),
    "class of an object": (
        Point,
        lambda model: getattr(model.place, "doubled", 2.0),
        lambda model: setattr(model.place, "__class__", Other),
    ),
    "shape of an array": (
        lambda: numpy.ones((2, 3)),
        lambda model: float(model.place.shape[0]),
        lambda model: setattr(model.place, "shape", (3, 2)),
    ),
    "object of numpy": (
        lambda: numpy.poly1d([1.0, 2.0]),
        lambda model: float(model.place(2.0)),
        lambda model: model.place.__setitem__(0, 3.0),
    ),
    "object in a weak set": (
        lambda: setattr(reads.TARGET, "scale", 1.0) or weakref.WeakSet([reads.TARGET]),
        lambda model: sum(one.scale for one in model.place),
        lambda model: setattr(reads.TARGET, "scale", 2.0),
    ),
    "function of builtins": (
        lambda: globals().pop("abs", None),
        lambda model: float(abs(-1)),
        lambda model: globals().update(abs=lambda value: 2 * builtins.abs(value)),
    ),
    "buffer that was None": (
        lambda: foreign(table=None)[0],
        lambda model: 1.0 if model.place.table is None else 2.0,
        lambda model: setattr(model.place, "table", torch.ones(1)),
    ),
    "buffer of another module": (
        lambda: foreign(table=torch.ones(1)),
        lambda model: model.place[0].table * 2,
        lambda model: setattr(model.place[0], "table", torch.full((1,), 2.0)),
    ),
    "weight of another module": (
        lambda: [nn.Linear(1, 1).requires_grad_(False)],
        lambda model: model.place[0](torch.ones(1)),
        lambda model: setattr(model.place[0].weight, "data", torch.full((1, 1), 2.0)),
    ),
    "length of another module's buffer": (
        lambda: foreign(table=torch.ones(1)),
        lambda model: float(len(model.place[0].table)),
        lambda model: setattr(model.place[0], "table", torch.ones(2)),
    ),
    "shape of a tensor": (
        lambda: [torch.ones(1)],
        lambda model: float(model.place[0].shape[0]),
        lambda model: model.place.__setitem__(0, torch.ones(2)),
    ),
    "requires_grad of a tensor": (
        lambda: [torch.ones(1)],
        lambda model: 2.0 if model.place[0].requires_grad else 1.0,
        lambda model: model.place[0].requires_grad_(),
    ),
}


def vars_of(value):
    return object.__getattribute__(value, "__dict__")


def run_with(make, read, change, api, captures, pool, device, stats):
    before, reads.Model = reads.Model, reads.model_that_reads(make, read)
    try:
        return reads.job(api, change, captures, pool, device, stats)
    finally:
        reads.Model = before
        globals().pop("abs", None)
        os.environ.pop(VARIABLE, None)


@pytest.mark.parametrize("api", ["module", "iteration", "function"])
@pytest.mark.parametrize("name", PLACES)
def test_a_change_of_what_is_read_indirectly_is_noticed(pool, name, api):
    device, stats = torch.device("cpu"), []
    if pool.backend.device != device:
        pytest.skip("the places hold tensors of the host")
    found, wanted = (run_with(*PLACES[name], api, captures, pool, device, stats) for captures in (True, False))
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    assert sum(stats[0].replays.values()) >= 1


def endless(point):
    while True:
        yield point.scale


def endless_of_point():
    point = Point()
    return types.SimpleNamespace(generator=endless(point), point=point)


REFUSED = {
    "is not compared": (
        lambda: (operator.attrgetter("scale"), Point()),
        lambda model: model.place[0](model.place[1]),
        lambda model: setattr(model.place[1], "scale", 2.0),
    ),
    "iterator": (
        endless_of_point,
        lambda model: next(model.place.generator),
        lambda model: setattr(model.place.point, "scale", 2.0),
    ),
}


@pytest.mark.parametrize("api", ["module", "iteration", "function"])
@pytest.mark.parametrize("reason", REFUSED)
def test_what_only_c_code_reads_keeps_a_call_eager(pool, reason, api):
    device, stats = pool.backend.device, []
    found, wanted = (run_with(*REFUSED[reason], api, captures, pool, device, stats) for captures in (True, False))
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    assert not stats[0].replays and reason in next(iter(stats[0].failures.values()))


# ---- iterations ------------------------------------------------------------------------------------------------------


class Scaled(torch.optim.Optimizer):
    """SGD with settings beside those of its groups."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.factor, self.table = 1.0, {"scale": 1.0}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                factor = self.factor * self.table["scale"] * self.state[parameter].get("factor", 1.0)
                parameter.sub_(parameter.grad * group["lr"] * factor)


def set_numbers_of_state(optimizer, saved):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["factor"] = 0.5


OPTIMIZER_CHANGES = {
    "attribute": lambda optimizer, saved: setattr(optimizer, "factor", 0.5),
    "dictionary": lambda optimizer, saved: optimizer.table.update(scale=0.5),
    "numbers in the state": set_numbers_of_state,
    "rate": lambda optimizer, saved: optimizer.param_groups[0].update(lr=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZER_CHANGES)
def test_state_of_an_optimizer_beside_its_groups_is_watched(pool, device, name):
    ours, reference = twins(lambda: nn.Linear(WIDTH, WIDTH), device)
    stats, change = CacheStats(), OPTIMIZER_CHANGES[name]
    found = run_iterations(ours, lambda step: iteration_of(pool, stats, step), change, device, Scaled)
    wanted = run_iterations(reference, lambda step: step, change, device, Scaled)
    assert all(torch.equal(a, b) for one, two in zip(found, wanted, strict=True) for a, b in zip(one, two, strict=True))
    assert sum(stats.replays.values()) >= 3


def iterate(model, step, wrap, change, device):
    run, log = wrap(step), []
    for index in range(12):
        if index == 7:
            change()
        model.zero_grad()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).to(device)
        log.append([run(x).detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
    return log


def test_the_closure_of_a_gradient_hook_is_watched(pool, device):
    def run(model, wrap):
        factors = [1.0]
        model.weight.register_hook(lambda gradient: gradient * factors[0])

        def step(x):
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        return iterate(model, step, wrap, lambda: factors.__setitem__(0, 2.0), device)

    ours, reference = twins(lambda: nn.Linear(WIDTH, WIDTH), device)
    stats = CacheStats()
    found = run(ours, lambda step: iteration_of(pool, stats, step))
    assert_same_logs(found, run(reference, lambda step: step))
    assert sum(stats.replays.values()) >= 3


def test_the_gradient_of_a_tensor_that_the_step_does_not_train_is_not_baked_in(pool, device):
    def run(model, wrap):
        other = nn.Parameter(torch.ones(1, device=device))

        def step(x):
            loss = model(x).pow(2).mean() * (1.0 if other.grad is None else other.grad.sum())
            loss.backward()
            return loss

        def change():
            other.grad = torch.full((1,), 2.0, device=device)

        return iterate(model, step, wrap, change, device)

    ours, reference = twins(lambda: nn.Linear(WIDTH, WIDTH), device)
    stats = CacheStats()
    found = run(ours, lambda step: iteration_of(pool, stats, step))
    assert_same_logs(found, run(reference, lambda step: step))
    assert sum(stats.replays.values()) >= 3
    assert "gradient" in next(iter(stats.failures.values()))


def assert_same_logs(found, wanted):
    assert len(found) == len(wanted)
    assert all(torch.equal(a, b) for one, two in zip(found, wanted, strict=True) for a, b in zip(one, two, strict=True))


# ---- attached modules ------------------------------------------------------------------------------------------------


class ReturnsWeight(nn.Linear):
    def forward(self, x):
        return super().forward(x), self.weight.t()


def test_a_result_that_is_a_view_of_a_parameter_changes_with_it(pool, device):
    def run(model):
        log = []
        for index in range(6):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).to(device)
            result, weight = model(x)
            (result.pow(2).mean() + weight.pow(2).mean()).backward()
            with torch.no_grad():
                model.weight.sub_(model.weight.grad)
            log.append([result.detach().clone(), weight.detach().clone()])
            model.zero_grad()
        return log

    ours, reference = twins(lambda: ReturnsWeight(WIDTH, WIDTH), device)
    graphs, stats = attached(ours, [""], pool)
    assert_same_logs(run(ours), run(reference))
    assert sum(stats.replays.values()) >= 3
    graphs.detach()

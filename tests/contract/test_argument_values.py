"""Arguments that compare equal and compute differently, and what code reads of a tensor argument besides its values."""

from __future__ import annotations

import dataclasses
import decimal
import random

import numpy
import pytest
import torch
from torch import manual_seed, nn

from graph_cache.core.stats import CacheStats
from tests.contract.training_models import WIDTH, assert_same, attached, iteration_of, twins

STEPS, CHANGED = 12, 6


@dataclasses.dataclass
class Partly:
    compared: float
    scale: float = dataclasses.field(default=1.0, compare=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: object


class Text(str):
    pass


def text(scale):
    found = Text("a")
    found.scale = scale
    return found


def sign(value):
    return 1.0 if numpy.copysign(1, value) > 0 else 3.0


def is_int(value):
    return 1.0 if isinstance(value, int) else 3.0


# Two arguments that compare equal, and the number that a forward computes from them.
EQUAL = {
    "-0.0": (0.0, -0.0, sign),
    "-0.0 of NumPy": (numpy.float64(0), numpy.float64(-0.0), sign),
    "complex -0.0": (complex(0, 0), complex(0, -0.0), lambda value: sign(value.imag)),
    "1 and True": (1, True, lambda value: 1.0 if value is True else 3.0),
    "frozenset": (frozenset([1]), frozenset([1.0]), lambda value: is_int(next(iter(value)))),
    "range": (range(0, 3, 2), range(0, 4, 2), lambda value: float(value.stop)),
    "Decimal": (decimal.Decimal("1.0"), decimal.Decimal("1.00"), lambda value: float(len(str(value)))),
    "field that is not compared": (Partly(1.0, 1.0), Partly(1.0, 3.0), lambda value: value.scale),
    "-0.0 in a dataclass": (Frozen(0.0), Frozen(-0.0), lambda value: sign(value.value)),
    "1 and 1.0 in a dataclass": (Frozen(1), Frozen(1.0), lambda value: is_int(value.value)),
    "attribute of a str": (text(1.0), text(3.0), lambda value: value.scale),
}


class Scaled(nn.Linear):
    def __init__(self, number):
        super().__init__(WIDTH, WIDTH)
        self.number = number

    def forward(self, x, value):
        return super().forward(x) * self.number(value)


def job(api, model, arguments, captures, pool, device):
    """Return the losses and gradients of all steps with `arguments(x, index)`, and the statistics."""
    log, stats = [], CacheStats()

    def step(*args):
        model.zero_grad()
        loss = model(*args).square().mean()
        loss.backward()
        return loss

    call = step
    if captures and api == "module":
        graphs, stats = attached(model, [""], pool)
    elif captures:
        call = iteration_of(pool, stats, step)
    for index in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).to(device)
        loss = call(*arguments(x, index))
        log.append([loss.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
    return log, stats


def compare(api, make, arguments, pool, device):
    """Assert that captured steps equal eager ones, and return the statistics."""
    eager, graphed = twins(make, device)
    wanted, _ = job(api, eager, arguments, False, pool, device)
    found, stats = job(api, graphed, arguments, True, pool, device)
    assert_same(found, wanted)
    return stats


@pytest.mark.parametrize("api", ["module", "iteration"])
@pytest.mark.parametrize("name", EQUAL)
def test_arguments_that_compare_equal_and_compute_differently_are_told_apart(pool, device, name, api):
    before, after, number = EQUAL[name]
    assert before == after
    arguments = lambda x, index: (x, before if index < CHANGED else after)  # noqa: E731
    stats = compare(api, lambda: Scaled(number), arguments, pool, device)
    assert sum(stats.replays.values()) >= 2


@pytest.mark.parametrize("value", [2.0, lambda x: 2.0 * x], ids=["number", "function"])
def test_equal_objects_made_anew_for_every_call_share_graphs(pool, device, value):
    def number(frozen):
        return frozen.value(1.0) if callable(frozen.value) else frozen.value

    stats = compare("module", lambda: Scaled(number), lambda x, _: (x, Frozen(value)), pool, device)
    assert sum(stats.replays.values()) >= STEPS - 4


class Facts(nn.Linear):
    """Multiplies by a number that it finds out about its tensor arguments."""

    def __init__(self, number):
        super().__init__(WIDTH, WIDTH)
        self.number = number

    def forward(self, *tensors):
        return super().forward(tensors[0]) * self.number(*tensors)


def with_gain(x, index):
    x.gain = 1.0 + index // CHANGED
    return (x,)


def in_a_larger_tensor(x, index):
    return (x if index < CHANGED else torch.cat([x, x])[len(x) :],)


def parameter(x, index):
    ones = torch.ones(WIDTH, device=x.device)
    return x, ones if index < CHANGED else nn.Parameter(ones, requires_grad=False)


NOTICED = {
    "attribute": (lambda x: getattr(x, "gain", 1.0), with_gain),
    "parameter": (lambda x, other: 2.0 if isinstance(other, nn.Parameter) else 1.0, parameter),
}
REFUSED = {
    "storage_offset": (lambda x: 1.0 + x.storage_offset(), in_a_larger_tensor),
    "is_leaf": (
        lambda x: 2.0 if x.is_leaf else 1.0,
        lambda x, index: (x.requires_grad_() if index < CHANGED else x.requires_grad_() * 1,),
    ),
    "grad_fn": (
        lambda x: 2.0 if getattr(x, "grad_fn") is None else 1.0,  # noqa: B009
        lambda x, index: (x.requires_grad_() if index < CHANGED else x.requires_grad_() * 1,),
    ),
    "_base": (
        lambda x: 1.0 if x._base is None else 2.0,  # noqa: SLF001
        lambda x, index: (x if index < CHANGED else x.view(4, WIDTH),),
    ),
}


@pytest.mark.parametrize("name", NOTICED)
def test_properties_of_a_tensor_argument_are_part_of_the_signature(pool, device, name):
    number, arguments = NOTICED[name]
    stats = compare("module", lambda: Facts(number), arguments, pool, device)
    assert sum(stats.replays.values()) >= 2


@pytest.mark.parametrize("name", REFUSED)
def test_code_that_reads_where_a_tensor_comes_from_runs_eager(pool, device, name):
    number, arguments = REFUSED[name]
    stats = compare("module", lambda: Facts(number), arguments, pool, device)
    assert not stats.replays and f"reads {name} of a tensor" in stats.failures["model"]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("api", ["module", "iteration"])
def test_a_quantized_argument_runs_eager(pool, device, api):
    if device.type != "cpu":
        pytest.skip("PyTorch quantizes on a CPU")

    class Adds(nn.Linear):
        def forward(self, x, quantized):
            return super().forward(x) + quantized.dequantize()

    def arguments(x, index):
        return x, torch.quantize_per_tensor(torch.ones(WIDTH), 0.1 * (1 + index // CHANGED), 0, torch.quint8)

    stats = compare(api, lambda: Adds(WIDTH, WIDTH), arguments, pool, device)
    assert not stats.replays and any(key[-1] == "argument_without_memory" for key in stats.fallbacks)


GENERATOR = torch.Generator()
SEEDS = {
    "random": lambda: random.seed(1),
    "numpy": lambda: numpy.random.seed(1),
    "generator": lambda: GENERATOR.manual_seed(1),
    "torch": lambda: torch.manual_seed(1),
    "by a name": lambda: manual_seed(1),
}


@pytest.mark.parametrize("api", ["module", "iteration"])
@pytest.mark.parametrize("name", SEEDS)
def test_code_that_seeds_a_generator_runs_eager_also_if_it_has_that_seed(pool, device, name, api):
    class Seeds(nn.Linear):
        def forward(self, x):
            SEEDS[name]()
            return super().forward(x)

    SEEDS[name]()
    stats = compare(api, lambda: Seeds(WIDTH, WIDTH), lambda x, _: (x,), pool, device)
    assert not stats.replays and "calls seed or manual_seed" in next(iter(stats.failures.values()))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("api", ["module", "iteration"])
def test_code_that_calls_a_higher_order_operator_runs_eager(pool, device, api):
    class Branches(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return torch.cond(y.sum() > 0, lambda y: y * 2, lambda y: y * 3, (y,))

    stats = compare(api, lambda: Branches(WIDTH, WIDTH), lambda x, _: (x,), pool, device)
    assert not stats.replays

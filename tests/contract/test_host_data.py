"""Host data of every kind and size that a captured call reads: a change is noticed, or the call runs eager."""

from __future__ import annotations

import array
import collections
import configparser
import ctypes
import dataclasses
import functools
import mmap
import multiprocessing
import operator
import queue
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

from graph_cache.backends import backend_for
from graph_cache.core.buffers import BufferSpec
from graph_cache.core.cache import GraphCache
from graph_cache.core.pool import GraphPool
from graph_cache.core.stats import CacheStats
from tests.contract.training_models import attached, iteration_of

APIS = ("module", "iteration", "function")
WIDTH, STEPS, CHANGED = 8, 7, 5
SMALL, LARGE, HUGE = 600, 5000, 100_000


class Program(NamedTuple):
    """What a forward reads from a place, and the change of the place between two calls."""

    make: Callable[[], Any]
    read: Callable[[Any], float] = lambda place: float(place[len(place) - 1])
    change: Callable[[Any], Any] = lambda place: operator.setitem(place, len(place) - 1, 2)


class Reader(nn.Linear):
    """Scales its result by what it reads from `place`."""

    def __init__(self, program: Program):
        super().__init__(WIDTH, WIDTH)
        self.place, self.read = program.make(), program.read

    def forward(self, x):
        return super().forward(x) * self.read(self.place)


def run(
    program: Program, api: str, captures: bool, pool: GraphPool, replaces: bool = False
) -> tuple[list[torch.Tensor], CacheStats | None]:
    """Return the results and gradients of all steps, and the counters.

    The place changes in itself, or with `replaces`, a changed one takes its place.
    """
    torch.manual_seed(0)
    model, stats, log = Reader(program), None, []
    call: Callable[[torch.Tensor], torch.Tensor] = model

    def step(x):
        model.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    if captures and api == "module":
        _, stats = attached(model, [""], pool)
    elif captures and api == "function":
        cache = GraphCache(pool=pool)
        specs, stats = {"x": BufferSpec(("batch", WIDTH), torch.float32)}, cache.stats
        call = cache.graphed("model", lambda x: model(x), specs, buckets=(4,), watch=model)
    elif api == "iteration":
        stats = CacheStats()
        call = iteration_of(pool, stats, step) if captures else step
    for index in range(STEPS):
        if index == CHANGED:
            place = program.make() if replaces else model.place
            program.change(place)
            model.place = place
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))
        with torch.inference_mode(api == "function"):
            out = call(x)
        if api == "module":
            out.pow(2).mean().backward()
        log.append(out.detach().clone())
        log += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
    return log, stats


@dataclasses.dataclass
class Box:
    values: Any


class Fields(ctypes.Structure):
    _fields_ = [("scale", ctypes.c_double)]


def with_scale(kind, *args):
    """Return a container of a subclass of `kind` with an attribute."""
    value = type(f"My{kind.__name__}", (kind,), {})(*args)
    value.scale = 1.0
    return value


def parser():
    result = configparser.ConfigParser()
    result["train"] = {"scale": "1.0"}
    return result


def fill(place):
    place[:] = 2


SCALE = dict(read=lambda place: place.scale, change=lambda place: setattr(place, "scale", 2.0))
FIRST = dict(read=lambda place: next(iter(place)), change=lambda place: operator.setitem(place, 0, 2.0))
KINDS: dict[str, Callable[[int], Program]] = {
    "ndarray": lambda n: Program(lambda: numpy.ones(n)),
    "sum of an ndarray": lambda n: Program(lambda: numpy.ones(n), lambda place: float(place.mean()), fill),
    "view": lambda n: Program(lambda: numpy.ones(2 * n)[::2]),
    "base of a view": lambda n: Program(
        lambda: numpy.ones(2 * n)[::2], lambda place: float(place[0]), lambda place: operator.setitem(place.base, 0, 2)
    ),
    "structured ndarray": lambda n: Program(
        lambda: numpy.ones(n, [("a", "f8"), ("b", "i4")]),
        lambda place: float(place["a"][-1]),
        lambda place: operator.setitem(place["a"], -1, 2),
    ),
    "array.array": lambda n: Program(lambda: array.array("d", [1.0] * n)),
    "bytearray": lambda n: Program(lambda: bytearray([1] * n)),
    "memoryview": lambda n: Program(lambda: memoryview(bytearray([1] * n))),
    "ctypes array": lambda n: Program(lambda: (ctypes.c_double * n)(*[1.0] * n)),
    "list": lambda n: Program(lambda: [1.0] * n),
    "sum of a list": lambda n: Program(lambda: [1.0] * n, lambda place: sum(place) / len(place)),
    "dict": lambda n: Program(lambda: dict.fromkeys(range(n), 1.0)),
    "deque": lambda n: Program(lambda: collections.deque([1.0] * n)),
    "OrderedDict": lambda n: Program(lambda: collections.OrderedDict.fromkeys(range(n), 1.0)),
    "defaultdict": lambda n: Program(lambda: collections.defaultdict(float, dict.fromkeys(range(n), 1.0))),
    "Counter": lambda n: Program(lambda: collections.Counter(range(n))),
    "set": lambda n: Program(
        lambda: set(range(n)),
        lambda place: 1.0 if 1 in place else 2.0,
        lambda place: (place.remove(1), place.add(-1)),
    ),
    "list in a dict in a list": lambda n: Program(
        lambda: [{"a": [1.0] * n}],
        lambda place: place[0]["a"][-1],
        lambda place: operator.setitem(place[0]["a"], -1, 2.0),
    ),
    "list of lists": lambda n: Program(
        lambda: [[1.0] for _ in range(n)],
        lambda place: place[-1][0],
        lambda place: operator.setitem(place[-1], 0, 2.0),
    ),
    "dataclass": lambda n: Program(
        lambda: Box(numpy.ones(n)),
        lambda place: float(place.values[-1]),
        lambda place: operator.setitem(place.values, -1, 2),
    ),
    "replaced in a dataclass": lambda n: Program(
        lambda: Box([1.0] * n),
        lambda place: place.values[-1],
        lambda place: setattr(place, "values", [2.0] * len(place.values)),
    ),
}
SINGLE: dict[str, Program] = {
    "datetime64": Program(
        lambda: numpy.ones(3, "datetime64[s]"),
        lambda place: float(place[-1].astype("int64")),
        lambda place: operator.setitem(place, -1, numpy.datetime64(2, "s")),
    ),
    "ndarray of objects": Program(lambda: numpy.array([1.0] * 3, dtype=object)),
    "mask": Program(
        lambda: numpy.ma.MaskedArray(numpy.ones(3), mask=[False] * 3),
        lambda place: 2.0 if place.mask[-1] else 1.0,
        lambda place: operator.setitem(place.mask, -1, True),
    ),
    "ctypes structure": Program(lambda: Fields(1.0), **SCALE),
    "shared memory": Program(
        lambda: multiprocessing.Value("d", 1.0),
        lambda place: place.value,
        lambda place: setattr(place, "value", 2.0),
    ),
    "mapped file": Program(
        lambda: mmap.mmap(-1, 8), lambda place: 1.0 + place[0], lambda place: operator.setitem(place, 0, 1)
    ),
    "queue in C": Program(queue.SimpleQueue, lambda place: 1.0 + place.qsize(), lambda place: place.put(1)),
    "ConfigParser": Program(
        parser,
        lambda place: float(place["train"]["scale"]),
        lambda place: operator.setitem(place["train"], "scale", "2.0"),
    ),
    "attribute of a list": Program(lambda: with_scale(list), **SCALE),
    "attribute of a dict": Program(lambda: with_scale(dict), **SCALE),
    "attribute of a tuple": Program(lambda: with_scale(tuple), **SCALE),
    "sign of zero in a set": Program(
        lambda: {0.0},
        lambda place: 1.0 + str(place).count("-"),
        lambda place: (place.remove(0.0), place.add(-0.0)),
    ),
    "large partial": Program(
        lambda: functools.partial(lambda values: values[-1], [1.0] * LARGE),
        lambda place: place(),
        lambda place: operator.setitem(place.args[0], -1, 2.0),
    ),
    "name in a list": Program(
        lambda: types.SimpleNamespace(names=["hidden_name"], hidden_name=1.0),
        lambda place: getattr(place, place.names[0]),
        lambda place: setattr(place, "hidden_name", 2.0),
    ),
    "all attributes": Program(
        lambda: types.SimpleNamespace(hidden_name=1.0),
        lambda place: sum(vars(place).values()),
        lambda place: setattr(place, "hidden_name", 2.0),
    ),
    "state of a generator": Program(
        lambda: numpy.random.default_rng(0),
        lambda place: float(place.bit_generator.state["state"]["state"] % 7),
        lambda place: place.random(),
    ),
}
PROGRAMS = {f"{name}, {size}": make(size) for name, make in KINDS.items() for size in (SMALL, LARGE)} | SINGLE
PROGRAMS |= {f"{name}, {HUGE}": KINDS[name](HUGE) for name in ("ndarray", "list", "bytearray", "view", "set")}


# Programs of which another place with the change also takes the place of the first: the others take long.
REPLACED = [name for name in PROGRAMS if not name.endswith((f" {LARGE}", f" {HUGE}"))]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("name", "replaces"), [*((name, False) for name in PROGRAMS), *((name, True) for name in REPLACED)]
)
def test_a_change_of_host_data_is_noticed_or_the_call_runs_eager(name, replaces, api):
    pool = GraphPool(backend_for(torch.device("cpu")))
    found, stats = run(PROGRAMS[name], api, True, pool, replaces)
    wanted, _ = run(PROGRAMS[name], api, False, pool, replaces)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    assert sum(stats.replays.values()) or any(
        "state" in why or "not compared" in why for why in stats.failures.values()
    )


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(("name", "size"), [("list", "5,000 items"), ("ndarray", "800,000 bytes")])
def test_a_limit_refuses_and_names_what_is_too_large(name, size, api):
    program = KINDS[name](LARGE if name == "list" else HUGE)
    _, stats = run(program, api, True, GraphPool(backend_for(torch.device("cpu"))))
    (failure,) = stats.failures.values()
    assert f".place ({name}, {size})" in failure and not sum(stats.replays.values())


@pytest.mark.parametrize("api", APIS)
def test_large_data_that_is_not_read_refuses_nothing(api):
    class Holder(list):
        def __init__(self):
            super().__init__([1.0])
            self.unread_table, self.unread_array = dict.fromkeys(range(HUGE)), numpy.ones(HUGE)

    program = Program(Holder, **FIRST)
    found, stats = run(program, api, True, GraphPool(backend_for(torch.device("cpu"))))
    wanted, _ = run(program, api, False, GraphPool(backend_for(torch.device("cpu"))))
    assert all(map(torch.equal, found, wanted)) and sum(stats.replays.values())

"""Python state that a captured call reads or changes: captured calls equal eager when it changes between two calls."""

from __future__ import annotations

import array
import colorsys
import contextvars
import copy
import functools
import importlib
import itertools
import os
import pathlib
import pickle
import queue
import random
import threading
import time
import uuid
import weakref
from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from graph_cache.core.buffers import BufferSpec
from graph_cache.core.cache import GraphCache
from graph_cache.core.stats import CacheStats
from graph_cache.guards.audit import StorageAudit
from graph_cache.guards.code import Reads
from tests.contract.training_models import WIDTH, attached, iteration_of, twins

VARIABLE = "CONTRACT_TEST_SCALE"
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)
TABLE = {"scale": 1.0}
STEPS, CHANGED = 8, 5


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


class Model(nn.Module):
    level = 1.0

    def __init__(self):
        super().__init__()
        self.linear, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([nn.Tanh()])
        self.numbers, self.ones = array.array("d", [1.0]), numpy.ones(1)
        self.slotted, self.chosen, self.name = Slotted(), {1}, "amount"
        self.amount, self.settings = 1.0, SimpleNamespace(deep=[{"scale": 1.0}])

    @property
    def doubled(self):
        return 2 * getattr(self, self.name)

    def forward(self, x):
        x = self.linear(x)
        for block in self.blocks:
            x = block(x)
        x = x * self.level * self.numbers[0] * float(self.ones[0]) * self.slotted.scale * len(self.chosen)
        x = x * self.doubled * self.settings.deep[0]["scale"] * TABLE["scale"] * CONTEXT.get()
        return x * float(os.environ[VARIABLE])


def set_array(model):
    model.numbers[0] = 2.0


def set_numpy(model):
    model.ones[0] = 2.0


def set_slot(model):
    model.slotted.scale = 2.0


def set_class_attribute(model):
    type(model).level = 2.0


def shadow_class_attribute(model):
    model.level = 2.0


def patch_forward(model):
    before = model.linear.forward
    model.linear.forward = lambda x: 2 * before(x)


def patch_class(model):
    before = type(model).forward
    type(model).forward = lambda self, x: 2 * before(self, x)


CHANGES = {
    "array": set_array,
    "numpy": set_numpy,
    "slot": set_slot,
    "class attribute": set_class_attribute,
    "shadowed": shadow_class_attribute,
    "patched forward": patch_forward,
    "patched class": patch_class,
    "set": lambda model: model.chosen.add(2),
    "behind a name": lambda model: setattr(model, "amount", 2.0),
    "nested": lambda model: model.settings.deep[0].update(scale=2.0),
    "global": lambda model: TABLE.update(scale=2.0),
    "context variable": lambda model: CONTEXT.set(2.0),
    "environment": lambda model: os.environ.update({VARIABLE: "2.0"}),
    "appended block": lambda model: model.blocks.append(nn.Sigmoid()),
}


@pytest.fixture(autouse=True)
def state_outside(monkeypatch):
    """Restore state outside of modules after each test."""
    monkeypatch.setenv(VARIABLE, "1.0")
    monkeypatch.setitem(TABLE, "scale", 1.0)
    monkeypatch.setattr(Model, "level", 1.0)
    monkeypatch.setattr(Model, "forward", Model.forward)
    token = CONTEXT.set(1.0)
    yield
    CONTEXT.reset(token)


def job(api, change, captures, pool, device, stats, earlier=None):
    """Return the results of all steps, with a change before the step CHANGED; with `earlier`, that one, then both."""
    changes = [change] if earlier is None else [earlier, change]
    torch.manual_seed(0)
    model, log = Model().to(device), []
    call = model
    if captures and api == "module":
        graphs, found = attached(model, [""], pool)
        stats.append(found)
    elif captures and api in ("function", "unwatched function"):
        model.eval()
        cache = GraphCache(pool=pool)
        specs = {"x": BufferSpec(("batch", WIDTH), torch.float32)}
        watched = model if api == "function" else None
        call = cache.graphed("model", lambda x: model(x), specs, buckets=(4,), watch=watched)
        stats.append(cache.stats)
    if api == "iteration":

        def step(x):
            model.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        call = step
        if captures:
            stats.append(CacheStats())
            call = iteration_of(pool, stats[0], step)
    for index in range(STEPS * len(changes)):
        if index % STEPS == CHANGED:
            changes.pop(0)(model)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).to(device)
        with torch.inference_mode(api.endswith("function")):
            out = call(x)
        if api == "module":
            out.pow(2).mean().backward()
        log.append(out.detach().clone())
        log += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
    if captures and api == "module":
        graphs.detach()
    return log


@pytest.mark.parametrize("api", ["module", "iteration", "function"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_what_is_read_between_two_calls_is_noticed(pool, device, name, api, monkeypatch):
    stats = []
    found = job(api, CHANGES[name], True, pool, device, stats)
    with monkeypatch.context() as undo:
        undo.setenv(VARIABLE, "1.0")
        TABLE["scale"], Model.level = 1.0, 1.0
        CONTEXT.set(1.0)
        if name == "patched class":
            Model.forward = ORIGINAL
        wanted = job(api, CHANGES[name], False, pool, device, [])
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    assert sum(stats[0].replays.values()) >= 1


ORIGINAL = Model.forward


def attribute_of_function(model):
    return attribute_of_function.scale


def keyword_default(model, *, scale=(1.0,)):
    return scale[0]


class Meta(type):
    pass


class OfMeta(metaclass=Meta):
    pass


class Target:
    scale = 1.0


def absent_global(model):
    try:
        return ABSENT  # noqa: F821
    except NameError:
        return 1.0


TARGET, WEAK = Target(), weakref.WeakValueDictionary()
WEAK["target"] = TARGET
GAIN = 1.0  # only read by what Python calls itself, or by what another object keeps


def set_gain(value):
    globals()["GAIN"] = value


class Special:
    """Reads a global in special methods and in functions that other objects keep."""

    def __getitem__(self, index):
        return GAIN

    def __enter__(self):
        return GAIN

    def __exit__(self, *error):
        pass

    def __get__(self, owner, kind=None):
        return GAIN

    @functools.singledispatchmethod
    def dispatched(self, value):
        return GAIN

    partial = functools.partialmethod(lambda self: GAIN)
    static = staticmethod(functools.partial(lambda value: GAIN, 1))
    computed = property(functools.partial(lambda self: GAIN))


class Described:
    gain = Special()


class MadeAnew:
    def __init__(self):
        self.gain = GAIN


class Plain:
    def scale(self):
        return getattr(self, "gain", 1.0)


class Subclass(Plain):
    pass


class PrivateSlots:
    __slots__ = ("__gain",)

    def gain(self, value=None):
        if value is not None:
            self.__gain = value
        return self.__gain if hasattr(self, "_PrivateSlots__gain") else 1.0


def entered(model):
    with model.place as gain:
        return gain


def shadowed_in_subclass(model):
    Subclass.scale = lambda self: 2.0


def special(read):
    return lambda: set_gain(1.0) or Special(), read, lambda model: set_gain(2.0)


def attribute_of(get):
    """Return a way to read an attribute of an object that `get` finds in the place, and to change it."""
    return lambda model: get(model.place).scale, lambda model: setattr(get(model.place), "scale", 2.0)


OBJECT: contextvars.ContextVar[Target] = contextvars.ContextVar("object")
SPECIAL = {
    "__getitem__": special(lambda model: model.place[0]),
    "__enter__": special(entered),
    "descriptor": special(lambda model: Described().gain),
    "__init__": special(lambda model: MadeAnew().gain),
    "singledispatchmethod": special(lambda model: model.place.dispatched(3)),
    "partialmethod": special(lambda model: model.place.partial()),
    "partial as a static method": special(lambda model: model.place.static()),
    "partial as a property": special(lambda model: model.place.computed),
    "eval": special(lambda model: eval("GAIN")),
    "factory of a defaultdict": (
        lambda: set_gain(1.0) or defaultdict(lambda: GAIN),
        lambda model: (model.place["a"], model.place.clear())[0],
        lambda model: set_gain(2.0),
    ),
    "attribute that a class gets": (
        Plain,
        lambda model: model.place.scale(),
        lambda model: setattr(Plain, "gain", 2.0),
    ),
    "method that a subclass gets": (Subclass, lambda model: model.place.scale(), shadowed_in_subclass),
    "private slot": (PrivateSlots, lambda model: model.place.gain(), lambda model: model.place.gain(2.0)),
    "attribute of a parameter": (
        lambda: None,
        lambda model: getattr(model.weight, "gain", 1.0),
        lambda model: setattr(model.weight, "gain", 2.0),
    ),
    "object in a set": (lambda: {Target()}, *attribute_of(lambda place: next(iter(place)))),
    "object in a frozenset": (lambda: frozenset([Target()]), *attribute_of(lambda place: next(iter(place)))),
    "object as a key": (lambda: {Target(): 1}, *attribute_of(lambda place: next(iter(place)))),
    "object in a context variable": (lambda: OBJECT.set(Target()), *attribute_of(lambda place: OBJECT.get())),
    "tensor in a tuple": (
        lambda: (torch.ones(1), 0),
        lambda model: float(model.place[0].shape[0]),
        lambda model: setattr(model, "place", (torch.ones(2), 0)),
    ),
    "array without dimensions": (
        lambda: numpy.array(1.0),
        lambda model: float(model.place),
        lambda model: model.place.__setitem__((), 2.0),
    ),
    "read-only array": (
        lambda: numpy.broadcast_to(numpy.array([1.0]), (3,)),
        lambda model: float(model.place[0]),
        lambda model: setattr(model, "place", numpy.full(3, 2.0)),
    ),
    "30 references away": (
        lambda: functools.reduce(lambda inner, _: SimpleNamespace(next=inner), range(30), SimpleNamespace(scale=1.0)),
        lambda model: functools.reduce(lambda one, _: one.next, range(30), model.place).scale,
        lambda model: setattr(functools.reduce(lambda one, _: one.next, range(30), model.place), "scale", 2.0),
    ),
    "method put on Tensor": (
        lambda: setattr(torch.Tensor, "encore_test", lambda tensor: 1.0),
        lambda model: model.weight.encore_test(),
        lambda model: setattr(torch.Tensor, "encore_test", lambda tensor: 2.0),
    ),
}

# How a forward reads a number from `model.place`, what is there first, and the change.
PLACES = {
    "order of a dict": (
        lambda: OrderedDict(a=1.0, b=2.0),
        lambda model: next(iter(model.place.values())),
        lambda model: model.place.move_to_end("a"),
    ),
    "list of 200": (
        lambda: [1.0] * 200,
        lambda model: model.place[150],
        lambda model: model.place.__setitem__(150, 2.0),
    ),
    "dict of 200": (
        lambda: dict.fromkeys(range(200), 1.0),
        lambda model: model.place[150],
        lambda model: model.place.update({150: 2.0}),
    ),
    "attribute of a function": (
        lambda: setattr(attribute_of_function, "scale", 1.0),
        attribute_of_function,
        lambda model: setattr(attribute_of_function, "scale", 2.0),
    ),
    "default of a keyword": (
        lambda: setattr(keyword_default, "__kwdefaults__", {"scale": (1.0,)}),
        keyword_default,
        lambda model: setattr(keyword_default, "__kwdefaults__", {"scale": (2.0,)}),
    ),
    "keywords of a partial": (
        lambda: functools.partial(lambda scale: scale, scale=1.0),
        lambda model: model.place(),
        lambda model: model.place.keywords.update(scale=2.0),
    ),
    "metaclass": (
        lambda: setattr(Meta, "scale", 1.0),
        lambda model: OfMeta.scale,
        lambda model: setattr(Meta, "scale", 2.0),
    ),
    "thread-local": (
        threading.local,
        lambda model: getattr(model.place, "scale", 1.0),
        lambda model: setattr(model.place, "scale", 2.0),
    ),
    "weak reference": (
        lambda: setattr(TARGET, "scale", 1.0) or weakref.ref(TARGET),
        lambda model: model.place().scale,
        lambda model: setattr(TARGET, "scale", 2.0),
    ),
    "weak dictionary": (
        lambda: setattr(TARGET, "scale", 1.0),
        lambda model: WEAK["target"].scale,
        lambda model: setattr(TARGET, "scale", 2.0),
    ),
    "computed name": (
        lambda: SimpleNamespace(scale_0=1.0, index=0),
        lambda model: getattr(model.place, f"scale_{model.place.index}"),
        lambda model: setattr(model.place, "scale_0", 2.0),
    ),
    "absent global": (lambda: globals().pop("ABSENT", None), absent_global, lambda model: globals().update(ABSENT=2.0)),
    "mode of a module in a list": (
        lambda: [nn.Dropout(0.5)],
        lambda model: 2.0 if model.place[0].training else 1.0,
        lambda model: model.place[0].eval(),
    ),
    "replaced function of torch": (
        lambda: setattr(nn.functional, "encore_test", lambda: 1.0),
        lambda model: nn.functional.encore_test(),
        lambda model: setattr(nn.functional, "encore_test", lambda: 2.0),
    ),
}


def model_that_reads(make, read):
    """Return a class of models that multiply by what `read` finds in the place that `make` returns."""

    class Reads(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.place = make()

        def forward(self, x):
            return super().forward(x) * read(self)

    return Reads


@pytest.mark.parametrize("api", ["module", "iteration", "function"])
@pytest.mark.parametrize("name", PLACES | SPECIAL)
def test_a_change_in_any_place_that_is_read_is_noticed(pool, device, name, api, monkeypatch):
    make, read, change = (PLACES | SPECIAL)[name]
    monkeypatch.setattr(f"{__name__}.Model", model_that_reads(make, read))

    def run(captures):
        try:
            return job(api, change, captures, pool, device, stats)
        finally:
            for owner, changed in ((Plain, "gain"), (Subclass, "scale"), (torch.Tensor, "encore_test")):
                if changed in vars(owner):
                    delattr(owner, changed)
            globals().pop("ABSENT", None)
            vars(nn.functional).pop("encore_test", None)

    stats = []
    found, wanted = run(True), run(False)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    assert sum(stats[0].replays.values()) >= 1


class Tree(nn.Module):
    """Modules in all containers, each of which a change replaces, extends or alters."""

    def __init__(self):
        super().__init__()
        inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.net = nn.Sequential(inner, nn.BatchNorm1d(WIDTH).eval())
        self.list = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.dict = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x):
        x = self.net(x)
        for layer in (*self.list, *self.dict.values()):
            x = layer(x)
        return x


def linear(**options):
    return nn.Linear(WIDTH, WIDTH, **options)


TREE_CHANGES = {
    "child": lambda model: setattr(model.net[0], "0", linear()),
    "subtree": lambda model: setattr(model.net, "0", nn.Sequential(linear())),
    "removed child": lambda model: delattr(model.net[0], "1"),
    "item of a list": lambda model: model.list.append(linear()),
    "item of a dict": lambda model: model.dict.update({"b": linear()}),
    "class": lambda model: setattr(model.net[0][1], "__class__", nn.Tanh),
    "mode": lambda model: model.net[1].train(),
    "forward hook": lambda model: model.net[0].register_forward_hook(lambda module, args, out: 2 * out),
    "forward pre-hook": lambda model: model.net[0][0].register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "parameter": lambda model: setattr(model.net[0][0], "weight", nn.Parameter(torch.ones(WIDTH, WIDTH))),
    "parameter's data": lambda model: setattr(model.net[0][0].weight, "data", torch.ones(WIDTH, WIDTH)),
    "no bias": lambda model: setattr(model.net[0][0], "bias", None),
    "buffer": lambda model: setattr(model.net[1], "running_mean", torch.ones(WIDTH)),
}


@pytest.mark.parametrize("after", ["", "after another"])
@pytest.mark.parametrize("api", ["module", "iteration", "function", "unwatched function"])
@pytest.mark.parametrize("name", TREE_CHANGES)
def test_a_change_in_the_tree_of_modules_is_noticed(pool, device, name, api, after, monkeypatch):
    if name == "class" and api == "unwatched function":
        pytest.skip("classes of modules are compared only for modules in watch")

    def changed(alter):
        def change(model):
            torch.manual_seed(1)
            alter(model)
            model.to(device)

        return change

    monkeypatch.setattr(f"{__name__}.Model", Tree)
    stats, earlier = [], changed(TREE_CHANGES["child"]) if after else None
    found, wanted = (
        job(api, changed(TREE_CHANGES[name]), captures, pool, device, stats, earlier) for captures in (True, False)
    )
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    assert sum(stats[0].replays.values()) >= 1


OUTSIDE = {
    "the clock": lambda: float(time.monotonic() > 0),
    "the number of threads": lambda: float(torch.get_num_threads() > 0),
    "random numbers of the system": lambda: float(uuid.uuid4().int > 0),
    "a file": lambda: float(len(pathlib.Path(__file__).read_text()) > 0),
    "the file system": lambda: float(os.path.exists(__file__)),
    "the results of another thread": lambda: ThreadPoolExecutor(1).submit(float, 1).result(),
}


@pytest.mark.parametrize("api", ["module", "iteration", "function"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_call_that_reads_the_world_outside_runs_eager(pool, device, name, api, monkeypatch):
    class Reads(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)

        def forward(self, x):
            return super().forward(x) * OUTSIDE[name]()

    monkeypatch.setattr(f"{__name__}.Model", Reads)
    stats = []
    found, wanted = (job(api, lambda model: None, captures, pool, device, stats) for captures in (True, False))
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    assert not stats[0].replays and name in next(iter(stats[0].failures.values()))


class Draws(nn.Linear):
    """Changes state outside of modules in its forward."""

    def __init__(self, how="random"):
        super().__init__(WIDTH, WIDTH)
        self.how = how
        self.numbers = iter([float(index) for index in range(100)])
        self.generated = (float(index) for index in range(100))
        self.generators = [numpy.random.RandomState(1), numpy.random.default_rng(1), numpy.random.PCG64(1)]
        self.held = {"iterator": itertools.cycle([1.0, 2.0, 3.0])} if how == "iterator in a dict" else {}
        self.queue = queue.Queue()
        for index in range(100):
            self.queue.put(float(index))

    def forward(self, x):
        if self.how == "random":
            scale = random.random()
        elif self.how == "numpy":
            scale = float(numpy.random.rand())
        elif self.how == "numpy RandomState":
            scale = self.generators[0].rand()
        elif self.how == "numpy Generator":
            scale = self.generators[1].random()
        elif self.how == "numpy PCG64":
            scale = float(self.generators[2].random_raw() % 7)
        elif self.how == "iterator in a dict":
            scale = next(self.held["iterator"])
        elif self.how == "queue":
            scale = self.queue.get()
        elif self.how == "iterator":
            scale = next(self.numbers)
        elif self.how == "generator":
            scale = next(self.generated)
        elif self.how == "environment":
            os.environ[VARIABLE] = str(float(os.environ[VARIABLE]) + 1)
            scale = float(os.environ[VARIABLE])
        else:
            TABLE["scale"] += 1
            scale = TABLE["scale"]
        return super().forward(x) * scale


DRAWS = ["random", "numpy", "numpy RandomState", "numpy Generator", "numpy PCG64", "iterator", "iterator in a dict"]
DRAWS += ["queue", "generator", "environment", "global"]


@pytest.mark.parametrize("api", ["module", "iteration", "function"])
@pytest.mark.parametrize("how", DRAWS)
def test_state_outside_of_modules_that_a_call_changes_keeps_it_eager(pool, device, how, api, monkeypatch):
    def run(captures):
        random.seed(1)
        numpy.random.seed(1)
        os.environ[VARIABLE], TABLE["scale"] = "1.0", 1.0
        monkeypatch.setattr(f"{__name__}.Model", lambda: Draws(how))
        return job(api, lambda model: None, captures, pool, device, stats)

    stats = []
    found, wanted = run(True), run(False)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    assert not stats[0].replays and sum(stats[0].failed_captures.values()) >= 1


SCALE = torch.full((), 2.0)


class ReadsAGlobal(nn.Module):
    def forward(self, x):
        return x * SCALE


class ReadsOtherGlobals(nn.Module):
    """Its function has the globals of the one above, of which it reads other names."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return functools.reduce(torch.add, [x, self.weight])


def test_a_tensor_in_the_globals_of_one_of_several_functions_is_watched(pool, device, monkeypatch):
    monkeypatch.setattr(f"{__name__}.SCALE", torch.full((), 2.0, device=device))
    eager, graphed = twins(lambda: nn.Sequential(ReadsAGlobal(), ReadsOtherGlobals()), device)
    _, stats = attached(graphed, [""], pool)
    x = torch.randn(4, WIDTH, device=device)
    for step in range(8):
        if step == 4:
            assert stats.replays
            monkeypatch.setattr(f"{__name__}.SCALE", torch.full((), 3.0, device=device))
        results = [model(x) for model in (graphed, eager)]
        assert torch.equal(*results)
        for result in results:
            result.sum().backward()


def test_a_replaced_method_of_an_attached_modules_class_is_noticed(pool, device, monkeypatch):
    class Block(nn.Linear):
        def forward(self, x):  # names no method itself
            return nn.functional.linear(x, self.weight, self.bias)

    eager, graphed = twins(lambda: nn.Sequential(Block(WIDTH, WIDTH)), device)
    _, stats = attached(graphed, ["0"], pool)
    x = torch.randn(4, WIDTH, device=device)
    for step in range(8):
        if step == 4:
            assert stats.replays
            monkeypatch.setattr(Block, "forward", lambda self, x: x * self.weight.sum())
        results = [model(x) for model in (graphed, eager)]
        assert torch.equal(*results)
        for result in results:
            result.sum().backward()


def test_an_iteration_keeps_what_calls_with_other_arguments_showed_apart(pool, device):
    model, stats = nn.Linear(WIDTH, WIDTH).to(device), CacheStats()

    def step(x, scale):
        loss = (model(x) * scale).square().mean()
        loss.backward()
        return loss

    run = iteration_of(pool, stats, step)
    x = torch.randn(4, WIDTH, device=device)
    for index in range(10):
        model.zero_grad()
        run(x, model.bias if index % 2 else 2.0)
        found, model.bias.grad = model.bias.grad, None
        model.zero_grad()
        step(x, model.bias if index % 2 else 2.0)
        assert torch.equal(found, model.bias.grad)
    assert stats.replays


def test_what_observes_a_run_is_no_part_of_it(device):
    layer, reads, audit = linear().to(device), Reads(), StorageAudit()
    with reads.observing(), audit:
        layer(torch.ones(1, WIDTH, device=device))
    assert audit.outside and "outside" not in reads.names and "bias" in reads.names


def test_copies_and_pickles_of_a_model_are_no_change(pool, device):
    model = ReadsOtherGlobals().to(device)
    _, stats = attached(model, [""], pool)
    for index in range(STEPS):
        if index == CHANGED:
            copy.deepcopy(model), pickle.dumps(model)
        model(torch.ones(4, WIDTH, device=device)).sum().backward()
    assert sum(stats.replays.values()) == STEPS - 2


def test_modules_that_a_run_imports_are_no_part_of_it(device):
    reads = Reads()
    with reads.observing():
        importlib.reload(colorsys)
        colorsys.rgb_to_hsv(0.1, 0.2, 0.3)
    names = {code.co_name for code in reads._codes.values()}  # noqa: SLF001
    assert "rgb_to_hsv" in names and "<module>" not in names

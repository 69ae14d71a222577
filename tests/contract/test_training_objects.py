"""Objects among the arguments and results of a captured call: without tensors inside, or eager with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from graph_cache.core.stats import CacheStats
from tests.contract.training_models import WIDTH, assert_same, attached, iteration_of, twins

STEPS = 14


@dataclass
class Output:
    hidden: torch.Tensor
    loss: torch.Tensor | None = None


@dataclass(eq=False)
class Batch:
    mask: torch.Tensor | None


class Held:
    """An object that is no dataclass."""

    def __init__(self, hidden, loss=None, mask=None):
        self.hidden, self.loss, self.mask = hidden, loss, mask


class Returns(nn.Linear):
    def forward(self, x):
        return Held(super().forward(x))


class ReturnsDataclass(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return {"output": Output(out, out), "list": [Output(out.relu())]}


class TakesAny(nn.Linear):
    def forward(self, x, batch):
        return super().forward(x)


class MarksItsArgument(nn.Linear):
    def forward(self, x, batch):
        batch.mask = super().forward(x) * batch.mask
        return batch.mask


class Takes(nn.Linear):
    def forward(self, x, batch):
        out = super().forward(x)
        return out if batch.mask is None else out * batch.mask


def job(model, loss_of, device):
    generator, log = torch.Generator().manual_seed(3), []
    for _ in range(STEPS):
        model.zero_grad()
        x = torch.randn(4, WIDTH, generator=generator).to(device)
        loss = loss_of(model, x)
        if loss.requires_grad:
            loss.backward()
        log.append([loss.detach().clone(), *[p.grad.clone() for p in model.parameters()]])
    return log


def test_a_result_in_an_unknown_container_keeps_a_module_eager(pool, device):
    eager, graphed = twins(lambda: Returns(WIDTH, WIDTH), device)
    _, stats = attached(graphed, [""], pool)
    loss_of = lambda model, x: model(x).hidden.pow(2).mean()  # noqa: E731
    assert_same(job(graphed, loss_of, device), job(eager, loss_of, device))
    assert not stats.replays and "returns tensors inside Held" in stats.failures["model"]


def test_a_result_of_dataclasses_is_rebuilt_at_each_replay(pool, device):
    eager, graphed = twins(lambda: ReturnsDataclass(WIDTH, WIDTH), device)
    _, stats = attached(graphed, [""], pool)

    def loss_of(model, x):
        found = model(x)
        output, (other,) = found["output"], found["list"]
        assert (type(output), type(other), other.loss) == (Output, Output, None)
        assert output.loss is output.hidden  # one tensor, as in eager
        return output.hidden.pow(2).mean() + output.loss.sin().mean() + other.hidden.mean()

    assert_same(job(graphed, loss_of, device), job(eager, loss_of, device))
    assert sum(stats.replays.values()) == STEPS - 2


def test_a_dataclass_of_tensors_as_argument_replays(pool, device):
    eager, graphed = twins(lambda: Takes(WIDTH, WIDTH), device)
    _, stats = attached(graphed, [""], pool)
    loss_of = lambda model, x: model(x, Batch((x > 0).float())).pow(2).mean()  # noqa: E731
    assert_same(job(graphed, loss_of, device), job(eager, loss_of, device))
    assert sum(stats.replays.values()) == STEPS - 2


def test_a_module_that_writes_to_its_dataclass_runs_eager(pool, device):
    eager, graphed = twins(lambda: MarksItsArgument(WIDTH, WIDTH), device)
    _, stats = attached(graphed, [""], pool)

    def loss_of(model, x):
        batch = Batch((x > 0).float())
        model(x, batch)
        return batch.mask.pow(2).mean()

    assert_same(job(graphed, loss_of, device), job(eager, loss_of, device))
    assert not stats.replays and "changes" in stats.failures["model"]


def test_a_dataclass_that_contains_itself_keeps_a_module_eager(pool, device):
    eager, graphed = twins(lambda: TakesAny(WIDTH, WIDTH), device)
    _, stats = attached(graphed, [""], pool)

    def loss_of(model, x):
        held = Batch(x)
        held.mask = [x, held]
        return model(x, held).pow(2).mean()

    assert_same(job(graphed, loss_of, device), job(eager, loss_of, device))
    assert not stats.replays and stats.fallbacks["model", "forward", "object_argument"] == STEPS


MASKS = {"tensors": lambda x: (x > 0).float(), "new_objects": lambda x: None}


@pytest.mark.parametrize("name", MASKS)
def test_objects_that_hold_tensors_or_are_new_keep_a_module_eager(pool, device, name):
    eager, graphed = twins(lambda: Takes(WIDTH, WIDTH), device)
    graphs, stats = attached(graphed, [""], pool)
    loss_of = lambda model, x: model(x, Held(x, mask=MASKS[name](x))).pow(2).mean()  # noqa: E731
    assert_same(job(graphed, loss_of, device), job(eager, loss_of, device))
    assert not stats.replays and stats.fallbacks["model", "forward", "object_argument"] >= STEPS - 8
    assert len(graphs._states) <= 8  # noqa: SLF001  each holds its objects alive


def test_one_object_without_tensors_is_part_of_the_signature(pool, device):
    eager, graphed = twins(lambda: Takes(WIDTH, WIDTH), device)
    _, stats = attached(graphed, [""], pool)
    batch = Batch(None)
    loss_of = lambda model, x: model(x, batch).pow(2).mean()  # noqa: E731
    assert_same(job(graphed, loss_of, device), job(eager, loss_of, device))
    assert sum(stats.replays.values()) == STEPS - 2


@pytest.mark.parametrize("kind", [Held, Output])
@pytest.mark.parametrize("where", ["argument", "result"])
def test_objects_with_tensors_keep_an_iteration_eager_unless_they_are_dataclasses(pool, device, where, kind):
    eager, graphed = twins(lambda: Takes(WIDTH, WIDTH), device)
    stats = CacheStats()

    def step_of(model):
        def step(x, batch):
            out = model(x, batch)
            loss = out.pow(2).mean()
            loss.backward()
            return kind(out.detach(), loss.detach()) if where == "result" else loss.detach()

        return step

    logs = []
    for model in (graphed, eager):
        step = iteration_of(pool, stats, step_of(model)) if model is graphed else step_of(model)
        mask = torch.ones(4, WIDTH, device=device) if where == "argument" else None
        held = Batch(mask) if kind is Output or mask is None else Held(None, mask=mask)

        def loss_of(model, x, step=step, held=held):
            if held.mask is not None:
                held.mask = (x > 0).float()
            found = step(x, held)
            return found.loss if where == "result" else found

        logs.append(job(model, loss_of, device))
    assert_same(*logs)
    assert bool(stats.replays) is (kind is Output)


class Numbers(list):
    """A list that pytree does not know."""


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


def set_scale(held):
    held.scale = 2.0


def set_first(held):
    held[0] = 2


# An argument, how the forward reads it, and its change in place.
IN_PLACE = {
    "attribute": (lambda: SimpleNamespace(scale=1.0), lambda held: held.scale, set_scale),
    "slot": (Slotted, lambda held: held.scale, set_scale),
    "list subclass": (lambda: Numbers([1.0]), itemgetter(0), set_first),
    "bytearray": (lambda: bytearray([1]), itemgetter(0), set_first),
    "numpy": (lambda: numpy.ones(2), lambda held: float(held[0]), set_first),
}


@pytest.mark.parametrize("api", ["module", "iteration"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_an_object_that_changes_in_place_is_noticed(pool, device, name, api):
    make, read, change = IN_PLACE[name]

    class Scaled(nn.Linear):
        def forward(self, x, held):
            return super().forward(x) * read(held)

    logs, replays = [], []
    for model, captures in zip(twins(lambda: Scaled(WIDTH, WIDTH), device), (False, True), strict=True):
        held, stats, calls = make(), CacheStats(), 0

        def step(x, held, model=model):
            loss = model(x, held).pow(2).mean()
            loss.backward()
            return loss.detach()

        if captures and api == "module":
            _, stats = attached(model, [""], pool)
        run = iteration_of(pool, stats, step) if captures and api == "iteration" else step

        def loss_of(model, x, run=run, held=held, stats=stats):
            nonlocal calls
            calls += 1
            if calls == STEPS // 2:
                replays.append(sum(stats.replays.values()))
                change(held)
            return run(x, held)

        logs.append(job(model, loss_of, device))
        replays.append(sum(stats.replays.values()))
    assert_same(*reversed(logs))
    before, after = replays[2:]
    assert 0 < before < after, "replays before the change, and after a new warm-up"


class Counter:
    def __init__(self):
        self.count = 0


MADE = {"object": Counter, "set": set, "iterator": lambda: iter([1, 2]), "array": lambda: numpy.zeros(2)}


@pytest.mark.parametrize("name", MADE)
def test_a_result_that_a_call_makes_and_code_may_change_keeps_it_eager(pool, device, name):
    class Makes(nn.Linear):
        def forward(self, x):
            return super().forward(x), MADE[name]()

    model = Makes(WIDTH, WIDTH).to(device)
    _, stats = attached(model, [""], pool)
    made = []
    for _ in range(5):
        out, new = model(torch.randn(4, WIDTH, device=device))
        out.sum().backward()
        made.append(new)
    assert len(set(map(id, made))) == 5 and "returns a new" in stats.failures["model"]


def test_a_result_that_the_module_holds_is_returned_as_it_is(pool, device):
    class Holds(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.counter = Counter()

        def forward(self, x):
            return super().forward(x), self.counter

    model = Holds().to(device)
    _, stats = attached(model, [""], pool)
    for _ in range(5):
        out, counter = model(torch.randn(4, WIDTH, device=device))
        out.sum().backward()
        assert counter is model.counter
    assert sum(stats.replays.values()) == 3


def test_a_forward_that_reads_a_gradient_runs_eager(pool, device):
    class ReadsGradient(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (1.0 if self.weight.grad is None else 2.0)

    eager, graphed = twins(lambda: ReadsGradient(WIDTH, WIDTH), device)
    _, stats = attached(graphed, [""], pool)
    for index in range(6):
        x = torch.randn(4, WIDTH, device=device)
        for model in (eager, graphed):
            model(x).square().mean().backward()
            if index % 2:
                model.zero_grad()
        assert_same([list(graphed.parameters())], [list(eager.parameters())])
    assert not stats.replays and "reads the gradient" in stats.failures["model"]

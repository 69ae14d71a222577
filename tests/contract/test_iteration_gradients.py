"""A captured iteration with gradients from before the call: which of them its graph reads, and which are freed."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graph_cache.core.stats import CacheStats
from graph_cache.guards.audit import StorageAudit
from tests.contract.training_models import WIDTH, OtherThread, assert_same, batches, iteration_of, mlp, twins

RATE = 0.05
WARMING = 3  # eager calls before the first capture: the first, which registers the modules, and two more


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def counted(stats):
    """Return the numbers of captured, replayed and eager calls."""
    return sum(stats.captures.values()), sum(stats.replays.values()), sum(stats.fallbacks.values())


# ---- steps that use existing gradients as training code does ---------------------------------------------------------


def consumed_last(model, optimizer, x):
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def consumed_first(model, optimizer, x):
    optimizer.step()
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss.detach()


def cleared_first(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def cleared_after_the_forward(model, optimizer, x):
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def zeroed(model, optimizer, x):
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    loss = model(x).pow(2).mean()
    loss.backward()
    return loss.detach()


def halve(parameter):
    parameter.grad = parameter.grad / 2


def replaced(model, optimizer, x):
    """Gradients are replaced in a hook of every parameter, as gradient communication does."""
    handles = [parameter.register_post_accumulate_grad_hook(halve) for parameter in model.parameters()]
    loss = model(x).pow(2).mean()
    loss.backward()
    for handle in handles:
        handle.remove()
    optimizer.step()
    return loss.detach()


def put_aside(model, optimizer, x):
    """Gradients are cleared first and still read afterwards, through the tensors themselves and through views."""
    aside = [
        parameter.grad if index % 2 else parameter.grad.detach()
        for index, parameter in enumerate(model.parameters())
        if parameter.grad is not None
    ]
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), aside, strict=False):
            parameter.grad.add_(old, alpha=0.5)
    optimizer.step()
    return loss.detach()


# ---- what replays read ---------------------------------------------------------------------------------------------

STEPS = [consumed_last, consumed_first, cleared_first, cleared_after_the_forward, zeroed, replaced, put_aside]


def run_after_others(model, data, step, run, *, accumulating=True):
    """Run calls that find gradients: of an eager backward before each, or those that the previous call left.

    Returns the loss, gradients and parameters after each call.
    """
    torch.manual_seed(1)
    optimizer, log = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9), []
    called = run(lambda x: step(model, optimizer, x))
    for before, x in data:
        if accumulating:
            model(before).pow(2).mean().backward()
        log.append([called(x), *gradients(model), *(parameter.detach().clone() for parameter in model.parameters())])
    return log


@pytest.mark.parametrize("accumulating", [True, False], ids=["after_a_backward", "after_a_call"])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_every_replay_reads_the_gradients_present_before_its_call(pool, device, step, accumulating):
    eager, graphed = twins(mlp, device)
    data, stats = batches(12, device), CacheStats()
    expected = run_after_others(eager, data, step, lambda step: step, accumulating=accumulating)
    ours = run_after_others(
        graphed, data, step, lambda step: iteration_of(pool, stats, step), accumulating=accumulating
    )
    assert_same(ours, expected)
    assert sum(stats.replays.values()) >= 6
    assert not stats.failed_captures


def unobserved():
    """Return an object with a list `log` in which a step may leave values, unlike in a list of its closure."""
    seen = logging.Filter()  # state of the standard library is not searched
    seen.log = []
    return seen


def storages(model):
    return [StorageWeakRef(parameter.grad.untyped_storage()) for parameter in model.parameters()]


@pytest.mark.parametrize("is_a_view", [False, True], ids=["alone", "views_of_a_bucket"])
def test_a_step_that_clears_gradients_first_holds_no_old_gradient(pool, device, is_a_view):
    """Once cleared, neither the gradients nor copies of them are held."""
    model, stats = mlp().to(device), CacheStats()
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=RATE), unobserved()

    def step(x):
        inside = storages(model)
        optimizer.zero_grad()
        seen.log.append(sum(not storage.expired() for storage in (*seen.before, *inside)))
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss.detach()

    run = iteration_of(pool, stats, step)
    for x, _ in batches(WARMING + 1, device):
        bucket = torch.zeros(sum(parameter.numel() for parameter in model.parameters()), device=device)
        shares = bucket.split([parameter.numel() for parameter in model.parameters()])
        for parameter, share in zip(model.parameters(), shares, strict=True):
            parameter.grad = share.view_as(parameter) if is_a_view else share.view_as(parameter).clone()
        del bucket, shares, parameter, share
        seen.before = storages(model)
        run(x)
    assert sum(stats.captures.values()) == 1 and not stats.replays
    assert seen.log == [0] * (WARMING + 1)
    assert all(storage.expired() for storage in seen.before)


@pytest.mark.parametrize("clears", ["first", "after_the_forward", "last", "never"])
def test_a_capture_that_fails_leaves_gradients_as_they_were(pool, device, clears):
    """Gradients that the step cleared before anything ran stay cleared: it would clear them again."""
    seen, stats = unobserved(), CacheStats()

    def job(model, run):
        def step(x):
            seen.log.append(sum(parameter.grad is not None for parameter in model.parameters()))
            if clears == "first":
                model.zero_grad()
            loss = model(x).pow(2).mean()
            if clears == "after_the_forward":
                model.zero_grad()
            loss.backward()
            total = sum(parameter.grad.abs().sum() for parameter in model.parameters())
            if clears == "last":
                model.zero_grad()
            return torch.tensor(total.item())

        called, log = run(step), []
        for before, x in batches(WARMING + 3, device):
            model(before).pow(2).mean().backward()
            log.append([called(x), *gradients(model)])
        return log

    eager, graphed = twins(lambda: mlp().eval(), device)  # no dropout: a failed capture has consumed random numbers
    ours = job(graphed, lambda step: iteration_of(pool, stats, step))
    assert stats.failed_captures
    everywhere = len(list(eager.parameters()))
    ran_after_the_failure = seen.log.pop(WARMING + 1)
    assert ran_after_the_failure == (0 if clears == "first" else everywhere)
    assert seen.log == [everywhere] * (WARMING + 3)
    assert_same(ours, job(eager, lambda step: step))


def test_shared_and_separate_gradients_are_different_signatures(pool, device):
    eager, graphed = twins(mlp, device)
    data, stats = batches(16, device), CacheStats()

    def job(model, run):
        first, second = model[0][0].weight, model[1][0].weight

        def step(x):
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss.detach()

        torch.manual_seed(1)
        called, log = run(step), []
        for index, (x, _) in enumerate(data):
            model.zero_grad()
            first.grad = torch.ones_like(first)
            second.grad = first.grad if index < 8 else torch.ones_like(second)
            log.append([called(x), *gradients(model)])
        return log

    assert_same(job(graphed, lambda step: iteration_of(pool, stats, step)), job(eager, lambda step: step))
    assert counted(stats) == (2, 16 - WARMING - 2 - 2, WARMING + 2)


def test_a_frozen_parameters_gradient_is_reread_on_replay(pool, device):
    """An optimizer uses any gradient that exists, whether or not the parameter is frozen."""
    eager, graphed = twins(mlp, device)
    data, stats = batches(10, device), CacheStats()

    def job(model, run):
        optimizer, weight = torch.optim.SGD(model.parameters(), lr=RATE), model[1][0].weight.requires_grad_(False)
        torch.manual_seed(1)
        called, log = run(lambda x: consumed_last(model, optimizer, x)), []
        for index, (x, _) in enumerate(data):
            weight.grad = torch.full_like(weight, index)
            log.append([called(x), weight.clone(), torch.tensor(weight.grad is None)])
        return log

    assert_same(job(graphed, lambda step: iteration_of(pool, stats, step)), job(eager, lambda step: step))
    assert counted(stats) == (1, 10 - WARMING - 1, WARMING)


def test_has_captured_reports_whether_anything_was_captured(pool, device):
    """Exact for the capturing thread. For other threads, and outside captures, the answer is 'maybe' (True)."""
    model, seen = mlp().to(device), unobserved()
    optimizer, has_captured = torch.optim.SGD(model.parameters(), lr=RATE), pool.backend.has_captured
    thread = OtherThread(lambda: setattr(seen, "elsewhere", has_captured()))

    def step(x):
        optimizer.zero_grad()
        before = has_captured()
        thread.run()
        x = x + 1
        seen.log.append((before, seen.elsewhere, has_captured()))
        return x

    run = iteration_of(pool, CacheStats(), step)
    for x, _ in batches(3, device):
        run(x)
    assert seen.log == [(True, True, True)] * 2 + [(False, True, True)]
    assert has_captured()


class Product(torch.autograd.Function):
    """Uses its inputs without a history, as layers of Megatron and Transformer Engine do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


def leaf_view(device):
    """Return a trainable tensor that is a view of another one: made without a history, it counts as a leaf."""
    with torch.no_grad():
        row = torch.ones(2, WIDTH, device=device).unbind()[0]
    return row.requires_grad_()


def test_views_made_in_a_run_are_no_trained_tensors(device):
    """Backward operations make views of parameters, which look like leaves. An autograd thread may free them late."""
    model, mine, row = mlp().to(device), torch.ones(WIDTH, device=device, requires_grad=True), leaf_view(device)
    with StorageAudit() as audit:
        Product.apply(model(torch.ones(2, WIDTH, device=device)) * mine, row).sum().backward()
    assert {id(leaf) for leaf in audit.leaves.values()} == {id(leaf) for leaf in (*model.parameters(), mine, row)}


def assert_trained(make, use, pool, device):
    """Assert that the tensor that `make()` returns gets eager's gradients in captured steps `use(tensor, x)`."""

    def job(capture):
        tensor, log = make(), []
        run = capture(lambda x: use(tensor, x).sum().backward())
        for x, _ in batches(8, device):
            run(x)
            log.append([tensor.grad.clone()])
            tensor.grad = None
        return log

    stats = CacheStats()
    assert_same(job(lambda step: iteration_of(pool, stats, step)), job(lambda step: step))
    return stats


def test_a_trained_view_from_before_the_call_gets_its_gradient(pool, device):
    stats = assert_trained(lambda: leaf_view(device), lambda row, x: Product.apply(x, row), pool, device)
    assert sum(stats.replays.values()) >= 3


WRITES = {
    "clamp_": lambda delta: delta.clamp_(-0.1, 0.1),
    "fill_": lambda delta: delta.fill_(0.5),
    "out": lambda delta: torch.mul(delta, 0.5, out=delta),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_tensor_that_is_written_in_the_step_and_then_trained_gets_its_gradient(pool, device, name):
    """As in adversarial training: the write returns the tensor itself, which is no view made in the run."""

    def use(delta, x):
        WRITES[name](delta.requires_grad_(False))
        return (x + delta.requires_grad_()).pow(2)

    assert_trained(lambda: torch.full((WIDTH,), 0.3, device=device), use, pool, device)


# ---- a parameter that leaves its module ------------------------------------------------------------------------------


class HeldTwice(torch.nn.Module):
    """Multiplies by a weight that a list holds too, so that it is trained after the module has another one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.held = [self.second.weight]

    def forward(self, x):
        return torch.nn.functional.linear(self.second(torch.tanh(self.first(x))), self.held[0])


@pytest.mark.parametrize("clears", ["module", "optimizer", "none"])
def test_a_replaced_parameter_that_the_step_still_trains_gets_its_gradients(pool, device, clears):
    def run(wrap):
        torch.manual_seed(0)
        model = HeldTwice().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

        def step(x):
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss.detach()

        call, found = wrap(step), []
        for number in range(12):
            if number == 6:
                model.second.weight = model.first.weight
            if clears != "none":
                (model if clears == "module" else optimizer).zero_grad()
            loss = call(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number)).to(device))
            found.append([loss.clone(), model.held[0].grad.clone(), model.held[0].detach().clone()])
            optimizer.step()
        return found

    stats = CacheStats()
    assert_same(run(lambda step: iteration_of(pool, stats, step)), run(lambda step: step))
    assert sum(stats.replays.values()) > 2

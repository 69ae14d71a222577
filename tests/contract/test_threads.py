"""Calls of several threads: each gets its own values, or is refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from graph_cache import BATCH, Buckets, BufferSpec, GraphCache, GraphError, Site, StaticBuffers
from graph_cache.core.stats import CacheStats
from tests.contract.training_models import LENGTH, ROWS, WIDTH, attached, iteration_of, twins
from tests.support.waiting import PATIENCE

INPUT = {"x": BufferSpec((BATCH, 4), torch.float32)}
THREADS, CALLS = 8, 400


def in_threads(call, count=CALLS, threads=THREADS):
    """Return the results of `call(index)` for every index, from several threads."""
    with ThreadPoolExecutor(threads) as executor:
        return list(executor.map(call, range(count)))


def named(index, device):
    """Return one to five rows whose values tell the call."""
    return torch.full((index % 5 + 1, 4), float(index), device=device)


@pytest.mark.parametrize("warm", [True, False])
def test_each_thread_gets_the_results_of_its_own_call(pool, device, warm):
    cache = GraphCache(device=device, pool=pool)
    run = cache.graphed(
        "model", lambda x: (x * 2, {"more": x.cumsum(1)}), INPUT, independent_rows=True, buckets=(1, 2, 4)
    )
    if warm:
        cache.warm()

    def call(index):
        x = named(index, device)
        doubled, more = run(x)
        return torch.equal(doubled, x * 2) and torch.equal(more["more"], x.cumsum(1))

    assert all(in_threads(call))
    counts = cache.stats.fallbacks
    assert cache.stats.replays.total() + counts.total() == CALLS  # counters lose none
    assert {reason for *_, reason in counts} == {"above_largest_bucket"}


def test_threads_of_several_functions_of_one_pool_do_not_meet(pool, device):
    caches = [GraphCache(device=device, pool=pool) for _ in range(2)]
    runs = [
        cache.graphed(name, lambda x, by=by: (x * by).sin() + x, INPUT, independent_rows=True, buckets=(4, 8))
        for cache in caches
        for by, name in enumerate(("first", "second"), 2)
    ]

    def call(index):
        by, x = 2 + index % 2, named(index, device)
        return torch.equal(runs[index % 4](x=x), (x * by).sin() + x)

    assert all(in_threads(call))


def test_a_graph_may_be_dropped_while_other_threads_call(pool, device):
    cache = GraphCache(device=device, pool=pool)
    run = cache.graphed("model", lambda x: x * 3, INPUT, independent_rows=True, buckets=(2, 8))

    def call(index):
        if index % 50 == 7:
            cache.invalidate("test") if index % 100 == 7 else cache.clear()
        x = named(index, device)
        return torch.equal(run(x=x), x * 3)

    assert all(in_threads(call))


def test_functions_that_are_never_captured_run_at_the_same_time(pool, device):
    meet, calls = threading.Barrier(2, timeout=PATIENCE), []

    def fn(x):
        calls.append(None)  # refused
        if len(calls) > 1:
            meet.wait()
        return x + 1

    run = GraphCache(device=device, pool=pool).graphed("model", fn, INPUT, independent_rows=True, buckets=(8,))
    run(x=named(1, device))
    assert all(in_threads(lambda index: torch.equal(run(x=named(index, device)), named(index, device) + 1), 2, 2))


@pytest.mark.gpu
def test_calls_on_different_streams_do_not_meet(pool, device):
    if device.type != "cuda":
        pytest.skip("there are no streams")
    weight = torch.eye(1024, device=device)
    spec = {"x": BufferSpec((BATCH, 1024), torch.float32)}
    run = GraphCache(device=device, pool=pool).graphed(
        "model", lambda x: x @ weight @ weight, spec, independent_rows=True, buckets=(1024,)
    )

    def call(index):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            x = torch.full((1000, 1024), float(index), device=device)
            return torch.equal(run(x=x), x)

    assert all(in_threads(call))


def low_level(pool, device):
    cache = GraphCache(pool=pool)
    site = Site("double", [lambda x: x * 2], StaticBuffers(INPUT, 4, device), Buckets((4,)))
    cache.add_site(site)
    return cache, site.buffers


def raised_in_a_thread(call):
    found = []

    def work():
        try:
            call()
        except GraphError as error:
            found.append(str(error))

    thread = threading.Thread(target=work, name="second")
    thread.start()
    thread.join()
    return found[0] if found else ""


def test_a_second_thread_that_runs_a_plan_is_refused_by_name(pool, device):
    cache, buffers = low_level(pool, device)

    def run(value=1.0):
        buffers.load({"x": torch.full((4, 4), value, device=device)}, 4, 4)
        return cache.run(cache.plan("double", 4)).copy()

    assert not raised_in_a_thread(run)  # it ends, so that this one takes over
    run()
    message = raised_in_a_thread(lambda: cache.run(cache.plan("double", 4)))
    assert repr(threading.current_thread().name) in message and "'second'" in message and "pool.turn()" in message
    assert "MainThread" in raised_in_a_thread(cache.warm) or not cache.pending()
    assert cache.invalidate("test") and "MainThread" in raised_in_a_thread(cache.warm)

    def call(index):
        with pool.turn():
            return bool(run(float(index)).eq(2 * index).all())

    assert all(in_threads(call))


def test_inputs_that_another_thread_loaded_are_refused(pool, device):
    cache, buffers = low_level(pool, device)
    x = torch.ones(4, 4, device=device)
    buffers.load({"x": x}, 4, 4)
    raised_in_a_thread(lambda: buffers.load({"x": x * 7}, 4, 4))
    with pytest.raises(GraphError, match="were loaded by the thread"):
        cache.run(cache.plan("double", 4))
    buffers.load({"x": x}, 4, 4)
    assert cache.run(cache.plan("double", 4)).copy().eq(2).all()


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Sequential(nn.GELU(), nn.Linear(64, 64)), nn.Linear(64, WIDTH))


def gradients(model, x, parameters=None):
    loss = model(x).pow(2).mean()
    return [loss.detach().clone(), *torch.autograd.grad(loss, parameters or list(model.parameters()))]


def test_attached_modules_called_by_two_threads_give_each_its_own_gradients(pool, device):
    model, eager = twins(mlp, device)
    graphs, stats = attached(model, ["0", "1", "2"], pool)
    inputs = torch.randn(24, ROWS, LENGTH, WIDTH, device=device)
    expected = [gradients(eager, x) for x in inputs]
    for index in range(4):
        gradients(model, inputs[index])
    assert stats.replays  # of the first thread, which stays the owner
    wrong, start, parameters = [], threading.Barrier(3, timeout=PATIENCE), list(model.parameters())

    def work(offset):
        start.wait()
        for index in range(offset, len(inputs), 3):
            found = gradients(model, inputs[index], parameters)
            if not all(map(torch.equal, found, expected[index])):
                wrong.append((offset, index))

    threads = [threading.Thread(target=work, args=(offset,)) for offset in (1, 2)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()
    assert not wrong
    reasons = {reason for *_, reason in stats.fallbacks}
    assert "other_thread" in reasons, reasons
    replays = stats.replays.total()
    gradients(model, inputs[0])
    assert stats.replays.total() > replays  # the owner goes on


def test_a_capture_waits_for_other_threads(pool, device):
    """A capture replaces the parameters of a module for a moment, which an eager call would read."""
    model, eager = twins(mlp, device)
    graphs, stats = attached(model, [""], pool, warmup=1)
    x = torch.randn(ROWS, LENGTH, WIDTH, device=device)
    expected, wrong, stop = gradients(eager, x), [], threading.Event()
    gradients(model, x)
    parameters = list(model.parameters())

    def work():
        while not stop.is_set():
            if not all(map(torch.equal, gradients(model, x, parameters), expected)):
                wrong.append(None)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(6):
        assert all(map(torch.equal, gradients(model, x), expected))
        graphs.clear()
    stop.set()
    thread.join()
    assert not wrong


def test_a_thread_takes_over_attached_modules_from_one_that_has_ended(pool, device):
    model, eager = twins(mlp, device)
    _, stats = attached(model, ["0", "1", "2"], pool)
    x = torch.randn(ROWS, LENGTH, WIDTH, device=device)
    thread = threading.Thread(target=gradients, args=(model, x))
    thread.start()
    thread.join()
    for _ in range(4):
        assert all(map(torch.equal, gradients(model, x), gradients(eager, x)))
    assert stats.replays and not any(reason == "other_thread" for *_, reason in stats.fallbacks)


def test_iterations_of_several_threads_run_one_after_another(pool, device):
    model, stats = nn.Linear(4, 1, device=device), CacheStats()

    def step(x):
        model.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss.detach(), model.weight.grad.clone()

    run = iteration_of(pool, stats, step)
    inputs = torch.randn(8, 3, 4, device=device)
    expected = [[value.clone() for value in step(x)] for x in inputs]

    def call(index):
        return all(map(torch.equal, run(inputs[index % 8]), expected[index % 8]))

    assert all(in_threads(call, 100, 4))
    assert stats.replays.total() > 50

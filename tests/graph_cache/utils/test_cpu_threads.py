"""The number of CPU threads of steps: chosen on simulated machines, and graphs that replay with another number."""

from __future__ import annotations

import logging
import os
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from engine import Engine, EngineConfig
from graph_cache import BATCH, BufferSpec, GraphCache
from graph_cache.utils.cpu_threads import ThreadTuner, threads_are_unset

STEP = 0.02  # seconds of one thread


@pytest.fixture
def threads(monkeypatch):
    """Return a function that makes a number of threads PyTorch's default on a machine with as many cores."""
    before = torch.get_num_threads()

    def set_default(count: int) -> None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)), raising=False)
        torch.set_num_threads(count)

    yield set_default
    torch.set_num_threads(before)


class Machine:
    """Simulated cores with `busy` other processes. Times are the machine's; the numbers of threads are PyTorch's.

    A step with n threads takes 1 / n of the work if each has a core. If not, each of its many operations waits until
    the system runs the last thread. `imbalance`: the share of a step in which its first thread waits for others also
    where each has a core.
    """

    def __init__(self, cores: int, busy: int = 0, imbalance: float = 0.0, noise: float = 0.05):
        self.cores, self.busy, self.imbalance, self.noise = cores, busy, imbalance, noise
        self.now = self.cpu = 0.0
        self.random = random.Random(1)
        self.used: list[int] = []

    def seconds(self, threads: int) -> float:
        free = max(0.0, self.cores - self.busy)
        if threads == 1:
            return STEP * max(1.0, (1 + self.busy) / self.cores)
        return STEP / threads * (1.0 if threads <= free else 5.0 * (threads + self.busy) / self.cores)

    def run(self) -> float:
        threads = torch.get_num_threads()
        seconds = self.seconds(threads) * self.random.uniform(1, 1 + self.noise)
        self.now += seconds
        waits = threads > 1 and threads + self.busy > self.cores
        self.cpu += seconds * (0.4 if waits else 1 - self.imbalance * (threads > 1))
        self.used.append(threads)
        return seconds

    def best(self) -> float:
        return min(map(self.seconds, range(1, self.cores + 1)))

    def tuner(self) -> ThreadTuner:
        return ThreadTuner(lambda: self.now, lambda: self.cpu)


@pytest.mark.parametrize("busy", [0, 1, 2])
@pytest.mark.parametrize("cores", [2, 8])
def test_steps_beside_busy_processes_take_about_the_time_of_the_best_number(threads, cores, busy):
    threads(cores)
    machine = Machine(cores, busy)
    tuner = machine.tuner()
    for _ in range(100):
        with tuner.step("decode"):
            machine.run()
    seconds = []
    for _ in range(1000):
        with tuner.step("decode"):
            seconds.append(machine.run())
    assert sum(seconds) <= 1.2 * len(seconds) * machine.best()  # at least 0.8 of the speed
    assert torch.get_num_threads() == cores  # between steps it is the caller's


def test_an_idle_machine_loses_nothing(threads):
    threads(4)
    machine = Machine(4)
    tuner = machine.tuner()
    for _ in range(2000):
        with tuner.step("decode"):
            machine.run()
    assert set(machine.used) == {4}


def test_threads_that_wait_for_each_other_on_an_idle_machine_cost_few_trials(threads):
    threads(4)
    machine = Machine(4, imbalance=0.3)
    tuner = machine.tuner()
    for _ in range(20_000):  # 100 s
        with tuner.step("decode"):
            machine.run()
    assert tuner.count == 4 and machine.now < 1.02 * 20_000 * STEP / 4 * 1.025


def test_all_threads_are_used_again_when_the_other_processes_have_ended(threads, caplog):
    threads(2)
    caplog.set_level(logging.INFO, "graph_cache.utils.cpu_threads")
    machine = Machine(2, busy=2)
    tuner = machine.tuner()
    while machine.now < 60:
        with tuner.step("decode"):
            machine.run()
    assert tuner.count == 1 and "1 CPU thread instead of 2" in caplog.text
    machine.busy = 0
    ended = machine.now
    while tuner.count == 1 and machine.now < ended + 60:
        with tuner.step("decode"):
            machine.run()
    assert tuner.count == 2 and machine.now - ended < 25
    assert len(caplog.records) == 2  # one line for each change


def test_steps_of_other_kinds_are_not_compared(threads):
    """Prompts and decodes alternate without order; a trial must not take a long prompt for a slow number."""
    threads(2)
    machine = Machine(2, busy=2)
    tuner, order = machine.tuner(), random.Random(3)
    for _ in range(600):
        tokens = order.choice((0, 0, 0, 200, 256, 17))
        with tuner.step(("prefill", tokens.bit_length()), tokens or 1):
            for _ in range(1 + tokens // 16):
                machine.run()
    assert tuner.count == 1
    assert machine.used[-2000:].count(1) > 1900


def test_a_step_that_raises_restores_the_number_and_is_not_counted(threads):
    threads(2)
    machine = Machine(2, busy=2)
    tuner = machine.tuner()
    for _ in range(50):
        with pytest.raises(ZeroDivisionError), tuner.step("decode"):
            machine.run()
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
    assert tuner.count == 2


def test_a_number_that_the_caller_sets_later_is_used(threads):
    threads(4)
    machine = Machine(4, busy=4)
    steps, training = machine.tuner(), machine.tuner()
    for _ in range(50):
        with steps.step("decode"):
            machine.run()
    assert steps.count < 4
    torch.set_num_threads(3)
    with steps.step("decode"):
        assert torch.get_num_threads() == 3
    with steps.held():
        assert torch.get_num_threads() == 3

    torch.set_num_threads(4)
    for _ in range(50):
        training.begin("step")
        machine.run()
    assert training.count < 4
    torch.set_num_threads(3)
    for _ in range(50):
        training.begin("step")
        machine.run()
        assert torch.get_num_threads() == 3
    training.end()
    assert torch.get_num_threads() == 3


def test_the_end_of_training_restores_the_number(threads):
    threads(2)
    machine = Machine(2, busy=2)
    tuner = machine.tuner()
    for _ in range(50):
        tuner.begin("step")
        machine.run()
    assert tuner.count == 1
    tuner.end()
    assert torch.get_num_threads() == 2


def test_what_sets_the_number_of_threads(threads, monkeypatch):
    threads(4)
    assert threads_are_unset()
    torch.set_num_threads(3)
    assert not threads_are_unset()
    torch.set_num_threads(4)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "4")
        assert not threads_are_unset()
        monkeypatch.delenv(name)


# ---- graphs --------------------------------------------------------------------------------------------------------

KV = 2


class Layer(nn.Module):
    """Attention with grouped queries and a feed-forward layer, large enough that kernels split them over threads."""

    def __init__(self, dtype: torch.dtype, width: int = 256):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(width, 2 * width, dtype=dtype)
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.out = nn.Linear(width, width, dtype=dtype)

    def forward(self, x):
        q, kv = self.qkv(x).split([x.shape[-1], x.shape[-1]], -1)
        q = q.unflatten(-1, (8, -1)).transpose(1, 2)
        k, v = kv.unflatten(-1, (2, 4, -1)).transpose(1, 3).unbind(2)
        x = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.norm(self.out(x.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_equals_eager_with_each_number_of_threads(threads, dtype):
    layer = Layer(dtype).eval()
    x = torch.randn(2, 96, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    for captured_with in (1, 2):
        threads(captured_with)
        cache = GraphCache()
        call = cache.graphed("layer", layer, {"x": BufferSpec((BATCH, 96, 256), dtype)}, buckets=(2,), watch=layer)
        with torch.no_grad():
            call(x)
            for count in (1, 2, 1, 2):
                torch.set_num_threads(count)
                wanted = layer(x)
                assert torch.equal(call(x), wanted)
        assert cache.stats.captures.total() == 1 and cache.stats.replays.total() >= 4
        assert not cache.stats.invalidations


@pytest.mark.parametrize("captured_with", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_training_replays_equal_eager_steps_with_each_number_of_threads(threads, captured_with):
    threads(captured_with)
    counts = [captured_with] * 4 + [1, 2, 1, 2]

    def losses(attaches: bool) -> tuple[list[torch.Tensor], int]:
        model = nn.Sequential(Layer(torch.float32), Layer(torch.float32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        with Engine(EngineConfig(mode="training", num_threads=captured_with)) as engine:
            if attaches:
                engine.attach(model, modules=["0", "1"])
            for step, count in enumerate(counts):
                torch.set_num_threads(count)
                x = torch.randn(2, 96, 256, generator=torch.Generator().manual_seed(step))
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found += [loss.detach(), *(parameter.detach().clone() for parameter in model.parameters())]
            return found, engine.stats.replays.total()

    (found, replays), (wanted, _) = losses(True), losses(False)
    assert replays >= 2 * 4
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("api", ["attach", "iteration"])
def test_training_is_tuned_only_where_nothing_sets_the_number(threads, api, monkeypatch):
    def trained(**settings) -> tuple[set[int], Engine]:
        model = nn.Linear(8, 8)
        engine = Engine(EngineConfig(mode="training", **settings))

        def forward(x):
            model(x).square().mean().backward()
            return x.sum()

        if api == "attach":
            engine.attach(model)
        else:
            forward = engine.capture_iteration(forward, device="cpu")
        used = set()
        for _ in range(200):
            forward(torch.ones(2, 8))
            used.add(torch.get_num_threads())
            model.zero_grad()
        replays = engine.stats.replays.total()
        engine.detach()
        assert replays > 100
        return used

    threads(2)
    # steps in which the thread never runs: the machine is always busy
    monkeypatch.setattr("time.thread_time", lambda: 0.0)
    monkeypatch.setattr("graph_cache.utils.cpu_threads.STALLED_SECONDS", 0.0)
    assert trained() == {1, 2}  # trials ran steps with one thread
    assert torch.get_num_threads() == 2
    assert trained(num_threads=2) == {2}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert trained() == {2}

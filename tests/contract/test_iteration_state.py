"""What a captured iteration uses beside modules that are called: bare parameters, methods, casts and Python state."""

from __future__ import annotations

import copy
import re
import types

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from graph_cache.core.stats import CacheStats
from tests.contract.training_models import WIDTH, assert_same, iteration_of

STEPS = 10


def data(device):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, WIDTH, generator=generator).to(device) for _ in range(STEPS)]


def job(build, pool, device, *, between=lambda job, index: None, around=None):
    """Run `build(device).step` as captured and as it is. Return the counters of the captured one.

    A job has `step(x)`, `trained` (a list of tensors) and `state()` (values to compare).
    """
    logs, stats = [], CacheStats()
    for captured in (True, False):
        torch.manual_seed(0)
        now = build(device)
        run = iteration_of(pool, stats, now.step) if captured else now.step
        torch.manual_seed(1)
        logs.append([])
        for index, x in enumerate(data(device)):
            for parameter in now.trained:
                parameter.grad = None
            between(now, index)
            if around is None:
                result = run(x)
            else:
                with around(now, x):
                    result = run(x)
            logs[-1].append(
                [
                    result.detach().clone(),
                    *[torch.zeros(()) if p.grad is None else p.grad.clone() for p in now.trained],
                    *[torch.as_tensor(value).clone() for value in now.state()],
                ]
            )
            with torch.no_grad():
                for parameter in now.trained:
                    if parameter.grad is not None:
                        parameter.sub_(0.05 * parameter.grad)
    assert_same(*logs)
    return stats


class Job:
    """Base of the jobs of this file: one linear layer."""

    def __init__(self, device):
        self.model = nn.Linear(WIDTH, WIDTH).to(device)
        self.trained = list(self.model.parameters())

    def step(self, x):
        loss = self.loss(x)
        loss.backward()
        return loss

    def loss(self, x):
        return self.model(x).pow(2).mean()

    def state(self):
        return []


# ---- trained tensors and modules that no call shows ----------------------------------------------------------------


class Bare(Job):
    def __init__(self, device):
        self.scale = nn.Parameter(torch.ones(WIDTH, device=device))
        self.shift = torch.zeros(WIDTH, device=device, requires_grad=True)
        self.trained = [self.scale, self.shift]

    def loss(self, x):
        return (x * self.scale + self.shift).pow(2).mean()


class ByForward(Job):
    def __init__(self, device):
        super().__init__(device)
        self.model = nn.Sequential(self.model, nn.Dropout(0.5), nn.BatchNorm1d(WIDTH).to(device))

    def loss(self, x):
        for layer in self.model:
            x = layer.forward(x)
        return x.pow(2).mean()

    def state(self):
        return list(self.model.buffers())


class ByMethod(Job):
    class Model(nn.Linear):
        def score(self, x):
            return nn.functional.dropout(x @ self.weight + self.bias, 0.5, self.training)

    def __init__(self, device):
        self.model = self.Model(WIDTH, WIDTH).to(device)
        self.trained = list(self.model.parameters())

    def loss(self, x):
        return self.model.score(x).pow(2).mean()


def switch_modes(now, index):
    now.model.train(index < 5)


def move(now, index):
    if index == 6:
        for parameter in now.trained:
            parameter.data = parameter.data.clone()


@pytest.mark.parametrize(
    ("build", "between"),
    [(Bare, move), (ByForward, switch_modes), (ByForward, move), (ByMethod, switch_modes), (ByMethod, move)],
)
def test_trained_tensors_and_modules_are_found_without_module_calls(pool, device, build, between):
    stats = job(build, pool, device, between=between)
    assert sum(stats.replays.values()) >= 2 and not stats.failed_captures
    assert sum(stats.invalidations.values()) == (between is move)


class BareList(Job):
    """Trains tensors of a list, one of them from a later step on."""

    def __init__(self, device):
        self.trained = [nn.Parameter(torch.ones(WIDTH, device=device)), torch.ones(WIDTH, device=device)]

    def loss(self, x):
        return (x * self.trained[0] * self.trained[1]).pow(2).mean()


def replace_leaf(now, index):
    if index == 6:
        now.trained[0] = nn.Parameter(now.trained[0].detach() * 3)


def train_another(now, index):
    if index == 6:
        now.trained[1].requires_grad_()


@pytest.mark.parametrize("between", [replace_leaf, train_another])
def test_another_trained_tensor_without_a_module_is_noticed(pool, device, between):
    stats = job(BareList, pool, device, between=between)
    assert sum(stats.replays.values()) >= 2
    assert sum(stats.invalidations.values()) == (between is replace_leaf)  # the other one is another call signature


class ComputedBefore(Job):
    """Uses a tensor that was computed from trainable ones before the step."""

    def __init__(self, device):
        super().__init__(device)
        self.scale = nn.Parameter(torch.ones(WIDTH, device=device))
        self.trained.append(self.scale)
        self.prepared = None

    def loss(self, x):
        return (self.model(x) * self.prepared).pow(2).mean()


def test_a_tensor_with_history_from_before_the_call_keeps_the_step_eager(pool, device):
    stats = job(ComputedBefore, pool, device, between=lambda now, index: setattr(now, "prepared", now.scale * 2))
    assert not stats.replays


# ---- autocast ------------------------------------------------------------------------------------------------------


def autocast(device):
    return torch.autocast(device.type, torch.bfloat16)


class Region:
    """An autocast region that may have cached casts of the weights before the step begins."""

    def __init__(self, now, x, evaluates):
        self._context, self._now, self._x, self._evaluates = autocast(x.device), now, x, evaluates

    def __enter__(self):
        self._context.__enter__()
        if self._evaluates:
            self._now.model(self._x)

    def __exit__(self, *exc_info):
        self._context.__exit__(*exc_info)


class Cast(Job):
    def loss(self, x):
        return self.model(x).float().pow(2).mean()


def test_a_region_around_the_step_alone_is_part_of_the_graph(pool, device):
    stats = job(Cast, pool, device, around=lambda now, x: Region(now, x, evaluates=False))
    assert stats.replays


def test_casts_from_before_the_step_keep_it_eager(pool, device):
    stats = job(Cast, pool, device, around=lambda now, x: Region(now, x, evaluates=True))
    assert not stats.replays
    assert "casts of weights from before the call" in stats.failures["iteration"]


def test_a_region_that_outlives_the_steps_keeps_them_eager(pool, device):
    with autocast(device):
        stats = job(Cast, pool, device)
    assert not stats.replays


# ---- Python state that the step changes ------------------------------------------------------------------------------


class StepCount(torch.optim.Optimizer):
    """SGD with a rate that depends on a Python count in its state."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            parameter.sub_(parameter.grad, alpha=0.1 / state["step"])


class WithOptimizer(Job):
    def __init__(self, device):
        super().__init__(device)
        self.optimizer = StepCount(self.trained)

    def step(self, x):
        loss = super().step(x)
        self.optimizer.step()
        return loss

    def state(self):
        return [self.optimizer.state[parameter]["step"] for parameter in self.trained]


class WithScheduler(Job):
    def __init__(self, device):
        super().__init__(device)
        self.optimizer = torch.optim.SGD(self.trained, lr=torch.tensor(0.1, device=device))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def step(self, x):
        loss = super().step(x)
        self.optimizer.step()
        self.scheduler.step()
        return loss

    def state(self):
        return [self.scheduler.last_epoch]


class Counter(Job):
    calls = 0

    def loss(self, x):
        self.calls += 1
        return super().loss(x) * self.calls

    def state(self):
        return [self.calls]


class ModuleCounter(Job):
    class Model(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * self.calls

    def __init__(self, device):
        self.model = self.Model(WIDTH, WIDTH).to(device)
        self.trained = list(self.model.parameters())

    def state(self):
        return [self.model.calls]


class Momentum(Job):
    """Replaces an attribute by a tensor that the next step reads."""

    def __init__(self, device):
        super().__init__(device)
        self.mean = torch.zeros((), device=device)

    def loss(self, x):
        self.mean = 0.9 * self.mean + x.mean()
        return super().loss(x) + self.mean

    def state(self):
        return [self.mean]


class Logged(Job):
    def __init__(self, device):
        super().__init__(device)
        self.log = {"steps": 0}

    def loss(self, x):
        self.log["steps"] += 1
        return super().loss(x)

    def state(self):
        return [self.log["steps"]]


class SwappedMemory(Job):
    """An average whose memory is replaced, as some implementations of vector quantisation do."""

    def __init__(self, device):
        super().__init__(device)
        self.model.register_buffer("average", torch.zeros(WIDTH, device=device))

    def loss(self, x):
        self.model.average.data = 0.9 * self.model.average + x.mean(0)
        return super().loss(x - self.model.average)

    def state(self):
        return [self.model.average]


CHANGES = {
    WithOptimizer: "step",
    WithScheduler: "last_epoch",
    Counter: "calls",
    ModuleCounter: "calls",
    Momentum: "mean",
    Logged: r"\['steps'\]",
    SwappedMemory: "memory of .*average",
}


@pytest.mark.parametrize("build", CHANGES, ids=lambda build: build.__name__)
def test_python_state_that_a_step_changes_keeps_it_eager(pool, device, build):
    stats = job(build, pool, device)
    assert not stats.replays and sum(stats.failed_captures.values()) >= 1
    assert re.search(f"changes .*{CHANGES[build]}", stats.failures["iteration"])


class LastLoss(Job):
    """Keeps a result in an attribute that no step reads."""

    last = None

    def loss(self, x):
        loss = super().loss(x)
        self.last = loss.detach()
        return loss

    def state(self):
        return [self.last]


def test_a_result_that_only_the_job_reads_may_replace_an_attribute(pool, device):
    assert job(LastLoss, pool, device).replays


class LastMean(Job):
    """Keeps a result in a buffer that no step reads."""

    def __init__(self, device):
        super().__init__(device)
        self.model.register_buffer("mean", torch.zeros(WIDTH, device=device))

    def loss(self, x):
        self.model.mean = x.mean(0)
        return super().loss(x)

    def state(self):
        return [self.model.mean]


def test_a_result_may_replace_a_buffer_that_is_not_read(pool, device):
    stats = job(LastMean, pool, device)
    assert sum(stats.captures.values()) == 1 and not stats.invalidations


# ---- Python state that changes between two calls ---------------------------------------------------------------------


class Scaled(Job):
    def __init__(self, device):
        super().__init__(device)
        self.scale, self.steps, self.options = 1, 0, types.SimpleNamespace(shift=0.0)
        self.weights, self.mask = [1.0], torch.ones(WIDTH, device=device)

    def loss(self, x):
        return super().loss(x * self.mask) * self.scale * self.weights[0] + self.options.shift


def rescale(now, index):
    now.scale = 1 + index // 5


def reshift(now, index):
    now.options.shift = -0.0 if index < 5 else 1.5


def reweigh(now, index):
    now.weights[0] = 1.0 + index // 5


def replace_mask(now, index):
    if index == 5:
        now.mask = torch.zeros_like(now.mask)


@pytest.mark.parametrize("between", [rescale, reshift, reweigh, replace_mask])
def test_python_state_that_a_step_reads_is_part_of_the_signature(pool, device, between):
    stats = job(Scaled, pool, device, between=between)
    assert sum(stats.captures.values()) == 2 and sum(stats.replays.values()) >= 2


def test_python_state_that_no_step_reads_may_change(pool, device):
    stats = job(Scaled, pool, device, between=lambda now, index: setattr(now, "steps", index))
    assert sum(stats.captures.values()) == 1 and sum(stats.replays.values()) == STEPS - 4


class KeepsLosses(Job):
    """An owner whose list, which no step reads, grows between two steps."""

    def __init__(self, device):
        super().__init__(device)
        self.losses_so_far = []


def test_a_list_that_no_step_reads_may_grow(pool, device):
    stats = job(KeepsLosses, pool, device, between=lambda now, index: now.losses_so_far.append(index))
    assert sum(stats.captures.values()) == 1 and sum(stats.replays.values()) == STEPS - 4


def test_a_closure_that_changes_gets_another_graph(pool, device):
    model = nn.Linear(WIDTH, WIDTH).to(device)
    scale, stats = 1.0, CacheStats()

    def step(x):
        return (model(x) * scale).sum()

    run, results, expected = iteration_of(pool, stats, step), [], []
    for index, x in enumerate(data(device)):
        scale = 1.0 if index < 6 else 2.0
        results.append(run(x))
        expected.append(copy.deepcopy(model)(x).mul(scale).sum().detach())
    assert_same([results], [expected])
    assert sum(stats.captures.values()) == 2


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


@pytest.mark.parametrize("warm", [0, 4])
def test_a_call_within_a_function_mode_runs_eager(pool, device, warm):
    stats = CacheStats()
    weight = nn.Parameter(torch.ones(4, device=device))

    def step(x):
        loss = torch.tanh(x * weight).sum()
        loss.backward()
        return loss.detach()

    run = iteration_of(pool, stats, step)
    x = torch.ones(4, device=device)
    for _ in range(warm):
        run(x)
    with Doubling():
        found = run(x)
    assert torch.equal(found, (2 * torch.tanh(x)).sum())
    assert any(reason == "transform" for *_, reason in stats.fallbacks)


def test_lazy_views_of_other_values_run_eager(pool, device):
    """A copy of a lazily negated tensor is computed with other kernels than the tensor."""
    stats = CacheStats()
    weight = nn.Parameter(torch.ones(4, device=device))
    run = iteration_of(pool, stats, lambda x: (x * weight).sum().detach())
    x = torch.complex(torch.ones(4), torch.ones(4)).to(device).conj().imag
    assert x.is_neg()
    for _ in range(4):
        assert run(x) == -4
    assert {reason for *_, reason in stats.fallbacks} == {"argument_without_memory"} and not stats.replays


def test_a_replay_inside_an_autocast_region_casts_nothing_more(pool, device):
    """The casts of the capture are among its operations. A recurrent layer outside of autocast has none."""
    torch.manual_seed(0)
    cell, stats = nn.LSTM(WIDTH, WIDTH, batch_first=True).to(device), CacheStats()

    def step(x):
        with torch.autocast(device.type, enabled=False):
            return cell(x)[0].detach()

    run = iteration_of(pool, stats, step)
    for _ in range(6):
        x = torch.randn(2, 3, WIDTH, device=device)
        with torch.autocast(device.type, torch.bfloat16):
            assert torch.equal(run(x), step(x))
    assert sum(stats.replays.values()) >= 2


@pytest.mark.parametrize("own_region", [False, True])
def test_fused_attention_in_an_autocast_region_is_never_replayed_in_another(pool, device, own_region):
    """The fused operation casts inside, by the region in which it runs."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, device=device).eval().requires_grad_(False)
    stats = CacheStats()

    def step(x):
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=own_region):
            inside = layer(x)
        return inside + x

    run = iteration_of(pool, stats, step)
    for enabled in (True, True, True, True, False, False, False, False, True):
        x = torch.randn(2, 3, WIDTH, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            assert torch.equal(run(x), step(x)), enabled


class Kept:
    """What a step keeps from call to call."""

    one = other = None


@pytest.mark.parametrize("what", ["gradient", "result twice", "view"])
def test_results_that_are_kept_in_memory_with_other_users_run_eager(pool, device, what):
    """Copies of a replay would not change together, as in eager."""

    def run(wrap):
        torch.manual_seed(0)
        model, kept, log = nn.Linear(WIDTH, WIDTH).to(device), Kept(), []

        def step(x):
            y = model(x)
            loss = y.square().mean()
            loss.backward()
            kept.one = model.weight.grad if what == "gradient" else y.detach()
            kept.other = None if what == "gradient" else kept.one if what == "result twice" else kept.one[0]
            return loss.detach()

        step = wrap(step)
        for x in data(device):
            step(x)
            model.weight.grad.mul_(0.5)
            if kept.other is not None:
                kept.other.add_(1)
            log.append([kept.one.clone(), *map(torch.clone, model.state_dict().values())])
        return log

    stats = CacheStats()
    assert_same(run(lambda step: iteration_of(pool, stats, step)), run(lambda step: step))
    assert not stats.replays

"""Tensors in host memory: graphs of a GPU hold their values as constants, so what uses them runs eager there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graph_cache.core.buffers import BufferSpec
from graph_cache.core.cache import GraphCache
from graph_cache.core.stats import CacheStats
from graph_cache.guards.audit import StorageAudit
from tests.contract.training_models import WIDTH, assert_same, attached, batches, iteration_of, train, twins

OPTIMIZERS = {
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, lr_decay=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=0.1),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
REASON = "host memory"


class ScaledByTheHost(nn.Linear):
    """Multiplies by a plain tensor attribute, which `.to(device)` does not move."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.scale = torch.tensor(1.0)

    def forward(self, x):
        return super().forward(x) * self.scale


class CountsOnTheHost(ScaledByTheHost):
    def forward(self, x):
        self.scale.add_(1)
        return nn.Linear.forward(self, x)


class ReadsTheHostInBackward(ScaledByTheHost):
    def forward(self, x):
        return ScaledGradient.apply(nn.Linear.forward(self, x), self)


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.module.scale, None


class NewTensorsOnTheHost(nn.Linear):
    """Makes constants at every call, which a graph may hold."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(x) * torch.tensor(2.0) + torch.full((), 0.5)


def assert_refused_on_a_gpu(stats, device, log):
    """A GPU must refuse the capture for its reason; a CPU must replay."""
    if device.type == "cpu":
        assert sum(stats.replays.values()) and not stats.failed_captures
    else:
        assert not sum(stats.replays.values()) and REASON in log


def changed_between(model, data):
    """Train, and write the host's tensor before each step."""
    log = []
    for index, micro in enumerate(data):
        model.scale.fill_(1 + index)
        log += train(model, [micro])
    return [*log, [model.scale.clone()]]


@pytest.mark.parametrize("build", [ScaledByTheHost, CountsOnTheHost, ReadsTheHostInBackward])
def test_attached_modules_use_current_values_of_the_host(pool, device, build, caplog):
    eager, graphed = twins(build, device)
    _, stats = attached(graphed, [""], pool)
    data = batches(6, device)
    assert_same(changed_between(graphed, data), changed_between(eager, data))
    assert_refused_on_a_gpu(stats, device, caplog.text)


def test_new_tensors_on_the_host_are_constants(pool, device):
    eager, graphed = twins(NewTensorsOnTheHost, device)
    _, stats = attached(graphed, [""], pool)
    data = batches(6, device)
    assert_same(train(graphed, data), train(eager, data))
    assert sum(stats.replays.values()) and not stats.failed_captures


@pytest.mark.parametrize("build", [ScaledByTheHost, CountsOnTheHost, ReadsTheHostInBackward])
def test_iterations_use_current_values_of_the_host(pool, device, build, caplog):
    eager, graphed = twins(build, device)
    stats, logs = CacheStats(), []
    for model in (graphed, eager):

        def step(x, model=model):
            model.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss.detach()

        run, log = iteration_of(pool, stats, step) if model is graphed else step, []
        for index, (x,) in enumerate(batches(6, device, micro=1)):
            model.scale.fill_(1 + index)
            loss = run(x).clone()
            log.append([loss, model.scale.clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
        logs.append(log)
    assert_same(*logs)
    assert_refused_on_a_gpu(stats, device, caplog.text)


@pytest.mark.parametrize("build", [ScaledByTheHost, CountsOnTheHost])
def test_cached_functions_use_current_values_of_the_host(pool, device, build, caplog):
    eager, graphed = twins(build, device)
    cache = GraphCache(device=device, pool=pool)
    run = cache.graphed(
        "model", lambda x: graphed(x), {"x": BufferSpec(("batch", WIDTH), torch.float32)}, buckets=(4,), watch=graphed
    )
    with torch.inference_mode():
        for index in range(5):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).to(device)
            for model in (eager, graphed):
                model.scale.fill_(1 + index)
            assert_same([[run(x=x), graphed.scale]], [[eager(x), eager.scale]])
    assert_refused_on_a_gpu(cache.stats, device, caplog.text)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_step_inside_keep_their_state(pool, device, name, caplog):
    eager, graphed = twins(lambda: nn.Linear(WIDTH, WIDTH), device)
    stats, logs = CacheStats(), []
    for model in (graphed, eager):
        optimizer = OPTIMIZERS[name](model.parameters())

        def step(x, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run, log = iteration_of(pool, stats, step) if model is graphed else step, []
        for (x,) in batches(6, device, micro=1):
            loss = run(x).clone()
            state = [
                value.clone() if isinstance(value, torch.Tensor) else torch.tensor(value)
                for one in optimizer.state.values()
                for value in one.values()
                if value is not None
            ]
            log.append([loss, *state, *[parameter.detach().clone() for parameter in model.parameters()]])
        logs.append(log)
    assert_same(*logs)
    if device.type != "cpu" and name != "sgd":
        assert not stats.replays
        assert "capturable" in caplog.text and type(optimizer).__name__ in caplog.text


@pytest.mark.parametrize(
    ("use", "is_refused"),
    [
        (lambda x, host: x * host, True),
        (lambda x, host: x * host.item(), True),
        (lambda x, host: host.add_(1), True),
        (lambda x, host: host[None].to_sparse().mul_(2), True),
        (lambda x, host: x * torch.tensor(2.0), False),
        (lambda x, host: x * 2.0, False),
    ],
)
def test_the_audit_finds_memory_of_the_host_under_another_device(use, is_refused):
    x, host = torch.ones(2, device="meta"), torch.tensor(3.0)
    audit = StorageAudit()
    with audit:
        use(x, host)
    assert bool(audit.refusals(x.device)) == is_refused
    assert not audit.refusals(torch.device("cpu"))


def test_the_audit_undoes_writes_to_memory_of_the_host():
    x, host = torch.ones(2, device="meta"), torch.tensor(3.0)
    audit = StorageAudit(saves_host=True)
    with audit:
        x.add_(host.add_(1))
    assert host == 4
    audit.undo()
    assert host == 3


def test_the_audit_undoes_writes_after_one_that_resizes():
    first, resized, last = torch.zeros(1), torch.zeros(2), torch.zeros(1)
    audit = StorageAudit(saves_host=True)
    with audit:
        first.add_(1)
        torch.add(torch.ones(9), 1, out=resized.resize_(0))
        last.add_(1)
    audit.undo()
    assert first == 0 and last == 0 and resized.untyped_storage().nbytes() == 8


def test_the_audit_finds_memory_that_is_passed_as_a_storage():
    """As cuDNN's recurrent layers pass their first weight, for a view of all of them."""
    weight, audit = torch.ones(4), StorageAudit()
    with audit:
        whole = torch.empty(0).set_(weight.untyped_storage(), 0, (4,), (1,))
        whole + 1
        torch.ones(4).untyped_storage()
    assert list(audit.outside) == [weight.untyped_storage()._cdata]

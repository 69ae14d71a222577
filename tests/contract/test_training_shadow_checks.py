"""Shadow checks in training: faults of a replayed call or iteration are found before its first result is used."""

from __future__ import annotations

import gc
import itertools
from unittest import mock

import torch
from torch import Tensor, nn

from graph_cache.core.runner import GraphRunner
from graph_cache.core.stats import CacheStats
from graph_cache.training import shadow_checks
from graph_cache.training.call_graphs import CallGraphs
from graph_cache.training.iteration import CapturedIteration
from tests.contract.training_models import WIDTH, assert_same, attached, batches, train, twins

STEPS = 5
HELD = mock.Mock()  # what objects of the standard library hold is not searched


class Scaled(nn.Module):
    """A linear layer, scaled by state that no guard sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * gc.get_threshold()[0] / 700.0


class Remembering(nn.Module):
    """Writes its input to a row of a cache, as a page of a KV cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("row", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.cache.index_copy_(0, self.row, y.detach().reshape(-1, WIDTH)[:1])
        return y


class Moved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * HELD.scale


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))


def damage(monkeypatch, before=lambda call: None, after=lambda call: None) -> None:
    replay = CallGraphs.replay_forward

    def damaged(call: CallGraphs, tensors):
        before(call)
        results = replay(call, tensors)
        after(call)
        return results

    monkeypatch.setattr(CallGraphs, "replay_forward", damaged)


def check_found(build, device, pool) -> None:
    """Train with a fault: results equal eager's, and the module runs eager with a reason."""
    data = batches(STEPS, device)
    eager, graphed = twins(lambda: nn.Sequential(build()), device)
    torch.manual_seed(1)
    expected = train(eager, data)
    _, stats = attached(graphed, ["0"], pool)
    torch.manual_seed(1)
    assert_same(train(graphed, data), expected)
    assert stats.shadow_checks["0", "module", "differs"] == 1 == stats.shadow_mismatches["0", "module"]
    assert not stats.replays and stats.fallbacks["0", "forward", "capture_failed"] >= 1
    for key, value in eager.state_dict().items():
        assert torch.equal(graphed.state_dict()[key], value), key


def test_a_wrong_tile_is_found(device, pool, monkeypatch):
    damage(monkeypatch, after=lambda call: call.outputs[0].data.view(-1)[:3].mul_(1.0001))
    check_found(lambda: nn.Linear(WIDTH, WIDTH), device, pool)


def test_a_wrong_gradient_is_found(device, pool, monkeypatch):
    capture = CallGraphs.capture_backward

    def captured(call: CallGraphs, static_grads):
        capture(call, static_grads)
        replay = call._replay_backward  # noqa: SLF001

        def damaged() -> None:
            replay()
            next(grad for grad in call.parameter_grads if grad is not None).data.view(-1)[0] += 1

        call._replay_backward = damaged  # noqa: SLF001

    monkeypatch.setattr(CallGraphs, "capture_backward", captured)
    check_found(lambda: nn.Linear(WIDTH, WIDTH), device, pool)


def test_a_moved_address_is_found(device, pool, monkeypatch):
    HELD.scale = torch.ones(WIDTH, device=device)
    forward = CallGraphs.capture_forward

    def captured(call: CallGraphs) -> None:
        forward(call)
        HELD.scale = torch.ones(WIDTH, device=device)
        old.data.fill_(3)  # the memory has another owner now

    old = HELD.scale
    monkeypatch.setattr(CallGraphs, "capture_forward", captured)
    check_found(Moved, device, pool)


def test_a_changed_c_state_is_found(device, pool, monkeypatch):
    before = gc.get_threshold()
    forward = CallGraphs.capture_forward

    def captured(call: CallGraphs) -> None:
        gc.set_threshold(701, *before[1:])  # for the captures only
        try:
            forward(call)
        finally:
            gc.set_threshold(*before)

    monkeypatch.setattr(CallGraphs, "capture_forward", captured)
    check_found(Scaled, device, pool)


def test_a_row_off_by_one_is_found(device, pool, monkeypatch):
    eager, graphed = twins(lambda: nn.Sequential(Remembering()), device)
    row, data = graphed[0].row, batches(STEPS, device)
    damage(monkeypatch, before=lambda call: row.add_(1), after=lambda call: row.sub_(1))
    expected = train(eager, data)
    _, stats = attached(graphed, ["0"], pool)
    assert_same(train(graphed, data), expected)
    assert stats.shadow_mismatches["0", "module"] == 1
    assert torch.equal(graphed[0].cache[0], eager[0].cache[0])


def test_a_wrong_seed_is_found(device, pool, monkeypatch):
    generator = pool.backend.default_generator

    def reseed(call: CallGraphs) -> None:
        generator.manual_seed(99)

    damage(monkeypatch, before=reseed)
    check_found(dropout, device, pool)


def test_an_equal_replay_is_checked_once_per_pair_and_leaves_no_trace(device, pool):
    eager, graphed = twins(lambda: nn.Sequential(dropout(), nn.BatchNorm1d(WIDTH)), device)
    data = [[x.reshape(-1, WIDTH) for x in micro] for micro in batches(STEPS, device)]
    generator = pool.backend.default_generator
    generator.manual_seed(5)
    expected = train(eager, data)
    _, stats = attached(graphed, ["0", "1"], pool)
    generator.manual_seed(5)
    train(graphed, data)
    outcomes = {labels[2] for labels in stats.shadow_checks}
    assert outcomes == {"equal"} and sum(stats.replays.values()) > 0 and not stats.shadow_mismatches
    assert len(expected) > 0 and torch.equal(graphed[1].num_batches_tracked, eager[1].num_batches_tracked)


class Varying(nn.Module):
    """Multiplies by a number that is another one at each call, which no guard sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * next(HELD.numbers)


def test_a_call_that_differs_from_itself_runs_eager(device, pool):
    if not pool.backend.capture_runs:
        return  # there such a call replays, and is counted as not deterministic
    data = batches(STEPS, device)
    _, graphed = twins(lambda: nn.Sequential(Varying()), device)
    HELD.numbers = itertools.count(1)
    graphs, stats = attached(graphed, ["0"], pool)
    train(graphed, data)
    assert stats.shadow_checks["0", "module", "not_deterministic"] == 1
    assert not stats.replays and not stats.shadow_mismatches
    (failure,) = stats.failures.values()
    assert "two eager runs from the same inputs differ" in str(failure) and not graphs.table()


def test_a_call_that_is_not_checked_is_compared_at_its_capture(device, pool, monkeypatch):
    monkeypatch.setattr(shadow_checks, "MAX_COPIED_BYTES", 0)
    eager, graphed = twins(lambda: nn.Sequential(Remembering()), device)
    data = batches(2 * STEPS, device)
    expected = train(eager, data)
    graphs, stats = attached(graphed, ["0"], pool)
    assert_same(train(graphed, data), expected)
    (recorded,) = graphs.recorded_steps
    assert all(entry.graphs.was_compared == pool.backend.capture_runs for entry in recorded.entries())
    assert sum(stats.replays.values()) > 0 and {labels[2] for labels in stats.shadow_checks} == {"unchecked"}
    assert torch.equal(graphed[0].cache, eager[0].cache)


# ---- whole iterations ----------------------------------------------------------------------------------------------


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, wrap) -> list[Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run, losses = wrap(step), []
    for x in [one for micro in batches(STEPS, next(model.parameters()).device) for one in micro]:
        losses.append(run(x).detach().clone())
    return losses


def run_iterations(device, pool, build=lambda: nn.Linear(WIDTH, WIDTH)):
    eager, graphed = twins(build, device)
    HELD.weight, stats = graphed.weight, CacheStats()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True) for model in (eager, graphed)]
    expected = steps_of(eager, optimizers[0], lambda step: step)
    found = steps_of(graphed, optimizers[1], lambda step: CapturedIteration(step, pool, stats, warmup_steps=2))
    assert all(map(torch.equal, found, expected))
    for one, other in zip(eager.parameters(), graphed.parameters(), strict=True):
        assert torch.equal(one, other) and torch.equal(one.grad, other.grad)
    return stats


def test_an_iteration_is_compared_with_copies_of_parameters_and_optimizer_state(device, pool):
    stats = run_iterations(device, pool)
    assert {labels[2] for labels in stats.shadow_checks} == {"equal"}
    assert sum(stats.replays.values()) >= 3 and not stats.shadow_mismatches


def test_an_iteration_whose_replay_writes_something_else_is_found(device, pool, monkeypatch):
    replay, compared = GraphRunner.replay, CapturedIteration.compared_with_eager

    def damaged(runner: GraphRunner) -> None:
        replay(runner)
        HELD.weight.data.view(-1)[0] += 1e-3

    def checked(iteration, captured, tensors):  # on a GPU, the call that captures is a replay itself
        monkeypatch.setattr(GraphRunner, "replay", damaged)
        return compared(iteration, captured, tensors)

    monkeypatch.setattr(CapturedIteration, "compared_with_eager", checked)
    stats = run_iterations(device, pool)
    assert stats.shadow_mismatches["iteration", "full_iteration"] == 1 and not stats.replays
    [record] = [labels for labels in stats.fallbacks if labels[2] == "capture_failed"]
    assert record[0] == "iteration"

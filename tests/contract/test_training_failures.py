"""Training graphs on every backend: calls that differ from the capture run eager with a reason, and failures never stop
a training job.
"""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from torch import nn

from graph_cache.errors import CaptureRefused, GraphConfigError
from graph_cache.training import modules
from tests.contract.training_models import WIDTH, assert_same, attached, batches, mlp, train, twins


def test_an_unseen_shape_runs_eager_with_a_reason_then_gets_graphs(pool, device):
    eager, graphed = twins(mlp, device)
    graphs, stats = attached(graphed, ["0", "1", "2"], pool)
    data = batches(3, device, micro=1) + batches(4, device, micro=1, rows=3)
    expected = train(eager, data)
    assert_same(train(graphed, data), expected)
    assert stats.fallbacks["0", "forward", "unseen_signature"] >= 1
    assert len(graphs.table()) == 6
    before = sum(stats.replays.values())
    data = batches(2, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    assert sum(stats.replays.values()) == before + 6  # the graphs of the first shape still exist


def test_a_changed_keyword_is_never_served_by_the_other_values_graph(pool, device):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, *, factor):
            return self.linear(x) * factor

    torch.manual_seed(0)
    model = Scaled().to(device)
    graphs, stats = attached(model, [""], pool)
    x = torch.randn(2, WIDTH, device=device)
    for factor in (2.0,) * 4 + (3.0,) * 2 + (2.0,):
        model(x, factor=factor).sum().backward()
        with torch.no_grad():
            assert torch.equal(model(x, factor=factor), model.linear(x) * factor)
    assert stats.replays["model", "module", "forward", 2] == 3
    assert stats.fallbacks["model", "forward", "unseen_signature"] == 1


def test_eval_and_no_grad_calls_do_not_disturb_saved_tensors(pool, device):
    eager, graphed = twins(mlp, device)
    graphs, stats = attached(graphed, ["0", "1", "2"], pool)
    data = batches(5, device, micro=1)
    train(graphed, data)
    train(eager, data)
    x = batches(1, device, micro=1)[0][0]

    def interleaved(model):
        torch.manual_seed(2)
        loss = model(x).pow(2).mean()
        model.eval()
        with torch.no_grad():
            seen = model(x * 2).clone()
        model.train()
        model.zero_grad()
        loss.backward()
        return [seen, *(parameter.grad.clone() for parameter in model.parameters())]

    assert_same([interleaved(graphed)], [interleaved(eager)])


def test_inference_mode_records_no_gradients_also_where_the_gradient_mode_is_on(pool, device):
    eager, graphed = twins(mlp, device)
    _, stats = attached(graphed, ["0", "1", "2"], pool)
    data = batches(5, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    replays, x = stats.replays.total(), data[0][0]
    with torch.inference_mode(), torch.enable_grad():
        for _ in range(2):
            torch.manual_seed(2)
            result = graphed(x)
            torch.manual_seed(2)
            assert torch.equal(result, eager(x)) and not result.requires_grad
    assert stats.replays.total() == replays > 0


def test_a_step_interrupted_before_its_backward_releases_its_graphs(pool, device):
    eager, graphed = twins(mlp, device)
    graphs, stats = attached(graphed, ["0", "1", "2"], pool)
    data = batches(4, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    loss = graphed(data[0][0]).sum()
    assert graphs.outstanding == 3
    del loss
    gc.collect()
    assert graphs.outstanding == 0
    assert_same(train(graphed, data), train(eager, data))


@pytest.mark.parametrize("where", ["between", "inside"])
def test_a_step_that_fails_while_recording_does_not_affect_later_steps(pool, device, where):
    eager, graphed = twins(mlp, device)
    graphs, stats = attached(graphed, ["0", "1", "2"], pool)
    data = batches(8, device)

    def failing(model):
        """Fail in the second microbatch, before or inside its second module."""
        sum(model(x).square().mean() for x in data[0][:1])
        hidden = model[0](data[0][1])
        if where == "between":
            raise ArithmeticError("interrupted")
        model[1](hidden[..., : WIDTH // 2])

    for model in (graphed, eager):
        train(model, data[:1])
        model.zero_grad()
        with pytest.raises((ArithmeticError, RuntimeError)):
            failing(model)
        gc.collect()
    assert_same(train(graphed, data), train(eager, data))
    before = sum(stats.replays.values())
    assert_same(train(graphed, data), train(eager, data))
    assert sum(stats.replays.values()) - before == len(data) * 2 * 3
    assert not stats.failed_captures


def test_a_moved_parameter_is_noticed_and_recaptured(pool, device):
    eager, graphed = twins(mlp, device)
    graphs, stats = attached(graphed, ["0", "1", "2"], pool)
    data = batches(4, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    for model in (eager, graphed):
        model[0][0].weight.data = model[0][0].weight.data * 2
    assert_same(train(graphed, data), train(eager, data))
    assert stats.invalidations == {"stale_address": 1}
    assert len(graphs.table()) == 3


@pytest.mark.parametrize("change", ["another_weight", "no_bias"])
def test_a_replaced_parameter_is_noticed_and_recaptured(pool, device, change):
    eager, graphed = twins(mlp, device)
    _, stats = attached(graphed, ["0", "1", "2"], pool)
    data = batches(5, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    for model in (graphed, eager):
        if change == "no_bias":
            model[1][0].bias = None
        else:
            model[1][0].weight = nn.Parameter(0.5 * model[1][0].weight.detach())
    before = sum(stats.replays.values())
    assert_same(train(graphed, data), train(eager, data))
    assert sum(stats.replays.values()) - before == 3 * 3
    assert not stats.fallbacks["1", "forward", "other_parameters"]


def test_changes_are_noticed_while_a_forward_without_backward_is_held(pool, device):
    eager, graphed = twins(mlp, device)
    attached(graphed, ["0", "1", "2"], pool)
    data, log = batches(4, device, micro=2), []
    assert_same(train(graphed, data), train(eager, data))
    for model in (graphed, eager):
        kept = model(data[0][0])
        log.append(train(model, data, outstanding=False))
        model[1][0].weight.data = 0.5 * model[1][0].weight.detach()
        log[-1] += train(model, data, outstanding=False)
        handle = model[2][0].register_forward_hook(lambda module, args, output: output + 1)
        log[-1] += train(model, data, outstanding=False)
        handle.remove()
        del kept
    assert_same(*log)


def test_clearing_graphs_mid_training_recaptures(pool, device):
    eager, graphed = twins(mlp, device)
    graphs, stats = attached(graphed, ["0", "1", "2"], pool)
    data = batches(4, device, micro=1)
    for _ in range(5):
        assert_same(train(graphed, data), train(eager, data))
        assert len(graphs.table()) == 3
        graphs.clear()
        assert graphs.table() == []
    loss = graphed(data[0][0]).sum()
    graphs.clear()
    loss.backward()
    assert graphs.outstanding == 0


def test_graphs_cleared_between_forward_and_backward_serve_that_backward(pool, device):
    eager, graphed = twins(mlp, device)
    graphs, _ = attached(graphed, ["0", "1", "2"], pool)
    data = batches(4, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    torch.manual_seed(3)
    loss = graphed(data[0][0]).sum()
    graphs.clear()
    graphed.zero_grad()
    loss.backward()
    torch.manual_seed(3)
    eager.zero_grad()
    eager(data[0][0]).sum().backward()
    for one, other in zip(graphed.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_an_exception_inside_capture_disables_only_that_module(pool, device):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.linear(x)
            return y * (2.0 if y.sum().item() > 0 else 1.0)

    eager, graphed = twins(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Reads(), nn.Linear(WIDTH, WIDTH)), device)
    graphs, stats = attached(graphed, ["0", "1", "2"], pool)
    data = batches(5, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    assert stats.failed_captures == {("1", "module"): 1}
    assert stats.fallbacks["1", "forward", "capture_failed"] == 3
    assert len(graphs.table()) == 2
    assert not pool.capturing and not pool.warming


def test_a_failure_outlives_signatures_that_never_recur(pool, device, monkeypatch):
    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2.0 if len(x) == 4 and x.sum().item() > 1e9 else 1.0)

    monkeypatch.setattr(modules, "MAX_CALL_SIGNATURES", 2)
    graphed = nn.Sequential(Reads(WIDTH, WIDTH)).to(device)
    graphs, stats = attached(graphed, ["0"], pool)
    train(graphed, batches(5, device, micro=1))
    for rows in range(5, 11):
        train(graphed, batches(1, device, micro=1, rows=rows))
    train(graphed, batches(5, device, micro=1))
    assert stats.failed_captures == {("0", "module"): 1}
    train(graphed, batches(5, device, micro=1, rows=5))  # forgotten ones warm up again
    assert len(graphs.table()) == 1


def test_clearing_tries_a_failed_capture_again(pool, device):
    class Reads(nn.Linear):
        reads = threading.Lock()  # no Python state holds whether it is locked

        def forward(self, x):
            y = super().forward(x)
            return y * (2.0 if self.reads.locked() and y.sum().item() > 1e9 else 1.0)

    Reads.reads.acquire()
    eager, graphed = twins(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Reads(WIDTH, WIDTH)), device)
    graphs, stats = attached(graphed, ["0", "1"], pool)
    data = batches(5, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    assert [row["module"] for row in graphs.table()] == ["0"]
    Reads.reads.release()
    assert_same(train(graphed, data), train(eager, data))
    assert [row["module"] for row in graphs.table()] == ["0"]  # the failure stays until the graphs are cleared
    graphs.clear()
    assert_same(train(graphed, data), train(eager, data))
    rows = {row["module"]: (row["state"], row["replays"], row["failure"]) for row in graphs.table()}
    assert rows == {name: ("captured", 3, None) for name in ("0", "1")}
    assert stats.failed_captures == {("1", "module"): 1}


def test_attaching_twice_is_refused(pool, device):
    _, graphed = twins(mlp, device)
    attached(graphed, ["0"], pool)
    with pytest.raises(GraphConfigError, match="0 is already attached"):
        attached(graphed, ["1", "0"], pool)
    assert "forward" not in vars(graphed[1])


@pytest.mark.parametrize("refused", [{"0"}, {"3"}, {"0", "2", "4"}], ids=["first", "middle", "every_other"])
def test_an_uncapturable_backward_disables_only_its_own_module(pool, device, refused):
    class Uncapturable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if pool.capturing:
                raise CaptureRefused("as a library's copy from the host would be")
            return grad.clone()

    class Block(nn.Sequential):
        def __init__(self, name):
            super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            self.capturable = name not in refused

        def forward(self, x):
            y = super().forward(x)
            return y if self.capturable else Uncapturable.apply(y)

    eager, graphed = twins(lambda: nn.Sequential(*[Block(str(index)) for index in range(6)]), device)
    graphs, stats = attached(graphed, [str(index) for index in range(6)], pool)
    data = batches(8, device)
    assert_same(train(graphed, data), train(eager, data))
    replays = {name: count for (name, *_), count in stats.replays.items()}
    assert replays == {str(index): 12 for index in range(6) if str(index) not in refused}
    assert {name for name, _, reason in stats.fallbacks if reason == "capture_failed"} == refused
    assert set(stats.failures) == refused and "a library's copy" in stats.failures[min(refused)]


def test_a_replaced_submodule_inside_a_captured_module_is_noticed(pool, device):
    eager, graphed = twins(mlp, device)
    graphs, stats = attached(graphed, ["0", "1", "2"], pool)
    before, after = batches(4, device, micro=1), batches(6, device, micro=1)
    assert_same(train(graphed, before), train(eager, before))
    for model in (eager, graphed):
        model[1][0] = copy.deepcopy(model[2][0])
    assert_same(train(graphed, after), train(eager, after))
    assert stats.invalidations == {"stale_address": 1}
    assert stats.replays["1", "module", "forward", 4] > 2  # replays again after the recapture

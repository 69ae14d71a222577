"""Events between and inside the steps of training graphs: evaluations, copies, checkpoints, many shapes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graph_cache.core.stats import CacheStats
from graph_cache.errors import GraphConfigError
from graph_cache.training.attached import Attachment, Part
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.modules import TrainingGraphs
from tests.contract.training_models import MANY, WIDTH, assert_same, attached, batches, in_place, mlp, train, twins

BLOCKS = ["0", "1", "2"]


def steps_with_evaluations(model, data, grad):
    """Train with an evaluation after each step. Returns every loss, output and gradient."""
    torch.manual_seed(1)
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.05), []
    for (x,) in data:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        log.append([loss.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
        optimizer.step()
        model.eval()
        with torch.set_grad_enabled(grad):
            out = model(x)
            log.append([out.detach().clone()])
            if grad:
                out.sum().backward()
        model.train()
    return log


@pytest.mark.parametrize("grad", [False, True], ids=["without_gradients", "with_gradients"])
def test_evaluations_between_steps_cost_no_graph_and_have_no_dropout(pool, device, grad):
    eager, graphed = twins(mlp, device)
    graphs, stats = attached(graphed, BLOCKS, pool)
    data = batches(9, device, micro=1)
    assert_same(steps_with_evaluations(graphed, data, grad), steps_with_evaluations(eager, data, grad))
    for block in BLOCKS:
        assert stats.replays[block, "module", "forward", 4] >= (13 if grad else 7)
        assert stats.fallbacks[block, "forward", "no_free_instance"] == 0
    assert len(graphs.table()) == (6 if grad else 3)


def test_outputs_are_those_of_eager_and_accept_in_place_writes(pool, device):
    eager, graphed = twins(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)), device)
    attached(graphed, ["0"], pool)
    data = batches(5, device, micro=1)
    warming_up = [model[0](data[0][0]) for model in (graphed, eager)]
    assert warming_up[0].grad_fn.name() == warming_up[1].grad_fn.name()  # no node of the capture's own
    del warming_up
    assert_same(train(graphed, data), train(eager, data))


class InnerBackward(torch.autograd.Function):
    """A checkpoint that runs a nested backward in its backward."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


def test_a_backward_inside_a_backward_is_refused_and_no_gradient_is_lost(pool, device):
    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return InnerBackward.apply(self.inner, x)

    eager, graphed = twins(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Recomputed()), device)
    _, stats = attached(graphed, ["0", "1"], pool)
    data = batches(6, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    assert stats.failed_captures["1", "module"] == 1 and stats.replays["0", "module", "forward", 4] == 4


def test_recording_many_microbatches_holds_outputs_of_outstanding_ones_only(pool, device):
    _, graphed = twins(mlp, device)
    graphs, _ = attached(graphed, BLOCKS, pool, warmup=1)
    data = [x for (x,) in batches(12, device, micro=1)]
    outputs = [graphed(x) for x in data[:2]]  # all kept, so that no address is used twice
    for index, x in enumerate(data[2:]):
        outputs[index].sum().backward()
        outputs.append(graphed(x))
    recorded = graphs.recording.graphs_of_microbatches
    assert [microbatch_graphs.num_held_outputs for microbatch_graphs in recorded] == [3, 3]
    for microbatch_graphs, newest in zip(recorded, (10, 11), strict=True):
        sources = microbatch_graphs.sources(outputs)
        assert [index for index, source in enumerate(sources) if source is not None] == [newest]
    for output in outputs[10:]:
        output.sum().backward()


def test_only_recurring_shapes_get_graphs(pool, device):
    eager, graphed = twins(mlp, device)
    graphs, stats = attached(graphed, BLOCKS, pool, warmup=3)
    data = [
        [torch.randn(rows, 8, WIDTH, device=device)]
        for pair in zip(range(5, 15), [4] * 10, strict=True)
        for rows in pair
    ]
    assert_same(train(graphed, data), train(eager, data))
    assert len(graphs.table()) == 3
    assert {labels[3] for labels in stats.replays} == {4} and stats.replays["0", "module", "forward", 4] == 7


def test_an_interrupted_capture_leaves_training_unchanged(pool, device):
    eager, graphed = twins(mlp, device)
    graphs, stats = attached(graphed, BLOCKS, pool)
    data = batches(7, device, micro=1, rows=MANY)
    expected = train(eager, data)
    interrupted = []

    def once(x, module=graphed[1], pool=pool, interrupted=interrupted):
        if pool.capturing and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return type(module).forward(module, x)

    torch.manual_seed(1)
    optimizer, log = torch.optim.SGD(graphed.parameters(), lr=0.05, momentum=0.9), []
    graphs.modules[1].eager = once  # without a closure: the search of the state does not find this function
    for (x,) in data:
        optimizer.zero_grad()
        state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state()
        try:
            loss = graphed(x).pow(2).mean()
        except KeyboardInterrupt:  # the trainer retries the same step
            (torch.set_rng_state if device.type == "cpu" else torch.cuda.set_rng_state)(state)
            loss = graphed(x).pow(2).mean()
        loss.backward()
        log.append([loss.detach().clone(), *[parameter.grad.clone() for parameter in graphed.parameters()]])
        optimizer.step()
    assert interrupted
    assert_same(log, expected)
    assert sum(stats.replays.values()) > 0 and in_place(graphs) == [False, True, True]


def test_a_checkpoint_around_attached_modules_runs_them_eager(pool, device):
    eager, graphed = twins(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), device)
    _, stats = attached(graphed, ["0", "2"], pool)
    x = torch.randn(4, WIDTH, device=device)
    log = {}
    for model in (graphed, eager):
        log[model] = []
        for _ in range(5):
            model.zero_grad()
            out = checkpoint(model, x, use_reentrant=False)
            out.sum().backward()
            log[model].append([out.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
    assert_same(log[graphed], log[eager])
    assert not stats.replays and stats.fallbacks["0", "forward", "saved_tensor_hooks"] == 10


def test_a_deep_copy_of_an_attached_model_is_independent(pool, device):
    _, graphed = twins(mlp, device)
    graphs, _ = attached(graphed, BLOCKS, pool)
    copied = copy.deepcopy(graphed).eval()
    x = torch.randn(2, WIDTH, device=device)
    before = copied(x)
    with torch.no_grad():
        for parameter in graphed.parameters():
            parameter.zero_()
    assert torch.equal(copied(x), before) and not torch.equal(graphed.eval()(x), before)
    graphs.detach()
    assert torch.equal(copied(x), before)
    data, twin = batches(4, device, micro=1), copy.deepcopy(copied)
    _, stats = attached(copied, BLOCKS, pool)
    assert_same(train(copied, data), train(twin, data))
    assert sum(stats.replays.values()) == 2 * len(BLOCKS)


def test_removed_hooks_no_longer_run(pool, device):
    _, graphed = twins(mlp, device)
    calls = []
    handles = [
        module.register_forward_pre_hook(lambda *call: calls.append(call))
        for module in graphed.modules()
        if isinstance(module, nn.Linear)
    ]
    graphs = TrainingGraphs(
        CaptureContext(pool, CacheStats(), [torch.default_generator] if device.type == "cpu" else []), warmup_rounds=2
    )
    graphs.attach(Attachment([Part(name, graphed.get_submodule(name)) for name in BLOCKS], fired=lambda hook: True))
    train(graphed, batches(4, device, micro=1))
    assert graphs.stats.replays and calls
    for handle in handles:
        handle.remove()
    calls.clear()
    train(graphed, batches(4, device, micro=1))
    assert not calls


def test_one_module_under_two_names_is_refused_and_stays_unattached(pool, device):
    _, graphed = twins(mlp, device)
    graphs = TrainingGraphs(CaptureContext(pool, CacheStats()), warmup_rounds=2)
    with pytest.raises(GraphConfigError, match="first, second"):
        graphs.attach(Attachment([Part("first", graphed[0]), Part("second", graphed[0])]))
    assert "forward" not in vars(graphed[0]) and not graphs.modules

"""Precision, cached weights, delayed weight gradients, and the state that a capture preserves."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from graph_cache.adapters.transformer_engine import TransformerEngineGraphs
from graph_cache.adapters.transformer_engine.maker import Precision
from graph_cache.adapters.transformer_engine.order import GraphSlots
from graph_cache.guards.quantizers import Quantizers
from tests.graph_cache.adapters.transformer_engine.static_graphs import StaticMaker
from tests.graph_cache.adapters.transformer_engine.te_stack import (
    ONE_AT_A_TIME,
    WIDTH,
    attached,
    batch,
    capture_context,
    parts,
    reasons,
    replays,
    stack,
    train,
    warmed,
)

# ---- precision and weights -------------------------------------------------------------------------------------------


def test_another_precision_than_the_recorded_one_runs_eager():
    model, maker = stack(), StaticMaker()
    maker.current_precision = Precision(True, "delayed")
    graphs = warmed(model, maker=maker)
    assert maker.plan.enabled == (True, True, True) and maker.plan.precision == maker.current_precision
    maker.current_precision = Precision(True, "".join(("del", "ayed")))  # equal, and another object
    model(batch(0)).sum().backward()
    assert replays(graphs) == 3
    for current_precision in (Precision(), Precision(True, "current"), None):
        maker.current_precision = current_precision
        model(batch(0)).sum().backward()
    assert replays(graphs) == 3 and reasons(graphs) == {"unseen_signature": 9}
    graphs.detach()


def test_layers_of_different_recipes_are_not_captured_together():
    model, maker = stack(2), StaticMaker()
    graphs = attached(model, maker=maker)
    for number in range(5):
        hidden = batch(number)
        for layer, recipe in zip(model.layers, ("delayed", "current"), strict=True):
            maker.current_precision = Precision(True, recipe)
            hidden, _ = layer(hidden)
        hidden.sum().backward()
    assert reasons(graphs) == {"warming_up": 6, "capture_failed": 4} and maker.made == []
    graphs.detach()


def test_weights_are_requantized_in_the_first_microbatch_or_on_request():
    model, maker = stack(2), StaticMaker()
    maker.current_precision = Precision(True, "delayed")
    graphs = warmed(model, maker=maker, caches_weights=True)
    maker.weights.clear()
    for microbatch in range(3):
        for layer in model.layers:
            layer.current_microbatch = microbatch
        model(batch(microbatch)).sum().backward()
    assert maker.weights == [True, False, False]
    with pytest.raises(TypeError):  # the eager layer does not accept this argument
        model.eval()(batch(0), is_first_microbatch=True)
    model.train()
    maker.weights.clear()
    model(batch(0), is_first_microbatch=True).sum().backward()
    model(batch(0), is_first_microbatch=False).sum().backward()
    assert maker.weights == [True, False] and replays(graphs) == 10
    graphs.detach()


def test_weights_are_requantized_when_the_first_layer_runs_eager():
    model, maker = stack(2), StaticMaker()
    maker.current_precision = Precision(True, "delayed")
    graphs = warmed(model, maker=maker, caches_weights=True)
    handle = model.layers[0].inner.register_forward_hook(lambda module, args, out: None)
    maker.weights.clear()
    for microbatch in (1, 0, 1):
        for layer in model.layers:
            layer.current_microbatch = microbatch
        model(batch(microbatch)).sum().backward()
    assert maker.weights == [False, True, False] and replays(graphs) == 3
    handle.remove()
    graphs.detach()


def test_replay_clears_megatrons_first_microbatch_flag():
    class Flagged(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.is_first_microbatch = True
            self.found = []

        def forward(self, x):
            self.found.append(self.is_first_microbatch)
            self.is_first_microbatch = False
            return super().forward(x)

    model = nn.Sequential(Flagged())
    graphs = TransformerEngineGraphs(
        list(model.named_children()), ONE_AT_A_TIME, capture_context(), maker=StaticMaker()
    )
    for number in range(4):
        model[0].is_first_microbatch = True
        model(batch(number)).sum().backward()
        assert not model[0].is_first_microbatch
    assert replays(graphs) == 1 and model[0].found[:4] == [True] * 3 + [False]  # three eager calls, then the capture
    graphs.detach()


def test_without_reduced_precision_no_weights_are_cached():
    model, maker = stack(2), StaticMaker()
    graphs = warmed(model, maker=maker, caches_weights=True)
    assert not maker.plan.caches_weights and maker.weights == []
    graphs.detach()


# ---- delayed weight gradients ----------------------------------------------------------------------------------------


def test_backward_dw_replays_the_graph_of_its_microbatch():
    model, maker = stack(1), StaticMaker()
    order = [1, 1, -1, -1.5, -1, -1.5]
    graphs = TransformerEngineGraphs(parts(model), order, capture_context(), maker=maker)
    name = "chunks.0.layers.0"

    def run(rows: int = 4) -> list[bool]:
        losses = []
        for microbatch in range(2):
            model.layers[0].current_microbatch = microbatch
            losses.append(model(batch(microbatch, rows)).sum())
        answers = [graphs.backward_dw(name, 0)]
        for microbatch, loss in enumerate(losses):
            loss.backward()
            answers.append(graphs.backward_dw(name, microbatch))
        return answers

    for _ in range(3):
        assert run() == [False] * 3  # eager: the layer's own backward_dw
    assert run() == [False, True, True] and graphs.is_idle
    assert [call.weight_gradients for call in maker.made[0].calls] == [1, 1]
    assert run(rows=2) == [False] * 3
    graphs.detach()


def test_a_graph_is_released_only_after_backward_dw():
    graph_slots = GraphSlots([1, -1, -1.5], [1])
    graph_slots.run_forward(0)
    graph_slots.run_backward(0)
    assert graph_slots.awaits_backward_dw(0) and graph_slots.alive and not graph_slots.may_replay_forward(0)
    graph_slots.run_backward_dw(0)
    assert not graph_slots.awaits_backward_dw(0) and not graph_slots.alive and graph_slots.may_replay_forward(0)


# ---- capture and shutdown --------------------------------------------------------------------------------------------


def test_a_capture_preserves_gradients_buffers_and_main_grads():
    class Added(torch.autograd.Function):
        """A linear layer whose backward adds the weight gradient to main_grad."""

        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            weight.main_grad.add_(grad.t() @ x)
            weight.grad_added_to_main_grad = True
            return grad @ weight, torch.full_like(weight, float("nan"))

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(WIDTH))
            self.weight.main_grad = torch.ones(WIDTH, WIDTH)
            self.weight.grad_added_to_main_grad = False
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, hidden):
            self.seen += 1
            return Added.apply(hidden, self.weight)

    model = nn.Sequential(Fused(), Fused())
    entered = []

    @contextmanager
    def paused():
        entered.append((graphs.context.pool.lock.acquire(blocking=False), graphs.context.pool.capturing))
        yield
        entered.append(None)

    graphs = TransformerEngineGraphs(
        list(model.named_children()), ONE_AT_A_TIME, capture_context(), maker=StaticMaker(), paused=paused
    )
    for _ in range(3):
        model(torch.ones(2, WIDTH)).sum().backward()
    before = [one.weight.main_grad.clone() for one in model]
    model.zero_grad()
    for one in model:
        one.weight.grad_added_to_main_grad = False
    loss = model(torch.ones(2, WIDTH)).sum()  # captures before the forward
    assert entered == [(True, False), None]
    assert all(torch.equal(one.weight.main_grad, kept) for one, kept in zip(model, before, strict=True))
    assert all(one.weight.grad is None and not one.weight.grad_added_to_main_grad for one in model)
    assert [one.seen.item() for one in model] == [4, 4]  # three eager, one replayed
    loss.backward()
    assert all(one.weight.grad_added_to_main_grad for one in model)  # DDP must not add the dummy gradient
    graphs.detach()


def test_a_failed_capture_leaves_the_layers_eager_and_is_counted():
    model = stack()
    eager = copy.deepcopy(model)
    graphs = attached(model, maker=StaticMaker(fails=True))
    assert train(model, ONE_AT_A_TIME) == train(eager, ONE_AT_A_TIME)
    assert reasons(graphs) == {"warming_up": 9, "capture_failed": 9}
    assert graphs.context.stats.failed_captures.total() == 3
    assert not graphs.context.pool.capturing and graphs.table() == []
    graphs.detach()


def test_a_moved_parameter_drops_the_graphs_which_warm_up_again():
    model, maker = stack(), StaticMaker()
    graphs = warmed(model, maker=maker)
    model.layers[1].inner.weight.data = model.layers[1].inner.weight.data.clone()
    model(batch(0)).sum().backward()
    assert graphs.context.stats.invalidations == {"stale_address": 1} and maker.made[0].closed == 1
    assert reasons(graphs) == {"warming_up": 3}
    for number in range(3):
        model(batch(number)).sum().backward()
    assert replays(graphs) == 3 and len(maker.made) == 2
    graphs.detach()


def test_replaced_quantizers_drop_the_graphs():
    model, maker = stack(), StaticMaker()
    graphs = warmed(model, maker=maker)
    maker.made[0].current = False
    model(batch(0)).sum().backward()
    assert graphs.context.stats.invalidations == {"stale_address": 1} and maker.made[0].closed == 1
    assert reasons(graphs) == {"warming_up": 3} and replays(graphs) == 0
    graphs.detach()


def test_quantizers_detect_state_replaced_by_a_recipe():
    linear = nn.Linear(2, 2)  # with attributes of Transformer Engine's modules and operations
    linear.fp8_meta = {"scaling_fwd": object(), "recipe": "delayed", "num_gemms": 1}
    linear.quantizers = {"scaling_fwd": [object()]}
    linear._fp8_workspaces = {"weight": torch.ones(2)}
    linear._fp8_metas = {"forward": {"scaling_fwd": object()}, "backward": None}
    model = nn.Sequential(linear)

    def changed(change) -> bool:
        state = Quantizers([model])
        assert state.are_current()
        change()
        return not state.are_current()

    assert not changed(lambda: linear.fp8_meta.update(recipe="current"))
    assert not changed(lambda: linear._fp8_workspaces.setdefault("other", torch.ones(1)))
    assert changed(lambda: linear.fp8_meta.update(scaling_fwd=object()))
    assert changed(lambda: linear._fp8_metas["forward"].update(scaling_fwd=object()))
    assert changed(lambda: linear.quantizers.update(scaling_fwd=[]))
    assert changed(lambda: setattr(linear, "quantizers", {}))
    assert changed(linear._fp8_workspaces.clear)


def test_closing_restores_the_layers_and_resets_the_graphs_once():
    model, maker = stack(), StaticMaker()
    attributes = [set(vars(layer)) for layer in model.layers]
    keys = list(model.state_dict())
    graphs = attached(model, maker=maker)
    for number in range(4):
        model(batch(number)).sum().backward()
    assert [row["module"] for row in graphs.table()] == [part.name for part in parts(model)]
    assert all(row["engine"] == "static" and row["bytes"] == 400 and row["instance"] == 0 for row in graphs.table())
    graphs.detach()
    graphs.detach()
    assert maker.made[0].closed == 1 and graphs.table() == []
    assert [set(vars(layer)) for layer in model.layers] == attributes
    assert list(model.state_dict()) == keys
    again = attached(model)  # the layers can be attached again
    again.detach()


def test_captured_layers_return_equally_many_tensors_differentiable_first():
    """Transformer Engine reuses output-gradient buffers between graphs with equal output shapes."""

    class One(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

        def forward(self, x):
            y = self.linear(x)
            return (y, {"none": None, "no": x.detach() + 1, "both": (y.detach(), y * 2)}[self.kind])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(map(One, ("none", "no", "both", "none")))

        def forward(self, x):
            total = 0
            for layer in self.layers:
                x, other = layer(x)
                total = total + x.sum() + sum(one.sum() for one in pytree.tree_leaves(other) if one is not None)
            return total

    torch.manual_seed(3)
    model, maker = Model(), StaticMaker()
    eager = copy.deepcopy(model)
    graphs = attached(model, maker=maker)
    for number in range(6):
        losses = [one(batch(number)) for one in (model, eager)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    kinds = [
        [value is not None and value.requires_grad for value in module(**statics)]
        for module, statics in zip(maker.plan.modules, maker.plan.samples, strict=True)
    ]
    assert kinds == [[True, False], [True, False], [True, True, False], [True, False]]
    assert replays(graphs) == 4 * 4
    graphs.detach()


def test_cleared_graphs_warm_up_and_are_captured_again():
    model, maker = stack(), StaticMaker()
    graphs = warmed(model, maker=maker)
    graphs.clear()
    assert maker.made[0].closed == 1
    for number in range(4):
        model(batch(number)).sum().backward()
    assert len(maker.made) == 2 and replays(graphs) == 3
    graphs.detach()

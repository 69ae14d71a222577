"""AccumulateGrad nodes: which ones a capture uses, and how long they are kept alive."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from torch import nn

from graph_cache.adapters.transformer_engine.installed import new_accumulators
from tests.graph_cache.adapters.transformer_engine.static_graphs import StaticMaker
from tests.graph_cache.adapters.transformer_engine.te_stack import attached, batch, replays, stack


def test_warm_up_uses_the_makers_accumulator_nodes():
    """Nodes of the steps would break it: a training loop holds the last `loss` during the next forward."""
    model = stack()
    graphs = attached(model)
    parameters = list(model.layers.parameters())
    for _ in range(2):
        while not graphs.table():
            loss = model(batch(2)).sum()
            loss.backward()
            del loss
            assert new_accumulators(parameters) == {}, "all nodes stay alive without a loss"
        graphs.clear()
    graphs.detach()


def test_existing_accumulator_nodes_are_kept():
    linear = nn.Linear(2, 2)
    loss = (linear(torch.ones(2)) * linear.weight).sum()
    assert new_accumulators(linear.parameters()) == {}
    assert new_accumulators(linear.parameters()) == {}  # the mark of the first call was removed
    del loss
    found = new_accumulators(linear.parameters())
    assert list(found) == list(linear.parameters())
    linear(torch.ones(2)).sum().backward()
    assert all(node.variable.grad is not None for node in found.values())


def are_free(parameters: list[nn.Parameter]) -> bool:
    """Return whether none of the parameters has a live node."""
    return set(new_accumulators(parameters)) == set(parameters)


def test_no_nodes_are_held_when_no_capture_is_possible():
    model = stack()
    for layer in model.layers:
        layer.inner.register_forward_hook(lambda module, args, out: None)
    graphs = attached(model)
    for number in range(5):
        model(batch(number)).sum().backward()
        assert are_free(list(model.layers.parameters()))
    graphs.detach()


def test_nodes_are_released_when_hooks_appear_before_the_capture():
    model, maker = stack(), StaticMaker()
    graphs = attached(model, maker=maker)
    for number in range(3):
        model(batch(number)).sum().backward()
    handles = [layer.inner.register_forward_hook(lambda module, args, out: None) for layer in model.layers]
    model(batch(3)).sum().backward()
    assert are_free(list(model.layers.parameters())) and maker.made == []
    for handle in handles:
        handle.remove()
    for number in range(4):
        model(batch(number)).sum().backward()
    assert len(maker.made) == 1 and replays(graphs) == 3  # it warmed up again
    graphs.detach()


@pytest.mark.parametrize("fails", [False, True])
def test_nodes_are_released_after_a_capture(fails, caplog):
    caplog.set_level(logging.CRITICAL)  # pytest keeps logged errors, and their frames hold autograd graphs
    model, maker = stack(), StaticMaker(fails)
    graphs = attached(model, maker=maker)
    for number in range(4):
        model(batch(number)).sum().backward()
    for made in maker.made:  # unlike real graphs, these hold autograd graphs
        for call in made.calls:
            call.outputs = []
    gc.collect()
    assert are_free(list(model.layers.parameters())) and replays(graphs) == (0 if fails else 3)
    graphs.detach()


def test_autograd_history_in_a_reference_cycle_is_collected_before_the_capture():
    class Loss:
        def __init__(self, value):
            self.value, self.itself = value, self

    class Looking(StaticMaker):
        def make(self, plan):
            found.append((held(), new_accumulators(parameters)))
            return super().make(plan)

    found: list[tuple] = []
    model = stack()
    parameters = list(model.layers.parameters())
    gc.collect()
    gc.disable()  # so that only the explicit collection frees the cycle
    try:
        held = weakref.ref(Loss(model(batch(0)).sum()))
        graphs = attached(model, maker=Looking())
        for number in range(4):
            assert held() is not None
            model(batch(number)).sum().backward()
    finally:
        gc.enable()
    assert found == [(None, {})] and replays(graphs) == 3
    graphs.detach()

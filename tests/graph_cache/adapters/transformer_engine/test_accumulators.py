"""Nodes of autograd that add up gradients: which ones a capture meets, and how long they are held for it."""

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
    """Those of the steps would break it: a loop's `loss` is the last step's while the next one's is computed."""
    model = stack()
    graphs = attached(model)
    parameters = list(model.layers.parameters())
    for _ in range(2):
        while not graphs.table():
            loss = model(batch(2)).sum()
            loss.backward()
            del loss
            assert new_accumulators(parameters) == {}, "all of them live on without a loss"
        graphs.clear()
    graphs.detach()


def test_existing_accumulator_nodes_are_kept():
    linear = nn.Linear(2, 2)
    loss = (linear(torch.ones(2)) * linear.weight).sum()
    assert new_accumulators(linear.parameters()) == {}
    assert new_accumulators(linear.parameters()) == {}  # the mark of the first look is gone
    del loss
    found = new_accumulators(linear.parameters())
    assert list(found) == list(linear.parameters())
    linear(torch.ones(2)).sum().backward()
    assert all(node.variable.grad is not None for node in found.values())


def are_free(parameters: list[nn.Parameter]) -> bool:
    """Whether nothing holds a node for any of them."""
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
    assert len(maker.made) == 1 and replays(graphs) == 3  # it warmed up anew
    graphs.detach()


@pytest.mark.parametrize("fails", [False, True])
def test_nodes_are_released_after_a_capture(fails, caplog):
    caplog.set_level(logging.CRITICAL)  # pytest keeps what is logged: an error, whose frames hold histories
    model, maker = stack(), StaticMaker(fails)
    graphs = attached(model, maker=maker)
    for number in range(4):
        model(batch(number)).sum().backward()
    for made in maker.made:  # these graphs hold histories, which no true graph does
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
    gc.disable()  # it would come when it likes
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

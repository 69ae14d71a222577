"""Parts smaller than a layer, and models that run layers in another order than they register them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from graph_cache.adapters.transformer_engine import TransformerEngineGraphs
from graph_cache.training.attached import Part
from tests.graph_cache.adapters.transformer_engine.static_graphs import StaticMaker
from tests.graph_cache.adapters.transformer_engine.te_stack import (
    ONE_AT_A_TIME,
    TWO_WARMUP_FORWARDS,
    WIDTH,
    Stack,
    capture_context,
    parts,
    reasons,
    replays,
    same_parameters,
    stack,
    train,
)

LAST_STAGE = [1, -1, 1, -1, 1, -1, 1, -1]  # 4 microbatches, one outstanding at a time


class Methods(nn.Module):
    """A layer with attention and MLP methods that return the same structure as Megatron's."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm, self.inner = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def attn(self, hidden, mask=None):
        return hidden + torch.tanh(self.attention(hidden)), None

    def mlp(self, hidden):
        return hidden + self.inner(self.norm(hidden))

    def forward(self, hidden, mask=None):
        hidden, context = self.attn(hidden, mask=mask)
        return self.mlp(hidden), context


def of_methods(layers: int = 2) -> Stack:
    model = stack(layers)
    model.layers = nn.ModuleList(Methods() for _ in range(layers))
    return model


def halves(model: Stack) -> list[Part]:
    return [
        part
        for index, layer in enumerate(model.layers)
        for part in (
            Part(f"{index}.attn", layer, "attn", (layer.attention,)),
            Part(f"{index}.mlp", layer, "mlp", (layer.norm, layer.inner)),
        )
    ]


@pytest.mark.parametrize("order", [ONE_AT_A_TIME, TWO_WARMUP_FORWARDS, LAST_STAGE])
def test_two_methods_of_a_layer_are_separate_parts(order):
    model, maker = of_methods(), StaticMaker()
    eager = copy.deepcopy(model)
    graphs = TransformerEngineGraphs(halves(model), order, capture_context(), maker=maker)
    assert train(model, order) == train(eager, order)
    assert same_parameters(model, eager)
    assert set(reasons(graphs)) == {"warming_up"}
    assert replays(graphs) == 6 * 4 * order.count(1) - reasons(graphs)["warming_up"] > 0
    mine = [[id(parameter) for parameter in module.parameters()] for module in maker.plan.modules]
    assert list(map(len, mine)) == [2, 4, 2, 4] and len(set(sum(mine, []))) == 12
    value = model.layers[0].attn(torch.ones(4, WIDTH, requires_grad=True), mask=None)
    assert isinstance(value, tuple) and value[1] is None
    graphs.detach()
    assert all("attn" not in vars(layer) and "mlp" not in vars(layer) for layer in model.layers)


@pytest.mark.parametrize("order", [LAST_STAGE, TWO_WARMUP_FORWARDS])
def test_a_part_inside_a_layer_uses_the_microbatch_of_that_layer(order):
    """Mixed with a part that is a method of the layer."""
    model = of_methods()
    eager = copy.deepcopy(model)
    attn, mixed = halves(model)[::2], []
    for index, layer in enumerate(model.layers):
        mixed += [attn[index], Part(f"{index}.norm", layer.norm), Part(f"{index}.inner", layer.inner)]
    holders = {part.name: model.layers[int(part.name[0])] for part in mixed}
    graphs = TransformerEngineGraphs(mixed, order, capture_context(), holders=holders, maker=StaticMaker())
    assert train(model, order) == train(eager, order)
    assert same_parameters(model, eager)
    assert set(reasons(graphs)) == {"warming_up"}
    assert replays(graphs) == 6 * 6 * 4 - reasons(graphs)["warming_up"] > 0
    graphs.detach()


@pytest.mark.parametrize("order", [ONE_AT_A_TIME, TWO_WARMUP_FORWARDS])
def test_layers_are_captured_in_the_order_in_which_they_run(order):
    """Like a model that registers its decoder before its encoder."""
    model = stack(4)
    eager = copy.deepcopy(model)
    first, second, third, last = parts(model)
    graphs = TransformerEngineGraphs([third, last, first, second], order, capture_context(), maker=StaticMaker())
    assert train(model, order) == train(eager, order)
    assert same_parameters(model, eager)
    assert set(reasons(graphs)) == {"warming_up"}
    assert len({count for (name, *_), count in graphs.context.stats.replays.items()}) == 1
    graphs.clear()  # also forgets the order of the layers
    model.layers = nn.ModuleList(reversed(model.layers))
    eager.layers = nn.ModuleList(reversed(eager.layers))
    assert train(model, order) == train(eager, order)
    assert set(reasons(graphs)) == {"warming_up"}
    graphs.detach()

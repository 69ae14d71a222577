"""Training graphs of models compiled by torch.compile: one graph of the fused kernels, equal to the compiled step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from graph_cache.errors import GraphConfigError
from graph_cache.stats import CacheStats
from graph_cache.training.compiled import reached_from
from tests.contract.training_models import WIDTH, assert_same, attached, batches, iterate, iteration_of, train

# Compilers read `.grad` of tensors they trace, and import deprecated modules.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore::DeprecationWarning")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch._dynamo.reset()


def twins(device):
    torch.manual_seed(0)
    model = Stack().to(device)
    return model, copy.deepcopy(model)


def compiled(module, device):
    """Compile with the default backend on a GPU, and without codegen on a CPU: its kernels bypass the dispatcher."""
    return torch.compile(module, backend="inductor" if device.type == "cuda" else "aot_eager")


def compile_in_place(module, device):
    module.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
    return module


def graphs_made():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("make", [compiled, compile_in_place], ids=["wrapped", "in_place"])
def test_an_iteration_over_a_compiled_model_is_one_graph_and_compiles_nothing_more(pool, device, make):
    eager, graphed = twins(device)
    data, stats = batches(8, device), CacheStats()
    expected = iterate(make(eager, device), data, lambda step: step, inside=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours = iterate(make(graphed, device), data, lambda step: iteration_of(pool, stats, step), inside=True)
    assert_same(ours, expected)
    assert sum(stats.replays.values()) >= 4
    assert not stats.failed_captures
    assert graphs_made() == 1


@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in_place"])
def test_compiled_layers_are_captured_as_compiled(pool, device, in_place):
    eager, graphed = twins(device)
    for model in (eager, graphed):
        for index, layer in enumerate(model.layers):
            model.layers[index] = (compile_in_place if in_place else compiled)(layer, device)
    before = [dict(vars(layer)) for layer in graphed.layers]
    data = [[x.requires_grad_() for x in micro] for micro in batches(6, device)]
    expected = train(eager, data)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs, stats = attached(graphed, ["layers.0", "layers.1"], pool)
    assert_same(train(graphed, data), expected)
    assert sum(stats.replays.values()) == 4 * 2 * 2
    assert not stats.failed_captures
    assert 1 <= graphs_made() <= 2
    with pytest.raises(GraphConfigError, match="already attached|already replaced"):
        attached(graphed, ["layers.0"], pool)
    graphs.detach()
    for layer, attributes in zip(graphed.layers, before, strict=True):
        assert set(vars(layer)) == set(attributes)
        for name in ("forward", "_compiled_call_impl"):
            assert vars(layer).get(name) is attributes.get(name)


def test_compiled_models_are_found_where_step_functions_keep_them(device):
    model = compiled(nn.Linear(2, 2), device)

    class Trainer:
        def __init__(self):
            self.parts = {"models": [model]}

        def step(self, x):
            return self.parts["models"][0](x)

    function = torch.compile(lambda x: model(x), backend="aot_eager")
    for step in (lambda x: model(x), Trainer().step, lambda x: function(x)):
        assert any(value is model for value in reached_from(step))
    assert reached_from(lambda x: x) == []

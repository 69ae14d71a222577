"""Training graphs of models compiled by torch.compile: one graph of the fused kernels, equal to the compiled step."""

from __future__ import annotations

import contextvars
import copy
import os
import sys
import types

import pytest
import torch
from torch import nn

from graph_cache.core.buffers import BufferSpec
from graph_cache.core.cache import GraphCache
from graph_cache.core.stats import CacheStats
from graph_cache.errors import GraphConfigError
from graph_cache.guards.changes import ProcessState
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


def lazily_compiled(function, device):
    """Compile at the first call and hide it in a closure, as Transformer Engine does with its fused activations."""
    found = None

    def call(*args):
        nonlocal found
        if found is None:
            found = torch.compile(function, backend="inductor" if device.type == "cuda" else "aot_eager")
        return found(*args)

    return call


def fused_gelu(x, bias):
    return nn.functional.gelu(x + bias, approximate="tanh")


class FusedGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, gelu):
        ctx.save_for_backward(x, bias)
        return gelu(x, bias)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x, bias = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
            return *torch.autograd.grad(fused_gelu(x, bias), (x, bias), grad), None


class CallsCompiled(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH)
        self.bias = nn.Parameter(torch.randn(64))
        self.gelu = lazily_compiled(fused_gelu, device)

    def forward(self, x):
        return self.down(FusedGelu.apply(self.up(x), self.bias, self.gelu))


def calling_compiled(device):
    torch.manual_seed(0)
    models = CallsCompiled(device), CallsCompiled(device)
    models[1].load_state_dict(models[0].state_dict())
    return [model.to(device=device, dtype=torch.bfloat16) for model in models]


@pytest.mark.parametrize("api", ["attach", "iteration"])
def test_a_hidden_compiled_function_runs_compiled_or_not_at_all_in_a_graph(pool, device, api, caplog):
    """A dispatch mode would run it uncompiled, which rounds differently."""
    eager, graphed = calling_compiled(device)
    data = [[x.bfloat16() for x in micro] for micro in batches(8, device)]
    if api == "attach":
        _, stats = attached(graphed, [""], pool)
        assert_same(train(graphed, data), train(eager, data))
    else:
        stats = CacheStats()
        ours = iterate(graphed, data, lambda step: iteration_of(pool, stats, step), inside=True)
        assert_same(ours, iterate(eager, data, lambda step: step, inside=True))
    if device.type == "cpu":
        assert not stats.replays and "compiled by torch.compile" in caplog.text
    else:
        assert sum(stats.replays.values()) >= 4 and not stats.failed_captures


def test_a_cached_function_runs_hidden_compiled_code_compiled_or_not_at_all(pool, device, caplog):
    eager, graphed = calling_compiled(device)
    cache = GraphCache(device=device, pool=pool)
    spec = BufferSpec(("batch", WIDTH), torch.bfloat16)
    run = cache.graphed("model", lambda x: graphed(x), {"x": spec}, buckets=(4,), watch=graphed)
    with torch.inference_mode():
        graphed(torch.zeros(4, WIDTH, device=device, dtype=torch.bfloat16))  # keeps the function that it compiles
        for _ in range(4):
            x = torch.randn(4, WIDTH, device=device, dtype=torch.bfloat16)
            assert torch.equal(run(x=x), eager(x))
    if device.type == "cpu":
        assert not cache.stats.replays and "compiled by torch.compile" in caplog.text
    else:
        assert sum(cache.stats.replays.values()) >= 2 and not cache.stats.failed_captures


def test_what_compilers_keep_in_the_process_is_no_change_of_a_call(monkeypatch):
    """The first call of a compiled function compiles it, and the compiler sets variables."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = ProcessState()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/nonexistent"
    assert not before.changes()
    before.restore()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/nonexistent"
    os.environ["ANOTHER_VARIABLE"] = "1"
    assert before.changes() == ["the environment"]
    before.restore()
    assert "ANOTHER_VARIABLE" not in os.environ


@pytest.mark.parametrize("api", ["module", "iteration"])
def test_a_context_variable_of_a_compiler_may_change_in_a_call(pool, device, api, monkeypatch):
    """Triton keeps its allocator of scratch memory in one, and libraries set another one in each forward."""
    launcher = types.ModuleType("triton.encore_test")
    launcher.ALLOCATOR = contextvars.ContextVar("_allocator")
    monkeypatch.setitem(sys.modules, launcher.__name__, launcher)

    class Layer(nn.Linear):
        def forward(self, x):
            launcher.ALLOCATOR.set(lambda size: None)
            return super().forward(x)

    layer = Layer(WIDTH, WIDTH).to(device)
    x = torch.ones(2, WIDTH, device=device)
    if api == "module":
        _, stats = attached(layer, [""], pool)
        run = layer
    else:
        stats = CacheStats()
        run = iteration_of(pool, stats, lambda x: layer(x).sum().backward())
    for _ in range(8):
        out = run(x)
        if api == "module":
            out.sum().backward()
        layer.zero_grad()
    assert sum(stats.replays.values()) >= 2 and not stats.failed_captures


def test_a_context_variable_with_a_name_like_pytorchs_is_watched(pool, device):
    scale = contextvars.ContextVar("torch.scale", default=1.0)
    weight, stats = torch.ones(WIDTH, device=device, requires_grad=True), CacheStats()
    run = iteration_of(pool, stats, lambda x: (x * weight * scale.get()).sum().backward())
    x = torch.ones(2, WIDTH, device=device)
    for value in range(1, 9):
        scale.set(float(value))
        run(x)
        assert weight.grad.tolist() == [2.0 * value] * WIDTH
        weight.grad = None


def compile_around(model, attach):
    attach(model, ["layers.0", "layers.1"])
    return torch.compile(model, backend="eager")


def compile_around_the_whole(model, attach):
    attach(model, [""])
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def compile_in_place_around(model, attach):
    attach(model, ["layers.0", "layers.1"])
    model.compile(backend="eager")
    return model


def attach_submodules_of_a_wrapper(model, attach):
    wrapper = torch.compile(model, backend="eager")
    attach(wrapper, ["_orig_mod.layers.0", "_orig_mod.layers.1"])
    return wrapper


def attach_after_a_compiled_call(model, attach):
    wrapper = torch.compile(model, backend="eager")
    wrapper(torch.zeros(2, 3, WIDTH, device=model.layers[0].up.weight.device))
    attach(model, ["layers.0", "layers.1"])
    return wrapper


def attach_a_compiled_forward(model, attach):
    model.layers[0].forward = torch.compile(model.layers[0].forward, backend="eager")
    attach(model, ["layers.0"])
    return model


AROUND = (
    compile_around,
    compile_around_the_whole,
    compile_in_place_around,
    attach_submodules_of_a_wrapper,
    attach_after_a_compiled_call,
    attach_a_compiled_forward,
)


@pytest.mark.parametrize("order", AROUND, ids=lambda order: order.__name__)
def test_attached_modules_inside_compiled_code_run_as_part_of_it(order, pool, device):
    found, logs = [], []
    for captures in (True, False):
        torch._dynamo.reset()
        model = twins(device)[0]
        attach = (lambda *args: found.append(attached(*args, pool))) if captures else (lambda *args: None)
        logs.append(train(order(model, attach), batches(4, device)))
    assert_same(*logs)
    graphs, stats = found[0]
    expected = "compiled" if order is not attach_a_compiled_forward else "capture_failed"
    assert device.type != "cpu" or expected in {reason for _, _, reason in stats.fallbacks}
    graphs.detach()


def test_a_captured_iteration_inside_compiled_code_runs_as_part_of_it(pool, device):
    logs, stats = [], CacheStats()
    for captures in (True, False):
        model, log = twins(device)[0], []

        def step(x, model=model):
            model.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss

        call = iteration_of(pool, stats, step) if captures else step
        run = torch.compile(lambda x, call=call: call(x) * 2, backend="eager")
        for x, _ in batches(4, device):
            log.append([run(x).detach(), *[parameter.grad.clone() for parameter in model.parameters()]])
        logs.append(log)
    assert_same(*logs)
    assert {reason for _, _, reason in stats.fallbacks} == {"compiled"}


class Scaled(nn.Linear):
    def __init__(self, length):
        super().__init__(WIDTH, WIDTH)
        self.scales = [1.0] * length

    def forward(self, x):
        return super().forward(x) * self.scales[0]


@pytest.mark.parametrize("length", [1, 5000])
@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in_place"])
def test_a_change_of_what_compiled_code_reads_is_noticed(in_place, length, pool, device):
    logs, found = [], None
    for captures in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        inner = Scaled(length).to(device)
        model, log = nn.Sequential(inner if in_place else torch.compile(inner, backend="eager")), []
        if in_place:
            inner.compile(backend="eager")
        if captures:
            found = attached(model, ["0"], pool)
        for step, (x, _) in enumerate(batches(7, device)):
            if step == 4:
                inner.scales[0] = 2.0
            loss = model(x).pow(2).mean()
            loss.backward()
            log.append([loss.detach(), inner.weight.grad.clone()])
        logs.append(log)
    assert_same(*logs)
    graphs, stats = found
    assert sum(stats.replays.values()) if length == 1 else "not compared" in stats.failures["0"]
    graphs.detach()


class Counting(nn.Module):
    """Counts its calls in a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), torch.zeros(())

    def forward(self, x):
        self.calls.add_(1)
        return self.linear(x) * self.calls


def test_a_capture_beside_compiled_code_leaves_tensors_in_attributes_as_they_were(pool, device):
    if device.type != "cpu":
        pytest.skip("compiled kernels of a GPU are not observed")
    torch.manual_seed(0)
    ours = nn.Sequential(Counting(), nn.Linear(WIDTH, WIDTH))
    reference = copy.deepcopy(ours)
    ours[1].compile(backend="eager")
    graphs, stats = attached(ours, [""], pool, warmup=1)
    for index in range(5):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index))
        found, wanted = ours(x), reference(x)
        assert torch.equal(found, wanted) and torch.equal(ours[0].calls, reference[0].calls)
        found.sum().backward(), wanted.sum().backward()
    assert sum(stats.replays.values()) >= 3
    graphs.detach()

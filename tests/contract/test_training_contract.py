"""Training graphs on every backend: losses, gradients and state equal eager's, and whatever differs from the capture
runs eager with a reason instead of stale.
"""

from __future__ import annotations

import copy
import dataclasses
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import register_dataclass

from graph_cache.errors import GraphConfigError, GraphError
from graph_cache.stats import CacheStats
from graph_cache.training.iteration import CapturedIteration
from graph_cache.training.modules import TrainingGraphs

WIDTH, LENGTH, ROWS = 32, 8, 4


class Recurrent(nn.Module):
    """An LSTM, whose module keeps a second list of its weights."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(self.lstm(x)[0])


class Normed(nn.Module):
    """Batch norm: a forward that writes buffers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x):
        return self.norm(self.linear(x))


class Shared(nn.Module):
    """Two blocks that share a weight, and one frozen bias."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def mlp():
    return nn.Sequential(*[
        nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, WIDTH)) for _ in range(3)
    ])


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


class SmallGPT(nn.Module):
    """Causal attention, dropout, residuals: layers as a language model has them."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.drop = nn.Dropout(0.1)

        def forward(self, x):
            rows, length, width = x.shape
            q, k, v = self.qkv(self.norm_1(x)).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.drop(self.out(attended.transpose(1, 2).reshape(rows, length, width)))
            return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


MODELS = {
    "gpt": (SmallGPT, ["layers.0", "layers.1"]),
    "mlp": (mlp, ["0", "1", "2"]),
    "mlp_whole": (mlp, [""]),
    "encoder": (encoder, ["layers.0", "layers.1", "layers.2"]),
    "lstm": (Recurrent, ["lstm", "out"]),
    "batch_norm": (Normed, [""]),
    "shared_weight": (Shared, ["first", "second"]),
}


def twins(build, device):
    torch.manual_seed(0)
    model = build().to(device)
    return model, copy.deepcopy(model)


def batches(steps, device, micro=2, rows=ROWS):
    generator = torch.Generator().manual_seed(5)
    return [[torch.randn(rows, LENGTH, WIDTH, generator=generator).to(device) for _ in range(micro)]
            for _ in range(steps)]


def train(model, data, *, outstanding=True):
    """Plain training code: microbatches, accumulation, momentum. Returns every loss and gradient."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    log = []
    for micro in data:
        optimizer.zero_grad()
        losses = []
        for x in micro:
            losses.append(model(x).pow(2).mean())
            if not outstanding:
                losses[-1].backward()
        for loss in losses if outstanding else ():
            loss.backward()
        log.append([loss.detach().clone() for loss in losses]
                   + [p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
    return log


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for step, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        assert len(left) == len(right)
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert torch.equal(one, other), f"step {step}, value {index}"


def attached(model, paths, pool, rounds=2):
    stats = CacheStats()
    generators = [torch.default_generator] if pool.backend.name == "cpu" else []
    graphs = TrainingGraphs(pool, stats, warmup_rounds=rounds, generators=generators)
    graphs.attach([(path or "model", model.get_submodule(path)) for path in paths])
    return graphs, stats


@pytest.mark.parametrize("outstanding", [True, False], ids=["two_outstanding", "one_after_another"])
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_equal_eager_bit_for_bit(pool, device, name, outstanding):
    build, paths = MODELS[name]
    eager, graphed = twins(build, device)
    data = batches(10, device)
    expected = train(eager, data, outstanding=outstanding)
    graphs, stats = attached(graphed, paths, pool)
    assert_same(train(graphed, data, outstanding=outstanding), expected)
    rounds, calls = (10, 2) if outstanding else (20, 1)  # a round ends when no backward is outstanding
    assert sum(stats.replays.values()) == (rounds - 2) * calls * len(paths)
    assert not stats.failed_captures
    assert graphs.outstanding == 0
    for key, value in eager.state_dict().items():
        assert torch.equal(graphed.state_dict()[key], value), key
    graphs.detach()
    assert all("forward" not in vars(module) for module in graphed.modules())


@pytest.mark.parametrize("name", ["mlp", "gpt", "lstm"])
def test_steps_in_bfloat16_equal_eager(pool, device, name):
    build, paths = MODELS[name]
    eager, graphed = twins(lambda: build().bfloat16(), device)
    data = [[x.bfloat16() for x in micro] for micro in batches(6, device)]
    expected = train(eager, data)
    graphs, stats = attached(graphed, paths, pool)
    assert_same(train(graphed, data), expected)
    assert sum(stats.replays.values()) == 4 * 2 * len(paths)


def test_two_outstanding_microbatches_get_an_instance_each_and_more_run_eager(pool, device):
    eager, graphed = twins(mlp, device)
    graphs, stats = attached(graphed, ["0", "1", "2"], pool)
    two, three = batches(4, device, micro=2), batches(2, device, micro=3)
    expected = train(eager, two) + train(eager, three)
    assert_same(train(graphed, two) + train(graphed, three), expected)
    assert len(graphs.table()) == 6
    assert stats.fallbacks["0", "forward", "no_free_instance"] == 2


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
    assert sum(stats.replays.values()) == before + 6  # the first kind's graphs are still there


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


def test_eval_and_no_grad_run_beside_without_disturbing_what_is_saved(pool, device):
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


def test_a_step_interrupted_before_its_backward_gives_its_pairs_back(pool, device):
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


def test_deleting_graphs_mid_training_goes_on_and_recaptures(pool, device):
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


def test_an_exception_inside_capture_costs_only_that_module(pool, device):
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


def test_hooks_see_gradients_and_hooks_inside_keep_a_module_eager(pool, device):
    eager, graphed = twins(mlp, device)
    seen: dict[str, list] = {"eager": [], "graphed": []}
    for name, model in (("eager", eager), ("graphed", graphed)):
        model[0][0].weight.register_hook(lambda grad, name=name: seen[name].append(grad.clone()))
        model[1].register_full_backward_hook(lambda module, gi, go, name=name: seen[name].append(go[0].clone()))
    calls = []
    graphed[2][0].register_forward_hook(lambda module, args, out: calls.append(1))
    graphs, stats = attached(graphed, ["0", "1", "2"], pool)
    data = batches(5, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    assert_same([seen["graphed"]], [seen["eager"]])
    assert len(calls) == 5
    assert stats.fallbacks["2", "forward", "hooks_inside"] == 5
    assert len(graphs.table()) == 2


def test_trees_and_dataclasses_go_in_and_come_out(pool, device):
    @dataclasses.dataclass
    class Pair:
        hidden: torch.Tensor
        extra: torch.Tensor | None

    register_dataclass(Pair)

    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, pair, options, mask=None):
            y = self.linear(pair.hidden) * options["scale"]
            return {"out": Pair(y, None), "aux": (y.mean(), options["name"])}

    torch.manual_seed(0)
    model = Tree().to(device)
    graphs, stats = attached(model, [""], pool)
    for _ in range(5):
        x = torch.randn(2, WIDTH, device=device)
        result = model(Pair(x, None), {"scale": 2.0, "name": "n"})
        assert torch.equal(result["out"].hidden, model.linear(x) * 2.0)
        assert result["aux"][1] == "n"
        (result["out"].hidden.sum() + result["aux"][0]).backward()
    assert stats.replays["model", "module", "forward", 2] == 3


def test_a_second_backward_through_one_forward_is_refused(pool, device):
    _, graphed = twins(mlp, device)
    graphs, _ = attached(graphed, ["0"], pool)
    data = batches(4, device, micro=1)
    train(graphed, data)
    loss = graphed(data[0][0]).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(GraphError, match="twice"):
        loss.backward()


def test_the_output_of_one_graph_is_the_input_of_the_next_without_a_copy(pool, device):
    _, graphed = twins(mlp, device)
    graphs, _ = attached(graphed, ["0", "1", "2"], pool)
    train(graphed, batches(4, device, micro=1))
    first, second, third = graphs._programs[0].order.pairs
    assert second.inputs[0].data_ptr() == first.outputs[0].data_ptr()
    assert third.inputs[0].data_ptr() == second.outputs[0].data_ptr()
    assert first.grad_outputs[0].data_ptr() == second.input_grads[0].data_ptr()


def test_attaching_twice_is_refused(pool, device):
    _, graphed = twins(mlp, device)
    attached(graphed, ["0"], pool)
    with pytest.raises(GraphConfigError, match="replaced already"):
        attached(graphed, ["1", "0"], pool)
    assert "forward" not in vars(graphed[1])


def iterate(model, data, wrap, *, clear=True, inside=False, step_inside=False):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(micro, scale=1.0):
        if inside:
            optimizer.zero_grad()
        losses = []
        for x in micro:
            losses.append(model(x).pow(2).mean() * scale)
            losses[-1].backward()
        if step_inside:
            optimizer.step()
        return [loss.detach() for loss in losses]

    run, log = wrap(step), []
    for index, micro in enumerate(data):
        if clear and not inside and index % 3 != 2:
            optimizer.zero_grad(set_to_none=index % 2 == 0)
        losses = run(micro)
        log.append([loss.clone() for loss in losses] + [p.grad.clone() for p in model.parameters()])
        if not step_inside:
            optimizer.step()
    return log


def iteration_of(pool, stats, step):
    generators = [torch.default_generator] if pool.backend.name == "cpu" else []
    return CapturedIteration(step, pool, stats, warmup_steps=2, generators=generators)


@pytest.mark.parametrize("options", [{}, {"inside": True}, {"inside": True, "step_inside": True}],
                         ids=["accumulating", "clearing", "with_optimizer"])
@pytest.mark.parametrize("name", ["mlp", "encoder", "batch_norm"])
def test_a_whole_iteration_equals_eager_bit_for_bit(pool, device, name, options):
    eager, graphed = twins(MODELS[name][0], device)
    data, stats = batches(12, device), CacheStats()
    expected = iterate(eager, data, lambda step: step, **options)
    assert_same(iterate(graphed, data, lambda step: iteration_of(pool, stats, step), **options), expected)
    assert sum(stats.replays.values()) >= 5
    for key, value in eager.state_dict().items():
        assert torch.equal(graphed.state_dict()[key], value), key


def test_another_number_of_microbatches_or_shape_is_never_stale(pool, device):
    eager, graphed = twins(mlp, device)
    stats = CacheStats()
    data = batches(5, device) + batches(4, device, micro=3) + batches(4, device, rows=3) + batches(2, device)
    expected = iterate(eager, data, lambda step: step, inside=True)
    holder = []

    def wrap(step):
        holder.append(iteration_of(pool, stats, step))
        return holder[0]

    assert_same(iterate(graphed, data, wrap, inside=True), expected)
    assert len(holder[0].table()) == 3
    holder[0].clear()
    assert holder[0].table() == []


def test_a_step_that_reads_on_the_host_runs_eager(pool, device):
    eager, graphed = twins(mlp, device)
    stats = CacheStats()

    def make(model):
        def step(x):
            loss = model(x).pow(2).mean()
            loss.backward()
            return torch.tensor(loss.item())
        return step

    torch.manual_seed(1)
    ours, run = [], iteration_of(pool, stats, make(graphed))
    x = batches(1, device)[0][0]
    for _ in range(6):
        ours.append([run(x), *(p.grad.clone() for p in graphed.parameters())])
    torch.manual_seed(1)
    step = make(eager)
    theirs = [[step(x), *(p.grad.clone() for p in eager.parameters())] for _ in range(6)]
    assert stats.failed_captures
    assert not stats.replays
    assert len(ours) == len(theirs)


def test_checkpointing_equals_eager_and_is_refused_where_a_graph_cannot_go_back_to_a_random_state(pool, device):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self, preserve):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2 if preserve else 0.0),
                                       nn.Linear(WIDTH, WIDTH))
            self.preserve = preserve

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=self.preserve)

    for preserve, captured in ((True, False), (False, True)):
        eager, graphed = twins(lambda preserve=preserve: Checkpointed(preserve), device)
        graphs, stats = attached(graphed, [""], pool)
        data = batches(5, device, micro=1)
        assert_same(train(graphed, data), train(eager, data))
        captured = captured or device.type == "cuda"  # CUDA graphs keep random states on the device
        assert bool(stats.replays) == captured
        assert bool(stats.failed_captures) != captured
        graphs.detach()


def test_generators_of_ones_own_draw_fresh_numbers_also_those_made_under_inference_mode(pool, device):
    class Noisy(nn.Module):
        def __init__(self, generator):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.generator = generator

        def forward(self, x):
            return self.linear(x) + torch.rand(x.shape, device=x.device, generator=self.generator)

    def generator():
        with torch.inference_mode():
            return torch.Generator(device).manual_seed(11)

    torch.manual_seed(0)
    graphed = Noisy(generator()).to(device)
    eager = Noisy(generator()).to(device)
    eager.load_state_dict(graphed.state_dict())
    stats = CacheStats()
    graphs = TrainingGraphs(pool, stats, warmup_rounds=2, generators=[graphed.generator])
    graphs.attach([("model", graphed)])
    data = batches(6, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    assert sum(stats.replays.values()) == 4

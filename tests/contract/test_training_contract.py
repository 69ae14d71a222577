"""Training graphs on every backend: losses, gradients and state equal eager's for many kinds of modules."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._pytree import register_dataclass

from graph_cache.core.stats import CacheStats
from graph_cache.training.attached import Attachment, Part
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.modules import TrainingGraphs
from tests.contract.training_models import MODELS, WIDTH, assert_same, attached, batches, mlp, train, twins


@pytest.mark.parametrize("outstanding", [True, False], ids=["two_outstanding", "one_after_another"])
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_equal_eager_bit_for_bit(pool, device, name, outstanding):
    build, paths = MODELS[name]
    eager, graphed = twins(build, device)
    data = batches(10, device)
    expected = train(eager, data, outstanding=outstanding)
    graphs, stats = attached(graphed, paths, pool)
    assert_same(train(graphed, data, outstanding=outstanding), expected)
    steps, calls = (10, 2) if outstanding else (20, 1)  # a step ends when no backward is outstanding
    assert sum(stats.replays.values()) == (steps - 2) * calls * len(paths)
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


def test_each_outstanding_microbatch_gets_its_own_graphs_and_more_run_eager_until_recorded(pool, device):
    eager, graphed = twins(mlp, device)
    graphs, stats = attached(graphed, ["0", "1", "2"], pool)
    two, three = batches(4, device, micro=2), batches(4, device, micro=3)
    assert_same(train(graphed, two), train(eager, two))
    assert len(graphs.table()) == 6
    assert_same(train(graphed, three), train(eager, three))
    assert len(graphs.table()) == 9
    assert stats.fallbacks["0", "forward", "no_free_instance"] == 1
    assert stats.fallbacks["0", "forward", "warming_up"] == 2 * 2 + 1


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


def test_pytrees_and_dataclasses_are_accepted_and_returned(pool, device):
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


def test_the_output_of_one_graph_is_the_input_of_the_next_without_a_copy(pool, device):
    _, graphed = twins(mlp, device)
    graphs, _ = attached(graphed, ["0", "1", "2"], pool)
    train(graphed, batches(4, device, micro=1))
    first, second, third = (entry.graphs for entry in graphs.recorded_steps[0].entries())
    assert second.inputs[0].data_ptr() == first.outputs[0].data_ptr()
    assert third.inputs[0].data_ptr() == second.outputs[0].data_ptr()
    assert first.grad_outputs[0].data_ptr() == second.input_grads[0].data_ptr()


@pytest.mark.parametrize("rate", [0.0, 0.2])
@pytest.mark.parametrize("preserve", [True, False])
def test_checkpointing_replays_and_restores_the_rng_state(pool, device, rate, preserve):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(rate if preserve else 0.0), nn.Linear(WIDTH, WIDTH)
            )

        def forward(self, x):
            x = checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=preserve)
            return checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=preserve)

    eager, graphed = twins(Checkpointed, device)
    graphs, stats = attached(graphed, [""], pool)
    data = batches(5, device, micro=2)
    assert_same(train(graphed, data), train(eager, data))
    assert stats.replays and not stats.failed_captures
    graphs.detach()


class CheckpointedLayer(nn.Module):
    """A checkpoint that draws random numbers, with an output that some callers don't use."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        hidden = checkpoint(self.inner, x, use_reentrant=False)
        return hidden, hidden.sum()


class Checkpoints(nn.Module):
    """Several checkpoints, with other random numbers between their forwards and their backwards."""

    def __init__(self, between):
        super().__init__()
        self.layers = nn.ModuleList(CheckpointedLayer() for _ in range(3))
        self.uses_sums, self.between = True, between

    def forward(self, x):
        total = 0.0
        for layer in self.layers:
            x, part = layer(x)
            total = total + part if self.uses_sums else total
        self.between(x)
        return x + total


BETWEEN = {
    "nothing": lambda x: None,
    "draws": lambda x: torch.rand(3, device=x.device),
    "seeds": lambda x: torch.manual_seed(7),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_backwards_of_several_checkpoints_draw_the_numbers_of_their_forwards(pool, device, between):
    eager, graphed = twins(lambda: Checkpoints(BETWEEN[between]), device)
    graphs, stats = attached(graphed, ["layers.0", "layers.1", "layers.2"], pool)
    data = batches(6, device, micro=2)
    assert_same(train(graphed, data[:4]), train(eager, data[:4]))
    assert sum(stats.replays.values()) == 2 * 2 * 3 and not stats.failed_captures
    for model in (eager, graphed):  # replayed forwards with backwards that no graph has: these run eager
        model.uses_sums = False
    assert_same(train(graphed, data[4:]), train(eager, data[4:]))
    assert stats.fallbacks["layers.0", "backward", "other_backward"] == 2 * 2
    graphs.detach()


def test_a_backward_that_draws_beside_a_checkpoint_stays_eager(pool, device):
    from torch.utils.checkpoint import checkpoint

    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad + torch.rand_like(grad)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))

        def forward(self, x):
            return Noise.apply(checkpoint(self.inner, Noise.apply(x), use_reentrant=False))

    eager, graphed = twins(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Both()), device)
    graphs, stats = attached(graphed, ["1"], pool)
    data = batches(5, device, micro=2)
    assert_same(train(graphed, data), train(eager, data))
    assert not stats.replays and stats.fallbacks["1", "forward", "capture_failed"]
    graphs.detach()


@pytest.mark.parametrize("seeded", [True, False])
def test_a_fork_of_the_generator_replays_unless_it_is_seeded(pool, device, seeded):
    if device.type == "cuda":
        pytest.skip("CUDA graphs keep the state of generators on the device")

    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def noise(self, x):
            return torch.rand_like(x)

        def forward(self, x):
            with torch.random.fork_rng(devices=[]):
                noise = self.noise(x)
            return self.linear(x) + noise + torch.rand_like(x)

    class Seeded(Forked):
        def noise(self, x):
            torch.manual_seed(1)
            return torch.rand_like(x)

    eager, graphed = twins(Seeded if seeded else Forked, device)
    graphs, stats = attached(graphed, [""], pool)
    data = batches(5, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    assert bool(stats.replays) != seeded
    graphs.detach()


def test_registered_generators_draw_fresh_numbers_even_if_made_under_inference_mode(pool, device):
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
    graphs = TrainingGraphs(CaptureContext(pool, stats, [graphed.generator]), warmup_rounds=2)
    graphs.attach(Attachment([Part("model", graphed)]))
    data = batches(6, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    assert sum(stats.replays.values()) == 4


def test_two_alternating_step_signatures_are_both_captured(pool, device):
    eager, graphed = twins(mlp, device)
    _, stats = attached(graphed, ["0", "1", "2"], pool)
    data = [
        step
        for pair in zip(batches(6, device, micro=1), batches(6, device, micro=1, rows=2), strict=True)
        for step in pair
    ]
    assert_same(train(graphed, data), train(eager, data))
    assert stats.replays["0", "module", "forward", 4] >= 3 and stats.replays["0", "module", "forward", 2] >= 4


def test_allowed_pre_hooks_run_once_before_each_replay_and_never_inside_a_capture(pool, device):
    eager, graphed = twins(mlp, device)
    calls = []

    def gather(module, args):
        assert not pool.capturing
        calls.append(module)

    submodules = [module for block in graphed for module in block.modules() if module is not block]
    for module in submodules:
        module.register_forward_pre_hook(gather)
    graphs = TrainingGraphs(
        CaptureContext(pool, CacheStats(), [torch.default_generator] if device.type == "cpu" else []), warmup_rounds=2
    )
    graphs.attach(
        Attachment([Part(str(index), block) for index, block in enumerate(graphed)], fired=lambda hook: hook is gather)
    )
    data = batches(6, device, micro=1)
    log = []
    for step, micro in enumerate(data):
        calls.clear()
        torch.manual_seed(step)
        loss = graphed(micro[0]).pow(2).mean()
        loss.backward()
        log.append([loss.detach().clone(), *[parameter.grad.clone() for parameter in graphed.parameters()]])
        graphed.zero_grad()
        # Each hook runs once, in order. At the capture, all of them also run before it.
        assert calls[-len(submodules) :] == submodules and len(calls) == len(submodules) * (2 if step == 2 else 1)
    theirs = []
    for step, micro in enumerate(data):
        torch.manual_seed(step)
        eager.zero_grad()
        loss = eager(micro[0]).pow(2).mean()
        loss.backward()
        theirs.append([loss.detach().clone(), *[parameter.grad.clone() for parameter in eager.parameters()]])
    assert_same(log, theirs)
    assert sum(graphs.stats.replays.values()) == 4 * 3


class Scale:
    """Ambient state: a value that a graph bakes in, and a flag that each call clears."""

    def __init__(self):
        self.value, self.is_new, self.flags_at_replay, self.holds = 1.0, True, [], True

    def of(self, modules):
        return self.value

    @contextmanager
    def recreate(self, modules, seen):
        before, self.value = (self.value, self.is_new), seen
        yield
        self.value, self.is_new = before

    def watch(self, modules):
        return lambda: self.holds

    def replaying(self, modules):
        self.flags_at_replay.append(self.is_new)

    def replayed(self, modules):
        self.is_new = False


def test_ambient_state_is_part_of_the_signature_and_is_recreated_for_the_capture(pool, device):
    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.linear, self.scale = nn.Linear(WIDTH, WIDTH), scale

        def forward(self, x):
            self.scale.is_new = False
            return self.linear(x) * self.scale.value

    scale = Scale()
    eager, graphed = twins(lambda: Scaled(None), device)
    eager.scale = graphed.scale = scale
    graphs = TrainingGraphs(CaptureContext(pool, CacheStats(), []), warmup_rounds=2)
    graphs.attach(Attachment([Part("model", graphed)], ambient=scale))
    log = {graphed: [], eager: []}
    for step in range(10):
        for model in (graphed, eager):
            model.zero_grad()
            # Steps, and so captures, alternate between the two values at their start.
            for value in (1.0, 3.0) if step % 2 else (3.0, 1.0):
                scale.value, scale.is_new = value, True
                out = model(torch.full((2, WIDTH), 0.1 * step, device=device))
                out.sum().backward()
                assert not scale.is_new
                log[model].append([out.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
    assert_same(log[graphed], log[eager])
    assert (
        len(graphs.table()) == 2
        and len(scale.flags_at_replay) == graphs.stats.replays["model", "module", "forward", 2] >= 12
    )
    assert all(scale.flags_at_replay)
    scale.holds = False  # simulate moved state
    graphed(torch.ones(2, WIDTH, device=device)).sum().backward()
    assert graphs.table() == [] and graphs.stats.invalidations == {"stale_address": 2}  # graphs of both values

"""Calls of one microbatch that get the same tensor share one static input, and never read another call's values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graph_cache.backends import backend_for
from graph_cache.core.pool import GraphPool
from graph_cache.core.stats import CacheStats
from graph_cache.training.attached import Attachment, Part
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.modules import TrainingGraphs

DEPTH = 3


class Layer(nn.Module):
    """Multiply by the mask inside, so that the backward reads the mask too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, mask, other=None):
        x = x + torch.tanh(self.linear(x)) * mask
        return x if other is None else x * other


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x, masks):
        for layer, mask in zip(self.layers, masks, strict=True):
            x = layer(x, *mask) if isinstance(mask, tuple) else layer(x, mask)
        return x


def attached(model, warmup=1):
    graphs = TrainingGraphs(CaptureContext(GraphPool(backend_for("cpu")), CacheStats()), warmup_rounds=warmup)
    graphs.attach(Attachment([Part(f"layers.{index}", layer) for index, layer in enumerate(model.layers)]))
    return graphs


def train(model, masks_of, steps=8):
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6), masks_of(step)).sum()
        loss.backward()
        log.append([loss.detach().clone(), *[one.grad.clone() for one in model.parameters()]])
        optimizer.step()
    return log


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def mask_addresses(graphs, position=1):
    (recorded,) = graphs.recorded_steps
    return {entry.graphs.inputs[position].data_ptr() for entry in recorded.entries()}


def replays(graphs):
    return sum(graphs.stats.replays.values())


def reasons(graphs):
    found = {}
    for (_, _, reason), count in graphs.stats.fallbacks.items():
        found[reason] = found.get(reason, 0) + count
    return found


def one_mask(step):
    return [torch.rand(4, 6)] * DEPTH


def expanded_mask(step):
    return [torch.rand(4, 1).expand(4, 6)] * DEPTH


@pytest.mark.parametrize("masks_of", [one_mask, expanded_mask])
def test_one_buffer_holds_the_mask_of_all_layers(masks_of):
    expected, model = train(Model(), masks_of), Model()
    graphs = attached(model)
    assert_same(train(model, masks_of), expected)
    assert len(mask_addresses(graphs)) == 1 and replays(graphs) == 7 * DEPTH
    graphs.detach()


def test_masks_that_differ_have_buffers_of_their_own():
    def masks_of(step):
        return [torch.rand(4, 6) for _ in range(DEPTH)]

    expected, model = train(Model(), masks_of), Model()
    graphs = attached(model)
    assert_same(train(model, masks_of), expected)
    assert len(mask_addresses(graphs)) == DEPTH and replays(graphs) == 7 * DEPTH
    graphs.detach()


def test_a_mask_that_stops_being_shared_runs_eager_then_gets_its_own_graphs():
    def masks_of(step):
        shared = torch.rand(4, 6)
        return [shared] * DEPTH if step < 4 else [shared, torch.rand(4, 6), shared]

    expected, model = train(Model(), masks_of), Model()
    graphs = attached(model, warmup=2)
    assert_same(train(model, masks_of), expected)
    # From step 4 on, layers 1 and 2 get another input than recorded, and have graphs of their own from step 6 on.
    assert reasons(graphs) == {"warming_up": 2 * DEPTH + 2, "no_free_instance": 2}
    assert replays(graphs) == 2 * DEPTH + 2 * 1 + 2 * DEPTH
    graphs.detach()


def test_a_backward_reads_the_mask_of_its_own_forward():
    class LastDiffers(Model):
        def forward(self, x, masks):
            for index, layer in enumerate(self.layers):
                x = layer(x, masks[0] + 1 if self.step >= 3 and index == DEPTH - 1 else masks[0])
            return x

    def run(model):
        log = []
        for step in range(8):
            model.step = step
            log += train(model, lambda _, step=step: [torch.full((4, 6), 0.1 * step)] * DEPTH, steps=1)
        return log

    expected, model = run(LastDiffers()), LastDiffers()
    graphs = attached(model)
    assert_same(run(model), expected)
    graphs.detach()


def test_a_mask_that_changes_in_place_between_layers_equals_eager():
    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, mask):
            return x + torch.tanh(self.linear(x)) + mask  # the backward does not read the mask

    class InPlace(Model):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Adding() for _ in range(DEPTH))

        def forward(self, x, masks):
            for layer in self.layers:
                x = layer(x, masks[0])
                masks[0].add_(masks[1])
            return x

    def masks_of(step):
        return [torch.rand(4, 6), 0 if step < 3 else 1]

    torch.manual_seed(0)
    eager = InPlace()
    model = InPlace()
    model.load_state_dict(eager.state_dict())
    expected = train(eager, masks_of)
    graphs = attached(model)
    assert_same(train(model, masks_of), expected)
    assert replays(graphs) > 0
    graphs.detach()


@pytest.mark.parametrize("given_twice", [range(3), range(3, 9), ()], ids=["first", "later", "never"])
def test_arguments_of_one_call_share_a_buffer_only_if_they_are_one_tensor(given_twice):
    def masks_of(step):
        one = torch.rand(4, 6)
        other = one if step in given_twice else torch.rand(4, 6)
        return [(one, other)] * DEPTH

    expected, model = train(Model(), masks_of), Model()
    graphs = attached(model)
    assert_same(train(model, masks_of), expected)
    if not given_twice:
        assert mask_addresses(graphs, 1) != mask_addresses(graphs, 2)
    graphs.detach()


def test_microbatches_that_interleave_keep_their_masks_apart():
    def run(model):
        log = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            torch.manual_seed(step)
            optimizer.zero_grad()
            losses = [model(torch.randn(4, 6), [torch.rand(4, 6)] * DEPTH).sum() for _ in range(3)]
            for loss in losses:
                loss.backward()
            log.append([one.grad.clone() for one in model.parameters()])
            optimizer.step()
        return log

    expected, model = run(Model()), Model()
    graphs = attached(model)
    assert_same(run(model), expected)
    assert len(mask_addresses(graphs)) == 3 and replays(graphs) == 5 * 3 * DEPTH
    graphs.detach()

"""Strides of arguments and gradients: kernels, and so the last bits of results, depend on them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import SiglipVisionConfig, SiglipVisionModel

from graph_cache.core.stats import CacheStats
from graph_cache.utils.layout import copy_into, copy_of, is_expanded, overlaps
from tests.contract.training_models import LENGTH, WIDTH, assert_same, attached, iteration_of, twins

STEPS = 6


def steps(model, loss_of, arguments, device):
    """Train on arguments made by `arguments(generator)`. Returns every loss and gradient."""
    generator, log = torch.Generator().manual_seed(3), []
    for step in range(STEPS):
        model.zero_grad()
        given = [tensor.to(device) for tensor in arguments(generator)]
        loss = loss_of(model, step, *given)
        loss.backward()
        grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        log.append([loss.detach().clone(), *grads])
    return log


def siglip():
    config = SiglipVisionConfig(
        hidden_size=96, intermediate_size=192, num_hidden_layers=1, num_attention_heads=6, image_size=224, patch_size=16
    )
    return SiglipVisionModel(config)


def siglip_loss(model, step, pixels):
    found = model(pixels)
    return found.last_hidden_state.pow(2).mean() + found.pooler_output.pow(2).mean()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("paths", [["encoder"], ["embeddings", "encoder.layers.0", "head"]], ids=["tower", "parts"])
def test_a_siglip_tower_equals_eager_for_every_batch_size(pool, device, paths, batch):
    """The gradient of its hidden states is laid out differently from the hidden states."""
    eager, graphed = twins(siglip, device)
    _, stats = attached(graphed, paths, pool)

    def arguments(generator):
        return [torch.randn(batch, 3, 224, 224, generator=generator)]

    ours, theirs = (steps(model, siglip_loss, arguments, device) for model in (graphed, eager))
    assert_same(ours, theirs)
    assert sum(stats.replays.values()) == (STEPS - 2) * len(paths)
    assert {reason for (_, _, reason), count in stats.fallbacks.items() if count} == {"warming_up"}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


LAYOUTS = {
    "expanded": lambda x: x[:1].expand(4, -1, -1),
    "expanded_row": lambda x: x[:, :1].expand(-1, LENGTH, -1),
    "transposed": lambda x: x.transpose(0, 1),
    "sliced": lambda x: x.repeat(1, 1, 2)[..., :WIDTH],
    "stepped": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "size_one": lambda x: x[:1].transpose(0, 1),
    "odd_size_one": lambda x: torch.as_strided(x.clone(), (1, LENGTH, WIDTH), (7, WIDTH, 1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("way", ["attach", "iteration"])
def test_arguments_of_every_layout_are_captured(pool, device, name, way):
    eager, graphed = twins(Layer, device)
    stats = CacheStats()
    if way == "attach":
        _, stats = attached(graphed, [""], pool)

    def arguments(generator):
        return [torch.randn(4, LENGTH, WIDTH, generator=generator)]

    def loss_of(model, step, x):
        return model(LAYOUTS[name](x)).pow(2).mean()

    run = iteration_of(pool, stats, lambda x: _backward(graphed(x).pow(2).mean()))

    def iterated(model, step, x):
        loss = run(LAYOUTS[name](x)) if model is graphed else loss_of(model, step, x).detach()
        if model is not graphed:
            loss_of(model, step, x).backward()
        return loss.clone().requires_grad_()

    chosen = loss_of if way == "attach" else iterated
    assert_same(steps(graphed, chosen, arguments, device), steps(eager, chosen, arguments, device))
    assert sum(stats.replays.values()) >= STEPS - 4 and not stats.failed_captures


def _backward(loss):
    loss.backward()
    return loss.detach()


def test_sliding_windows_run_eager(pool, device):
    eager, graphed = twins(Layer, device)
    _, stats = attached(graphed, [""], pool)

    def arguments(generator):
        return [torch.randn(4 * WIDTH, generator=generator)]

    def loss_of(model, step, x):
        return model(x.unfold(0, WIDTH, 8)).pow(2).mean()

    assert_same(steps(graphed, loss_of, arguments, device), steps(eager, loss_of, arguments, device))
    assert not stats.replays and stats.fallbacks["model", "forward", "argument_without_memory"] == STEPS


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.first(x), self.second(x).sqrt()  # a gradient of zero would become NaN


LOSSES = {
    "same": lambda step, one, other: one.pow(2).mean() + other.nan_to_num().mean(),
    "expanded_gradient": lambda step, one, other: one.sum() + other.nan_to_num().sum(),
    "transposed_gradient": lambda step, one, other: (one.transpose(0, 1).contiguous() * 2).pow(2).sum(),
    "changing": lambda step, one, other: one.sum() if step % 2 else one.pow(2).transpose(0, 1).contiguous().sum(),
    "first_only": lambda step, one, other: one.pow(2).mean(),
    "second_later": lambda step, one, other: one.pow(2).mean() + (other.nan_to_num().mean() if step > 3 else 0),
    "first_later": lambda step, one, other: one.pow(2).mean() + (other.nan_to_num().mean() if step < 3 else 0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_every_layout_and_unused_outputs_equal_eager(pool, device, name):
    eager, graphed = twins(Two, device)
    _, stats = attached(graphed, [""], pool)

    def arguments(generator):
        return [torch.randn(4, LENGTH, WIDTH, generator=generator)]

    def loss_of(model, step, x):
        return LOSSES[name](step, *model(x))

    assert_same(
        [[torch.nan_to_num(value) for value in log] for log in steps(graphed, loss_of, arguments, device)],
        [[torch.nan_to_num(value) for value in log] for log in steps(eager, loss_of, arguments, device)],
    )
    assert sum(stats.replays.values()) == STEPS - 2
    others = stats.fallbacks["model", "backward", "other_backward"]
    assert (others > 0) == (name in ("changing", "second_later", "first_later"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_copies_keep_strides_and_values(device, name):
    x = LAYOUTS[name](torch.randn(4, LENGTH, WIDTH, device=device))
    copy = copy_of(x)
    assert copy.stride() == x.stride() and torch.equal(copy, x) and copy.data_ptr() != x.data_ptr()
    version = copy._version
    copy_into(copy, x * 0 if not is_expanded(x) else x)
    assert copy._version == version and not overlaps(x)


def test_overlaps():
    x = torch.arange(20.0)
    assert overlaps(x.unfold(0, 4, 2)) and overlaps(x.as_strided((3, 3), (1, 1)))
    for view in (x, x[::2], x.view(4, 5).t(), x.view(4, 5)[:, 1:3], x[:1].expand(5), x[:0], x[:0].expand(3, 0)):
        assert not overlaps(view)

"""Parameter gradients, returned uncopied or as copies. A referenced gradient keeps its values, as in eager, through
accumulation, hooks that keep gradients, and parameters frozen between two steps.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graph_cache.training.gradients import GradientMemory
from tests.contract.training_models import (
    LENGTH,
    MANY,
    ROWS,
    WIDTH,
    SmallGPT,
    assert_same,
    attached,
    batches,
    in_place,
    mlp,
    train,
    twins,
)


def eight():
    """Eight equal blocks: gradients of the first ones are copies, the others are returned uncopied."""
    return nn.Sequential(
        *[nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    )


EIGHT = [str(index) for index in range(8)]


def train_holding_gradients(model, data, *, accumulate=1, set_to_none=True, keep=False, clear_late=False):
    """Train with references to gradients across replays. The log is compared at the end."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    held, log = [[] for _ in model.parameters()], []
    handles = [
        parameter.register_hook(kept.append) for parameter, kept in zip(model.parameters(), held, strict=True) if keep
    ]
    for index, (x,) in enumerate(data):
        loss = model(x).pow(2).mean()
        if clear_late and index % accumulate == 0:
            optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        log.append([loss.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
        if index % accumulate == accumulate - 1:
            optimizer.step()
            if not clear_late:
                optimizer.zero_grad(set_to_none=set_to_none)
    for handle in handles:
        handle.remove()
    return [*log, *held]


HOLDING = pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 3},
        {"set_to_none": False},
        {"keep": True},
        {"clear_late": True},
        {"accumulate": 2, "keep": True},
    ],
    ids=["accumulated", "zeroed_in_place", "kept_by_a_hook", "cleared_before_backward", "accumulated_and_kept"],
)


@HOLDING
def test_held_gradients_keep_their_values(pool, device, options):
    eager, graphed = twins(SmallGPT, device)
    data = batches(9, device, micro=1)
    expected = train_holding_gradients(eager, data, **options)
    _, stats = attached(graphed, ["layers.0", "layers.1"], pool)
    assert_same(train_holding_gradients(graphed, data, **options), expected)
    assert sum(stats.replays.values()) == 14


class WithOffsets(nn.Module):
    """Parameters of the shape of an activation, added to the input of a graphed block: they share its gradient.

    `access` is "whole" to add the parameter itself, or "through_a_view".
    """

    def __init__(self, access):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))
        self.offsets = nn.ParameterList(torch.randn(ROWS, LENGTH, WIDTH) for _ in range(3))
        self.access = access

    def forward(self, x):
        for block, offset in zip(self.blocks, self.offsets, strict=True):
            x = block(x + (offset if self.access == "whole" else offset.flatten(0, 1).view_as(offset)))
        return x


@HOLDING
@pytest.mark.parametrize("access", ["whole", "through_a_view"])
def test_a_parameter_added_to_a_graphed_modules_input_gets_its_own_gradient(pool, device, access, options):
    eager, graphed = twins(lambda: WithOffsets(access), device)
    data = batches(9, device, micro=1)
    expected = train_holding_gradients(eager, data, **options)
    _, stats = attached(graphed, [f"blocks.{index}" for index in range(3)], pool)
    assert_same(train_holding_gradients(graphed, data, **options), expected)
    assert sum(stats.replays.values()) == 21


@pytest.mark.parametrize("through", ["detached", "viewed"])
def test_a_leaf_aliasing_an_earlier_graphs_output_gets_its_own_gradient(pool, device, through):
    """As a pipeline stage's input may alias another stage's output, or a checkpoint's input the previous block's."""

    def steps(model):
        torch.manual_seed(1)
        found = []
        for step in range(6):
            model.zero_grad()
            leaves = []
            for micro in range(2):
                x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2 * step + micro)).to(device)
                first = model[0](x)
                leaf = first.detach().requires_grad_()
                leaves.append(leaf)
                second = model[1](leaf if through == "detached" else leaf.view_as(leaf))
                second.pow(2).sum().backward()
                first.backward(2 * leaf.grad)
            found.append([*[leaf.grad.clone() for leaf in leaves], *[p.grad.clone() for p in model[:2].parameters()]])
        return found

    eager, graphed = twins(mlp, device)
    _, stats = attached(graphed, ["0", "1"], pool)
    assert_same(steps(graphed), steps(eager))
    assert sum(stats.replays.values()) >= 3 * 2 * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_graphed_blocks_under_a_checkpoint_equal_eager(pool, device, reentrant):
    """A reentrant checkpoint runs forwards in the backward, between a graph's input gradient and its consumer."""

    def steps(model):
        found = []
        for step in range(8):
            model.zero_grad()
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(ROWS, LENGTH, WIDTH, generator=generator).to(device).requires_grad_()
            out = x
            for block in model.blocks:
                out = checkpoint(block, 2 * out, use_reentrant=reentrant)
            out.pow(2).sum().backward()
            found.append([x.grad.clone(), *[p.grad.clone() for p in model.blocks.parameters()]])
        return found

    eager, graphed = twins(lambda: WithOffsets("whole"), device)
    _, stats = attached(graphed, [f"blocks.{index}" for index in range(3)], pool)
    assert_same(steps(graphed), steps(eager))
    assert bool(stats.replays) is reentrant


@HOLDING
@pytest.mark.parametrize("set_to_none", [True, False], ids=["to_none", "to_zero"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_held_copied_gradients_keep_their_values(pool, device, dtype, set_to_none, options):
    eager, graphed = twins(lambda: eight().to(dtype), device)
    data = [[x.to(dtype) for x in micro] for micro in batches(10, device, micro=1, rows=MANY)]
    options = {"set_to_none": set_to_none} | options
    expected = train_holding_gradients(eager, data, **options)
    graphs, stats = attached(graphed, EIGHT, pool)
    assert_same(train_holding_gradients(graphed, data, **options), expected)
    assert sum(stats.replays.values()) == 8 * 8
    assert in_place(graphs) == [False] * 4 + [True] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_ten_steps_of_copied_and_uncopied_gradients_equal_eager_with_two_outstanding(pool, device, dtype):
    eager, graphed = twins(lambda: eight().to(dtype), device)
    data = [[x.to(dtype) for x in micro] for micro in batches(10, device, rows=MANY)]
    expected = train(eager, data)
    graphs, stats = attached(graphed, EIGHT, pool)
    assert_same(train(graphed, data), expected)
    assert sum(stats.replays.values()) == 8 * 2 * 8
    assert sum(in_place(graphs)) == 4


def test_gradients_are_not_copied_if_the_previous_ones_were_released(pool, device):
    _, graphed = twins(mlp, device)
    graphs, _ = attached(graphed, ["0", "1", "2"], pool)
    train(graphed, batches(4, device, micro=1))
    pair = graphs.recorded_steps[0].entries()[2].graphs  # the first modules return copies
    for _ in range(2):
        graphed.zero_grad()
        graphed(batches(1, device)[0][0]).pow(2).mean().backward()
        assert graphed[2][0].weight.grad.data_ptr() == pair.parameter_grads[0].data_ptr()


@pytest.mark.parametrize(("build", "paths"), [(mlp, ["0", "1", "2"]), (eight, EIGHT)], ids=["mlp", "eight"])
def test_a_gradient_outlives_the_graphs(pool, device, build, paths):
    eager, graphed = twins(build, device)
    graphs, _ = attached(graphed, paths, pool)
    data = batches(4, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    before = [parameter.grad.clone() for parameter in graphed.parameters()]
    held = [parameter.grad for parameter in graphed.parameters()]
    graphs.clear()
    train(graphed, data)
    graphs.detach()
    assert all(torch.equal(one, other) for one, other in zip(held, before, strict=True))


class Passing(nn.Module):
    """Module with gradients that share memory with the incoming gradient and with each other."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(4, 8, WIDTH)), nn.Parameter(torch.randn(4, 8, WIDTH))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.one + self.two + self.scale


@pytest.mark.parametrize("blocks", [4, 8])
def test_uncopied_gradients_survive_every_other_graph(pool, device, blocks):
    """No other backward writes to the memory of kept gradients, and later replays preserve them."""
    _, graphed = twins(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(blocks)]), device)
    attached(graphed, [str(index) for index in range(blocks)], pool)
    kept = []
    for micro in batches(6, device, micro=2):
        graphed.zero_grad()
        losses = [graphed(x).pow(2).mean() for x in micro]
        for loss in losses:
            loss.backward()
        kept.append([(parameter.grad, parameter.grad.clone()) for parameter in graphed.parameters()])
    for step in kept:
        for grad, then in step:
            assert torch.equal(grad, then)


def test_gradients_that_share_memory_are_separated(pool, device):
    eager, graphed = twins(lambda: nn.Sequential(Passing(), Passing()), device)
    data = batches(8, device, micro=1)
    expected = train_holding_gradients(eager, data, accumulate=2, keep=True)
    _, stats = attached(graphed, ["0", "1"], pool)
    assert_same(train_holding_gradients(graphed, data, accumulate=2, keep=True), expected)
    assert sum(stats.replays.values()) == 12


def test_a_parameter_frozen_between_two_steps_is_honoured(pool, device):
    eager, graphed = twins(mlp, device)
    _, stats = attached(graphed, ["0", "1", "2"], pool)
    data = batches(3, device, micro=1)
    for trainable in (True, False, True):
        for model in (eager, graphed):
            model[1][0].weight.requires_grad_(trainable)
            model.zero_grad()
        assert_same(train(graphed, data), train(eager, data))
        assert (graphed[1][0].weight.grad is None) is not trainable
    assert stats.fallbacks["1", "forward", "unseen_signature"] > 0


def test_parameters_frozen_by_turns_replay(pool, device):
    eager, graphed = twins(mlp, device)
    _, stats = attached(graphed, ["0", "1", "2"], pool)
    data = batches(10, device, micro=1)
    for step in range(10):
        for model in (eager, graphed):
            model[1].requires_grad_(step % 2 == 0)
            model.zero_grad()
        assert_same(train(graphed, data[step : step + 1]), train(eager, data[step : step + 1]))
        assert all((one.grad is None) is (step % 2 == 1) for one in graphed[1].parameters())
    assert stats.replays["1", "module", "forward", 4] == 6


def test_a_submodule_in_eval_mode_changes_the_signature(pool, device):
    eager, graphed = twins(mlp, device)
    _, stats = attached(graphed, ["0", "1", "2"], pool)
    data = batches(4, device, micro=1)
    for training in (True, False, True):
        for model in (eager, graphed):
            model[1][2].train(training)  # dropout in the second block
        assert_same(train(graphed, data), train(eager, data))
    assert stats.fallbacks["1", "forward", "unseen_signature"] > 0


def test_equal_values_of_different_types_get_separate_graphs(pool, device):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x, factor):
            return self.weight * (torch.arange(4, device=x.device) * factor), x

    torch.manual_seed(0)
    model = Scaled().to(device)
    _, stats = attached(model, [""], pool)
    x = torch.zeros(1, device=device)
    for factor in (2, 2, 2, 2.0, 2):
        out, _ = model(x, factor)
        assert torch.equal(out, torch.arange(4, device=device) * 2)
        out.sum().backward()
    assert stats.fallbacks["model", "forward", "unseen_signature"] == 1
    assert sum(stats.replays.values()) == 2


def test_weight_gradients_are_computed_in_their_final_memory(device):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)
    parameters, x = list(model.parameters()), torch.randn(4, WIDTH, device=device, requires_grad=True)
    out = model(x).pow(2).mean()
    expected = torch.autograd.grad(out, [x, *parameters], retain_graph=True)
    memory = GradientMemory(parameters)
    with memory.writing_in_place():
        found = torch.autograd.grad(out, [x, *parameters])
    written = found[1].data_ptr(), found[3].data_ptr()  # the weights' gradients
    inputs, grads = memory.assign(found[:1], found[1:])
    assert_same([[*inputs, *grads]], [expected])
    addresses = [grad.data_ptr() for grad in grads]
    assert (addresses[0], addresses[2]) == written  # not copied from elsewhere
    assert len(set(addresses)) == 4 and inputs[0].data_ptr() not in addresses


def test_other_matmuls_of_a_weights_shape_do_not_corrupt_weight_gradients(pool, device):
    """The input's gradient has the weight's shape, and both are computed by a GEMM."""
    eager, graphed = twins(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]), device)
    graphs, stats = attached(graphed, [""], pool)
    data = [[torch.randn(WIDTH, WIDTH, device=device)] for _ in range(6)]
    assert_same(train(graphed, data), train(eager, data))
    pair = graphs.recorded_steps[0].entries()[0].graphs
    addresses = [grad.data_ptr() for grad in pair.parameter_grads]
    assert len(set(addresses)) == 3 and sum(stats.replays.values()) == 4


def test_an_input_gradient_never_aliases_a_parameter_gradient(device):
    weight, other = (torch.randn(WIDTH, WIDTH, device=device, requires_grad=True) for _ in range(2))
    x = torch.randn(WIDTH, WIDTH, device=device, requires_grad=True)
    out = (x @ weight).sum() + other.sum()
    expected = torch.autograd.grad(out, [x, weight, other], retain_graph=True)
    memory = GradientMemory([weight, other])  # two buffers: the GEMMs for x and for weight take both
    with memory.writing_in_place():
        found = torch.autograd.grad(out, [x, weight, other])
    inputs, grads = memory.assign(found[:1], found[1:])
    assert_same([[*inputs, *grads]], [expected])
    assert len({tensor.data_ptr() for tensor in (*inputs, *grads)}) == 3


def test_large_activations_make_the_first_half_of_gradients_copies(pool, device):
    eager, graphed = twins(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]), device)
    graphs, stats = attached(graphed, ["0", "1", "2", "3"], pool)
    data = batches(5, device, micro=1, rows=MANY)
    assert_same(train(graphed, data), train(eager, data))
    assert sum(stats.replays.values()) == 12
    assert in_place(graphs) == [False, False, True, True]


def test_small_activations_leave_every_gradient_uncopied(pool, device):
    wide = 2048  # 16 MiB each: on a GPU the pool may also hold a workspace of cuBLAS, up to 32 MiB
    eager, graphed = twins(lambda: nn.Sequential(*[nn.Linear(wide, wide) for _ in range(4)]), device)
    graphs, stats = attached(graphed, ["0", "1", "2", "3"], pool)
    data = [[torch.randn(2, wide, device=device)] for _ in range(5)]
    assert_same(train(graphed, data), train(eager, data))
    assert sum(stats.replays.values()) == 12
    assert in_place(graphs) == [True] * 4


def test_empty_parameters_are_captured(pool, device):
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.empty, self.also_empty = nn.Parameter(torch.empty(0, WIDTH)), nn.Parameter(torch.empty(0, WIDTH))

        def forward(self, x):
            return self.linear(x) + self.empty.sum() + self.also_empty.sum()

    eager, graphed = twins(Padded, device)
    _, stats = attached(graphed, [""], pool)
    data = batches(5, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    assert sum(stats.replays.values()) == 3 and not stats.failed_captures

"""Known training defects of Megatron-Core's own graph system, by number. Encore must have none of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from graph_cache.core.stats import CacheStats
from graph_cache.training import modules as modules_file
from tests.contract.training_models import (
    WIDTH,
    OtherThread,
    assert_same,
    attached,
    batches,
    iterate,
    iteration_of,
    mlp,
    train,
    twins,
)

BLOCKS = ["0", "1", "2"]


def held_bytes(pool, device):
    """Return the device bytes that this process holds after releasing unused memory."""
    if device.type != "cuda":
        return pool.nbytes()
    pool.trim()
    return torch.cuda.memory_reserved(device)


def test_1_deleting_graphs_frees_their_memory_and_training_captures_again(pool, device):
    eager, graphed = twins(mlp, device)
    graphs, stats = attached(graphed, BLOCKS, pool)
    data = batches(4, device)
    before, captured, after_clear = held_bytes(pool, device), [], []
    for cycle in range(1, 6):
        assert_same(train(graphed, data), train(eager, data))
        assert sum(stats.replays.values()) == cycle * 2 * 2 * 3
        captured.append(held_bytes(pool, device))
        graphed.zero_grad()
        graphs.clear()
        assert graphs.table() == []
        after_clear.append(held_bytes(pool, device))
    assert max(captured) <= 1.01 * captured[0]
    assert max(after_clear) <= 1.01 * after_clear[0]  # the first capture leaves what libraries keep for their streams
    assert device.type == "cuda" or (max(after_clear) == before and captured[0] > before)


def test_2_graphs_captured_after_a_suspend_share_memory_as_before(pool, device, monkeypatch):
    made, new_memory = [], pool.backend.new_memory
    monkeypatch.setattr(pool.backend, "new_memory", lambda: (made.append(1), new_memory())[1])
    _, graphed = twins(mlp, device)
    graphs, _ = attached(graphed, BLOCKS, pool)
    data = batches(4, device)
    found = []
    for _ in range(2):
        made.clear()
        train(graphed, data)
        found.append(pool.nbytes())
        assert len(graphs.table()) == 2 * len(BLOCKS) and len(made) == 2  # one memory per microbatch
        graphs.clear()
    assert found[1] <= found[0]  # the first capture leaves what libraries keep for their streams


def test_3_a_shape_first_seen_after_capture_runs_eager_and_is_captured_and_never_an_error(pool, device):
    eager, graphed = twins(mlp, device)
    _, stats = attached(graphed, BLOCKS, pool)
    data = batches(4, device, micro=1) + batches(4, device, micro=1, rows=3)
    assert_same(train(graphed, data), train(eager, data))
    assert stats.fallbacks["0", "forward", "unseen_signature"] == 1
    assert stats.replays["0", "module", "forward", 3] == 2


def test_4_layers_pass_outputs_and_gradients_without_a_copy(pool, device):
    _, graphed = twins(mlp, device)
    graphs, _ = attached(graphed, BLOCKS, pool)
    train(graphed, batches(4, device, micro=1))
    pairs = [entry.graphs for entry in graphs.recorded_steps[0].entries()]
    for earlier, later in zip(pairs, pairs[1:], strict=False):
        assert later.inputs[0].data_ptr() == earlier.outputs[0].data_ptr()
        assert earlier.grad_outputs[0].data_ptr() == later.input_grads[0].data_ptr()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_5_another_thread_may_allocate_during_a_capture(pool, device, where):
    done = itertools.count()

    def allocate():
        for size in range(20, 25):
            torch.ones(1 << size, device=device).sum().item()  # larger than cached blocks, and synchronizes
            next(done)

    thread = OtherThread(allocate)

    def allocate_in_thread():
        if pool.capturing:
            thread.run()

    class AllocatesInThread(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if where == "forward":
                allocate_in_thread()
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if where == "backward":
                allocate_in_thread()
            return grad.clone()

    class Block(nn.Linear):
        def forward(self, x):
            return AllocatesInThread.apply(super().forward(x))

    eager, graphed = twins(lambda: nn.Sequential(Block(WIDTH, WIDTH), Block(WIDTH, WIDTH)), device)
    _, stats = attached(graphed, ["0", "1"], pool)
    data = batches(4, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    assert next(done) >= 10
    assert not stats.failed_captures
    assert sum(stats.replays.values()) == 4


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_6_a_capture_that_raises_restores_flags_and_stream_and_training_continues(pool, device, where):
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if where == "forward" and pool.capturing:
                raise ValueError("in the middle")
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if where == "backward" and pool.capturing:
                raise ValueError("in the middle")
            return grad.clone()

    class Broken(nn.Linear):
        def forward(self, x):
            return Raises.apply(super().forward(x))

    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    eager, graphed = twins(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Broken(WIDTH, WIDTH)), device)
    graphs, stats = attached(graphed, ["0", "1"], pool)
    data = batches(5, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    assert not pool.capturing and not pool.warming and not pool.backend.is_capturing()
    assert stream is None or torch.cuda.current_stream(device) == stream
    assert stats.failed_captures == {("1", "module"): 1}
    assert stats.fallbacks["1", "forward", "capture_failed"] == 3
    assert [row["module"] for row in graphs.table()] == ["0"]
    assert all(type(parameter) is nn.Parameter for parameter in graphed.parameters())


def test_7_replays_build_no_metadata_beyond_one_key_a_step(pool, device, monkeypatch):
    class Keyworded(nn.Linear):
        def forward(self, x, *, mask=None, scale=1.0):
            return super().forward(x) * scale

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Keyworded(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x=x, mask=None, scale=0.5)
            return x

    eager, graphed = twins(Stack, device)
    _, stats = attached(graphed, [f"layers.{index}" for index in range(4)], pool)
    data = batches(4, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    keys, flatten_call = [], modules_file.flatten_call
    monkeypatch.setattr(modules_file, "flatten_call", lambda *call: keys.append(1) or flatten_call(*call))
    before = sum(stats.replays.values())
    train(graphed, data)
    assert sum(stats.replays.values()) == before + 4 * 4
    assert len(keys) == 4  # only the first call of a step builds a key; the others compare


def test_9_only_actual_replays_are_counted(pool, device):
    eager, graphed = twins(mlp, device)
    graphed[1][0].register_forward_hook(lambda *_: None)  # keeps this block eager
    _, stats = attached(graphed, BLOCKS, pool)
    data = batches(5, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    assert stats.replays == {("0", "module", "forward", 4): 3, ("2", "module", "forward", 4): 3}
    assert stats.fallbacks["1", "forward", "hooks_inside"] == 5


def test_11_changed_microbatches_shapes_or_values_never_replay_a_stale_graph(pool, device):
    eager, graphed = twins(mlp, device)
    data = batches(4, device) + batches(4, device, micro=1) + batches(4, device, rows=2) + batches(2, device)
    stats = CacheStats()
    expected = iterate(eager, data, lambda step: step, inside=True)
    assert_same(iterate(graphed, data, lambda step: iteration_of(pool, stats, step), inside=True), expected)
    assert sum(stats.captures.values()) == 3
    assert sum(stats.replays.values()) >= 3


def test_13_a_plain_parameter_needs_no_main_grad(pool, device):
    eager, graphed = twins(mlp, device)
    _, stats = attached(graphed, BLOCKS, pool)
    data = batches(4, device, micro=1)
    assert_same(train(graphed, data), train(eager, data))
    assert sum(stats.replays.values()) == 6
    assert not any(hasattr(parameter, "main_grad") for parameter in graphed.parameters())
    assert all(parameter.grad is not None for parameter in graphed.parameters())

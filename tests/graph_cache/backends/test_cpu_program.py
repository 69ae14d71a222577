"""Replaying a tape after its inputs changed equals eager bit for bit, with every program."""

from __future__ import annotations

import threading

import pytest
import torch

from graph_cache.backends.cpu_arena import Arena, plan_layout
from graph_cache.backends.cpu_out import out_overload, out_overload_copies
from graph_cache.backends.cpu_program import bind, torchscript_program
from graph_cache.backends.cpu_tape import TapeRecorder
from tests.graph_cache.backends.calls import CALLS, ROWS, WIDTH
from tests.graph_cache.backends.tapes import eager, programs, recorded, same_bits

aten = torch.ops.aten


@pytest.mark.parametrize("name", CALLS)
def test_replay_after_changed_inputs_equals_eager_bit_for_bit(name):
    generator = torch.Generator().manual_seed(1)
    x, i = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.int64)
    replays = programs(CALLS[name], x, i)
    for _ in range(3):
        x.copy_(torch.randn(ROWS, WIDTH, generator=generator))
        i.copy_(torch.randint(0, 16, (ROWS,), generator=generator))
        wanted = eager(CALLS[name], x.clone(), i.clone())
        for engine, replay in replays.items():
            for position, (got, want) in enumerate(zip(replay(), wanted, strict=True)):
                assert same_bits(got, want), f"{engine}: result {position} of {name}"


@pytest.mark.parametrize(
    ("func", "out"),
    [
        (aten.sum.dim_IntList, "IntList_out"),
        (aten.sum.default, "out"),
        (aten.mean.dim, "out"),
        (aten.cat.default, "out"),
        (aten.index.Tensor, "Tensor_out"),
        (aten.arange.default, "out"),
        (aten.full.default, "out"),
        (aten.zeros_like.default, "out"),
        (aten.clamp.default, "out"),
        (aten.clamp.Tensor, "Tensor_out"),
        (aten._to_copy.default, "out"),
        (aten.native_layer_norm.default, "out"),
        (aten.var_mean.correction, "correction_out"),
        (aten.topk.default, "values"),
        (aten.sort.default, "values"),
        (aten.max.dim, "dim_max"),
        (aten.max.default, "unary_out"),
        (aten.max.other, "out"),
        (aten.cumsum.default, "out"),
        (aten.scatter.value, "value_out"),
        (aten.index_add.default, "out"),
        (aten.bmm.default, "out"),
        (aten.baddbmm.default, "out"),
        (aten.embedding.default, "out"),
        (aten.addmm.default, "out"),
        (aten.mul.Tensor, "out"),
        (aten.where.self, "self_out"),
        (aten.clone.default, "out"),
        (aten.pow.Tensor_Scalar, "Tensor_Scalar_out"),
        (aten.div.Tensor_mode, "out_mode"),
        (aten._softmax.default, "out"),
    ],
)
def test_the_out_overload_takes_the_same_arguments(func, out):
    assert out_overload(func)[0]._overloadname == out


@pytest.mark.parametrize(
    "func",
    [aten.add_.Tensor, aten._native_batch_norm_legit.default, aten.split_with_sizes.default, aten._foreach_add.Scalar],
)
def test_no_out_overload_where_none_matches(func):
    assert out_overload(func) is None


@pytest.mark.parametrize("optimise", [True, False])
def test_a_replay_leaves_the_interpreters_settings_as_they_were(optimise):
    x, seen = torch.zeros(2, 2), []
    replay = programs(lambda x: x * 2 + 1, x)["torchscript"]

    def elsewhere():  # the setting is per thread
        torch._C._set_graph_executor_optimize(optimise)
        replay()
        seen.append(torch._C._get_graph_executor_optimize())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [optimise]


@pytest.mark.parametrize(
    ("func", "copies"),
    [
        (aten.native_layer_norm.default, True),
        (aten.roll.default, True),
        (aten._to_copy.default, True),
        (aten.mul.Tensor, False),
        (aten.cat.default, False),
        (aten.index_select.default, False),
    ],
)
def test_only_overloads_with_a_kernel_of_their_own_save_a_copy(func, copies):
    assert out_overload_copies(func) is copies


def test_a_replay_copies_only_results_that_are_read():
    x, output = torch.randn(ROWS, WIDTH), torch.empty(ROWS, WIDTH)
    tape = recorded(lambda: output.copy_(aten.native_layer_norm(x, [WIDTH], None, None, 1e-5)[0]))
    offsets, need = plan_layout(tape.buffers, tape.kept)
    layer_norm = bind(tape, Arena().claim(need), offsets)[0]
    assert layer_norm.func is aten.native_layer_norm.default
    normed, mean, deviation = layer_norm.targets
    assert normed.shape == output.shape and mean is None and deviation is None


def test_a_replay_keeps_results_that_outlive_the_run():
    x, found = torch.randn(ROWS, WIDTH), []
    recorder = TapeRecorder()
    with torch.inference_mode(), recorder:
        found.extend(aten.native_layer_norm(x, [WIDTH], None, None, 1e-5))
    recorder.keep_live_buffers()
    tape = recorder.tape
    offsets, need = plan_layout(tape.buffers, tape.kept)
    replay = torchscript_program(bind(tape, Arena().claim(need), offsets))
    x.normal_()
    replay()
    for got, want in zip(found, eager(lambda: aten.native_layer_norm(x, [WIDTH], None, None, 1e-5)), strict=True):
        assert same_bits(got, want)

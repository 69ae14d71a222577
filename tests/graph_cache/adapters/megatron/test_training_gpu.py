"""Megatron's DDP, optimizer and schedule on a GPU with layer graphs and full-iteration graphs, compared with eager.

Needs megatron-core 0.19 and Transformer Engine. Run this file in a process of its own: Megatron keeps one parallel
state per process.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.megatron_gpu_models import (  # isort: skip  (before what imports megatron)
    FP8,
    LENGTH,
    ROWS,
    assert_same,
    batch,
    build,
    one_process,
    training,
)

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

from engine import Engine, EngineConfig

__all__ = ["one_process"]  # a fixture
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


OVERLAPS = {
    "plain": {},
    "grad_reduce": {"overlap_grad_reduce": True},
    "param_gather": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
}


def parallel_steps(impl, overlap, fused, steps=8, stream=None):
    """Train with Megatron's own DDP, schedule and optimizer, with graphs of `impl` or without.

    `stream`: stream on which the wrapper is created and accumulates gradients; None for the default stream.
    """
    model = build()
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):  # only Transformer Engine's; the head's fusion needs Apex
            module.fuse_wgrad_accumulation = fused
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        wrapped = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, **OVERLAPS[overlap]), model
        )
    torch.cuda.synchronize()
    model.config.no_sync_func = wrapped.no_sync
    model.config.finalize_model_grads_func = lambda models, *rest, **more: [one.finish_grad_sync() for one in models]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=1.0,
            use_distributed_optimizer=OVERLAPS[overlap].get("use_distributed_optimizer", False),
            overlap_param_gather=OVERLAPS[overlap].get("overlap_param_gather", False),
        ),
        [wrapped],
    )
    engine, run = training(cuda_graph_impl=impl or "none"), forward_backward_no_pipelining
    if impl == "local":
        engine.attach(wrapped)
    elif impl == "full_iteration":
        run = engine.capture_forward_backward(run)

    def forward_step(iterator, chunk):
        ids, positions, labels = next(iterator)
        return chunk(ids, positions, None, labels=labels), lambda out: (out.float().mean(), {"loss": out.mean()})

    log = []
    for step in range(steps):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        found = run(
            forward_step_func=forward_step,
            data_iterator=iter([batch(step, micro) for micro in range(2)]),
            model=wrapped,
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        log.append(
            [one["loss"].detach().clone() for one in found]
            + [parameter.main_grad.clone() for parameter in model.parameters()]
        )
        optimizer.step()
    rows = engine.graphs()
    engine.detach()
    return log, rows


@pytest.mark.parametrize("fused", [False, True], ids=["added_by_hooks", "fused_weight_gradients"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_ddp_and_distributed_optimizer_equal_eager(overlap, fused):
    expected, _ = parallel_steps(None, overlap, fused)
    found, rows = parallel_steps("local", overlap, fused)
    assert_same(found, expected)
    assert all(row["failed"] == 0 and row["replays"] > 0 for row in rows), rows


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_whole_iteration_of_a_wrapped_model_equals_eager(overlap):
    expected, _ = parallel_steps(None, overlap, fused=True)
    found, rows = parallel_steps("full_iteration", overlap, fused=True, stream=torch.cuda.Stream())
    assert_same(found, expected)
    assert rows[0]["failed"] == 0 and rows[0]["replays"] > 0, rows


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_wrapper_made_on_the_default_stream_runs_eager_and_the_row_says_what_to_change(overlap):
    expected, _ = parallel_steps(None, overlap, fused=True)
    found, rows = parallel_steps("full_iteration", overlap, fused=True)
    assert_same(found, expected)
    assert rows[0]["failed"] == 1 and rows[0]["replays"] == 0, rows
    assert "create it on another: `stream = " in rows[0]["failure"], rows


@pytest.mark.parametrize("precision", ["bf16", "delayed", "current"])
def test_a_whole_iteration_equals_eager_and_validation_has_its_own_graph(precision):
    def steps(graphed):
        model = build(**FP8.get(precision, {}))
        engine = Engine(EngineConfig(mode="training", cuda_graph_impl="full_iteration", cuda_graph_warmup_steps=2))
        run = (
            engine.capture_forward_backward(forward_backward_no_pipelining)
            if graphed
            else (forward_backward_no_pipelining)
        )

        def forward_step(iterator, chunk):
            ids, positions, labels = next(iterator)
            return chunk(ids, positions, None, labels=labels), lambda out: (out.float().mean(), {"loss": out.mean()})

        optimizer, log = torch.optim.SGD(model.parameters(), lr=0.05), []
        for step in range(8):
            for forward_only in (False, True):
                found = run(
                    forward_step_func=forward_step,
                    model=model,
                    num_microbatches=2,
                    seq_length=LENGTH,
                    data_iterator=iter([batch(step, micro) for micro in range(2)]),
                    micro_batch_size=ROWS,
                    forward_only=forward_only,
                )
                log.append([one["loss"].detach().clone() for one in found])
            log[-1] += [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        rows = engine.graphs()
        engine.detach()
        return log, rows

    expected, _ = steps(False)
    found, rows = steps(True)
    assert_same(found, expected)
    assert rows[0]["graphs"] == 2 and rows[0]["failed"] == 0, rows

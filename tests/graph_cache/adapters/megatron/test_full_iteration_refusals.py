"""Full-iteration graphs refuse unsupported settings and calls before they read data."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket, _ParamAndGradBucketGroup
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.transformer.enums import CudaGraphScope
from torch import nn

from graph_cache.adapters.megatron.iteration import MicrobatchesRanOut
from graph_cache.errors import GraphConfigError, GraphError
from tests.graph_cache.adapters.megatron.loops import (
    MICRO,
    assert_same,
    batch,
    batches,
    counts,
    graphed,
    iterate,
    two_stages,
)
from tests.support.megatron_models import gpt


def test_an_exhausted_iterator_returns_the_batches_read_and_changes_nothing():
    run, stats = graphed()
    model, given = gpt(), [batch(seed) for seed in range(3)]
    for step in range(3):
        iterate(run, model, step)
    before, counted = [one.grad.clone() for one in model.parameters()], counts(stats)
    with pytest.raises(MicrobatchesRanOut, match=r"num_microbatches=4, .* chunk 0 ended after 3; .*\[3\]") as ran_out:
        iterate(run, model, 3, data=iter(given))
    assert [len(read) for read in ran_out.value.read] == [3]
    assert all(ours is theirs for ours, theirs in zip(ran_out.value.read[0], given, strict=True))
    assert_same([one.grad for one in model.parameters()], before)
    assert counts(stats) == counted
    iterate(run, model, 4)


@pytest.mark.parametrize(("taken", "message"), [(2, "consumed 4 of the 6"), (4, "more batches than the 3")])
def test_a_step_that_consumes_a_wrong_number_of_batches_raises(taken, message):
    def function(*, forward_step_func, data_iterator, model, num_microbatches, forward_only):
        return [next(data_iterator)["x"] for _ in range(taken * (num_microbatches // 3))]

    run, _ = graphed(function)
    count = 6 if taken == 2 else 3
    with pytest.raises(GraphError, match=message):
        run(
            forward_step_func=None,
            data_iterator=iter([{"x": torch.ones(1)}] * count),
            model=nn.Linear(2, 2),
            num_microbatches=count,
        )


def with_ddp(model, **settings):
    wrapper = nn.Module()
    wrapper.module, wrapper.ddp_config = model, DistributedDataParallelConfig(**settings)
    return wrapper


def test_a_failed_capture_restores_ddp_grad_ready_counts():
    model = nn.Linear(2, 2)
    wrapper = with_ddp(model, overlap_grad_reduce=True)
    bucket = _ParamAndGradBucket(list(model.parameters()), None, torch.zeros(6), 0, 6, 1.0, 0)
    group = _ParamAndGradBucketGroup([bucket], wrapper.ddp_config, None, 1)
    wrapper.bucket_groups, arrived = [group], []

    def function(*, forward_step_func, data_iterator, model, num_microbatches, forward_only):
        arrived.append(len(group.per_param_grad_ready_counts))
        loss = model.module(next(data_iterator)).sum()
        for parameter in bucket.params_list:
            group.register_grad_ready(parameter)
        found = loss.item()  # reads on the host, which can't be captured
        group.is_first_batch = True  # skips the all-reduce, since there is only one rank
        group.reset()
        return [found]

    run, stats = graphed(function)
    for _ in range(4):
        run(forward_step_func=None, data_iterator=iter([torch.ones(2)]), model=wrapper, num_microbatches=1)
        group.is_first_batch = True
    assert sum(stats.failed_captures.values()) == 1
    assert arrived == [0] * 5


def with_attribute(model, name, value):
    setattr(model, name, value)
    return model


def with_routing_replay(model):
    object.__setattr__(model.config, "moe_enable_routing_replay", True)
    return model


REFUSED = {
    "check_for_nan_in_grad": lambda: with_ddp(gpt(), check_for_nan_in_grad=True),
    "check_for_large_grads": lambda: with_ddp(gpt(), check_for_large_grads=True),
    "report_nan_in_param_grad": lambda: with_attribute(gpt(), "report_nan_in_param_grad", True),
    "moe_enable_routing_replay=True .*'local'": lambda: with_routing_replay(gpt()),
    "cuda_graph_impl='transformer_engine'": lambda: with_attribute(
        gpt(),
        "config",
        type("Config", (), {"__init__": lambda self: vars(self).update(cuda_graph_impl="transformer_engine")})(),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_uncapturable_settings_are_refused_before_data_is_read(message):
    run, _ = graphed()
    data = batches(0)
    with pytest.raises(GraphConfigError, match=message):
        iterate(run, REFUSED[message](), 0, data=data)
    assert len(list(data)) == MICRO


def test_nan_checks_are_refused_at_construction_with_the_alternative():
    with pytest.raises(GraphConfigError, match=r"check_for_nan_in_loss_and_grad .*torch\.isfinite\(loss\)"):
        graphed(settings=[{"check_for_nan_in_loss_and_grad": True}])


def test_megatrons_own_wrapper_is_refused():
    with pytest.raises(GraphConfigError, match="FullCudaGraphWrapper"):
        graphed(FullCudaGraphWrapper.__new__(FullCudaGraphWrapper))


def test_both_names_of_full_iteration_are_accepted():
    for settings in (
        {"cuda_graph_impl": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_scope": [CudaGraphScope.full_iteration]},
    ):
        graphed(settings=[settings])


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"data": [batches(0), batches(0)]}, GraphConfigError, "2 iterators for 1 model chunks"),
        ({"data": iter([{"tokens": object()}] * MICRO)}, GraphConfigError, "a batch holds object"),
    ],
)
def test_invalid_arguments_are_refused(keywords, error, message):
    run, _ = graphed()
    with pytest.raises(error, match=message):
        iterate(run, gpt(), 0, **keywords)


def test_an_unknown_keyword_reads_no_data():
    run, _ = graphed()
    data = batches(0)
    with pytest.raises(TypeError, match="sequence_length"):
        iterate(run, gpt(), 0, data=data, sequence_length=12)
    assert len(list(data)) == MICRO


def test_chunks_that_share_an_iterator_are_refused():
    run, _ = graphed(two_stages)
    data = batches(0)
    with pytest.raises(GraphConfigError, match="same data iterator"):
        iterate(run, [nn.Linear(2, 2), nn.Linear(2, 2)], 0, data=[data, data])
    assert len(list(data)) == MICRO


def test_a_value_that_changes_with_every_call_runs_eager_with_a_warning(caplog):
    def function(*, forward_step_func, data_iterator, model, num_microbatches, forward_only):
        return [forward_step_func()]

    run, stats = graphed(function)
    model = nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING):
        for step in range(70):
            assert run(
                forward_step_func=functools.partial(int, step), data_iterator=None, model=model, num_microbatches=1
            ) == [step]
    assert counts(stats) == (0, 0, {"warming_up": 70})
    assert "none frequent enough" in caplog.text

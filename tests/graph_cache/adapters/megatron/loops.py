"""Helpers for Megatron's calling convention on a CPU: forward-backward functions, forward steps, and training with and
without graphs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch.overrides import TorchFunctionMode

from graph_cache.adapters.megatron.iteration import FullIteration
from graph_cache.backends import backend_for
from graph_cache.core.pool import GraphPool
from graph_cache.core.stats import CacheStats
from tests.support.megatron_models import VOCAB, tokens

MICRO = 4


class _CountersOnCpu(TorchFunctionMode):
    """Create `torch.zeros(…, device="cuda")` on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.zeros and kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@functools.wraps(forward_backward_no_pipelining)
def no_pipelining(**keywords: Any) -> Any:
    """Megatron's own schedule. Only its token counter needs a GPU; it is moved to the CPU."""
    with _CountersOnCpu():
        return forward_backward_no_pipelining(**keywords)


def two_stages(
    *, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size, forward_only=False
):
    """Run model chunks in sequence as virtual pipeline stages of one rank, as Megatron's schedules do: with
    `set_input_tensor`, gradients passed between chunks, and the loss divided by the microbatches and scaled.
    """
    reports = []
    for _ in range(num_microbatches):
        chunk_input, chunk_io = None, []
        for chunk, iterator in zip(model, data_iterator, strict=True):
            get_attr_wrapped_model(chunk, "set_input_tensor")([chunk_input])
            chunk_output, loss_func = forward_step_func(iterator, chunk)
            chunk_io.append((chunk_input, chunk_output))
            chunk_input = chunk_output.detach().requires_grad_()
        loss, report = loss_func(chunk_output)
        reports.append(report)
        if forward_only:
            continue
        scale = get_model_config(model[-1]).grad_scale_func or (lambda one: one)
        chunk_io[-1], grad = (chunk_io[-1][0], scale(loss / num_microbatches)), None
        for chunk_input, chunk_output in reversed(chunk_io):
            torch.autograd.backward(chunk_output, grad)
            grad = None if chunk_input is None else chunk_input.grad
    return reports


def batch(seed, length=12):
    ids, positions = tokens(seed, length=length)
    return {"tokens": ids, "positions": positions, "labels": ids.roll(-1, 1), "mask": (ids % 3 > 0).float()}


def batches(step, count=MICRO, length=12):
    return iter([batch(100 * step + index, length) for index in range(count)])


def losses_of(given, logits):
    each = F.cross_entropy(logits.float().view(-1, VOCAB), given["labels"].view(-1), reduction="none")
    return each * given["mask"].view(-1)


def mean_loss(given, logits):
    loss = losses_of(given, logits).sum() / given["mask"].sum()
    return loss, {"lm loss": loss.detach().clone(), "finite": torch.isfinite(loss)}


def doubled_loss(given, logits):
    loss = 2 * losses_of(given, logits).mean()
    return loss, {"lm loss": loss.detach().clone()}


def loss_and_tokens(given, logits):
    loss, count = losses_of(given, logits).sum(), given["mask"].sum().int()
    return loss, count, {"lm loss": torch.stack([loss.detach().clone(), count.float()])}


def forward_step_with(loss_func):
    def forward_step(data_iterator, model):
        given = next(data_iterator)
        return model(given["tokens"], given["positions"], None), functools.partial(loss_func, given)

    return forward_step


FORWARD_STEP = forward_step_with(mean_loss)


def iterate(run, model, step, *, count=MICRO, length=12, data=None, forward_step_func=FORWARD_STEP, **keywords):
    """Run one iteration on the data of this step."""
    return run(
        forward_step_func=forward_step_func,
        data_iterator=data or batches(step, count, length),
        model=model,
        num_microbatches=count,
        seq_length=length,
        micro_batch_size=2,
        **keywords,
    )


def parameters_of(model):
    return [one for chunk in (model if isinstance(model, list) else [model]) for one in chunk.parameters()]


def train(run, model, steps=10, each=iterate, before=None):
    """Train and return copies of the losses and all gradients of every step."""
    torch.manual_seed(1)
    optimizer, log = torch.optim.SGD(parameters_of(model), lr=0.1, momentum=0.9), []
    for step in range(steps):
        if before:
            before(model, step)
        optimizer.zero_grad()
        losses = each(run, model, step)
        log.append((losses, [one.grad.clone() for one in parameters_of(model)]))
        optimizer.step()
    return log


def graphed(function=no_pipelining, **options):
    stats = CacheStats()
    options = {"warmup_steps": 2, "generators": [torch.default_generator]} | options
    return FullIteration(function, GraphPool(backend_for("cpu")), stats, **options), stats


def counts(stats):
    """Return captures, replays, and eager calls by reason."""
    return (
        sum(stats.captures.values()),
        sum(stats.replays.values()),
        {reason: count for (_, _, reason), count in stats.fallbacks.items()},
    )


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

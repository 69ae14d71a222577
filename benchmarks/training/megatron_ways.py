"""Shared by the Megatron-Core benchmarks: run a model's training step eager, with our graphs, or with Megatron's own.

Imports megatron.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer import cuda_graphs
from torch import Tensor, nn

from benchmarks.training.step_timing import LEARNING_RATE
from engine import Engine, EngineConfig

HAVE_TE = importlib.util.find_spec("transformer_engine") is not None and torch.cuda.is_available()
OWN_IMPLS = {"megatron_local": "local", "megatron_transformer_engine": "transformer_engine"}
Forward = Callable[[nn.Module, Any], Tensor]  # (model, one batch) -> loss


def start_process() -> None:
    """Create the process groups of one rank."""
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", rank=0, world_size=1, store=dist.HashStore()
    )
    parallel_state.initialize_model_parallel()


def prepare(
    way: str,
    model: Any,
    forward: Forward,
    data: Sequence[Any],
    settings: EngineConfig | None,
    args: argparse.Namespace,
    batch: int,
) -> tuple[Callable[[int], Tensor], list[Engine]]:
    """Return a function that runs step number n on its batch of `data` and returns the loss, and what captures it.

    `settings`: of our graphs; None for eager and for Megatron's own graphs.
    """
    device = next(model.parameters()).device
    by_megatron = way in OWN_IMPLS
    if by_megatron:  # its graphs leave gradients in main_grad, and ask for DDP and its number of microbatches
        init_num_microbatches_calculator(
            rank=0, rampup_batch_size=None, global_batch_size=batch, micro_batch_size=batch, data_parallel_size=1
        )
        side = torch.cuda.Stream()  # as in Megatron's training loop: gradients may not be tied to the default stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        torch.cuda.current_stream().wait_stream(side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True, capturable=device.type == "cuda")
    run, engines = _forward_backward(way, model, settings, args, batch)
    keeps_gradients = settings is not None and settings.cuda_graph_impl == "full_iteration"

    def forward_step(iterator: Iterator[Any], chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        return forward(chunk, next(iterator)), lambda out: (out.float().mean(), {"loss": out.float().mean().detach()})

    def step(number: int) -> Tensor:
        if by_megatron:
            model.zero_grad_buffer()
        else:
            optimizer.zero_grad(set_to_none=not keeps_gradients)
        for module in model.modules():
            if hasattr(module, "set_is_first_microbatch"):
                module.set_is_first_microbatch()
        (found,) = run(
            forward_step_func=forward_step,
            data_iterator=iter([data[number % len(data)]]),
            model=model,
            num_microbatches=1,
            seq_length=args.length,
            micro_batch_size=batch,
            forward_only=False,
        )
        if by_megatron:
            for parameter in model.parameters():
                parameter.grad = parameter.main_grad
        optimizer.step()
        if by_megatron:
            for parameter in model.parameters():
                parameter.grad = None  # DDP's hooks would add it to itself
        return found["loss"]

    return step, engines


def _forward_backward(
    way: str, model: Any, settings: EngineConfig | None, args: argparse.Namespace, batch: int
) -> tuple[Callable[..., Any], list[Engine]]:
    """Return Megatron's function for one stage, or a graph of it; and what captures inside."""
    run = forward_backward_no_pipelining if torch.cuda.is_available() else _loop
    if settings is not None:
        engine: Any = Engine(settings)
        if settings.cuda_graph_impl == "full_iteration":
            return engine.capture_forward_backward(run), [engine]
        engine.attach(model)
        return run, [engine]
    if way == "megatron_transformer_engine":
        helper = cuda_graphs.TECudaGraphHelper([model], model.config, args.length, batch)
        steps = iter(range(10**9))

        def captured(**keywords: Any) -> Any:
            if next(steps) == model.config.cuda_graph_warmup_steps:
                helper.create_cudagraphs()
            return run(**keywords)

        return captured, []
    return run, []


def _loop(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any],
    model: nn.Module,
    num_microbatches: int,
    **_: Any,
) -> list[dict[str, Tensor]]:
    """Megatron's schedules need a GPU; this is what one stage does of them."""
    found = []
    for _ in range(num_microbatches):
        output, loss_func = forward_step_func(data_iterator, model)
        loss, report = loss_func(output)
        loss.backward()
        found.append(report)
    return found

"""Run a program's calls eager or through a GraphCache, and log everything."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from graph_cache import BufferSpec, GraphCache
from graph_cache.backends import backend_for
from graph_cache.core.pool import GraphPool
from graph_cache.errors import GraphConfigError, GraphError
from tests.contract.fuzz import blocks
from tests.contract.fuzz.blocks import LENGTH, WIDTH, tensors_of
from tests.contract.fuzz.changes import Job
from tests.contract.fuzz.compare import bits, state_of
from tests.contract.fuzz.grammar import EXTRAS, Program, Step
from tests.contract.fuzz.training import Outcome, build, clean, contexts, generators_of, inputs_of

BUCKETS = (2, 4)


def run_inference(
    program: Program, device: torch.device, captured: bool, decisions: Sequence[int | None] | None = None
) -> Outcome:
    """Run all calls of a program. `decisions` are the buckets to which an eager run pads each call; None pads none."""
    outcome = Outcome()
    has_ids = EXTRAS[program.steps[0].extra] == ("tensor",)
    with clean(device), contextlib.ExitStack() as stack:
        model = build(program, device)
        job = Job(model, None, device)
        stack.callback(job.end)

        def function(x, ids=None):
            return model(x) if ids is None else model(x * ids[:, None, None])

        cache = None
        if captured:
            generators = generators_of(program, model)
            if program.registers and device.type == "cpu":  # a GPU's default generator is always registered
                generators.append(torch.default_generator)
            cache = GraphCache(pool=GraphPool(backend_for(device)))
            job.clear = cache.clear
            specs = {"x": BufferSpec(("batch", LENGTH, WIDTH), torch.float32)}
            if has_ids:
                specs["ids"] = BufferSpec(("batch",), torch.int64)
            try:
                call = cache.graphed(
                    "model", function, specs, independent_rows=True, buckets=BUCKETS, watch=model, generators=generators
                )
            except GraphConfigError as error:  # parameters without a shape
                outcome.reasons[f"raised: {str(error)[:60]}"] += 1
                outcome.log.add("refused", None)
                return outcome
        if program.parts != "whole":
            model.eval()
        blocks.reset(device)
        try:
            index = 0
            for number, step in enumerate(program.steps):
                for change in step.changes:
                    job.apply(change)
                for part in range(step.calls):
                    label = f"step {number}, call {part}"
                    tensors = _tensors(step, number, part, device, has_ids)
                    with contexts(_possible(step.contexts), model, device):
                        if cache is not None:
                            replays = cache.stats.replays.total()
                            try:
                                result = call(**tensors)
                            finally:  # only replays are padded
                                replayed = cache.stats.replays.total() > replays
                                bucket = cache.plan("model", step.rows).bucket
                                outcome.decisions.append(bucket if replayed else None)
                        else:
                            bucket = decisions[index] if decisions and index < len(decisions) else None
                            result = _eager(function, tensors, bucket)
                    index += 1
                    outcome.log.add(f"{label}: result", bits(tensors_of(result)))
                    del result
                outcome.log.add_all(f"step {number}", state_of(model))
                outcome.log.add_all(
                    f"step {number}",
                    {f"outside {name}": bits(value) for name, value in blocks.outside_state().items()},
                )
        except GraphError as error:
            outcome.reasons[f"raised: {str(error)[:60]}"] += 1
            outcome.log.add("refused", None)
        except Exception as error:
            outcome.log.add("raised", type(error).__name__)  # graphs may say in other words why
        if cache is not None:
            outcome.replays = sum(cache.stats.replays.values())
            for (_, _, reason), count in cache.stats.fallbacks.items():
                outcome.reasons[reason] += count
        outcome.log.add_all("end", state_of(model))
    return outcome


def _possible(names: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out contexts that change nothing in inference mode but what is stored for a backward."""
    return tuple([name for name in names if name not in ("no_grad", "saved_on_host", "anomaly")])


def _tensors(step: Step, number: int, part: int, device: torch.device, has_ids: bool) -> dict[str, torch.Tensor]:
    x = inputs_of(step, number, part, device).detach().float()
    if not len(x):
        x = torch.ones(step.rows, LENGTH, WIDTH, device=device)
    tensors = {"x": x}
    if has_ids:
        tensors["ids"] = torch.arange(1, len(x) + 1, device=device)
    return tensors


def _eager(function: Any, tensors: dict[str, torch.Tensor], bucket: int | None) -> Any:
    """Run on the rows alone, or padded to a bucket with results cut to the rows."""
    with torch.no_grad():
        if bucket is None:
            return function(**tensors)
        rows = len(tensors["x"])
        padded = {}
        for name, tensor in tensors.items():
            padded[name] = torch.zeros(bucket, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
            padded[name][:rows] = tensor
        return [tensor[:rows] if tensor.dim() else tensor for tensor in tensors_of(function(**padded))]

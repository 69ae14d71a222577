"""Shadow checks in training: the first replay of a captured call is compared with eager on the same inputs.

Gradients are noise, of which both runs compute copies: nothing is added to `.grad`, and no hook runs. All memory and
generators are as before afterwards. `graph_cache/core/shadow.py` describes the lifecycle; here the two runs that find
out whether eager differs from itself follow at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graph_cache.core.shadow import (
    DIFFERS,
    EQUAL,
    MAX_COPIED_BYTES,
    NOT_DETERMINISTIC,
    UNCHECKED,
    Snapshot,
    WrittenMemory,
    listed,
)
from graph_cache.guards.library_state import is_of_transformer_engine
from graph_cache.guards.parametrizations import uncached
from graph_cache.guards.torch_settings import free_frames
from graph_cache.guards.values import raw_bits
from graph_cache.training.capture_context import CaptureContext
from graph_cache.training.compiled import without_compiling
from graph_cache.training.microbatch_graphs import CallEntry
from graph_cache.utils.layout import distinct

logger = logging.getLogger(__name__)

Values = Sequence[Tensor | None]


class Finding(NamedTuple):
    """What a check found: one of the outcomes of `graph_cache/core/shadow.py`, and what differed."""

    outcome: str
    differing: list[str]


def check_call(entry: CallEntry, tensors: Sequence[Tensor], context: CaptureContext) -> Finding:
    """Replay a captured call and run it eager on these tensors, forward and backward, and compare."""
    graphs, owner = entry.graphs, entry.owner
    # State of Transformer Engine is beside memory, and hooks that run before replays may not run twice.
    if owner.runs_hooks or any(map(is_of_transformer_engine, owner.submodules)):
        return Finding(UNCHECKED, [])
    grads = [_noise(graphs.outputs[index], strides) for index, strides in graphs.used_outputs()]

    def eager() -> Values:
        twin = graphs.twin(owner, tensors, context)
        context.running.active = True  # attached modules inside run as part of it
        try:
            with owner.with_flags(entry.state), without_compiling(context.pool.backend), uncached():
                return twin.run_eager(grads)
        finally:
            context.running.active = False

    backend = context.pool.backend
    generators = list(dict.fromkeys((backend.default_generator, *context.generators)))
    with context.pool.lock, torch.inference_mode(False), torch.enable_grad():
        return compared(lambda: graphs.run_graphs(tensors, grads), eager, graphs.written(), generators, backend.device)


def compared(
    replay: Callable[[], Values],
    eager: Callable[[], Values],
    regions: Sequence[WrittenMemory],
    generators: Sequence[torch.Generator],
    device: torch.device,
) -> Finding:
    """Compare results, regions and generators after a replay and after eager, and restore them."""
    if sum(region.nbytes for region in regions) > MAX_COPIED_BYTES:
        return Finding(UNCHECKED, [])
    with torch.no_grad():
        before = Snapshot(regions, generators, device)
    try:
        with torch.no_grad():
            results = replay()
        found = _differences(results, eager, regions, generators, before, device)
        if not found:
            return Finding(EQUAL, [])
        before.restore()
        results = eager()
        if unstable := _differences(results, eager, regions, generators, before, device):
            return Finding(NOT_DETERMINISTIC, unstable)
        return Finding(DIFFERS, found)
    except torch.OutOfMemoryError as error:
        logger.info("a captured call is not checked: %s", error)
        return Finding(UNCHECKED, [])
    except Exception as error:  # of any kind: the call runs eager, and raises it there if it does again
        free_frames(error)
        return Finding(DIFFERS, [f"eager, which raised {type(error).__name__}: {error}"])
    finally:
        before.restore()


@torch.no_grad()
def _differences(
    results: Values,
    eager: Callable[[], Values],
    regions: Sequence[WrittenMemory],
    generators: Sequence[torch.Generator],
    before: Snapshot,
    device: torch.device,
) -> list[str]:
    """Return what differs between a run that has ended with these results, and eager from the state before it."""
    after = Snapshot(regions, generators, device)
    before.restore()
    with torch.enable_grad():
        others = eager()
    flags = [_differ(one, other, device) for one, other in zip(results, others, strict=True)]
    names = [f"result or gradient {index}" for index in range(len(flags))] + after.names
    values = torch.cat((torch.stack(flags).to(torch.int32), after.differing(""))) if flags else after.differing("")
    return [name for name, flag in zip(names, values.tolist(), strict=True) if flag]


def _differ(one: Tensor | None, other: Tensor | None, device: torch.device) -> Tensor:
    """Return a tensor of one element: whether two tensors differ in shape, dtype or any bit."""
    if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return torch.full((), one is not other, device=device)
    return (raw_bits(_plain(one)) != raw_bits(_plain(other))).any()


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor.resolve_conj().resolve_neg()


def _noise(output: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a gradient for an output: fixed noise with these strides."""
    noise = torch.Generator().manual_seed(output.numel())
    grad = torch.empty_strided(output.shape, strides, dtype=output.dtype, device=output.device)
    target = distinct(grad)
    parts = torch.view_as_real(target) if target.is_complex() else target
    parts.copy_(torch.randn(parts.shape, generator=noise, device="cpu"))
    return grad


def describe(finding: Finding) -> str:
    """Return why the graphs of a call that differs are dropped."""
    if finding.outcome == NOT_DETERMINISTIC:
        return (
            f"two eager runs from the same inputs differ in {listed(finding.differing)}: it depends on the host, on "
            "earlier runs or on an unregistered generator"
        )
    return f"its replay differed from an eager run on the same inputs in {listed(finding.differing)}"

"""Record a callable and build every program that can replay it, each on an arena filled with garbage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from graph_cache.backends.cpu_arena import Arena, plan_layout
from graph_cache.backends.cpu_program import bind, loop_program, torchscript_program
from graph_cache.backends.cpu_tape import Tape, TapeRecorder

Replay = Callable[[], list[torch.Tensor]]


def recorded(fn: Callable[[], Any], generators: Sequence[torch.Generator] = ()) -> Tape:
    """Return the tape of one run of `fn`."""
    recorder = TapeRecorder(generators)
    with torch.inference_mode(), recorder:
        fn()
    return recorder.tape


def eager(fn: Callable[..., Any], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return copies of the tensors that `fn` returns."""
    with torch.inference_mode():
        return [leaf.clone() for leaf in tree_leaves(fn(*inputs)) if isinstance(leaf, torch.Tensor)]


def programs(fn: Callable[..., Any], *inputs: torch.Tensor, arena: Arena | None = None) -> dict[str, Replay]:
    """Return replays of `fn(*inputs)` by name. Each reads the inputs' current contents and returns copies."""
    outputs = eager(fn, *inputs)

    def body() -> None:
        for output, leaf in zip(outputs, tree_leaves(fn(*inputs)), strict=True):
            output.copy_(leaf)

    tape = recorded(body)
    offsets, need = plan_layout(tape.buffers)
    claim = (arena or Arena()).claim(need)
    garbage = claim.tensor(torch.uint8, (need,), (1,), 0)

    def replay_of(program: Callable[[], None]) -> Replay:
        def replay() -> list[torch.Tensor]:
            garbage.fill_(0xA5)
            program()
            return [output.clone() for output in outputs]

        return replay

    builders = {"torchscript": torchscript_program, "loop": loop_program}
    return {name: replay_of(build(bind(tape, claim, offsets))) for name, build in builders.items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether shape, dtype and bytes are equal: NaN equals NaN, 0.0 differs from -0.0."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(raw(one), raw(other))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as bytes."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return plain.view(-1).view(torch.uint8)

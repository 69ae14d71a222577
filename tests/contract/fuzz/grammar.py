"""Programs and how they are drawn: a model of blocks, and steps with changes between them.

A program is plain data with a short repr, so it can be printed, shrunk and run again. `draw_program` draws one from a
Source, which is a seeded random generator or hypothesis.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

from tests.contract.fuzz import blocks

T = TypeVar("T")

APIS = ("attach", "iteration", "cache")
PARTS = ("whole", "blocks", "first", "last")
OPTIMIZERS = (
    "sgd",
    "momentum",
    "none",
    "adam",
    "adam_foreach",
    "adamw_fused",
    "adam_capturable",
    "sgd_foreach",
    "rmsprop",
    "adagrad",
)
BACKWARDS = (
    "each",
    "after",
    "reversed",
    "none",
    "penalty",
    "grad_only",
    "partial",
    "twice",
    "abandoned",
    "held",
    "checkpointed",
    "functional",
    "retained",
    "grad_then_backward",
    "compiled",
)
CLEARS = ("set_to_none", "zero", "keep")
INPUTS = ("plain", "requires_grad", "expanded", "transposed", "sliced", "double", "empty", "same", "conjugate")
EXTRAS = (
    (),
    (2.0,),
    (0.0,),
    (-0.0,),
    (2,),
    (True,),
    (None,),
    ("abc",),
    ((1.0, 2.0),),
    ([1.0, -0.0],),
    ({"a": 2.0},),
    ("tensor",),
    ("tensors",),
    ("object",),
    ("frozen",),
    ("host_tensor",),
    ("named",),
    ("nested",),
    ("itself",),
    ("parameter",),
)
CONTEXTS = (
    "autocast",
    "default_dtype",
    "no_grad",
    "inference",
    "math_attention",
    "deterministic",
    "precision",
    "saved_on_host",
    "global_hook",
    "evaluating",
    "anomaly",
    "autocast_uncached",
    "grad_enabled",
    "default_device",
    "function_mode",
    "cached_weights",
)
CHANGES = (
    "evaluate",
    "train",
    "block_mode",
    "freeze",
    "unfreeze",
    "move_parameter",
    "transpose_parameter",
    "replace_parameter",
    "write_parameter",
    "load_state_dict",
    "move_buffer",
    "replace_buffer",
    "write_buffer",
    "set_value",
    "change_value",
    "set_outside",
    "number",
    "forward_hook",
    "pre_hook",
    "backward_hook",
    "parameter_hook",
    "accumulate_hook",
    "remove_hooks",
    "replace_block",
    "append_block",
    "remove_block",
    "swap_blocks",
    "replace_inner",
    "patch_forward",
    "patch_class",
    "patch_function",
    "learning_rate",
    "setting",
    "seed",
    "copy_model",
    "clear",
    "rebind_tensor",
    "write_tensor",
    "scale_gradients",
    "share_gradient",
    "drop_gradients",
    "reset_optimizer",
    "pickle_model",
    "cast",
    "swap_hook",
    "shadow",
    "indirect",
    "tie",
    "untie",
    "swap_buffers",
    "toggle_gradients",
    "own_mode",
)
# What the step function does besides calling the model.
QUIRKS = (
    "step_inside",
    "clear_inside",
    "clip",
    "count",
    "append_loss",
    "read_loss",
    "schedule",
    "schedule_inside",
    "average",
    "average_swapped",
    "forward_method",
    "bare_parameter",
    "draws",
    "autocast_inside",
    "autocast_around",
    "skips_odd_steps",
    "returns_number",
    "writes_argument",
    "argument_gradient",
    "second_model",
    "new_module",
    "reads_history",
    "keeps_loss",
    "no_grad_part",
    "gradient_on_module",
)


@dataclass(frozen=True)
class Block:
    """One block: its kind, the index of its value, and the blocks around it, innermost first."""

    kind: str
    value: int = 0
    around: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """A change between two steps of block `where`; `value` selects among variants."""

    kind: str
    where: int = 0
    value: int = 0


@dataclass(frozen=True)
class Step:
    """One training step, or one call."""

    rows: int = 2
    calls: int = 1
    backward: str = "each"
    clears: str = "set_to_none"
    inputs: str = "plain"
    extra: int = 0
    contexts: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Program:
    """A model and its steps, run through one API."""

    api: str
    blocks: tuple[Block, ...]
    steps: tuple[Step, ...]
    parts: str = "whole"
    result: str = "tensor"
    optimizer: str = "sgd"
    warmup: int = 1
    registers: bool = False  # the generators of blocks are registered
    quirks: tuple[str, ...] = ()

    def constructs(self) -> set[str]:
        """Return the names of everything in this program, as `open_findings.py` spells them."""
        found = {f"block {block.kind}" for block in self.blocks}
        found |= {f"block {block.kind} {blocks.KINDS[block.kind][2][block.value]}" for block in self.blocks}
        found |= {f"around {name}" for block in self.blocks for name in block.around}
        found |= {f"change {change.kind}" for step in self.steps for change in step.changes}
        found |= {f"context {name}" for step in self.steps for name in step.contexts}
        found |= {f"quirk {name}" for name in self.quirks}
        for step in self.steps:
            for field in ("backward", "clears", "inputs", "extra"):
                if getattr(step, field) != getattr(DEFAULT_STEP, field):
                    found.add(f"{field} {getattr(step, field)}")
        if self.result != "tensor":
            found.add(f"result {self.result}")
        if self.parts != "whole":
            found.add("parts")
        return found


DEFAULT_STEP = Step()


def parse(text: str) -> Program:
    """Return the program with this repr."""
    names = {one.__name__: one for one in (Block, Change, Step, Program)}
    return eval(text, {"__builtins__": {}}, names)


def short(value: Any) -> str:
    """Return the repr of a program without fields that have their default."""
    if isinstance(value, (Block, Change, Step, Program)):
        shown = [
            f"{field.name}={short(getattr(value, field.name))}"
            for field in fields(value)
            if getattr(value, field.name) != field.default
        ]
        return f"{type(value).__name__}({', '.join(shown)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(short, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


# ---- drawing ---------------------------------------------------------------------------------------------------------


class Source(Protocol):
    """Where the choices of a program come from."""

    def choice(self, options: Sequence[T]) -> T:
        """Return one of the options, the first one being the simplest."""

    def chance(self, percent: int) -> bool:
        """Return true in `percent` of the cases."""


class RandomSource:
    """Choices from a seeded generator."""

    def __init__(self, seed: str):
        self._random = random.Random(seed)

    def choice(self, options: Sequence[T]) -> T:
        return options[self._random.randrange(len(options))]

    def chance(self, percent: int) -> bool:
        return self._random.randrange(100) < percent


UNUSUAL = ("effect", "host", "value", "random", "context", "outside")
# Unusual groups by how often they are drawn: a host read never replays, so a few are enough.
GROUPS = ("effect",) * 4 + ("value",) * 5 + ("random",) * 2 + ("context", "outside", "outside", "host")


def draw_program(source: Source, api: str | None = None) -> Program:
    """Draw a program. Most are a few layers with one or two unusual things, so that many can be captured."""
    api = api or source.choice(APIS)
    drawn = [_draw_block(source, "layer") for _ in range(source.choice((1, 1, 2, 3)))]
    for _ in range(source.choice((0, 0, 1, 1, 2))):
        drawn.insert(source.choice(range(len(drawn) + 1)), _draw_block(source, source.choice(GROUPS)))
    steps = [Step() for _ in range(source.choice((5, 6, 7)))]
    everywhere: dict[str, Any] = {}
    if source.chance(12):
        everywhere["calls"] = source.choice((2, 3))
    if source.chance(15):
        everywhere["backward"] = source.choice(BACKWARDS)
    if source.chance(10):
        everywhere["clears"] = source.choice(CLEARS)
    if source.chance(15):
        everywhere["inputs"] = source.choice(INPUTS)
    if source.chance(15):
        everywhere["extra"] = source.choice(range(len(EXTRAS)))
    if source.chance(12):
        everywhere["contexts"] = (source.choice(CONTEXTS),)
    steps = [Step(**everywhere) for _ in steps]
    for _ in range(source.choice((0, 0, 1, 1, 2, 3))):
        _vary(source, steps, drawn)
    quirks = []
    if api == "iteration":
        quirks = [source.choice(QUIRKS) for _ in range(source.choice((0, 0, 1, 1, 2, 3)))]
    return Program(
        api=api,
        blocks=tuple(drawn),
        steps=tuple(steps),
        parts=source.choice(PARTS) if source.chance(40) else "whole",
        result=source.choice(blocks.RESULTS) if source.chance(20) else "tensor",
        optimizer=source.choice(OPTIMIZERS) if source.chance(50) else "sgd",
        warmup=2 if source.chance(10) else 1,
        registers=source.chance(50),
        quirks=tuple(dict.fromkeys(quirks)),
    )


def _draw_block(source: Source, group: str) -> Block:
    kind = source.choice(blocks.kinds(group))
    value = source.choice(range(len(blocks.KINDS[kind][2])))
    around = [source.choice(blocks.AROUND)] if source.chance(12) else []
    if around and source.chance(10):
        around.append(source.choice(blocks.AROUND))
    return Block(kind, value, tuple(around))


RELEVANT = {
    "value": ("set_value", "change_value", "set_outside", "indirect", "shadow"),
    "outside": ("rebind_tensor", "write_tensor"),
    "effect": ("clear", "block_mode", "write_buffer"),
}


def _vary(source: Source, steps: list[Step], drawn: Sequence[Block]) -> None:
    """Change one step, or all from it on. Later steps are likelier, since the first ones warm up."""
    first = source.choice((3, 3, 3, 2, 4, 1, 0)) % len(steps)
    last = source.choice((first + 1, len(steps)))
    what = source.choice(("change",) * 6 + ("context", "rows", "calls", "backward", "clears", "inputs", "extra"))
    if what == "change":
        where = source.choice(range(len(drawn)))
        relevant = RELEVANT.get(blocks.KINDS[drawn[where].kind][0], ())
        kind = source.choice(relevant) if relevant and source.chance(70) else source.choice(CHANGES)
        change = Change(kind, where, source.choice(range(8)))
        indices = range(first, len(steps)) if source.chance(15) else [first]
        for index in indices:
            steps[index] = replace(steps[index], changes=(*steps[index].changes, change))
        return
    values: dict[str, Any] = {
        "context": ("contexts", (source.choice(CONTEXTS),)),
        "rows": ("rows", source.choice((1, 3, 2, 5))),
        "calls": ("calls", source.choice((1, 2, 3))),
        "backward": ("backward", source.choice(BACKWARDS)),
        "clears": ("clears", source.choice(CLEARS)),
        "inputs": ("inputs", source.choice(INPUTS)),
        "extra": ("extra", source.choice(range(len(EXTRAS)))),
    }[what]
    for index in range(first, last):
        steps[index] = replace(steps[index], **{values[0]: values[1]})

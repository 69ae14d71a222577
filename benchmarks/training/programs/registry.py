"""Register training programs, run them eager or with graphs, and record what their steps compute."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from engine.config import EngineConfig
from engine.training.engine import TrainingEngine

STEPS = 8
THEMES = tuple(
    path.stem
    for path in sorted(Path(__file__).parent.glob("*.py"))
    if path.stem not in ("__init__", "models", "registry")
)
NOT_TRAINING = frozenset(("no_gradient",))  # calls for evaluation, teachers and rollouts

Program = Callable[["Run"], Any]
_programs: dict[str, Program] = {}
_needs: dict[str, tuple[str, ...]] = {}


def program(*needs: str) -> Callable[[Program], Program]:
    """Register a program under `theme.name`. `needs`: packages without which it is left out."""

    def register(function: Program) -> Program:
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        _programs[name], _needs[name] = function, needs
        return function

    return register


def programs() -> dict[str, Program]:
    """Return the programs by name, without those that need a package that is not installed."""
    for theme in THEMES:
        importlib.import_module(f"{__package__}.{theme}")
    return {name: one for name, one in _programs.items() if all(map(_is_importable, _needs[name]))}


def _is_importable(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


class Run:
    """One run of a program: eager, or with the graphs of an engine.

    A program calls `attach` or `iteration`, loops over `steps()`, passes results to `log`, and returns what its last
    state consists of: modules, optimizers and tensors, in containers.
    """

    def __init__(self, engine: TrainingEngine | None):
        self._engine = engine
        self.values: list[tuple[str, Any]] = []  # what the program computes, with names
        self.steps_done: list[Step] = []
        self._before = self._counts()

    @property
    def has_graphs(self) -> bool:
        """Whether this run is not eager."""
        return self._engine is not None

    def attach(self, model: nn.Module, modules: Iterable[str] | None = None, **options: Any) -> None:
        """Attach a model; do nothing in an eager run."""
        if self._engine is not None:
            self._engine.attach(model, modules, **options)

    def iteration(self, step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return the captured step; in an eager run the step, with results without history as a captured one has."""
        if self._engine is not None:
            return self._engine.capture_iteration(step, device="cpu", **options)

        def eager(*args: Any, **kwargs: Any) -> Any:
            return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, step(*args, **kwargs))

        return eager

    def steps(self, count: int = STEPS) -> Iterator[int]:
        """Yield the number of each step."""
        for number in range(count):
            yield number
            self.end_step()

    def end_step(self) -> None:
        """Note how the step ran. Programs in which a library has the loop call this at the end of each step."""
        replays, eager = self._counts()
        before_replays, before_eager = self._before
        reasons = eager - before_eager
        self.steps_done.append(Step(replays - before_replays, reasons))
        self._before = replays, eager

    def log(self, *values: Any) -> None:
        """Record the values of a step."""
        for value in values:
            self.values.extend(flat(f"step {len(self.steps_done)}", value))

    def finish(self, state: Any) -> None:
        """Record the last state, and that of the random generators."""
        self.values.extend(flat("state", state))
        self.values.extend(flat("generators", (torch.get_rng_state(), random.random(), float(numpy.random.rand()))))

    def _counts(self) -> tuple[int, Counter[tuple[str, str]]]:
        if self._engine is None:
            return 0, Counter()
        stats = self._engine.stats
        eager: Counter[tuple[str, str]] = Counter()
        for (name, _, reason), count in stats.fallbacks.items():
            eager[name, reason] += count
        return sum(stats.replays.values()), eager


@dataclass
class Step:
    """How a step ran: replays, and calls that ran eager by (module, reason)."""

    replays: int = 0
    eager: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def reasons(self) -> Counter[str]:
        """Eager training calls by reason."""
        found: Counter[str] = Counter()
        for (_, reason), count in self.eager.items():
            if reason not in NOT_TRAINING:
                found[reason] += count
        return found

    @property
    def is_replayed(self) -> bool:
        """Whether graphs ran, and no training call ran eager."""
        return self.replays > 0 and not self.reasons


def run_program(function: Program, engine: TrainingEngine | None) -> Run:
    """Run a program with fixed seeds."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    run = Run(engine)
    run.finish(function(run))
    return run


def new_engine(warmup_steps: int = 1) -> TrainingEngine:
    """Return a training engine that captures early."""
    return TrainingEngine(EngineConfig(mode="training", cuda_graph_warmup_steps=warmup_steps))


def flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value that are compared, with names: bits of tensors, and plain values."""
    if isinstance(value, Tensor):
        yield name, bits(value)
        if value.is_leaf and value.grad is not None:
            yield f"{name}.grad", bits(value.grad)
    elif isinstance(value, nn.Module):
        for key, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield from flat(f"{name} {type(value).__name__}.{key}", tensor)
    elif isinstance(value, torch.optim.Optimizer):
        yield from flat(f"{name} {type(value).__name__}", value.state_dict())
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flat(f"{name}.{key}", item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, item in enumerate(value):
            yield from flat(f"{name}[{index}]", item)
    elif isinstance(value, float):
        yield name, value.hex()
    elif isinstance(value, (int, str, bool, type(None))):
        yield name, value


def bits(tensor: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Return dtype, shape and bytes of a tensor."""
    tensor = tensor.detach()
    tensor = getattr(tensor, "full_tensor", lambda: tensor)()  # of a DTensor
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    return str(tensor.dtype), tuple(tensor.shape), whole.reshape(-1).view(torch.uint8).numpy().tobytes()


def difference(eager: Run, graphed: Run) -> str:
    """Return the name of the first value that differs, or an empty string."""
    for (name, value), (other_name, other) in zip(eager.values, graphed.values, strict=False):
        if name != other_name:
            return f"{name} against {other_name}"
        if value != other:
            return name
    return "" if len(eager.values) == len(graphed.values) else "the number of values"

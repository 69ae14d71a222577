"""Optimizers that step inside a captured iteration: settings that a graph bakes in, and state tensors it reads."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graph_cache.guards.values import key_of


@contextmanager
def observe_steps(callback: Callable[[Optimizer], None]) -> Iterator[None]:
    """Call `callback` with every optimizer that steps within the block."""
    handle = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: callback(optimizer))
    try:
        yield
    finally:
        handle.remove()


def settings_of(optimizer: Optimizer) -> Hashable:
    """Return the settings that a graph holds as constants: learning rates, betas, parameters of each group.

    With them what code has put around `step`: hooks, or a function in its place.

    Tensors are read by the graph, so they count by identity only.
    """
    hooks = (vars(optimizer)["_optimizer_step_pre_hooks"], vars(optimizer)["_optimizer_step_post_hooks"])
    return (
        key_of(vars(optimizer).get("step")),
        *[tuple((key, key_of(hook)) for key, hook in registry.items()) for registry in hooks],
        *[
            (name, tuple(map(id, group[name])) if name == "params" else key_of(group[name], contents=True))
            for group in optimizer.param_groups
            for name in sorted(group)
        ],
    )


def parts_of(optimizer: Optimizer) -> list[object]:
    """Return the objects in which an optimizer keeps its settings and its state."""
    return [vars(optimizer)[name] for name in ("param_groups", "state", "defaults")]


class OptimizerState(Mapping[str, Tensor]):
    """State tensors of an optimizer (moments, steps) by name, looked up on each access.

    The names are fixed at construction. The optimizer is held weakly; once it is freed, lookups raise KeyError.
    """

    def __init__(self, optimizer: Optimizer):
        self._optimizer = weakref.ref(optimizer)
        self._entries = {
            f"{number}.{name}": (parameter, name)
            for number, (parameter, state) in enumerate(optimizer.state.items())
            for name, value in state.items()
            if isinstance(value, Tensor)
        }

    def __getitem__(self, name: str) -> Tensor:
        optimizer, (parameter, key) = self._optimizer(), self._entries[name]
        if optimizer is None or parameter not in optimizer.state:
            raise KeyError(name)
        return optimizer.state[parameter][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

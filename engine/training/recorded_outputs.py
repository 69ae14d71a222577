"""Outputs that transformers records by hooks inside layers, such as router logits, as outputs of captured layers.

A model called with `output_router_logits=True` collects what its routers return. A replay runs no router and no hook,
so a captured layer returns the recorded tensors too, and they are added to the model's collection after each call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

_HOOK = "install_output_capuring_hook.<locals>.output_capturing_hook"  # spelled as in transformers
_COLLECTOR = "_active_collector"


def records_outputs() -> bool:
    """Return whether the installed version of transformers is loaded and records outputs by these hooks."""
    return hasattr(_recording(), _COLLECTOR)


def is_recording_hook(hook: Callable[..., Any]) -> bool:
    """Return whether a captured layer reproduces what the hook does.

    It does not for hidden states, which are recorded around whole layers: a hook for them inside a part keeps it eager.
    """
    if getattr(hook, "__qualname__", "") != _HOOK or not records_outputs():
        return False
    names, cells = hook.__code__.co_freevars, hook.__closure__ or ()
    return dict(zip(names, cells, strict=True))["key"].cell_contents != "hidden_states"


class RecordedOutputs:
    """`SideOutput` of a layer: what its hooks record while the model collects outputs."""

    def begin(self) -> None:
        """Nothing to prepare."""

    def end(self) -> None:
        """Nothing to restore."""

    def take(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments unchanged."""
        return args, kwargs

    def gather(self, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call, and return the result and the recorded outputs by name, or the result alone if none is collected."""
        recorded: dict[str, list[Any]] = {name: [] for name in _recorded_names()}
        if not recorded:
            return call(*args, **kwargs)
        with _collecting(recorded):
            return call(*args, **kwargs), recorded

    def put(self, gathered: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Add the recorded outputs to the model's collection, and return the result."""
        if not _recorded_names():
            return gathered
        result, recorded = gathered
        collection = _collection() or {}
        for name, values in recorded.items():
            collection[name].extend(values)
        return result


class Recording:
    """`AmbientState`: the names of the outputs that the model collects, which decide what a layer returns."""

    def of(self, modules: Sequence[nn.Module]) -> Hashable:
        """Return the names."""
        return _recorded_names()

    @contextmanager
    def recreate(self, modules: Sequence[nn.Module], seen: Hashable) -> Iterator[None]:
        """Collect the same outputs within the block."""
        assert isinstance(seen, tuple)
        with _collecting({name: [] for name in seen}):
            yield

    def watch(self, modules: Sequence[nn.Module]) -> Callable[[], bool]:
        """Return a check that finds no moved state, since there is none."""
        return lambda: True

    def replaying(self, modules: Sequence[nn.Module]) -> None:
        """Nothing to update."""

    def replayed(self, modules: Sequence[nn.Module]) -> None:
        """Nothing to apply: `RecordedOutputs.put` adds the outputs."""


def _recording() -> Any:
    return sys.modules.get("transformers.utils.output_capturing")


def _collection() -> dict[str, Any] | None:
    """Return what the model collects in this call, by name; None outside of models and without such outputs."""
    return getattr(_recording(), _COLLECTOR).get() if records_outputs() else None


def _recorded_names() -> tuple[str, ...]:
    """Return the names of the collected outputs that layers record inside."""
    return tuple(sorted(name for name in _collection() or () if name != "hidden_states" and not name.startswith("_")))


@contextmanager
def _collecting(collection: dict[str, list[Any]]) -> Iterator[None]:
    if not records_outputs():
        yield
        return
    collector = getattr(_recording(), _COLLECTOR)
    token = collector.set(collection)
    try:
        yield
    finally:
        collector.reset(token)

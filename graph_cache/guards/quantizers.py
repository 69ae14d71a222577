"""Track the non-parameter state that graphs read from Transformer Engine modules: scales, amaxes, quantizers, cached
weights.

Modules replace this state when they run under another recipe. Keep the captured objects alive as long as the graphs,
and detect the replacement. Modules are recognized by their attributes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from graph_cache.errors import CaptureRefused

STATE_DICTS = ("quantizers", "_quantizers", "_fp8_workspaces")  # dicts whose every entry is read
META_DICTS = ("fp8_meta", "_fp8_metas")
RECIPE_STATES = ("scaling_fwd", "scaling_bwd")  # entries of META_DICTS that graphs read; the rest is set at each call

StateEntry = tuple[Mapping[str, Any], str, Any]


class Quantizers:
    """Snapshot of the quantizer state of modules and their submodules."""

    def __init__(self, modules: Iterable[nn.Module]):
        submodules = {module: None for root in modules for module in root.modules()}
        self._entries: list[StateEntry] = [entry for module in submodules for entry in _read(module)]

    def are_current(self) -> bool:
        """Return whether the modules still use all of this state."""
        return all(owner.get(key) is value for owner, key, value in self._entries)


@contextmanager
def refuse_new_quantizers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Raise CaptureRefused if the block replaces state of these modules, which each replay would do again."""
    quantizers = Quantizers(modules)
    yield
    if not quantizers.are_current():
        raise CaptureRefused(
            "it creates quantizers of Transformer Engine, since the last call of these modules had another recipe: "
            "use one recipe until the capture"
        )


def _read(module: nn.Module) -> Iterator[StateEntry]:
    attributes = vars(module)
    for name in (*STATE_DICTS, *META_DICTS):
        value = attributes.get(name)
        if isinstance(value, dict):
            yield attributes, name, value
            yield from ((value, key, entry) for key, entry in value.items() if name in STATE_DICTS)
            if name in META_DICTS:
                yield from _states(value)


def _states(meta: Mapping[str, Any]) -> Iterator[StateEntry]:
    """Yield recipe states, which some modules nest by direction."""
    for key, value in meta.items():
        if key in RECIPE_STATES:
            yield meta, key, value
        elif isinstance(value, dict):
            yield from _states(value)

"""The memory that a worker gives back while the engine sleeps: weights, graphs and KV cache, each at fixed addresses.

Static inputs and outputs of steps, sampling parameters and workspaces stay: they are small, and hold values that
outlive a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.kv_cache import KVCache
from engine.attention.model_state import ModelState
from engine.errors import ConfigError, EngineError, ModelError
from engine.layers.weight_slot import overwritten
from engine.models.interface import Model
from engine.protocol.sleep import GRAPHS, KV_CACHE, WEIGHTS
from graph_cache.backends import region_for
from graph_cache.backends.base import Memory, Region
from graph_cache.errors import GraphConfigError, GraphError


def new_region(device: torch.device) -> Region:
    """Return a region for memory that may be released. Raises ConfigError if this machine can't have one."""
    try:
        return region_for(device)
    except GraphConfigError as error:
        raise ConfigError(f"enable_sleep_mode=True: {error}") from error


class _Part(NamedTuple):
    release: Callable[[bool], int]
    restore: Callable[[], None]


class ReleasableMemory:
    """Releases and restores the parts of a worker's memory. The caller makes sure that no step runs meanwhile.

    `weights` and `cache` are the regions of the model's weights, and of the KV cache and the state of slots; None if
    they can't be released. `missing`: names of weights that were discarded and have not come since. `shares_weights`:
    whether a trainer's parameters are views of the weights.
    """

    def __init__(
        self,
        model: Model,
        weights: Region | None,
        kv: KVCache,
        state: ModelState,
        cache: Region | None,
        graphs: Memory,
    ):
        self.missing: set[str] = set()
        self.shares_weights = False
        self._model = model
        self._parts: dict[str, _Part] = {}
        if weights is not None and cache is not None:
            pages = [pages for tensors in kv.storage for pages in tensors] + state.discardable()
            self._parts = {
                WEIGHTS: _Part(lambda discards: self._release_weights(weights, discards), lambda: weights.restore()),
                GRAPHS: _Part(lambda discards: graphs.release(), lambda: graphs.restore()),
                KV_CACHE: _Part(lambda discards: cache.release(pages), lambda: cache.restore()),
            }

    def release(self, part: str, discards: bool) -> int:
        """Give back a part's physical memory, and return its bytes.

        Weights are kept in host memory. With `discards`, only what an update doesn't write is kept: constants, and
        weights in a quantised format. Pages of the KV cache, and intermediates of graphs, are always discarded.
        """
        try:
            return self._parts[part].release(discards)
        except GraphError as error:
            raise EngineError(f"the memory of {part} can't be released: {error}") from error

    def restore(self, part: str) -> None:
        """Undo `release`. Raises EngineError, and changes nothing, if there is no room."""
        try:
            self._parts[part].restore()
        except GraphError as error:
            raise EngineError(f"the memory of {part} can't be restored: {error}") from error

    def weights_came(self, names: Iterable[str] | None = None) -> None:
        """Note that weights were written: the ones with these names, or all."""
        self.missing.difference_update(self.missing.copy() if names is None else names)

    def _release_weights(self, region: Region, discards: bool) -> int:
        discarded: dict[str, list[Tensor]] = {}
        if discards:
            try:
                slots = self._model.weight_slots()
            except ModelError:  # weights without names can't come back
                slots = {}
            found = {name: overwritten(slot) for name, slot in slots.items()}
            discarded = {name: tensors for name, tensors in found.items() if tensors}
        released = region.release([tensor for tensors in discarded.values() for tensor in tensors])
        self.missing.update(discarded)
        return released

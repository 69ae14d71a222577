"""The cache of `torch.nn.utils.parametrize.cached()`: computed weights that calls within the block share.

A graph computes a weight at every replay, and eager reads the cached one, so calls within the block run eager. Captures
ignore the cache: a weight that they computed would stay in it, with the history of the capture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.utils import parametrize


def caches() -> bool:
    """Whether computed weights are cached now."""
    return bool(parametrize._cache_enabled)


def is_cached(modules: Iterable[nn.Module]) -> bool:
    """Whether computed weights of these modules are cached now."""
    return caches() and any("parametrizations" in module._modules for module in modules)


@contextmanager
def uncached() -> Iterator[None]:
    """Compute weights anew within the block, and leave the cache as it was."""
    if not parametrize._cache_enabled:
        yield
        return
    enabled, cache = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = enabled, cache

"""Choose the attention backend of a model by what the backends support."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention.cache_spec import PagedSpec
from engine.attention.compiled import CompiledBackend
from engine.attention.interface import AttentionBackend
from engine.attention.sdpa import SdpaBackend
from engine.errors import ConfigError


def backends() -> tuple[type[AttentionBackend], ...]:
    """Return the backends that can be imported here, the fastest first."""
    if not torch.cuda.is_available():
        return (CompiledBackend, SdpaBackend)
    from engine.attention.triton import TritonBackend  # triton is installed only with CUDA

    return (TritonBackend, CompiledBackend, SdpaBackend)


def choose_backend(
    specs: Sequence[PagedSpec], dtype: torch.dtype, device: torch.device, stored: torch.dtype | None = None
) -> type[AttentionBackend]:
    """Return the first backend that supports these layers, and a KV cache stored in `stored` (None: in `dtype`).

    Raises ConfigError, listing what each one lacks.
    """
    problems = []
    for backend in backends():
        lacking = backend.support.missing(specs, dtype, device, stored)
        if lacking is None:
            return backend
        problems.append(f"{backend.name}: no support for {lacking}")
    raise ConfigError(f"no attention backend fits this model: {'; '.join(problems)}")

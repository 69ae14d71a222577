"""Capture, plan and replay graphs of any callable with a batch dimension.

This package handles tensors and callables only; it has no notion of models, tokens or HTTP. Suggested reading order:
buckets, keys, pool, runner, site, cache (in `core/`). Names are imported on first use, so that settings can be read
without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph_cache.config import GraphConfig
    from graph_cache.core.addresses import AddressBook, Moved
    from graph_cache.core.buckets import Buckets, default_ladder
    from graph_cache.core.buffers import BATCH, BufferSpec, StaticBuffers
    from graph_cache.core.cache import GraphCache, Ran
    from graph_cache.core.capture_state import CaptureState, CaptureStatus
    from graph_cache.core.host_ring import HostRing, Ticket
    from graph_cache.core.keys import GraphKey, Plan
    from graph_cache.core.manifest import Manifest
    from graph_cache.core.pool import GraphPool
    from graph_cache.core.runner import GraphRunner, RunnerState
    from graph_cache.core.site import Site
    from graph_cache.errors import (
        CaptureError,
        CaptureRefused,
        GraphClosed,
        GraphConfigError,
        GraphError,
        ManifestError,
        SignatureMismatch,
    )
    from graph_cache.tuning.budget_tuner import TokenBudgets, tune_token_budgets
    from graph_cache.tuning.packed_tuner import PackedTuning, tune_packed
    from graph_cache.tuning.tuner import tune

_EXPORTS = {
    "core.addresses": ("AddressBook", "Moved"),
    "core.buckets": ("Buckets", "default_ladder"),
    "tuning.budget_tuner": ("TokenBudgets", "tune_token_budgets"),
    "core.buffers": ("BATCH", "BufferSpec", "StaticBuffers"),
    "core.cache": ("GraphCache", "Ran"),
    "core.capture_state": ("CaptureState", "CaptureStatus"),
    "config": ("GraphConfig",),
    "errors": (
        "CaptureError",
        "CaptureRefused",
        "GraphClosed",
        "GraphConfigError",
        "GraphError",
        "ManifestError",
        "SignatureMismatch",
    ),
    "core.keys": ("GraphKey", "Plan"),
    "core.manifest": ("Manifest",),
    "tuning.packed_tuner": ("PackedTuning", "tune_packed"),
    "core.pool": ("GraphPool",),
    "core.host_ring": ("HostRing", "Ticket"),
    "core.runner": ("GraphRunner", "RunnerState"),
    "core.site": ("Site",),
    "tuning.tuner": ("tune",),
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "BATCH",
    "AddressBook",
    "Buckets",
    "BufferSpec",
    "CaptureError",
    "CaptureRefused",
    "CaptureState",
    "CaptureStatus",
    "GraphCache",
    "GraphClosed",
    "GraphConfig",
    "GraphConfigError",
    "GraphError",
    "GraphKey",
    "GraphPool",
    "GraphRunner",
    "HostRing",
    "Manifest",
    "ManifestError",
    "Moved",
    "PackedTuning",
    "Plan",
    "Ran",
    "RunnerState",
    "SignatureMismatch",
    "Site",
    "StaticBuffers",
    "Ticket",
    "TokenBudgets",
    "default_ladder",
    "tune",
    "tune_packed",
    "tune_token_budgets",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'graph_cache' has no attribute {name!r}")
    return getattr(importlib.import_module(f"graph_cache.{_MODULE_OF[name]}"), name)

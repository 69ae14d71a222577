"""LLM inference engine: continuous batching over a paged KV cache, with decode steps replayed from graphs.

To embed it: `from engine import Engine, EngineConfig, SamplingParams`. The package handles requests, KV pages, models
and tokens, but no HTTP. Names are imported on first use, so that a server process need not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Engine
    from engine.errors import EngineError
    from engine.protocol.outputs import CompletionOutput, RequestOutput
    from engine.protocol.request import SamplingParams
    from engine.training.engine import TrainingEngine

_MODULE_OF = {
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "EngineError": "engine.errors",
    "CompletionOutput": "engine.protocol.outputs",
    "RequestOutput": "engine.protocol.outputs",
    "SamplingParams": "engine.protocol.request",
    "TrainingEngine": "engine.training.engine",
}

__all__ = [
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineError",
    "RequestOutput",
    "SamplingParams",
    "TrainingEngine",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)

"""Build an engine loop: an executor with the loaded model, and the loop that schedules for it."""

from __future__ import annotations

from torch import nn

from engine.checkpoint.source import ModelSource, resolve_model
from engine.config import EngineConfig
from engine.core.loop import EngineLoop
from engine.executor.build import start_executor
from engine.executor.uniproc import UniprocExecutor
from engine.worker.startup import worker_of_model


def build_loop(
    config: EngineConfig, source: ModelSource | None = None, eos_token_ids: tuple[int, ...] = ()
) -> EngineLoop:
    """Load the model and build its loop; captures nothing yet.

    `eos_token_ids`: the tokenizer's, added to the model's own. Raises ConfigError or ModelError with what to do about
    it, and EngineDead if a worker process ends during the start.
    """
    return EngineLoop(start_executor(config, source or resolve_model(config.model), eos_token_ids))


def build_megatron_loop(
    config: EngineConfig, model: nn.Module, eos_token_ids: tuple[int, ...] = (), source: ModelSource | None = None
) -> EngineLoop:
    """Build a loop around an existing Megatron-Core GPTModel. Copies no weights and captures no graphs.

    See `worker_of_model`. Raises ConfigError or ModelError.
    """
    return EngineLoop(UniprocExecutor(worker_of_model(config, model, eos_token_ids, source)))

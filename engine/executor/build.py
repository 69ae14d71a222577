"""Start the workers of a configuration: one in this process, or one process per tensor-parallel rank."""

from __future__ import annotations

from engine.checkpoint.source import ModelSource
from engine.config import EngineConfig
from engine.executor.interface import Executor
from engine.executor.uniproc import UniprocExecutor
from engine.worker.startup import WorkerStart, plan_workers


def start_executor(config: EngineConfig, source: ModelSource, eos_token_ids: tuple[int, ...] = ()) -> Executor:
    """Load the model on every rank; captures nothing yet.

    `eos_token_ids`: the tokenizer's, added to the model's own. Raises ConfigError or ModelError with what to do about
    it, and EngineDead if a worker process ends during the start.
    """
    plan = plan_workers(config, source, eos_token_ids)
    if plan.num_ranks > 1:
        from engine.executor.multiproc import start_ranks  # its imports are needed only with several processes

        return start_ranks(plan)
    start = WorkerStart(plan)
    return UniprocExecutor(start.build(start.load()))

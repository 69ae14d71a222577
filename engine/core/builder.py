"""Build an engine loop: an executor with the loaded model, and the loop that schedules for it."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from engine.checkpoint.source import ModelSource, resolve_model
from engine.config import EngineConfig
from engine.core.kv_event_publisher import open_publisher
from engine.core.loop import EngineLoop
from engine.executor.build import start_executor
from engine.executor.interface import Executor
from engine.executor.uniproc import UniprocExecutor
from engine.text.grammars.compiler import GrammarCompiler
from engine.text.grammars.vocabulary import VocabularySource
from engine.text.tokenizer import Tokenizer
from engine.utils.host_default import host_default
from engine.worker.startup import worker_of_model


def build_loop(
    config: EngineConfig, source: ModelSource | None = None, tokenizer: Tokenizer | None = None
) -> EngineLoop:
    """Load the model and build its loop; captures nothing yet.

    `tokenizer`: its end-of-text ids are added to the model's own, and grammars need it. Raises ConfigError or
    ModelError with what to do about it, and EngineDead if a worker process ends during the start.
    """
    source = source or resolve_model(config.model, progress=config.progress)
    return _loop(config, lambda: start_executor(config, source, _eos(tokenizer)), tokenizer)


def build_megatron_loop(
    config: EngineConfig, model: nn.Module, tokenizer: Tokenizer | None = None, source: ModelSource | None = None
) -> EngineLoop:
    """Build a loop around an existing Megatron-Core GPTModel. Copies no weights and captures no graphs.

    See `worker_of_model` and `build_loop`. Raises ConfigError or ModelError.
    """
    return _loop(config, lambda: UniprocExecutor(worker_of_model(config, model, _eos(tokenizer), source)), tokenizer)


def _loop(config: EngineConfig, start: Callable[[], Executor], tokenizer: Tokenizer | None) -> EngineLoop:
    """Open the publisher of KV events, if there is one, before the model loads: its address may be taken."""
    publisher = open_publisher(config)
    executor = None
    try:
        with host_default():
            executor = start()
        return EngineLoop(executor, _compiler(executor, tokenizer), publisher)
    except BaseException:
        for one in (publisher, executor):
            if one is not None:
                one.close()
        raise


def _eos(tokenizer: Tokenizer | None) -> tuple[int, ...]:
    return () if tokenizer is None else tokenizer.eos_token_ids


def _compiler(executor: Executor, tokenizer: Tokenizer | None) -> GrammarCompiler | None:
    if tokenizer is None:
        return None
    info = executor.capabilities.info
    return GrammarCompiler(VocabularySource.of(tokenizer, info.vocab_size, info.eos_token_ids))

"""Build the engine loop of a configuration: one process, or one per tensor-parallel rank."""

from __future__ import annotations

import torch

from engine.checkpoint.source import ModelSource, resolve_model
from engine.config import EngineConfig
from engine.core.builder import choose_device, choose_format, load_manifest, load_model, make_loop, read_config
from engine.core.loop import EngineLoop
from engine.worker.sizing import resolve


def build_loop(
    config: EngineConfig, source: ModelSource | None = None, eos_token_ids: tuple[int, ...] = ()
) -> EngineLoop:
    """Load the model and build the engine loop; captures nothing yet.

    `eos_token_ids`: the tokenizer's, added to the model's own. Raises ConfigError or ModelError with what to do about
    it, and EngineDead if a worker process ends during the start.
    """
    source = source or resolve_model(config.model)
    if config.tensor_parallel_size > 1:
        from engine.executor.leader import start_leader  # its imports are needed only with several processes

        return start_leader(config, source, eos_token_ids)
    device = choose_device(config.device)
    if device.type == "cpu" and config.num_threads:
        torch.set_num_threads(config.num_threads)
    model_config, is_4bit = read_config(source)
    weight_format, dtype = choose_format(config, model_config, device, is_4bit and config.load_format != "dummy")
    sized = resolve(config, model_config, device, dtype)
    model = load_model(sized, source, model_config, device, dtype, weight_format)
    eos_ids = tuple(dict.fromkeys((*model_config.eos_token_ids, *eos_token_ids)))
    manifest = load_manifest(sized, source, weight_format)
    return make_loop(sized, model, source.name, eos_ids, weight_format, manifest, EngineLoop)

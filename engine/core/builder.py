"""Build an engine loop from a configuration: choose device and dtype, load the model, create runner and loop."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from engine.checkpoint.source import ModelSource
from engine.config import EngineConfig, ResolvedConfig, cache_folder
from engine.core.loop import EngineLoop
from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ConfigError, ModelError
from engine.loader.cpu_formats import choose_cpu_format, format_dtype, gguf_config, load_gguf, quantize_model
from engine.loader.weights import load_dummy, load_hf_folder
from engine.megatron.model import MegatronModel
from engine.models.config import ModelConfig
from engine.models.dense import DenseModel
from engine.models.interface import Model
from engine.models.registry import build_model, config_from_folder
from engine.protocol.messages import ModelInfo
from engine.worker.model_runner import ModelRunner
from engine.worker.sizing import resolve
from graph_cache.manifest import Manifest

FIRST_WEIGHT_VERSION = "initial"
Loop = TypeVar("Loop", bound=EngineLoop)


def build_megatron_loop(
    config: EngineConfig, model: nn.Module, eos_token_ids: tuple[int, ...] = (), source: ModelSource | None = None
) -> EngineLoop:
    """Build a loop around an existing Megatron-Core GPTModel. Copies no weights and captures no graphs.

    Uses the model's device and dtype. `source`, if given, provides the vocabulary size without padding. Raises
    ConfigError or ModelError.
    """
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} applies only to models that the engine loads, "
            "and this model already exists: leave it out"
        )
    megatron_model = MegatronModel(model, config.max_model_len, _vocab_size(source) if source else None)
    try:
        for name, given, found in (
            ("device", config.device, str(megatron_model.device)),
            ("dtype", config.dtype, megatron_model.config.dtype),
            ("cpu_weight_format", config.cpu_weight_format, "auto"),
        ):
            if given not in ("auto", found):
                raise ConfigError(f"{name}={given!r} was requested, but the given model has {found}: leave it out")
        sized = resolve(config, megatron_model.config, megatron_model.device, megatron_model.dtype)
        return make_loop(
            sized, megatron_model, megatron_model.config.architecture, eos_token_ids, sized.dtype, None, EngineLoop
        )
    except BaseException:
        megatron_model.close()
        raise


def _vocab_size(source: ModelSource) -> int | None:
    """Return the vocabulary size of the model at `source`; None for a folder with only a tokenizer."""
    if source.kind == "hf" and not os.path.exists(os.path.join(source.path, "config.json")):
        return None
    return read_config(source)[0].vocab_size


def make_loop(
    config: ResolvedConfig,
    model: Model,
    name: str,
    eos_token_ids: tuple[int, ...],
    weight_format: str,
    manifest: Manifest | None,
    loop_class: Callable[..., Loop],
) -> Loop:
    """Create the runner and loop of a loaded model.

    `config` must have all sizes resolved. `loop_class` takes the same arguments as EngineLoop.
    """
    runner = ModelRunner(config, model, eos_token_ids, manifest)
    info = ModelInfo(
        name=name,
        architecture=model.config.architecture,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        vocab_size=model.config.vocab_size,
        eos_token_ids=eos_token_ids,
        device=config.device,
        dtype=config.dtype,
        weight_format=weight_format,
        weight_version=FIRST_WEIGHT_VERSION,
        logprobs_mode=config.logprobs_mode,
        graph_buckets=runner.site.buckets.sizes,
    )
    return loop_class(config, runner, info, manifest)


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is the first GPU, or the CPU if there is none.

    Raises ConfigError for an unknown or missing device.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is not a device; give auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported; give auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                f"device={name!r} was requested, but torch sees {count} GPUs; give cpu, or install torch with CUDA"
            )
        return torch.device("cuda", device.index or 0)
    return device


def read_config(source: ModelSource) -> tuple[ModelConfig, bool]:
    """Return the model's config and whether its weights are stored in 4 bits."""
    return gguf_config(source.path) if source.kind == "gguf" else (config_from_folder(source.path), False)


def choose_format(
    config: EngineConfig, model: ModelConfig, device: torch.device, is_4bit: bool
) -> tuple[str, torch.dtype]:
    """Return the weight format (for reports) and the activation dtype."""
    if device.type == "cpu":
        weight_format = choose_cpu_format(config.cpu_weight_format, config.dtype, is_4bit)
        return weight_format, format_dtype(weight_format)
    if config.cpu_weight_format != "auto":
        raise ConfigError(f"cpu_weight_format={config.cpu_weight_format!r} doesn't apply to {device}; leave it out")
    name = config.dtype if config.dtype != "auto" else (model.dtype or "bfloat16")
    if name == "float32" and config.dtype == "auto":
        name = "bfloat16"
    return name, getattr(torch, name)


def load_model(
    config: EngineConfig,
    source: ModelSource,
    model_config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    weight_format: str,
    parallel: TensorParallel = SINGLE_RANK,
) -> DenseModel:
    """Build the model, or this rank's shard of it, with the weights of `source` or random ones.

    Raises ModelError if the files don't fit the model, and for a GGUF file with several ranks.
    """
    if config.load_format == "dummy":
        model = build_model(model_config, dtype, device, config.max_model_len, parallel)
        load_dummy(model, config.seed)
    elif source.kind == "gguf":
        if parallel.size > 1:
            raise ModelError(f"{source.name} is a GGUF file, which can't be split over {parallel.size} ranks")
        return load_gguf(
            source.path,
            dtype=config.dtype,
            device=device,
            cpu_weight_format=weight_format if device.type == "cpu" else "auto",
            max_len=config.max_model_len,
        )[1]
    else:
        _, model = load_hf_folder(source.path, dtype, device, config.max_model_len, parallel)
    if weight_format == "int4":
        quantize_model(model)
    return model


def load_manifest(config: EngineConfig, source: ModelSource, weight_format: str) -> Manifest | None:
    """Load the graph manifest of earlier runs with the same model and sizes; None if `graph_manifest` is "none".

    An unreadable file gives an empty manifest. Nothing is written here: `Manifest.save` makes the folder.
    """
    if config.graph_manifest == "none":
        return None
    identity = f"{os.path.realpath(source.path)} {weight_format} {config.device} {config.dtype} {config.max_model_len}"
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
    path = config.graph_manifest or os.path.join(cache_folder(), "manifests", f"{fingerprint}.json")
    if os.path.isdir(path):
        raise ModelError(f"graph_manifest={path!r} is a folder; give a file, or 'none'")
    return Manifest.load(path, fingerprint)

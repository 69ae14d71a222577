"""From a configuration to a loop that can step: the composition of the engine, in the order in which things depend.

Owns device and dtype choice and which loader reads which source. Knows no requests.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

import torch
from torch import nn

from engine.config import EngineConfig, cache_folder
from engine.cpu_weights import choose_cpu_format, format_dtype, gguf_config, load_gguf, quantize_model
from engine.errors import ConfigError, ModelError
from engine.loop import EngineLoop
from engine.megatron.hosted import HostedModel
from engine.messages import ModelInfo
from engine.model_runner import ModelRunner
from engine.model_source import ModelSource, resolve_model
from engine.models.config import ModelConfig
from engine.models.dense import DenseModel
from engine.models.registry import build_model, config_from_folder
from engine.sizing import resolve
from engine.weights import load_dummy, load_hf_folder
from graph_cache.manifest import Manifest

FIRST_WEIGHT_VERSION = "initial"


def build_loop(
    config: EngineConfig, source: ModelSource | None = None, eos_token_ids: tuple[int, ...] = ()
) -> EngineLoop:
    """Load the model and put the engine together; nothing is captured yet.

    `eos_token_ids` (of the tokenizer) end a text beside the model's own. Raises ConfigError or ModelError, saying what
    to do.
    """
    source = source or resolve_model(config.model)
    if config.tensor_parallel_size > 1:
        from engine.ranks import leading_loop  # it and what it imports are for several processes only

        return leading_loop(config, source, eos_token_ids)
    device = choose_device(config.device)
    if device.type == "cpu" and config.num_threads:
        torch.set_num_threads(config.num_threads)
    model_config, is_4bit = _read_config(source)
    weight_format, dtype = choose_format(config, model_config, device, is_4bit and config.load_format != "dummy")
    sized = resolve(config, model_config, device, dtype)
    model = _load_model(sized, source, model_config, device, dtype, weight_format)
    ends = tuple(dict.fromkeys((*model_config.eos_token_ids, *eos_token_ids)))
    return loop_of(sized, model, source.name, ends, weight_format, manifest_of(sized, source, weight_format))


def host_loop(
    config: EngineConfig, model: nn.Module, eos_token_ids: tuple[int, ...] = (), source: ModelSource | None = None
) -> EngineLoop:
    """Put the engine together around a GPTModel of Megatron-Core that exists already; nothing is copied or captured.

    Device and dtype are the model's; `source`, if given, says how many tokens of a padded vocabulary there are. Raises
    ConfigError or ModelError.
    """
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} is for models that the engine loads, "
            "and this one exists already: leave it out"
        )
    hosted = HostedModel(model, config.max_model_len, _vocabulary(source) if source else None)
    try:
        for name, given, found in (
            ("device", config.device, str(hosted.device)),
            ("dtype", config.dtype, hosted.config.dtype),
            ("cpu_weight_format", config.cpu_weight_format, "auto"),
        ):
            if given not in ("auto", found):
                raise ConfigError(
                    f"{name}={given!r} was asked for, and the model that is to be served has {found}; leave it out"
                )
        sized = resolve(config, hosted.config, hosted.device, hosted.dtype)
        return loop_of(sized, hosted, hosted.config.architecture, eos_token_ids, hosted.config.dtype, None)
    except BaseException:
        hosted.release()
        raise


def _vocabulary(source: ModelSource) -> int | None:
    """How many tokens the model there has; None for a folder that holds a tokenizer alone."""
    if source.kind == "hf" and not os.path.exists(os.path.join(source.path, "config.json")):
        return None
    return _read_config(source)[0].vocab_size


def loop_of(
    config: EngineConfig,
    model: DenseModel | HostedModel,
    name: str,
    ends: tuple[int, ...],
    weight_format: str,
    manifest: Manifest | None,
    make: Callable[..., EngineLoop] = EngineLoop,
) -> EngineLoop:
    """The runner and the loop of a loaded model. `config` has all its sizes; `make` takes what EngineLoop does."""
    runner = ModelRunner(config, model, ends, manifest)
    info = ModelInfo(
        name=name,
        architecture=model.config.architecture,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        vocab_size=model.config.vocab_size,
        eos_token_ids=ends,
        device=config.device,
        dtype=config.dtype,
        weight_format=weight_format,
        weight_version=FIRST_WEIGHT_VERSION,
        logprobs_mode=config.logprobs_mode,
        graph_buckets=runner.site.buckets.sizes,
    )
    return make(config, runner, info, manifest)


def choose_device(name: str) -> torch.device:
    """The device of a name; `auto` is the first GPU, else the CPU. Raises ConfigError for one that isn't there."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is no device; give auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={name!r} is not supported; give auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ConfigError(
                f"device={name!r} was asked for, and torch sees {count} GPUs; give cpu, or install a torch with CUDA"
            )
        return torch.device("cuda", device.index or 0)
    return device


def _read_config(source: ModelSource) -> tuple[ModelConfig, bool]:
    """The model's config, and whether its weights come in 4 bits."""
    return gguf_config(source.path) if source.kind == "gguf" else (config_from_folder(source.path), False)


def choose_format(
    config: EngineConfig, model: ModelConfig, device: torch.device, is_4bit: bool
) -> tuple[str, torch.dtype]:
    """The weights' format (for reports) and the activations' dtype."""
    if device.type == "cpu":
        chosen = choose_cpu_format(config.cpu_weight_format, config.dtype, is_4bit)
        return chosen, format_dtype(chosen)
    if config.cpu_weight_format != "auto":
        raise ConfigError(f"cpu_weight_format={config.cpu_weight_format!r} was given for device {device}; leave it out")
    name = config.dtype if config.dtype != "auto" else (model.dtype or "bfloat16")
    if name == "float32" and config.dtype == "auto":
        name = "bfloat16"
    return name, getattr(torch, name)


def _load_model(
    config: EngineConfig,
    source: ModelSource,
    model_config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    weight_format: str,
) -> DenseModel:
    if config.load_format == "dummy":
        model = build_model(model_config, dtype, device, config.max_model_len)
        load_dummy(model, config.seed)
    elif source.kind == "gguf":
        return load_gguf(
            source.path,
            dtype=config.dtype,
            device=device,
            cpu_weight_format=weight_format if device.type == "cpu" else "auto",
            max_len=config.max_model_len,
        )[1]
    else:
        _, model = load_hf_folder(source.path, dtype, device, config.max_model_len)
    if weight_format == "int4":
        quantize_model(model)
    return model


def manifest_of(config: EngineConfig, source: ModelSource, weight_format: str) -> Manifest | None:
    """What earlier runs of the same model and sizes used; `graph_manifest` "none" keeps none.

    A file that can't be read is an empty manifest. Nothing is written here: `Manifest.save` makes the folder.
    """
    if config.graph_manifest == "none":
        return None
    identity = f"{os.path.realpath(source.path)} {weight_format} {config.device} {config.dtype} {config.max_model_len}"
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
    path = config.graph_manifest or os.path.join(cache_folder(), "manifests", f"{fingerprint}.json")
    if os.path.isdir(path):
        raise ModelError(f"graph_manifest={path!r} is a folder; give a file, or 'none'")
    return Manifest.load(path, fingerprint)

"""Start a worker: choose the device and the weight format, join the other ranks, load the weights, size the memory.

Every rank runs this code with the same WorkerPlan, in one process or in one per rank. The executor starts the ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from engine.checkpoint.quantization import online_quantization
from engine.checkpoint.source import ModelSource
from engine.config import EngineConfig, ResolvedConfig, cache_folder
from engine.distributed.process_group import join_ranks, leave_ranks
from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.errors import ConfigError, ModelError
from engine.layers.formats import ScaledWeight
from engine.layers.int4 import int4_available
from engine.loader.cpu_formats import build_low_bit_model, choose_cpu_format, format_dtype, gguf_config, load_gguf
from engine.loader.quantized import describe, weight_methods
from engine.loader.weights import load_dummy, load_folder_weights, safetensors_files
from engine.megatron.model import MegatronModel
from engine.models.config import ModelConfig
from engine.models.interface import Model
from engine.models.registry import build_model, config_from_folder
from engine.utils.progress import Progress
from engine.worker.releasable import new_region
from engine.worker.sizing import resolve
from engine.worker.worker import Worker
from graph_cache.backends.base import Region
from graph_cache.core.manifest import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerPlan:
    """Picklable values from which each rank builds its worker.

    - model_config: of the whole model.
    - eos_token_ids: the model's and the tokenizer's.
    - device: rank 0's; rank r uses the r-th GPU after it.
    - threads: CPU threads of a rank; None leaves torch's setting.
    """

    config: EngineConfig
    source: ModelSource
    model_config: ModelConfig
    weight_format: str
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    device: torch.device
    threads: int | None

    @property
    def num_ranks(self) -> int:
        return self.config.tensor_parallel_size


def plan_workers(config: EngineConfig, source: ModelSource, eos_token_ids: tuple[int, ...] = ()) -> WorkerPlan:
    """Validate a configuration and return its plan, before anything is loaded or any process is started.

    Raises ConfigError or ModelError for every failure that can be detected now: a missing device, too few GPUs, a GGUF
    file with several ranks, sizes that can't be split, or torch.distributed initialised in this process already.
    """
    ranks, setting = config.tensor_parallel_size, f"tensor_parallel_size={config.tensor_parallel_size}"
    if ranks > 1 and source.kind != "hf":
        raise ModelError(
            f"{source.name} is a GGUF file, found {setting}: give a folder in Hugging Face layout, or leave "
            "tensor_parallel_size out"
        )
    device = choose_device(config.device)
    if ranks > 1 and device.type == "cuda":
        if config.enable_sleep_mode:
            raise ConfigError(f"enable_sleep_mode=True is not supported with {setting} on GPUs: leave one of them out")
        count, last = torch.cuda.device_count(), device.index + ranks - 1
        if last >= count:
            raise ConfigError(
                f"{setting} starting at {device} needs GPU {last}, and torch sees {count} GPUs; "
                "lower tensor_parallel_size, or device"
            )
    model_config, stored = read_config(source)
    model_config = _with_quantization(config, source, model_config, device)
    threads = config.num_threads
    if ranks > 1:
        # without storage, only for its checks of what can be split
        first = TensorParallel(0, ranks)
        build_model(
            model_config, torch.float32, "meta", 1, first, weight_methods(model_config, first, _files(config, source))
        )
        if dist.is_initialized():
            raise ConfigError(
                f"{setting} needs to create its own process groups, and this process has initialised "
                "torch.distributed already; start the engine in another process (encore serve does)"
            )
        config = _without_cpu_graphs(config, device)
        threads = threads or max(1, torch.get_num_threads() // ranks)
    weight_format, dtype = choose_format(
        config, model_config, device, None if config.load_format == "dummy" else stored
    )
    if model_config.quantization is not None:
        logger.info("%s", describe(model_config.quantization, device, dtype))
    _say_if_lowered(config, source, model_config, dtype)
    # rejects invalid sizes; the pages are counted when the weights are loaded
    resolve(dataclasses.replace(config, num_pages=config.num_pages or 2), model_config, device, dtype)
    return WorkerPlan(
        config=config,
        source=source,
        model_config=model_config,
        weight_format=weight_format,
        dtype=dtype,
        eos_token_ids=tuple(dict.fromkeys((*model_config.eos_token_ids, *eos_token_ids))),
        device=device,
        threads=threads,
    )


def _files(config: EngineConfig, source: ModelSource) -> list[Path] | None:
    """Return the weight files of a folder; None if they are not read."""
    return None if config.load_format == "dummy" or source.kind != "hf" else safetensors_files(source.path)


def _with_quantization(
    config: EngineConfig, source: ModelSource, model: ModelConfig, device: torch.device
) -> ModelConfig:
    """Return the model's config with the quantisation that the settings ask for.

    On a CPU, `build_low_bit_model` stores int4 for the CPU's own kernel where it can. Raises ConfigError for a
    checkpoint that is quantised already.
    """
    requested, found = config.requested_quantization, model.quantization
    if requested is None or (found is not None and found.element == requested):
        return model
    if found is not None:
        raise ConfigError(
            f"quantization={requested!r}: {source.name} is quantised already ({found.method}, {found.element}); leave "
            "it out, or use the model's plain weights"
        )
    is_cpu_int4 = requested == "int4" and device.type == "cpu"
    if source.kind == "gguf" and not is_cpu_int4:
        raise ConfigError(f"quantization={requested!r}: {source.name} is a GGUF file, which is quantised already")
    single = config.tensor_parallel_size == 1 and not model.num_experts
    if is_cpu_int4 and (source.kind == "gguf" or (single and config.dtype != "float32" and int4_available())):
        return model
    return dataclasses.replace(model, quantization=online_quantization(requested))


def _say_if_lowered(config: EngineConfig, source: ModelSource, model: ModelConfig, dtype: torch.dtype) -> None:
    """Warn if `auto` settings chose bfloat16 for a checkpoint that stores more digits."""
    is_auto = config.dtype == "auto" and config.cpu_weight_format == "auto" and config.load_format != "dummy"
    is_auto = is_auto and model.quantization is None and config.requested_quantization is None
    if is_auto and source.kind == "hf" and dtype == torch.bfloat16 and model.dtype in ("float32", "float16"):
        logger.warning(
            "%s is stored in %s and runs in bfloat16, as dtype='auto' chooses here; for log-probabilities that agree "
            "with a trainer's, set dtype to the trainer's (--dtype)",
            source.name, model.dtype,
        )  # fmt: skip


def _without_cpu_graphs(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Disable graphs on a CPU: the CPU tape can't record gloo collectives."""
    if device.type != "cpu" or not config.graph_config().captures_inference:
        return config
    logger.warning(
        "tensor_parallel_size=%d on a CPU: its collectives can't be captured there, so all steps run eager",
        config.tensor_parallel_size,
    )
    return dataclasses.replace(config, inference_cuda_graph_scope="none")


class WorkerStart:
    """The stages in which a rank starts its worker.

    The stages, in order: `join` (with several ranks), `load`, `build`. In `join` and `build` the ranks wait for each
    other.
    """

    def __init__(self, plan: WorkerPlan, rank: int = 0):
        self._plan, self._rank = plan, rank
        self._parallel = SINGLE_RANK
        self._model: Model | None = None
        self._sized: ResolvedConfig | None = None
        self._manifest: Manifest | None = None
        self._weights: Region | None = None
        self._previous_threads: int | None = None
        if plan.device.type == "cuda":
            self.device = torch.device("cuda", plan.device.index + rank)
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)  # an unusable GPU fails here, before other ranks wait for this one
            from engine.kernels.compile_ahead import hash_triton  # triton is installed only with CUDA

            hash_triton()  # while the weights load
        else:
            self.device = plan.device
            if plan.threads is not None:
                if plan.num_ranks > 1:
                    self._previous_threads = torch.get_num_threads()
                torch.set_num_threads(plan.threads)

    def join(self, rendezvous: str) -> None:
        """Create the process group of all ranks through the file `rendezvous` (see `join_ranks`)."""
        self._parallel = join_ranks(rendezvous, self._rank, self._plan.num_ranks, self.device)

    def load(self) -> int:
        """Load this rank's weights and return the number of KV pages that fit in its memory."""
        plan = self._plan
        if plan.config.enable_sleep_mode:
            self._weights = new_region(self.device)
        model = self._model = load_model(
            plan.config,
            plan.source,
            plan.model_config,
            self.device,
            plan.dtype,
            plan.weight_format,
            self._parallel,
            self._weights,
        )
        self._sized = resolve(plan.config, model.config, self.device, plan.dtype)
        if self._rank == 0:  # the other ranks capture what rank 0 tells them to
            self._manifest = load_manifest(self._sized, plan.source, plan.weight_format)
        return self._sized.num_pages

    def build(self, num_pages: int) -> Worker:
        """Build the worker with `num_pages` KV pages, the same number on all ranks."""
        plan, model, sized = self._plan, self._model, self._sized
        if model is None or sized is None:
            raise RuntimeError("call load() before build()")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # set per thread, and this may run in another one than __init__
        return Worker(
            dataclasses.replace(sized, num_pages=num_pages),
            model,
            plan.eos_token_ids,
            name=plan.source.name,
            weight_format=plan.weight_format,
            manifest=self._manifest,
            parallel=self._parallel,
            weights=self._weights,
            on_close=self.leave,
        )

    def leave(self) -> None:
        """Destroy the process group, if there is one, and restore the number of threads."""
        if self._previous_threads is not None:
            torch.set_num_threads(self._previous_threads)
        if self._plan.num_ranks > 1:
            leave_ranks(self.device)


def worker_of_model(
    config: EngineConfig, module: nn.Module, eos_token_ids: tuple[int, ...] = (), source: ModelSource | None = None
) -> Worker:
    """Build a worker around an existing Megatron-Core GPTModel. Copies no weights.

    Uses the model's device and dtype. `source`, if given, provides the vocabulary size without padding. Raises
    ConfigError or ModelError.
    """
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} applies only to models that the engine loads, "
            "and this model already exists: leave it out"
        )
    if config.enable_sleep_mode:
        raise ConfigError(
            "enable_sleep_mode=True applies only to models that the engine loads, and this model's weights belong to "
            "the caller: leave it out"
        )
    model = MegatronModel(module, config.max_model_len, _vocab_size(source) if source else None)
    try:
        for name, given, found in (
            ("device", config.device, str(model.device)),
            ("dtype", config.dtype, model.config.dtype),
            ("cpu_weight_format", config.cpu_weight_format, "auto"),
            ("quantization", config.quantization or "auto", "no quantised weights"),
        ):
            if given not in ("auto", found):
                raise ConfigError(f"{name}={given!r} was requested, but the given model has {found}: leave it out")
        sized = resolve(config, model.config, model.device, model.dtype)
        return Worker(sized, model, eos_token_ids, name=model.config.architecture, weight_format=sized.dtype)
    except BaseException:
        model.close()
        raise


def _vocab_size(source: ModelSource) -> int | None:
    """Return the vocabulary size of the model at `source`; None for a folder with only a tokenizer."""
    if source.kind == "hf" and not os.path.exists(os.path.join(source.path, "config.json")):
        return None
    return read_config(source)[0].vocab_size


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


def read_config(source: ModelSource) -> tuple[ModelConfig, str | None]:
    """Return the model's config, and the format in which a CPU keeps the codes of its weights, if it can."""
    return gguf_config(source.path) if source.kind == "gguf" else (config_from_folder(source.path), None)


def choose_format(
    config: EngineConfig, model: ModelConfig, device: torch.device, stored: str | None
) -> tuple[str, torch.dtype]:
    """Return the weight format (for reports) and the activation dtype. `stored`: see `choose_cpu_format`."""
    quantization = model.quantization
    if device.type == "cpu":
        requested = config.requested_quantization or config.cpu_weight_format
        if quantization is not None:
            requested = "auto" if config.cpu_weight_format == "int4" else config.cpu_weight_format
        weight_format = choose_cpu_format(requested, config.dtype, stored)
        return quantization.element if quantization else weight_format, format_dtype(weight_format)
    if config.cpu_weight_format != "auto":
        raise ConfigError(f"cpu_weight_format={config.cpu_weight_format!r} doesn't apply to {device}; leave it out")
    name = config.dtype if config.dtype != "auto" else (model.dtype or "bfloat16")
    if name == "float32" and config.dtype == "auto":
        name = "bfloat16"
    return quantization.element if quantization else name, getattr(torch, name)


def load_model(
    config: EngineConfig,
    source: ModelSource,
    model_config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    weight_format: str,
    parallel: TensorParallel = SINGLE_RANK,
    region: Region | None = None,
) -> Model:
    """Build the model, or this rank's shard of it, with the weights of `source` or random ones.

    `region`: where to place its weights. Raises ModelError if the files don't fit the model, and for a GGUF file with
    several ranks.
    """
    if source.kind == "gguf" and config.load_format != "dummy":
        if parallel.size > 1:
            raise ModelError(f"{source.name} is a GGUF file, which can't be split over {parallel.size} ranks")
        with _placed_in(region), _load_progress(config, source, parallel) as progress:
            return load_gguf(
                source.path,
                dtype=config.dtype,
                device=device,
                cpu_weight_format=weight_format if device.type == "cpu" else "auto",
                max_len=config.max_model_len,
                progress=progress,
            )[1]
    model: Model
    if model_config.quantization is not None:
        methods = weight_methods(model_config, parallel, _files(config, source))
        with _placed_in(region):
            model = build_model(model_config, dtype, device, config.max_model_len, parallel, methods)
        if not any(isinstance(getattr(one, "method", None), ScaledWeight) for one in model.module.modules()):
            raise ModelError(
                f"{source.name} has no linear layer that is stored quantised ({model_config.quantization}): leave "
                "quantization out, or download the model again"
            )
    elif weight_format == "int4":
        model = build_low_bit_model(model_config, dtype, config.max_model_len, parallel)
    else:
        with _placed_in(region):
            model = build_model(model_config, dtype, device, config.max_model_len, parallel)
    if config.load_format == "dummy":
        load_dummy(model, config.seed)
    else:
        with _load_progress(config, source, parallel) as progress:
            load_folder_weights(model, source.path, progress)
    return model


def _placed_in(region: Region | None) -> AbstractContextManager[None]:
    return nullcontext() if region is None else region.allocation()


def _load_progress(config: EngineConfig, source: ModelSource, parallel: TensorParallel) -> Progress:
    return Progress(f"loading {source.name}", "tensors", enabled=config.progress and parallel.is_first)


def load_manifest(config: EngineConfig, source: ModelSource, weight_format: str) -> Manifest | None:
    """Load the graph manifest of earlier runs with the same model and sizes; None if `graph_manifest` is "none".

    An unreadable file gives an empty manifest. Nothing is written here: `Manifest.save` makes the folder.
    """
    if config.graph_manifest == "none":
        return None
    identity = f"{os.path.realpath(source.path)} {weight_format} {config.device} {config.dtype} {config.max_model_len}"
    fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
    label = re.sub(r"[^\w.-]+", "-", os.path.basename(source.name.rstrip("/")))[:64]
    path = config.graph_manifest or os.path.join(cache_folder(), "manifests", f"{label}-{fingerprint}.json")
    if os.path.isdir(path):
        raise ModelError(f"graph_manifest={path!r} is a folder; give a file, or 'none'")
    return Manifest.load(path, fingerprint)

"""One tensor-parallel rank of a model: validation, process group, weights and the engine loop.

Every rank runs this code with the same ShardPlan. leader.py starts the ranks and sends them calls.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engine.checkpoint.source import ModelSource
from engine.config import EngineConfig, ResolvedConfig
from engine.core.builder import Loop, choose_device, choose_format, load_model, make_loop
from engine.distributed.collectives import TensorParallelCollectives
from engine.distributed.process_group import join_ranks, leave_ranks
from engine.distributed.tensor_parallel import TensorParallel
from engine.errors import ConfigError, ModelError
from engine.models.config import ModelConfig
from engine.models.dense import DenseModel
from engine.models.registry import build_model, config_from_folder
from engine.worker.sizing import resolve
from graph_cache.manifest import Manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Picklable values from which each rank builds its shard. `device` is rank 0's."""

    config: EngineConfig
    source: ModelSource
    spec: ModelConfig
    weight_format: str
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    device: torch.device
    threads: int

    @property
    def ranks(self) -> int:
        return self.config.tensor_parallel_size


def plan_shards(config: EngineConfig, source: ModelSource, eos_token_ids: tuple[int, ...]) -> ShardPlan:
    """Validate a configuration with tensor_parallel_size > 1 and return its plan, before any process is started.

    Raises ConfigError or ModelError for every failure that can be detected now: too few GPUs, a GGUF file, sizes that
    can't be split, or torch.distributed initialised in this process already.
    """
    setting = f"tensor_parallel_size={config.tensor_parallel_size}"
    if source.kind != "hf":
        raise ModelError(
            f"{source.name} is a GGUF file, found {setting}: give a folder in Hugging Face layout, or leave "
            "tensor_parallel_size out"
        )
    device = choose_device(config.device)
    if device.type == "cuda":
        count, last = torch.cuda.device_count(), device.index + config.tensor_parallel_size - 1
        if last >= count:
            raise ConfigError(
                f"{setting} starting at {device} needs GPU {last}, and torch sees {count} GPUs; "
                "lower tensor_parallel_size, or device"
            )
    spec = config_from_folder(source.path)
    # without storage, only for its checks of what can be split
    build_model(spec, torch.float32, "meta", 1, TensorParallel(0, config.tensor_parallel_size))
    if dist.is_initialized():
        raise ConfigError(
            f"{setting} needs process groups of its own, and this process has initialised "
            "torch.distributed already; start the engine in another process (encore serve does)"
        )
    weight_format, dtype = choose_format(config, spec, device, False)
    resolve(dataclasses.replace(config, num_pages=config.num_pages or 2), spec, device, dtype)  # rejects invalid sizes
    eos_ids = tuple(dict.fromkeys((*spec.eos_token_ids, *eos_token_ids)))
    return ShardPlan(
        config=_without_cpu_graphs(config, device),
        source=source,
        spec=spec,
        dtype=dtype,
        eos_token_ids=eos_ids,
        weight_format=weight_format,
        device=device,
        threads=config.num_threads or max(1, torch.get_num_threads() // config.tensor_parallel_size),
    )


class Shard:
    """One rank: its process group, its shard of the model and its loop.

    Call the methods in the order in which they are defined.
    """

    def __init__(self, plan: ShardPlan, rank: int):
        self.plan, self.rank = plan, rank
        self._has_joined = False
        self._parallel: TensorParallel | None = None
        self._model: DenseModel | None = None
        self._sized: ResolvedConfig | None = None
        self._collectives: TensorParallelCollectives | None = None
        if plan.device.type == "cuda":
            self.device = torch.device("cuda", plan.device.index + rank)
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)  # an unusable GPU fails here, before other ranks wait for this one
        else:
            self.device = plan.device
            self._threads = torch.get_num_threads()
            torch.set_num_threads(plan.threads)

    def join(self, rendezvous: str) -> None:
        """Create the process group through the file `rendezvous` (see `join_ranks`)."""
        self._has_joined = True
        self._parallel = join_ranks(rendezvous, self.rank, self.plan.ranks, self.device)

    def load(self) -> int:
        """Load this rank's weights and return the number of KV pages that fit in its memory."""
        if self._parallel is None:
            raise RuntimeError("call join() before load()")
        plan = self.plan
        model = self._model = load_model(
            plan.config, plan.source, plan.spec, self.device, plan.dtype, plan.weight_format, self._parallel
        )
        self._sized = resolve(plan.config, model.config, self.device, plan.dtype)
        return self._sized.num_pages

    def loop(self, num_pages: int, manifest: Manifest | None, make: Callable[..., Loop]) -> Loop:
        """Build this rank's loop with `make`. A collective call: all ranks must call it together.

        `num_pages` and `manifest` must be the same on all ranks, because every decision of the loops follows from them.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # as in `join`
        plan, model = self.plan, self._model
        if model is None:
            raise RuntimeError("call load() before loop()")
        sized = dataclasses.replace(self.sized, num_pages=num_pages)
        loop = make_loop(sized, model, plan.source.name, plan.eos_token_ids, plan.weight_format, manifest, make)
        self._collectives = loop.runner.step_model.collectives
        loop.runner.cache.must_capture = (
            True  # graphs hold collectives: if one rank fell back to eager, the others would hang
        )
        return loop

    @property
    def sized(self) -> ResolvedConfig:
        """The configuration with all sizes resolved for this rank's memory."""
        if self._sized is None:
            raise RuntimeError("call load() before sized")
        return self._sized

    def abandon(self) -> None:
        """Abort GPU work that waits for a lost rank. May block, so call it from a separate thread.

        Does nothing with gloo, where a broken connection raises at once.
        """
        parallel, collectives = self._parallel, self._collectives
        if parallel is not None and parallel.group is not None and self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            if collectives is not None:
                collectives.abandon()
            parallel.group.abort()

    def leave(self) -> None:
        """Destroy the process group. Drop the graphs first: a communicator waits for graphs that captured it."""
        if self.device.type == "cpu":
            torch.set_num_threads(self._threads)
        if self._has_joined:
            self._parallel = self._collectives = None
            leave_ranks(self.device)


def _without_cpu_graphs(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Disable graphs on a CPU: the CPU tape can't record gloo collectives."""
    if device.type != "cpu" or not config.graph_config().captures_inference:
        return config
    logger.warning(
        "tensor_parallel_size=%d on a CPU: its collectives can't be captured there, so all steps run eager",
        config.tensor_parallel_size,
    )
    return dataclasses.replace(config, inference_cuda_graph_scope="none")
